"""Finding the files of a data set, and what to say where they are missing."""

from __future__ import annotations

from pathlib import Path


def find(root: str, names: tuple[str, ...], origin: str) -> Path:
    """The first of these files in the folder `root`, or one folder below it."""
    folder = Path(root).expanduser()
    for name in names:
        for file in [folder / name, *sorted(folder.glob(f"*/{name}"))]:
            if file.is_file():
                return file
    raise ValueError(f"data.root={root}: there is no {' or '.join(names)} in this folder; {origin}")


def given(file: str, origin: str) -> Path:
    """The file that the option data.file names."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"data.file={file}: there is no such file; {origin}")
    return path
