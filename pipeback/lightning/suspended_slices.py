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

from pipeback.lightning import micro_batches, step_checks
from pipeback.lightning.call_override import call_instead
from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.followed_step import Given
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

    settings: gives a number to the values that the forward of the model reads.
    """

    def __init__(
        self,
        found: TrainedModule,
        cut: list[Slice],
        given: Callable[[Any], Given],
        log: micro_batches.Log,
        settings: Callable[[], int],
    ) -> None:
        modes = TorchModes.now()
        self.found, self.cut, self.log = found, cut, log
        run = self._followed if found.step is not None else Given.run
        self.calls = [Suspended(partial(run, given(batch)), modes) for batch, _ in cut]
        self._entered: set[int] = set()  # those that have called the model
        self._running = 0
        self._settings = settings
        self._ahead = self._looked = False
        self._original = found.module.forward

    @property
    def modes(self) -> TorchModes:
        """The modes of torch under which the first has called the model."""
        return self.calls[0].modes

    @property
    def asked(self) -> list[Any]:
        """The inputs of the model, of those that wait."""
        return [call.question for call in self.calls if call.asks]

    @contextmanager
    def heard(self) -> Iterator[None]:
        """A context in which they may run."""
        if self.found.step is not None:  # each hears its own calls
            yield
            return
        self._original = self.found.module.forward  # another one once the stages have the weights
        with call_instead(self.found.module, self._forward):
            yield

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
        for n in range(len(self.cut)):
            self.begin(n)
            if self._settings() != settings:
                raise ValueError(_SETS.format(name=self.found.shown))

    def begin(self, n: int) -> None:
        """Run a slice up to its call of the model. Raises ValueError if it comes to its end without one."""
        if n not in self._entered and not self._run(n):
            step_checks.check_output(self.found, self.calls[n].result, None)

    def finish(self, n: int, output: Any) -> Any:
        """Let a slice go on with the output of the model; return what its `training_step` returns."""
        self._run(n, output)
        return self.calls[n].result

    def end(self) -> None:
        """End those that have not come to their end."""
        for call in self.calls:
            call.end()

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
