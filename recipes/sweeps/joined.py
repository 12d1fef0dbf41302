"""Joined: several sweeps of one experiment as one, each run with the commit at which it was made.

A long sweep may end at another commit than the one at which it began. Its runs stand side by side if the sweeps vary
the same options, no run is there twice, and their slow-downs are related to the same reference at the same rate.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeback.recipes.sweeps.summary import settings
from pipeback.recipes.sweeps.table import Results, Row, caption, once, reference_of


def joined(sweeps: Mapping[str, Results]) -> Results:
    """The sweeps as one. sweeps: by name. Raises ValueError, naming two of them, where they cannot be compared."""
    (first, found), *others = sweeps.items()
    if not others:
        return found
    seen: dict[object, str] = {}
    for name, sweep in sweeps.items():
        _must_agree(first, found, name, sweep)
        for row in sweep.rows:
            other = seen.setdefault((row.method, *row.options.items(), row.seed), name)
            if other != name:
                raise ValueError(f"{other} and {name} both have the run {_told(row)}; leave it out of one of them")
    facts = {key: once(sweep.facts.get(key) for sweep in sweeps.values()) for key in found.facts}
    notes = [*dict.fromkeys(note for sweep in sweeps.values() for note in sweep.notes)]
    rows = [
        row._replace(commit=row.commit or sweep.facts.get("commit", ""))
        for sweep in sweeps.values()
        for row in sweep.rows
    ]
    command = "; ".join(dict.fromkeys(sweep.command for sweep in sweeps.values()))
    return Results(command, found.experiment, facts, notes, rows)


def _must_agree(first: str, found: Results, name: str, sweep: Results) -> None:
    """Raise ValueError if the second sweep is not to be compared with the first."""
    if sweep.experiment != found.experiment:
        raise ValueError(f"{first} is of {found.experiment}, {name} of {sweep.experiment}; one alone is joined")
    if (mine := _varied(found)) != (varied := _varied(sweep)):
        raise ValueError(
            f"{first} varies {_words(mine)}, {name} varies {_words(varied)}; give both sweeps the same vary= and rates="
        )
    reference = reference_of(found)
    if (other := reference_of(sweep)) != reference:
        raise ValueError(
            f"slow-downs are over those of {reference} in {first}, of {other} in {name}; give one reference="
        )
    rates = _reference_rates(found)
    for options, rate in _reference_rates(sweep).items():
        if (known := rates.get(options, rate)) != rate:
            of = f" at {caption(dict(options))}" if options else ""
            raise ValueError(
                f"the best rate of {reference}{of} is {known} in {first} and {rate} in {name}, so that their "
                f"slow-downs are over different runs; sweep {name} again with rates={{{reference}:[{known}]}}"
            )


def _reference_rates(found: Results) -> dict[tuple[tuple[str, str], ...], str]:
    """The best rate of the reference, by the other options."""
    return {
        tuple(setting.options.items()): tried.rate
        for setting in settings(found) for tried in setting.tried if tried.method == reference_of(found) and tried.rated
    }  # fmt: skip


def _varied(found: Results) -> list[str]:
    return list(dict.fromkeys(key for row in found.rows for key in row.options))


def _words(keys: list[str]) -> str:
    return ", ".join(keys) or "nothing"


def _told(row: Row) -> str:
    return " ".join(filter(None, [row.method, caption(row.options), f"seed {row.seed}"]))
