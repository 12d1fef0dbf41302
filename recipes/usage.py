"""Usage: the output of `pipeback <command> --help`, which is the command's docstring and its options."""

from __future__ import annotations

import importlib.resources
import re


def usage(doc: str | None, config: str) -> str:
    """Return the docstring of a recipe, and the top-level options of conf/<config>.yaml with their comments."""
    text = importlib.resources.files("pipeback.conf").joinpath(f"{config}.yaml").read_text("utf-8")
    options = [line for line in text.splitlines() if re.match(r"(?!defaults|hydra)\w+:", line)]
    width = max((len(line.partition("#")[0].rstrip()) for line in options), default=0)
    lines = [f"  {before.rstrip():<{width}}   {after.strip()}".rstrip() for before, _, after in
             (line.partition("#") for line in options)]  # fmt: skip
    return "\n".join([(doc or "").strip(), "", "options, written name=value:", *lines])
