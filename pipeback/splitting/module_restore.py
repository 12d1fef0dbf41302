"""Module restore: restores what a forward changes in its module: buffers, attributes, weights that it writes into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pipeback.splitting.attribute_changes import Changed, FirstCall
from pipeback.splitting.in_place import laid_back
from pipeback.splitting.module_walk import identical, walked
from pipeback.splitting.outside_draws import Generator, drawn, generators, read, torch_generators, write
from pipeback.tensors.layout import put_back

Home = tuple[dict[str, Tensor | None], str, Tensor, Tensor]  # (holder, name, buffer, copy of it)


class Untouched:
    """A context that restores a module on exit: its buffers, the tensors and their values, and more; it yields `homes`.

    It also restores generators of Python and numpy, torch's in attributes, numbers and tensors in attributes, and the
    parameters named in `rewritten`, which the forward writes into; a segment knows its own. within: the modules by
    their paths, if known; outside: their `generators`. It may be entered again, and restores what was there when it was
    made.
    """

    def __init__(
        self,
        module: nn.Module,
        rewritten: Iterable[str] | None = None,
        within: Mapping[str, nn.Module] | None = None,
        outside: Sequence[Generator] | None = None,
    ) -> None:
        modules = list((walked(module) if within is None else within).values())
        self._attributes = [(vars(m), dict(vars(m))) for m in modules if "__rewritten__" not in vars(m)]
        names = getattr(module, "__rewritten__", ()) if rewritten is None else rewritten
        self._parameters = [(p, p.data, p.detach().clone()) for p in map(module.get_parameter, names)]
        self.homes: list[Home] = [
            (m._buffers, key, b, b.detach().clone()) for m in modules for key, b in m._buffers.items() if b is not None
        ]
        self.generators = generators(modules) if outside is None else outside
        self._outside = [*self.generators, *torch_generators(modules)]
        self._states = read(self._outside)

    @property
    def drew(self) -> bool:
        """Whether one of these generators has drawn since."""
        return drawn(self._outside, self._states)

    def __enter__(self) -> list[Home]:
        return self.homes

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        write(self._outside, self._states)
        for owner, key, buffer, value in self.homes:
            owner[key] = buffer
            put_back(buffer, value)
        for p, memory, value in self._parameters:
            laid_back(p, memory, value)
        if kind is not None and issubclass(kind, (Changed, FirstCall)):
            return  # the model is traced once more, with this attribute set
        for now, before in self._attributes:
            for key, value in () if identical(now, before) else before.items():
                if now.get(key) is not value and _counts(value) and _counts(now.get(key)):
                    now[key] = value


def untouched(
    module: nn.Module, rewritten: Iterable[str] | None = None, within: Mapping[str, nn.Module] | None = None
) -> Untouched:
    """Return a context that restores a module on exit, see `Untouched`."""
    return Untouched(module, rewritten, within)


def _counts(value: Any) -> bool:
    """Whether an attribute is restored: numbers, tensors, weak references and None are, also in tuples and lists; a
    mark stays set.

    Marks are bools and strings. What belongs together is restored together: a table and its size, or the weights of an
    LSTM and its references to them, by which it knows whether they are others.
    """
    if type(value) in (tuple, list, torch.Size):
        return all(map(_counts, value))
    return not isinstance(value, bool) and isinstance(value, (int, float, Tensor, ref, type(None)))
