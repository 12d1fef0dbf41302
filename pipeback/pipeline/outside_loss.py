"""Outside loss: the calls of a pipeline whose loss is computed between its forward and its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeback.distributed.rank_runner import RankRunner
from pipeback.pipeline.build import telling
from pipeback.pipeline.engine import Engine, Then
from pipeback.pipeline.given_gradients import OWN, form_of, nothing, taken, taken_at_once
from pipeback.pipeline.grad_modes import recording
from pipeback.pipeline.parameter_groups import check_groups
from pipeback.pipeline.slices import joined
from pipeback.pipeline.unused_outputs import UnusedOutputs
from pipeback.runtime.gone_ahead import Ahead
from pipeback.runtime.loop import Batch
from pipeback.runtime.outside_ticks import OutsideTicks
from pipeback.runtime.renewed_options import renew
from pipeback.runtime.runners import Answer, Judge, PushLoop, Runner, Threads, Ticks
from pipeback.stages.averaging import clipped
from pipeback.stages.flight import Value, cut
from pipeback.stages.joint_optimizer import Options


class OutsideLoss:
    """The calls of a pipeline that was built with loss=None."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.ahead = engine, Ahead(engine.method)
        self._unused = UnusedOutputs()
        self._newest: Any = None  # the output of the newest micro-batch, where stages run in ticks
        self._forms: list[Any] = []  # those of the outputs whose gradients are waited for
        self._one_push = False  # whether the next micro-batches are those of one push
        self._checked: PushLoop | None = None  # what was checked and started for the first of these
        self._first: int | None = None  # the number of the first micro-batch since the last step
        self._averaged: Runner | None = None  # whose gradients have been divided, for the next step

    def runs_ticks(self, xs: Sequence[Value], expected: int) -> bool:
        """As `Pipeline.runs_ticks`."""
        with self._engine.lock, torch.enable_grad():
            self._one_by_one()
            return _ticks(self._ready(xs, expected)[0]) is not None

    @property
    def runs_ahead(self) -> bool:
        """As `Pipeline.runs_ahead`."""
        runtime = self._engine.runtime
        return runtime is not None and _ticks(runtime) is not None and any(self._engine.method.delays(2))

    @contextmanager
    def one_push(self) -> Iterator[None]:
        """As `Pipeline.one_push`."""
        engine = self._engine
        if not isinstance(engine.runtime, PushLoop):  # others work while the caller does
            yield
            return
        engine.holding.hide()
        engine.holding.show_between(False)
        self._one_push = True
        try:
            yield
        finally:
            self._one_push = False
            self.check_anew()
            engine.holding.show_between(True)

    def check_anew(self) -> None:
        """Look for changes before the next forward, within `one_push`, too."""
        if self._checked is not None and self._checked is self._engine.runtime:
            self._checked.loop.watch(True)
        self._checked = None

    def average(self) -> bool:
        """As `Pipeline.average`."""
        engine = self._engine
        with engine.lock, torch.no_grad():
            engine.open()
            stages, runtime = engine.holding.mine, engine.runtime
            if not isinstance(runtime, (PushLoop, Threads)) or _ticks(runtime) is not None:
                return False
            if not engine.method.flush_each_push or engine.holding.store is not None:
                return False
            if any(stage.flights or stage.gradients.split.waiting or stage.masters.weights for stage in stages):
                return False
            for stage in stages:
                stage.gradients.average()
            self._averaged = runtime
            return True

    def clip_averaged(self, norm: float | None, value: float | None) -> bool:
        """As `Pipeline.clip_averaged`."""
        engine = self._engine
        with engine.lock, torch.no_grad():
            engine.open()
            if self._averaged is None or self._averaged is not engine.runtime:
                return False
            for stage in engine.holding.mine:
                stage.gradients.clip(partial(clipped, norm=norm, value=value))
            return True

    def renew_options(self) -> None:
        """As `Pipeline.renew_options`."""
        engine = self._engine
        with engine.lock:
            engine.open()
            runtime = engine.runtime
            if self._first is None or not isinstance(runtime, (PushLoop, Threads)) or _ticks(runtime) is not None:
                return
            if not engine.current.current(engine.optimizers):
                check_groups(engine.stages, engine.method, engine.current)
                engine.current = Options(engine.optimizers, self._first)
                engine.do(partial(runtime.tell, partial(renew, self._first, engine.current)))

    def forward_many(self, xs: Sequence[Value], expected: int, judge: Answer | Judge | None = None) -> list[Value]:
        """As `Pipeline.forward_many`."""
        engine = self._engine
        with engine.lock, torch.enable_grad():
            self._one_by_one()
            if judge is not None and xs:
                return self._judged(xs, expected, judge)
            if not xs or not self.together(len(xs), expected):
                raise ValueError(
                    f"{len(xs)} micro-batches do not lie in one flush of {engine.method!r}; call forward and backward "
                    "for one after the other"
                )
            runtime, xs = self._ready(xs, expected)
            if (ticks := _ticks(runtime)) is not None:
                return [self._in_ticks(ticks, xs, expected, _nobody)]
            assert isinstance(runtime, (PushLoop, Threads, RankRunner))
            self.ahead.expect(expected)
            self._first = engine.arrived if self._first is None else self._first
            engine.modes.pushed()
            outputs: list[Value] = engine.do(partial(runtime.forward, engine.arrived, xs, engine.current, expected))
            self._did(runtime)
            if self._one_push and self._checked is None and isinstance(runtime, PushLoop):
                runtime.loop.watch(False)
                self._checked = runtime
            self._forms = [form_of(output) for output in outputs]
            self._forward(len(xs), "drain")
            engine.holding.hide()  # from who clears them before the backward
            return [self._shown(output, x) for output, x in zip(outputs, xs, strict=True)]

    def _judged(self, xs: Sequence[Value], expected: int, judge: Answer | Judge) -> list[Value]:
        """Have a loss computed for the output of all but the last, whose output is returned."""
        runtime, inputs = self._ready(xs, expected)
        if (ticks := _ticks(runtime)) is not None:
            return [self._in_ticks(ticks, inputs, expected, judge)]
        answer = judge.answer if isinstance(judge, Judge) else judge
        elsewhere = isinstance(runtime, RankRunner) and not runtime.last  # the loss is another rank's
        with self.one_push():
            for n, x in enumerate(xs[:-1]):
                (output,) = self.forward_many([x], expected)
                self.backward([None if elsewhere else answer(n, output)], forget=not self._engine.ranks.several)
        return self.forward_many(xs[-1:], expected)

    def _in_ticks(self, ticks: Ticks, xs: Sequence[Value], expected: int, judge: Answer | Judge) -> Value:
        engine = self._engine
        known, asked = judge if isinstance(judge, Judge) else (_unknown, judge)
        self.ahead.expect(expected)
        first = engine.arrived
        engine.progress.came(len(xs))
        engine.came(len(xs))

        left = engine.casting.around(engine.entrance.leave)

        def judged(n: int, output: Any) -> Value:
            gradient = known(n, left(output, xs[n]))
            if gradient is None:
                return by_autograd(n, output)
            return self._unused.filled(gradient, output, engine.holding.stages)

        @engine.casting.around
        def by_autograd(n: int, output: Any) -> Value:
            with telling(engine.ranks):
                gradient = taken_at_once(asked(n, self._shown(output, xs[n])), output)
                if nothing(gradient):
                    raise ValueError(
                        f"micro-batch {first + n}: the loss depends on no output, but where stages run as one, others "
                        "follow it already, and it cannot be dropped; build the pipeline with vectorize=False"
                    )
                return self._unused.filled(gradient, output, engine.holding.stages)

        engine.amid = _NOT_NOW  # for who computes the losses
        output = self._newest = engine.do(partial(ticks.forward, xs, engine.current, expected, judged))
        self.ahead.backward(len(xs) - 1)
        self._forms = [form_of(output)]
        self._forward(1, *_NOT_NOW)
        engine.holding.hide()
        return self._shown(output, xs[-1])

    def _shown(self, output: Any, x: Value) -> Value:
        """What the user gets for the output of the last stage."""
        if output is not None:  # it is with the rank of the last stage alone
            output = cut(output)  # a graph hands on what it has got, maybe with the graph of the stage before
        for part in output if isinstance(output, tuple) else (output,):
            if isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex()):
                part.requires_grad_()
        return self._engine.entrance.leave(output, x)

    def together(self, count: int, expected: int) -> bool:
        """As `Pipeline.together`."""
        return self.ahead.together(count, self._engine.arrived, expected)

    def backward(self, gradients: Sequence[Value], forget: bool = False, needed: bool = False) -> None:
        """As `Pipeline.backward_many`. forget: a gradient of None drops its micro-batch. needed: one is refused."""
        engine = self._engine
        with engine.lock, recording():
            runtime = self._went_ahead("backward")
            if len(gradients) != self.ahead.count:
                raise ValueError(
                    f"backward was given {len(gradients)} gradients, forward {self.ahead.count} inputs; give as many"
                )
            gradients = [taken(g, form) for g, form in zip(gradients, self._forms, strict=True)]
            ticks = _ticks(runtime)
            if ticks is not None and ticks.judges and nothing(gradients[0]):
                raise RuntimeError(_LATE)
            if needed and any(nothing(g) and form is not None for g, form in zip(gradients, self._forms, strict=True)):
                raise ValueError(_NONE)
            if ticks is not None:
                self.ahead.backward(self._take())
                newest, self._newest = self._newest, None
                gradients = [self._unused.filled(g, newest, engine.holding.stages) for g in gradients]
                engine.do(partial(ticks.backward, gradients))
                return
            ahead, fallen = self._take(), [n for n, g in enumerate(gradients) if forget and nothing(g)]
            if fallen:
                assert not isinstance(runtime, (RankRunner, OutsideTicks))
                engine.do(partial(runtime.forget, fallen, ahead))
                gradients = [g for g in gradients if not nothing(g)]
            if gradients:
                self.ahead.backward(len(gradients))
                engine.progress.came(len(gradients))
                engine.came(len(gradients))
                engine.do(partial(runtime.backward, gradients))
                self._did(runtime)

    def forget(self) -> None:
        """As `Pipeline.forget`."""
        with self._engine.lock, recording():
            runtime = self._went_ahead("forget")
            if isinstance(runtime, RankRunner):
                raise RuntimeError("forget: the other ranks are ahead already; give backward a gradient of zeros")
            if _ticks(runtime) is not None:
                raise RuntimeError(_LATE)
            assert not isinstance(runtime, OutsideTicks)
            ahead = self._take()
            self._engine.do(partial(runtime.forget, range(ahead), ahead))

    def step(self, then: Then) -> None:
        """As `Pipeline.step`. then: called if something was pushed."""
        engine = self._engine
        with engine.lock, recording():
            engine.open()
            self._averaged = self._first = None
            if isinstance(engine.runtime, (PushLoop, OutsideTicks, Threads, RankRunner)):
                engine.modes.pushed()
                steps = _ticks(engine.runtime) or engine.runtime
                if isinstance(steps, (PushLoop, Threads)):
                    engine.holding.take_over()
                engine.do(partial(steps.step, engine.method.flush_each_push))
                self._did(engine.runtime)
                engine.holding.hide()
                if engine.method.flush_each_push:
                    self.ahead.restart()
                then()

    def _forward(self, count: int, *amid: str) -> None:
        """So many have gone forward. amid: calls that cannot be done before they go backward."""
        self.ahead.forward(count)
        self._engine.amid = amid

    def _take(self) -> int:
        """The number that were ahead; now none is."""
        self._engine.amid = ()
        return self.ahead.take()

    def _did(self, runtime: Runner) -> None:
        if not isinstance(runtime, RankRunner) and _ticks(runtime) is None:  # ranks work on, and ticks go on
            self._engine.modes.done()

    def _ready(self, xs: Sequence[Value], expected: int) -> tuple[Runner, list[Value]]:
        """Check and start everything before these micro-batches go forward; return the runtime, and what the stages
        get.
        """
        engine = self._engine
        with telling(engine.ranks):
            batches: Sequence[Batch]
            if engine.entrance.joins and (whole := joined(xs)) is not None:
                batches = engine.batches(whole, None, len(xs[0]))
            else:
                batches = [batch for x in xs for batch in engine.batches(x, None)]
            if self._checked is not None and self._checked is engine.runtime:
                engine.open()
                engine.rehearse(batches)
            else:
                engine.ready(batches, expected)
            assert engine.runtime is not None
            return engine.runtime, [x for x, _, _ in batches]

    def _one_by_one(self) -> None:
        self._engine.open()
        if not self._engine.outside:
            raise RuntimeError("forward is for a pipeline built with loss=None; this one has a loss: call push")
        if self.ahead.count:
            raise RuntimeError("forward was called twice; call backward or forget between")
        if self._averaged is not None and self._averaged is self._engine.runtime:
            raise RuntimeError("average has divided the gradients of an update; call step before the next forward")

    def _went_ahead(self, what: str) -> PushLoop | OutsideTicks | Threads | RankRunner:
        self._engine.open()
        if not self.ahead.count:
            raise RuntimeError(f"{what} comes after forward, but no micro-batch has gone forward")
        assert isinstance(self._engine.runtime, (PushLoop, OutsideTicks, Threads, RankRunner))
        return self._engine.runtime


_NOT_NOW = "drain", "wait"  # what cannot be done while a micro-batch is between F and B
_LATE = (
    "forget, or a gradient of None: stages that run as one have gone on with other micro-batches; give backward a "
    "gradient of zeros, or build the pipeline with vectorize=False"
)
_NONE = (
    f"backward was given no gradient, with which nothing would be trained; {OWN}output.grad; or drop the micro-batch: "
    "call forget (over processes, give zeros)"
)


def _ticks(runtime: Runner) -> Ticks | None:
    """What runs micro-batches in ticks; None: they go through the stages by themselves."""
    if isinstance(runtime, OutsideTicks):
        return runtime
    return runtime.ticks if isinstance(runtime, RankRunner | Threads) else None


def _unknown(n: int, output: Any) -> Value:
    """What answers where all gradients are asked for."""
    return None


def _nobody(n: int, output: Any) -> Value:
    raise AssertionError("nobody asks for the loss of the newest micro-batch")
