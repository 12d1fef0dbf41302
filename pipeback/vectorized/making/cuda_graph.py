"""CUDA graph: captures a function of tensors once and replays it, which takes one launch instead of hundreds.

The graph fixes sizes and addresses. So inputs that change from call to call are copied to the addresses that it reads,
its outputs are copied from the addresses that it writes, and all other tensors stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.private import pytree
from pipeback.vectorized.making.bounded_cache import BoundedCache

PLACES = 4  # graphs kept per function; a graph is useless once its memory was freed and reallocated
WARM = 3  # calls before the capture, in which libraries set themselves up
Pair = tuple[Any, Any]  # a place, and a tensor that is copied there; whatever else they are stays


class Captured(NamedTuple):
    """A graph: `replay` reads what changes in `inside`, and writes its results to `found`."""

    inside: Any
    replay: Callable[[], None]
    found: Any


class CudaGraphed:
    """A function(fixed, changing) -> tensors. fixed: tensors that stay in place, such as weights, and may be written.

    There is one graph per set of addresses and shapes; plain numbers among the arguments are part of the key.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self.then: Callable[[Any, Any], None] = _nothing  # is captured, too: of the results, and of what changes
        self._known: BoundedCache[Any, Captured] = BoundedCache()

    def at(self, fixed: Any, changing: Any) -> Captured:
        """Return the graph for tensors at these addresses and of these shapes; what changes lies where it reads."""
        places, _ = pytree.tree_flatten(fixed)
        given, form = pytree.tree_flatten(changing)
        shapes = tuple((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in given)
        key = tuple(t.data_ptr() for t in places), shapes, form
        if key not in self._known:
            inside = pytree.tree_unflatten([v.clone() if isinstance(v, Tensor) else v for v in given], form)
            call = partial(self._call, fixed, inside)
            before = [t.clone() for t in places]
            self._warm(call, cuda=places[0].is_cuda)
            self._known[key] = Captured(inside, *self.captured(call))
            torch._foreach_copy_(places, before)  # undo what the warm-up and the capture have changed
        found = self._known.used(key, most=PLACES)
        copy_each(zip(pytree.tree_leaves(found.inside), given, strict=True))
        return found

    def _call(self, fixed: Any, changing: Any) -> Any:
        found = self.function(fixed, changing)
        self.then(found, changing)
        return found

    def _warm(self, call: Callable[[], Any], *, cuda: bool) -> None:
        stream = torch.cuda.Stream() if cuda else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                call()
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)

    def captured(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return a function that replays the call, and the tensors to which it writes its results."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                found = call()
        except RuntimeError as error:
            told = str(error).partition("\n")[0]
            raise RuntimeError(f"it cannot become a CUDA graph ({told}); use vectorize=True") from error
        return graph.replay, found


def room_for(nbytes: int, device: torch.device) -> bool:
    """Whether a GPU has memory for graphs beside tensors of so many bytes that wait in place: before a capture they are
    copied, and the graph keeps about as much.
    """
    return device.type != "cuda" or 2 * nbytes <= torch.cuda.mem_get_info(device)[0]


def _nothing(found: Any, changing: Any) -> None:
    pass


def copy_each(pairs: Iterable[Pair]) -> None:
    """Copy tensors to their places, by one call per dtype: a call for several dtypes would launch a kernel for each."""
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for place, t in pairs:
        if isinstance(place, Tensor) and t is not None and t is not place:
            into, tensors = kinds.setdefault(place.dtype, ([], []))
            into.append(place)
            tensors.append(t)
    for into, tensors in kinds.values():
        torch._foreach_copy_(into, tensors)


def side_by_side(calls: Sequence[Callable[[], Any]], cuda: bool) -> list[Any]:
    """Return the results of independent calls; on a GPU each runs in a stream of its own, also within a graph."""
    if not cuda or len(calls) < 2:
        return [call() for call in calls]
    here, streams, found = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in calls], []
    for stream, call in zip(streams, calls, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found.append(call())
    for stream in streams:
        here.wait_stream(stream)
    return found
