"""Pairs: reads pairs of sentences, and splits them so that no validation sentence is trained on."""

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
    """Return pairs for training and for validation, each in the order of a hash, so that any first part is random.

    Pairs whose source (by another hash) falls into the share `held_out` are for validation. Their sentences, in either
    language and with any punctuation, are in no training pair. Pairs with a sentence above max_length are left out.
    """
    parts: tuple[list[_Row], list[_Row]] = ([], [])
    for pair in pairs:
        source, target = tokens(pair.source), tokens(pair.target)
        if max(len(source), len(target)) <= max_length:
            row = _Row(number("\t".join(pair)), pair, plain(target))
            parts[number(plain(source)) < held_out].append(row)
    said = {row.second for row in parts[1]}  # a target may have several sources, for training and for validation
    training = [row.pair for row in sorted(parts[0]) if row.second not in said]
    return training, [row.pair for row in sorted(parts[1])]


def tokens(sentence: str) -> list[str]:
    """Return words and punctuation marks, in lower case."""
    return WORD.findall(sentence.lower())


def plain(words: Iterable[str]) -> str:
    """Return the words without punctuation: the same text for "Go!" and "go"."""
    return " ".join(word for word in words if word[0].isalnum())


def number(text: str) -> float:
    """Return a number from 0 to 1 that depends on the text alone."""
    return zlib.crc32(text.encode()) / 2**32


def common(sentences: Iterable[str], count: int) -> list[str]:
    """Return the `count` most frequent words; equally frequent ones in alphabetical order."""
    counts = Counter(word for sentence in sentences for word in tokens(sentence))
    return sorted(counts, key=lambda word: (-counts[word], word))[:count]


def read(file: Path) -> Iterator[Pair]:
    """Yield the first two columns of a tab-separated file, or of the first such file in a .zip."""
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
    """Yield 600 pairs of sentences from a small grammar."""
    who = ["I|ich", "you|du", "Tom|Tom", "Mary|Maria", "the teacher|der Lehrer", "a child|ein Kind"]
    does = ["saw|sah", "found|fand", "bought|kaufte", "forgot|vergaß", "drew|zeichnete"]
    which = ["the old|das alte", "the new|das neue", "the small|das kleine", "a red|ein rotes"]
    what = ["book|Buch", "house|Haus", "picture|Bild", "boat|Boot", "wheel|Rad"]
    for parts in product(who, does, which, what):
        first, second = (" ".join(part.split("|")[side] for part in parts) for side in (0, 1))
        yield Pair(f"{first[0].upper()}{first[1:]}.", f"{second[0].upper()}{second[1:]}.")
