"""Columns: numbers in the hooks of methods, of which there may be one per stage.

Where weights are rows of several stages (`When.rows`), a number is a tensor: a vector (n), or a column (n, 1, …), which
multiplies a weight (n, …) row by row. Stages without a delay are never rows, so that of all rows the same can be asked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Number = Any  # a number, or a tensor of one number per row


def column(number: Number, like: Tensor) -> Number:
    """Return a vector as a column for a weight like this one; a plain number as it is."""
    return number.to(like.dtype).view(-1, *[1] * (like.dim() - 1)) if isinstance(number, Tensor) else number


def positive(number: Number) -> bool:
    """Whether a number that is at least 0 is above 0, in all rows."""
    return bool(number.all()) if isinstance(number, Tensor) else bool(number)


def added(x: Tensor, y: Tensor, by: Number) -> Tensor:
    """Do x ← x + by·y in place; return x."""
    return x.addcmul_(y, by) if isinstance(by, Tensor) else x.add_(y, alpha=by)


def largest(a: Number, b: Number) -> Number:
    """Return the larger of two numbers, row by row."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return max(a, b)
    return torch.maximum(*(torch.as_tensor(number, dtype=torch.float64) for number in (a, b)))


def norm(x: Tensor, rows: int) -> Tensor:
    """Return the Euclidean norm of all entries, or of those of every row as a column."""
    found: Tensor = torch.linalg.vector_norm(x) if not rows else column(x.reshape(rows, -1).norm(dim=1), x)
    return found


def total(x: Tensor, rows: int) -> Tensor:
    """Return the sum of all entries, or of those of every row as a column."""
    found: Tensor = column(x.reshape(rows, -1).sum(1), x) if rows else x.sum()
    return found
