"""How many operations a stage could do in a row is what counting them one after the other finds."""

from hypothesis import given
from hypothesis import strategies as some

from pipeback.schedules.foreseen import Foreseen
from pipeback.schedules.ops import Op

COUNT = some.integers(0, 12)


@some.composite
def programs(draw):
    """Forwards and backwards in the order of the micro-batches, among other operations."""
    found, forwards, backwards = [], draw(COUNT), draw(COUNT)
    for kind in draw(some.lists(some.sampled_from("FFBBIWU"), max_size=30)):
        found.append(Op(kind, forwards if kind == "F" else backwards))
        forwards, backwards = forwards + (kind == "F"), backwards + (kind in "BI")
    return found


def counted(ops, forwards, backwards, most):
    for n, op in enumerate(ops[: most + 1]):
        if (op.kind == "F" and op.mb >= forwards) or (op.kind in "BI" and op.mb >= backwards):
            return n
    return most


@given(programs(), some.data())
def test_a_run_is_what_counting_finds(ops, draws):
    program = Foreseen(iter(ops))
    n = -1
    for n, head in enumerate(program):
        assert head == ops[n]
        for forwards, backwards, most in draws.draw(some.lists(some.tuples(COUNT, COUNT, COUNT), max_size=2)):
            assert program.run(head, forwards, backwards, most) == counted(ops[n:], forwards, backwards, most)
    assert n == len(ops) - 1
