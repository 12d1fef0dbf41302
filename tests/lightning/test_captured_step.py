"""Law: a training_step of plain code, which graphs stand for, trains and logs the same to the bit as one that runs."""

from itertools import product

import pytest
import torch
from torch import nn

from pipeback.lightning import captured_step, plain_values
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import S, same
from tests.laws.cases import STEADY, allowed
from tests.lightning import ranks
from tests.lightning.cases import DataLoader, TensorDataset, dataset
from tests.lightning.plain_steps import BATCHES, SAMPLES, Plain, alike, data, fitted, seen

FACTOR = 0.25


class Shared(Plain):
    """A step that several hooks share, with helpers, numbers, and what is counted."""

    def training_step(self, batch, batch_idx):
        return self._step(batch, batch_idx, stage="train")

    def _step(self, batch, batch_idx, stage):
        x, y = batch
        x = x * 2.0 - FACTOR
        if self.training and self.hparams.share is not None:
            y = self.hparams.share * y
        output = self.model(x)
        loss = weighted(output, y, self.each) + 0.1 * output.square().mean()
        with torch.no_grad():
            error = (output - y).abs()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/error": error.mean()}, on_epoch=True, on_step=True)
        for n in range(2):
            self.log(f"{stage}/{n}", error[:, n].max() if n else 3.0)
        return {"loss": loss, "output": output.detach()}


class Own(Plain):
    """Calls itself, and a loss of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.criterion = Focused(2.0)

    def forward(self, x):
        return self.model(x) * 0.5

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train/loss", loss)
        return loss


class Layers(Own):
    """Its layers are its own, so that what training_step calls is followed."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.rest = self.model[0], self.model[1:]
        del self.model

    def forward(self, x):
        return self.rest(self.first(x))


class Focused(nn.Module):
    def __init__(self, power):
        super().__init__()
        self.power = power

    def forward(self, output, y):
        return ((output - y).abs() ** self.power).mean()


def weighted(output, y, each, power=2):
    return (each * (output - y) ** power).sum(-1).mean()


@pytest.fixture(autouse=True)
def nothing_seen():
    seen.clear()


KINDS = Plain, Shared, Own, Layers
USUAL = [*product([Plain], ["pb", "gpipe-4", "pipedream"]), (Shared, "pb"), (Own, "gpipe-4"), (Layers, "pipedream")]


@pytest.mark.parametrize(("kind", "case"), mostly_rare(product(KINDS, STEADY), *USUAL))
def test_every_method(monkeypatch, kind, case):
    optimizer = next(name for name in ("momentum", "sgd", "adamw") if allowed(case, name))
    alike(monkeypatch, lambda: kind(optimizer=optimizer), case)


