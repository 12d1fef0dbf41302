"""Foreign models: models of other packages, at small sizes with random weights, for `pipeback zoo`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

import torch

from pipeback.recipes.extras import needs
from pipeback.recipes.foreign import others
from pipeback.recipes.foreign.case import Case

# the file of this folder with the function that builds a model, by the name of both
WHERE = {
    "resnet18": "vision", "resnet50": "vision", "vgg11": "vision", "vit": "vision", "convnext": "vision",
    "seq2seq": "sequences", "lstm": "sequences", "unet": "unet",
    "gpt2": "language", "llama": "language", "t5": "language",
}  # fmt: skip
OTHERS = others.NAMES  # the models of `pipeback zoo --others`


def build(name: str, seed: int = 0) -> Case:
    """Return the model of that name, always with the same weights. Raises ImportError naming a missing package."""
    torch.manual_seed(seed)
    try:
        if name in OTHERS:
            return others.case(name)
        made: Mapping[str, Callable[[], Case]] = vars(import_module(f"pipeback.recipes.foreign.{WHERE[name]}"))
        return made[name]()
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(needs(name, error), name=error.name) from error
