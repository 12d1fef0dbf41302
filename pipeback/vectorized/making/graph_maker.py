"""Graph maker: makes and checks the graphs of a stack for a kind of micro-batch, with a compiler or without one, and
chooses how they compute fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.compiled import Options, of_ticks, writes_in_order
from pipeback.stages.stage import Stage
from pipeback.stages.trained_weights import frozen
from pipeback.vectorized.buffers.held_tensors import HeldTensors
from pipeback.vectorized.buffers.ring_buffers import RingBuffers
from pipeback.vectorized.buffers.waiting import Waiting
from pipeback.vectorized.making.bounded_cache import BoundedCache
from pipeback.vectorized.making.fastest_way import Tried, Way, ways
from pipeback.vectorized.making.resized import Otherwise
from pipeback.vectorized.making.shared_graphs import SharedGraphs
from pipeback.vectorized.making.sizes import Sizes
from pipeback.vectorized.making.timing import channels_last, flush_gain, gain
from pipeback.vectorized.making.verify import captured, examples, resized_alike, verified
from pipeback.vectorized.steps.rows import Rows
from pipeback.vectorized.tracing.capture import Unfit
from pipeback.vectorized.tracing.forms import Kind, floating, leaves, packed

Compile = Callable[[Any], Any]
LARGE = 1 << 20  # bytes of weights above which no cache holds a gradient until the step, and a compiler gains nothing


class GraphMaker:
    """Makes the graphs of `stages`, whose weights are `rows`.

    places, length: of the ring buffers (`ring_buffers`). options: those of torch.compile; None: it is not used.
    """

    def __init__(
        self, stages: Sequence[Stage], rows: Rows, places: Sequence[int], length: int, options: Options | None
    ) -> None:
        self.stages, self.rows, self.options = list(stages), rows, options
        self._places, self._length = places, length
        self.compile: Compile | None = None  # compiles both graphs
        self.fuse: Compile | None = None  # compiles whole ticks
        if options is not None:
            self.compile = lambda graph: torch.compile(graph, **options)
            if writes_in_order(options):
                self.fuse = lambda tick: torch.compile(tick, **of_ticks(options))
        self.way = Way()  # how convolutions are computed
        self.tried: list[Tried] | None = None  # the ways, the fastest first, until one is settled on
        self._shared: BoundedCache[Kind, SharedGraphs] = BoundedCache()

    @property
    def plain(self) -> bool:
        """Whether graphs are called without a compiler."""
        return self.fuse is None and self.compile is None

    def learn(self, kind: Kind, x: Any = None) -> Waiting:
        """Make and check the graphs for a kind of micro-batch. x: an input of a stage; None: numbers are made up.

        Raises `Unfit` where the stages cannot run as one.
        """
        for r, n in frozen(self.stages):
            name = next(k for k, p in self.stages[r].module.named_parameters() if p is self.stages[r].params[n])
            raise Unfit(f"{name} of stage {self.stages[r].index} is frozen")
        xs = self._examples(kind, x)
        given = self.stages, self.rows.weights, self.rows.trained, xs, kind, self._places, self._length
        recompute = self.stages[0].keeping is not None
        if self.plain and self.tried is None:
            # where weights lie in a store, another layout in memory would be another layout of what is copied
            found = ways(*given, recompute=recompute)
            self.tried = [one for one in found if not (self.rows.streamed and one.way.last)]
            return self._taken(self.tried[0])
        # a compiler remembers graphs by their code, and only so many forms of each
        rings = verified(*given, recompute=recompute, products=self.way.products, fresh=True)
        if self.fuse is not None:
            large = [n for n in self.rows.trained if self.rows.weights[n].nbytes > LARGE]
            rings = rings.packed(large)
        waiting = self._wait(rings)
        if self.compile is not None:
            graphs = waiting.graphs
            waiting.graphs = graphs._replace(
                forward=self.compile(graphs.forward), backward=self.compile(graphs.backward)
            )
        return waiting

    def settle(self, last: bool | None) -> Waiting | None:
        """Compute convolutions with channels last, or not, as the stages around do; None: in the fastest way. Returns
        the graphs if they are others from now on.
        """
        tried, self.tried = self.tried or [], []  # each holds memory
        if last is None or not tried or self.way.last == last:
            return None
        return self._taken(next(one for one in tried if one.way.last == last))

    def _taken(self, tried: Tried) -> Waiting:
        """Compute convolutions in this way; no micro-batch may be in flight."""
        if tried.way.last != self.way.last:
            self.rows.lay(channels_last if tried.way.last else Tensor.contiguous)
        self.way = tried.way
        tried.rings.view(self.rows.weights)
        return self._wait(tried.rings)

    def _wait(self, rings: RingBuffers) -> Waiting:
        """Let micro-batches wait in such ring buffers, or as they are at a single stage."""
        waiting = HeldTensors(rings) if len(self.stages) == 1 and self.plain else rings
        for stage in self.stages:
            stage.learn(activation_bytes=waiting.slot_bytes)
        return waiting

    def _examples(self, kind: Kind, x: Any) -> list[Tensor]:
        """Return the inputs of one stage for which graphs are made: x where it is of integers, else made-up numbers."""
        made = examples(kind, 1, self.stages[0].device or torch.device("cpu"))
        if x is None:
            return made
        given = [v.detach() for v in leaves(x)]
        return [a if floating(a.dtype) else v for a, v in zip(made, given, strict=True)]

    def lying(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return inputs or gradients of a single stage as its kernels read them fastest from memory.

        Graphs are traced and checked for tensors that lie so. Of others, a GPU's group norm, for one, takes none.
        """
        return [channels_last(t) if self.way.last else t.contiguous() for t in tensors]

    def sizes(self, rings: Waiting) -> Sizes | None:
        """Return graphs for fewer rows; None if there are none."""
        n, trained, weights = len(self.stages), self.rows.trained, self.rows.weights
        if n == 1 or self.stages[0].keeping is not None:
            return None
        m = n - 1 if n > 2 else n + 1  # a single row is traced in another way
        mine = [torch.cat([w, w[:1]])[:m] for w in weights]
        xs, products = self._examples(rings.kind, None), self.way.products
        try:
            other = captured(self.stages, mine, xs, rings.kind, m, products=products)
            sizes = Sizes(rings.written, other, n, m, len(weights), trained)
            resized_alike(rings.written, sizes, weights, xs, n)
        except (Unfit, Otherwise):
            return None
        return sizes

    def shared(self, kind: Kind, xs: Sequence[Tensor] | None = None) -> SharedGraphs:
        """Return the graphs of several micro-batches at once, which share the weights of one stage.

        xs: the inputs of one micro-batch; None: numbers are made up. Raises `Unfit` where there are none.
        """
        if kind not in self._shared:
            given = self._examples(kind, None if xs is None else packed(xs, kind.packed))
            try:
                self._shared[kind] = SharedGraphs(self.stages, given, kind)
            except Unfit:
                raise
            except Exception as error:  # whatever the user's code or torch raises: the stages still run one by one
                raise Unfit(f"torch cannot run several micro-batches at once: {error}") from error
        return self._shared.used(kind)

    # -- how fast they are -------------------------------------------------------------------------------------------

    def gain(self, waiting: Waiting) -> float:
        """Return the speed-up of F and B of all rows at once over autograd, one stage after the other."""
        rows, change = self.rows, channels_last if self.way.last else Tensor.detach
        return gain(self.stages, waiting.written, rows.weights, waiting.kind, waiting.device, change=change)

    def flush_gain(self, kind: Kind, count: int) -> float:
        """Return the speed-up of F and B of so many micro-batches at once, at one stage, over one after the other."""
        stage, device = self.stages[-1], self.stages[-1].device or torch.device("cpu")
        xs = [torch.stack([v] * count) for v in self._examples(kind, None)]
        return flush_gain(stage, self.shared(kind).at(count, xs), xs, device, whole=kind.packed)

    def single(self, kind: Kind) -> Tried | None:
        """Return the fastest graphs of the last stage by itself; None if there are none other than those of all."""
        if len(self.stages) == 1 or not self.plain:
            return None
        last = self.stages[-1]
        weights = [p.detach() for p in last.module.parameters()]
        return ways([last], weights, self.rows.trained, self._examples(kind, None), kind, [0], 1)[0]
