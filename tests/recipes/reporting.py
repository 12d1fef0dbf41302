"""Runs of several seeds, as a report gathers them."""

import pytest

pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

from pipeback.recipes.reports.runs import gather
from pipeback.recipes.reports.sources import Run
from tests.recipes.synthetic import facts, rows


def runs(*groups):
    """(method, values of every seed) -> methods"""
    return gather([Run(facts(name, seed), rows(values), {}, f"{name}{seed}")
                   for name, seeds in groups for seed, values in enumerate(seeds)])  # fmt: skip
