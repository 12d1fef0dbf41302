"""Buffer copies: buffers that several stages of a traced model read; all but the first of these have copies.

A user who writes into such a buffer between pushes, or sets another tensor in its place (an annealed temperature, say),
means all stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeback.splitting.module_walk import held

Home = tuple[dict[str, Tensor | None], str]  # the buffers of a module, and the name of one of them


class BufferCopies:
    """The buffers that forwards between modules read, and the copies of them.

    modules: all of the model, by their paths. owned: what each stage has, by its name in the model. copied: the names
    of the copies among it.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], owned: Sequence[Mapping[str, object]], copied: Sequence[Iterable[str]]
    ) -> None:
        buffers = dict(held(modules, "_buffers"))
        direct = sorted({name for stage in owned for name in stage if name in buffers})
        self._known = [(name, *_home(modules, name), buffers[name]) for name in direct]
        self._names = sorted({name for names in copied for name in names})
        self._sources = [buffers[name] for name in self._names]
        self._copied = [set(names) for names in copied]
        self._seen: list[int] | None = [t._version for t in self._sources]
        self._copies: list[tuple[Tensor, Tensor]] = []  # each with its source

    def add(self, segments: Sequence[nn.Module]) -> None:
        """Register the stages, or further copies of them."""
        sources = dict(zip(self._names, self._sources, strict=True))
        for segment, names in zip(segments, self._copied, strict=True):
            self._copies += [(segment.get_buffer(name), sources[name]) for name in sorted(names)]

    @property
    def due(self) -> bool:
        """Whether the user seems to have written into one of the buffers, or replaced it.

        Versions may have been put back since `follow`, so that values are compared once.
        """
        if any(home.get(key) is not known for _, home, key, known in self._known):
            return True
        now = [t._version for t in self._sources]
        if self._seen is None and all(_equal(copy, source) for copy, source in self._there):
            self._seen = now
        return now != self._seen

    def follow(self) -> None:
        """Take over what the user has written; nobody may compute with the stages meanwhile.

        Raises RuntimeError, naming the buffer, if what replaces one has another shape or type.
        """
        with torch.no_grad():
            for name, home, key, known in self._known:
                new = home.get(key)
                if new is known:
                    continue
                if not isinstance(new, Tensor) or (new.shape, new.dtype) != (known.shape, known.dtype):
                    found = f"{new.dtype} {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
                    raise RuntimeError(
                        f"buffer {name!r} of the model, {known.dtype} {tuple(known.shape)}, was replaced by another "
                        f"one, {found}, after the pipeline was built; write values of its shape into it, or build a "
                        "new Pipeline"
                    )
                known.copy_(new)
                home[key] = known
            for copy, source in self._there:
                copy.copy_(source)
        self._seen = None

    @property
    def _there(self) -> list[tuple[Tensor, Tensor]]:
        """The copies whose sources are in this process."""
        return [(copy, source) for copy, source in self._copies if _is_there(source)]


def _is_there(buffer: Tensor) -> bool:
    if buffer.is_meta or buffer.layout is not torch.strided:
        return not buffer.is_meta
    return bool(buffer.untyped_storage().size()) or not buffer.numel()


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) if a.layout is torch.strided else torch.equal(a.to_dense(), b.to_dense())


def _home(modules: Mapping[str, nn.Module], name: str) -> Home:
    path, _, key = name.rpartition(".")
    return modules[path]._buffers, key
