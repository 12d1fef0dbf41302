"""Step graphs: a `training_step` as two graphs of operators, traced from a call of it.

head   the tensors of a slice                          ->  the tensors that the model is called with
tail   the output of the model, the tensors of a slice ->  the loss, its gradients, and what is logged
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeback.lightning import micro_batches, step_checks
from pipeback.lightning.call_override import call_instead
from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.followed_step import Given
from pipeback.lightning.plain_values import NotPlain
from pipeback.lightning.seen_batches import filled, form_of, tensors_of
from pipeback.lightning.suspended_step import TorchModes
from pipeback.private import TorchDispatchMode, casts_anywhere, identity
from pipeback.stages.tracing_lock import TRACING
from pipeback.tensors import accelerators
from pipeback.tensors.structures import SINGLE, Form, opened, parts
from pipeback.vectorized.tracing.graphs import Graph, direct
from pipeback.vectorized.tracing.simplified_graph import constant, without_idle

_TEXTS = {Tensor.__repr__, Tensor.__format__}
INDEXES = {"aten::index.Tensor", "aten::_unsafe_index.Tensor"}  # whose shapes depend on values where these are masks


class _Called(BaseException):
    """Ends a `training_step` that is traced where it calls the model. `except Exception` does not catch it."""

    def __init__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.inputs, self.named = inputs, named


class _Logged(NamedTuple):
    """A call of `self.log`."""

    name: str
    value: Any  # None: a tensor, which the tail returns
    args: tuple[Any, ...]
    options: dict[str, Any]


class _Trace:
    """Runs `training_step` of `module` as functions of tensors. target: the module that it calls to go forward."""

    def __init__(self, module: LightningModule, target: nn.Module, given: Given, output: Any) -> None:
        self.module, self.target, self.given = module, target, given
        self.tensors, self.batch = tensors_of(given.batch), form_of(given.batch)
        self.outputs, self.output = opened(output)
        self.moving = [n for n, t in enumerate(self.outputs) if t.is_floating_point() or t.is_complex()]
        self.called: Form  # of the arguments of the model
        self.logged: list[_Logged] = []
        self._values: list[Tensor] = []

    def head(self, *tensors: Tensor) -> list[Tensor]:
        def leave(*inputs: Any, **named: Any) -> Any:
            raise _Called(inputs, named)

        try:
            self._run(tensors, leave)
        except _Called as call:
            found, self.called = opened((call.inputs, call.named))
            return found
        raise NotPlain("does not call the model")

    def tail(self, *given: Tensor) -> list[Tensor | None]:
        count, calls = len(self.outputs), list[Any]()
        answers = [t.detach() for t in given[:count]]
        moving = [answers[n].requires_grad_() for n in self.moving]

        def answer(*inputs: Any, **named: Any) -> Any:
            if calls or self.logged:
                raise NotPlain("calls the model twice, or logs before it calls the model")
            calls.append(inputs)
            return self.output.fill(answers)

        self.logged, self._values = [], []
        loss = step_checks.loss_of(self._run(given[count:], answer))
        if type(loss) is not Tensor or loss.dim():
            raise NotPlain("returns no plain tensor of one number")
        gradients = torch.autograd.grad(loss, moving, allow_unused=True)
        return [loss.detach(), *gradients, *(value.detach() for value in self._values)]

    def _run(self, tensors: Sequence[Tensor], forward: Callable[..., Any]) -> Any:
        """Run `training_step` on a slice with these tensors; the model does `forward`."""

        def heard(*inputs: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                raise NotPlain("calls the model without gradients")
            return forward(*inputs, **named)

        own = vars(self.module).get("log")
        with ExitStack() as stack:
            self.module.log = self._log  # type: ignore[method-assign]
            stack.callback(_put_back, self.module, own)
            stack.enter_context(call_instead(self.target, heard))
            return self.given._replace(batch=filled(self.batch, tensors)).run()

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if any(type(v) not in SINGLE or isinstance(v, Tensor) for v in (*args, *options.values())):
            raise NotPlain("calls self.log with tensors in its options")
        tensor = isinstance(value, Tensor)
        if not tensor and type(value) not in (int, float, bool):
            raise NotPlain(f"logs a {type(value).__name__}")
        self.logged.append(_Logged(name, None if tensor else value, args, options))
        self._values += [value] if tensor else []


class StepGraphs:
    """The graphs of a `training_step`, made from the call `given` on a slice. target: the module that it calls to go
    forward; output: what that returns; modes: those of torch around the call.

    Raises `NotPlain` where they cannot be made.
    """

    def __init__(
        self, found: TrainedModule, module: LightningModule, target: nn.Module, given: Given, output: Any,
        modes: TorchModes,
    ) -> None:  # fmt: skip
        trace = _Trace(module, target, given, output)
        with TRACING, modes.applied(), torch.enable_grad():
            self._heads = _graph(trace.head, trace.tensors)
            self._tails = _graph(trace.tail, [*(t.detach() for t in trace.outputs), *trace.tensors])
        self._found, self._moving, self._called = found, trace.moving, trace.called
        self._alone = trace.called == opened(((torch.empty(0),), {}))[1]  # whether the model is called with one tensor
        self.logged = trace.logged  # what it logs, in order
        self._outputs = [(t.shape, t.dtype) for t in trace.outputs]

    def head(self, tensors: Sequence[Tensor]) -> Any:
        """Return the input of the pipeline for a slice with these tensors."""
        found = self._heads(*tensors)
        inputs, named = (tuple(found), {}) if self._alone else self._called.fill(found)
        return self._found.given(inputs, named)

    def fits(self, output: Any) -> bool:
        """Whether the tail is made for an output of the model like this."""
        return [(t.shape, t.dtype) for t in tensors_of(output)] == self._outputs

    def tail(self, output: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, Any, list[Any]]:
        """Return the loss, the gradient of the output as `step_checks.gradients` gives it, and the logged values."""
        outputs = [t.detach() if t.requires_grad else t for t in tensors_of(output)]
        with torch.no_grad():
            if casts_anywhere():  # the graph has the casts in it
                with accelerators.under(()):
                    found = self._tails(*outputs, *tensors)
            else:
                found = self._tails(*outputs, *tensors)
        moved, values = found[1 : 1 + len(self._moving)], iter(found[1 + len(self._moving) :])
        said = [next(values) if call.value is None else call.value for call in self.logged]
        if len(outputs) == 1:
            return found[0], moved[0] if moved else None, said
        gradients: list[Any] = [None] * len(outputs)
        for n, gradient in zip(self._moving, moved, strict=True):
            gradients[n] = gradient
        return found[0], tuple(gradients), said

    def say(self, log: micro_batches.Log, values: Sequence[Any]) -> None:
        """Log these values."""
        for call, value in zip(self.logged, values, strict=True):
            log.hear(call.name, value, *call.args, **call.options)


def _put_back(module: LightningModule, log: Any) -> None:
    vars(module).pop("log", None)
    if log is not None:
        module.log = log  # type: ignore[method-assign]


def _graph(function: Callable[..., Any], given: Sequence[Tensor]) -> Graph:
    """Return a function of tensors as a graph. Raises `NotPlain` where it draws, or writes to what it is given."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    def watched(*tensors: Tensor) -> Any:
        with _PlainOperators(), _Unprinted():
            return function(*tensors)

    graph = make_fx(watched)(*given)
    return direct(constant(without_idle(graph)).forward)


