"""Law: a LightningModule whose step is followed trains on several devices as on one, bit for bit."""

import re

import pytest

from pipeback import TensorParallel
from tests.helpers.choice import mostly_rare, rare
from tests.lightning import ranks
from tests.lightning.followed_kinds import (
    KINDS,
    SLICES,
    Between,
    BetweenCured,
    Child,
    Cured,
    Deep,
    Early,
    FrozenBetween,
    FrozenCured,
    FrozenInside,
    FrozenInValidation,
    Late,
    Looking,
    LookingAside,
    Objects,
    Owning,
    Teacher,
    ValidatedAutoencoder,
    ValidatedHeads,
    close,
    fit,
    result,
    resumed,
)
from tests.lightning.several_modules import Convolutions, Weighted

pytestmark = pytest.mark.filterwarnings("ignore")


def equal(crew, wanted, kind, *args, count=2, **options):
    for rank, found in enumerate(crew.ranks(count).run(result, kind, count, *args, **options)):
        assert ranks.differences({**found, "losses": None if rank else found["losses"]}, wanted) == [], rank


CASES = {
    "pb": {},
    "cerebras, slices, clipped": dict(method="cerebras", given=SLICES, gradient_clip_val=0.1),
    "gpipe, slices, accumulated": dict(method="gpipe", given=SLICES, accumulate_grad_batches=2),
    "pipedream on three, sanity checked": dict(
        method="pipedream", count=3, num_sanity_val_steps=2, given={"stages": "layer"}
    ),
    "spectrain, drained": dict(method="spectrain", given={"drain": "validation"}, val_check_interval=0.5),
    "pb, in float64": dict(precision="64-true"),
    "pb, dropout set": dict(callbacks=[ranks.Dropout()]),
    "cerebras, from host memory": dict(method="cerebras", given={"store": "host"}),
    "gpipe, slices, from host memory": dict(method="gpipe", given={**SLICES, "store": "host"}),
}


@pytest.mark.parametrize(("kind", "case"), mostly_rare(
    [(kind, case) for kind in KINDS for case in CASES if kind in KINDS[:3] or "on three" not in case],
    (Convolutions, "cerebras, slices, clipped"), (ValidatedHeads, "pipedream on three, sanity checked"),
    (ValidatedAutoencoder, "gpipe, slices, accumulated"), (Teacher, "spectrain, drained"), (Weighted, "pb"),
    (Child, "pb, in float64"), (Teacher, "pb, dropout set"), (FrozenBetween, "cerebras, slices, clipped"),
))  # fmt: skip
def test_devices_are_one_device(kind, case, crew):
    options = dict(CASES[case])
    count = options.pop("count", 2)
    resident = {key: value for key, value in options.get("given", {}).items() if key != "store"}
    wanted = result(kind, 1, **{**options, "given": resident})
    equal(crew, wanted, kind, count=count, **options)


@pytest.mark.parametrize("kind", mostly_rare([Convolutions, ValidatedHeads, Teacher], ValidatedHeads))
def test_a_checkpoint_in_flight_goes_on(kind, crew, tmp_path):
    wanted = resumed(kind, 1, str(tmp_path / "one"))
    for found in crew.ranks(2).run(resumed, kind, 2, str(tmp_path / "two"))[:1]:
        assert ranks.differences(found, wanted) == []
    there = result(kind, 1, "cerebras", ckpt=tmp_path / "two" / "flying.ckpt")
    assert ranks.differences(there, wanted) == []


def told(*args, **options):
    run, module = fit(*args, **options)
    return ranks.outcome(run, module), dict(run.strategy.vectorized)


@pytest.mark.parametrize(("kind", "method"), mostly_rare(
    [(kind, method) for kind in (Deep, ValidatedHeads) for method in ("pb", "cerebras", "gpipe")],
    (Deep, "cerebras"),
))  # fmt: skip
def test_stages_of_a_device_run_as_one(kind, method, crew):
    options, way = dict(method=method, precision="64-true"), True if kind is Deep else "auto"
    wanted = result(kind, 1, given={**SLICES, "vectorize": False}, **options)
    for found, words in crew.ranks(2).run(told, kind, 2, given={**SLICES, "vectorize": way}, **options):
        assert kind is not Deep or any(word.startswith("as one") for word in words.values()), words
        close(found, wanted)


def test_devices_compute_stages_together(crew):
    plan = {"blocks.*.1": "colwise_gather_output"}
    wanted = result(Deep, 1, precision="64-true")
    given = {"tensor_parallel": TensorParallel(2, plan=plan)}
    for found in crew.ranks(2).run(result, Deep, 2, given=given, precision="64-true"):
        close(found, wanted)


# -- what is refused ---------------------------------------------------------------------------------------------------


def raised(kind, devices):
    try:
        result(kind, devices)
    except Exception as error:
        return type(error).__name__, "".join([str(error), *getattr(error, "__notes__", [])]).replace("\n", " ")


@pytest.mark.parametrize(("kind", "message"), [
    (Looking, "ValueError: training_step calls self.encoder without gradients, .*stages.* use .detach"),
    (LookingAside, "ValueError: training_step calls self.conv1 without gradients, .*stages.* use .detach"),
    (Objects, "Unmade: .*lists, tuples and dictionaries"),
    rare(Late, "RankError: .*same calls.*set what the forward reads before the call, or in a hook"),  # they wait long
    (Owning, "ValueError: .*uses the weight 'scale' of the model, .*keep it as an attribute"),
    (FrozenInside, "ValueError: training_step calls self.teacher itself, and self uses it, .*self.own = copy.deepcopy"),
    (FrozenInValidation, "RuntimeError: self.teacher was called, but its weights are in stages .*call self instead"),
    (Between, "RuntimeError: self.encoder was called, but its weights are in stages .*validation_step"),
])  # fmt: skip
def test_calls_that_no_stage_serves(kind, message, crew):
    for name, text in crew.ranks(2).run(raised, kind, 2):  # one that hears of the other's error first tells it
        assert re.match(f"(RankError: rank .*: )?{message}", f"{name}: {text}"), text


@pytest.mark.parametrize("kind", [Cured, BetweenCured, Early, FrozenCured])
def test_the_cures(kind, crew):
    equal(crew, result(kind, 1), kind)
