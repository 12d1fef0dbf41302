"""Law: a fit with `precision="bf16-mixed"` of stages that run as one has the bits of a fit whose modules and loss enter
autocast by themselves, and what the event loop trains to the rounding of bfloat16.
"""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from pipeback import HostStore
from tests.fuzz.models import Followed
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import S, block, same, share_equally
from tests.laws.cases import STEADY, allowed
from tests.laws.test_vectorized_autocast import ROUNDED, Own, OwnLoss
from tests.lightning.cases import TensorDataset, dataset
from tests.lightning.test_as_one import BATCHES, Seeing, fitted

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def build(inside):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), *[block() for _ in range(S - 2)], nn.Linear(6, 6, bias=False)]
    return nn.Sequential(*[Own(layer, inside) for layer in layers])


class Mixed(Seeing):
    """Its layers and its loss enter autocast, where they are told to."""

    def __init__(self, inside, optimizer="momentum"):
        super().__init__(lambda: build(inside), optimizer=optimizer)
        self.loss = OwnLoss(inside)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.losses.append(self.loss(self.model(x), y))
        return self.losses[-1]


def fit(case, vectorize, around, **options):
    optimizer = next(name for name in ("momentum", "sgd", "adamw") if allowed(case, name))
    data = StatefulDataLoader(TensorDataset(*dataset(BATCHES, 9).tensors), batch_size=9)
    precision = "bf16-mixed" if around else "32-true"
    kind = lambda: Mixed(not around, optimizer)  # noqa: E731
    return fitted(case, vectorize, kind=kind, data=data, precision=precision, **options)


def alike(case, **options):
    (found, how), (inside, _) = (fit(case, True, around, **options) for around in (True, False))
    assert any(told.startswith("as one") for told in how.vectorized.values())
    wanted = [*inside.losses, *inside.parameters()]
    assert all(map(torch.equal, [*found.losses, *found.parameters()], wanted)) and len(found.losses) > 2 * BATCHES
    return found


@pytest.mark.parametrize("case", mostly_rare(STEADY, "pb"))
def test_mixed_precision(case):
    found = alike(case)
    wanted, _ = fit(case, False, around=True)
    assert found.losses[0].dtype == torch.float32
    same(found.losses[:6], wanted.losses[:6], within=ROUNDED)


class Called(Mixed):
    """Its model is traced."""

    def __init__(self, inside, optimizer="momentum"):
        super().__init__(inside, optimizer)
        self.model = Followed(list(self.model))


@pytest.mark.parametrize("size", [1, 2, rare(9)])
def test_a_model_that_is_traced(size, monkeypatch):
    monkeypatch.setattr(f"{__name__}.Mixed", Called)
    found, how = fit("pb", True, around=True, size=size)
    assert any(told.startswith("as one") for told in how.vectorized.values())
    wanted, _ = fit("pb", False, around=True, size=size)
    same(found.losses[:6], wanted.losses[:6], within=ROUNDED)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", [rare("pb"), rare("cerebras")])
def test_in_workers(case, monkeypatch):
    share_equally(monkeypatch)
    alike(case, where={"workers": 2})


def test_with_a_store():
    alike("pb", where={"store": HostStore(prefetch=5)})


@pytest.mark.parametrize("case", ["pb", rare("pipedream"), rare("cerebras")])
def test_a_checkpoint_in_flight(case, tmp_path):
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="{step}", auto_insert_metric_name=False)
    whole, _ = fit(case, True, True, enable_checkpointing=True, callbacks=[keep], max_epochs=1)
    again, _ = fit(case, True, True, ckpt=tmp_path / "3.ckpt", seed=11, max_epochs=1)
    assert all(map(torch.equal, [*again.after, *again.parameters()], [*whole.after[3:], *whole.parameters()]))
