"""What is said where ranks differ, or none can do what is asked, and the same with what the message says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import pipeback
from tests.laws.cases import data, network, pipeline
from tests.processes.crew import Crew

TIMEOUT = 10.0
Do = Callable[[int], Any]  # by one rank


@pytest.fixture(scope="module")
def crew():
    with Crew(2) as crew:
        yield crew


def pushed(pipe: Any, between: Callable[[], Any] = lambda: None) -> None:
    for n, (x, y) in enumerate(data(12)):
        if n == 6:
            between()
        pipe.push(x, y)
    pipe.drain()
    pipe.close()


def clipped(rank: int, some: bool) -> None:
    norm = None if some and rank else 1.0
    pushed(pipeline(network(4), "pb", workers=pipeback.Processes(timeout=TIMEOUT), clip_norm=norm))


def replicated(rank: int, some: bool) -> None:
    pushed(pipeline(network(4), "pb", workers=pipeback.Processes(timeout=TIMEOUT), replicas=3 if some else 2))


def threaded(rank: int, some: bool) -> None:
    pushed(pipeline(network(4), "pb", workers=2 if some else pipeback.Processes(timeout=TIMEOUT)))


def narrow(rank: int, some: bool) -> None:
    pushed(pipeline(network(1 if some else 2), "pb", workers=pipeback.Processes(timeout=TIMEOUT)))


def drained(rank: int, some: bool) -> None:
    pipe = pipeline(network(4), "pb", workers=pipeback.Processes(timeout=TIMEOUT))
    pushed(pipe, lambda: None if some and not rank else pipe.drain())


def rated(rank: int, some: bool) -> None:
    pipe = pipeline(network(4), "pb", workers=pipeback.Processes(timeout=TIMEOUT))

    def halve() -> None:
        for optimizer in pipe.optimizers if not (some and rank) else ():
            optimizer.param_groups[0]["lr"] *= 0.5

    pushed(pipe, halve)


def other_batch(rank: int, some: bool) -> None:
    pipe = pipeline(network(4), "pb", workers=pipeback.Processes(timeout=TIMEOUT))
    for x, y in data(12, seed=2 if some and rank else 1):
        pipe.push(x, y)
    pipe.close()


def fewer(rank: int, some: bool) -> None:
    """One rank builds no pipeline at all."""
    if not (some and rank):
        pushed(pipeline(network(4), "pb", workers=pipeback.Processes(timeout=2.0 if some else TIMEOUT)))


ROWS: dict[Callable[[int, bool], None], str] = {
    clipped: "rank 1 has clip_norm None, rank 0 has 1.0; start the same script with the same options",
    replicated: "replicas=3 does not divide the 2 ranks; start a multiple of it",
    threaded: "workers=2: over processes each rank is a worker; leave workers out",
    narrow: "2 ranks share a pipeline but the model has 1 stage; start at most one rank per stage, or give replicas=",
    drained: r"every rank must call drain\(\) at the same micro-batch",
    rated: r"had different rates \(lr\); set them in pipe.optimizers, or step schedulers, alike on every rank",
    other_batch: "every rank must push the same data, in the same order",
    fewer: r"rank 1 did not come to build the pipeline within 2 s; every rank must call Pipeline\(...\)",
}


def told(rank: int, do: Callable[[int, bool], None], some: bool) -> str:
    try:
        do(rank, some)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("do", ROWS, ids=lambda do: do.__name__)
def test_the_cure_of_ranks_works(crew, do):
    found = crew.ranks(2).run(told, do, True, each=range(2))
    crew.again()
    assert any(re.search(ROWS[do], text) for text in found), found
    assert crew.ranks(2).run(told, do, False, each=range(2)) == ["", ""]
    crew.again()
