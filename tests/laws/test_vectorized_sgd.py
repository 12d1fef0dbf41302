"""Law: whole ticks make the steps of SGD's variants: Nesterov's, of every weight or of some, fused and one by one."""

from functools import partial

import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from tests.helpers.choice import mostly_rare
from tests.laws.as_one import LEAP, S, model, pushed, same
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
}  # fmt: skip


def agree(case, optimizer, leapt, **options):
    found = []
    for on in (False, True):
        try:
            pipe = pipeback.Pipeline(
                model(), loss=mse_loss, optimizer=optimizer, method=CASES[case](S), micro_batch_size=3, vectorize=on,
                **options,
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            pytest.skip(f"refused: {error}")
        found.append(pushed(pipe))
    for one, other in zip(*found, strict=True):
        same(other, one)
    assert sum(leapt) > 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case", mostly_rare(LEAP, "pb", "cerebras", "pipedream", "lwp-weight", "gap_aware", "msnag", "pipemare-t3")
)
def test_every_kind(case, kind, leapt):
    agree(case, KINDS[kind], leapt)


@pytest.mark.parametrize("case", ["pb", "lwp-weight"])
def test_nesterov_with_bounds_on_gradients(case, leapt):
    agree(case, KINDS["nesterov"], leapt, clip_norm=pipeback.Clipping(0.02, value=0.004))