def _masks(indices: Sequence[Any]) -> bool:
    """Whether one of these indices is a mask."""
    return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in indices)


class _Unprinted(TorchFunctionMode):
    """Raises `NotPlain` where a tensor becomes a text, which no operator tells."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TEXTS:
            raise NotPlain("makes a text of a tensor")
        return func(*args, **(kwargs or {}))


class _PlainOperators(TorchDispatchMode):
    """Raises `NotPlain` before an operator draws, makes a tensor whose shape depends on values, or writes to a tensor
    that no operator has made meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, Tensor] = {}  # what has memory of its own, by that

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotPlain("draws random numbers")
        if func.name() == "aten::_local_scalar_dense":
            raise NotPlain("takes a number out of a tensor")
        if torch.Tag.dynamic_output_shape in func.tags and (func.name() not in INDEXES or _masks(args[1])):
            raise NotPlain("has tensors whose shapes depend on values, as those that a mask picks out")
        arguments = func._schema.arguments
        given = {**dict(zip((of.name for of in arguments), args, strict=False)), **kwargs}
        written = [given.get(of.name) for of in arguments if of.alias_info is not None and of.alias_info.is_write]
        written += [] if "batch_norm" not in func.name() else [given.get("running_mean")]  # which no schema tells
        if any(identity(t) not in self._made for t in parts(written) if isinstance(t, Tensor)):
            raise NotPlain("writes to a tensor in place")
        found = func(*args, **kwargs)
        old = {identity(t) for t in parts((args, kwargs)) if isinstance(t, Tensor)}
        self._made |= {identity(t): t for t in parts(found) if isinstance(t, Tensor) and identity(t) not in old}
        return found
