"""Plain training with torch alone, which a pipeline without delay equals."""

import torch
from torch import nn

import pipeback
from tests.laws.cases import CASES

SYNCHRONOUS = [("sgd", 1), ("gpipe-4", 4), ("one_f_one_b-3", 3)]


def momentum(params, **options):
    return torch.optim.SGD(params, **{"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3, **options})


def pipeline(model, case, optimizer=momentum, **options):
    return pipeback.Pipeline(
        model, loss=options.pop("loss", nn.functional.mse_loss), optimizer=optimizer, method=CASES[case](len(model)),
        **options,
    )  # fmt: skip


def plain(model, some, group, optimizer=momentum, loss=nn.functional.mse_loss):
    """Gradients of a flush summed in micro-batch order, divided once; an optimizer a stage, as the pipeline has it."""
    trained = [[p for p in stage.parameters() if p.requires_grad] for stage in model]
    opts = [optimizer(params) for params in trained if params]
    losses = []
    for first in range(0, len(some), group):
        part = some[first : first + group]
        for x, y in part:
            one = loss(model(x), y)
            one.backward()
            losses.append(one.detach())
        for p in (p for params in trained for p in params if p.grad is not None):
            p.grad /= len(part)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return torch.stack(losses)


def same(build, some, optimizer=momentum, methods=SYNCHRONOUS, loss=nn.functional.mse_loss, **options):
    """Plain training and the pipeline, on two copies of one model."""
    for case, group in methods:
        model, twin = build(), build()
        pipe = pipeline(model, case, optimizer, loss=loss, **options)
        losses = torch.stack([pipe.push(x, y).clone() for x, y in some])
        pipe.drain()
        assert torch.equal(losses, plain(twin, some, group, optimizer, loss)), case
        assert list(model.state_dict()) == list(twin.state_dict())
        for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            assert torch.equal(a, b), (case, name)
        pipe.close()
