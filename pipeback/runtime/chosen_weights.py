"""Chosen weights: asks a method on which weights F and B run, and checks its answer.

F is the forward, B the backward of a micro-batch at a stage. The number of tensors is checked at every call. At the
first calls for each group of stages, so are their shapes, and whether the hook has written into the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pipeback.methods.answers import check_count, check_shapes
from pipeback.methods.base import Chosen, Method, Shift, When
from pipeback.methods.chain import computed
from pipeback.stages.stage import Stage
from pipeback.stages.team import StageGroup
from pipeback.tensors.weight_list import Weights

LOOKS = 8  # calls for each group that are looked at closely: a method may do nothing at the first ones


class HookCall(NamedTuple):
    """A question to the method: which weights do these stages run an operation on?"""

    team: StageGroup
    mb: int  # the micro-batch at the first stage
    when: When


class ChosenWeights:
    """The hooks of `method` for the weights of F and B.

    failure: makes the error of an operation of a stage, given its name, the stage, the micro-batch and the cause.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self.failure: Callable[[str, Stage, int, BaseException], BaseException] = _as_it_is
        self._looks: dict[tuple[str, StageGroup], int] = {}

    def forward(self, call: HookCall) -> Chosen:
        """The weights on which this forward runs: those of the team, if they are the newest."""
        team, _, when = call
        weights = team.weights
        chosen = self._asked("forward", call, self.method.forward_weights, (weights, team.state, when))
        return chosen if chosen is weights else self._checked("forward", call, chosen)

    def backward(self, call: HookCall, used: Weights | None) -> Chosen:
        """The weights on which this backward runs. used: those of its forward, if they are kept."""
        team, _, when = call
        weights = team.weights
        chosen = self._asked("backward", call, self.method.backward_weights, (weights, used, team.state, when))
        if chosen is weights or (chosen is used and used is not None):
            return chosen
        return self._checked("backward", call, chosen)

    def _asked(self, what: str, call: HookCall, hook: Callable[..., Chosen], given: tuple[Any, ...]) -> Chosen:
        team, mb, _ = call
        looks, weights = self._looks.get((what, team), 0), given[0]
        before = _versions(weights) if looks < LOOKS else []
        try:
            chosen = hook(*given)
        except Exception as error:
            told = RuntimeError(f"{what}_weights raised {type(error).__name__}: {error}")
            raise self.failure(what, team.first, mb, told) from error
        if looks < LOOKS:
            self._looks[what, team] = looks + 1
            if _versions(weights) != before:
                told = RuntimeError(
                    f"{what}_weights of {self.method!r} has written into the weights that it was given, which stay "
                    "changed; give back new tensors, such as [0.9 * w for w in weights], and build the model anew"
                )
                raise self.failure(what, team.first, mb, told) from told
        return chosen

    def _checked(self, what: str, call: HookCall, chosen: Chosen) -> Chosen:
        """Return what was chosen; a `Shift` of other weights than the newest, to which it is added, computed."""
        team, mb, _ = call
        try:
            check_count(self.method, f"{what}_weights", team.weights, chosen)
            if self._looks[what, team] < LOOKS:
                check_shapes(self.method, f"{what}_weights", team.weights, chosen)
        except (TypeError, ValueError) as error:
            raise self.failure(what, team.first, mb, error) from error
        return computed(chosen) if isinstance(chosen, Shift) and chosen.weights is not team.weights else chosen


def _versions(weights: Weights) -> list[int]:
    return [w._version for w in weights]


def _as_it_is(what: str, stage: Stage, mb: int, error: BaseException) -> BaseException:
    return error
