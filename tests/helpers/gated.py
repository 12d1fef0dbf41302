"""A layer whose graph keeps a buffer, which users write into or replace."""

import torch
from torch import nn


class Gated(nn.Linear):
    """tanh((W x + b) · gate), of 6 numbers each; `gate` is a buffer."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("gate", torch.ones(6))

    def forward(self, x):
        return torch.tanh(super().forward(x) * self.gate)
