"""Stage: one module with its weights, optimizer and what it has in flight. It knows no neighbours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.method import Method, State, Weights

Value = Any  # what crosses a boundary: a tensor or a tuple of tensors
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_drawing = threading.Lock()  # the default generator is one a process; a stage that draws has it to itself


class Flight:
    """A micro-batch between its forward and its backward at one stage."""

    __slots__ = ("entry", "leaves", "options", "output", "owned", "target", "tuple_input", "version")

    def __init__(self, leaves: tuple[Tensor, ...], output: Value, target: Any, version: int, tuple_input: bool) -> None:
        self.tuple_input = tuple_input
        self.leaves = leaves  # the inputs, cut from the graph of the stage before
        self.output = output  # on the last stage the loss, else what was sent on
        self.target = target
        self.version = version  # the weights F used, counted in updates of this stage
        self.owned: Weights | None = None  # shifted weights that B will need again
        self.options: Any = None  # the optimizers' options when the micro-batch was pushed
        self.entry = 0


class Stage:
    """Module, weights and optimizer of stage `index`; `forward`, `backward` and `update` do the three operations.

    The module keeps the user's parameters, which the graphs in flight refer to. The optimizer steps `weights`:
    other parameters on the same storage with a version counter of their own, so that autograd does not mistake
    an update between F and B for an error. Contents change, storage never does.
    """

    def __init__(
        self,
        index: int,
        stages: int,
        module: nn.Module,
        name: str,
        method: Method,
        optimizer: OptimizerFactory,
        loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> None:
        self.index, self.stages, self.module, self.name, self.loss = index, stages, module, name, loss
        self.last = index == stages - 1
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.weights = [nn.Parameter(p.data) for p in self.params]
        first = next(module.parameters(), None)
        self.device = None if first is None else first.device
        # a stage without weights still has an optimizer, so that schedulers attach to every stage alike
        self.optimizer = optimizer(list(self.weights) or [nn.Parameter(torch.empty(0))])
        self.state: State = {}
        self.stash = method.copies == "stash"
        self.history = method.history(index, stages)
        self.version = 0
        self.flights: dict[int, Flight] = {}
        self.versions: dict[int, Weights] = {}  # older weights that are still needed, by version
        self.scratch: Weights | None = [torch.empty_like(w) for w in self.weights] if method.copies == "scratch" else None
        self.grads: list[Tensor | None] = []  # summed over the micro-batches of the coming update
        self.count = 0.0  # how many micro-batches (or samples) are in the sum
        self.options: Any = None  # the options of the last micro-batch gone backward
        self.stream: Tensor | None = None  # the random state of a stage that draws
        self.clones_input = False  # a module that changes its input in place gets a copy
        self.keeps_gradients = False  # a weight's gradient may share memory with the input's
        self.activation_bytes = 0  # of one micro-batch, measured in the rehearsal
        self.peak_flights = 0
        self.peak_copies = 1.0

    # -- the three operations ------------------------------------------------------------------------------------

    def forward(self, mb: int, x: Value, target: Any = None) -> Value:
        """F(mb) on whatever the weights hold; returns the output cut from the graph (on the last stage the loss)."""
        leaves, given = self.enter(x)
        if self.stream is None:
            output = self.run(given, target)
        else:
            with _drawing:
                generator = self.generator
                outside = generator.get_state()
                generator.set_state(self.stream)
                try:
                    output = self.run(given, target)
                finally:
                    self.stream = generator.get_state()
                    generator.set_state(outside)
        self.flights[mb] = Flight(leaves, output, target, self.version, isinstance(x, tuple))
        if len(self.flights) > self.peak_flights:
            self.peak_flights = len(self.flights)
        return cut(output)

    def backward(self, mb: int, grad: Value = None) -> Value:
        """B(mb): adds to the gradient sum and returns the gradient of the input, shaped like the input."""
        roots, seeds, inputs = self.roots(mb, grad)
        found = torch.autograd.grad(roots, inputs, seeds, allow_unused=True) if roots else ()
        return self.accept(mb, found)

    def update(self, mb: int) -> None:
        """U(mb) of plain training: one step on the averaged gradient. Methods go through `Worker`."""
        self.average(None)
        self.optimizer.step()
        self.version += 1

    # -- their parts, which a worker joins over several stages ---------------------------------------------------

    def enter(self, x: Value) -> tuple[tuple[Tensor, ...], Value]:
        """Leaves of a graph of their own from what was sent: all of them, and as the module takes them."""
        parts = x if isinstance(x, tuple) else (x,)
        leaves = []
        for part in parts:
            leaf = part.detach()
            if self.device is not None and leaf.device != self.device:
                leaf = leaf.to(self.device)
            if self.index > 0 and leaf.is_floating_point():
                leaf.requires_grad_()
            leaves.append(leaf)
        given: list[Tensor] = leaves
        if self.clones_input:
            given = [leaf.clone() for leaf in leaves]
        return tuple(leaves), tuple(given) if isinstance(x, tuple) else given[0]

    def run(self, given: Value, target: Any) -> Value:
        """The module, and on the last stage the loss."""
        output = self.module(given)
        if self.last and self.loss is not None:
            return self.loss(output, target)
        return output

    def roots(self, mb: int, grad: Value) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
        """What autograd needs for B(mb): outputs, their gradients, and the inputs to differentiate by."""
        flight = self.flights[mb]
        outputs = flight.output if isinstance(flight.output, tuple) else (flight.output,)
        grads = grad if isinstance(grad, tuple) else (grad,)
        roots: list[Tensor] = []
        seeds: list[Tensor | None] = []
        for y, g in zip(outputs, grads, strict=True):
            if y.requires_grad and (g is not None or self.last):
                roots.append(y)
                seeds.append(g if g is None or g.device == y.device else g.to(y.device))
        if not roots:
            return [], [], []
        return roots, seeds, [x for x in flight.leaves if x.requires_grad] + self.params

    def accept(self, mb: int, found: Sequence[Tensor | None]) -> Value:
        """Take B(mb)'s results, in the order of `roots`' inputs; returns the gradient to send upstream."""
        flight = self.flights.pop(mb)
        leaves = flight.leaves
        if not found:
            self.add([None] * len(self.params))
            upstream: list[Tensor | None] = [None] * len(leaves)
        else:
            asked = sum(x.requires_grad for x in leaves)
            given = iter(found[:asked])
            upstream = [next(given) if x.requires_grad else None for x in leaves]
            self.add(found[asked:])
        self.options = flight.options
        return tuple(upstream) if len(upstream) != 1 else upstream[0]

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Sum the gradients of one more micro-batch, in micro-batch order."""
        self.count += 1
        if not self.grads:
            self.grads = [None if g is None else g.clone() for g in grads] if self.keeps_gradients else list(grads)
            return
        self.grads = [g if old is None else old if g is None else old + g for old, g in zip(self.grads, grads, strict=True)]

    def average(self, clip_norm: float | None, divisor: float | None = None) -> None:
        """Divide the sum once by the true count, clip it, and hand it to the optimizer as `.grad`."""
        count = self.count if divisor is None else divisor
        grads = self.grads
        if count != 1:
            grads = [None if g is None else g / count for g in grads]
        if clip_norm is not None and any(g is not None for g in grads):
            norm = torch.nn.utils.get_total_norm([g for g in grads if g is not None])
            scale = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
            grads = [None if g is None else g * scale.to(g.dtype) for g in grads]
        for w, g in zip(self.weights, grads, strict=True):
            w.grad = g
        self.grads, self.count = [], 0.0

    @property
    def generator(self) -> torch.Generator:
        """The generator that the stage's random layers draw from."""
        if self.device is None or self.device.type != "cuda":
            return torch.default_generator
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return torch.cuda.default_generators[index]

    # -- versions ------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Before U: copy the current version if anything will still need it, and let go of those nothing will."""
        self.release(self.version + 1)
        current = self.version
        if current not in self.versions and self.weights and (self.history or self._needed(current)):
            self.versions[current] = [w.detach().clone() for w in self.weights]
        self.peak_copies = max(self.peak_copies, self.copies())

    def release(self, version: int | None = None) -> None:
        """Drop the versions that no flight uses and that, at `version`, no later forward may ask for."""
        oldest = (self.version if version is None else version) - self.history
        for old in [v for v in self.versions if v < oldest and not self._needed(v)]:
            del self.versions[old]

    def _needed(self, version: int) -> bool:
        return any(f.version == version and f.owned is None for f in self.flights.values())

    def past(self, version: int) -> Weights:
        """The weights after `version` updates: the live ones, or a kept copy."""
        if version == self.version:
            return self.weights  # type: ignore[return-value]
        try:
            return self.versions[version]
        except KeyError:
            kept = [*sorted(self.versions), self.version]
            raise RuntimeError(f"version {version} was asked for, but only {kept} are kept; raise Method.history") from None

    def copies(self) -> float:
        """Copies of the weights held now: the live one, scratch, kept versions and shifted weights in flight."""
        owned = sum(f.owned is not None for f in self.flights.values())
        return 1.0 + (self.scratch is not None) + len(self.versions) + owned

    def bytes(self) -> int:
        """Bytes of one copy of the trainable weights."""
        return sum(w.numel() * w.element_size() for w in self.weights)


def cut(output: Value) -> Value:
    """The values of an output without its graph."""
    if isinstance(output, tuple):
        return tuple(part.detach() for part in output)
    return output.detach()
