"""Law: what sets modules to train or to evaluate holds from the next push on, whoever computes what was pushed."""

import copy
import gc
import pickle
import time
import warnings
from itertools import product
from weakref import WeakSet

import pytest
import torch
from torch import nn

import pipeback
from pipeback.pipeline import train_modes
from tests.helpers.choice import diagonal, mostly_rare
from tests.laws.cases import data, everything, pipeline

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")

RUNTIMES = {
    "threads": {"workers": 2},
    "threads, recomputed": {"workers": 3, "activations": "recompute"},
    "skewed": {"debug": pipeback.Debug(order="skewed")},
}


class Slow(nn.Module):
    """Takes its time, so that pushes return before it is done."""

    seconds = 0.002

    def forward(self, x):
        time.sleep(self.seconds)
        return x


def rehearsed(call, *given):
    """What a call gives in which a pipeline rehearses, which repeats what is slow: here nothing is."""
    try:
        Slow.seconds = 0.0
        return call(*given)
    finally:
        Slow.seconds = 0.002


class Frozen(nn.Module):
    """Its norm never trains: its forward sees to that."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        self.norm.eval()
        return self.norm(x)


class Followed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def model(form="sequence"):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), Slow(), nn.BatchNorm1d(6), nn.Dropout(0.5)) for _ in range(3)]
    return nn.Sequential(*layers) if form == "sequence" else Followed(layers)


def trained(method, form="sequence", samples=4, **options):
    """Losses, and all that is held after modes were set between pushes; the pipeline, which is still open."""
    made = model(form)
    if form != "sequence":
        options.update(example=data(1, samples)[0][0], stages="layer")
    layers = made if form == "sequence" else made.layers
    pipe = pipeline(made, method, "sgd", **options)
    some = iter(data(14, samples))
    losses = []
    rehearsed(pipe.plan, *data(1, samples)[0])

    def push(count):
        losses.extend(pipe.push(*next(some)) for _ in range(count))

    push(4)
    made.eval()
    push(2)
    layers[1].train()
    push(2)
    made.train()
    push(3)
    made.train(False)
    made.train(True)
    layers[2][3].eval()
    push(3)
    return torch.stack([loss.detach().clone() for loss in losses]), everything(pipe), pipe


def law(method, form, **options):
    (losses, held, alone), (others, more, pipe) = trained(method, form), trained(method, form, **options)
    assert torch.equal(losses, others) and torch.equal(held, more)
    assert [m.training for m in alone.model.modules()] == [m.training for m in pipe.model.modules()]
    pipe.close()


METHODS, FORMS = ["pb", "one_f_one_b"], ["sequence", "followed"]


@pytest.mark.parametrize(
    ("method", "runtime", "form"),
    mostly_rare(
        product(METHODS, RUNTIMES, FORMS),
        *((METHODS[m], runtime, FORMS[(n + m) % 2]) for n, runtime in enumerate(RUNTIMES) for m in range(2)),
    ),
)
def test_runtimes(method, runtime, form):
    options = dict(RUNTIMES[runtime])
    if "activations" in options and method == "pb":
        pytest.skip("recomputed on other weights")
    law(method, form, **options)


@pytest.mark.parametrize(("workers", "form"), diagonal([None, 2], ["sequence", "followed"]))
def test_replicas(workers, form):
    """They are set as the user's modules are, of which the further ones are copies; before the first push, too."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), Slow(), nn.Dropout(0.5)) for _ in range(3)]
    made = nn.Sequential(*layers) if form == "sequence" else Followed(layers)
    x, y = data(1, 4)[0]
    options = {} if form == "sequence" else {"example": x[:2], "stages": "layer"}
    pipe = pipeline(made, "sgd", "sgd", replicas=2, workers=workers, **options)
    losses, expected = [], []

    def push():
        with pipe.shown():
            expected.append(nn.functional.mse_loss(made(x), y).detach())
        losses.append(pipe.push(x, y).clone())

    made.eval()
    rehearsed(push)
    made.train()
    pipe.push(x, y)
    for layer in layers:
        layer[2].eval()
    push()
    layers[0].eval()
    push()
    torch.testing.assert_close(losses, expected)
    made.train()
    assert abs(float(pipe.push(x, y)) - float(expected[-1])) > 1e-3
    pipe.close()


