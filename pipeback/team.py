"""Team: the stages that one call of a method's hook, or one step of an optimizer, serves.

One stage, or several whose weights, states and numbers stand one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeback.bundle import Bundle, Weights
from pipeback.joint import Joint, Options, rates_of
from pipeback.method import State, When
from pipeback.stage import Stage


class Team:
    """Stages with weights, in order; remembers what does not change from call to call."""

    def __init__(self, stages: Sequence[Stage], delays: Sequence[int]) -> None:
        self.stages = list(stages)
        self.first = self.stages[0]
        alone = len(self.stages) == 1
        self.weights = self.first.weights if alone else Bundle(w for s in self.stages for w in s.weights)
        self.optimizer = Joint(self.stages, self.weights)
        self._delay = delays[self.first.index]
        self._delays = tuple(delays[s.index] for s in self.stages for _ in s.weights)
        self._options: list[Options] = []
        self._rates: tuple[float, ...] = ()
        self._states: list[State] = []
        self._state: State = {}
        self._scratch: Weights | None = None

    @property
    def scratch(self) -> Weights:
        """The buffers beside the weights; raises where the method has declared none."""
        if self._scratch is None:
            if self.first.scratch is None:
                raise RuntimeError('the method shifts weights, but its copies are "live"; declare copies = "scratch"')
            self._scratch = [w for s in self.stages for w in s.scratch or ()]
        return self._scratch

    @property
    def state(self) -> State:
        """The method's state over the team: lists one after the other, numbers of the first."""
        states = [s.state for s in self.stages]
        if len(states) == 1:
            return states[0]
        if len(self._states) != len(states) or any(a is not b for a, b in zip(self._states, states, strict=True)):
            self._states = states
            self._state = {
                name: [x for state in states for x in state[name]] if isinstance(value, list) else value
                for name, value in states[0].items()
            }
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        if len(self.stages) == 1:
            self.first.state = state
            return
        at = 0
        for s in self.stages:
            n = len(s.weights)
            s.state = {k: v[at : at + n] if isinstance(v, list) else v for k, v in state.items()}
            at += n

    def when(self, mb: int, options: Sequence[Options], start: int, base: int, entry: int) -> When:
        """`When` for the first stage at micro-batch `mb`, with the rate and the delay of every weight."""
        if len(options) != len(self._options) or any(a is not b for a, b in zip(self._options, options, strict=True)):
            self._options = list(options)
            self._rates = tuple(r for s, o in zip(self.stages, options, strict=True) for r in rates_of(s, o))
        first = self.first
        return When(
            first.index, first.stages, mb, first.version, self._delay, self._rates, self._delays, start, base, entry
        )
