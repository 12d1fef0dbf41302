"""Method entries: the methods that a comparison or a sweep is asked for, as entries of the group method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore

from pipeback.recipes.command import literal


def labels_of(asked: Any, every: Sequence[str], does: str) -> list[str]:
    """Return the names of entries, each once. asked: what methods= says; None or "all": `every`. does: what nothing is
    done to, for the error.
    """
    if asked is None or asked == "all":
        return list(every)
    if isinstance(asked, Mapping) and asked:
        _parts(asked)
        raise ValueError(
            f"methods={typed(asked)} must be a list, in brackets; write 'methods=[{typed(asked)}]' with the quotes"
        )
    if isinstance(asked, str):
        raise ValueError(f"methods={asked} must be a list, in brackets; write methods=[{typed(asked)}]")
    if not asked:
        raise ValueError(f"methods=[] {does} nothing; write methods=all, or name some: methods=[sgd,pb]")
    if not isinstance(asked, list):
        raise ValueError(f"methods={asked} names none; write methods=all, or name some: methods=[sgd,pb]")
    return list(dict.fromkeys(_entry(name, options) for each in asked for name, options in _parts(each)))


def _parts(method: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """The names in an element of methods=, each with its options."""
    if isinstance(method, str):
        return [(method, {})]
    if not isinstance(method, Mapping) or not method or not all(isinstance(each, Mapping) for each in method.values()):
        raise ValueError(f"methods: {method!r} is neither a name nor {{name: {{option: value}}}}")
    return [(str(name), options) for name, options in method.items()]


def _entry(name: str, options: Mapping[str, Any]) -> str:
    """Return the name of an entry; for pb with {slack: 1} an entry pb-slack1 is made."""
    if not options:
        return name
    label = "-".join([name, *(f"{k}{v}" for k, v in options.items())])
    ConfigStore.instance().store(group="method", name=label, node={"defaults": [name, "_self_"], **options})
    return label


def typed(value: Any) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{typed(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(typed, value)) + "]"
    if value is None:
        return "null"
    return literal(value) if isinstance(value, str) else str(value)
