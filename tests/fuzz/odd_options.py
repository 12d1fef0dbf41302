"""Options with any values: those that the documentation does not allow are refused, by name, before anything trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VALUES = (0, -1, 1, 3, 2.5, -0.5, float("nan"), True, False, None, "luck", "", "x", (), ["luck"], b"x")


def _count(v: Any) -> bool:
    return v is None or (type(v) is int and v >= 1)


def _bound(v: Any) -> bool:
    return v is None or (type(v) in (int, float) and v > 0)


# which of the values an option may have, apart from what it does with others
ALLOWED: dict[str, Callable[[Any], bool]] = {
    "micro_batch_size": _count,
    "replicas": _count,
    "weights": lambda v: v in ("equal", "samples"),
    "balance": lambda v: v in ("time", "memory"),
    "check_finite": lambda v: type(v) is bool,
    "weight_functions": lambda v: v in ("refuse", "warn"),
    "order": lambda v: v in ("grouped", "upstream", "sticky", "random", "skewed"),
    "seed": lambda v: type(v) is int,
    "clip_norm": _bound,
    "clip_value": _bound,
    "store": lambda v: v is None,
    "device": lambda v: v is None,
    "init": lambda v: v is None or isinstance(v, str),  # a path, which only a model on the meta device needs
    "sparsity": lambda v: v is None,
    "skip_zeros": lambda v: v is False,
    "timeout": lambda v: type(v) in (int, float) and v > 0,
    "link": lambda v: v in ("auto", "shared_memory", "gloo", "nccl"),
    "workers": _count,
    "masters": lambda v: type(v) is bool,
    "compile": lambda v: type(v) in (bool, dict),
    "vectorize": lambda v: type(v) is bool or v == "auto",
    "activations": lambda v: v in ("device", "host", "recompute"),
    "stages": lambda v: v == "auto" or (type(v) is int and v >= 1),
}
NAMES = {"clip_value": "value"}  # that messages have
ODD = [(name, value) for name, allowed in ALLOWED.items() for value in VALUES if not allowed(value)]
