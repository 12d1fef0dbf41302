"""Pairs of sentences: reading them, and parting them so that what validates was never trained on."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


class Pair(NamedTuple):
    source: str
    target: str


class _Row(NamedTuple):
    order: float
    pair: Pair
    second: str  # plain


def split(pairs: Iterable[Pair], held_out: float, max_length: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs for training and for validation, each in the order of a hash: any first part of them is a fair choice.

    Those whose source (by another hash) is in the share `held_out` validate. What one of them says in either language
    is in no training pair, however it is written there. Pairs with a sentence above max_length are left out.
    """
    parts: tuple[list[_Row], list[_Row]] = ([], [])
    for pair in pairs:
        source, target = tokens(pair.source), tokens(pair.target)
        if max(len(source), len(target)) <= max_length:
            row = _Row(number("\t".join(pair)), pair, plain(target))
            parts[number(plain(source)) < held_out].append(row)
    said = {row.second for row in parts[1]}  # one target may belong to several sources, on both sides
    training = [row.pair for row in sorted(parts[0]) if row.second not in said]
    return training, [row.pair for row in sorted(parts[1])]


def tokens(sentence: str) -> list[str]:
    """Words and signs, in lower case."""
    return WORD.findall(sentence.lower())


def plain(words: Iterable[str]) -> str:
    """What is said, without signs: the same for "Go!" and "go"."""
    return " ".join(word for word in words if word[0].isalnum())


def number(text: str) -> float:
    """From 0 to 1, depending on the text alone."""
    return zlib.crc32(text.encode()) / 2**32


def common(sentences: Iterable[str], count: int) -> list[str]:
    """The `count` most frequent words; equally frequent ones in the order of the alphabet."""
    counts = Counter(word for sentence in sentences for word in tokens(sentence))
    return sorted(counts, key=lambda word: (-counts[word], word))[:count]


def read(file: Path) -> Iterator[Pair]:
    """The first two columns of a tab-separated file, or of the first such file in a .zip."""
    for row, line in enumerate(_lines(file), 1):
        columns = line.split("\t")
        if len(columns) < 2:
            raise ValueError(f"data: line {row} of {file} has no tab; two sentences with a tab between are needed")
        yield Pair(columns[0], columns[1])


def _lines(file: Path) -> list[str]:
    if file.suffix != ".zip":
        return file.read_text(encoding="utf-8").splitlines()
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith((".txt", ".tsv")) and not name.startswith("_")]
        if not names:
            raise ValueError(f"data: {file} holds no .txt or .tsv file with sentence pairs")
        return archive.read(names[0]).decode("utf-8").splitlines()


def generated() -> Iterator[Pair]:
    """600 sentences of a small grammar."""
    who = ["I|ich", "you|du", "Tom|Tom", "Mary|Maria", "the teacher|der Lehrer", "a child|ein Kind"]
    does = ["saw|sah", "found|fand", "bought|kaufte", "forgot|vergaß", "drew|zeichnete"]
    which = ["the old|das alte", "the new|das neue", "the small|das kleine", "a red|ein rotes"]
    what = ["book|Buch", "house|Haus", "picture|Bild", "boat|Boot", "wheel|Rad"]
    for parts in product(who, does, which, what):
        first, second = (" ".join(part.split("|")[side] for part in parts) for side in (0, 1))
        yield Pair(f"{first[0].upper()}{first[1:]}.", f"{second[0].upper()}{second[1:]}.")
