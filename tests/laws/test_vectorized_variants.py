"""Law: whole ticks make the steps of optimizers' variants: Nesterov's, of all or of some weights, fused, one by one."""

from functools import partial

import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from pipeback.vectorized.stacks.single_rows import SingleRows
from tests.helpers.choice import diagonal, mostly_rare
from tests.laws.as_one import LEAP, S, doubles, model, pushed, same
from tests.laws.cases import CASES

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
SGD = partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3)


def some_of_nesterov(params):
    """Only the matrices' steps are Nesterov's."""
    many, few = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    groups = [{"params": many, "nesterov": True}, {"params": few, "lr": 0.05, "weight_decay": 0.0}]
    return SGD([group for group in groups if group["params"]])


KINDS = {
    "nesterov": partial(SGD, nesterov=True), "some of nesterov": some_of_nesterov, "fused": partial(SGD, fused=True),
    "fused nesterov": partial(SGD, fused=True, nesterov=True), "one by one": partial(SGD, foreach=False),
    "fused Adam": partial(torch.optim.Adam, lr=0.01, fused=True),
    "fused AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True),
}  # fmt: skip


def agree(case, optimizer, leapt, **options):
    found = []
    for on in (False, True):
        pipe = pipeback.Pipeline(
            model(),
            loss=mse_loss,
            optimizer=optimizer,
            method=CASES[case](S),
            micro_batch_size=3,
            vectorize=on,
            **options,
        )
        found.append(pushed(pipe))
    for one, other in zip(*found, strict=True):
        same(other, one)
    assert sum(leapt) > 20


def takes(case, kind):
    """Whether a method allows this optimizer."""
    try:
        CASES[case](S).check(KINDS[kind]([torch.nn.Parameter(torch.zeros(2, 2))]), S)
    except ValueError:
        return False
    return True


ALLOWED = [(case, kind) for case in LEAP for kind in KINDS if takes(case, kind)]
USUAL = [
    *(("pb", kind) for kind in list(KINDS)[::2]), ("cerebras", "one by one"), ("lwp-weight", "nesterov"),
    ("lwp-weight", "fused Adam"), ("msnag", "some of nesterov"), ("msnag", "fused AdamW"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "kind"), mostly_rare(ALLOWED, *USUAL))
def test_every_kind(case, kind, leapt):
    agree(case, KINDS[kind], leapt)


@pytest.mark.parametrize(("case", "kind"), diagonal(["pb", "sc", "cerebras", "lwp-weight+sc"], ["fused", "one by one"]))
def test_the_pipeline_is_drained_and_filled_again(case, kind, leapt):
    """Then stages step one by one now and then, with the momentum that ticks have left."""
    found = []
    for on in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=mse_loss, optimizer=KINDS[kind], method=CASES[case](S), micro_batch_size=3, vectorize=on
        )
        some = iter(doubles(60))
        for count in (1, 18, 8, 20):
            for _ in range(count):
                pipe.push(*next(some))
            pipe.drain()
        found.append(pipe.model.state_dict().values())
    same(*found)
    assert sum(leapt) > 10


@pytest.mark.parametrize("case", ["pb", "lwp-weight"])
def test_nesterov_with_bounds_on_gradients(case, leapt):
    agree(case, KINDS["nesterov"], leapt, clip_norm=pipeback.Clipping(0.02, value=0.004))


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        ("pb", partial(torch.optim.RMSprop, lr=1e-3)), ("pb", partial(torch.optim.NAdam, lr=1e-3)),
        ("pipedream_2bw", SGD),
    ],
)  # fmt: skip
def test_micro_batches_that_go_one_by_one(case, optimizer, monkeypatch):
    """Where no whole ticks can be done, a stage of a stack goes forward by the graphs of its own row."""
    alone, forward = [], SingleRows.forward
    monkeypatch.setattr(SingleRows, "forward", lambda self, *a: [alone.append(a[1]), forward(self, *a)][1])
    found = []
    for on in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=mse_loss, optimizer=optimizer, method=CASES[case](S), micro_batch_size=3, vectorize=on
        )
        losses = []
        for n, (x, y) in enumerate(doubles(60)):
            if n == 30:  # a state in flight goes on in another pipeline
                state = pipe.state_dict()
                pipe = pipeback.Pipeline(
                    model(), loss=mse_loss, optimizer=optimizer, method=CASES[case](S), micro_batch_size=3, vectorize=on
                )
                pipe.load_state_dict(state)
            losses.append(float(pipe.push(x, y)))
        pipe.drain()
        found.append([torch.tensor(losses, dtype=torch.float64), *pipe.model.state_dict().values()])
    same(*found)
    assert len(alone) > 60


class Careful(torch.nn.Module):
    def forward(self, x):
        if not torch.compiler.is_compiling() and float(x.detach().abs().max()) > 1e5:
            raise ValueError("too large")
        return x


def test_a_bad_batch_among_those_that_go_one_by_one():
    """The state before it stays."""
    found = []
    for on in (False, True):
        build = model()
        build[0] = torch.nn.Sequential(build[0], Careful())
        pipe = pipeback.Pipeline(
            build, loss=mse_loss, optimizer=partial(torch.optim.RMSprop, lr=1e-3), method="pb", micro_batch_size=3,
            vectorize=on,
        )  # fmt: skip
        for n, (x, y) in enumerate(doubles(40)):
            if n == 20:
                with pytest.raises(pipeback.StageError, match="stage 0.*too large"):
                    float(pipe.push(x + 1e6, y))
            float(pipe.push(x, y))
        pipe.drain()
        found.append(pipe.model.state_dict().values())
    same(*found)
