"""The end of a `with` block over processes: the pipeline is closed on every rank."""

import time

import pipeback
from tests.laws.cases import data, network, pipeline

TIMEOUT = 5.0  # of the pipelines
WITHIN = TIMEOUT + 12  # generous: the machine may be busy


def in_a_block(rank, raises):
    """Train in a `with` block, in which rank 1 may raise; what came out of it, and after how long."""
    begin = time.monotonic()
    try:
        with pipeline(network(), "pb", workers=pipeback.Processes(timeout=TIMEOUT)) as pipe:
            for n, (x, y) in enumerate(data(20)):
                pipe.push(x, y)
                if raises and rank == 1 and n == 5:
                    raise ArithmeticError("mine")
            pipe.drain()
    except Exception as error:
        return pipe.closed, f"{type(error).__name__}: {error}", time.monotonic() - begin
    return pipe.closed, None, time.monotonic() - begin


def test_a_with_block_ends_on_every_rank(crew):
    assert [found[:2] for found in crew.ranks(2).run(in_a_block, False, each=range(2))] == [(True, None)] * 2
    there, here = crew.run(in_a_block, True, each=range(2))
    crew.again()
    assert here[:2] == (True, "ArithmeticError: mine")
    assert there[0] and there[1].startswith("RankError: rank 1 (")
    assert max(there[2], here[2]) < WITHIN
