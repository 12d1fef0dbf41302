"""What is refused of the hooks of a method of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import torch

import pipeback
from pipeback.methods.base import Shift
from pipeback.schedules.ops import Op
from pipeback.schedules.programs import flowing

from .rows import Row, trains


def own(forward: Callable[[Any], Any] | None = None, **attributes: Any) -> pipeback.Method:
    """A method. forward: returns the weights of F, given the newest; None: these."""
    hooks: dict[str, Any] = {"schedule": flowing(2), "copies": "scratch", **attributes}
    if forward is not None:
        hooks["forward_weights"] = lambda self, weights, state, when: forward(weights)
    return type("Own", (pipeback.Method,), hooks)()  # type: ignore[no-any-return]


def refuses(*args: Any, **attributes: Any) -> Callable[[], None]:
    return lambda: trains(method=own(*args, **attributes))


def used(self: Any, weights: Any, used: Any, state: Any, when: Any) -> Any:
    return used


def tenth(weights: Any, coefficients: Any) -> Shift:
    return Shift(weights, coefficients, [w.detach().clone() for w in weights])


def written(weights: Any) -> Any:
    for w in weights:
        w.mul_(0.9)
    return weights


def ending(stage: int, stages: int) -> Iterator[Op]:
    return islice(flowing(2)(stage, stages), 60)


def going_on(stage: int, stages: int) -> Iterator[Op]:
    for i in count():
        yield from (Op("F", i), Op("B", i), Op("U", i))


scaled = refuses(lambda weights: [0.9 * w for w in weights])
ROWS: dict[str, Row] = {
    "a schedule of an object": Row(
        refuses(schedule=lambda self, stage, stages: going_on(stage, stages)),
        r"the schedule of method Own is called with a stage and their number, but takes \(self, stage, stages\); "
        r"write it without self, for example def schedule\(stage, stages\)",
        refuses(schedule=lambda stage, stages: going_on(stage, stages)),
    ),
    "a schedule that ends": Row(
        refuses(schedule=ending),
        r"stage \d: the program of the schedule ending ended after 60 operations, but programs are endless; let it "
        r"count micro-batches by itertools.count\(\)",
        refuses(schedule=going_on),
    ),
    "a state that is a list": Row(
        refuses(init=lambda self, weights: []),
        r"init of Own\(\) must return a state, which is a dict, but returned list; give back {} if there is nothing",
        refuses(init=lambda self, weights: {}),
    ),
    "a state of another length": Row(
        refuses(init=lambda self, weights: {"some": [None]}, merges=True),
        r"init of Own\(\) returned a list 'some' of length 1 for 2 weights, but the method merges stages weight by "
        "weight; give it one entry per weight, or set merges = False",
        lambda: [
            refuses(init=lambda self, weights: {"some": [None] * len(weights)}, merges=True)(),
            refuses(init=lambda self, weights: {"some": [None]}, merges=False)(),
        ],
    ),
    "an update without a state": Row(
        refuses(update=lambda self, weights, optimizer, state, when: optimizer.step()),
        "the update failed: update of .* but returned None; put `return state` at its end",
        refuses(update=lambda self, weights, optimizer, state, when: (optimizer.step(), state)[1]),
    ),
    "weights that are no list": Row(
        refuses(lambda weights: None),
        r"stage 0 \(0\), micro-batch 0: the forward failed: forward_weights of Own\(\) must return weights, a Shift or "
        "a Past; give weights as a list, not as None",
        scaled,
    ),
    "weights that are too few": Row(
        refuses(lambda weights: weights[:1]), "returned 1 weights for 2 weights; give as many", scaled
    ),
    "weights of another shape": Row(
        refuses(lambda weights: [w[:1] for w in weights]),
        r"returned a tensor of shape \(1, 6\) for weight 0, which has shape \(6, 6\); give a tensor of its shape",
        scaled,
    ),
    "tensors as coefficients": Row(
        refuses(lambda weights: tenth(weights, [torch.tensor(0.1)] * len(weights))),
        "returned a Shift with tensors as coefficients; give plain numbers",
        refuses(lambda weights: tenth(weights, [0.1] * len(weights))),
    ),
    "no room for other weights": Row(
        refuses(lambda weights: [0.9 * w for w in weights], copies="live"),
        'returned other weights than the newest, but its copies are "live", which have no room for others; set '
        'copies = "scratch"',
        scaled,
    ),
    "copies of an unknown kind": Row(
        refuses(copies="scrach"),
        """method Own keeps copies of an unknown kind, 'scrach'; set copies = "live", copies = "scratch" or """
        'copies = "stash"',
        lambda: [refuses(copies=kind)() for kind in ("live", "scratch", "stash")],
    ),
    "weights that F used, where nothing is kept": Row(
        refuses(backward_weights=used),
        'backward_weights of .* returned None; give back weights, or set copies = "stash", without which `used` is '
        "None",
        refuses(backward_weights=used, copies="stash"),
    ),
    "a hook that writes": Row(
        refuses(written),
        r"forward_weights of Own\(\) has written into the weights that it was given, which stay changed; give back new "
        r"tensors, such as \[0.9 \* w for w in weights\], and build the model anew",
        scaled,
    ),
}
