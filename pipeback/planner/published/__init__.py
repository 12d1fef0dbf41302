"""The published: measurements of papers and projects, as tables, each with its source in its first lines.

`pipeback plan fit` fits the constants on some of them (`validation.FITTED`); all others are compared with alone.
"""

from __future__ import annotations

import csv
from importlib.resources import files


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a table, by the names of its columns."""
    return list(csv.DictReader(line for line in _lines(name) if not line.startswith("#")))


def source(name: str) -> str:
    """Where a table comes from."""
    return " ".join(line.lstrip("# ") for line in _lines(name) if line.startswith("#"))


def _lines(name: str) -> list[str]:
    return files(__name__).joinpath(f"{name}.csv").read_text("utf-8").splitlines()
