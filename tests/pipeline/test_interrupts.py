"""Law: after Ctrl-C in a forward a pipeline in the event loop goes on as if the micro-batch had not come, bit for bit;
elsewhere it is closed, and says so."""

import signal

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import CASES, FEW, OPTIMIZERS, STAGES, data, everything, suited

RUNTIMES = [{}, {"workers": 2}, {"store": "host"}, {"vectorize": True}, {"replicas": 2}]
STOP = []  # where Ctrl-C is pressed next


def pressed(where):
    """In the main thread the signal raises KeyboardInterrupt; nowhere else does it come."""
    if where in STOP:
        STOP.clear()
        raise KeyboardInterrupt


class Stopping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, at):
        pressed(f"forward {at}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        pressed("backward")
        return grad, None


class Layer(nn.Module):
    """It draws, and writes into its buffers, before and after it is stopped."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.before, self.after = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)) for _ in "ab")

    def forward(self, x):
        return self.after(Stopping.apply(self.before(x), self.at))


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        pressed("step")


def loss(output, target):
    pressed("loss")
    return nn.functional.mse_loss(output, target)


def drawing():
    torch.manual_seed(0)
    return nn.Sequential(*map(Layer, range(STAGES)))


def alike():
    """The first stage stops; the others run as one."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(STAGES)]
    layers[0].append(Between())
    return nn.Sequential(*layers)


class Between(nn.Module):
    def forward(self, x):
        return Stopping.apply(x, 0)


def made(model, method, optimizer=lambda p: Optimizer(p, lr=0.02, momentum=0.9), **options):
    torch.manual_seed(7)
    return pipeback.Pipeline(model, loss=loss, optimizer=optimizer, method=method, **options)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("case", FEW)
def test_a_forward_that_was_stopped_is_taken_back(case):
    plain, hurt = (made(drawing(), CASES[case](STAGES), OPTIMIZERS[suited(case)]) for _ in range(2))
    for n, (x, y) in enumerate(data(12, 4)):
        if n in (1, 6, 11):
            where = ("forward 0", "loss", f"forward {STAGES - 2}")[n // 5]
            STOP.append(where)
            with pytest.raises(KeyboardInterrupt, match=f"stage . .*micro-batch {n}: the forward was stopped; nothing"):
                hurt.push(x + 1, y)
        assert torch.equal(hurt.push(x, y), plain.push(x, y))
    assert hurt.arrived == plain.arrived == 12
    assert torch.equal(everything(hurt), everything(plain))
    assert list(hurt.ledger) == list(plain.ledger)


@pytest.fixture
def heard():
    """Ctrl-C raises, as it does in a terminal; what runs in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_is_python_s_own_interrupt(heard):
    """Its class decides how the interpreter ends; a subclass would end it with another status."""

    def stopped(output, target):
        if target.shape[0] == 5 and target[0, 0] == 5:
            signal.raise_signal(signal.SIGINT)
        return nn.functional.mse_loss(output, target)

    pipe = pipeback.Pipeline(drawing(), loss=stopped, optimizer=lambda p: Optimizer(p, lr=0.1), method="pb")
    pipe.push(torch.randn(5, 6), torch.zeros(5, 6))
    with pytest.raises(KeyboardInterrupt) as found:
        pipe.push(torch.randn(5, 6), torch.full((5, 6), 5.0))
    assert type(found.value) is KeyboardInterrupt and type(found.value.__cause__) is KeyboardInterrupt
    pipe.push(torch.randn(5, 6), torch.zeros(5, 6))


@pytest.mark.filterwarnings("ignore:2 workers")
@pytest.mark.parametrize("where", ["backward", "step", "forward 0"])
@pytest.mark.parametrize("options", RUNTIMES, ids=str)
def test_elsewhere_it_closes_the_pipeline_which_says_what_to_do(options, where):
    if where == "forward 0" and not set(options) & {"workers", "replicas"}:
        pytest.skip("there it is taken back")
    model, same = alike(), alike()
    pipe, other = made(model, "pb", **options), made(same, "pb", **options)
    for x, y in data(9, 4):
        pipe.push(x, y), other.push(x, y)
    other.wait()  # or one of its threads would be stopped
    state = pipe.state_dict()
    STOP.append(where)
    with pytest.raises(KeyboardInterrupt):
        pipe.push(*data(1, 4)[0])
        pipe.wait()
    for call in (pipe.wait, pipe.drain, pipe.state_dict, lambda: pipe.push(*data(1, 4)[0])):
        with pytest.raises(RuntimeError, match="closed: KeyboardInterrupt came in the middle.*pipe.state_dict.*shown"):
            call()
    with pipe.shown():
        assert all(torch.isfinite(w).all() for w in model.parameters())
    pipe.load_state_dict(state)
    for x, y in data(3, 4, seed=5):
        assert pipe.push(x, y) == other.push(x, y)
    assert torch.equal(everything(pipe), everything(other))
    pipe.close(), other.close()
