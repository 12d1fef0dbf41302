"""Code that does more than compute runs at every slice, whatever stands for other code."""

from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

from tests.lightning.cases import DataLoader
from tests.lightning.plain_steps import BATCHES, SAMPLES, Plain, alike, data, fitted, seen


@pytest.fixture(autouse=True)
def nothing_seen():
    seen.clear()


def appends(self, x, y):
    loss = F.mse_loss(self.model(x), y)
    seen.append(loss.item())
    return loss


def counts(self, x, y):
    self.count = getattr(self, "count", 0) + 1
    return F.mse_loss(self.model(x), y) * self.count


def prints(self, x, y):
    loss = F.mse_loss(self.model(x), y)
    print("loss")
    return loss


def branches(self, x, y):
    loss = F.mse_loss(self.model(x), y)
    return loss if loss < 0.5 else 0.5 * loss


def looks_into(self, x, y):
    loss = F.mse_loss(self.model(x), y)
    return loss * y.tolist()[0][0]


def writes(self, x, y):
    y += 1
    return F.mse_loss(self.model(x), y)


def sets_part(self, x, y):
    y[y > 1] = 0
    return F.mse_loss(self.model(x), y)


def draws(self, x, y):
    return F.mse_loss(F.dropout(self.model(x)), y)


def draws_before(self, x, y):
    return F.mse_loss(self.model(x + torch.randn_like(x)), y)


def averages(self, x, y):
    loss = F.mse_loss(self.model(x), y)
    self.each.mul_(0.9)
    return loss * self.each.mean()


def hands_on(self, x, y):
    return outside(self, x, y)


def outside(module, x, y):
    module.total = 1
    return F.mse_loss(module.model(x), y)


def logs_before(self, x, y):
    self.log("train/x", x.mean())
    return F.mse_loss(self.model(x), y)


def reads_property(self, x, y):
    return F.mse_loss(self.model(x), y) * self.growing


def writes_to_what_stays(self, x, y):
    each = self.each
    each += 0.1
    return F.mse_loss(self.model(x) * each, y)


def normalizes(self, x, y):
    both = self.model(x).repeat(2, 1)
    return F.mse_loss(F.batch_norm(both, self.each, self.ones, training=True, momentum=0.5), y.repeat(2, 1))


def masks(self, x, y):
    output = self.model(x)
    return F.mse_loss(output[y > 0], y[y > 0], reduction="sum")


def splits(self, x, y):
    first, _ = self.model(x).tensor_split(y.argmax(-1).clamp(max=0) + 1, dim=-1)
    return first.square().mean()


def makes(self, x, y):
    scale = torch.tensor([y.sum(), 1.0]).max()
    return F.mse_loss(self.model(x), y) * scale


def takes(self, x, y):
    return F.mse_loss(self.model(x), y) * self.each.mean().item()


def writes_down(self, x, y):
    loss = F.mse_loss(self.model(x), y)
    self.log(f"loss of {y.argmax(-1)}", loss)
    return loss


def closes(self, x, y):
    output = self.model(x)
    return self.first(output, y) + self.second(output, y)


def scaled(function, factor):
    def loss(output, y):
        return factor * function(output, y)

    return loss


def noting(output, y):
    seen.append(1)
    return F.mse_loss(output, y)


def tries(self, x, y):
    try:
        return F.mse_loss(self.model(x), y)
    finally:
        seen.append(1)


def nested(self, x, y):
    def loss(output):
        seen.append(1)
        return F.mse_loss(output, y)

    return loss(self.model(x))


def hooks(self, x, y):
    output = self.model(x)
    output.register_hook(lambda g: 2 * g)
    return F.mse_loss(output, y)


def differentiates(self, x, y):
    output = self.model(x)
    F.mse_loss(output, y).backward(retain_graph=True)
    return F.mse_loss(output, y)


def seeds(self, x, y):
    torch.manual_seed(1)
    return F.mse_loss(self.model(x), y)


def iterates(self, x, y):
    loss = F.mse_loss(self.model(x), y)
    return loss * next(self.stream)


def hooked(self, x, y):
    return F.mse_loss(self.listened(x), y)


MORE = {
    appends: "calls `seen.append`",
    counts: "sets `self.count`",
    prints: "calls `print`",
    branches: "takes a number out of a tensor",
    looks_into: "calls `y.tolist`",
    writes: "writes to a tensor in place",
    sets_part: "sets `y[y > 1]`",
    draws: "draws random numbers",
    draws_before: "draws random numbers",
    averages: "calls `self.each.mul_`",
    hands_on: "hands on self itself",
    logs_before: "logs before it calls the model",
    reads_property: "reads growing, a property",
    writes_to_what_stays: "reads what differs from batch to batch",
    normalizes: "writes to a tensor in place",
    masks: "has tensors whose shapes depend on values",
    splits: ".tensor_split`",
    makes: "calls `torch.tensor`, which takes numbers out of tensors",
    takes: "takes a number out of a tensor",
    writes_down: "makes a text of a tensor",
    closes: "calls `seen.append`",
    tries: "has a statement that may do more than compute",
    nested: "has a statement that may do more than compute",
    hooks: "has an expression that may do more than compute: `lambda g: 2 * g`",
    differentiates: ".backward`",
    seeds: "calls `torch.manual_seed`",
    iterates: "reads `self.stream`",
}


