"""What is asked of every forward: the bits of plain training without delays, those of the event loop on every runtime,
and its numbers where stages run as one. What is refused trains after the cure that the message types.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

import pipeback

from ..check import TOLERANCE, close
from .forward import Forward

# a cure that keeps something whole; and a method that may be needed for weights of weights
WHOLE = re.compile(r"stages=(pipeback\.Splitting\(leaves=\[.*?\]\))")
STASHES = 'method="pipedream"'
CURES = 8  # of one model, one after the other


def check(forward: Forward) -> None:
    """Raise AssertionError, naming what was seen, where a pipeline shows other numbers than it should."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        forward = cured(forward, Forward.trained)
        if not forward.draws:
            close(forward.trained(method="sgd")[0], forward.plainly(), 0.0, "the bits of plain training")
        runtime = dict(forward.runtime)
        as_one = runtime.pop("vectorize", None)
        wanted, stages = forward.trained()
        if "workers" in runtime:
            runtime["workers"] = min(runtime["workers"], stages)
        found = forward.trained(resume=forward.resume, **runtime)[0]
        close(found, wanted, 0.0, "the bits of the event loop")
        if as_one and not forward.draws and not forward.rounds:
            found, wanted = (forward.trained(torch.float64, **more)[0] for more in ({"vectorize": as_one}, {}))
            close(found, wanted, TOLERANCE, "the event loop")


def cured(forward: Forward, train: Callable[[Forward], object]) -> Forward:
    """The forward as it is trained, with the cures that messages type. Raises what types none."""
    for _ in range(CURES):
        try:
            train(forward)
            return forward
        except ValueError as error:
            if STASHES in str(error):
                forward = replace(forward, method="pipedream")
            elif cure := WHOLE.search(str(error)):
                stages = eval(cure[1], {"pipeback": pipeback})
                known = forward.stages.leaves if isinstance(forward.stages, pipeback.Splitting) else []
                forward = replace(forward, stages=pipeback.Splitting(leaves=[*known, *stages.leaves]))
            else:
                raise
    raise AssertionError("its cures lead to other errors without end")
