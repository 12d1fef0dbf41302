"""The state of every random generator, as plain values and tensors that `torch.load(weights_only=True)` takes."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from pipeback.tensors import accelerators


def save() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}
    found |= accelerators.random_states()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        found["numpy"] = [name, keys.tolist(), *rest]
    return found


def load(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"].cpu())
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    accelerators.set_random_states(saved)
    if "numpy" in saved and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(saved["numpy"]))
