"""Fits the constants of the planner's cost model on vTrain's measured runs, and on nobody else's.

    pipeback plan fit                      # prints the entry of constants.toml, and the errors of all tables
    pipeback plan fit crossed=true         # and how well each of vTrain's models is predicted from the others
    pipeback plan fit table=foundry_h100   # on every second run of another published table
    pipeback plan fit rows=mine.csv        # on runs of your own (columns: pipeback/planner/measured_runs.py)

Each constant has a prior: a middle that is physically expected, and how far off it may be, as the deviation of its
logarithm. What is minimised is the sum of squares of logarithmic errors over 5 % (those of outliers count linearly) and
of deviations from the priors. So constants that the runs do not identify stay near what is expected.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeback.planner import catalogue
from pipeback.planner.constants import NUMBERS, UNITS, Constants
from pipeback.planner.measured_runs import TABLES, MeasuredRun, errors, measured_runs, run

PRIORS = {  # middle, deviation of its logarithm
    "efficiency": (0.75, 0.15),
    "small_tokens": (150.0, 0.7),  # peak over memory speed: where reading weights takes as long as the product
    "small_width": (150.0, 0.7),
    "fused_attention": (0.6, 0.3),
    "activation_moves": (1.5, 0.4),  # written once, and half of them read by another kernel
    "score_moves": (4.0, 0.4),  # scaling, mask, softmax and dropout as kernels of their own
    "launch": (1.2e-4, 0.5),
    "launch_reduction": (1e-4, 1.0),
    "scale_up": (0.7, 0.2),
    "scale_out": (0.7, 0.3),
    "latency": (40e-6, 1.0),
    "message": (1.0, 0.4),
    "message_latency": (200e-6, 1.0),
    "reduce": (0.6, 0.3),
    "optimizer": (28.0, 0.1),
    "step": (0.02, 1.0),
}
SHARE = 0.05  # an error of this size counts as much as a constant that is one deviation off
SINGLE = 0.3  # weight of a run on a single node: there are many, and they are small
EVERY = 10  # of the runs on a single node, every tenth is fitted on


def main(words: list[str], console: Console) -> None:
    """Fit and print. Raises ValueError for a mistake."""
    options = dict(word.partition("=")[::2] for word in words)
    for name in set(options) - {"rows", "table", "crossed"}:
        raise ValueError(f"{name!r} is no option of fit; there are rows=, table= and crossed=true")
    runs, weights, told = data(options)
    found = fitted(runs, weights)
    console.print(entry(found, told), highlight=False, markup=False, soft_wrap=True)
    for table in TABLES:
        off = errors(some := measured_runs(table), [one.predicted(found) for one in some])
        console.print(f"{table:<18} mean error {off.mean:6.1%}  worst {off.worst:6.1%}  bias {off.bias:+6.1%}")
    for name in crossed(runs, weights) if options.get("crossed") == "true" else ():
        rest = [n for n, one in enumerate(runs) if one.name != name]
        without = fitted([runs[n] for n in rest], [weights[n] for n in rest])
        mine = [one for one in runs if one.name == name]
        off = errors(mine, [one.predicted(without) for one in mine])
        console.print(f"{name:<18} left out: mean error {off.mean:6.1%}  choosing costs {off.choices[name]:5.1%}")


def crossed(runs: Sequence[MeasuredRun], weights: Sequence[float]) -> list[str]:
    """The models that are left out of the fit in turn."""
    return list(dict.fromkeys(one.name for one, weight in zip(runs, weights, strict=True) if weight == 1.0))


def data(options: dict[str, str]) -> tuple[list[MeasuredRun], list[float], str]:
    """The runs to fit on, their weights, and what they are."""
    if rows := options.get("rows"):
        runs = own(rows)
        return runs, [1.0] * len(runs), f"{len(runs)} runs of {Path(rows).name}"
    if table := options.get("table"):
        every = measured_runs(catalogue.key("table", table, TABLES))
        return every[::2], [1.0] * len(every[::2]), f"every second of {len(every)} runs of {table}"
    many, single = measured_runs("vtrain_multi"), measured_runs("vtrain_single")[::EVERY]
    told = f"{len(many)} runs of vTrain's ground_truth_multi and {len(single)} of its ground_truth_single"
    return [*many, *single], [1.0] * len(many) + [SINGLE] * len(single), told


def own(rows: str) -> list[MeasuredRun]:
    """The runs in a file of the user's own. Raises ValueError, with the option, where it cannot be opened."""
    given = {"device": "A100", "network": 25}
    try:
        lines = Path(rows).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ValueError(f"rows={rows}: {error.strerror}; give a CSV file of measured runs") from error
    return [run(row, given) for row in csv.DictReader(line for line in lines if not line.startswith("#"))]


def fitted(runs: Sequence[MeasuredRun], weights: Sequence[float]) -> Constants:
    """The constants that fit these runs best."""
    import numpy as np
    from scipy.optimize import least_squares

    def made(place: Any) -> Constants:
        values: dict[str, Any] = {
            n: PRIORS[n][0] * math.exp(float(z) * PRIORS[n][1]) for n, z in zip(NUMBERS, place, strict=True)
        }
        return Constants(**values)

    def residuals(place: Any) -> Any:
        guess = made(place)
        off = np.array([math.log(one.predicted(guess) / one.seconds) for one in runs]) / SHARE
        bent = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))  # its square grows linearly for outliers
        return np.concatenate([bent * np.asarray(weights), place])

    return made(least_squares(residuals, np.zeros(len(NUMBERS)), diff_step=1e-3, max_nfev=40).x)


def entry(found: Constants, told: str, name: str = "default") -> str:
    """The entry of the catalogue."""
    lines = [f"[constants.{name}]", f'fitted_on = "{told}, by pipeback plan fit"']
    lines += [f"{number} = {getattr(found, number):.4g}  # {UNITS.get(number, 'share')}" for number in NUMBERS]
    return "\n".join([*lines, ""])
