"""Counts: a number and what it counts, in the singular or plural, as messages and tables write it."""

from __future__ import annotations

from collections.abc import Sequence

MANY = 4  # numbers of one step from which on a run is cut short


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


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Name several things by their numbers, which rise; runs of equal steps are cut short.

    >>> numbered("stage", [7]), numbered("stage", [2, 4]), numbered("stage", [1, 2, 3, 4, 5])
    ('stage 7', 'stages 2, 4', 'stages 1 … 5')
    >>> numbered("stage", [0, 3, 5, 7, 9, 12, 13])
    'stages 0, 3, 5, … 9, 12, 13'
    """
    found, at = list[str](), 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 0
        end = at + 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if end - at < MANY:
            end = at + 1
            found.append(str(numbers[at]))
        elif step == 1:
            found.append(f"{numbers[at]} … {numbers[end - 1]}")
        else:
            found.append(f"{numbers[at]}, {numbers[at + 1]}, … {numbers[end - 1]}")
        at = end
    return f"{plural(noun, len(numbers))} {', '.join(found)}"
