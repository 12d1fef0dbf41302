"""Stage: one module with its weights, its optimizer and its micro-batches in flight. It knows no neighbours.

Only a stage writes its own attributes and those of its parts: other code calls a method whose name says what happens
(tests/stages/test_attributes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.methods.answers import initial
from pipeback.methods.base import Method, State
from pipeback.private import registered
from pipeback.splitting.control_flow import run_as_written
from pipeback.stages.averaging import averaged
from pipeback.stages.device_slot import DeviceSlot
from pipeback.stages.flight import ActivationPolicy, Flight, Value, begins, for_loss, laid_alike, reported, weighed
from pipeback.stages.gradients import Gradients, GradientSums, differentiate, nothing, sparse_rows
from pipeback.stages.home import Home, StageStack
from pipeback.stages.judged_output import structured
from pipeback.stages.learnt import Learnt
from pipeback.stages.masters import Masters
from pipeback.stages.own_autocast import under_own_autocast
from pipeback.stages.own_memory import apart
from pipeback.stages.random_stream import StageStream
from pipeback.stages.versions import Versions
from pipeback.tensors import accelerators, meta
from pipeback.tensors.flat_buffer import FlatBuffer
from pipeback.tensors.weight_list import WeightList, Weights

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]  # given a list of parameters


class Stage:
    """Module, weights and optimizer of stage `index`; `forward` does F, `backward` does B and `update` does U.

    The module keeps the user's parameters, which the graphs in flight refer to. The optimizer steps `weights`:
    other parameters on the same storage with a version counter of their own, so that autograd does not mistake
    an update between F and B for an error. While a micro-batch is in flight, their contents change, but not their
    storage. With a store, the optimizer steps weights that live elsewhere (`home`), and the user's parameters are views
    of memory that is on the device only at times (`home.slot`). With masters, the optimizer steps float32 copies of the
    weights of a half type, and these are rounded from the copies (`masters`).
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
        replica: int = 0,
        keeping: ActivationPolicy | None = None,
    ) -> None:
        """loss: of the last stage; others have none. keeping: how F keeps activations for B; None: its graph does."""
        self.index, self.stages, self.module, self.name = index, stages, module, name
        self.loss = loss if self.last else None
        self.call: Callable[[Value], Value] = module  # or what torch.compile has made of it
        self.names = {key: f"{name}.{key}" for key in module.state_dict()}  # of its weights, in the user's model
        self.random = StageStream(index, replica)
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.masters = Masters(self.params, wanted=masters)
        self.weights = WeightList(nn.Parameter(self.masters.of(p)) for p in self.params)
        self.masters.pair(self.weights)
        self.home = Home(module)
        self.gradients = Gradients(self.params, sparse_rows(module, self.params))
        first = next(module.parameters(), None)
        self.device = None if first is None or first.is_meta else first.device
        # a stage without weights still has an optimizer, so that schedulers attach to every stage alike
        self.optimizer = optimizer(list(self.weights) or [nn.Parameter(torch.empty(0))])
        # Adagrad has state from its construction on, which is of no use for weights without values
        begins = bool(self.weights) and any(self.optimizer.state.values())
        self._begin_anew = (lambda: optimizer(list(self.weights)).state) if begins else dict
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a twin steps; schedulers need not warn
        self.optimizer.zero_grad = nothing  # type: ignore[method-assign]  # its weights have a gradient while it steps
        self.version, self.state, self.peak_flights = 0, State(), 0
        self.versions = Versions(method.history(index, stages), method.needs_used)
        self.flights: dict[int, Flight] = {}
        self.prepare(method)
        self.options: Any = None  # the options of the last micro-batch gone backward
        self.learnt, self.keeping = Learnt(), keeping
        self.stack: StageStack | None = None  # the stages that it runs with as one

    @property
    def last(self) -> bool:
        """Whether this stage is the last one, whose output leaves the pipeline."""
        return self.index == self.stages - 1

    @property
    def judges(self) -> bool:
        """Whether its output is the loss."""
        return self.loss is not None

    @property
    def label(self) -> str:
        """The name of the stage in messages."""
        return f"stage {self.index} ({self.name})"

    @property
    def replica(self) -> int:
        """The number of the replica of the model that the stage belongs to."""
        return self.random.replica

    @property
    def generator(self) -> torch.Generator:
        """The generator that the stage's random layers draw from."""
        found: torch.Generator = accelerators.generator(self.device)
        return found

    def take_names(self, known: Mapping[int, str]) -> None:
        """Take the names that the weights have in the user's model. known: these names by the tensors' identity."""
        for key, tensor in self.module.state_dict(keep_vars=True).items():
            self.names[key] = known.get(id(tensor), self.names[key])

    # -- whether the weights are here ------------------------------------------------------------------------------

    @property
    def here(self) -> bool:
        """Whether this process holds the weights; otherwise they are on the meta device."""
        return not meta.absent(self.module)

    def prepare(self, method: Method) -> None:
        """Initialise what the method keeps beside the weights, as before the first micro-batch."""
        self.state = initial(method, self.weights)
        if method.copies == "scratch" and self.home.slot is None:  # else made on the way to the device
            self.versions.lay([torch.empty_like(w) for w in self.weights])

    def let_go(self) -> None:
        """Keep only shapes, since another rank holds this stage."""
        self.put_flights({})  # graphs refer to the weights
        self.optimizer.state.clear()
        self.state = {}
        self.versions.put({})
        self.versions.lay(None)
        self.masters.let_go()
        self.home.let_go()
        self.gradients.take()
        meta.let_go(self.module)
        meta.move(self.weights, "meta")

    def take_up(self, method: Method, fill: Callable[[nn.Module], object]) -> None:
        """Hold the stage: `fill` gives its module memory and values."""
        fill(self.module)
        for w, p in zip(self.weights, self.params, strict=True):
            torch.utils.swap_tensors(w, nn.Parameter(self.masters.of(p)))
        self.weights.forget()
        for w, state in self._begin_anew().items():
            self.optimizer.state[w].update(state)
        self.masters.pair(self.weights)
        self.device = next((p.device for p in self.module.parameters()), self.device)
        self.home.look(self.module)
        self.prepare(method)

    def move_home(self, flat: FlatBuffer, slot: DeviceSlot, method: Method, *, apart: bool = False) -> None:
        """Move the weights to a store: `flat` holds their values, and the stage computes with them at `slot`."""
        self.home.move(flat, slot, apart=apart)
        self.device = slot.device
        self.home.attach(self.weights)
        self.versions.lay(None)
        self.prepare(method)
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(slot.device)

    def moved(self) -> None:
        """Note that the parameters have moved, and let the optimizer step them at their new place."""
        for w, p in zip(self.weights, self.params, strict=True):
            w.data = p.data if w.dtype == p.dtype else w.data  # masters stay where they are
        self.masters.pair(self.weights)
        self.weights.forget()
        self.home.look(self.module)

    def live(self) -> Weights:
        """The weights that F or B runs on at the moment: the stage's own, or those that a store has put at its slot."""
        return self.weights if self.home.slot is None else [p.data for p in self.params]

    def grads(self) -> Sequence[Tensor | None]:
        """The sums of gradients for the coming update."""
        return self.gradients.values if self.home.spilled is None else self.home.spilled

    def put_sums(self, grads: Sequence[Tensor | None]) -> None:
        """Replace the gradient sums by these, moved to where the weights are."""
        if self.home.slot is None:
            self.gradients.put(grads)
        else:
            self.home.spill(grads)
            self.gradients.put([None] * len(self.params))

    # -- the three operations ------------------------------------------------------------------------------------

    @under_own_autocast
    def forward(self, mb: int, x: Value, target: Any = None) -> Value:
        """F(mb), on the present weights; returns the output, which on the last stage (the loss) has no graph."""
        leaves, given = self.enter(x)
        before = registered()
        output = self.compute(given, target) if self.keeping is None else None
        flight = Flight(leaves, output, target, self.version, type(x) is tuple)
        if self.keeping is not None:
            output = self.keeping.forward(self, flight, given)
        self.flights[mb] = flight
        flight.heard = not 0 <= before == registered()
        self.listen(flight)
        self.note_flights(len(self.flights) + len(self.gradients.split.waiting))
        return reported(output) if self.last else output

    def listen(self, flight: Flight) -> None:
        """Note the strides of its inputs' gradients, where they may differ from those of the inputs."""
        alike = self.learnt.alike
        if alike is None or tuple([leaf.shape for leaf in flight.leaves]) != alike:
            flight.listen()

    def backward(self, mb: int, grad: Value = None) -> Value:
        """B(mb): add to the gradients of the weights; return the gradient of the input, which has the input's shape."""
        roots: list[Any] = []
        seeds: list[Tensor] = []
        flight = self.begin_backward(mb, grad, roots, seeds)
        differentiate(roots, seeds, flight.leaves, [self.gradients])
        return self.end_backward(flight)

    def update(self, mb: int) -> None:
        """U(mb) of plain training: one step on the averaged gradient. Methods go through `Worker`."""
        for w, g in zip(self.weights, self.average(self.gradients.sums(), None)[0], strict=True):
            w.grad = g
        self.optimizer.step()
        self.masters.round()
        self.updated()

    # -- their parts, which a worker joins over several stages ---------------------------------------------------

    def enter(self, x: Value) -> tuple[tuple[Tensor, ...], Value]:
        """Make leaves of a new graph from what was sent; return them as a tuple, and as the module takes them."""
        if type(x) is not tuple:
            leaf = self._leaf(x)
            return (leaf,), leaf.clone() if self.learnt.clones_input else leaf
        leaves = tuple(self._leaf(part) for part in x)
        return leaves, tuple(leaf.clone() for leaf in leaves) if self.learnt.clones_input else leaves

    def _leaf(self, x: Tensor) -> Tensor:
        leaf = x.detach()
        if self.learnt.mixed and self.device is not None and leaf.device != self.device:
            leaf = leaf.to(self.device)
        if self.index and (leaf.is_floating_point() or leaf.is_complex()):
            leaf.requires_grad_()
        return leaf

    def run(self, given: Value, target: Any) -> Value:
        """Run the module, and on the last stage the loss after it."""
        output = run_as_written(self.call, given) if self.learnt.control_flow else self.call(given)
        if self.loss is None:
            return apart(self.module, self.learnt.changing, output) if self.learnt.lends else output
        return self.loss(structured(self.module, given, output), for_loss(self.device, target))

    def compute(self, given: Value, target: Any) -> Value:
        """Do `run`; if the stage draws random numbers, they come from its own stream."""
        if self.random.state is None:
            return self.run(given, target)
        # torch.compile leaves code alone that is run in a dispatch mode
        return self.random.run(self.generator, partial(self.run, given, target), modes=self.call is self.module)

    def begin_backward(self, mb: int, grad: Value, roots: list[Any], seeds: list[Tensor]) -> Flight:
        """Append the tensors that B(mb) differentiates, and their gradients (on the last stage None means 1)."""
        flight, alike = self.flights.pop(mb), True
        self.versions.hand(mb, flight)
        output = flight.output if flight.again is None else flight.again(self, flight)
        grad = weighed(output, 1) if grad is None and self.judges else grad
        outputs = output if type(output) is tuple else (output,)
        for y, g in zip(outputs, grad if type(grad) is tuple else (grad,) * len(outputs), strict=True):
            if y.requires_grad and g is not None:
                roots.append(begins(y))
                seeds.append(g.to(y.device) if self.learnt.mixed else g)
                alike = alike and laid_alike(y, seeds[-1])
        if flight.caught is None and self.index and not alike:
            flight.listen()  # a gradient with other strides than its output may be passed on with these
        return flight

    def end_backward(self, flight: Flight) -> Value:
        """Count the micro-batch; return the gradient for the stage before, None if it has none."""
        self.gradients.count_more(1)
        self.options = flight.options
        return flight.upstream()

    def average(
        self, sums: GradientSums, clip_norm: float | None, clip_value: float | None = None
    ) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """Return what `averaged` makes of these sums, in the type of the weights."""
        masters = self.weights if self.masters.weights else None
        apart = self.home.share or self.home.shards
        return averaged(sums, clip_norm, clip_value, masters, None if apart is None else apart.norm)

    # -- what others change: each says what happened -------------------------------------------------------------

    def learn(self, **found: Any) -> None:
        """Store what the rehearsal has found out, by the names of `Learnt`."""
        self.learnt = self.learnt._replace(**found)

    def added_bytes(self, before: Stage | None) -> int:
        """The bytes that a micro-batch adds on the device. before: the stage before, if it is in this process."""
        # where backwards are split, this stage may hold what was handed to it for longer than the stage before
        late = self.gradients.split.peak or before is None or before.stack is not None
        return self.learnt.activation_bytes - (0 if late else self.learnt.handed_bytes)

    def work_on(self, device: torch.device) -> None:
        """Set the device of a stage without weights, which is that of its input."""
        self.device = device

    def call_by(self, call: Callable[[Value], Value]) -> None:
        """From now on run `call`, which computes the same as the module."""
        self.call = call

    @contextmanager
    def calling(self, call: Callable[[Value], Value]) -> Iterator[None]:
        """A context within which the stage runs `call`."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def join(self, stack: StageStack, call: Callable[[Value], Value]) -> None:
        """Run as one with the other stages of this stack, and by `call` where it runs alone."""
        self.stack, self.call = stack, call

    def leave_stack(self, call: Callable[[Value], Value]) -> None:
        """Run alone from now on, by `call`."""
        self.stack, self.call = None, call

    def put_state(self, state: State) -> None:
        """Replace what the method keeps beside the weights."""
        self.state = state

    def updated(self, times: int = 1) -> None:
        """Count so many updates."""
        self.version += times

    def take_off(self, mb: int, flight: Flight) -> None:
        """Add the flight of a forward that was done elsewhere."""
        self.flights[mb] = flight
        self.note_flights(len(self.flights))

    def note_flights(self, number: int) -> None:
        """Note that so many micro-batches have been in flight at once."""
        if number > self.peak_flights:
            self.peak_flights = number

    def went_backward(self, options: Any) -> None:
        """Note the options under which the last micro-batch that went backward had been pushed."""
        self.options = options

    def put_flights(self, flights: dict[int, Flight]) -> None:
        """Replace the micro-batches in flight."""
        self.flights = flights
        self.gradients.split.forget(0)

    def stand_at(self, version: int, options: Any) -> None:
        """Set the number of updates, and the options of the last micro-batch that went backward."""
        self.version, self.options = version, options

    def go_back(self, first: int, stream: Tensor | None, count: float, options: Any, peak: int) -> None:
        """Forget the micro-batches from `first` on, and restore the stage's state of before they came."""
        for mb in [mb for mb in self.flights if mb >= first]:
            del self.flights[mb]
        self.gradients.split.forget(first)
        self.random.go_to(stream)
        self.gradients.count_anew(count)
        self.options, self.peak_flights = options, peak

    # -- versions ------------------------------------------------------------------------------------------------

    def keep(self) -> Weights | None:
        """Before U: drop the versions nothing needs; returns where to copy the current one, if that will be needed."""
        return self.versions.keep(self.version, self.weights, self.flights)

    def used(self, mb: int) -> Weights:
        """The weights on which F(mb) ran."""
        flight = self.flights[mb]
        return self.past(flight.version) if flight.owned is None else flight.owned

    def release(self) -> None:
        """Drop the versions that no flight uses and that no later forward may ask for."""
        self.versions.release(self.version, self.version, self.flights)

    def past(self, version: int) -> Weights:
        """The weights after `version` updates: the live ones, or a kept copy."""
        return self.weights if version == self.version else self.versions.past(version, self.version)

    def copies(self) -> float:
        """Copies of the weights held now: the live one, scratch, kept versions and shifted weights in flight."""
        return self.versions.copies(self.flights)

    def bytes(self) -> int:
        """Bytes of one copy of the trainable weights."""
        return sum(w.numel() * w.element_size() for w in self.weights)
