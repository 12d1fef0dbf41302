"""Recomputed functions: functions of the weights that a graph would save are recomputed when B needs them.

    F   (forward)    y = f(x, h(w_F)); for h(w) = 1 + w, g·v/‖v‖, −exp(w), cast(w), … the graph keeps the recipe of h
    B   (backward)   recomputes h(w_B) from the weights in force at B

So B of plain PB runs entirely on the newest weights, and saved states of micro-batches in flight hold no old ones. All
operations of F are recorded, which costs time per operation; h has to be cheap: elementwise arithmetic, norms, sums,
repetitions, casts, rows that are looked up (a table of relative positions), interpolation, Fourier transforms.

Where a stage saves casts alone, as under autocast, nothing is recorded: the graph tells them (`weight_casts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipeback.private import identity, in_backward, pytree
from pipeback.splitting.control_flow import as_written
from pipeback.splitting.provenance import WEIGHTS, Provenance, memory_of, written
from pipeback.stages.compiled import Compiled
from pipeback.stages.copy_slices import Handle, Handles
from pipeback.stages.flight import Value
from pipeback.stages.stage import Stage
from pipeback.stages.weight_casts import WeightCast, cast_of
from pipeback.tensors.copies import equal, tensors_in

_CHEAP = {
    "aten::" + name
    for name in (
        "_to_copy", "clone", "_weight_norm_interface", "linalg_vector_norm", "norm", "sum", "mean", "amax", "amin",
        "cat", "stack", "cumsum", "repeat", "_unsafe_view", "index", "index_select", "gather", "embedding", "flip",
        "roll", "constant_pad_nd", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d",
        "upsample_trilinear3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
        "_fft_r2c", "_fft_c2r", "_fft_c2c", "complex",
    )
}  # fmt: skip


class Part(NamedTuple):
    """A weight, or a view of it."""

    weight: Tensor
    size: Any
    stride: Any
    offset: int  # within the weight

    def make(self) -> Tensor:
        w = self.weight.detach()
        return w.as_strided(self.size, self.stride, w.storage_offset() + self.offset)


class ComputedTensor(NamedTuple):
    """The output of an operation, or one of its outputs."""

    func: Any
    args: Any
    kwargs: Any
    number: int | None

    def make(self) -> Tensor:
        args, kwargs = pytree.tree_map(_remade, (self.args, self.kwargs), is_leaf=_is_source)
        output = self.func(*args, **kwargs)
        made: Tensor = output if self.number is None else output[self.number]
        return made


def _is_source(value: Any) -> bool:
    return isinstance(value, (Part, ComputedTensor))


def _remade(value: Any) -> Any:
    return value.make() if _is_source(value) else value


class Recorder(Provenance):
    """Records, for every function of the weights in a forward, how it is computed."""

    def __init__(self, data: list[Tensor], weights: list[Tensor]) -> None:
        super().__init__(data, weights)
        self._trained = weights
        self._made: dict[Any, ComputedTensor] = {}
        self._alive: list[Tensor] = []  # kept so that no other tensor gets their memory
        self._changed: set[int] = set()  # the memory that was written to

    def source(self, tensor: Tensor) -> Part | ComputedTensor | None:
        """How a tensor that depends on the weights alone is computed; None if that is unknown or not cheap."""
        if memory_of(tensor) in self._changed:
            return None
        for w in self._trained:
            offset = tensor.storage_offset() - w.storage_offset()
            if identity(w) == identity(tensor) and tensor.dtype == w.dtype and 0 <= offset < max(w.numel(), 1):
                return Part(w, tensor.shape, tensor.stride(), int(offset))
        return self._made.get(_place(tensor))

    def done(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Record an operation if it computes a cheap function of the weights."""
        changed = [memory_of(tensor) for tensor in written(func, args, kwargs)]
        results = output if isinstance(output, (list, tuple)) else [output]
        if self._changed:  # whose memory may have been freed since, and may belong to a result now
            before = {memory_of(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            self._changed -= {memory_of(t) for t in results if isinstance(t, Tensor)} - before
        self._changed.update(changed)
        made = [t for t in results if isinstance(t, Tensor) and self.of(t) == WEIGHTS]
        if changed or not made:
            return
        self._alive += made
        if _cheap(func):
            unknown = object()
            given, named = pytree.tree_map(lambda v: self._input(v, unknown), (args, kwargs))
            if not any(leaf is unknown for leaf in pytree.tree_leaves((given, named), is_leaf=_is_source)):
                for number, t in enumerate(results):
                    if isinstance(t, Tensor):
                        at = number if isinstance(output, (list, tuple)) else None
                        self._made.setdefault(_place(t), ComputedTensor(func, given, named, at))

    def _input(self, value: Any, unknown: object) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self.of(value) == WEIGHTS:
            return self.source(value) or unknown
        return unknown if memory_of(value) in self._changed else value


def _cheap(func: Any) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return torch.Tag.pointwise in func.tags or func.is_view or func._schema.name in _CHEAP


def _place(tensor: Tensor) -> Any:
    return memory_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class _Again:
    """Recomputes. Graphs hold it, so it must not lead back to the stage, which holds the graphs in flight."""

    def __init__(self) -> None:
        self.known: set[int] | None = None  # gets the memory of what is recomputed for somebody who looks into a graph
        self.looked: list[Tensor] = []

    def __call__(self, source: Part | ComputedTensor | WeightCast) -> Tensor:
        with torch.no_grad():
            made = source.make()
        if not in_backward() and self.known is not None:
            self.known.add(identity(made))
            self.looked.append(made)
        return made


class KeptElsewhere(Protocol):
    """A saved tensor that waits elsewhere."""

    def back(self) -> Tensor: ...


class Afresh:
    """What such a stage calls instead of its module. keep: where it keeps what it does not recompute, if elsewhere."""

    keep: Callable[[Tensor], KeptElsewhere] | None = None

    def __init__(self, stage: Stage, inner: Callable[[Value], Value]) -> None:
        self._stage, self.inner = stage, inner
        self.handles: Handles | None = None  # those of the tensors that the last call has saved
        self.casts: bool | None = None  # whether the graph tells what it recomputes, casts alone; None: not known yet
        self._again = _Again()

    def __call__(self, given: Value) -> Value:
        if not torch.is_grad_enabled():
            return self.inner(given)
        if self.casts:
            weights = {id(w): w for w in self._stage.params}
            return self._call(given, lambda tensor: cast_of(tensor, weights), nullcontext())
        recorder = Recorder(tensors_in(given), list(self._stage.params))
        return self._call(given, partial(_recorded, recorder), recorder)

    def casts_alone(self, given: Value) -> bool:
        """Whether the graph tells all that a forward of this input records, by the same values."""
        recorder = Recorder(tensors_in(given), list(self._stage.params))
        weights, alike = {id(w): w for w in self._stage.params}, True

        def both(tensor: Tensor) -> Part | ComputedTensor | None:
            nonlocal alike
            known, told = _recorded(recorder, tensor), cast_of(tensor, weights)
            if known is not None and told is not None:
                with torch.no_grad():
                    one, other = known.make(), told.make()
                alike = alike and (one.dtype, one.stride()) == (other.dtype, other.stride()) and equal(one, other)
            else:
                alike = alike and known is None and told is None
            return known

        self._call(given, both, recorder)
        return alike

    def _call(
        self,
        given: Value,
        source: Callable[[Tensor], Part | ComputedTensor | WeightCast | None],
        watched: AbstractContextManager[Any],
    ) -> Value:
        """Run the module. source: how a saved tensor is computed from the weights alone, if it is."""
        torch.clear_autocast_cache()  # a cached cast would have no recorded origin
        handles, again = Handles(self._stage.label), self._again
        self.handles = handles
        keep, sources = self.keep or handles.pack, [source]

        def pack(tensor: Tensor) -> Handle | KeptElsewhere | Part | ComputedTensor | WeightCast:
            return sources[0](tensor) or keep(tensor)

        def unpack(packed: Handle | KeptElsewhere | Part | ComputedTensor | WeightCast) -> Tensor:
            if isinstance(packed, (Part, ComputedTensor, WeightCast)):
                return again(packed)
            return handles.unpack(packed) if isinstance(packed, Handle) else packed.back()

        with as_written(), saved_tensors_hooks(pack, unpack), watched:
            output = self.inner(given)
        sources.clear()  # torch holds `pack` as long as the graph, and a recorder holds what it has seen
        torch.clear_autocast_cache()
        return output

    @contextmanager
    def keeping(self, keep: Callable[[Tensor], KeptElsewhere]) -> Iterator[None]:
        """A context for one forward that keeps by `keep` what it does not recompute."""
        self.keep = keep
        try:
            yield
        finally:
            self.keep = None

    @contextmanager
    def looked_into(self, known: set[int]) -> Iterator[None]:
        """A context in which `known` gets the memory of what is recomputed for somebody who looks into a graph."""
        self._again.known = known
        try:
            yield
        finally:
            self._again.known, self._again.looked = None, []


def looking(stage: Stage, known: set[int]) -> AbstractContextManager[None]:
    """A context for looking into a graph of the stage: `known` gets the memory of what B would recompute."""
    return stage.call.looked_into(known) if isinstance(stage.call, Afresh) else nullcontext()


def _recorded(recorder: Recorder, tensor: Tensor) -> Part | ComputedTensor | None:
    """What autograd would save, a view of a weight for one, is not recomputed."""
    return recorder.source(tensor) if recorder.of(tensor) == WEIGHTS and not recorder.lives(tensor) else None


def as_it_was(stage: Stage, afresh: bool) -> Callable[[Value], Value]:
    """Return what a stage must call to rebuild graphs in flight. afresh: they recomputed functions of the weights."""
    if isinstance(stage.call, Compiled):
        return stage.call
    inner = stage.call.inner if isinstance(stage.call, Afresh) else stage.call
    return Afresh(stage, inner) if afresh else inner
