"""Law: without a delay there is no difference: on one stage every method is plain torch training, bit for bit."""

from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, FEW, OPTIMIZERS, allowed, data, network, pipeline, weights

# 2BW's delay is one group at every stage, also at the only one; its own law is the version function
# and EigenDelay turns matrices at every stage (`test_eigendelay`)
FREE = [case for case in CASES if case != "pipedream_2bw" and "horizon" not in case and "eigendelay" not in case]
GROUPS = {
    "gpipe-4": 4, "one_f_one_b-3": 3, "zb_h1-4": 4, "zb_h2-7": 7, "interleaved-4": 4, "looped_bfs-3": 3, "zb_v-4": 4,
    "pipemare-t3": 2, "pipeoptim-xpipe": 3,
}  # fmt: skip


def plain(optimizer, batches, group, *, scheduler=None, clip_norm=None):
    """Torch alone: gradients summed in order, divided once, one step."""
    model = network(stages=3)
    opt = OPTIMIZERS[optimizer](model.parameters())
    plan = scheduler(opt) if scheduler else None
    losses = []
    for first in range(0, len(batches), group):
        some = batches[first : first + group]
        for x, y in some:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            losses.append(loss.detach())
        for p in model.parameters():
            p.grad /= len(some)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        opt.step()
        opt.zero_grad()
        if plan is not None:
            plan.step()
    return torch.stack(losses), torch.cat([p.detach().flatten().double() for p in model.parameters()])


# tests/pipeline/test_bad_input.py reads what is said of the others
PAIRS = [(case, optimizer) for case, optimizer in product(FREE, OPTIMIZERS) if allowed(case, optimizer)]


@pytest.mark.parametrize(
    ("case", "optimizer"), mostly_rare(PAIRS, *(pair for pair in PAIRS if pair[0] in FEW or pair[1] == "momentum"))
)
def test_one_stage_is_plain_training(case, optimizer):
    batches = data(20)
    pipe = pipeline([network(stages=3)], CASES[case](1), optimizer)
    losses = torch.stack([pipe.push(x, y) for x, y in batches])
    pipe.drain()
    wanted_losses, wanted = plain(optimizer, batches, GROUPS.get(case, 1))
    assert torch.equal(losses, wanted_losses)
    assert torch.equal(weights(pipe), wanted)


@pytest.mark.parametrize("case", ["pb", "cerebras", "pipedream", "sc", "pipemare"])
def test_with_a_scheduler_and_clipping(case):
    batches = data(20)
    scheduler = lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)  # noqa: E731
    pipe = pipeline([network(stages=3)], CASES[case](1), clip_norm=0.05)
    plans = [scheduler(opt) for opt in pipe.optimizers]
    losses = []
    for x, y in batches:
        losses.append(pipe.push(x, y))
        for plan in plans:
            plan.step()
    wanted_losses, wanted = plain("momentum", batches, 1, scheduler=scheduler, clip_norm=0.05)
    assert torch.equal(torch.stack(losses), wanted_losses)
    assert torch.equal(weights(pipe), wanted)


BUILDS = {
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.1),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01, maximize=True),
    "loop": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=False),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, weight_decay=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, weight_decay=0.01),
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p, lr=0.01)
        for name in ("NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop", "AdamW")
    },
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_joining_stages_into_one_step_changes_no_bit(build):
    """Sequential training of five stages against torch's own loop over the whole model."""
    batches = data(15)
    pipe = pipeback.Pipeline(network(), loss=nn.functional.mse_loss, optimizer=build, method="sgd")
    model = network()
    opt = build(model.parameters())
    for x, y in batches:
        pipe.push(x, y)
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    assert torch.equal(weights(pipe), torch.cat([p.detach().flatten().double() for p in model.parameters()]))
