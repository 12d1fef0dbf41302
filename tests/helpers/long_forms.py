"""Options under one name each, as tables of tests and drawn programs have them, put where Pipeline takes them."""

from dataclasses import fields
from typing import Any

from pipeback.pipeline.arguments import LONG

NAMES = {"clip_value": "value"}
PLACE = {field.name: argument for argument, kind in LONG.items() for field in fields(kind) if field.name not in LONG}


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """{"store": "host", "sparsity": "set"} -> {"store": Streaming("host", sparsity="set")}; others stay as they are."""
    found = {name: value for name, value in options.items() if NAMES.get(name, name) not in PLACE}
    for name, value in options.items():
        argument = PLACE.get(NAMES.get(name, name))
        if argument is not None:
            kind = LONG[argument]
            before = found.get(argument)
            if not isinstance(before, kind):
                before = kind() if before is None else kind(before)
            found[argument] = kind(**{**vars(before), NAMES.get(name, name): value})
    return found
