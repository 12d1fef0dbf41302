"""Images in files that torchvision's data sets do not read as they are."""

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
    """Bytes in MNIST's format: a header of 4 bytes, the last of them the rank, 4 bytes a dimension, the values."""
    content = bytearray(gzip.decompress(file.read_bytes()))
    rank = content[3]
    shape = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * rank).view(shape)


def by_class(folder: Path) -> Pictures:
    """All images of a torchvision ImageFolder, in an order that mixes the classes and is always the same."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms.functional import pil_to_tensor

    files = ImageFolder(str(folder))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    return Pictures(torch.stack([pil_to_tensor(files[i][0]) for i in order]), torch.tensor(files.targets)[order])
