"""Compile check: compares the gradients of a compiled stage with those of the uncompiled one, for a backward (B) on
weights newer than those of the forward (F).

    g(i, j) = gradients of F on weights i, B on weights j

For weights drawn at random, g(1, 2) of the compiled and of the uncompiled stage must agree about as well as g(1, 1) and
g(2, 2) do. If the graph keeps old weights, or recomputes activations from newer ones, they differ.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.base import Method
from pipeback.splitting.module_restore import Home
from pipeback.stages import run_modules
from pipeback.stages.compiled import Compiled
from pipeback.stages.flight import Value, grown
from pipeback.stages.random_stream import drawing
from pipeback.stages.stage import Stage
from pipeback.tensors import copies


class Refused(ValueError):
    """A refusal that already names its stage."""


@contextmanager
def untouched(stage: Stage) -> Iterator[list[Home]]:
    """Restore buffers and random state on exit. Yields where the buffers are, with their values on entry."""
    generator = stage.generator
    state = generator.get_state()
    try:
        with run_modules.untouched(stage) as homes:
            yield homes
    finally:
        generator.set_state(state)


def disturb(originals: Sequence[Tensor], stage: Stage, seed: int) -> None:
    """Set the weights to random values, so that zeros (of a residual branch at its start, say) hide nothing."""
    generator = torch.Generator().manual_seed(seed)
    for p, original in zip(stage.params, originals, strict=True):
        scale = original.float().abs().mean().item() or 1.0
        p.data.copy_(original + scale * noise(original, generator))


def noise(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like)


def check(stage: Stage, method: Method, warn: bool, given: Value) -> None:
    """Raise `Refused` (or warn) unless the compiled graph of this input uses weights as an uncompiled one does."""
    call = stage.call
    assert isinstance(call, Compiled)
    parts = [part.detach().clone() for part in copies.tensors_in(given)]
    needs = [part.requires_grad for part in copies.tensors_in(given)]
    originals = [p.detach().clone() for p in stage.params]

    def gradients(run: Callable[[Any], Any], first: int, second: int) -> list[Tensor]:
        leaves = [part.clone().requires_grad_(need) for part, need in zip(parts, needs, strict=True)]
        with untouched(stage):
            stage.generator.manual_seed(0)
            disturb(originals, stage, first)
            inner = [leaf.clone() for leaf in leaves] if stage.learnt.clones_input else leaves
            roots = grown(run(tuple(inner) if isinstance(given, tuple) else inner[0]))
        disturb(originals, stage, second)
        seeds = torch.Generator().manual_seed(3)
        inputs = [t for t in (*leaves, *stage.params) if t.requires_grad]
        found = torch.autograd.grad(roots, inputs, [noise(y, seeds) for y in roots], allow_unused=True)
        return [torch.zeros_like(x) if g is None else g.to_dense() for x, g in zip(inputs, found, strict=True)]

    with drawing, torch.enable_grad():
        try:
            # F and B on the same weights: this measures how far rounding alone drives the two apart
            rounding = [_distances(*(gradients(run, n, n) for run in (call.module, call))) for n in (1, 2)]
            wanted, found = (gradients(run, 1, 2) for run in (call.module, call))
            apart = _distances(wanted, found)
        except Exception as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            _refuse(f"{stage.label}: the check on which weights its compiled backward runs has failed ({why})", warn)
            return
        finally:
            for p, original in zip(stage.params, originals, strict=True):
                p.data.copy_(original)
    sizes = [float(g.abs().max()) if g.numel() else 0.0 for g in wanted]
    for n, (far, near, size) in enumerate(zip(apart, map(max, *rounding), sizes, strict=True)):
        eps = torch.finfo(wanted[n].dtype).eps
        if not far <= 8 * near + math.sqrt(eps) * size + 8 * eps * max(sizes):
            _refuse(
                f"{stage.label}: its compiled backward does not run on the weights it is given: the graph keeps a copy "
                f"of older weights, or recomputes activations from newer ones (a gradient differs by {far:.1e} of "
                f"{size:.1e}), so that {method!r} would train on other gradients than without compile",
                warn,
            )
            return


def _distances(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[float]:
    return [float((x - y).abs().max()) if x.numel() else 0.0 for x, y in zip(a, b, strict=True)]


def _refuse(found: str, warn: bool) -> None:
    cure = (
        'use compile=True without options of your own, activations="recompute", or method="pipedream" or "gpipe"; '
        'leave compile out, or accept it with debug=pipeback.Debug(weight_functions="warn")'
    )
    if not warn:
        raise Refused(f"{found}; {cure}")
    warnings.warn(f"{found}; {cure}", stacklevel=2)
