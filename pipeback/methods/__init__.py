"""The methods: one published method per file, and by name those of other packages, too (group `pipeback.methods`).

Floor 2. A method imports base, schedules, tensors and parts that methods share: momentum, adam, direction, gradients,
rates and option_checks. base imports schedules and tensors.
"""

from __future__ import annotations

import inspect
from typing import Any

from pipeback.methods.base import Method
from pipeback.plugins import Plugins

__all__ = ["available", "create", "options"]

GROUP = "pipeback.methods"

_METHODS = Plugins(
    "method",
    GROUP,
    {
        "sgd": "sgd:Sequential",
        "gpipe": "gpipe:GPipe",
        "one_f_one_b": "one_f_one_b:OneForwardOneBackward",
        "zb_h1": "zb_h1:ZeroBubbleH1",
        "zb_h2": "zb_h2:ZeroBubbleH2",
        "interleaved": "interleaved:Interleaved",
        "looped_bfs": "looped_bfs:LoopedBFS",
        "zb_v": "zb_v:ZeroBubbleV",
        "pb": "pb:PipelinedBackpropagation",
        "pipedream": "pipedream:PipeDream",
        "pipedream_2bw": "pipedream_2bw:PipeDream2BW",
        "pipemare": "pipemare:PipeMare",
        "spectrain": "spectrain:SpecTrain",
        "lwp": "lwp:LinearWeightPrediction",
        "sc": "sc:SpikeCompensation",
        "cerebras": "cerebras:Cerebras",
        "ef": "ef:ErrorFeedback",
        "pipeoptim": "pipeoptim:OptimizerPrediction",
        "msnag": "msnag:DecayedPrediction",
        "gap_aware": "gap_aware:GapAware",
        "dc_asgd": "dc_asgd:DelayCompensation",
        "braking": "braking:AdaptiveBraking",
        "staleness_lr": "staleness_lr:StalenessRates",
        "eigendelay": "eigendelay:EigenDelay",
    },
)


def available() -> list[str]:
    """Names that `create` and `Pipeline(method=...)` take; ours first, then those of other packages."""
    return _METHODS.available()


def create(name: str, **options: Any) -> Method:
    """Build a method: `create("gpipe", micro_batches=4)`.

    Raises ValueError for an unknown name or option and suggests the nearest.
    """
    method: Method = _METHODS.create(name, Method, options)
    return method


def options(name: str) -> dict[str, inspect.Parameter]:
    """The options that `create(name)` takes, by name, with their defaults."""
    return _METHODS.options(name)


def derived(name: str, stages: int, updates: int) -> dict[str, Any]:
    """Values for options that `name` needs and does not have by itself, for so many stages and updates in all."""
    return _METHODS.derived(name, stages, updates)
