"""Law: with a store or `vectorize`, too, training goes on as if a micro-batch that fails had not come, where no weights
have moved since: it is the first stage that fails, or a flush is the whole push. An update that fails is never taken
back.
"""

from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from pipeback import methods
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, FEW, OPTIMIZERS, STAGES, data, everything, suited
from tests.pipeline.test_dropped import ARMED, bad, batches, flush, flushes_that_fail, made


def store(name, folder):
    return "host" if name == "host" else f"disk:{folder}"


def pair(tmp_path, kind, *given, **options):
    return [made(*given, store=store(kind, tmp_path / which), **options) for which in ("plain", "hurt")]


def same(hurt, plain, order=list):
    """order: sorted, where ticks are recorded by runs, tick by tick, and a run ends before a tick that fails."""
    assert not hurt.closed and hurt.arrived == plain.arrived
    assert torch.equal(everything(hurt), everything(plain))
    assert hurt.state_dict()["plain"]["loops"] == plain.state_dict()["plain"]["loops"]
    assert order(hurt.ledger) == order(plain.ledger)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize(("case", "kind"), [*((case, "host") for case in FEW), ("pipedream-vertical", "disk")])
def test_the_first_stage_fails(case, kind, tmp_path):
    optimizer = suited(case)
    plain, hurt = pair(tmp_path, kind, CASES[case](STAGES), optimizer, 0)
    for n, (x, y) in enumerate(batches(8)):
        if n in (1, 7):
            with pytest.raises(pipeback.StageError, match=f"micro-batch {n}: the forward failed: bad values; nothing"):
                hurt.push(*bad(0))
        assert torch.equal(hurt.push(x, y), plain.push(x, y))
    same(hurt, plain)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize(
    ("method", "at", "kind"),
    [("gpipe", 0, "host"), ("gpipe", None, "disk"), ("one_f_one_b", 0, "disk"), ("one_f_one_b", None, "host")],
)
def test_a_flush_that_is_a_push(method, at, kind, tmp_path):
    plain, hurt = pair(tmp_path, kind, method, at=at, micro_batch_size=4)
    flushes_that_fail(plain, hurt, at)
    same(hurt, plain)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_of_several_the_first_fails_at_the_first_stage(tmp_path):
    plain, hurt = pair(tmp_path, "host", "pb", at=0, micro_batch_size=4)
    some = data(4, 4, seed=1)
    flush(plain, some), flush(hurt, some)
    with pytest.raises(pipeback.StageError, match="micro-batch 4: .*nor on the others of this push, and"):
        flush(hurt, [bad(0), *some[1:]])
    assert torch.equal(flush(hurt, some), flush(plain, some))
    same(hurt, plain)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_where_weights_have_moved_the_pipeline_closes(tmp_path):
    for at, n in ((2, 0), (0, 2)):
        (_, hurt), some = pair(tmp_path / f"{at}", "host", "pb", at=at, micro_batch_size=4), data(4, 4)
        for _ in range(4):
            flush(hurt, some)
        if at:
            ARMED.append(at)
        with pytest.raises(pipeback.StageError, match=f"stage {at} .*the forward failed: bad values$"):
            flush(hurt, [*some[:n], bad(0), *some[n:]])
        ARMED.clear()
        with pytest.raises(RuntimeError, match="closed: .*other stages had gone on meanwhile"):
            hurt.push(*some[0])


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 1, "store": "host"}], ids=str)
def test_in_a_thread_others_may_have_been_pushed_behind_it(options):
    hurt = made("pb", at=0, **options)
    hurt.push(*data(1, 4)[0])
    with pytest.raises(pipeback.StageError, match="the forward failed: bad values$"):
        hurt.push(*bad(0)), hurt.wait()
    with pytest.raises(RuntimeError, match="closed: stage 0 .*: bad values; other stages had gone on meanwhile"):
        hurt.push(*data(1, 4)[0])


