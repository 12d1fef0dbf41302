"""The data sets of the recipes, as tensors, standardised over all pixels."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    x: Tensor  # (N, features) float32, standardised with the training set's mean and deviation
    y: Tensor  # (N,) int64 class
    test_x: Tensor  # (M, features)
    test_y: Tensor  # (M,)
    classes: int


def digits(root: str | None = None, samples: int | None = None, scaling: str = "standard") -> Split:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, 20 % of them held out, always the same ones.

    scaling: of the pixels, "standard" (mean 0, deviation 1), "unit" (0 to 1) or "symmetric" (-1 to 1).
    """
    if scaling not in ("standard", "unit", "symmetric"):
        raise ValueError(f"data.scaling must be standard, unit or symmetric, but is {scaling!r}")
    if root is None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        x, y = torch.from_numpy(pixels).float(), torch.from_numpy(labels).long()
    else:
        import numpy

        file = Path(root).expanduser() / "digits.csv.gz"
        if not file.is_file():
            raise ValueError(f"data.root={root}: there is no {file.name} in this folder")
        table = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype="float32", ndmin=2))
        x, y = table[:, :-1], table[:, -1].long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(x) // 5], order[len(x) // 5 :][:samples]
    if scaling != "standard":
        x = x / 16 if scaling == "unit" else x / 8 - 1
        return Split(x[train], y[train], x[test], y[test], int(y.max()) + 1)
    return standardised(x[train], y[train], x[test], y[test])


def mnist(root: str = "data", download: bool = False, samples: int | None = None) -> Split:
    """MNIST, 60,000 and 10,000 images of 28x28 pixels, flattened."""
    from torchvision.datasets import MNIST

    try:
        train, test = (MNIST(root, train=part, download=download) for part in (True, False))
    except RuntimeError as error:
        raise ValueError(f"no MNIST under data.root={root}; data.download=true fetches it") from error
    x, test_x = (part.data.flatten(1).float() for part in (train, test))
    return standardised(x[:samples], train.targets[:samples], test_x, test.targets)


def standardised(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> Split:
    # one mean and deviation for all pixels: a pixel that is nearly always blank must not become a loud one
    mean, deviation = x.mean(), x.std()
    return Split((x - mean) / deviation, y, (test_x - mean) / deviation, test_y, int(max(y.max(), test_y.max())) + 1)


DATA = {"digits": digits, "mnist": mnist}
