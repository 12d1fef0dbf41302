"""Extras: what to install where a package is missing that a command needs."""

from __future__ import annotations

import traceback

EXTRAS = {"torchvision": "models", "transformers": "models", "wandb": "wandb", "wandb_workspaces": "wandb"}


def needs(who: str, error: ModuleNotFoundError, also: str = "") -> str:
    """The sentence that names the package and the extras that have it. also: an extra that `who` needs anyway."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package, also)
    return f"{who} needs {package}: pip install 'pipeback[{f'recipes,{extra}' if extra else 'recipes'}]'"


def here(error: ModuleNotFoundError) -> bool:
    """Whether it is pipeback that imports what is missing, and not a user's module or another package."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("pipeback.")
