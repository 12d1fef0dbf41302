"""Models that nobody here wrote, at small sizes with random weights: what `pipeback zoo` splits and trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from pipeback.recipes.foreign.case import Case

# the file of this folder in which a model is built, by a function of its name
WHERE = {
    "resnet18": "vision", "resnet50": "vision", "vgg11": "vision", "vit": "vision", "convnext": "vision",
    "seq2seq": "sequences", "lstm": "sequences", "unet": "unet",
    "gpt2": "language", "llama": "language", "t5": "language",
}  # fmt: skip
# more models, shown when they are asked for
OTHERS = (
    "alexnet", "densenet121", "googlenet", "mobilenet_v3_small", "efficientnet_b0", "shufflenet_v2_x0_5",
    "squeezenet1_1", "mnasnet0_5", "regnet_y_400mf", "resnext50_32x4d", "swin_t", "swin_v2_t",
    "bert", "roberta", "distilbert", "albert", "mistral", "mixtral", "qwen2", "gemma", "phi", "gpt_neox", "opt",
    "bloom", "bart", "mamba",
)  # fmt: skip


def build(name: str, seed: int = 0) -> Case:
    """The model of that name, always with the same weights. Raises ImportError naming the package that it needs."""
    import torch

    torch.manual_seed(seed)
    if name in OTHERS:
        found: Case = import_module("pipeback.recipes.foreign.others").case(name)
        return found
    made: Mapping[str, Callable[[], Case]] = vars(import_module(f"pipeback.recipes.foreign.{WHERE[name]}"))
    return made[name]()
