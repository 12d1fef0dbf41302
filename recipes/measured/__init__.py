"""Measured: CSV files of the results that stand in the documentation, by their names: of sweeps, and of stability."""

from __future__ import annotations

import importlib.resources


def names() -> list[str]:
    """The names of the files that came with the package."""
    files = importlib.resources.files("pipeback.recipes.measured").iterdir()
    return sorted(file.name.removesuffix(".csv") for file in files if file.name.endswith(".csv"))


def text(name: str) -> str:
    """The text of a file."""
    return importlib.resources.files("pipeback.recipes.measured").joinpath(f"{name}.csv").read_text("utf-8")
