"""Images: data sets of images in files, kept as bytes, standardised and (optionally) augmented per batch.

x (B, channels, size, size) float32 of mean 0 and deviation 1 over all pixels of the training images; y (B,) class.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeback.recipes.data.loading import Batch, Data, Samples
from pipeback.recipes.data.pictures import Pictures, by_class, packed


class Images(Data):
    """A base class; a subclass defines `read(train)`, `classes` and the sizes.

    root         the folder of the files
    download     fetch them into root where they are missing (torchvision does)
    samples      train on this many samples only, the first ones;  val_samples: the same for validation
    augment      shift by up to 1/8 of the size and flip, at random
    flat         x as (B, features), for models of vectors
    builtin      a few generated images instead, for a trial without files
    """

    classes = 10
    channels, size = 1, 28
    flips = True  # whether the mirror image of an image belongs to the same class

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        samples: int | None = None,
        val_samples: int | None = None,
        augment: bool = False,
        flat: bool = False,
        builtin: bool = False,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, seed)
        self.root, self.download, self.builtin = root, download, builtin
        self.samples, self.val_samples = samples, val_samples
        self.augment, self.flat = augment, flat

    def read(self, train: bool) -> Pictures:
        raise NotImplementedError

    def load(self) -> tuple[Samples, Samples]:
        source = self.generated if self.builtin else self.read
        (x, y), (val_x, val_y) = (Pictures(*(t[:n] for t in source(part)))
                                  for part, n in ((True, self.samples), (False, self.val_samples)))  # fmt: skip
        channels, size = x.shape[1], x.shape[2]
        inputs = {"inputs": channels * size * size} if self.flat else {"channels": channels, "size": size}
        self.facts = {**inputs, "classes": self.classes}
        mean, deviation = statistics(x)

        def standardised(pixels: Tensor, labels: Tensor, rows: Tensor) -> Batch:
            x = (pixels.float() - mean) / deviation
            return (x.flatten(1) if self.flat else x), labels

        def varied(pixels: Tensor, labels: Tensor, rows: Tensor) -> Batch:
            # a random stream per batch, so that a resumed run needs no state for it
            number = sum((i + 1) * row for i, row in enumerate(rows.tolist()))
            stream = torch.Generator().manual_seed((self.seed * 1_000_003 + number) % 2**63)
            return standardised(vary(pixels, size // 8, self.flips, stream), labels, rows)

        return Samples(x, y, varied if self.augment else standardised), Samples(val_x, val_y, standardised)

    def generated(self, train: bool) -> Pictures:
        """Return one random pattern of 4x4 squares per class, plus noise, which a model can learn in seconds."""
        count = 512 if train else 128
        squares = torch.rand(self.classes, self.channels, 4, 4, generator=torch.Generator().manual_seed(0))
        places = torch.arange(self.size) * 4 // self.size
        patterns = squares[:, :, places[:, None], places]
        stream = torch.Generator().manual_seed(1 + train)
        labels = torch.randint(self.classes, (count,), generator=stream)
        noise = torch.rand(count, self.channels, self.size, self.size, generator=stream)
        return Pictures(((0.7 * patterns[labels] + 0.3 * noise) * 255).byte(), labels)

    def missing(self, what: str) -> ValueError:
        there = "" if Path(self.root).expanduser().is_dir() else f"; there is no folder {self.root}"
        return ValueError(f"data.root={self.root} has no {what}{there}; data.download=true fetches it")


class MNIST(Images):
    """60,000 and 10,000 handwritten digits of 28x28 pixels."""

    flips = False

    def read(self, train: bool) -> Pictures:
        from torchvision import datasets

        kind, root = getattr(datasets, type(self).__name__), Path(self.root).expanduser()
        try:
            part = kind(root, train=train, download=self.download)
        except RuntimeError as error:
            part_name = "train" if train else "t10k"
            if (found := packed(root / kind.__name__ / "raw", part_name)) is not None:
                return found
            raise self.missing(f"{kind.__name__}/raw/{part_name}-images-idx3-ubyte, packed by gzip or not") from error
        return Pictures(part.data.unsqueeze(1), part.targets)


class FashionMNIST(MNIST):
    """60,000 and 10,000 pieces of clothing of 28x28 pixels (Zalando Research)."""

    flips = True


class CIFAR10(Images):
    """50,000 and 10,000 photographs of 32x32 pixels: torchvision's files, or one folder of images per class."""

    channels, size = 3, 32

    def read(self, train: bool) -> Pictures:
        from torchvision import datasets

        root = Path(self.root).expanduser()
        folder = root / ("train" if train else "test")
        if folder.is_dir():
            return by_class(folder)
        try:
            part = datasets.CIFAR10(root, train=train, download=self.download)
        except RuntimeError as error:
            raise self.missing(
                "cifar-10-batches-py, nor folders train/ and test/ with one folder of images per class"
            ) from error
        return Pictures(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))


def statistics(pixels: Tensor) -> tuple[float, float]:
    """Return mean and deviation of bytes from their histogram, which is exact and makes no copy in float."""
    counts = torch.bincount(pixels.flatten(), minlength=256).double()
    values = torch.arange(256, dtype=torch.float64)
    mean = (counts * values).sum() / counts.sum()
    return mean.item(), ((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt().item()


def vary(pixels: Tensor, shift: int, flips: bool, stream: torch.Generator) -> Tensor:
    """Shift each image of (B, C, H, W) by up to `shift` pixels in both directions (new ones are 0), and mirror half."""
    n, _, height, width = pixels.shape
    if flips:
        mirrored = torch.rand(n, 1, 1, 1, generator=stream) < 0.5
        pixels = torch.where(mirrored, pixels.flip(3), pixels)
    down, right = (torch.randint(2 * shift + 1, (n, 1), generator=stream) for _ in range(2))
    rows, columns = down + torch.arange(height), right + torch.arange(width)  # (B, H), (B, W)
    framed = pad(pixels, (shift, shift, shift, shift))
    return framed[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(3, 1)
