"""Team: the stages that one call of a method's hook, or one step of an optimizer, serves.

A team is one stage, or several whose weights, states and numbers are concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.base import State, When
from pipeback.stages.gradients import dense
from pipeback.stages.joint_optimizer import JointOptimizer, Options, rates_of, separable
from pipeback.stages.stage import Stage
from pipeback.tensors.weight_list import GRADIENTS, Weights, chosen, joined

_LAYOUT, _FROZEN = attrgetter("layout"), attrgetter("learnt.frozen")


class StageGroup:
    """Stages with weights, in order; remembers what does not change from call to call."""

    def __init__(self, stages: Sequence[Stage], delays: Sequence[int]) -> None:
        self.stages = list(stages)
        self.first = self.stages[0]
        alone = len(self.stages) == 1
        self.weights = self.first.weights if alone else joined(s.weights for s in self.stages)
        self.optimizer = JointOptimizer(self.stages, self.weights)
        self._delay = delays[self.first.index]
        self._delays = tuple(delays[s.index] for s in self.stages for _ in s.weights)
        self._options: list[Options] = []
        self._rates: tuple[float, ...] = ()
        self._states: list[State] = []
        self._state: State = {}
        self._lists: dict[str, tuple[list[Weights], Weights]] = {}  # in it: those of the stages, and all as one
        self._scratch: Weights | None = None
        self._lays = separable(self.first.optimizer)  # others may keep gradients, which must stay as they are
        self._stays = False  # whether the gradients that the optimizer sees lie beside the weights

    def put(self, grads: Sequence[Tensor | None], whole: bool) -> None:
        """Set the gradients that the optimizer sees. If the weights lie in a strip of memory, the gradients are copied
        into the strip beside them, where those of the next update will lie.

        whole: whether the method computes with velocities, which need dense gradients.
        """
        there = not any(map(is_, grads, repeat(None)))
        strided = there and {*map(_LAYOUT, grads)} == {torch.strided}
        if not strided and whole and isinstance(self.first.optimizer, torch.optim.SGD):
            grads, strided = [None if g is None else dense(g) for g in grads], there
        beside = self.weights.room(GRADIENTS) if self._lays and self.weights.strip is not None else []
        self._stays = strided and len(beside) > 0
        if self._stays:
            torch._foreach_copy_(beside, grads)  # type: ignore[arg-type]
            grads = beside
        if not all(map(is_, [w.grad for w in self.weights], grads)):
            for w, g in zip(self.weights, grads, strict=True):
                w.grad = g

    def take_back(self) -> None:
        """Release the gradients, but not those that lie in the strip beside the weights."""
        if not self._stays:
            for w in self.weights:
                w.grad = None

    def handed(self) -> Weights:
        """The weights that the coming update is handed, of all stages."""
        each = [stage.versions.handed(stage.version, stage.weights) for stage in self.stages]
        return each[0] if len(each) == 1 else [w for some in each for w in some]

    @property
    def frozen(self) -> list[int]:
        """The numbers of its weights that the user has frozen."""
        if not any(map(_FROZEN, self.stages)):
            return []
        found, at = [], 0
        for s in self.stages:
            found += [at + n for n in s.learnt.frozen]
            at += len(s.weights)
        return found

    @property
    def scratch(self) -> Weights:
        """The buffers for shifted weights of a method whose copies are "scratch"."""
        if self._scratch is None:
            self._scratch = joined(s.versions.scratch or () for s in self.stages)
        return self._scratch

    @property
    def state(self) -> State:
        """The method's state over the team: the stages' lists, concatenated, and for each of their numbers a tuple with
        one per weight.
        """
        states = [s.state for s in self.stages]
        if len(states) == 1:
            return states[0]
        if len(self._states) != len(states) or not all(map(is_, self._states, states)):
            self._states = states
            self._state = {
                name: (self._joined if isinstance(value, list) else self._each)(states, name)
                for name, value in states[0].items()
            }
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        if len(self.stages) == 1:
            self.first.put_state(state)
            return
        at, before = 0, self._state
        stays = [k for k, v in state.items() if isinstance(v, list) and v is before.get(k)]
        changed = [(k, v, isinstance(v, list), isinstance(v, tuple)) for k, v in state.items() if k not in stays]
        for s in self.stages:
            n, fresh = len(s.weights), dict.fromkeys(state)
            for k in stays:
                fresh[k] = s.state[k]
            for k, v, several, each in changed:
                fresh[k] = chosen(v, range(at, at + n)) if several else v[at] if each else v
            s.put_state(fresh)
            at += n
        self._states, self._state = [s.state for s in self.stages], state
        for k, v in state.items():
            if isinstance(v, list):
                self._lists[k] = [s.state[k] for s in self.stages], v

    def _joined(self, states: Sequence[State], name: str) -> Weights:
        """A list of every stage, concatenated; the same one as before if the stages have the same lists."""
        some, known = [state[name] for state in states], self._lists.get(name)
        if known is None or not all(map(is_, known[0], some)):
            known = self._lists[name] = some, joined(some)
        return known[1]

    def _each(self, states: Sequence[State], name: str) -> tuple[Any, ...]:
        """A number of every stage, once per weight."""
        return tuple([state[name] for s, state in zip(self.stages, states, strict=True) for _ in s.weights])

    def when(self, mb: int, options: Sequence[Options], start: int, base: int, entry: int) -> When:
        """`When` for the first stage at micro-batch `mb`, with the rate and the delay of every weight."""
        if len(options) != len(self._options) or not all(map(is_, self._options, options)):
            self._options = list(options)
            self._rates = tuple(r for s, o in zip(self.stages, options, strict=True) for r in rates_of(s, o))
        first = self.first
        return When(
            first.index, first.stages, mb, first.version, self._delay, self._rates, self._delays, start, base, entry
        )
