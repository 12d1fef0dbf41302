"""Lanes of streaming: what is never the case, closed forms, and a longest path through every constraint."""

from hypothesis import given
from hypothesis import strategies as st

from pipeback.planner.lanes import Visit, stream

SECONDS = st.integers(0, 9)


def step(forwards):
    """A step over so many layers, from (compute, fetch, leave, update) of each."""
    there = [Visit(n, compute, fetch) for n, (compute, fetch, _, _) in enumerate(forwards)]
    back = [Visit(n, 2 * compute, fetch, leave, update) for n, (compute, fetch, leave, update) in enumerate(forwards)]
    return [*there, *back[::-1]]


LAYERS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=5)


def longest(visits, prefetch, steps):
    """The end of every step, from the constraints as a graph: each end is the latest of what it waits for."""
    row = [(k, n, visit) for k in range(steps) for n, visit in enumerate(visits)]
    ends, fetched, left, updated = {}, {}, {}, {}
    ordered = []
    for at, (k, n, visit) in enumerate(row):
        before = ordered[-1] if ordered else None
        stays = before is not None and before[2].layer == visit.layer and before[:2] not in updated
        if not stays:
            earlier = [fetched[o[:2]] for o in ordered if o[:2] in fetched]
            versions = [updated[o[:2]] for o in ordered if o[:2] in updated and o[2].layer == visit.layer]
            freed = [ends[ordered[at - 1 - prefetch][:2]]] if at > prefetch else []
            fetched[k, n] = max([0, *earlier, *versions, *freed]) + visit.fetch
        needs = [ends[before[:2]]] if before else []
        needs += [] if stays else [fetched[k, n]]
        ends[k, n] = max([0, *needs]) + visit.compute
        if visit.leave or visit.update:
            left[k, n] = max([ends[k, n], *left.values()]) + visit.leave
            updated[k, n] = max([left[k, n], *updated.values()]) + visit.update
        ordered.append((k, n, visit))
    return [ends[k, len(visits) - 1] for k in range(steps)]


@given(LAYERS, st.integers(0, 3), st.integers(2, 4))
def test_times_are_those_of_the_longest_path(layers, prefetch, steps):
    ends = longest(step(layers), prefetch, steps)
    found = stream(step(layers), prefetch, steps)
    assert found.seconds == ends[-1] - ends[-2]
    assert found.waiting == found.seconds - sum(visit.compute for visit in step(layers))


@given(LAYERS, st.integers(0, 3))
def test_a_step_takes_at_least_what_each_clock_is_busy(layers, prefetch):
    visits = step(layers)
    seconds = stream(visits, prefetch, steps=12).seconds
    assert seconds >= sum(visit.compute for visit in visits)
    assert stream(visits, prefetch, steps=1).seconds <= seconds + sum(v.fetch + v.leave + v.update for v in visits)


def test_nothing_to_bring_is_nothing_to_wait_for():
    found = stream(step([(3, 0, 0, 0)] * 4))
    assert found.seconds == 4 * 3 + 4 * 6 and found.waiting == 0 and found.share == 0


def test_without_a_free_slot_bringing_and_computing_take_turns():
    """The last layer stays for its backward, and the first for the next forward."""
    layers, compute, fetch = 5, 2, 3
    found = stream(step([(compute, fetch, 0, 0)] * layers), prefetch=0)
    assert found.seconds == 3 * layers * compute + (2 * layers - 2) * fetch


def test_slow_links_bound_a_step():
    layers, fetch = 5, 100
    found = stream(step([(1, fetch, 0, 0)] * layers), prefetch=1)
    assert (2 * layers - 2) * fetch <= found.seconds < (2 * layers - 2) * fetch + 5


def test_a_fetch_waits_for_the_update_of_its_layer():
    slow = 1000
    found = stream(step([(1, 1, 1, 0), (1, 1, 1, slow), (1, 1, 1, 0)]))
    assert slow < found.seconds < slow + 20
