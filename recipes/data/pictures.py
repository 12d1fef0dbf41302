"""Pictures: reads images from files that torchvision's data sets do not read directly."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Pictures(NamedTuple):
    pixels: Tensor  # (N, channels, size, size) uint8
    labels: Tensor  # (N,) int64


def packed(folder: Path, part: str) -> Pictures | None:
    """MNIST's files as they are published, .gz: torchvision unpacks them into the folder first. None: not there."""
    files = [folder / f"{part}-{rest}-ubyte.gz" for rest in ("images-idx3", "labels-idx1")]
    if not all(file.is_file() for file in files):
        return None
    pixels, labels = (unpacked(file) for file in files)
    return Pictures(pixels.unsqueeze(1), labels.long())


def unpacked(file: Path) -> Tensor:
    """Return the values in MNIST's format: 4 bytes, of which the last is the rank; 4 bytes per dimension; values."""
    content = bytearray(gzip.decompress(file.read_bytes()))
    rank = content[3]
    shape = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * rank).view(shape)


def by_class(folder: Path) -> Pictures:
    """Return all images of a torchvision ImageFolder, always in the same order, which mixes the classes."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms.functional import pil_to_tensor

    files = ImageFolder(str(folder))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    return Pictures(torch.stack([pil_to_tensor(files[i][0]) for i in order]), torch.tensor(files.targets)[order])
