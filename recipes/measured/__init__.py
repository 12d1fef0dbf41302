"""Measured: results.csv of sweeps whose results stand in the documentation, a file each, by the name of the sweep."""

from __future__ import annotations

import importlib.resources


def names() -> list[str]:
    """The names of the sweeps whose files came with the package."""
    files = importlib.resources.files("pipeback.recipes.measured").iterdir()
    return sorted(file.name.removesuffix(".csv") for file in files if file.name.endswith(".csv"))


def text(name: str) -> str:
    """The file of a sweep."""
    return importlib.resources.files("pipeback.recipes.measured").joinpath(f"{name}.csv").read_text("utf-8")
