"""The state of every random generator, as plain values and tensors that `torch.load(weights_only=True)` takes."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def save() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        found["numpy"] = [name, keys.tolist(), *rest]
    return found


def load(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"].cpu())
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in saved and torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([state.cpu() for state in saved["cuda"]])
    if "numpy" in saved and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(saved["numpy"]))