@pytest.mark.parametrize("kind", [Plain, rare(Shared), rare(Layers)])
@pytest.mark.parametrize(
    "where", [{"workers": 2}, rare({"workers": 3}), {"store": "host"}, rare({"store": "host", "workers": 2})], ids=str
)
def test_threads_and_stores(monkeypatch, kind, where):
    for place in ("distributed.held_stages", "pipeline.stacking"):  # not by time, which differs from run to run
        monkeypatch.setattr(f"pipeback.{place}.balance", lambda seconds, workers: [s * workers // S for s in range(S)])
    alike(monkeypatch, kind, where=where)


@pytest.mark.parametrize("precision", ["bf16-mixed", rare("bf16-true")])
def test_other_precisions(monkeypatch, precision):
    class Low(Shared):
        def __init__(self):
            super().__init__()
            self.float()

    loader = DataLoader(TensorDataset(*(t.float() for t in dataset(BATCHES, SAMPLES).tensors)), batch_size=SAMPLES)
    alike(monkeypatch, Low, precision=precision, loader=loader)


def test_slices_of_several_samples_and_a_last_one_of_fewer(monkeypatch):
    alike(monkeypatch, Shared, size=2)
    alike(monkeypatch, Plain, loader=DataLoader(data(7).dataset, batch_size=9), size=2)


def test_batches_in_several_lengths(monkeypatch):
    """As texts come that are padded to a few lengths."""

    class Padded(Plain):
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = self.criterion(self.model(x), y).mean()
            self.log("train/loss", loss)
            return loss

    batches = [tuple(t.double() for t in some) for some in DataLoader(dataset(9, SAMPLES), batch_size=SAMPLES)]
    batches = [tuple(t[:, None].repeat(1, 1 + n % 2, 1) for t in some) for n, some in enumerate(batches)]
    alike(monkeypatch, Padded, loader=DataLoader(batches, batch_size=None))


def test_accumulated_and_clipped(monkeypatch):
    alike(monkeypatch, Plain, "gpipe", accumulate_grad_batches=2, gradient_clip_val=0.01)


class Images(Plain):
    """Classes with a weight each, as networks for images have them."""

    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(self.each, label_smoothing=0.1)

    def training_step(self, batch, batch_idx):
        output = self.model(batch["x"])
        right = (output.argmax(-1) == batch["y"]).float().mean()
        self.log("train/right", right)
        return self.criterion(output, batch["y"])


def classes(wrong=None):
    x = dataset(BATCHES, SAMPLES).tensors[0].double()
    y = torch.arange(len(x)) % 6
    if wrong is not None:
        y[wrong] = 17
    both = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    return DataLoader(both, batch_size=SAMPLES)


def test_classes(monkeypatch):
    alike(monkeypatch, Images, loader=classes())


def test_an_error_in_the_loss_of_a_slice_is_raised_by_the_users_line():
    with pytest.raises(IndexError, match="Target 17 is out of bounds") as raised:
        fitted(Images, loader=classes(wrong=4 * SAMPLES + 3))
    assert any(entry.name == "training_step" and "test_captured" in str(entry.path) for entry in raised.traceback)


def test_an_error_before_the_model_is_raised_by_the_users_line():
    class Looked(Plain):
        def training_step(self, batch, batch_idx):
            x = self.each[batch["y"]][:, None] * batch["x"]
            return self.model(x).square().mean()

    with pytest.raises(IndexError, match="index 17 is out of bounds") as raised:
        fitted(Looked, loader=classes(wrong=4 * SAMPLES + 3))
    assert any(entry.name == "training_step" and "test_captured" in str(entry.path) for entry in raised.traceback)


class Lengths(Plain):
    """Its loss reads numbers from a tensor where no trace sees it."""

    def training_step(self, batch, batch_idx):
        before, _ = torch.tensor_split(self.model(batch["x"]), batch["n"], dim=1)
        return before.square().mean()


class Turned(Plain):
    """And here what its model is called with does."""

    def training_step(self, batch, batch_idx):
        before, after = torch.tensor_split(batch["x"], batch["n"], dim=1)
        loss = self.model(torch.cat([after, before], 1)).square().mean()
        self.log("train/loss", loss)
        return loss


@pytest.mark.parametrize("kind", [Lengths, Turned])
def test_graphs_are_compared_at_every_batch(monkeypatch, kind):
    """Numbers that graphs have kept are noticed before anything is trained with them."""
    monkeypatch.setattr(plain_values, "NUMBERS", set())  # as if nobody knew that these functions take such
    x = dataset(BATCHES + 2, SAMPLES).tensors[0].double()
    lengths = torch.full((len(x),), 2).masked_fill(torch.arange(len(x)) >= 5 * SAMPLES, 1)
    some = [{"x": a, "n": n} for a, n in zip(x, lengths, strict=True)]
    stood, ready = [], captured_step.CapturedStep.ready
    monkeypatch.setattr(captured_step.CapturedStep, "ready", lambda *args: stood.append(ready(*args)) or stood[-1])
    with pytest.warns(UserWarning, match="computes something else in this batch than the graph that stood for it"):
        alike(monkeypatch, kind, told="runs for every micro-batch", loader=DataLoader(some, batch_size=SAMPLES))
    assert [graphs is not None for graphs in stood[: BATCHES + 1]] == [False] * 2 + [True] * 3 + [False] * 2


def on_devices(graphs, **options):
    """What a rank has of a fit: its weights, what is logged, and what stood for training_step."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(captured_step, "FEW", captured_step.FEW if graphs else 1000)
        run, module = ranks.fit(module=Shared, data=data, max_epochs=1, **options)
    found = [p.detach().clone() for p in module.parameters()]
    return found, dict(run.callback_metrics), run.strategy.vectorized.get("training_step")


@pytest.mark.parametrize("method", ["pb", rare("gpipe"), rare("cerebras")])
def test_several_devices(method, crew):
    """The device with the last stage computes the losses."""
    options = {"method": method, "given": {"micro_batch_size": 1, "vectorize": True}}
    wanted, logged, _ = on_devices(False, devices=1, **options)
    both = crew.ranks(2).run(on_devices, True, devices=2, **options)
    assert {told for _, _, told in both} == {"a graph stands for it", None}
    for found, values, _ in both:
        same(found, wanted)
        assert values.keys() == logged.keys()
        same(values.values(), logged.values())
