"""Forward check: the stages of a traced model, run one after the other, must give the same output as its forward.

Which weights get a gradient from an output is compared as well, by walking the graphs, which costs no backward. So a
stage that records what the forward computes under torch.no_grad() or behind a detach(), or does not record what the
forward does, is found before it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from pipeback.splitting.module_walk import held
from pipeback.tensors.copies import replica
from pipeback.tensors.structures import opened


def check_equal(
    modules: Mapping[str, nn.Module],
    forward: Callable[[], Any],
    stages: Sequence[nn.Module],
    x: Any,
    unchanged: Callable[[], AbstractContextManager[None]],
) -> None:
    """Raise ValueError unless the stages give what the forward does: bit for bit on the CPU.

    modules: all of the model, by their paths. x: the input of the first stage. unchanged: a context that restores
    buffers and the random state.
    """
    model = type(modules[""]).__name__
    weights = {id(p) for _, p in held(modules, "_parameters")}
    with unchanged(), torch.enable_grad():  # which kernels run depends on which tensors need a gradient
        output = opened(forward())[0]
        expected = [part.detach() for part in output]
        reached = [_reached(part, weights) for part in output]
        del output
    with unchanged(), torch.enable_grad():
        found, reached_by_stages = _chain(stages, x, weights)
    for a, b in zip(found, expected, strict=True):
        if not _equal(a, b):
            raise ValueError(
                f"the stages of {model} do not give what its forward does: something in it changes from "
                "call to call, or in place under another name; give the path of the module that does so in "
                "stages=pipeback.Splitting(leaves=[...]), or "
                "keep the whole model one stage: stages=pipeback.Splitting(leaves=[''])"
            )
    for (mine, hides), other in zip(reached, reached_by_stages, strict=True):
        if apart := mine - other or (set() if hides else other - mine):
            name = next(name for name, p in held(modules, "_parameters") if id(p) in apart)
            raise ValueError(
                f"the stages of {model} would {'not ' if mine - other else ''}give {name!r} a gradient, "
                "unlike its forward; give the path of the module that computes with it in "
                "stages=pipeback.Splitting(leaves=[...]), or "
                "keep the whole model one stage: stages=pipeback.Splitting(leaves=[''])"
            )


def _chain(stages: Sequence[nn.Module], x: Any, weights: set[int]) -> tuple[list[Tensor], list[set[int]]]:
    """Return the output, and which weights get a gradient from each tensor of it."""
    behind: list[set[int]] = []  # the same for the tensors that go into the stage
    for s, stage in enumerate(stages):
        given = _given(x, s > 0)
        try:
            x = stage(given)
        except RuntimeError as error:
            if "a leaf Variable" not in str(error):
                raise ValueError(
                    f"stage {s} cannot do what the forward does there: {error}; if the forward differentiates its own "
                    "layers (torch.autograd.grad), have one module do it, under torch.enable_grad(), and give the path "
                    "of that module in stages=pipeback.Splitting(leaves=[...]), or keep the whole model one stage: "
                    "stages=pipeback.Splitting(leaves=[''])"
                ) from error
            given = _given(x, True)
            x = stage(_cloned(given))
        inputs = {id(part): n for n, part in enumerate(_tuple(given))}
        leaves = [_reached(part, weights.union(inputs))[0] for part in _tuple(x)]
        before, behind = behind, []
        for found in leaves:
            more = [before[inputs[each]] for each in found if each in inputs and before]
            behind.append(set().union(found & weights, *more))
    return [part.detach() for part in _tuple(x)], behind


def _reached(output: Tensor, wanted: set[int]) -> tuple[set[int], bool]:
    """Return the ids of the wanted leaves that get a gradient from a tensor, and whether its graph may hide some.

    A function of torch.autograd.Function may differentiate what is no input of it, as reentrant checkpoints do.
    """
    found, kinds = {id(output)} & wanted, set[type]()
    left = [output.grad_fn]
    seen = {output.grad_fn, None}
    while left:
        node = left.pop()
        following = () if node is None else node.next_functions
        if following:
            kinds.add(type(node))
            new = {each for each, _ in following} - seen
            seen |= new
            left += new
        elif (leaf := id(getattr(node, "variable", None))) in wanted:
            found.add(leaf)
    return found, any(issubclass(kind, BackwardCFunction) for kind in kinds)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit on the CPU, and closely elsewhere, where kernels may sum in another order in each run."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = torch.isclose(a, b, equal_nan=True) if a.device.type != "cpu" else (a == b) | ((a != a) & (b != b))
    return bool(same.all())


def _given(x: Any, grad: bool) -> Any:
    """Return new tensors for the input of a stage. grad: whether they need a gradient."""
    parts = tuple(replica(part).requires_grad_(grad and part.is_floating_point()) for part in _tuple(x))
    return parts if len(parts) > 1 else parts[0]


def _cloned(given: Any) -> Any:
    """Return clones of the input of a stage, since autograd forbids to change leaves of its graph in place."""
    parts = tuple(part.clone() for part in _tuple(given))
    return parts if len(parts) > 1 else parts[0]


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if type(x) is tuple else (x,)
