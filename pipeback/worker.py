"""Worker: some stages, run wave by wave. Where the hooks of a method meet the stages.

The operations of a wave touch different stages, so they may be joined: one autograd call, one foreach call, one
optimizer step. Joining changes no bit; it only pays Python's price once instead of once a stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.joint import Joint, Options, joinable
from pipeback.ledger import Ledger
from pipeback.link import Link
from pipeback.method import Bundle, Method, Past, Shift, State, Weights, When, add_scaled, overrides
from pipeback.order import Wave
from pipeback.stage import Flight, Stage, differentiate

Ops = Sequence[tuple[int, int]]  # (stage, micro-batch)


class StageError(RuntimeError):
    """An operation failed; the message names stage and micro-batch, the cause is chained."""


class Worker:
    """The stages `stages` (all of a pipeline, or one worker's) under `method`, exchanging tensors through `link`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        method: Method,
        delays: Sequence[int],
        link: Link,
        *,
        clip_norm: float | None = None,
        samples: bool = False,
        check_finite: bool = False,
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.count = stages[0].stages
        self.method, self.delays, self.link = method, delays, link
        self.clip_norm, self.samples, self.check_finite = clip_norm, samples, check_finite
        self.options: dict[int, Options] = {}  # by micro-batch, until the last own stage has gone forward
        self.entries: dict[int, int] = {}  # the version of stage 0 at which a micro-batch entered
        self.entered = 0  # updates of stage 0, seen in the order
        self.start = self.base = 0
        self.report: Callable[[int, Tensor], None] = lambda mb, loss: None  # called by the last stage
        self.sizes: dict[int, int] = {}  # samples of a micro-batch, where they weigh
        self.ledger = Ledger()
        self.trace: list[tuple[float, float, int, str, int]] | None = None  # (start, end, stage, kind, micro-batch), s
        self.stash = method.copies == "stash"
        self._forward_hook = overrides(method, "forward_weights")
        self._backward_hook = overrides(method, "backward_weights") or method.copies == "stash"
        self._update_hook = overrides(method, "update")
        self._joints: dict[tuple[int, ...], Joint | None] = {}
        self._spreads: dict[tuple[int, ...], tuple[list[Options], tuple[float, ...], tuple[int, ...]]] = {}
        self._lists: dict[tuple[Any, ...], Weights] = {}
        self._states: dict[tuple[int, ...], tuple[list[State], State]] = {}
        self._last = max(self.stages)

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self, waves: Iterable[Wave]) -> None:
        """Do the own part of every wave, in order."""
        mine, alone = self.stages, len(self.stages) == self.count
        entry = self.method.needs_entry
        for kind, ops in waves:
            if entry:
                self._follow(kind, ops)
            if not alone:
                ops = [op for op in ops if op[0] in mine]
                if not ops:
                    continue
            do = self.forward if kind == "F" else self.backward if kind == "B" else self.update
            if self.trace is None:
                do(ops)
            else:
                for s, i in ops:
                    if kind == "F" or (kind == "B" and not mine[s].last):
                        self.link.wait(kind, s, i)  # waiting is not working
                    begin = time.perf_counter()
                    do([(s, i)])
                    self.trace.append((begin, time.perf_counter(), s, kind, i))

    def _follow(self, kind: str, ops: Ops) -> None:
        for s, i in ops:
            if s == 0 and kind == "U":
                self.entered += 1
            elif s == 0 and kind == "F":
                self.entries[i] = self.entered

    def forward(self, ops: Ops) -> None:
        """F of each (stage, micro-batch), in the order given."""
        link, stages = self.link, self.stages
        held: list[_Held] = []
        if self._forward_hook:
            with torch.no_grad():
                held = self._hold_forward(ops)
            _forget_casts()
        try:
            for s, i in ops:
                stage = stages[s]
                x = link.recv("F", s, i)
                target = link.recv("Y", s, i) if stage.last else None
                try:
                    y = stage.forward(i, x, target)
                except Exception as error:
                    raise StageError(f"{_name(stage)}, micro-batch {i}: the forward failed: {error}") from error
                stage.flights[i].options = self.options[i]
                if stage.last:
                    if self.check_finite and not torch.isfinite(y):
                        raise StageError(self._first_bad(i, y))
                    self.report(i, y)
                else:
                    link.send("F", s + 1, i, y)
                if s == self._last:
                    del self.options[i]
        finally:
            if held:
                with torch.no_grad():
                    self._release_forward(held, ops)
                _forget_casts()
        numbers, mbs = zip(*ops, strict=True)
        self.ledger.add("F", numbers, mbs, [stages[s].flights[i].version for s, i in ops])
        if self.method.needs_entry:
            for s, i in ops:
                stages[s].flights[i].entry = self.entries.pop(i) if s == self._last else self.entries[i]
        if self.stash:
            for s in numbers:
                stages[s].peak_copies = max(stages[s].peak_copies, stages[s].copies())

    def backward(self, ops: Ops) -> None:
        """B of each (stage, micro-batch), as one autograd call."""
        link, stages = self.link, self.stages
        versions: dict[int, int] = {}
        held: list[_Held] = []
        if self._backward_hook:
            with torch.no_grad():
                held, versions = self._hold_backward(ops)
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        flights = []
        for s, i in ops:
            stage = stages[s]
            grad = None if stage.last else link.recv("B", s, i)
            if self.samples and stage.last:
                grad = torch.full_like(stage.flights[i].output, self.sizes[i])
            flights.append(stage.begin_backward(i, grad, roots, seeds))
        try:
            differentiate(roots, seeds)
        except Exception as error:
            raise StageError(self._culprit(ops, flights, error)) from error
        finally:
            if held:
                with torch.no_grad():
                    for h in held:
                        h.undo()
        numbers, mbs = zip(*ops, strict=True)
        self.ledger.add("B", numbers, mbs, [versions.get(s, stages[s].version) for s in numbers])
        for (s, i), flight in zip(ops, flights, strict=True):
            stage = stages[s]
            upstream = stage.end_backward(flight)
            if self.samples:
                stage.count += self.sizes[i] - 1  # a micro-batch was counted as one
            if s:
                link.send("B", s - 1, i, upstream)
        if self.stash:
            for s in numbers:
                stages[s].release()

    def update(self, ops: Ops) -> None:
        """U of each (stage, micro-batch): joined into one step where method and optimizers allow it."""
        stages = [self.stages[s] for s, _ in ops]
        with torch.no_grad():
            for stage in stages:
                stage.average(self.clip_norm)
                if stage.stash:
                    stage.keep()
        joint = self._joint(stages)
        parts = [list(range(len(ops)))] if joint else [[n] for n in range(len(ops))]
        for part in parts:
            some = [stages[n] for n in part]
            self._step(some, [ops[n][1] for n in part], joint or self._joint(some))
        _forget_casts()
        for stage in stages:
            stage.version += 1
            for w in stage.weights:
                w.grad = None

    def _step(self, stages: Sequence[Stage], mbs: Sequence[int], joint: Joint | None) -> None:
        stages = [stage for stage in stages if stage.weights]
        if not stages:
            return
        assert joint is not None
        optimizer = joint.at([stage.options for stage in stages])
        try:
            if not self._update_hook:
                optimizer.step()
                return
            when = self._when(stages, mbs, [stage.options for stage in stages])
            with torch.no_grad():
                before = self._gather(stages)
                after = self.method.update(self._weights(stages), optimizer, before, when)
            if after is not before:
                _scatter(stages, after)
        except Exception as error:
            raise StageError(f"{_name(stages[0])}, micro-batch {mbs[0]}: the update failed: {error}") from error

    def _joint(self, stages: Sequence[Stage]) -> Joint | None:
        """The twin optimizer of these stages; None where several cannot be joined."""
        key = tuple(stage.index for stage in stages)
        if key not in self._joints:
            some = [stage for stage in stages if stage.weights]
            ok = len(stages) == 1 or (
                (self.method.merges or not self._update_hook) and joinable([stage.optimizer for stage in stages])
            )
            self._joints[key] = Joint(some) if ok and some else None
        return self._joints[key]

    # -- which weights F and B run on ----------------------------------------------------------------------------
    #
    # The graphs refer to the storage of the live weights, so other weights are put there for the time of the
    # operation. `_Held` remembers where the current ones are meanwhile.

    def _hold_forward(self, ops: Ops) -> list[_Held]:
        held: list[_Held] = []
        for stages, mbs in self._parts(ops):
            weights = self._weights(stages)
            when = self._when(stages, mbs, [self.options[i] for i in mbs])
            chosen = self.method.forward_weights(weights, self._gather(stages), when)
            if chosen is weights:
                continue
            if isinstance(chosen, Past):
                stage = stages[0]
                if chosen.version != stage.version:
                    held.append(_exchange(stages, stage.weights, stage.past(chosen.version), version=chosen.version))
            else:
                held.append(self._place(stages, weights, chosen))
        return held

    def _release_forward(self, held: Sequence[_Held], ops: Ops) -> None:
        flights = {s: self.stages[s].flights.get(i) for s, i in ops}
        for h in held:
            h.undo()
            for stage in h.stages:
                flight = flights[stage.index]
                if flight is None:  # its forward failed
                    continue
                if h.version is not None:
                    flight.version = h.version
                elif stage.stash:
                    flight.owned = h.buffer

    def _hold_backward(self, ops: Ops) -> tuple[list[_Held], dict[int, int]]:
        held: list[_Held] = []
        versions: dict[int, int] = {}  # where B runs on another version than the newest
        for stages, mbs in self._parts(ops):
            weights, stage = self._weights(stages), stages[0]
            flights = [stage.flights[i] for stage, i in zip(stages, mbs, strict=True)]
            used = None
            if stage.stash:  # one stage a part
                used = flights[0].owned or stage.past(flights[0].version)
            when = self._when(stages, mbs, [flight.options for flight in flights], flights[0].entry)
            chosen = self.method.backward_weights(weights, used, self._gather(stages), when)
            if chosen is used:
                versions[stage.index] = flights[0].version
                if used is not weights and used is not stage.weights:
                    held.append(_exchange(stages, weights, used))
            elif isinstance(chosen, Past):
                versions[stage.index] = chosen.version
                if chosen.version != stage.version:
                    held.append(_exchange(stages, weights, stage.past(chosen.version)))
            elif chosen is not weights:
                held.append(self._place(stages, weights, chosen))
        return held, versions

    def _parts(self, ops: Ops) -> list[tuple[list[Stage], list[int]]]:
        """The stages that one call of a hook serves: all of the wave, or one by one."""
        some = [(self.stages[s], i) for s, i in ops if self.stages[s].weights]
        if self.method.merges and self.method.copies != "stash":
            return [([stage for stage, _ in some], [i for _, i in some])] if some else []
        return [([stage], [i]) for stage, i in some]

    def _place(self, stages: list[Stage], weights: Weights, chosen: Weights | Shift) -> _Held:
        """Put shifted weights into the live storage."""
        if stages[0].stash:
            buffer = [w.detach().clone() for w in weights]
        else:
            buffer = self._scratch(stages)
            torch._foreach_copy_(buffer, weights)
        if isinstance(chosen, Shift):
            add_scaled(weights, chosen.coefficients, chosen.directions)
        else:
            torch._foreach_copy_(weights, chosen)
        return _Held(stages, weights, buffer, swap=stages[0].stash)

    def _weights(self, stages: Sequence[Stage]) -> Weights:
        return self._joined("weights", stages)

    def _scratch(self, stages: Sequence[Stage]) -> Weights:
        if stages[0].scratch is None:
            raise RuntimeError(f'{self.method!r} shifts weights, but its copies are "live"; declare copies = "scratch"')
        return self._joined("scratch", stages)

    def _joined(self, name: str, stages: Sequence[Stage]) -> Weights:
        key = (name, *(stage.index for stage in stages))
        if key not in self._lists:
            self._lists[key] = Bundle(w for stage in stages for w in getattr(stage, name))
        return self._lists[key]

    def _gather(self, stages: Sequence[Stage]) -> State:
        """The method's state over several stages: lists one after the other, numbers of the first."""
        if len(stages) == 1:
            return stages[0].state
        key = tuple([stage.index for stage in stages])
        states = [stage.state for stage in stages]
        cached = self._states.get(key)
        if cached is None or any(a is not b for a, b in zip(cached[0], states, strict=True)):
            merged = {
                name: [x for state in states for x in state[name]] if isinstance(value, list) else value
                for name, value in states[0].items()
            }
            cached = self._states[key] = (states, merged)
        return cached[1]

    def _when(self, stages: Sequence[Stage], mbs: Sequence[int], options: Sequence[Options], entry: int = 0) -> When:
        first, i = stages[0], mbs[0]
        key = tuple(stage.index for stage in stages)
        cached = self._spreads.get(key)
        if cached is None or any(a is not b for a, b in zip(cached[0], options, strict=True)):
            rates = tuple(r for stage, o in zip(stages, options, strict=True) for r in o.rates[stage.index])
            delays = tuple(self.delays[stage.index] for stage in stages for _ in stage.weights)
            cached = self._spreads[key] = (list(options), rates, delays)
        return When(
            first.index, self.count, i, first.version, self.delays[first.index],
            cached[1], cached[2], self.start, self.base, self.entries.get(i, entry),
        )  # fmt: skip

    # -- naming what failed --------------------------------------------------------------------------------------

    def _culprit(self, ops: Ops, flights: Sequence[Flight], error: Exception) -> str:
        """Which backward of a joined call failed.

        Autograd goes from the newest graph to the oldest, and a graph that is done has given its input a gradient: it
        was the newest of those that are not done.
        """
        undone = [op for op, f in zip(ops, flights, strict=True) if all(x.grad is None for x in f.leaves)]
        s, i = max(undone or ops[:1], key=lambda op: (op[1], op[0]))
        return f"{_name(self.stages[s])}, micro-batch {i}: the backward failed: {error}"

    def _first_bad(self, i: int, loss: Tensor) -> str:
        for s in sorted(self.stages):
            flight = self.stages[s].flights.get(i)
            if flight is None or s == self._last:
                continue
            parts = flight.output if isinstance(flight.output, tuple) else (flight.output,)
            if not all(bool(torch.isfinite(part).all()) for part in parts):
                where = _name(self.stages[s])
                return f"{where}, micro-batch {i}: the output is not finite (the loss is {loss.item()}); {_CURE}"
        return f"{_name(self.stages[self._last])}, micro-batch {i}: the loss is {loss.item()}; {_CURE}"


