"""Small models as people write them, and how they are split."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback

X = torch.randn(3, 4)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def linear():
    return nn.Linear(4, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.stem, self.blocks = linear(), nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(4), linear()

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def pipe(model, x=X, loss=mse_loss, **options):
    return pipeback.Pipeline(model, loss=loss, optimizer=sgd, method="sgd", example=x, **options)
