"""Job folders: in a sweep of Hydra (-m) over any options, every job is a run with a folder of its own."""

from __future__ import annotations

from hydra.core.override_parser.overrides_parser import OverridesParser

TOLD = ("method", "seed", "experiment")  # these are in the default folder, as label, seed and name
GROUPS = ("data", "model", "task", "optimizer", "trainer", "logger", "callbacks")


def folder_for_each(words: list[str]) -> list[str]:
    """Return the command line with an `out` that differs between the jobs, if method and seed do not."""
    if not {"-m", "--multirun"} & set(words):
        return words
    given = [word for word in words if "=" in word and not word.startswith("-")]
    overrides = OverridesParser.create().parse_overrides(given)
    swept = [override.get_key_element().lstrip("+") for override in overrides if override.is_sweep_override()]
    for override in overrides:
        if override.key_or_group == "out":
            if swept and "out" not in swept and "${" not in str(override.value()):
                raise ValueError(
                    f"out={override.value()} is one folder, but every job of a sweep needs its own: "
                    f"'out={override.value()}/${{label}}-seed${{seed}}'"
                )
            return words
    told = "".join(f"-{key.rpartition('.')[2]}{value_of(key)}" for key in swept if key not in TOLD)
    return [*words, f"out='outputs/train/${{name}}/${{label}}-seed${{seed}}{told}'"] if told else words


def value_of(key: str) -> str:
    return f"${{hydra:runtime.choices.{key}}}" if key in GROUPS else f"${{{key}}}"
