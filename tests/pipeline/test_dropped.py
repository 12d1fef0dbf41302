"""Law: after a micro-batch whose forward fails, training goes on as if it had not come, bit for bit."""

import pytest
import torch
from torch import nn

import pipeback
from pipeback import methods
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, OPTIMIZERS, STAGES, data, everything, suited

BAD = 777.0  # of which the loss, or the first stage, raises, while the form of the micro-batch is as ever
ARMED = []  # not empty: a stage raises whatever comes


class Raises(nn.Module):
    """In its forward or its backward, for what is not a batch of ours."""

    def __init__(self, backward=False):
        super().__init__()
        self.backward = backward

    def forward(self, x):
        return Checked.apply(x, self.backward)


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, later):
        ctx.bad = bool(ARMED) or bool((x.detach().abs() > 100).any())
        if ctx.bad and not later:
            raise ValueError("bad values")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.bad:
            raise ValueError("bad values")
        return grad, None


def loss(output, target):
    if (target.abs() > 100).any():
        raise IndexError("target out of range")
    return nn.functional.mse_loss(output, target)


def model(at=None, backward=False, drawing=True):
    """at: the stage that raises; None: the loss does."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), *((nn.BatchNorm1d(6), nn.Dropout(0.3)) if drawing else ()))]
    layers += [
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3 if drawing else 0.0)) for _ in range(STAGES - 1)
    ]
    if at is not None:
        layers[at].insert(1, Raises(backward))
    return nn.Sequential(*layers)


def batches(count, samples=4):
    return data(count, samples)


def bad(at, samples=4):
    x, y = data(1, samples, seed=99)[0]
    if at is None:
        return x, torch.full_like(y, BAD)
    return torch.full_like(x, BAD), y


def made(method, optimizer="momentum", at=None, backward=False, **options):
    torch.manual_seed(7)
    return pipeback.Pipeline(model(at, backward), loss=loss, optimizer=OPTIMIZERS[optimizer], method=method, **options)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("case", mostly_rare(CASES, *list(CASES)[::2]))
def test_every_method(case):
    """The loss fails at F of the last stage, while the pipeline fills and in the steady state."""
    optimizer = suited(case)
    plain, hurt = (made(CASES[case](STAGES), optimizer) for _ in range(2))
    for n, (x, y) in enumerate(batches(12)):
        if n in (1, 6, 11):
            with pytest.raises(
                pipeback.StageError, match=f"micro-batch {n}: the forward failed: target out of range; not"
            ):
                hurt.push(*bad(None))
        assert torch.equal(hurt.push(x, y), plain.push(x, y))
    assert not hurt.closed and hurt.arrived == plain.arrived
    assert torch.equal(everything(hurt), everything(plain))
    assert hurt.state_dict()["plain"]["loops"] == plain.state_dict()["plain"]["loops"]
    assert list(hurt.ledger) == list(plain.ledger)


def flush(pipe, xs):
    return pipe.push(*(torch.cat(parts) for parts in zip(*xs, strict=True)))


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("at", [0, 2, STAGES - 1])
@pytest.mark.parametrize("activations", ["device", "recompute", "host"])
def test_every_stage(at, activations):
    for method in ("pb", "one_f_one_b", "zb_h2"):
        plain, hurt = (made(method, at=at, activations=activations) for _ in range(2))
        for n, (x, y) in enumerate(batches(10)):
            if n in (3, 8):
                ARMED.append(at)
                with pytest.raises(pipeback.StageError, match=f"stage {at} .*micro-batch {n}: the forward failed"):
                    hurt.push(*bad(at))
                ARMED.clear()
            assert torch.equal(hurt.push(x, y), plain.push(x, y))
        assert torch.equal(everything(hurt), everything(plain))


def flushes_that_fail(plain, hurt, at):
    """Push three flushes to both; three more of `hurt` fail at stage `at` (None: at the loss) and are taken back."""
    for n in range(3):
        some = data(4, 4, seed=n)
        with pytest.raises(pipeback.StageError, match="nothing was trained on it, nor on the others of this push, and"):
            flush(hurt, [*some[:2], bad(at), some[3]]) if n else (flush(hurt, some), flush(hurt, [*some[:3], bad(at)]))
        if not n:
            flush(plain, some)
        assert torch.equal(flush(hurt, some), flush(plain, some))


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("method", ["gpipe", "one_f_one_b", "zb_h1"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_flush_that_is_a_push_is_taken_back_as_a_whole(method, backward):
    at = 0 if backward else None
    plain, hurt = (made(method, at=at, backward=backward, micro_batch_size=4) for _ in range(2))
    flushes_that_fail(plain, hurt, at)
    assert torch.equal(everything(hurt), everything(plain))
    assert list(hurt.ledger) == list(plain.ledger)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("method", ["pb", "sgd", methods.create("gpipe", micro_batches=2)], ids=str)
def test_of_a_push_of_several_what_came_before_stays(method):
    plain, hurt = (made(method, micro_batch_size=4) for _ in range(2))
    for pipe in (plain, hurt):
        flush(pipe, data(4, 4, seed=0))
    some = data(4, 4, seed=1)
    with pytest.raises(pipeback.StageError, match="micro-batch 6: .*nor on the 1 behind it, but on the 2 before it"):
        flush(hurt, [*some[:2], bad(None), some[3]])
    assert hurt.arrived == 6
    flush(plain, some[:2])
    for pipe in (plain, hurt):
        flush(pipe, data(4, 4, seed=2))
    assert torch.equal(everything(hurt), everything(plain))


def test_a_backward_that_fails_where_nothing_is_in_flight():
    plain, hurt = (made("sgd", at=2, backward=True) for _ in range(2))
    for n, (x, y) in enumerate(batches(6)):
        if n in (2, 5):
            ARMED.append(2)
            with pytest.raises(pipeback.StageError, match=f"stage 2 .*micro-batch {n}: the backward failed.*; nothing"):
                hurt.push(*bad(2))
            ARMED.clear()
        assert torch.equal(hurt.push(x, y), plain.push(x, y))
    assert torch.equal(everything(hurt), everything(plain))


def test_a_loss_that_is_not_finite():
    plain, hurt = (made("cerebras", debug=pipeback.Debug(check_finite=True)) for _ in range(2))
    for n, (x, y) in enumerate(batches(8)):
        if n == 5:
            with pytest.raises(pipeback.StageError, match="the loss is nan.*; nothing was trained on it"):
                hurt.push(x, y * float("nan"))
        assert torch.equal(hurt.push(x, y), plain.push(x, y))
    assert torch.equal(everything(hurt), everything(plain))
