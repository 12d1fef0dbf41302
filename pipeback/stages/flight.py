"""Flight: a micro-batch between its forward and its backward at one stage, and the values that cross boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeback.private import casts_anywhere, catch
from pipeback.stages.home import Repetition, StackedFlight
from pipeback.stages.module_settings import Settings
from pipeback.tensors import accelerators
from pipeback.tensors.batches import copied, whole
from pipeback.tensors.copies import to_device
from pipeback.tensors.weight_list import Weights

Value = Any  # what crosses a boundary: a tensor or a tuple of tensors


class Flight:
    """A micro-batch between its forward and its backward at one stage."""

    __slots__ = (
        "again", "autocast", "caught", "entry", "frozen", "heard", "leaves", "options", "output", "owned", "row",
        "settings", "target", "tuple_input", "version",
    )  # fmt: skip

    def __init__(self, leaves: tuple[Tensor, ...], output: Value, target: Any, version: int, tuple_input: bool) -> None:
        self.tuple_input = tuple_input
        self.autocast: accelerators.Autocast = _around(leaves) if casts_anywhere() else ()  # what F ran under
        self.leaves = leaves  # the inputs, cut from the graph of the stage before
        self.output = rooted(output)  # where B begins
        self.target = target
        self.version = version  # the weights F used, counted in updates of this stage
        self.owned: Weights | None = None  # shifted weights that B will need again
        self.options: Any = None  # the optimizers' options when the micro-batch was pushed
        self.entry = 0
        self.heard = False  # whether its forward has registered hooks
        self.again: Repetition | None = None  # gives B the output, if F has kept no graph
        self.caught: list[Tensor | None] | None = None  # gradients whose strides differ from their leaf's
        self.settings: Settings | None = None  # of the modules at F, if they have been set otherwise since
        self.frozen: Sequence[int] | None = None  # the weights that were frozen at F, if others have been since
        self.row: StackedFlight | None = None  # where a stack keeps it, if one has done F

    def upstream(self) -> Value:
        """The gradient for the stage before, None if it has none."""
        grads = [x.grad for x in self.leaves]
        if self.caught is not None:
            grads = [mine if odd is None else odd for mine, odd in zip(grads, self.caught, strict=True)]
        return tuple(grads) if self.tuple_input else grads[0]

    def listen(self) -> None:
        """Catch gradients whose strides differ from their leaf's. `.grad` would be a copy with the leaf's strides, on
        which kernels of the stage before would round differently than in one graph.
        """
        self.caught = [None] * len(self.leaves)
        for n, leaf in enumerate(self.leaves):
            if leaf.requires_grad:
                dense = leaf.layout is torch.strided and leaf.is_contiguous()
                strides = leaf.stride() if dense else None  # otherwise `.grad` may differ even if strides agree
                catch(leaf, partial(_catch, self.caught, n, strides))


def keep_settings(flights: Iterable[Flight], settings: Settings | None) -> None:
    """Keep for these flights how the modules were set at their F; they are set otherwise from now on."""
    for flight in flights:
        if flight.settings is None:
            flight.settings = settings


def keep_frozen(flights: Iterable[Flight], frozen: Sequence[int]) -> None:
    """Keep for these flights which weights were frozen at their F; others are from now on."""
    for flight in flights:
        if flight.frozen is None:
            flight.frozen = frozen


class Root:
    """An output as B needs it: where its graph begins, its form, and nothing of its memory.

    The next stage has the memory for as long as it needs it. If the graph needs it too, it has saved it.
    """

    __slots__ = ("device", "dtype", "edge", "requires_grad", "shape", "strides")
    edge: GradientEdge | None

    def __init__(self, output: Tensor) -> None:
        self.device, self.dtype, self.shape, self.strides = output.device, output.dtype, output.shape, output.stride()
        self.requires_grad = output.requires_grad
        node = output.grad_fn
        if node is None:
            self.edge = None
        elif isinstance(node, FunctionCtx):  # of a Function in Python, which alone does not keep its graph
            self.edge = get_gradient_edge(output)
        else:
            self.edge = GradientEdge(node, output.output_nr, None)

    @property
    def grad_fn(self) -> Any:
        """The node that has computed the output."""
        return None if self.edge is None else self.edge.node

    def stride(self) -> tuple[int, ...]:
        """The strides of the output."""
        return self.strides


def rooted(output: Value) -> Value:
    """An output without its memory; as it is, if its graph is a leaf or its layout has no strides."""
    if isinstance(output, tuple):
        return tuple([rooted(part) for part in output])
    held = not isinstance(output, Tensor) or output.layout is not torch.strided
    return output if held or (output.requires_grad and output.grad_fn is None) else Root(output)


def begins(output: Tensor | Root) -> Any:
    """What autograd begins a backward with."""
    return output.edge if type(output) is Root else output


def weighed(output: Tensor | Root, weight: float) -> Tensor:
    """The gradient of a loss that counts so much."""
    return torch.full(output.shape, weight, dtype=output.dtype, device=output.device)


def _around(leaves: tuple[Tensor, ...]) -> accelerators.Autocast:
    kind = leaves[0].device.type if leaves else "cpu"
    return accelerators.casting() if torch.is_autocast_enabled(kind) else ()


def _catch(caught: list[Tensor | None], n: int, strides: tuple[int, ...] | None, gradient: Tensor) -> None:
    # a gradient with the leaf's strides is in `.grad` as it is
    if gradient.layout is not torch.strided or gradient.stride() != strides:
        caught[n] = gradient


def laid_alike(output: Tensor | Root, gradient: Tensor) -> bool:
    """Whether a gradient has the strides of its output and no gaps."""
    if gradient.layout is not torch.strided or not (isinstance(output, Root) or output.layout is torch.strided):
        return False
    return gradient.stride() == output.stride() and gradient.is_contiguous()


def grown(output: Value) -> list[Any]:
    """The tensors of an output that require a gradient."""
    return [y for y in (output if isinstance(output, tuple) else (output,)) if y.requires_grad]


def cut(output: Value) -> Value:
    """The values of an output without its graph."""
    if isinstance(output, tuple):
        return tuple(part.detach() for part in output)
    return output.detach()


def reported(output: Value) -> Value:
    """What the last stage gives: the values of its output, a loss in memory of its own.

    A mean may lie in the memory of all the losses that it is of, and a push may wait for thousands of means.
    """
    value = cut(output)
    alone = isinstance(value, tuple) or value.dim() or value.untyped_storage().nbytes() == value.element_size()
    return value if alone else value.clone()


def for_loss(device: torch.device | None, target: Any) -> Any:
    """The target on the stage's device, in the structure in which it was pushed."""
    return whole(to_device(device, target))


def for_trial(stage: Any, target: Any) -> Any:
    """The target for a run of a stage that trains nothing: a copy, if its loss may write into it."""
    return copied(target) if stage.judges else target


class ActivationPolicy(Protocol):
    """How one stage keeps what its forward (F) leaves for its backward (B), if not on the device."""

    stashes: bool  # whether B uses functions of the weights as F has computed them
    apart: bool  # whether backwards are done one by one, for memory
    away: bool  # whether what a graph saved is kept in host memory

    def forward(self, stage: Any, flight: Flight, given: Value) -> Value:
        """F: run the module on its input, leave in the flight what B needs, and return the output."""

    def adopt(self, flight: Flight) -> None:
        """Take in a flight from a state, which goes on as it began."""

    def learn(self, stage: Any, x: Value, target: Any) -> None:
        """Find out, in the rehearsal, what the policy must know of the module."""

    def measure(self, stage: Any, flight: Flight, output: Value) -> dict[str, int]:
        """The bytes of a micro-batch, as `Learnt` has them, given one between F and B and what B differentiates."""
