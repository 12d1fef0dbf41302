"""Law: a LightningModule whose step is followed trains with a store as without one, bit for bit."""

import pytest
import torch

from pipeback.streaming.store import HostStore
from tests.helpers.choice import mostly_rare
from tests.lightning import ranks
from tests.lightning.cases import strategy
from tests.lightning.followed_kinds import (
    KINDS,
    SLICES,
    Between,
    BetweenCured,
    Child,
    Cured,
    Deep,
    FrozenBetween,
    FrozenCured,
    FrozenInside,
    FrozenInValidation,
    Looking,
    LookingAside,
    Owning,
    Teacher,
    ValidatedAutoencoder,
    ValidatedHeads,
    close,
    fit,
    result,
    resumed,
)
from tests.lightning.several_modules import Convolutions, Weighted, fitted

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("small")]
STORES = {"host": lambda folder: "host", "ahead": lambda folder: HostStore(prefetch=3), "disk": "disk:{}".format}
CASES = {
    "pb": {},
    "gpipe, slices, accumulated, dropout set": dict(
        method="gpipe", given=SLICES, accumulate_grad_batches=2, callbacks=[ranks.Dropout()]
    ),
    "cerebras, slices, clipped": dict(method="cerebras", given=SLICES, gradient_clip_val=0.1),
    "pipedream, sanity checked": dict(method="pipedream", given={"stages": "layer"}, num_sanity_val_steps=2),
    "spectrain, drained": dict(method="spectrain", given={"drain": "validation"}, val_check_interval=0.5),
    "gpipe, recomputed, in float64": dict(method="gpipe", given={"activations": "recompute"}, precision="64-true"),
}


@pytest.mark.parametrize(("kind", "case", "store"), mostly_rare(
    [(kind, case, store) for kind in KINDS for case in CASES for store in STORES],
    (Convolutions, "cerebras, slices, clipped", "host"), (ValidatedHeads, "pipedream, sanity checked", "disk"),
    (ValidatedAutoencoder, "gpipe, slices, accumulated, dropout set", "ahead"), (Teacher, "spectrain, drained", "disk"),
    (Weighted, "pb", "host"), (Child, "gpipe, recomputed, in float64", "disk"),
    (FrozenBetween, "gpipe, slices, accumulated, dropout set", "host"),
))  # fmt: skip
def test_streamed_is_resident(kind, case, store, tmp_path):
    options, given = CASES[case], CASES[case].get("given", {})
    found = result(kind, 1, **{**options, "given": {**given, "store": STORES[store](tmp_path)}})
    assert ranks.differences(found, result(kind, 1, **options)) == []


@pytest.mark.parametrize(("kind", "store"), mostly_rare(
    [(kind, store) for kind in (Convolutions, ValidatedHeads, Teacher) for store in ("host", "disk")],
    (Convolutions, "disk"), (ValidatedHeads, "host"),
))  # fmt: skip
def test_a_checkpoint_in_flight_goes_on(kind, store, tmp_path):
    wanted = resumed(kind, 1, str(tmp_path / "one"))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    found = resumed(kind, 1, str(tmp_path / "two"), [STORES[store](tmp_path / folder) for folder in ("a", "b")])
    assert ranks.differences(found, wanted) == []
    there = result(kind, 1, "cerebras", ckpt=tmp_path / "two" / "flying.ckpt")
    assert ranks.differences(there, wanted) == []


def test_weights_leave_the_device():
    run, _ = fit(Deep, 1, "gpipe", given={"store": "host", "micro_batch_size": 2})
    assert run.strategy.pipeline.traffic().peak_stages == 2


@pytest.mark.parametrize(("kind", "message"), [
    (Looking, "training_step calls self.encoder without gradients, .*stages.* use .detach.*store=None"),
    (LookingAside, "training_step calls self.conv1 without gradients, .*stages.* use .detach.*store=None"),
    (Owning, "uses the weight 'scale' of the model, .*keep it as an attribute"),
    (FrozenInside, "training_step calls self.teacher itself, .*give training_step a copy, self.own = copy.deepcopy"),
    (FrozenInValidation, "self.teacher was called, but its weights are in stages .*call self instead"),
    (Between, "self.encoder was called, but its weights are in .*store, .*validation_step.*store=None"),
])  # fmt: skip
def test_calls_that_no_stage_serves(kind, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        result(kind, 1, given={"store": "host"})


def test_what_training_step_may_not_call_is_refused_before_it_trains():
    module = FrozenInside()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ValueError, match="or use devices=1 and store=None"):
        fitted(module, strategy("pb", store="host", micro_batch_size=2))
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("kind", [Cured, BetweenCured, FrozenCured])
def test_the_cures(kind):
    assert ranks.differences(result(kind, 1, given={"store": "host"}), result(kind, 1)) == []


@pytest.mark.parametrize("method", mostly_rare(["pb", "cerebras", "pipedream"], "cerebras"))
def test_stages_run_as_one(method):
    options = dict(method=method, precision="64-true")
    given = {**SLICES, "vectorize": True, "store": HostStore(prefetch=11)}
    run, module = fit(Deep, 1, given=given, **options)
    assert any(word.startswith("as one") for word in run.strategy.vectorized.values())
    close(ranks.outcome(run, module), result(Deep, 1, given=SLICES, **options))


def test_threads_share_the_stages():
    found = result(ValidatedHeads, 1, given={"workers": 2, "store": "host"})
    assert ranks.differences(found, result(ValidatedHeads, 1)) == []


def test_a_model_without_values():
    """It cannot run once to be followed."""
    with torch.device("meta"):
        module = Weighted()
    with pytest.raises(ValueError, match="Weighted is on the meta device, .*build it with its values; or write an"):
        fitted(module, strategy("gpipe", store="host"))
    assert fitted(Weighted, strategy("gpipe", store="host")).seen
