"""The models of the recipes: an `nn.Sequential` whose children are the stages.

`MODELS` maps the name in a conf/model entry to a builder; it takes the entry's options, and the facts of the data.
"""

from collections.abc import Callable

from torch import nn

from pipeback.recipes.models.convolution import resnet20, vgg
from pipeback.recipes.models.mlp import residual_mlp
from pipeback.recipes.models.transformer import gpt, transformer

MODELS: dict[str, Callable[..., nn.Sequential]] = {
    "residual_mlp": residual_mlp,
    "resnet20": resnet20,
    "vgg": vgg,
    "transformer": transformer,
    "gpt": gpt,
}
