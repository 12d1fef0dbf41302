"""Law: over several devices, stages of a device that run as one train what the event loop trains on one device, to
rounding: weights, losses, what is logged, and what goes on from a checkpoint in flight.
"""

from functools import partial

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from pipeback.streaming.store import HostStore
from tests.helpers.choice import mostly_rare
from tests.laws import as_one
from tests.laws.as_one import same
from tests.lightning import ranks
from tests.lightning.cases import Regression

pytestmark = pytest.mark.filterwarnings("ignore")

SLICES = {"micro_batch_size": 2}
CASES = {
    "pb": (2, {}),
    "cerebras, clipped": (2, dict(method="cerebras", gradient_clip_val=0.01)),
    "pipedream on three": (3, dict(method="pipedream")),
    "spectrain, validated": (2, dict(method="spectrain", val=partial(ranks.doubled, 2), val_check_interval=0.5)),
    "pb, a slice per batch": (2, dict(given={"micro_batch_size": None})),
    "pb, in float64": (2, dict(module=ranks.single, data=ranks.singles, precision="64-true")),
    "gpipe": (2, dict(method="gpipe")),
    "pb, from host memory": (2, dict(given={**SLICES, "store": HostStore(prefetch=5)})),
    "gap_aware, from host memory": (3, dict(method="gap_aware", given={**SLICES, "store": HostStore(prefetch=3)})),
    "interleaved": (2, dict(method="interleaved", given={**SLICES, "vectorize": "auto"})),
}


def told(*args, given=(), **options):
    """What a rank has of a fit, and which stages run as one."""
    run, module = ranks.fit(*args, **{"module": ranks.deep, "data": ranks.doubled, **options, "given": dict(given)})
    return ranks.outcome(run, module), dict(run.strategy.vectorized)


def near(found, wanted):
    assert found["weights"].keys() == wanted["weights"].keys()
    some = [(value, wanted["weights"][name]) for name, value in found["weights"].items()]
    same(*zip(*some, strict=True), within=1e-9)
    if found["losses"] is not None:
        same([found["losses"]], [wanted["losses"]], within=1e-9)
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-9)
    assert found["step"] == wanted["step"]


@pytest.mark.parametrize("case", mostly_rare(CASES, "cerebras, clipped", "pb, from host memory"))
def test_devices_are_the_event_loop(case, crew):
    count, options = CASES[case]
    given = options.get("given", SLICES)
    wanted, _ = told(devices=1, **{**options, "given": {**given, "vectorize": False}})
    options = {**options, "given": {"vectorize": True, **given}}
    for found, words in crew.ranks(count).run(told, devices=count, **options):
        near(found, wanted)
        as_one = any(word.startswith("as ") for word in words.values())
        assert as_one == (case != "interleaved"), words


def from_a_checkpoint(folder, vectorize, **options):
    """Train four batches of an epoch, save what is in flight, and go on from there in another fit."""
    given = {**SLICES, "vectorize": vectorize}
    saving = ModelCheckpoint(dirpath=folder, filename="flying", every_n_train_steps=4)
    ranks.fit(
        module=ranks.deep, data=ranks.doubled, max_epochs=1, given=given, callbacks=[saving],
        enable_checkpointing=True, **options,
    )  # fmt: skip
    return told(ckpt=f"{folder}/flying.ckpt", max_epochs=3, given=given, **options)


def test_a_checkpoint_in_flight_goes_on(crew, tmp_path):
    wanted, _ = from_a_checkpoint(str(tmp_path / "one"), False, devices=1)
    for found, _ in crew.ranks(2).run(from_a_checkpoint, str(tmp_path / "two"), True, devices=2):
        near(found, wanted)
    apart = {"given": {**SLICES, "vectorize": False}, "devices": 1}
    with pytest.raises(ValueError, match="in flight in stage.*which ran as one.*vectorize=True"):  # so it was
        told(ckpt=str(tmp_path / "two" / "flying.ckpt"), **apart)


class Failing(Regression):
    """Fails amid a batch, in the loss of its second slice."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3 and len(self.losses) % 3 == 2:
            raise ArithmeticError("the loss of this slice fails")
        return loss


def failing():
    return Failing(as_one.model(), scheduler=ranks.cycle)


def what_is_raised(**options):
    try:
        ranks.fit(module=failing, data=ranks.doubled, given={**SLICES, "vectorize": True}, **options)
    except Exception as error:
        return type(error).__name__, str(error)


def test_an_error_in_training_step_ends_all_ranks(crew):
    (kind, text), (other, told) = crew.ranks(2).run(what_is_raised, devices=2)
    assert (kind, text) == ("ArithmeticError", "the loss of this slice fails")
    assert other == "RankError" and "ArithmeticError" in told and "the loss of this slice fails" in told
