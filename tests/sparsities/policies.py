"""Every policy with some options, the tensors that it is asked about, and what its masks are compared with."""

import torch

from pipeback import sparsities

OPTIONS = {"magnitude": {}, "gradual": {"steps": 5, "every": 10}, "set": {}, "rigl": {"until": 1000}}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SHAPES = [(16, 3, 3, 3), (32, 16, 3, 3), (64, 32, 3, 3), (40, 64), (10, 40)]


def policy(name, **options):
    return sparsities.create(name, **{**OPTIONS[name], **options})


def places(mask):
    return set(mask.flatten().nonzero().view(-1).tolist())


def best(scores, count, among):
    """The places of the `count` largest, equal ones by position."""
    return set(sorted(among, key=lambda i: (-scores[i], i))[:count])
