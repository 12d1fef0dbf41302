"""What is done on one rank only is told on every rank at once."""

import re

import pytest
import torch

import pipeback
from tests.helpers.choice import rare
from tests.laws.cases import data, network, pipeline

BEFORE = 4  # pushes
FORM = "micro-batch 8 is of a new form, or in another mode, for one of worker 1 and worker 0, and not for the other"
CALLS = "worker {0} evaluates when worker {1} is at micro-batch 8; every rank must make the same calls"


def one_side(rank, what, on):
    """What a rank hears: `what` happens on rank `on` (None: on both) amid a training."""
    model = network(4)
    pipe = pipeline(model, "pb", micro_batch_size=2, workers=pipeback.Processes(timeout=600))
    here, autocast = on in (None, rank), False
    batches = data(2 * BEFORE, samples=4)
    try:
        for n, (x, y) in enumerate(batches):
            if n == BEFORE and here:
                if what == "clip":
                    pipe.clip(1e-3)
                if what == "eval":
                    model.eval()
                if what == "evaluate":
                    pipe.evaluate(x)
                if what == "autocast":
                    autocast = True
                if what == "form":
                    x, y = x.repeat(3, 1, 1).transpose(0, 1), y.repeat(3, 1, 1).transpose(0, 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                pipe.push(x, y)
        pipe.drain()
        return "nothing"
    except (RuntimeError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "on", "message"),
    [
        ("clip", 1, "micro-batch 8 was pushed when .*clip\\(\\) had other bounds; .*call clip\\(\\), alike on every"),
        rare("clip", 0, "or clip\\(\\) had other bounds"),
        ("form", 1, FORM), rare("form", 0, FORM), ("autocast", 1, FORM), rare("autocast", 0, FORM), ("eval", 0, FORM),
        rare("eval", 1, FORM), ("evaluate", 0, CALLS.format(0, 1)), ("evaluate", 1, CALLS.format(1, 0)),
    ],
)  # fmt: skip
def test_what_one_rank_does_alone(crew, what, on, message):
    crew = crew.ranks(2)
    try:
        for rank, found in enumerate(crew.run(one_side, what, on, each=range(2))):
            assert re.search(message, found), f"rank {rank}: {found}"
    finally:
        crew.again()


@pytest.mark.parametrize("what", ["clip", "form", "autocast", "eval", "evaluate"])
def test_what_all_ranks_do(crew, what):
    assert crew.ranks(2).run(one_side, what, None, each=range(2)) == ["nothing"] * 2
