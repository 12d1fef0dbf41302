"""Files: finds the files of a data set, and raises an error that says where to get them."""

from __future__ import annotations

from pathlib import Path


def find(root: str, names: tuple[str, ...], origin: str) -> Path:
    """Return the first of these files in the folder `root`, or one folder below it. origin: where to get it."""
    folder = Path(root).expanduser()
    for name in names:
        for file in [folder / name, *sorted(folder.glob(f"*/{name}"))]:
            if file.is_file():
                return file
    raise ValueError(f"data.root={root}: there is no {' or '.join(names)} in this folder; {origin}")


def given(file: str, origin: str) -> Path:
    """Return the file that the option data.file names. origin: where to get it."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"data.file={file}: there is no such file; {origin}")
    return path
