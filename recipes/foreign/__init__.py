"""Models that nobody here wrote, at small sizes with random weights: what `pipeback zoo` splits and trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

import torch

from pipeback.recipes.foreign import others
from pipeback.recipes.foreign.case import Case

# the file of this folder in which a model is built, by a function of its name
WHERE = {
    "resnet18": "vision", "resnet50": "vision", "vgg11": "vision", "vit": "vision", "convnext": "vision",
    "seq2seq": "sequences", "lstm": "sequences", "unet": "unet",
    "gpt2": "language", "llama": "language", "t5": "language",
}  # fmt: skip
OTHERS = others.NAMES  # more models, shown when they are asked for


def build(name: str, seed: int = 0) -> Case:
    """The model of that name, always with the same weights. Raises ImportError naming the package that it needs."""
    torch.manual_seed(seed)
    if name in OTHERS:
        return others.case(name)
    made: Mapping[str, Callable[[], Case]] = vars(import_module(f"pipeback.recipes.foreign.{WHERE[name]}"))
    return made[name]()
