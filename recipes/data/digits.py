"""scikit-learn's handwritten digits: 1,797 images of 8x8 pixels, which come with scikit-learn."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeback.recipes.data.files import find
from pipeback.recipes.data.loading import Data, Samples


class Digits(Data):
    """x (B, 64) float32, y (B,) class; 20 % are held out, always the same ones.

    root     a folder with another digits.csv.gz of the same layout (64 pixels and the label per row)
    samples  train on this many samples only, the first ones
    scaling  of the pixels: "standard" (mean 0, deviation 1), "unit" (0 to 1) or "symmetric" (-1 to 1)
    """

    validation_batch = 512
    limits = "data.samples"

    def __init__(
        self,
        root: str | None = None,
        samples: int | None = None,
        scaling: str = "standard",
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, seed)
        if scaling not in ("standard", "unit", "symmetric"):
            raise ValueError(f"data.scaling must be standard, unit or symmetric, but is {scaling!r}")
        self.root, self.samples, self.scaling = root, samples, scaling

    def load(self) -> tuple[Samples, Samples]:
        x, y = read(self.root)
        self.facts = {"inputs": x.shape[1], "classes": int(y.max()) + 1}
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        held_out, train = order[: len(x) // 5], order[len(x) // 5 :][: self.samples]
        if self.scaling == "standard":
            # one mean and deviation for all pixels, so that a pixel that is nearly always blank does not become large
            x = (x - x[train].mean()) / x[train].std()
        else:
            x = x / 16 if self.scaling == "unit" else x / 8 - 1
        return Samples(x[train], y[train]), Samples(x[held_out], y[held_out])


def read(root: str | None) -> tuple[Tensor, Tensor]:
    if root is None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        return torch.from_numpy(pixels).float(), torch.from_numpy(labels).long()
    import numpy

    file = find(root, ("digits.csv.gz",), "leave data.root out, and scikit-learn's own is read")
    table = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype="float32", ndmin=2))
    return table[:, :-1], table[:, -1].long()