_CURE = "lower the rate, set clip_norm=, or train on with check_finite=False"


class _Held:
    """The live weights hold something else; `buffer` holds the current ones, or swaps with them."""

    __slots__ = ("buffer", "stages", "swap", "version", "weights")

    def __init__(
        self, stages: list[Stage], weights: Weights, buffer: Weights, *, swap: bool, version: int | None = None
    ) -> None:
        self.stages, self.weights, self.buffer, self.swap, self.version = stages, weights, buffer, swap, version

    def undo(self) -> None:
        if self.swap:
            _swap(self.weights, self.buffer)
        else:
            torch._foreach_copy_(self.weights, self.buffer)


def _exchange(stages: list[Stage], weights: Weights, buffer: Weights, version: int | None = None) -> _Held:
    _swap(weights, buffer)
    return _Held(stages, weights, buffer, swap=True, version=version)


def _swap(a: Weights, b: Weights) -> None:
    """Exchange contents, never storage: graphs in flight refer to it."""
    kept = [w.detach().clone() for w in a]
    torch._foreach_copy_(a, b)
    torch._foreach_copy_(b, kept)


def _forget_casts() -> None:
    """Under autocast, torch keeps copies of weights by identity; ours change in place."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        torch.clear_autocast_cache()


def _name(stage: Stage) -> str:
    return f"stage {stage.index} ({stage.name})"


def _scatter(stages: Sequence[Stage], state: State) -> None:
    if len(stages) == 1:
        stages[0].state = state
        return
    at = 0
    for stage in stages:
        n = len(stage.weights)
        stage.state = {k: v[at : at + n] if isinstance(v, list) else v for k, v in state.items()}
        at += n