class FailsLater(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        FailsLater.steps -= 1
        if not FailsLater.steps:
            raise ValueError("no step")
        super().step(closure)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("options", [{}, {"store": "host"}], ids=str)
@pytest.mark.parametrize("method", ["sgd", methods.create("gpipe", micro_batches=1)], ids=str)
def test_an_update_that_fails_is_not_taken_back(method, options):
    """Nothing is in flight, and no stage has counted its update; but weights have moved."""
    FailsLater.steps = 0
    layers = [nn.Linear(6, 6) for _ in range(STAGES)]
    pipe = pipeback.Pipeline(
        layers, loss=nn.functional.mse_loss, optimizer=lambda p: FailsLater(p, lr=0.1), method=method, **options
    )
    x, y = data(1)[0]
    pipe.push(x, y)
    pipe.wait()
    FailsLater.steps = 3
    with pytest.raises(pipeback.StageError, match="the update failed: no step$"):
        pipe.push(x, y)
        pipe.wait()
    with pytest.raises(RuntimeError, match="closed: .*load_state_dict"):
        pipe.push(x, y)


# -- stages that run as one: the first stage fails, an embedding or a layer that draws -----------------------------


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.drop = nn.Embedding(10, 6), nn.Dropout(0.3)

    def forward(self, x):
        return Late.apply(self.drop(self.table(x % 11)), x)  # an index of 10 is out of range


class Late(torch.autograd.Function):
    """Fails after the stage has drawn."""

    @staticmethod
    def forward(ctx, y, x):
        if (x > 10).any():
            raise KeyboardInterrupt if (x > 11).any() else ValueError("late")
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def worded(method, optimizer="momentum", **options):
    torch.manual_seed(7)
    layers = [Words(), *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 3)]
    return pipeback.Pipeline(
        layers, loss=nn.functional.cross_entropy, optimizer=OPTIMIZERS[optimizer], method=method, **options
    )


def words(count, seed=3):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(n, (4,), generator=generator)  # noqa: E731
    return [(draw(10), draw(3)) for _ in range(count)]


AS_ONE = ["pb", "pb-slack1", "cerebras", "pipedream", "pipemare-t3", "spectrain-v2", "sgd"]


@pytest.mark.parametrize(
    ("case", "bad"),
    mostly_rare(product(AS_ONE, [10, 11, 12]), *((case, 10 + n % 3) for n, case in enumerate(AS_ONE) if n % 2)),
)
def test_the_first_stage_before_stages_that_run_as_one(case, bad):
    plain, hurt = (worded(CASES[case](6), vectorize=True) for _ in range(2))
    said = {10: (pipeback.StageError, "failed: index out of range.*"), 11: (pipeback.StageError, "failed: late")}
    error, match = said.get(bad, (KeyboardInterrupt, "was stopped"))
    for n, (x, y) in enumerate(words(24)):
        if n in (1, 7, 18, 23):
            with pytest.raises(error, match=f"stage 0 .*micro-batch {n}: the forward {match}; nothing was trained on"):
                hurt.push(torch.full_like(x, bad), y)
        assert torch.equal(hurt.push(x, y), plain.push(x, y))
    same(hurt, plain, sorted)


OPTIONS = {"as one": {"vectorize": True}, "skewed": {"debug": pipeback.Debug(order="skewed")}}


@pytest.mark.parametrize(
    ("case", "options"),
    mostly_rare(
        product(["pb", "pb-slack1", "cerebras", "pipedream"], OPTIONS),
        ("pb", "as one"), ("pipedream", "as one"), ("pb-slack1", "skewed"), ("cerebras", "skewed"),
    ),
)  # fmt: skip
def test_of_several_those_before_it_stay(case, options):
    plain, hurt = (worded(CASES[case](6), micro_batch_size=4, **OPTIONS[options]) for _ in range(2))
    for n in range(4):
        some = words(8, seed=n)
        with pytest.raises(pipeback.StageError, match="index out.*nor on the 3 behind it, but on the 4 before it, and"):
            flush(hurt, [*some[:4], (torch.full_like(some[0][0], 10), some[0][1]), *some[5:]])
        flush(plain, some[:4])
        assert hurt.arrived == plain.arrived == 12 * n + 4
        assert torch.equal(flush(hurt, some), flush(plain, some))
        if n == 1:
            hurt.drain(), plain.drain()
    same(hurt, plain, sorted)
