"""Suspended slices: the `training_step`s of the slices of a batch, each suspended where it calls the model.

So the stages can have all slices before the loss of the first is known. What a `training_step` does before its call
happens in the order of the slices, and so does what it does after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeback.lightning import micro_batches, step_checks
from pipeback.lightning.call_override import call_instead, hooks_now, with_hooks
from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.followed_step import Given
from pipeback.lightning.seen_batches import tensors_of
from pipeback.lightning.step_graphs import StepGraphs
from pipeback.lightning.suspended_step import Suspended, TorchModes

Slice = tuple[Any, int]  # and its samples


LOOKS = (
    "training_step calls {name} without gradients, but where stages run as one, its weights are by then those of other "
    "micro-batches; use PipelineStrategy(vectorize=False)"
)
_SETS = (
    "training_step sets what the forward of {name} reads to something else for one micro-batch of a batch than for the "
    "one before, but where stages run as one, these go forward together; use PipelineStrategy(vectorize=False)"
)
_OPERATOR = (
    "the first that training_step calls is one of torch.ops, within which no other micro-batch can go on, where stages "
    "run as one or visit a store; use torch.nn.functional, or vectorize=False and store=None"
)


class SuspendedSlices:
    """The `training_step`s of one batch. given: the call of that of a slice. log: collects what they log.

    settings: gives a number to the values that the forward of the model reads. graphs: stand for `training_step` in all
    slices but the first and the last.
    """

    def __init__(
        self,
        found: TrainedModule,
        cut: list[Slice],
        given: Callable[[Any], Given],
        log: micro_batches.Log,
        settings: Callable[[], int],
        graphs: StepGraphs | None = None,
    ) -> None:
        self.outside = TorchModes.now()
        self.found, self.cut, self.log, self.graphs = found, cut, log, graphs
        self._given = given
        ends = 0, len(cut) - 1
        captured = {} if graphs is None else {n: tensors_of(batch) for n, (batch, _) in enumerate(cut) if n not in ends}
        self._captured: dict[int, list[Any]] = captured  # the tensors of slices
        self._heads: dict[int, Any] = {}  # the inputs of the model that graphs have computed of them
        self.calls = {n: self._suspended(n) for n in range(len(cut)) if n not in captured}
        self._entered: set[int] = set()  # those that have called the model
        self._running = 0
        self._settings = settings
        self._ahead = self._looked = False
        self._original, self._hooks = found.module.forward, hooks_now(found.module)

    @property
    def modes(self) -> TorchModes:
        """The modes of torch under which the first has called the model."""
        return self.calls[0].modes

    @property
    def asked(self) -> list[Any]:
        """The inputs of the model, of those that wait."""
        found = {**self._heads, **{n: call.question for n, call in self.calls.items() if call.asks}}
        return [found[n] for n in sorted(found)]

    @contextmanager
    def heard(self) -> Iterator[None]:
        """A context in which they may run."""
        if self.found.step is not None:  # each hears its own calls
            yield
            return
        self._original = self.found.module.forward  # another one once the stages have the weights
        with call_instead(self.found.module, self._forward), with_hooks(self.found.module, self._hooks):
            yield  # the stages run it without its hooks

    def run_ahead(self) -> None:
        """Note that stages make updates of later slices before a slice goes on. Raises ValueError where a
        `training_step` looks at the weights.
        """
        self._ahead = True
        self._look(self._looked)

    def _look(self, looked: bool = True) -> None:
        self._looked |= looked
        if self._looked and self._ahead:
            raise ValueError(LOOKS.format(name=self.found.shown))

    def begin_all(self) -> None:
        """Run all slices up to their calls of the model. Raises ValueError where these calls are unlike."""
        settings = self._settings()
        for n, tensors in [*self._captured.items()]:
            assert self.graphs is not None
            try:
                self._heads[n] = self.graphs.head(tensors)
            except Exception:  # such as an index out of range: the user's code is to raise it
                self._leave_to_itself(n)
        for n in sorted(self.calls):
            self.begin(n)
            if self._settings() != settings:
                raise ValueError(_SETS.format(name=self.found.shown))

    def begin(self, n: int) -> None:
        """Run a slice up to its call of the model. Raises ValueError if it comes to its end without one."""
        if n not in self._entered and not self._run(n):
            step_checks.check_output(self.found, self.calls[n].result, None)

    def finish(self, n: int, output: Any) -> Any:
        """Let a slice go on with the output of the model; return what its `training_step` returns."""
        self.begin(n)
        self._run(n, output)
        return self.calls[n].result

    def judged(self, n: int, output: Any) -> tuple[Tensor, Any] | None:
        """Return the loss of a slice and the gradient of the output of the model, where graphs stand for it.

        None: it is to go on itself.
        """
        if self.graphs is None or n not in self._captured:
            return None
        try:
            found = self.graphs.tail(output, self._captured[n]) if self.graphs.fits(output) else None
        except Exception:  # such as a target out of range: the user's code is to raise it
            found = None
        if found is None:
            self._leave_to_itself(n)
            return None
        loss, gradients, said = found
        self.log.samples = self.cut[n][1]
        self.graphs.say(self.log, said)
        return loss, gradients

    def end(self) -> None:
        """End those that have not come to their end."""
        for call in self.calls.values():
            call.end()

    def leave_to_themselves(self) -> None:
        """Have all slices run their `training_step`s, and not graphs."""
        for n in [*self._captured]:
            self._leave_to_itself(n)
        self.graphs = None

    def _leave_to_itself(self, n: int) -> None:
        """Have a slice run its `training_step`, and not graphs."""
        self.calls[n] = self._suspended(n)
        del self._captured[n]
        self._heads.pop(n, None)

    def _suspended(self, n: int) -> Suspended:
        run = self._followed if self.found.step is not None else Given.run
        return Suspended(partial(run, self._given(self.cut[n][0])), self.outside)

    def _run(self, n: int, answer: Any = None) -> bool:
        self._running, self.log.samples = n, self.cut[n][1]
        return self.calls[n].go_on(answer)

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        """Stand in for the forward of the model."""
        if not torch.is_grad_enabled():
            self._look()
            return self._original(*inputs, **named)
        return self._ask(*inputs, **named)

    def _ask(self, *inputs: Any, **named: Any) -> Any:
        """Ask for F of the slice that runs."""
        n = self._running
        step_checks.check_call(self.found, inputs, named, again=n in self._entered)
        if n and self.found.step is not None and self.found.step.operator:  # of pybind, whose frames end in order
            raise ValueError(_OPERATOR)
        self._entered.add(n)
        return self.calls[n].ask(self.found.given(inputs, named))

    def _followed(self, given: Given) -> Any:
        """Run a `training_step` whose own calls are followed."""
        with self.found.heard(given, self._ask, self._look):
            return given.run()
