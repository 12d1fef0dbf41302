"""Captured step: a `training_step` of plain code as two graphs, which stand for it at most slices of a batch.

    head   the tensors of a slice                          ->  the tensors that the model is called with
    tail   the output of the model, the tensors of a slice ->  the loss, its gradients, and what is logged

Running Python and autograd takes longer than a small stage does; a graph of operators takes a fraction. The graphs are
made from one slice, and run beside `training_step` at every slice of that batch. They stand for it from the next batch
on if all numbers are equal to the bit, and as long as batches have the same form and all that `training_step` reads
beside its batch is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, fx, nn

from pipeback.lightning import micro_batches, step_checks
from pipeback.lightning.call_override import call_instead
from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.followed_step import Given
from pipeback.lightning.plain_code import NotPlain, PlainCode
from pipeback.lightning.suspended_step import TorchModes
from pipeback.private import dispatch_modes, function_modes, hook_tables, listened
from pipeback.tensors import accelerators
from pipeback.tensors.structures import SINGLE, Form, opened, parts
from pipeback.vectorized.tracing.graphs import Graph, direct
from pipeback.vectorized.tracing.simplified_graph import constant, without_idle

Slice = tuple[Any, int]  # and its samples
FEW = 4  # slices of a batch for which nothing is gained
RARELY = 100  # batches for which graphs are to last on the average, since it takes as long as some batches to make them


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


class StepGraphs:
    """The graphs of a `training_step`, made from the call `given` on a slice. target: the module that it calls to go
    forward; output: what that returns; modes: those of torch around the call.

    Raises `NotPlain` where they cannot be made.
    """

    def __init__(
        self, found: TrainedModule, module: LightningModule, target: nn.Module, given: Given, output: Any,
        modes: TorchModes,
    ) -> None:  # fmt: skip
        self._found, self._module, self._target, self._given, self._modes = found, module, target, given, modes
        tensors, self._batch = opened(given.batch)
        outputs, self._output = opened(output)
        self._moving = [n for n, t in enumerate(outputs) if t.is_floating_point() or t.is_complex()]
        self._outputs = [(t.shape, t.dtype) for t in outputs]
        self.casts = any(enabled for _, enabled, _ in modes.casts)
        self.logged: list[_Logged] = []
        self._called: Form
        with modes.applied(), torch.enable_grad():
            self._heads = _graph(self._head, tensors)
            self._tails = _graph(self._tail, [*(t.detach() for t in outputs), *tensors])

    def head(self, tensors: Sequence[Tensor]) -> Any:
        """Return the input of the pipeline for a slice with these tensors."""
        inputs, named = self._called.fill(self._heads(*tensors))
        return self._found.given(inputs, named)

    def fits(self, output: Any) -> bool:
        """Whether the tail is made for an output of the model like this."""
        return [(t.shape, t.dtype) for t in _tensors(output)] == self._outputs

    def tail(self, output: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, Any, list[Any]]:
        """Return the loss, the gradient of the output as `step_checks.gradients` gives it, and the logged values."""
        outputs = _tensors(output)
        with torch.no_grad(), accelerators.under(()):
            loss, *found = self._tails(*outputs, *tensors)
        moved, values = found[: len(self._moving)], iter(found[len(self._moving) :])
        gradients: list[Any] = [None] * len(outputs)
        for n, gradient in zip(self._moving, moved, strict=True):
            gradients[n] = gradient
        said = [next(values) if call.value is None else call.value for call in self.logged]
        return loss, gradients[0] if len(gradients) == 1 else tuple(gradients), said

    def say(self, log: micro_batches.Log, values: Sequence[Any]) -> None:
        """Log these values."""
        for call, value in zip(self.logged, values, strict=True):
            log.hear(call.name, value, *call.args, **call.options)

    def _head(self, *tensors: Tensor) -> list[Tensor]:
        try:
            self._run(tensors, self._leave)
        except _Called as call:
            found, self._called = opened((call.inputs, call.named))
            return found
        raise NotPlain("does not call the model")

    def _tail(self, *given: Tensor) -> list[Tensor | None]:
        count = len(self._outputs)
        answers = [t.detach() for t in given[:count]]
        moving = [answers[n].requires_grad_() for n in self._moving]
        calls = list[Any]()

        def answer(*inputs: Any, **named: Any) -> Any:
            if calls or self.logged:
                raise NotPlain("calls the model twice, or logs before it calls the model")
            calls.append(inputs)
            return self._output.fill(answers)

        self.logged.clear()
        values = list[Tensor]()
        loss = step_checks.loss_of(self._run(given[count:], answer, values))
        if type(loss) is not Tensor or loss.dim():
            raise NotPlain("returns no plain tensor of one number")
        gradients = torch.autograd.grad(loss, moving, allow_unused=True)
        return [loss.detach(), *gradients, *(value.detach() for value in values)]

    def _leave(self, *inputs: Any, **named: Any) -> Any:
        raise _Called(inputs, named)

    def _run(self, tensors: Sequence[Tensor], forward: Callable[..., Any], values: list[Tensor] | None = None) -> Any:
        """Run `training_step` on a slice with these tensors; the model does `forward`."""

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            if any(type(v) not in SINGLE or isinstance(v, Tensor) for v in (*args, *options.values())):
                raise NotPlain("calls self.log with tensors in its options")
            known = not isinstance(value, Tensor)
            if known and type(value) not in (int, float, bool):
                raise NotPlain(f"logs a {type(value).__name__}")
            self.logged.append(_Logged(name, value if known else None, args, options))
            if not known and values is not None:
                values.append(value)

        def heard(*inputs: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                raise NotPlain("calls the model without gradients")
            return forward(*inputs, **named)

        own = vars(self._module).get("log")
        with ExitStack() as stack:
            self._module.log = log  # type: ignore[method-assign]
            stack.callback(_put_back, self._module, own)
            stack.enter_context(call_instead(self._target, heard))
            return self._given._replace(batch=self._batch.fill(tensors)).run()


class CapturedStep:
    """Makes the graphs of the `training_step` of `module`, and tells which batches they stand for it in."""

    def __init__(self, found: TrainedModule, module: LightningModule) -> None:
        self.found, self.module = found, module
        self.why: str | None = None  # why it is not captured; goes on after "it"
        self.learns = False  # whether slices of this batch are to be shown
        self._code: PlainCode | None = None
        self._last: Any = None  # what the batch before read, and its form
        self._made: tuple[Any, StepGraphs] | None = None  # for which of these
        self._batches = self._times = 0  # how often it was asked, and learned

    def ready(self, cut: Sequence[Slice], given: Given) -> StepGraphs | None:
        """Return the graphs that stand for `training_step` in this batch; None: it runs itself. given: its call."""
        self.learns = False
        if self.why is not None or len(cut) < FEW or self._watched():
            return None
        try:
            now = self._now(cut, given)
        except NotPlain as error:
            self.why = str(error)
            return None
        if self._made is not None and self._made[0] == now:
            return self._made[1]
        self._batches += 1
        self.learns = now is not None and now == self._last and self._times <= 2 + self._batches // RARELY
        self._times += self.learns
        self._last = now
        return None

    def learn(
        self, given: Given, modes: TorchModes, question: Any, output: Any, loss: Tensor, said: Sequence[Any]
    ) -> None:
        """Make the graphs from the first slice of a batch, and compare them with what `training_step` did at a slice.

        question: the input of the pipeline. said: what was logged after the model.
        """
        tensors = parts(given.batch)
        try:
            if self._made is None or self._made[0] != self._last:
                self._code = PlainCode(self.module, "training_step", self._model)  # what it calls may be other code now
                self._made = self._last, StepGraphs(self.found, self.module, self._model, given, output, modes)
            graphs = self._made[1]
            found = graphs.tail(output, tensors)
            pairs = [*zip(_tensors(question), _tensors(graphs.head(tensors)), strict=True)]
            pairs += zip((loss, *said), (found[0], *found[2]), strict=True)
            gradients = step_checks.gradients(step_checks.held(output))
            pairs += zip(*(g if isinstance(g, tuple) else (g,) for g in (gradients, found[1])), strict=True)
            if not all(_same(a, b) for a, b in pairs):
                raise NotPlain("computes something else when it runs as a graph")
        except NotPlain as error:
            self.why = str(error)
        except Exception as error:  # the user's code or torch may raise any error: it runs as it is
            self.why = f"cannot be written as a graph: {str(error).strip().partition(chr(10))[0]}"
        if self.why is not None:
            self.learns, self._made = False, None

    @property
    def _model(self) -> nn.Module:
        """The module that `training_step` calls to go forward."""
        step = self.found.step
        if step is None:
            return self.found.module
        if step.single is None:
            raise NotPlain("calls several modules with weights")
        return step.called[step.single]

    def _now(self, cut: Sequence[Slice], given: Given) -> Any:
        """What a batch reads and its form: if they are as before, the graphs of before compute the same."""
        if self._code is None:
            if self.found.step is not None and not self.found.step.known:
                return None
            self._code = PlainCode(self.module, "training_step", self._model)
        if any(hook_tables(self._model)) or "training_step" in vars(self.module):
            raise NotPlain("calls a model with hooks")
        first, form = opened(cut[0][0])
        shapes = [(t.shape, t.dtype, t.device) for t in first]
        for part, _ in cut[:-1]:
            leaves = parts(part)
            if not all(type(t) is Tensor and not t.requires_grad for t in leaves):
                raise NotPlain("gets batches with more in them than plain tensors")
            if [(t.shape, t.dtype, t.device) for t in leaves] != shapes:
                return None
        asked = [given.rest[n - 1] if n <= len(given.rest) else given.named for n in sorted(self._code.arguments)]
        return self._code.reads(), asked, form, shapes, TorchModes.now()

    @staticmethod
    def _watched() -> bool:
        """Whether somebody watches what Python does."""
        watching = torch.is_anomaly_enabled() or dispatch_modes() or function_modes()
        return bool(watching) or listened(_NOBODY) is not None


_NOBODY = nn.Module()


def _tensors(value: Any) -> list[Tensor]:
    return [value] if type(value) is Tensor else opened(value)[0]


def _put_back(module: LightningModule, log: Any) -> None:
    vars(module).pop("log", None)
    if log is not None:
        module.log = log  # type: ignore[method-assign]


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or bool(one == other)
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _graph(function: Callable[..., Any], given: Sequence[Tensor]) -> Graph:
    """Return a function of tensors as a graph. Raises `NotPlain` where it draws, or writes to what it is given."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    graph = make_fx(function)(*given)
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise NotPlain("draws random numbers")
            written = [
                arg for arg, of in zip(node.args, node.target._schema.arguments, strict=False)
                if of.alias_info is not None and of.alias_info.is_write
            ]  # fmt: skip
            if node.target._schema.is_mutable and not (written and all(map(_fresh, written))):
                raise NotPlain("writes to a tensor in place")
        elif node.op == "call_function" and getattr(node.target, "__module__", "") != "_operator":
            raise NotPlain(f"calls {node.target}")
    return direct(constant(without_idle(graph)).forward)


def _fresh(node: Any) -> bool:
    """Whether a tensor has memory of its own."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    if node.target._schema.is_mutable and node.args:
        return _fresh(node.args[0])
    return all(of.alias_info is None for of in returns) and node.target is not torch.ops.aten.reshape.default
