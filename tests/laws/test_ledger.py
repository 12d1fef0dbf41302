"""Law: the ledger is the schedule: versions used by every F and B are those counted on the program."""

import pytest

import pipeback
from pipeback.runtime.ledger import Ledger
from pipeback.schedules.ops import until
from tests.laws.cases import CASES, STAGES, data, network, pipeline


def counted(schedule, stages, micro_batches):
    """(stage, kind, mb) -> updates before it, by walking the programs of the stages."""
    versions = {}
    for s in range(stages):
        updates = 0
        for kind, mb in until(schedule(s, stages), micro_batches):
            if kind == "U":
                updates += 1
            else:
                versions[s, kind, mb] = updates
    return versions


def run(method, micro_batches=30, stages=STAGES, **options):
    pipe = pipeline(network(stages), method, **options)
    for x, y in data(micro_batches):
        pipe.push(x, y)
    pipe.drain()
    return {(r.stage, r.kind, r.mb): r.version for r in pipe.ledger}, pipe


LIVE = [
    "sgd",
    "gpipe-4",
    "one_f_one_b-3",
    "pb",
    "pb-slack1",
    "pipemare",
    "spectrain",
    "lwp",
    "lwp-weight",
    "sc",
    "cerebras",
]


@pytest.mark.parametrize("case", LIVE)
def test_forward_and_backward_use_the_counted_versions(case):
    method = CASES[case](STAGES)
    found, _ = run(method)
    assert found == counted(method.schedule, STAGES, 30)


@pytest.mark.parametrize("slack", [1, 2])
@pytest.mark.parametrize("name", ["pb", "pipedream"])
def test_delays_in_the_steady_state(name, slack):
    found, pipe = run(pipeback.methods.create(name, slack=slack))
    delays = [slack * (STAGES - 1 - s) for s in range(STAGES)]
    assert pipe.delays == delays
    for s in range(STAGES):
        for i in range(12, 30):
            assert found[s, "F", i] == i - delays[s]
            assert found[s, "B", i] == (i if name == "pb" else i - delays[s])


def test_vertical_sync_uses_one_version_number_everywhere():
    found, pipe = run(pipeback.methods.create("pipedream", vertical_sync=True))
    assert pipe.delays == [STAGES - 1] * STAGES
    for i in range(30):
        assert {found[s, kind, i] for s in range(STAGES) for kind in "FB"} == {max(0, i - (STAGES - 1))}


@pytest.mark.parametrize("group", [5, 8])
@pytest.mark.parametrize("stages", [1, 3, 5])
def test_2bw_version_function(stages, group):
    found, pipe = run(pipeback.methods.create("pipedream_2bw", micro_batches=group), stages=stages)
    assert pipe.delays == [1] * stages
    for (_, _, i), version in found.items():
        assert version == max(i // group - 1, 0)


def test_versions_go_on_after_a_drain():
    """The first forwards after a drain all see the drained weights; 2BW and vertical sync count from there."""
    for case in ("pb", "pipedream", "pipedream-vertical", "pipedream_2bw"):
        pipe = pipeline(network(), CASES[case](STAGES))
        batches = data(40)
        for x, y in batches[:20]:
            pipe.push(x, y)
        pipe.drain()
        base = 4 if case == "pipedream_2bw" else 20  # 2BW: groups of 6, 6, 6 and a short one of 2
        for x, y in batches[20:]:
            pipe.push(x, y)
        found = {(r.stage, r.kind, r.mb): r.version for r in pipe.ledger}
        for s in range(STAGES):
            assert found[s, "F", 20] == base
            i = 20 + 8
            wanted = {
                "pb": base + max(0, 8 - 2 * (STAGES - 1 - s)),
                "pipedream": base + max(0, 8 - (STAGES - 1 - s)),
                "pipedream-vertical": base + 8 - (STAGES - 1),
                "pipedream_2bw": base,
            }[case]
            assert found[s, "F", i] == wanted, (case, s)


def test_it_goes_back_to_a_mark_also_after_it_was_trimmed():
    ledger = Ledger(limit=4)
    for mb in range(6):
        ledger.add("F", [0], [mb], [0])
    there = ledger.mark()
    for mb in range(6, 9):
        ledger.add("F", [0], [mb], [0])
    assert [record.mb for record in ledger] == [5, 6, 7, 8]
    ledger.go_back(there)
    assert [record.mb for record in ledger] == [4, 5]
    for mb in range(6, 20):
        ledger.add("F", [0], [mb], [0])
    ledger.go_back(there)
    assert list(ledger) == []