def test_a_number_of_a_module_is_that_of_its_copies():
    made = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(2)])
    pipe = pipeline(made, "sgd", "sgd", replicas=2)
    x, y = data(1, 4)[0]
    pipe.push(x, y)
    pipe.wait()
    for layer in made:
        layer[1].p = 0.0
    with pipe.shown():
        expected = nn.functional.mse_loss(made(x), y)
    assert torch.allclose(pipe.push(x, y), expected)
    pipe.close()


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"debug": pipeback.Debug(order="skewed")}], ids=str)
def test_a_forward_that_sets_its_modules(options):
    """It does not wait for itself."""
    torch.manual_seed(0)
    made = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), Frozen()) for _ in range(3)])
    pipe = pipeline(made, "pb", "sgd", **options)
    losses = [pipe.push(x, y) for x, y in data(8)]
    assert all(torch.isfinite(loss) for loss in losses)
    pipe.close()


@pytest.fixture
def nobody_listens(monkeypatch):
    """Whatever pipelines of other tests are still alive."""
    monkeypatch.setattr(train_modes, "_listening", WeakSet())
    monkeypatch.setattr(nn.Module, "train", getattr(nn.Module.train, "_pipeback_hears", nn.Module.train))


def test_nobody_hears_when_nobody_works(nobody_listens):
    """torch's own function is there again; a copy of a model is set without its pipeline."""
    train = nn.Module.train
    made = model()
    with_loop = pipeline(made, "pb", "sgd")
    with_loop.push(*data(1)[0])
    assert nn.Module.train is train
    pipe = pipeline(made, "pb", "sgd", workers=2)
    pipe.push(*data(1)[0])
    assert nn.Module.train is not train
    for twin in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        twin.eval()
        assert not twin.training
        twin.train()
    pipe.close()
    assert nn.Module.train is train
    dropped = pipeline(model(), "pb", "sgd", workers=2)
    dropped.push(*data(1)[0])
    assert nn.Module.train is not train
    del dropped
    gc.collect()
    assert nn.Module.train is train


def test_an_error_is_told_where_modules_are_set():
    class Late(nn.Module):
        fails = False

        def forward(self, x):
            if self.fails:
                raise ValueError("late")
            return x

    late = Late()
    made = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), Slow()) for _ in range(2)], late)
    pipe = pipeline(made, "pb", "sgd", workers=2)
    pipe.push(*data(1)[0])
    pipe.wait()
    late.fails = True
    pipe.push(*data(1)[0])
    with pytest.raises(RuntimeError, match="stage 2.*late"):
        made.eval()
    assert pipe.closed and made.training
    made.eval()
    assert not made.training
    pipe.close()


def test_an_attribute_that_is_set_meanwhile():
    """Nobody can tell when it takes effect, so it is told."""
    for wait in (True, False):
        made = model()
        pipe = pipeline(made, "pb", "sgd", workers=2)
        pipe.push(*data(1)[0])
        if wait:
            pipe.wait()
        made[1][3].training = False
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            pipe.push(*data(1)[0])
        assert ["pipe.wait()" in str(w.message) for w in told if "attribute" in str(w.message)] == [True] * (not wait)
        pipe.close()


def test_modules_outside_and_other_pipelines_do_not_wait():
    """What was pushed elsewhere is not waited for."""
    one, two = (pipeline(model(), "pb", "sgd", workers=2) for _ in range(2))
    for pipe in (one, two):
        pipe.push(*data(1)[0])
    two.wait()
    nn.Linear(2, 2).eval()
    assert one._engine.modes.pending
    two._engine.model.eval()
    assert one._engine.modes.pending
    one._engine.model.eval()
    assert not one._engine.modes.pending
    one.close()
    two.close()
    assert isinstance(one, pipeback.Pipeline)
