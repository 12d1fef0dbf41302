"""Observes up to which ηλ methods are stable on a quadratic, by momentum and delay, beside theory (stability/).

pipeback bench stability                              # about ten minutes
pipeback bench stability methods=pb,cerebras momenta=0.9 delays=4,16
pipeback bench stability out=stability.csv            # rows that the file holds already are taken over
pipeback results stability.csv out=stability.svg      # the tables, and the picture
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeback.recipes.markdown import table
from pipeback.recipes.output_files import writable
from pipeback.recipes.provenance import command, provenance
from pipeback.recipes.stability import limits
from pipeback.recipes.stability.limits import DELAYS, MOMENTA, Limits, Row
from pipeback.recipes.stability.observed import BUILD
from pipeback.recipes.stability.polynomials import LAWS

MOST = 0.99999  # momentum of which limits are found: a run is as long as its slowest oscillation


def main(repeats: int, methods: str = "", momenta: str = "", delays: str = "", out: str = "") -> None:
    """Observe, print, and write after every row. repeats: nothing varies from one run to the next."""
    chosen = methods.split(",") if methods else list(BUILD)
    unknown = [name for name in chosen if name not in BUILD]
    if unknown:
        sys.exit(f"pipeback bench stability: methods={unknown[0]} is not among {', '.join(BUILD)}")
    rates, updates = checked(chosen, momenta, delays)
    if "pb" not in chosen:
        chosen.insert(0, "pb")  # what the others are related to
    file = Path(out).expanduser() if out else None
    before = known(file) if file else []
    facts = {name: str(value) for name, value in provenance().items() if value is not None}
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(row)
        print(
            f"m {row.momentum:g}  D {row.delay:<3}  {row.method:<10} ηλ < {row.limit:.4g}", file=sys.stderr, flush=True
        )
        if file is not None:
            left = [other for other in before if other[:3] not in {row[:3] for row in rows}]
            limits.save(file, Limits(command(), facts, rows + left))

    limits.measure(rates, [int(d) for d in updates], chosen, tell, before)
    for sheet in limits.sheets(Limits(command(), facts, rows)):
        print(f"\n{sheet.title}\n\n{table(sheet.head, sheet.rows)}\n\n{sheet.notes}")


def checked(methods: Sequence[str], momenta: str, delays: str) -> tuple[list[float], list[float]]:
    """The momenta and the delays. One at which there is nothing to observe ends the command."""
    rates, updates = numbers("momenta", momenta, MOMENTA), numbers("delays", delays, DELAYS)
    if wrong := [m for m in rates if not 0 <= m <= MOST]:
        sys.exit(f"pipeback bench stability: momenta={wrong[0]:g}: a momentum is a number from 0 to {MOST}")
    if wrong := [d for d in updates if not (d >= 0 and d.is_integer())]:
        sys.exit(f"pipeback bench stability: delays={wrong[0]:g}: a delay is a whole number of at least 0")
    predicting = [name for name in methods if name in LAWS and LAWS[name].predict == "velocity"]
    if predicting and 0 in rates:
        rest = ",".join(name for name in BUILD if name not in predicting)
        sys.exit(
            f"pipeback bench stability: momenta=0: {predicting[0]} predicts from the velocity, which there is none of; "
            f"leave 0 out, or give methods={rest}"
        )
    return rates, updates


def known(file: Path) -> list[Row]:
    """The rows that the file of an earlier run holds. One that cannot be written, or has others, ends the command."""
    try:
        writable("out", file)
    except ValueError as error:
        sys.exit(f"pipeback bench stability: {error}")
    if not file.exists():
        return []
    text = file.read_text("utf-8", errors="replace")
    if not limits.holds(text):
        sys.exit(f"pipeback bench stability: out={file} is no file of `pipeback bench stability`; name another")
    return limits.read(text).rows


def numbers(name: str, words: str, otherwise: Iterable[float]) -> list[float]:
    try:
        return [float(word) for word in words.split(",")] if words else [float(n) for n in otherwise]
    except ValueError:
        sys.exit(
            f"pipeback bench stability: {name}={words}: no numbers; write for example "
            f"{name}={','.join(f'{n:g}' for n in otherwise)}"
        )
