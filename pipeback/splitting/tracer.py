"""Tracer: runs a module's own forward once and records it call by call.

The module runs as it is, on a real micro-batch (or on shapes alone, where its weights are elsewhere). Modules that are
not traced into (`leaves`) are one call each, and so is every torch function between them; Python decides as it always
does. A decision by values of tensors (`if mask.all()`) is recorded as a check, so that a later micro-batch that would
take another branch never takes the wrong one (`branches` finds the decisions that can be evaluated in advance).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from pipeback.private import function_modes, pytree
from pipeback.splitting import refusals
from pipeback.splitting.attribute_changes import Name, Sets, attributes, check_unchanged
from pipeback.splitting.autocast_regions import autocasts, other
from pipeback.splitting.call_cost import Work
from pipeback.splitting.call_listeners import calls_heard
from pipeback.splitting.call_trace import Attribute, Call, CallTrace
from pipeback.splitting.control_flow import as_written
from pipeback.splitting.data_sizes import bounded, ends_at_tensors, padded, pads, to_longest
from pipeback.splitting.escaped_tensors import Escape, Inside
from pipeback.splitting.in_place import Hooked, Kept, stays
from pipeback.splitting.key_value_caches import without_caches
from pipeback.splitting.loose_sizes import LooseSizes
from pipeback.splitting.module_inputs import ModuleInputs
from pipeback.splitting.module_walk import beside, held, in_structures, place_of, walked
from pipeback.splitting.outside_draws import OutsideDraws, generators
from pipeback.splitting.reentrant import CheckpointFunction, checkpointed
from pipeback.splitting.script_values import Applied, same
from pipeback.splitting.torch_functions import About, about
from pipeback.splitting.vmap_calls import Mapped
from pipeback.tensors.structures import PLAIN, SINGLE, Form, Ref, fixed, holds_tensor, openable, opened, parts

SIMPLE = {int, float, bool, str, type(None), torch.dtype, torch.device}  # types that a call records as they are


def trace_forward(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    leaves: Callable[[str, nn.Module], bool],
    values: Mapping[str, Tensor] | None = None,
    answers: Callable[..., Any] | None = None,
    work: Work | None = None,
    left: Collection[Name] = (),
    outside: OutsideDraws | None = None,
    within: Mapping[str, nn.Module] | None = None,
    deep: bool = False,
) -> tuple[CallTrace, Any]:
    """Run `model(*args, **kwargs)` and record its calls; return the record and the output.

    leaves: says of a path and a module whether its call is recorded as one. values: parameters and buffers to use in
    place of the model's. answers: returns the value by which Python decides where there are shapes only, given the
    deciding call, the calls before and the constants. work: counts the cost of calls. left: attributes that the forward
    may leave changed if it sets them before it reads them. outside: watches the model's generators. within: its modules
    by their paths, if known. deep: whether it may use tensors in lists and dictionaries of its modules. The tensors of
    args and kwargs, in pytree order, have the numbers 0, 1, … Raises ValueError naming the module if something cannot
    be traced: objects that calls would share, state that is left.
    """
    r = recorder = _Recorder(model, leaves, values, answers, work, left, outside, within)
    recorder.held.update(in_structures(recorder.modules) if deep else {})
    watched = [(name, buffer, buffer._version) for name, buffer in recorder.buffers]
    given, _ = opened((tuple(args), dict(kwargs)))
    for tensor in given:
        recorder.new(tensor)
    device = given[0].device if given else torch.device("cpu")
    before, modules = attributes(recorder.modules, recorder.leaf), recorder.modules
    with ExitStack() as stack:
        stack.callback(recorder.kept.put_back if recorder.kept is not None else dict)
        for context in (
            work or nullcontext(),
            recorder,
            calls_heard(modules.values(), recorder.call, recorder.applied, recorder.mapped),
            recorder.sets.heard(modules.values(), recorder.set_from_outside, recorder.apart),
            as_written(lambda name: None if r.inside else refusals.compiles(r.name(r.where), r.where, name)),
        ):
            stack.enter_context(context)
        output = model(*args, **kwargs) if values is None else functional_call(model, dict(values), args, dict(kwargs))
    recorder.outside.end("")
    check_unchanged(model, before, recorder.sets.harmless)
    if recorder.told is not None:
        raise recorder.told
    if deep and not {id(tensor) for tensor in recorder.constants.values()} <= {
        *beside(modules),
        *in_structures(modules),
    }:
        raise refusals.replaces(type(model).__name__)
    output = without_caches(output)
    out, form = recorder.opened(output, recorder.known, "")
    if not out:
        raise ValueError(f"{type(model).__name__} returned no tensor, but {type(output).__name__}")
    changed = {name for name, buffer, version in watched if buffer._version != version}
    changed |= set() if recorder.kept is None else recorder.kept.names
    # a tensor without a gradient gets one when a tensor with one is written into it
    grads = [before or tensor.requires_grad for before, tensor in zip(r.grads, r.numbered, strict=True)]
    return CallTrace(
        r.calls, len(given), out, form, r.constants, r.forms, grads, changed, r.costs, device, r.sets.held,
        r.outside.where, r.outside.drawn, r.loose.numbers, {} if r.kept is None else r.kept.writes,
    ), output  # fmt: skip


class _Recorder(TorchFunctionMode):
    def __init__(
        self,
        model: nn.Module,
        leaves: Callable[[str, nn.Module], bool],
        values: Mapping[str, Tensor] | None = None,
        answers: Callable[..., Any] | None = None,
        work: Work | None = None,
        left: Collection[Name] = (),
        outside: OutsideDraws | None = None,
        within: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.calls = model, list[Call]()
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []  # so that their ids are not reused
        self.numbered: list[Tensor] = []
        self.modules = walked(model) if within is None else within
        self.paths = {id(module): path for path, module in self.modules.items()}
        self.leaf = {id(m): leaves(path, m) for path, m in self.modules.items()}
        parameters, self.buffers = list(held(self.modules, "_parameters")), list(held(self.modules, "_buffers"))
        own = [*self.buffers, *parameters] if values is None else values.items()
        self.names = {id(t): name for name, t in own}
        self.held = beside(self.modules)
        self.constants: dict[str, Tensor] = {}
        self.forms = list[tuple[torch.Size, torch.dtype]]()
        self.grads, self.costs = list[bool](), list[float]()
        self.work, self.answers = work, answers
        self.inside = 0  # how many leaves are running, one within the other
        self.leaf_path, self.handed = "", ModuleInputs((), {})  # the path of the leaf that runs, and its arguments
        self.made = Inside()  # tensors that leaves have made
        self.loose = LooseSizes()
        self.stack: list[str] = []
        self.thread = threading.get_ident()
        self.told: Escape | None = None
        self.sets = Sets(self.paths, left)
        self.around = autocasts()
        self.outside = outside or OutsideDraws(generators(self.modules.values()), True)
        tell = lambda name: refusals.set_anew(type(model).__name__, name)  # noqa: E731
        self.kept = None if values is not None else Kept([*parameters, *self.buffers], tell)

    @property
    def where(self) -> str:
        return self.stack[-1] if self.stack else ""

    def name(self, path: str) -> str:
        """Return the name of a module in messages."""
        kind = type(self.modules[path]).__name__
        return f"{kind} {path!r}" if path else kind

    # -- values --------------------------------------------------------------------------------------------------

    def new(self, tensor: Tensor, known: bool = True) -> int:
        """Give a tensor a number; `known`: and refer to the tensor by it from now on."""
        number = len(self.forms)
        if known:
            self.numbers[id(tensor)] = number
        self.numbered.append(tensor)
        self.forms.append((tensor.shape, tensor.dtype))
        self.grads.append(tensor.requires_grad)
        return number

    @property
    def done(self) -> float:
        """The work that has been counted so far."""
        return 0.0 if self.work is None else self.work.done

    def write(self, call: Call, cost: float = 0.0) -> None:
        call.autocast = other(self.around)
        self.calls.append(call)
        self.costs.append(cost)

    def known(self, tensor: Tensor) -> int:
        """Return the number of a tensor of the output; an attribute or constant gets a call that returns it."""
        if id(tensor) not in self.numbers:
            placed = self.placed(tensor, "its caller")
            call = Call(same, (placed,), {}, self.where, True)
            self.write(call)
            call.out = [self.new(tensor)]
        return self.numbers[id(tensor)]

    def placed(self, value: Any, what: str) -> Any:
        """Return a value as a recorded call holds it. what: names the receiver in errors."""
        if not isinstance(value, Tensor):
            return self.plain(value, self.where, what)
        if id(value) in self.numbers:
            return Ref(self.numbers[id(value)])
        if id(value) in self.names:
            return Attribute(self.names[id(value)])
        if (name := self.held.get(id(value))) is not None and not value.requires_grad:
            self.constants[name] = value  # which keeps it, so that its id is not reused
            self.sets.decided.add(place_of(name))
            return Attribute(name)
        if path := self.made.where(value):
            raise Escape(path, refusals.escaped(self.name(self.where), what, value, self.name(path)))
        raise refusals.unmade(self.name(self.where), self.where, what, value)

    def plain(self, value: Any, where: str, what: str) -> Any:
        if type(value).__module__ == "numpy" and not getattr(value, "ndim", 1):
            return value.item()  # a scalar of numpy becomes a number of Python
        if (isinstance(value, PLAIN) or fixed(value)) and not ends_at_tensors(value):
            return value
        raise refusals.shared(self.name(where), where, what, value)

    def place(self, values: Any, what: str) -> Any:
        kind = type(values)
        if kind in SINGLE:
            return values if kind in SIMPLE else self.placed(values, what)
        if kind is tuple or kind is list:
            return kind([self.place(value, what) for value in values])
        if kind is dict:
            return {key: self.place(value, what) for key, value in values.items()}
        return pytree.tree_map(lambda value: self.placed(value, what), values)

    def give(self, call: Call, output: Any, passed: Container[int] = ()) -> None:
        """Number the tensors in the output of a call. passed: ids of tensors that it was given and did not use."""
        if isinstance(output, Tensor):
            call.out = [self.new(output)]
        else:
            where = call.target if call.module else call.where
            number = lambda tensor: self.new(tensor, id(tensor) not in passed)  # noqa: E731
            if call.left:  # what it returns may be an argument, which has changed
                opened(output[0])
            call.out, call.form = self.opened(output, number, where, openable if call.left else None)
        self.loose.made(call)

    def opened(
        self, value: Any, number: Callable[[Tensor], int], where: str, opens: Any = None
    ) -> tuple[list[int], Form]:
        """Return the numbers of the tensors in the output of a call or of the model, and its form. opens: see there."""
        tensors, form = opened(value, opens=opens)
        for constant in form.constants:
            if not isinstance(constant, Ref):
                self.plain(constant, where, "its caller")
        return [number(tensor) for tensor in tensors], form

    # -- calls ---------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, known = kwargs or {}, about(func)
        if threading.get_ident() != self.thread or (known.kind and not self.inside):
            return func(*args, **kwargs)
        name, target = known.name, known.target
        if known.makes:
            self.loose.look(name, args, kwargs)
        if (known.changes or "out" in kwargs or "inplace" in kwargs) and self.kept is not None:
            self.kept.look(known.changes, name == "__set__", args, kwargs, len(self.calls))
        if self.inside:
            self.handed.look(args, kwargs)
            output = func(*args, **kwargs)
            self.made.note(output, self.leaf_path)
            return output
        if known.fills and not self.asks(args, kwargs):
            return self.unheard(func, args, kwargs)  # the initialisation of a module that this forward creates
        if name == "__iter__":
            return iter(self.__torch_function__(Tensor.unbind, types, args, kwargs))
        if known.odd:
            target, args = self.recorded(known, types, args, sys._getframe(1))
        if known.reads and (check := self.loose.checks(args[0], self.numbers, self.where)) is not None:
            self.write(check)
        begin = self.done
        asks = known.asks and (self.asks(args, kwargs) or self.owned(args))
        output = self.answered(target, args, kwargs) if asks and self.answers else target(*args, **kwargs)
        cost = self.done - begin
        given = holds_tensor(output)
        if given or asks or known.acts or name == "register_hook":
            what = f"torch function {name}"
            call = Call(target, self.place(args, what), self.place(kwargs, what), self.where, torch.is_grad_enabled())
            self.write(call, cost)
            if asks:
                call.check = (output,)
            elif given:
                self.give(call, output)
        return output

    def recorded(self, known: About, types: Any, args: Any, caller: FrameType) -> tuple[Any, Any]:
        """Return the function and the arguments that are recorded for a call that stages make in another way."""
        name, target = known.name, known.target
        if known.away and args and isinstance(args[0], Tensor):
            raise refusals.away(self.name(self.where), self.where, name)
        if name in ("__getitem__", "__setitem__"):
            asked = lambda x: self.__torch_function__(Tensor.__index__, types, (x,))  # noqa: E731
            return target, (args[0], bounded(args[1], asked), *args[2:])
        if known.property is not None:
            return target, (args[0], known.property, *(args[1:2] if name == "__set__" else ()))
        if name == "_pad_packed_sequence" and pads(caller):
            if self.loose.unchecks(args[1], self.numbers, self.calls):
                self.calls.pop(), self.costs.pop()
            return (padded, args[:4]) if to_longest(caller) else (target, args)
        if name == "register_hook" and stays(args[1]):
            return Hooked(args[1]), args[:1]
        return target, args

    def set_from_outside(self, module: nn.Module, key: str) -> None:
        """Note an error if the forward sets an attribute of a leaf from outside, which no stage would repeat."""
        if not self.inside and self.leaf[id(module)] and threading.get_ident() == self.thread:
            path = self.paths[id(module)]
            who = f"{self.name(self.where)}.forward sets {key} of {self.name(path)}"
            self.told = self.told or Escape(path, refusals.set_elsewhere(who))

    def apart(self) -> bool:
        """Whether nothing is recorded now, because a leaf or another thread is running."""
        return bool(self.inside) or threading.get_ident() != self.thread

    def unheard(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function without recording it or the calls within it."""
        self.inside += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.inside -= 1

    def answered(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the value by which Python is to decide where there are shapes only."""
        assert self.answers is not None
        call = Call(target, self.place(args, "a decision"), self.place(kwargs, "a decision"), self.where, False)
        return self.answers(call, self.calls, self.constants)

    def asks(self, args: Any, kwargs: Any) -> bool:
        """Whether one of the arguments is a tensor of the micro-batch rather than of the model."""
        return any(isinstance(x, Tensor) and id(x) in self.numbers for x in parts((args, kwargs)))

    def owned(self, args: Any) -> bool:
        """Whether a tensor of which Python asks for the values is a parameter, a buffer or an attribute."""
        return bool(args) and (id(args[0]) in self.names or id(args[0]) in self.held)

    def applied(self, original: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """Record the call of a custom autograd function, which has its own backward."""
        if threading.get_ident() != self.thread:
            return original(*args, **kwargs)
        if self.inside:
            self.handed.look(args, kwargs)
            output = original(*args, **kwargs)
            self.made.note(output, self.leaf_path)
            return output
        if function is CheckpointFunction:
            return checkpointed(args)
        return self.whole(Applied(function), lambda: original(*args, **kwargs), *args, **kwargs)

    def whole(self, target: Any, does: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Record a call as one, without the calls within it."""
        what = f"function {target.__name__}"
        placed = self.place(args, what), self.place(kwargs, what)
        call = Call(target, *placed, self.where, torch.is_grad_enabled())
        begin, output = self.done, self.unheard(does, (), {})
        self.write(call, self.done - begin)
        self.give(call, output)
        return output

    def mapped(self, original: Callable[..., Any], function: Any, options: Any, args: Any, kwargs: Any) -> Any:
        """Record the call of a function under torch.vmap."""
        if self.inside or threading.get_ident() != self.thread:
            return original(function, *options, *args, **kwargs)
        modes = function_modes()
        target = Mapped(function, options, modes[modes.index(self) + 1 :], refusals.cure_whole(self.where))
        return self.whole(target, lambda: original(function, *options, *args, **kwargs), target.holds, args, kwargs)

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.inside or id(module) not in self.paths or threading.get_ident() != self.thread:
            return original(module, *args, **kwargs)
        path = self.paths[id(module)]
        if not self.leaf[id(module)]:
            self.outside.turn(self.where)
            self.stack.append(path)
            try:
                return original(module, *args, **kwargs)
            finally:
                self.outside.turn(path)
                self.stack.pop()
        self.outside.enter(module, self.where)
        if any(isinstance(x, nn.Module) for x in parts((args, kwargs))):
            raise Escape(path, refusals.given_module(f"{self.name(self.where)}.forward gives {self.name(path)}"))
        handed = self.handed = ModuleInputs(args, kwargs)
        self.leaf_path = path
        self.inside += 1
        begin = self.done
        try:
            output = original(module, *args, **kwargs)
            output = handed.apart(module, output, lambda key: self.sets.decided.add((path, key)))
        finally:
            self.inside -= 1
            self.outside.leave()
        who = self.name(path)
        placed = handed.placed(lambda value: self.placed(value, who))
        call = Call(path, *placed, self.where, torch.is_grad_enabled(), left=handed.changed())
        self.write(call, self.done - begin)
        self.give(call, (output, *[handed.args[key] for key in call.left]) if call.left else output, handed.passed)
        return output
