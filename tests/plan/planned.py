"""Pipelines and pushes that plans are made for."""

import torch

from tests.laws.cases import data

SAMPLES = 3


def pushed(count, seed=1, width=6):
    return tuple(torch.cat(part) for part in zip(*data(count, samples=SAMPLES, width=width, seed=seed), strict=True))
