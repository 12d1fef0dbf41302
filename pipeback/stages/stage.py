"""Stage: one module with its weights, optimizer and what it has in flight. It knows no neighbours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeback.methods.base import Method, State
from pipeback.private import catch
from pipeback.splitting.segment import Segment
from pipeback.stages.device_slot import DeviceSlot
from pipeback.stages.gradients import Gradients, GradientSums, clipped, differentiate, nothing, sparse_rows
from pipeback.stages.home import Repetition, Share, StackedFlight, StageStack, Survivors
from pipeback.stages.random_stream import OwnRandomStream
from pipeback.tensors import accelerators, meta
from pipeback.tensors.flat_buffer import FlatBuffer
from pipeback.tensors.weight_list import WeightList, Weights

Value = Any  # what crosses a boundary: a tensor or a tuple of tensors
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]  # given a list of parameters

HALF = torch.bfloat16, torch.float16
drawing = threading.RLock()  # the default generator is one a process; whoever draws from it has it to itself


class Flight:
    """A micro-batch between its forward and its backward at one stage."""

    __slots__ = (
        "again", "caught", "entry", "leaves", "options", "output", "owned", "row", "target", "tuple_input", "version"
    )  # fmt: skip

    def __init__(self, leaves: tuple[Tensor, ...], output: Value, target: Any, version: int, tuple_input: bool) -> None:
        self.tuple_input = tuple_input
        self.leaves = leaves  # the inputs, cut from the graph of the stage before
        self.output = output  # on the last stage the loss, else what was sent on
        self.target = target
        self.version = version  # the weights F used, counted in updates of this stage
        self.owned: Weights | None = None  # shifted weights that B will need again
        self.options: Any = None  # the optimizers' options when the micro-batch was pushed
        self.entry = 0
        self.again: Repetition | None = None  # gives B the output, if F has kept no graph
        self.caught: list[Tensor | None] | None = None  # gradients that lie in memory otherwise than their leaves
        self.row: StackedFlight | None = None  # where a stack keeps it, if one has done F

    def listen(self) -> None:
        """Catch a gradient that does not lie in memory as its leaf does: `.grad` is a copy with the strides of the
        leaf, on which kernels of the stage before would round otherwise than in one graph.
        """
        self.caught = [None] * len(self.leaves)
        for n, leaf in enumerate(self.leaves):
            if leaf.requires_grad:
                strides = leaf.stride() if leaf.is_contiguous() else None  # else `.grad` may have others even so
                catch(leaf, partial(_catch, self.caught, n, strides))


def _catch(caught: list[Tensor | None], n: int, strides: tuple[int, ...] | None, gradient: Tensor) -> None:
    # one that is not kept need not be copied
    if gradient.layout is not torch.strided or gradient.stride() != strides:
        caught[n] = gradient


def _laid_alike(output: Tensor, gradient: Tensor) -> bool:
    strides = gradient.stride() if gradient.layout is torch.strided else None
    return strides == output.stride() and gradient.is_contiguous()


class ActivationPolicy(Protocol):
    """How one stage does it, if not on the device."""

    stashes: bool  # whether B uses functions of the weights as F has computed them
    apart: bool  # whether backwards are done one by one, for memory
    away: bool  # whether what a graph saved is kept in host memory

    def forward(self, stage: Stage, flight: Flight, given: Value) -> Value:
        """F: run the module on what it is given, leave in the flight what B needs; returns the output."""

    def adopt(self, flight: Flight) -> None:
        """Take in a flight from a state, which goes on as it began."""

    def learn(self, stage: Stage, x: Value, target: Any) -> None:
        """Find out in the rehearsal what must be known of the module."""

    def measure(self, stage: Stage, flight: Flight, output: Value) -> None:
        """Tell the stage the bytes of a micro-batch, given one between F and B and what B differentiates."""


class Stage:
    """Module, weights and optimizer of stage `index`; `forward`, `backward` and `update` do the three operations.

    The module keeps the user's parameters, which the graphs in flight refer to. The optimizer steps `weights`:
    other parameters on the same storage with a version counter of their own, so that autograd does not mistake
    an update between F and B for an error. Contents change; storage does not while anything is in flight. In a store
    the optimizer steps weights that live elsewhere (`home`), and the user's parameters are views of memory that comes
    and goes (`slot`).
    With masters it steps float32 copies of the weights of a half type, which are rounded from them (`masters`).
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
        masters: bool = False,
    ) -> None:
        self.index, self.stages, self.module, self.name, self.loss = index, stages, module, name, loss
        self.call: Callable[[Value], Value] = module  # or what torch.compile has made of it
        self.last = index == stages - 1
        self.judges = self.last and loss is not None  # its output is the loss
        self.label = f"stage {index} ({name})"
        self.names = {key: f"{name}.{key}" for key in module.state_dict()}  # of its weights, in the user's model
        # gives the model's output, where boundaries carry only its tensors
        self.shape = module.__structured__ if isinstance(module, Segment) else None
        self.seed = self.replica = 0  # of the random stream, should the stage draw
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.keeps_masters = masters and any(p.dtype in HALF for p in self.params)
        self.weights = WeightList(nn.Parameter(self._own(p)) for p in self.params)
        self._pair()
        self.homes = self._homes()
        self.home: FlatBuffer | None = None  # the weights in a store, outside the device
        self.slot: DeviceSlot | None = None  # their place on the device, if they are only there when needed
        self.sparse: Survivors | None = None  # which of the weights survive
        self.shard: Share | None = None  # what this rank's store keeps of the weights, if others keep the rest
        self.gradients = Gradients(self.params, sparse_rows(module, self.params))
        self.spilled: Sequence[Tensor | None] | None = None  # sums of gradients that left the device with the weights
        first = next(module.parameters(), None)
        self.device = None if first is None or first.is_meta else first.device
        # a stage without weights still has an optimizer, so that schedulers attach to every stage alike
        self.optimizer = optimizer(list(self.weights) or [nn.Parameter(torch.empty(0))])
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a twin steps; schedulers need not warn
        self.optimizer.zero_grad = nothing  # type: ignore[method-assign]  # its weights have a gradient while it steps
        self.state: State = {}
        self.stash = method.copies == "stash"
        self.history = method.history(index, stages)
        self.version = 0
        self.flights: dict[int, Flight] = {}
        self.versions: dict[int, Weights] = {}  # older weights that are still needed, by version
        self.owns = False  # some flights have shifted weights of their own
        self.scratch: Weights | None = None
        self.prepare(method)
        self.count = 0.0  # micro-batches (or samples) whose gradients are summed for the coming update
        self.options: Any = None  # the options of the last micro-batch gone backward
        self.stream: Tensor | None = None  # the random state of a stage that draws
        self.threaded = False  # others may draw from the default generator while this stage does
        self.mixed = True  # inputs or gradients may come from another device; the rehearsal knows better
        self.alike: list[torch.Size] | None = None  # flat inputs of these forms have gradients that lie in memory alike
        self.clones_input = False  # a module that changes its input in place gets a copy
        self.changing: list[tuple[dict[str, Tensor | None], str]] = []  # buffers that forwards change: where they are
        self.stack: StageStack | None = None  # the neighbours that it runs with as one
        self.keeping: ActivationPolicy | None = None  # how F leaves to B what it needs; None: the graph, on the device
        self.activation_bytes = 0  # of one micro-batch, on the device, measured in the rehearsal
        self.host_bytes = 0  # the same in host memory, where that is another place
        self.repeat_bytes = 0  # what a forward done once more holds beyond that, until its backward is done
        self.peak_flights = 0
        self.peak_copies = 1.0

    def _homes(self) -> list[tuple[Any, str, nn.Parameter, int]]:
        return [
            (owner._parameters, key, p, p.data_ptr())
            for owner in self.module.modules()
            for key, p in owner._parameters.items()
            if p is not None
        ]

    def take_names(self, known: Mapping[int, str]) -> None:
        """What the weights are called in the user's model. known: by the identity of the tensors there."""
        for key, tensor in self.module.state_dict(keep_vars=True).items():
            self.names[key] = known.get(id(tensor), self.names[key])

    # -- weights of a half type, rounded from float32 masters --------------------------------------------------------

    def _own(self, p: nn.Parameter) -> Tensor:
        """What the optimizer steps for a parameter: its storage, or a master."""
        return p.data.float() if self.keeps_masters and p.dtype in HALF else p.data

    def _pair(self) -> None:
        pairs = [(w, p) for w, p in zip(self.weights, self.params, strict=True) if w.dtype != p.dtype]
        self.masters: list[Tensor] = [w for w, _ in pairs]
        self.halves: list[Tensor] = [p.data for _, p in pairs]
        self._seen = [p._version for p in self.params]

    @torch.no_grad()
    def round(self) -> None:
        """Have the weights of a half type be their masters, rounded."""
        if self.masters:
            torch._foreach_copy_(self.halves, self.masters)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take what was written into weights of a half type from outside, as autograd counts changes, as masters."""
        seen = [p._version for p in self.params]
        if seen != self._seen:
            for w, half in zip(self.masters, self.halves, strict=True):
                w.copy_(torch.where(w.to(half.dtype) == half, w, half.float()))
            self.adopted()

    def adopted(self) -> None:
        self._seen = [p._version for p in self.params]

    # -- whether the weights are here ------------------------------------------------------------------------------

    @property
    def here(self) -> bool:
        """Whether this process holds the weights; else they stand on the meta device."""
        return not meta.absent(self.module)

    def prepare(self, method: Method) -> None:
        """What the method keeps beside the weights, as before the first micro-batch."""
        with torch.no_grad():
            self.state = method.init(self.weights)
        if method.copies == "scratch" and self.slot is None:  # else shifted weights are made on the way to the device
            self.scratch = [torch.empty_like(w) for w in self.weights]

    def let_go(self) -> None:
        """Keep shapes only: another rank holds this stage."""
        self.flights, self.versions = {}, {}  # graphs refer to the weights
        self.optimizer.state.clear()
        self.state, self.scratch, self.homes = {}, None, []
        self.masters, self.halves = [], []
        self.home = self.slot = self.spilled = None
        self.gradients.take()
        meta.let_go(self.module)
        meta.move(self.weights, "meta")

    def take_up(self, method: Method, fill: Callable[[nn.Module], object]) -> None:
        """Hold the stage: `fill` gives its module memory and values."""
        fill(self.module)
        for w, p in zip(self.weights, self.params, strict=True):
            torch.utils.swap_tensors(w, nn.Parameter(self._own(p)))
        self.weights.forget()
        self._pair()
        self.device = next((p.device for p in self.module.parameters()), self.device)
        self.homes = self._homes()
        self.prepare(method)

    def move_home(self, home: FlatBuffer, slot: DeviceSlot, method: Method) -> None:
        """Live in a store from now on, in `home`, which holds the values; compute at `slot`."""
        self.home, self.slot, self.device = home, slot, slot.device
        self.attach()
        self.scratch = None
        self.prepare(method)
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(slot.device)

    def attach(self) -> None:
        """Have the optimizer step the weights where they live now."""
        assert self.home is not None and self.slot is not None
        mine = [view for p, view in zip(self.slot.params, self.home.views, strict=True) if p.requires_grad]
        for w, view in zip(self.weights, mine, strict=True):
            if w.device == view.device:
                w.data = view
            else:
                torch.utils.swap_tensors(w, nn.Parameter(view))
        self.weights.forget()

    def moved(self) -> None:
        """The parameters lie elsewhere from now on, and the optimizer steps them there."""
        for w, p in zip(self.weights, self.params, strict=True):
            w.data = p.data
        self.weights.forget()
        self.homes = self._homes()

    def newest(self) -> Weights:
        """The newest weights, dense."""
        if self.sparse is None:
            return self.weights
        return [self.sparse.expanded(self, n, w.detach()) for n, w in enumerate(self.weights)]

    def live(self) -> Weights:
        """What F or B runs on while it does: the weights, or what a store has put at the stage's slot."""
        return self.weights if self.slot is None else [p.data for p in self.params]

    def named(self) -> dict[str, Tensor]:
        """The newest parameters by name, wherever they live; masters for those that have them."""
        mine: dict[str, Tensor] = dict(self.module.named_parameters())
        if self.keeps_masters:
            stepped = {id(p): w for p, w in zip(self.params, self.weights, strict=True)}
            return {name: stepped.get(id(p), p) for name, p in mine.items()}
        return mine if self.home is None else dict(zip(mine, self.home.views, strict=True))

    def sparse_names(self) -> list[str]:
        """The names of the weights of which only some entries survive."""
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        return [] if self.sparse is None else [names[n] for n in self.sparse.numbers]

    def grads(self) -> Sequence[Tensor | None]:
        """The sums of gradients for the coming update."""
        return self.gradients.values if self.spilled is None else self.spilled

    def put_sums(self, grads: Sequence[Tensor | None]) -> None:
        """Have these sums of gradients, where the weights are."""
        self.spilled = None if self.slot is None else grads
        self.gradients.put(grads if self.slot is None else [None] * len(self.params))

    def memory(self) -> list[Tensor]:
        """Tensors whose memory the graphs in flight refer to: the weights, and their place on the device."""
        return [*self.module.parameters(), *([] if self.slot is None else [self.slot.flat.memory])]

    # -- the three operations ------------------------------------------------------------------------------------

    def forward(self, mb: int, x: Value, target: Any = None) -> Value:
        """F(mb) on whatever the weights hold; returns the output, on the last stage (the loss) without its graph."""
        leaves, given = self.enter(x)
        if self.keeping is None:
            output = self.run(given, target) if self.stream is None else self._drawing_run(given, target)
            self.flights[mb] = Flight(leaves, output, target, self.version, type(x) is tuple)
        else:
            flight = Flight(leaves, None, target, self.version, type(x) is tuple)
            output = self.keeping.forward(self, flight, given)
            self.flights[mb] = flight
        self.listen(self.flights[mb])
        if len(self.flights) > self.peak_flights:
            self.peak_flights = len(self.flights)
        return cut(output) if self.last else output

    def listen(self, flight: Flight) -> None:
        """Note how gradients of its inputs lie in memory, where that may be otherwise than the inputs."""
        if self.alike is None or [leaf.shape for leaf in flight.leaves] != self.alike:
            flight.listen()

    def backward(self, mb: int, grad: Value = None) -> Value:
        """B(mb): adds to the gradients of the weights; returns the gradient of the input, shaped like the input."""
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        flight = self.begin_backward(mb, grad, roots, seeds)
        differentiate(roots, seeds, flight.leaves, [self.gradients])
        return self.end_backward(flight)

    def update(self, mb: int) -> None:
        """U(mb) of plain training: one step on the averaged gradient. Methods go through `Worker`."""
        for w, g in zip(self.weights, self.average(self.sums(), None)[0], strict=True):
            w.grad = g
        self.optimizer.step()
        self.round()
        self.version += 1

    # -- their parts, which a worker joins over several stages ---------------------------------------------------

    def enter(self, x: Value) -> tuple[tuple[Tensor, ...], Value]:
        """Leaves of a graph of their own from what was sent: all of them, and as the module takes them."""
        if type(x) is not tuple:
            leaf = self._leaf(x)
            return (leaf,), leaf.clone() if self.clones_input else leaf
        leaves = tuple(self._leaf(part) for part in x)
        return leaves, tuple(leaf.clone() for leaf in leaves) if self.clones_input else leaves

    def _leaf(self, x: Tensor) -> Tensor:
        leaf = x.detach()
        if self.mixed and self.device is not None and leaf.device != self.device:
            leaf = leaf.to(self.device)
        if self.index and (leaf.is_floating_point() or leaf.is_complex()):
            leaf.requires_grad_()
        return leaf

    def run(self, given: Value, target: Any) -> Value:
        """The module, and on the last stage the loss."""
        if self.judges and self.loss is not None:
            output = self.call(given)
            return self.loss(output if self.shape is None else self.shape(given, output), target)
        return self.call(given)

    def compute(self, given: Value, target: Any) -> Value:
        """`run`, drawing random numbers from the stage's own stream where it draws any."""
        return self.run(given, target) if self.stream is None else self._drawing_run(given, target)

    def _drawing_run(self, given: Value, target: Any) -> Value:
        """`run` on the stage's own random stream."""
        assert self.stream is not None
        generator = self.generator
        # torch.compile leaves code alone that is run in a dispatch mode
        if self.threaded and generator.device.type == "cpu" and self.call is self.module:
            own = torch.Generator()
            own.set_state(self.stream)
            try:
                with OwnRandomStream(own):
                    return self.run(given, target)
            finally:
                self.stream = own.get_state()
        with drawing:
            outside = generator.get_state()
            generator.set_state(self.stream)
            try:
                return self.run(given, target)
            finally:
                self.stream = generator.get_state()
                generator.set_state(outside)

    def begin_backward(self, mb: int, grad: Value, roots: list[Tensor], seeds: list[Tensor]) -> Flight:
        """Append what B(mb) differentiates, and the gradients it starts from (on the last stage None means 1)."""
        flight, first = self.flights.pop(mb), len(roots)
        self.options = flight.options
        output = flight.output if flight.again is None else flight.again(self, flight)
        if type(output) is tuple:
            grads = grad if type(grad) is tuple else (grad,) * len(output)
            for y, g in zip(output, grads, strict=True):
                if y.requires_grad and g is not None:
                    roots.append(y)
                    seeds.append(g.to(y.device) if self.mixed else g)
        elif output.requires_grad:
            if grad is None and self.judges:
                grad = torch.ones_like(output)
            if grad is not None:
                roots.append(output)
                seeds.append(grad.to(output.device) if self.mixed else grad)
        if flight.caught is None and self.index and not all(map(_laid_alike, roots[first:], seeds[first:])):
            flight.listen()  # one that comes in another order than outputs may be handed on in it
        return flight

    def end_backward(self, flight: Flight) -> Value:
        """Count the micro-batch; returns the gradient to send upstream, None where there is none."""
        self.count += 1
        grads = [x.grad for x in flight.leaves]
        if flight.caught is not None:
            grads = [own if odd is None else odd for own, odd in zip(grads, flight.caught, strict=True)]
        return tuple(grads) if flight.tuple_input else grads[0]

    def sums(self) -> GradientSums:
        """Take the gradient sums, in micro-batch order, and the count."""
        count, self.count = self.count, 0.0
        return GradientSums(self.gradients.take(), count)

    def average(
        self, sums: GradientSums, clip_norm: float | None, clip_value: float | None = None
    ) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """The gradient sums, divided once by the true count and clipped, as the weights have them.

        Returns also whether the gradient was clipped, as a 0-d tensor; None where nothing clips.
        """
        grads, count = sums
        if self.masters:
            grads = [None if g is None else g.to(w.dtype) for w, g in zip(self.weights, grads, strict=True)]
        if count != 1:
            grads = [None if g is None else g / count for g in grads]
        if clip_norm is not None or clip_value is not None:
            # others that have the rest of the gradient ask for the norm, too
            total = self.shard.norm(grads) if self.shard is not None and clip_norm is not None and grads else None
            return clipped(grads, clip_norm, clip_value, total)
        return grads, None

    @property
    def generator(self) -> torch.Generator:
        """The generator that the stage's random layers draw from."""
        found: torch.Generator = accelerators.generator(self.device)
        return found

    # -- versions ------------------------------------------------------------------------------------------------

    def keep(self) -> Weights | None:
        """Before U: drop the versions nothing needs; returns where to copy the current one, if that will be needed."""
        self.release(self.version + 1)
        current, copy = self.version, None
        if current not in self.versions and self.weights and (self.history or self._needed(current)):
            copy = self.versions[current] = [torch.empty_like(w) for w in self.weights]
        self.peak_copies = max(self.peak_copies, self.copies())
        return copy

    def used(self, mb: int) -> Weights:
        """What F(mb) ran on."""
        flight = self.flights[mb]
        return self.past(flight.version) if flight.owned is None else flight.owned

    def release(self, version: int | None = None) -> None:
        """Drop the versions that no flight uses and that, at `version`, no later forward may ask for."""
        oldest = (self.version if version is None else version) - self.history
        for old in list(self.versions):  # as they were kept, and as flights end: the oldest first
            if old >= oldest or self._needed(old):
                return
            del self.versions[old]

    def _needed(self, version: int) -> bool:
        """Whether a flight uses this version, the oldest that is kept or the newest. Later flights have later ones."""
        newest = version == self.version
        for flight in reversed(self.flights.values()) if newest else self.flights.values():
            if flight.version < version if newest else flight.version > version:
                return False
            if flight.version == version and flight.owned is None:
                return True
        return False

    def past(self, version: int) -> Weights:
        """The weights after `version` updates: the live ones, or a kept copy."""
        if version == self.version:
            return self.weights
        try:
            return self.versions[version]
        except KeyError:
            kept = [*sorted(self.versions), self.version]
            raise RuntimeError(
                f"version {version} was asked for, but only {kept} are kept; raise Method.history"
            ) from None

    def copies(self) -> float:
        """Copies of the weights held now: the live one, scratch, kept versions and shifted weights in flight."""
        owned = sum(f.owned is not None for f in self.flights.values()) if self.owns else 0
        return 1.0 + (self.scratch is not None) + len(self.versions) + owned

    def bytes(self) -> int:
        """Bytes of one copy of the trainable weights."""
        return sum(w.numel() * w.element_size() for w in self.weights)


def grown(output: Value) -> list[Tensor]:
    """The tensors of an output from which gradients can start."""
    return [y for y in (output if isinstance(output, tuple) else (output,)) if y.requires_grad]


def cut(output: Value) -> Value:
    """The values of an output without its graph."""
    if isinstance(output, tuple):
        return tuple(part.detach() for part in output)
    return output.detach()


def evaluate(stages: Sequence[Stage], x: Value) -> Value:
    """What the last of these stages gives for x in evaluation mode, on the newest weights; modes stay as they are."""
    modes = [(module, module.training) for stage in stages for module in stage.module.modules()]
    try:
        for module, _ in modes:
            module.training = False
        value = x
        with torch.no_grad():
            for stage in stages:
                _, given = stage.enter(value)
                if value is x and not stage.clones_input:  # nothing is known of a module before the first push
                    given = tuple(p.clone() for p in given) if isinstance(given, tuple) else given.clone()
                value = stage.module(given)
    finally:
        for module, mode in modes:
            module.training = mode
    return cut(value)
