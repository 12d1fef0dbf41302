"""Observes up to which ηλ methods are stable on a quadratic, by momentum and delay, beside theory (stability/).

pipeback bench stability                              # about ten minutes
pipeback bench stability methods=pb,cerebras momenta=0.9 delays=4,16
pipeback bench stability out=stability.csv            # rows that the file holds already are taken over
pipeback results stability.csv out=stability.svg      # the tables, and the picture
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeback.recipes.markdown import table
from pipeback.recipes.provenance import command, provenance
from pipeback.recipes.stability import limits
from pipeback.recipes.stability.limits import DELAYS, MOMENTA, Limits, Row
from pipeback.recipes.stability.observed import BUILD


def main(repeats: int, methods: str = "", momenta: str = "", delays: str = "", out: str = "") -> None:
    """Observe, print, and write after every row. repeats: nothing varies from one run to the next."""
    chosen = methods.split(",") if methods else list(BUILD)
    unknown = [name for name in chosen if name not in BUILD]
    if unknown:
        sys.exit(f"pipeback bench stability: methods={unknown[0]} is not among {', '.join(BUILD)}")
    if "pb" not in chosen:
        chosen.insert(0, "pb")  # what the others are related to
    file = Path(out) if out else None
    before = limits.read(file.read_text("utf-8")).rows if file is not None and file.is_file() else []
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

    limits.measure(_numbers(momenta, MOMENTA), [int(d) for d in _numbers(delays, DELAYS)], chosen, tell, before)
    for sheet in limits.sheets(Limits(command(), facts, rows)):
        print(f"\n{sheet.title}\n\n{table(sheet.head, sheet.rows)}\n\n{sheet.notes}")


def _numbers(words: str, otherwise: tuple[float, ...]) -> list[float]:
    try:
        return [float(word) for word in words.split(",")] if words else list(otherwise)
    except ValueError:
        sys.exit(f"pipeback bench stability: {words!r} are no numbers; write momenta=0.9,0.99 or delays=4,16")
