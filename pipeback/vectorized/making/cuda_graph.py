"""CUDA graph: captures a function of tensors once and replays it, which takes one launch instead of hundreds.

The graph fixes sizes and addresses. So inputs that change from call to call are copied to the addresses that it reads,
its outputs are copied from the addresses that it writes, and all other tensors stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeback.private import pytree
from pipeback.vectorized.making.bounded_cache import BoundedCache

PLACES = 4  # graphs kept per function; a graph is useless once its memory was freed and reallocated
WARM = 3  # calls before the capture, in which libraries set themselves up


class CudaGraphed:
    """A function(fixed, changing) -> tensors. fixed: tensors that stay in place, such as weights, and may be written.

    There is one graph per set of addresses and shapes; plain numbers among the arguments are part of the key.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self._known: BoundedCache[Any, tuple[list[Tensor], Callable[[], None], Any]] = BoundedCache()

    def __call__(self, fixed: Any, changing: Any) -> Any:
        places, _ = pytree.tree_flatten(fixed)
        given, form = pytree.tree_flatten(changing)
        tensors = [v for v in given if isinstance(v, Tensor)]
        shapes = tuple((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in given)
        key = tuple(t.data_ptr() for t in places), shapes, form
        if key not in self._known:
            copies = [v.clone() if isinstance(v, Tensor) else v for v in given]
            inside = [v for v in copies if isinstance(v, Tensor)]
            call = partial(self.function, fixed, pytree.tree_unflatten(copies, form))
            before = [t.clone() for t in places]
            self._warm(call, cuda=places[0].is_cuda)
            self._known[key] = (inside, *self.captured(call))
            torch._foreach_copy_(places, before)  # undo what the warm-up and the capture have changed
        inside, replay, found = self._known.used(key, most=PLACES)
        torch._foreach_copy_(inside, tensors)
        replay()
        return pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, found)

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
        with torch.cuda.graph(graph):
            found = call()
        return graph.replay, found


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
