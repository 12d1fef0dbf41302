"""Quantities: numbers with units as people write them: 50 GB/s, 400 Gb/s, 300B tokens, 30d; and as tables show them."""

from __future__ import annotations

import re
from math import inf

from pipeback import byte_sizes

_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_TIMES = {"S": 1.0, "MIN": 60.0, "H": 3600.0, "D": 86_400.0, "W": 7 * 86_400.0, "Y": 365.25 * 86_400.0}
_NUMBER = r"\s*([0-9_]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*"


def speed(name: str, text: str | float) -> float:
    """Bytes per second. name: of the option, for the error.

    >>> speed("link", "50 GB/s"), speed("link", "400Gb/s"), speed("link", 1e9)
    (50000000000.0, 50000000000.0, 1000000000.0)
    """
    number = 0.0 if isinstance(text, str) else float(text)
    if isinstance(text, str) and (found := re.fullmatch(_NUMBER + r"([kKMGT]?)(b|B)(?:/s|ps)", text)) is not None:
        number = float(found[1].replace("_", "")) * _COUNTS[found[2].upper()] / (8 if found[3] == "b" else 1)
    if not 0 < number < inf:
        raise ValueError(
            f'{name}={text!r} is no speed above 0; write bytes a second, such as "50 GB/s", or bits: "400 Gb/s"'
        )
    return number


def size(name: str, text: str | float) -> float:
    """Bytes, as in `byte_sizes`: "80 GB", "512 MiB"."""
    return float(byte_sizes.parsed(name, text) or 0)


def count(name: str, text: str | float) -> float:
    """
    >>> count("tokens", "300B"), count("batch", "2M"), count("batch", 1536)
    (300000000000.0, 2000000.0, 1536.0)
    """
    number = -1.0 if isinstance(text, str) else float(text)
    if isinstance(text, str) and (found := re.fullmatch(_NUMBER + r"([a-zA-Z]?)", text)) is not None:
        number = float(found[1].replace("_", "")) * _COUNTS.get(found[2].upper(), -1.0)
    if not 0 < number < inf:
        raise ValueError(f"{name}={text!r} is no number above 0; write for example {name}=300B, 2M or 1536")
    return number


def cost(name: str, value: str | float) -> float:
    """Of a device per hour.

    >>> cost("price", 2), cost("price", "2.5")
    (2.0, 2.5)
    """
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < inf:
        raise ValueError(f"{name}={value!r} is no cost; write a number of at least 0, for example {name}=2")
    return number


def whole(name: str, text: str | int, least: int = 1) -> int:
    """A whole number."""
    if isinstance(text, bool) or not re.fullmatch(r"\s*\d+\s*", str(text)) or int(text) < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {text!r}")
    return int(text)


def duration(name: str, text: str | float) -> float:
    """Seconds.

    >>> duration("in", "30d"), duration("in", "12 h")
    (2592000.0, 43200.0)
    """
    if not isinstance(text, str):
        return float(text)
    found = re.fullmatch(_NUMBER + r"([a-zA-Z]+)", text)
    if found is None or found[2].upper() not in _TIMES:
        raise ValueError(f"{name}={text!r} is no time; write for example {name}=30d, 12h or 2w")
    return float(found[1].replace("_", "")) * _TIMES[found[2].upper()]


def days(seconds: float) -> str:
    """A time as a table of plans shows it.

    >>> days(3 * 86_400 + 7000), days(5400), days(400 * 86_400), days(42)
    ('3.08 days', '1.50 hours', '400 days', '42.0 s')
    """
    for unit, length in (("days", 86_400.0), ("hours", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{_three(seconds / length)} {unit}"
    return f"{_three(seconds)} s"


def large(value: float) -> str:
    """A count in three digits: 1.30B.

    >>> large(1.3e9), large(300e9), large(2_000_000), large(512)
    ('1.30B', '300B', '2.00M', '512')
    """
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= 0.9995 * scale:
            return f"{_three(value / scale)}{unit}"
    return f"{value:.0f}"


def _three(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def gigabytes(size: float) -> str:
    """A size in GB of 10⁹ bytes, as data sheets have them.

    >>> gigabytes(63.6e9), gigabytes(2.4e15), gigabytes(8.19e9)
    ('63.6', '2400000', '8.19')
    """
    return _three(size / 1e9)
