"""Byte sizes: reads sizes as people write them, "1.5 GB" or "512 MiB", and writes them so."""

from __future__ import annotations

import re

UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_POWERS = {"": 1, "B": 1} | {
    unit: base**n
    for n, letter in enumerate("KMGTP", 1)
    for unit, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024), (letter, 1024))
}


def parsed(name: str, size: int | float | str | None) -> int | None:
    """Return bytes from a number or from text with a decimal unit (kB, MB, GB, TB) or a binary one (KiB, MiB; K, M).

    name: the name of the option, for the error. None stays None. Raises ValueError or TypeError, which says how a size
    is written.

    >>> parsed("device_memory", "1.5 GB"), parsed("device_memory", "512 MiB")
    (1500000000, 536870912)
    """
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise TypeError(f'{name} must be bytes or a text such as "1.5 GB", not {type(size).__name__}')
    if isinstance(size, str):
        found = re.fullmatch(r"\s*([0-9_]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*", size)
        if found is None or found[2].upper() not in _POWERS:
            raise ValueError(
                f"{name}={size!r} is no size; write bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB: "
                '"1.5 GB"'
            )
        number: float = float(found[1].replace("_", "")) * _POWERS[found[2].upper()]
    else:
        number = size
    if not 1 <= number < float("inf"):
        raise ValueError(f"{name} must be at least 1 byte, but is {size!r}; None: no limit")
    return int(number)


def written(size: float) -> str:
    """Return a number of bytes as text, with three digits and a binary unit.

    >>> written(1500), written(3 * 1024**3), written(17), written(1023.9 * 1024)
    ('1.46 KiB', '3.00 GiB', '17 B', '1.00 MiB')
    """
    if size < 999.5:
        return f"{size:.0f} B"
    power = 1
    while size / 1024**power >= 999.5 and power < len(UNITS):
        power += 1
    size, unit = size / 1024**power, UNITS[power - 1]
    return f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"
