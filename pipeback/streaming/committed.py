"""Committed: the committed versions in the folder of a disk store; each records where its tensors lie.

    version-00000012.json    for each tensor its file, region and CRC-32; and plain values
    committed                this file exists once a version was committed

One rename gives a version its name. The version before it is removed once all ranks have the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeback.errors import CheckpointError, StoreError
from pipeback.streaming import sealed_file
from pipeback.streaming.pages import Region, read

FORMAT = 1
VERSIONS = "version-*.json"


class CommittedVersions:
    """The versions in one folder. number: how many commits it has seen. newest: the content of the newest version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self.newest: dict[str, Any] | None = None

    @property
    def numbers(self) -> set[int]:
        """Return the numbers of the versions: one, or two if processes were killed while ranks committed."""
        return {int(path.stem.removeprefix("version-")) for path in self.folder.glob(VERSIONS)}

    @property
    def begun(self) -> tuple[bool, bool]:
        """Whether a version was ever committed to the folder, and whether there are pages of stages."""
        return (self.folder / "committed").exists(), any(self.folder.glob("stage-*.pages"))

    def choose(self, number: int) -> None:
        """Resume from this version; remove the others."""
        file = self._file(number)
        with naming(file):
            document = sealed_file.unsealed(file)
        if document["format"] != FORMAT:
            raise StoreError(
                f"{file}: has format {document['format']}, this pipeback reads {FORMAT}; use the version that wrote it"
            )
        self.number, self.newest = number, document
        self.forget()

    def add(self, stages: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Commit a version. stages: for each "stage/replica", where its tensors lie. state: plain values."""
        self.number += 1
        self.newest = {"format": FORMAT, "stages": stages, "state": state}
        file = self._file(self.number)
        with naming(file):
            draft = file.with_suffix(".partial")
            draft.write_bytes(sealed_file.sealed(self.newest))
            sealed_file.sync(draft)
            draft.rename(file)
            (self.folder / "committed").touch()
            sealed_file.sync(self.folder)

    def forget(self) -> None:
        """Remove all versions but the newest."""
        for number in self.numbers - {self.number}:
            self._file(number).unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self.folder / f"version-{number:08d}.json"

    # -- the content of the newest version -----------------------------------------------------------------------

    def pages(self, stage: int, replica: int) -> Path:
        """Return the file that holds the pages of a stage."""
        return self.folder / f"stage-{stage:03d}{f'.replica-{replica}' if replica else ''}.pages"

    def regions(self, stage: int, replica: int) -> dict[str, Region]:
        """Return the regions of a stage's file, by name."""
        return _regions(self._stages.get(f"{stage}/{replica}", {}))

    def lacks(self, stages: Iterable[int], replica: int) -> list[int]:
        """Return those of a replica's stages that the newest version does not hold."""
        return [s for s in stages if f"{s}/{replica}" not in self._stages]

    def state(self) -> dict[str, Any] | None:
        """Return the state for `Pipeline.load_state_dict`, whose tensors are read on access; None without a version."""
        if self.newest is None:
            return None
        plain = self.newest["state"]["plain"]
        return {**self.newest["state"], "stages": [self._stored(s) for s in range(len(plain["stages"]))]}

    def _stored(self, s: int) -> Mapping[str, Tensor]:
        parts: dict[str, tuple[Path, str, Region, list[Any]]] = {}
        for key, described in self._stages.items():
            index, replica = map(int, key.split("/"))
            if index == s:
                prefix = f"replica/{replica}/" if replica else ""
                path, regions = self.pages(index, replica), _regions(described)
                for name, (region, *form) in described["tensors"].items():
                    parts[prefix + name] = path, region, regions[region], form
        return _Stored(parts)

    @property
    def _stages(self) -> Mapping[str, Mapping[str, Any]]:
        return {} if self.newest is None else self.newest["stages"]


class _Stored(Mapping[str, Tensor]):
    """Tensors by name, read on access; the region that was read last is cached."""

    def __init__(self, parts: dict[str, tuple[Path, str, Region, list[Any]]]) -> None:
        self._parts = parts
        self._last: tuple[Any, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        path, label, region, (dtype, shape, stride, offset) = self._parts[name]
        if self._last is None or self._last[0] != (path, label):
            self._last = (path, label), read(path, label, region)
        return self._last[1].view(getattr(torch, dtype)).as_strided(shape, stride, offset)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def processes(root: Path) -> int:
    """Of how many processes the versions are that lie in the folder of a store, or in those of its ranks; 0: none."""
    return 1 if any(root.glob(VERSIONS)) else len({path.parent for path in root.glob(f"rank-*/{VERSIONS}")})


def _regions(described: Mapping[str, Any]) -> dict[str, Region]:
    return {name: Region(*region) for name, region in described.get("regions", {}).items()}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context that turns every error with files into a StoreError that begins with the path."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        raise StoreError(f"{path}: {error}; give a folder that can be written, or restore it from a copy") from error
