"""Offload (activations="host"): the tensors that autograd saves for the backward wait in host memory.

    F   (forward) copies every saved tensor to the host; its memory on the device is free once F no longer needs it
    B   (backward) fetches the tensors node by node, with the strides that they had: the bits are the same

On a device with streams the copies go through pinned memory on streams of their own, and the next tensor is fetched
while a node computes. Elsewhere they are plain copies. Tensors that the stage holds anyway are not copied: weights,
buffers, and the input and target that the flight keeps. Functions of the weights that B recomputes are not kept at all
(`recomputed_functions`), and attributes that a custom Function sets on its ctx without `save_for_backward` stay.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from pipeback.private import identity, in_backward
from pipeback.stages.flight import Flight, Value, grown, rooted
from pipeback.stages.recomputed_functions import Afresh
from pipeback.stages.saved_graph import held_bytes, nodes
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators
from pipeback.tensors.copies import pieces, tensors_in
from pipeback.tensors.layout import Layout, form_of


class HostActivations:
    """The policy by which one stage keeps activations in host memory."""

    stashes = True  # the copies are what F computed
    apart = False
    away = True

    def __init__(self) -> None:
        self.copied = 0  # bytes that the last forward has copied

    def forward(self, stage: Stage, flight: Flight, given: Value) -> Value:
        """F: return the output; the flight keeps the root of its graph, but not the output's memory."""
        packing, call = _Packing(stage, flight), stage.call
        recomputed = call.keeping(packing) if isinstance(call, Afresh) else nullcontext()
        try:
            with saved_tensors_hooks(packing, _back), recomputed:
                output = stage.compute(given, flight.target)
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise ValueError(
                f"{stage.label}: its forward differentiates by torch.func, which activations='host' does not go with; "
                f"give its activations as {{{stage.index}: 'device'}}, or activations='device' for all stages"
            ) from error
        self.copied = packing.copied
        packing.end()
        flight.output = rooted(output)
        return output

    def adopt(self, flight: Flight) -> None:
        """Do nothing: the saved tensors of a restored flight are in host memory already."""

    def learn(self, stage: Stage, x: Value, target: Any) -> None:
        """Do nothing: the policy need not know the module."""

    def measure(self, stage: Stage, flight: Flight, output: Value) -> dict[str, int]:
        """The bytes that a micro-batch holds on the device and in host memory.

        Raises ValueError if a saved tensor has no values yet when autograd gives it to the hook.
        """
        if any(node.name().startswith("RreluWithNoise") for node in nodes(grown(output))):
            raise ValueError(
                f"{stage.label}: RReLU saves its random numbers for the backward before torch has drawn them, so that "
                f"activations='host' would copy memory without values; give its activations as {{{stage.index}: "
                "'device'}, or activations='device' or 'recompute' for all stages"
            )
        kept = [*flight.leaves, *tensors_in(flight.target)]
        here = held_bytes([], kept, list(stage.module.parameters()))
        return {"activation_bytes": here, "host_bytes": self.copied}


class _Packing:
    """The hook that autograd calls for every tensor that one forward saves.

    The graph holds this object in C++, where Python's garbage collector does not look. So it must not refer to the
    graph, not even through the stage and its flights.
    """

    def __init__(self, stage: Stage, flight: Flight) -> None:
        self.label, self.device = stage.label, stage.device
        # by storage, not by address: the memory under a weight may be freed and reallocated
        kept = [*(p for _, _, p, _ in stage.home.places), *stage.module.buffers(), *flight.leaves]
        self.kept = {identity(piece) for t in (*kept, *tensors_in(flight.target)) for piece in pieces(t)}
        self.seen: dict[tuple[Any, ...], _Away] = {}
        self.alive: list[StorageWeakRef] = []  # while these are there, no other storage gets the same name
        self.last: _Away | None = None
        self.copied = 0

    def __call__(self, tensor: Tensor) -> _Away | _Stays:
        if tensor.layout is not torch.strided or tensor.device != self.device:
            return _Stays(tensor, self.label)
        storage = tensor.untyped_storage()
        if identity(storage) in self.kept:
            return _Stays(tensor, self.label)
        version = tensor._version
        name = identity(storage), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version
        away = self.seen.get(name)
        if away is None:
            self.alive.append(StorageWeakRef(storage))
            self.last = away = self.seen[name] = _Away(tensor, self.last)
            self.copied += away.elements.nbytes
        return away

    def end(self) -> None:
        """End the forward: from now on only the graph's nodes keep the copies alive."""
        self.kept, self.seen, self.alive, self.last = set(), {}, [], None


class _Stays:
    """A saved tensor that is not copied. With hooks, autograd no longer checks that it was not changed in place."""

    __slots__ = ("label", "tensor", "version")

    def __init__(self, tensor: Tensor, label: str) -> None:
        self.tensor, self.version, self.label = tensor.detach(), tensor._version, label

    def back(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"{self.label}: a tensor of shape {tuple(self.tensor.shape)} that the backward needs was changed in "
                "place after the forward; change a clone"
            )
        return self.tensor


class _Away:
    """A saved tensor in host memory: its elements without gaps, and the form to give them again."""

    __slots__ = ("before", "coming", "device", "done", "elements", "form")

    def __init__(self, tensor: Tensor, before: _Away | None) -> None:
        self.form, self.device = form_of(tensor), tensor.device
        elements = self.form.elements(tensor)
        if not accelerators.has_streams(self.device):
            self.elements = elements.clone(memory_format=torch.contiguous_format).cpu()
            return
        self.before = before  # what was saved before is asked for next
        self.coming: tuple[Tensor, torch.Event] | None = None
        out = _streams(self.device)[0]
        out.wait_stream(accelerators.current(self.device))
        with accelerators.on(out):
            self.elements = torch.empty(elements.shape, dtype=elements.dtype, device="cpu", pin_memory=True)
            self.elements.copy_(elements, non_blocking=True)
            self.done = out.record_event()
        tensor.record_stream(out)

    def back(self) -> Tensor:
        if not accelerators.has_streams(self.device):
            plain = not accelerators.away(self.device) and _dense(self.form)
            return self.elements.as_strided(*self.form[1:3]) if plain else self._formed()
        current = accelerators.current(self.device)
        if self.coming is None:
            self._bring()
        assert self.coming is not None
        (tensor, arrived), self.coming = self.coming, None
        current.wait_event(arrived)
        tensor.record_stream(current)
        if in_backward():  # a backward, not somebody who looks in
            before, self.before = self.before, None
            if before is not None and before.coming is None:
                before._bring()
        return tensor

    def _bring(self) -> None:
        into = _streams(self.device)[1]
        into.wait_event(self.done)
        with accelerators.on(into):
            self.coming = self._formed(), into.record_event()

    def _formed(self) -> Tensor:
        tensor = self.form.empty(self.device)
        self.form.elements(tensor).copy_(self.elements, non_blocking=True)
        return tensor


def _back(packed: _Away | _Stays) -> Tensor:
    return packed.back()


@lru_cache(1024)
def _dense(form: Layout) -> bool:
    """Whether a tensor of this form has its elements one after the other, without gaps."""
    expected = 1
    for stride, size in sorted((t, n) for n, t in zip(form.shape, form.stride, strict=True) if n != 1 and t):
        if stride != expected:
            return False
        expected *= size
    return not form.shift


@cache
def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """Return the streams for copies out and in, so that neither waits for the other."""
    return torch.Stream(device), torch.Stream(device)
