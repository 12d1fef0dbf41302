"""Slices: the micro-batches of a push, cut from its tensors when they are taken.

A push of a hundred thousand micro-batches needs no list of as many views, which would take more memory than the data.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, overload

import torch
from torch import Tensor

from pipeback.runtime.loop import Batch
from pipeback.tensors.batches import copied, sizes
from pipeback.tensors.layout import LINE

AT_ONCE = 256  # micro-batches that an iteration cuts in one call


class Slices(Sequence[Batch]):
    """Micro-batches (x, y, samples) of `size` samples each; the last may have fewer.

    x, y: tensors with `length` samples, or tuples of such and of what every micro-batch gets whole.
    """

    def __init__(self, x: Any, y: Any, length: int, size: int) -> None:
        self._x, self._y, self._length, self._size = x, y, length, size
        self._numbers = range(-(-length // size))
        self._tail = len(self._numbers), x, y  # the first micro-batch that is cut from other tensors, and these

    def apart(self, last: int) -> Slices:
        """Return the same, of which so many of the last ones lie in copies of the tensors."""
        found, first = copy.copy(self), max(0, len(self) - last)
        begin, end = first * self._size, self._length
        x, y = (next(iter(pieces_of(value, begin, end, [end - begin]))) for value in (self._x, self._y))
        found._tail = first, copied(x), copied(y)
        if not first:
            _, found._x, found._y = found._tail  # nothing is cut from the caller's tensors
        return found

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Slices: ...
    def __getitem__(self, index: int | slice) -> Batch | Slices:
        numbers = self._numbers[index]
        if isinstance(numbers, range):
            found = copy.copy(self)
            found._numbers = numbers
            return found
        return next(self._cut(numbers, numbers + 1))

    def __iter__(self) -> Iterator[Batch]:
        numbers = self._numbers
        if numbers.step != 1:
            for n in numbers:
                yield next(self._cut(n, n + 1))
            return
        first = numbers.start
        while first < numbers.stop:
            ends = self._tail[0] if first < self._tail[0] else numbers.stop
            stop = min(first + AT_ONCE, ends, numbers.stop)
            yield from self._cut(first, stop)
            first = stop

    @property
    def unlike(self) -> list[Batch]:
        """The micro-batches that may differ in form: the first and the last."""
        return [self[0], self[-1]] if len(self) > 1 else [self[0]]

    def _cut(self, first: int, stop: int) -> Iterator[Batch]:
        number, x, y = self._tail if first >= self._tail[0] else (0, self._x, self._y)
        begin, end = (first - number) * self._size, min(stop * self._size, self._length) - number * self._size
        each = sizes(end - begin, self._size)
        return iter(zip(pieces_of(x, begin, end, each), pieces_of(y, begin, end, each), each, strict=False))


def pieces_of(value: Any, begin: int, end: int, each: Sequence[int]) -> Iterable[Any]:
    """Slices of `each` so many samples of a value from sample `begin` to `end`; what is no tensor is in all of them.

    If one is written into, as by a loss that masks its targets, autograd does not take the others for changed.
    """
    if isinstance(value, tuple) and value:
        return zip(*(pieces_of(part, begin, end, each) for part in value), strict=False)
    if isinstance(value, Tensor) and value.dim():
        return [piece.data for piece in value.narrow(0, begin, end - begin).split(list(each))]
    return repeat(value)


def apart(batches: Sequence[Batch], last: int | None) -> Sequence[Batch]:
    """Return the same, of which so many of the last ones (None: all) lie in copies: whoever pushed them may fill the
    tensors anew.
    """
    count = len(batches) if last is None else min(last, len(batches))
    if not count:
        return batches
    if isinstance(batches, Slices):
        return batches.apart(count)
    own = [(copied(x), copied(y), samples) for x, y, samples in batches[-count:]]
    return [*batches[:-count], *own]


def joined(xs: Sequence[Any]) -> Tensor | None:
    """Return inputs as one tensor, if they are alike and its slices have their strides, and lie as they do within 64
    bytes; else None.
    """
    first = xs[0]
    if len(xs) == 1 or not all(map(_plain, xs)) or not first.numel() or not first.dim():
        return None
    strides = torch.empty(first.shape, device="meta").stride()
    form, size = (first.shape, strides, first.dtype, first.device), first.numel() * first.element_size()
    if any((x.shape, x.stride(), x.dtype, x.device) != form for x in xs):
        return None
    if any((x.data_ptr() - n * size) % LINE for n, x in enumerate(xs)):
        return None
    return torch.cat([*xs])


def _plain(x: Any) -> bool:
    return type(x) is Tensor and x.layout is torch.strided and not (x.requires_grad or x.is_inference())


def unlike(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Some of these micro-batches, of which every other has the form of one."""
    return batches.unlike if isinstance(batches, Slices) else batches
