"""Places: folders of this machine in the options of runs, and how a file says them without where they lie."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

PLACE = re.compile(r"(?<![\w.-])~?/(?:[^\s,:\[\]{}/]+/)*([^\s,:\[\]{}/]+)/?")  # a folder of this machine, and its name


def shortened(text: str, parts: int = 1) -> str:
    """The text with the last parts of each folder of this machine: /home/me/data -> data."""
    return PLACE.sub(lambda found: "/".join(found[0].strip("~/").split("/")[-parts:]), text)


def parts_of(texts: Iterable[str]) -> int:
    """How many last parts of folders tell these texts apart, as far as folders do: at least one."""
    different = set(texts)
    depth = max((found[0].count("/") for text in different for found in PLACE.finditer(text)), default=1)
    told = {parts: len({shortened(text, parts) for text in different}) for parts in range(1, max(depth, 1) + 1)}
    return max(told, key=lambda parts: (told[parts], -parts))


def named(texts: Sequence[str]) -> dict[str, str]:
    """What each text is called in a file; one that folders do not tell from another is called as it is."""
    parts = parts_of(texts)
    short = {text: shortened(text, parts) for text in texts}
    called = list(short.values())
    return {text: name if called.count(name) == 1 else text for text, name in short.items()}


def spellings(text: str) -> set[str]:
    """Whatever a text may be called in a file, beside whatever other texts."""
    depth = max((found[0].count("/") for found in PLACE.finditer(text)), default=0)
    return {text, *(shortened(text, parts) for parts in range(1, depth + 1))}


def here(text: str) -> bool:
    """Whether each folder of the text is one of this machine, so that another path is another folder."""
    return all(Path(found[0]).expanduser().exists() for found in PLACE.finditer(text))
