"""Pipelines that were trained and saved, and what is read again from their folders."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from pipeback.checkpoint import pipeline_state
from pipeback.tensors.layout import form_of
from tests.helpers.processes import in_a_new_process
from tests.laws.cases import data, network, pipeline

ROOT = Path(__file__).parents[2]


def process(function, folder, *before, **more):
    """What one of `checkpoint_faults` returns in a process of its own. before: a command that the process runs in."""
    if not before:
        return in_a_new_process(partial(function, folder, **more))
    command = [*before, sys.executable, "-m", "tests.helpers.checkpoint_faults", function.__name__, str(folder)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout


def trained(count, method="cerebras", seed=0, **options):
    pipe = pipeline(network(seed=seed), method, **options)
    for x, y in data(count):
        pipe.push(x, y)
    return pipe


def same(a, b):
    """Equal tensors, bit for bit and lying alike."""
    return a.keys() == b.keys() and all(
        form_of(a[k]) == form_of(b[k]) and a[k].numpy().tobytes() == b[k].numpy().tobytes() for k in a
    )


class Held:
    """As much of a pipeline as checkpoints need, holding given tensors."""

    def __init__(self, *stages, ranks=None, mine=None):
        self.stages, self.ranks, self.mine = stages, ranks or SimpleNamespace(**ALONE), mine
        self.loaded = None

    streamed, pushes = False, 0

    @property
    def held(self):
        return [(s, 0) for s in (range(len(self.stages)) if self.mine is None else self.mine)]

    def wait(self):
        pass

    def share(self, take):
        for s, _ in self.held:
            take(SimpleNamespace(index=s, replica=0), self.stages[s])
        return pipeline_state.Share([pipeline_state.StageShare(s, 0, {}, {"seed": s}) for s, _ in self.held], {}, {})

    def plain(self):
        return {"arrived": 5, "groups": {}, "rate": math.nan, "bound": -math.inf}

    def would_hold(self, plain):
        return self.mine

    def load_state_dict(self, loaded):
        self.loaded = loaded


ALONE = dict(several=False, index=0, count=1, replica=0, place=0, gather=lambda value, what: [value])


def names(folder):
    return sorted(path.name for path in folder.iterdir())
