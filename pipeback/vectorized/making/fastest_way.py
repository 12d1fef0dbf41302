"""Fastest way: tries how the convolutions of stages that run as one are computed fastest, and takes that.

By the library's kernels, on weights as they lie in memory or, in a single stage on the CPU, with channels last; or, of
one sample, as products of matrices (`convolutions`). What is fastest depends on sizes and processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.tensors.accelerators import away
from pipeback.vectorized.buffers.ring_buffers import RingBuffers
from pipeback.vectorized.making.timing import channels_last, seconds, trial
from pipeback.vectorized.making.verify import verified
from pipeback.vectorized.tracing.capture import Unfit
from pipeback.vectorized.tracing.forms import Kind
from pipeback.vectorized.tracing.graphs import Graphs

CONVOLUTION = torch.ops.aten.convolution.default


class Way(NamedTuple):
    """A way to compute convolutions. last: with channels last. products: as products of matrices."""

    last: bool = False
    products: bool = False


class Tried(NamedTuple):
    """A way that was tried. call: F and B of all rows. seconds: how long that takes; 0 if there is no other way."""

    way: Way
    rings: RingBuffers
    call: Callable[[], Any]
    seconds: float = 0.0


def ways(
    stages: Sequence[Stage],
    weights: Sequence[Tensor],
    trained: Sequence[int],
    xs: Sequence[Tensor],
    kind: Kind,
    places: Sequence[int],
    length: int,
    *,
    recompute: bool = False,
) -> list[Tried]:
    """Return all ways, with ring buffers for each, the fastest first; with torch's deterministic algorithms the first
    way alone, since times must not change bits then. The arguments are those of `verified`.

    Raises `Unfit` if there is none.
    """
    given = stages, weights, trained, xs, kind, places, length
    rings, rows = verified(*given, recompute=recompute), len(stages)
    calls = [trial(rings.written, weights, kind, rings.device, rows=rows)]
    found = [Tried(Way(), rings, calls[0])]
    if recompute or not _convolves(rings.written) or torch.are_deterministic_algorithms_enabled():
        return found
    if rows == 1 and not away(rings.device):  # a GPU's group norm takes no channels last
        call = trial(rings.written, weights, kind, rings.device, rows=rows, change=channels_last)
        found.append(Tried(Way(last=True), rings, call))
    if all(shape[:1] == (1,) for shape, _ in kind.inputs) and all(w.is_contiguous() for w in weights):
        try:
            other = verified(*given, products=True)
        except Unfit:
            pass  # not every convolution can be written so
        else:
            call = trial(other.written, weights, kind, rings.device, rows=rows)
            found.append(Tried(Way(products=True), other, call))
    times = seconds([one.call for one in found], rings.device)
    timed = [one._replace(seconds=time) for one, time in zip(found, times, strict=True)]
    return sorted(timed, key=lambda one: one.seconds)


def _convolves(graphs: Graphs) -> bool:
    nodes = graphs.forward.__self__.graph.nodes  # type: ignore[attr-defined]
    return any(node.target is CONVOLUTION for node in nodes)
