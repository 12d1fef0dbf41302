"""Counts: a number and what it counts, in the singular or plural, as messages and tables write it."""

from __future__ import annotations


def plural(noun: str, count: float) -> str:
    """The noun as it follows a number.

    >>> plural("micro-batch", 1), plural("micro-batch", 0), plural("pass", 2), plural("epoch", 2)
    ('micro-batch', 'micro-batches', 'passes', 'epochs')
    """
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith(("s", "sh", "tch", "nch")) else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """
    >>> counted(1, "stage"), counted(20_000, "push")
    ('1 stage', '20,000 pushes')
    """
    return f"{count:,} {plural(noun, count)}"
