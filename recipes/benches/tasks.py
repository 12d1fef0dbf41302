"""The networks of the section `table`, and the micro-batches they are trained on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from pipeback.recipes.benches.network import sgd
from pipeback.recipes.benches.vectorized import Linear, Transformer, blocks
from pipeback.recipes.models import MODELS

CLASSES = 10


class Network(NamedTuple):
    """A micro-batch of n samples is a tensor (n, *shape)."""

    name: str
    words: str
    build: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    turns: dict[int, int]  # samples of a micro-batch -> micro-batches per turn, a multiple of the flush
    classes: int | None = None  # None: the target is like the input
    compiles: bool = True  # False: every stage is a graph of its own, and the compiler takes minutes


class Task(NamedTuple):
    """A network, and micro-batches of this many samples. fused: whether optimizers step in one pass through memory."""

    network: Network
    samples: int
    turn: int
    fused: bool = False

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return cross_entropy if self.network.classes else mse_loss

    @property
    def optimizer(self) -> Callable[[Any], torch.optim.SGD]:
        return partial(sgd, fused=self.fused)

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return self.network.build()

    def data(self, micro_batches: int = 1) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        count = micro_batches * self.samples
        x = torch.randn(count, *self.network.shape)
        return x, torch.randint(0, self.network.classes, (count,)) if self.network.classes else torch.randn_like(x)


def images(name: str, **options: int) -> Callable[[], nn.Sequential]:
    return partial(MODELS[name], channels=3, classes=CLASSES, size=32, **options)


NETWORKS = {
    network.name: network for network in (
        Network("resnet20", "ResNet-20 with GroupNorm, 32 × 32", images("resnet20"), (3, 32, 32), {1: 16, 8: 8},
                CLASSES, compiles=False),
        Network("vgg16", "VGG-16 of width 16 with GroupNorm, 32 × 32", images("vgg", depth=16), (3, 32, 32),
                {1: 24, 8: 8}, CLASSES, compiles=False),
        Network("transformer", "12 transformer blocks of width 128, sequence 32", partial(blocks, Transformer, 12, 128),
                (32, 128), {1: 32, 4: 16}),
        Network("narrow", "48 layers of width 64", partial(blocks, Linear, 48, 64), (64,), {1: 48}),
    )
}  # fmt: skip


def tasks(networks: list[str], fused: bool = False) -> list[Task]:
    some = ((NETWORKS[name], *turn) for name in networks for turn in NETWORKS[name].turns.items())
    return [Task(*each, fused) for each in some]