@pytest.mark.parametrize("does", MORE, ids=lambda does: does.__name__)
def test_other_code_runs_at_every_slice(monkeypatch, does):
    """Whatever it does beside computing is done as often, and in the order of the slices."""

    class More(Plain):
        growing = property(lambda self: seen.append(1) or len(seen) / 100)
        compute = does

        def __init__(self):
            super().__init__()
            self.stream = iter(range(1, 1000))
            self.first, self.second = scaled(F.mse_loss, 1.0), scaled(noting, 0.5)
            self.register_buffer("ones", torch.ones(6, dtype=torch.float64))
            self.saw = []
            seen.clear()

        def on_train_end(self):
            self.saw = list(seen)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = self.compute(x, y)
            self.log("train/loss", loss)
            return loss

    found, wanted = alike(monkeypatch, More, told=MORE[does])
    assert found.saw == wanted.saw


def test_a_number_of_the_batch_that_is_handed_on_twice(monkeypatch):
    def scaled(loss, first, second):
        return loss / (1 + second)

    class Handing(Plain):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return scaled(F.mse_loss(self.model(x), y), batch_idx, batch_idx)

    alike(monkeypatch, Handing, told="reads what differs from batch to batch")


def test_source_that_was_edited_since(monkeypatch, tmp_path):
    """What runs is the code of before."""
    file = tmp_path / "edited.py"
    text = "def compute(output, y):\n    {}\n    return ((output - y) ** 2).mean()\n"
    file.write_text(text.format("seen.append(1)"))
    room = {"seen": seen}
    exec(compile(file.read_text(), str(file), "exec"), room)
    file.write_text(text.format("y = 1 * y    "))

    class Edited(Plain):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return room["compute"](self.model(x), y)

    class Direct(Plain):
        compute = staticmethod(room["compute"])

        def training_step(self, batch, batch_idx):
            x, y = batch
            return self.compute(self.model(x), y)

    alike(monkeypatch, Edited, told="calls compute, whose source is another one by now")
    assert len(seen) == 2 * BATCHES * SAMPLES
    alike(monkeypatch, Direct, told="calls compute, whose source is another one by now")


def test_hooks_of_the_model_run_at_every_slice(monkeypatch):
    class Heard(Plain):
        def __init__(self):
            super().__init__()
            self.model.register_forward_hook(lambda *_: seen.append(1))

    alike(monkeypatch, Heard, told="hooks")
    assert len(seen) == 2 * BATCHES * SAMPLES


class Tagged(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

    @property
    def doubled(self):
        seen.append(1)
        return self.x * 2


def files(n):
    return [f"file {n}-{i}" for i in range(SAMPLES)]


def with_more(kind):
    return [kind(x, y, n) for n, (x, y) in enumerate(data(9))]


NAMED = with_more(lambda x, y, n: {"x": x, "y": y, "files": files(n), "factor": 2.0, "mask": None, "n": [n] * SAMPLES})
LISTED = with_more(lambda x, y, n: [x, y, files(n)])


class Named(Plain):
    def training_step(self, batch, batch_idx):
        output = self.model(batch["x"])
        if batch["mask"] is not None:
            output = output * batch["mask"]
        loss = F.mse_loss(output, batch["y"])
        self.log("train/loss", loss, batch_size=len(batch["files"]))
        return loss


class Listed(Plain):
    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        return F.mse_loss(self.model(x), y)


@pytest.mark.parametrize(("kind", "some"), [(Named, NAMED), (Listed, LISTED)])
def test_what_is_no_tensor_may_stand_in_a_batch(monkeypatch, kind, some):
    """Names of files, say, which are others in every batch; what is not looked at matters to no graph."""
    alike(monkeypatch, kind, loader=DataLoader(some, batch_size=None))


def scales(self, batch):
    return self.model(batch["x"]).square().mean() * batch["factor"]


def asks(self, batch):
    return self.model(batch["x"]).square().mean() * (2.0 if batch["factor"] else 1.0)


def asks_what_it_is(self, batch):
    return self.model(batch["x"]).square().mean() * (2.0 if isinstance(batch["factor"], float) else 1.0)


def asks_which_it_is(self, batch):
    return self.model(batch["x"]).square().mean() * (2.0 if batch["factor"] is seen else 1.0)


def names(self, batch):
    loss = self.model(batch["x"]).square().mean()
    self.log(f"loss of {batch['files'][0][-1]}", loss)
    return loss


def counts_up(self, batch):
    return self.model(batch["x"]).square().mean() / (1 + batch["n"][0])


@pytest.mark.parametrize("does", [scales, asks, asks_what_it_is, asks_which_it_is, names, counts_up])
def test_what_is_looked_at_in_a_batch_must_be_tensors(monkeypatch, does):
    class Looking(Plain):
        compute = does

        def training_step(self, batch, batch_idx):
            return self.compute(batch)

    told = (
        "asks what is which object" if does is asks_which_it_is else "looks at something in its batch that is no tensor"
    )
    alike(monkeypatch, Looking, told=told, loader=DataLoader(NAMED, batch_size=None))


def test_batches_whose_class_has_code(monkeypatch):
    class Doubled(Plain):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.model(batch.doubled), batch.y)

    loader = DataLoader(with_more(lambda x, y, n: Tagged(x, y)), batch_size=None)
    alike(monkeypatch, Doubled, told="has a Tagged in what it computes with, whose class has functions", loader=loader)
    assert len(seen) == 2 * 9 * SAMPLES


def test_who_watches_sees_every_slice():
    """Anomaly detection, and modes for operators."""
    _, how = fitted(Plain, detect_anomaly=True)
    assert "training_step" not in how.vectorized
