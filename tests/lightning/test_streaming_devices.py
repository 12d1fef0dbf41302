"""Several devices that stream their own stages."""

from functools import partial

import pytest
import torch

from pipeback.lightning import PipelineStrategy
from tests.helpers.choice import mostly_rare
from tests.laws.cases import STAGES
from tests.lightning import ranks
from tests.lightning.cases import Regression, loader, trainer
from tests.lightning.streamed import equal, fitted, same, streamed

pytestmark = pytest.mark.usefixtures("small")


def test_the_name_is_registered():
    module = Regression()
    run = trainer("pipeback_streaming")
    assert isinstance(run.strategy, PipelineStrategy)
    run.fit(module, loader())
    assert run.strategy.pipeline.traffic().fetches
    same(module, fitted(None)[1])


DEVICES = {
    "pb": dict(method="pb", gradient_clip_val=0.1),
    "cerebras, everything random": dict(
        method="cerebras", module=ranks.Whole, data=partial(ranks.shuffled, samples=8),
        val=partial(loader, 3, samples=4),
    ),
    "gpipe, slices": dict(
        method="gpipe", given={"micro_batch_size": 2}, data=partial(loader, samples=5), val=partial(loader, 2)
    ),
    "gpipe, everything random": dict(
        method="gpipe", given={"micro_batch_size": 4}, module=ranks.Whole, data=partial(loader, samples=8),
        precision="bf16-true",
    ),
    "gpipe, accumulated slices": dict(
        method="one_f_one_b", given={"micro_batch_size": 2}, data=partial(loader, samples=5), accumulate_grad_batches=5
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", mostly_rare(DEVICES, "pb", "gpipe, slices"))
def test_devices_stream_their_own_stages(case, tmp_path, crew):
    options = DEVICES[case]
    run, module = ranks.fit(devices=1, **options)
    wanted = ranks.outcome(run, module)
    run.save_checkpoint(tmp_path / "one.ckpt")
    one = torch.load(tmp_path / "one.ckpt", weights_only=True)
    for store in ("host", f"disk:{tmp_path}"):
        for found, traffic in crew.ranks(2).run(streamed, store, tmp_path, **options):
            assert ranks.differences(found, wanted) == []
            assert traffic.peak_stages == 2
        two = torch.load(tmp_path / "two.ckpt", weights_only=True)
        assert equal(one["state_dict"], two["state_dict"])
        assert equal(one["optimizer_states"], two["optimizer_states"])
        if case == "gpipe, slices":
            assert traffic.fetches <= 24 * 2 * STAGES


class Early(Regression):
    """Asks the model before it trains it, or after it."""

    late = False

    def look(self, x):
        self.model.eval()
        with torch.no_grad():
            self.log("seen", self.model(x).sum())
        self.model.train()

    def training_step(self, batch, batch_idx):
        if not self.late:
            self.look(batch[0])
        loss = super().training_step(batch, batch_idx)
        if self.late:
            self.look(batch[0])
        return loss


class Late(Early):
    late = True


@pytest.mark.filterwarnings("ignore")
def test_devices_and_a_call_without_gradients(crew):
    options = dict(method="gpipe", given={"micro_batch_size": 1, "store": "host"})
    for module in (Early, Late):
        wanted = ranks.result(devices=1, module=module, **options)
        resident = ranks.result(devices=1, module=module, **{**options, "given": {"micro_batch_size": 1}})
        assert ranks.differences(wanted, resident) == []
        crew.ranks(2).start(ranks.result, devices=2, module=module, **options)
        for rank, found in enumerate(crew.results()):
            if module is Early:
                assert ranks.differences(found, wanted) == [], rank
            else:
                assert isinstance(found, RuntimeError) and "call it before" in str(found)
    crew.again()
