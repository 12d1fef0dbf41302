"""Followed step: a `training_step` that calls its LightningModule, or several of its modules, as it likes.

    training_step   batch ─ self.encoder ─ operations ─ self.decoder ─ the rest of the step ─ loss
    the pipeline    batch ─ self.encoder ─ operations ─ self.decoder

The model of the pipeline is what `training_step` computes up to its last call that uses trained weights. It gives the
result of every such call, and all random numbers drawn on the way. `training_step` itself runs for every micro-batch as
it is: where it makes the first of these calls, F runs, and each call then returns what F has computed. The operations
between them are thus computed twice, once in the stages, where their gradients flow, and once for the user's code.

Where only one module is called, the model is that call alone, and what comes before it is the step's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from pipeback.lightning.call_override import as_it_is, by_itself
from pipeback.lightning.frozen_calls import FrozenCalls
from pipeback.lightning.step_calls import Heard, StepCalls
from pipeback.lightning.step_twin import Copies, attributes_kept, attributes_unset, put_back, refresh, twin
from pipeback.splitting.call_listeners import modules_heard
from pipeback.splitting.module_restore import untouched
from pipeback.stages.saved_graph import nodes
from pipeback.tensors import accelerators
from pipeback.tensors.structures import opened, parts

AWAY = (
    "training_step calls {name} without gradients, but on several devices, or with a store, its weights are in the "
    "stages, which compute the calls with gradients; use .detach() on what such a call returns, or devices=1 and "
    "store=None"
)
SHARED = (
    "training_step calls {name} itself, and {single} uses it, too, whose weights are in stages on several devices, or "
    "in a store; give training_step a copy, self.own = copy.deepcopy({name}) in __init__, or use devices=1 and "
    "store=None"
)


ITERATOR = (
    "training_step takes dataloader_iter, from which the run that finds out what it calls would take a batch, too; let "
    "it take (batch, batch_idx), or call one module that has all trained weights"
)


class Given(NamedTuple):
    """A call of `training_step` on a micro-batch."""

    step: Callable[..., Any]
    batch: Any
    rest: tuple[Any, ...]
    named: dict[str, Any]

    def run(self) -> Any:
        return self.step(self.batch, *self.rest, **self.named)


class _Known(NamedTuple):
    """A call that every micro-batch makes."""

    name: str
    changed: bool  # whether training_step changes its result in place
    fills: bool  # whether it fills its first argument


class _Reached(BaseException):
    """Ends a `training_step` that is traced. `except Exception` does not catch it."""


class FollowedStep:
    """The calls of a `training_step`, and the model that computes them for the pipeline."""

    def __init__(self, module: LightningModule) -> None:
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            raise ValueError(ITERATOR)
        self.module = module
        self.model = twin(module, self._forward, self._read)
        self._calls = list[_Known]()  # empty: training_step has not run yet
        self._single = False  # whether it makes one call only, of a module
        self._seen = set[str]()  # modules with trained weights that it calls without gradients, when it runs first
        self._frozen = FrozenCalls()
        self.operator = False  # whether its first call is of torch.ops, which cannot be left for another slice's
        self.far = False  # whether other devices or a store have the stages' weights
        self._inside = 0  # how many calls of the twin's own forward are running
        self._made_of: list[set[Any]] = []  # of each call: what it was made of when it was traced
        self._weights = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        self._modules = {  # those with trained weights
            f"self.{path}": m
            for path, m in module.named_modules()
            if path and any(id(p) in self._weights for p in m.parameters())
        }
        self._copies: Copies | None = None  # of a model with modules of its own
        self._given: Given
        self._running: StepCalls | None = None  # while the twin's training_step runs

    @property
    def called(self) -> dict[str, nn.Module]:
        """What `training_step` may call: the LightningModule, and its modules with trained weights, by their names."""
        return {"self": self.module, **self._modules}

    @property
    def looks(self) -> bool:
        """Whether it calls modules with trained weights without gradients, when it runs first."""
        return bool(self._seen)

    @property
    def known(self) -> bool:
        """Whether it has run, so that its calls are known."""
        return bool(self._calls)

    @property
    def single(self) -> str | None:
        """The name of the module whose call is all that the pipeline computes; None before the first
        `training_step`, and where it makes several calls.
        """
        return self._calls[0].name if self._single else None

    def stand_ins(
        self, serve: Callable[..., Any], held: Iterable[Tensor]
    ) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Yield the modules whose weights stages have, each with what its calls do meanwhile: `serve`, or an error if
        it is not the one call that the stages compute. held: the weights of the stages.
        """

        def served(*inputs: Any, **named: Any) -> Any:
            self._refresh()  # attributes, and the training mode
            return serve(*inputs, **named)

        gone = {id(p) for p in held if p.requires_grad or self.single is not None}
        for path, module in self.module.named_modules():
            if any(id(p) in gone for p in module.parameters()):
                name = f"self.{path}" if path else "self"
                yield module, served if name == self.single else partial(_refuse, name, self.single)

    def apart(self, known: dict[int, Any]) -> nn.Module:
        """Give the model modules of its own. known: what stands for weights and buffers in them, by identity.

        Where `training_step` makes several calls, it also runs what is frozen between them itself.
        """
        self._copies = Copies(self.model, self.module, known)
        self.model = self._copies.twin
        return self.model

    def _refresh(self) -> None:
        refresh(self.model, self.module, self._copies)

    @contextmanager
    def heard(self, given: Given, forward: Callable[..., Any], look: Callable[[], None]) -> Iterator[None]:
        """A context for one `training_step`, whose first call runs F by `forward`.

        forward: gets the tensors of the batch, or the arguments of the only call. look: hears of calls without
        gradients.
        """
        self._given = given
        self._calls = self._calls or self._learned()
        tensors, _ = opened(given.batch)
        answers, place = list[Any](), ExitStack()

        def hear(call: Heard) -> Any:
            if self._single and not call.uses:
                return call.does()
            if not answers:
                place.close()  # the stages run the modules as they are
                self._refresh()  # training_step may have set attributes
                self.operator = call.operator
                answers.append([forward(*call.args, **call.kwargs)] if self._single else forward(*tensors))
                place.enter_context(self._instead(calls, look))
            return self._answer(call, answers)

        calls = StepCalls(self._weights, tensors, hear)
        with place, calls:
            place.enter_context(self._instead(calls, look))
            yield

    @contextmanager
    def _instead(self, calls: StepCalls, look: Callable[[], None]) -> Iterator[None]:
        """Within this context the modules that the user's `training_step` calls are heard instead of run."""

        def heard(name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() and not calls.apart:
                look()
            return calls.module(name, partial(own, *args, **kwargs), args, kwargs)

        known = {call.name for call in self._calls}
        with ExitStack() as stack:
            for name, m in self.called.items():
                if name in known:
                    stack.enter_context(by_itself(m, partial(heard, name, as_it_is(m))))  # stages run its hooks
            yield

    def _answer(self, call: Heard, answers: list[Any]) -> Any:
        """Return what F has computed for this call; answers: the outputs of F, then one entry per call so far."""
        outputs, n = answers[0], len(answers) - 1
        answers.append(call)
        if n >= len(outputs) and not call.uses:
            return call.does()  # it is drawn for the loss
        if n >= len(outputs) or call.name != self._calls[n].name:
            raise self._other(call, n)
        if not self._single and call.made_of not in self._made_of[n]:
            raise ValueError(
                f"training_step gives {call.name} something else than when it was traced: an operation or a number "
                "before this call differs from micro-batch to micro-batch, and the stages would keep the traced one; "
                "keep the number in an attribute of the LightningModule, which is followed, or do the operation in the "
                "forward of a module with weights"
            )
        if self._calls[n].fills:
            return call.args[0].copy_(outputs[n])
        return _copied(outputs[n]) if self._calls[n].changed else outputs[n]

    def check_loss(self, loss: Tensor) -> None:
        """Raise if the loss depends on a weight other than through the calls."""
        for node in nodes([loss]):
            if (name := self._weights.get(id(getattr(node, "variable", None)))) is not None:
                raise ValueError(
                    f"the loss of training_step depends on self.{name} in a way that was not seen when it ran first, "
                    "so no stage would learn it; use the weight in the forward of a module, and call that"
                )

    # -- the twin ------------------------------------------------------------------------------------------------

    def _learned(self) -> list[_Known]:
        """Run the twin's `training_step` once, and note its calls up to the last one that uses trained weights."""
        found: list[tuple[Heard, Any, list[tuple[Tensor, int]]]] = []
        self._refresh()

        def hear(call: Heard) -> Any:
            output = call.does()
            found.append((call, output, [(t, t._version) for t in parts(output) if isinstance(t, Tensor)]))
            return output

        devices = {t.device for t in (*self.model.parameters(), *self.model.buffers())}
        listening = self._frozen.heard(self.model, lambda: self._running)
        with put_back(self.module), untouched(self.model), accelerators.forked(devices), listening:
            self._run(self._given.batch, hear)
        last = max((n for n, (call, _, _) in enumerate(found) if call.uses), default=-1)
        if last < 0:
            raise ValueError(
                f"training_step of {type(self.module).__name__} uses no trained weight, so there is nothing for the "
                "stages to learn; call the modules with trained weights in it, and not in torch.no_grad()"
            )
        uses = [each for each in found[: last + 1] if each[0].uses]
        self._single = len(uses) == 1 and uses[0][0].name in self.called
        calls = uses if self._single else found[: last + 1]
        if self.far and (away := self._seen - {calls[0][0].name if self._single else ""}):
            raise ValueError(AWAY.format(name=min(away)))
        if self.far and self._single and (shared := self._frozen.shared):
            raise ValueError(SHARED.format(name=min(shared), single=calls[0][0].name))
        self._made_of = [set() for _ in calls]
        return [
            _Known(
                call.name, any(t._version != before for t, before in versions), output is next(iter(call.args), None)
            )
            for call, output, versions in calls
        ]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the twin: of the user's class where `training_step` calls it, else all calls of the step."""
        if self._running is not None:
            return self._heard(self._running, "self", partial(self._own_forward, *args, **kwargs), args, kwargs)
        if self._single:
            name = self._calls[0].name
            run = self._own_forward if name == "self" else self.model.get_submodule(name.removeprefix("self."))
            return run(*args, **kwargs)
        outputs = list[Any]()

        def hear(call: Heard) -> Any:
            n = len(outputs)
            if self._calls[n].name != call.name:
                raise self._other(call, n)
            output = call.does()
            self._made_of[n].add(call.made_of)
            outputs.append(_copied(output) if self._calls[n].changed else output)
            if len(outputs) == len(self._calls):
                raise _Reached
            return output

        try:
            self._run(opened(self._given.batch)[1].fill(args), hear)
        except _Reached:
            return tuple(outputs)
        raise self._other(None, len(outputs))

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        kind = type(self.module)
        self._inside += 1
        try:
            with attributes_unset(self.model, f"{kind.__name__}.forward"):
                return kind.forward(self.model, *args, **kwargs)
        finally:
            self._inside -= 1

    def _run(self, batch: Any, hear: Callable[[Heard], Any]) -> None:
        """Run the twin's `training_step` on a batch; `hear` gets its calls."""
        trained = set(self._weights.values())
        weights = {id(p): name for name, p in self.model.named_parameters() if name in trained}  # or what stands for it
        calls = StepCalls(weights, opened(batch)[0], hear)

        modules = {path: m for path, m in self.model.named_modules() if f"self.{path}" in self._modules}
        names = {id(m): f"self.{path}" for path, m in modules.items()}

        def called(original: Callable[..., Any], m: nn.Module, args: Any, kwargs: Any) -> Any:
            does = partial(original, m, *args, **kwargs)
            name = names.get(id(m))
            return does() if name is None else self._heard(calls, name, does, args, kwargs)

        self._running = calls
        try:
            with attributes_kept(self.model), modules_heard([*modules.values()], called), calls:
                type(self.module).training_step(self.model, batch, *self._given.rest, **self._given.named)
        finally:
            self._running = None

    def _heard(self, calls: StepCalls, name: str, does: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Hear that the twin's `training_step` calls a module with trained weights."""
        if not torch.is_grad_enabled() and not calls.apart:
            self._seen.add(name)
            with self._frozen.inside():
                return does()
        return calls.module(name, does, args, kwargs)

    def _read(self, name: str) -> None:
        """Hear that a counter of the Trainer is read: within a call the stages would keep its value."""
        if self._inside and self._calls:
            raise ValueError(
                f"self.{name} is read in a forward of {type(self.module).__name__}, and the stages would keep its "
                f"value of now; write self.seen = self.{name} in on_train_batch_start, and read self.seen in the "
                "forward: attributes are followed"
            )

    def _other(self, call: Heard | None, n: int) -> ValueError:
        """The error that a call is another one than in the first run."""
        now = "ends" if call is None else f"goes on with {call.name}"
        first = f"came {self._calls[n].name}" if n < len(self._calls) else "it used no more weights"
        return ValueError(
            f"training_step {now}, where in its first run {first}; the pipeline makes the same calls for every "
            "micro-batch: put what differs into the forward of one module, and call that for every micro-batch"
        )


def _refuse(name: str, single: str | None, *inputs: Any, **named: Any) -> Any:
    cure = f"call {name} in validation_step" if single is None else f"call {single} instead, in torch.no_grad()"
    raise RuntimeError(
        f"{name} was called, but its weights are in stages on several devices, or in a store, which compute what "
        f"training_step calls with gradients; {cure}, or call it after fit, or use devices=1, store=None"
    )


def _copied(value: Any) -> Any:
    """Return a structure with copies of its tensors, which autograd follows."""
    tensors, form = opened(value)
    return form.fill([t.clone() for t in tensors])
