"""What must hold of every trace: Chrome's event format, times that data allows, waiting that adds up to the bubble."""

from collections import defaultdict
from itertools import pairwise

import pytest

NAMES = ("forward", "backward", "update")


def check_events(written, owner, early=0.0):
    """owner: the worker of each stage. early: µs by which the clocks may disagree."""
    events, facts = written["traceEvents"], written["otherData"]
    assert facts["owner"] == owner and facts["stages"] == len(owner)
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    row = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(process) == len(set(owner)) == len(facts["tracks"])
    assert len(row) == len(owner) + len(process) == len({tid for _, tid in row})  # and one that says what is awaited

    spans = [e for e in events if e["ph"] == "X"]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)
    starts, worked, waited = {}, defaultdict(list), defaultdict(float)
    for e in spans:
        if e["cat"] == "waiting":
            assert row[e["pid"], e["tid"]] == "waiting"
            waited[e["pid"]] += e["dur"]
            continue
        kind, s, i = e["args"]["operation"], e["args"]["stage"], e["args"]["micro-batch"]
        assert row[e["pid"], e["tid"]] == f"stage {s}" and e["pid"] == owner[s] + 1 and e["cat"] == kind
        assert (kind, s, i) not in starts
        starts[kind, s, i] = e["ts"]
        worked[e["pid"]].append((e["ts"], e["ts"] + e["dur"]))
    for (kind, s, i), begin in starts.items():
        before = {"forward": (kind, s - 1, i), "backward": (kind, s + 1, i), "update": None}[kind]
        assert starts.get(before, 0) <= begin + early  # its end is noted after the message has left
    for some in worked.values():
        assert some == sorted(some) and all(a[1] <= b[0] + 2e-3 for a, b in pairwise(some))
    end = max(b for some in worked.values() for _, b in some)
    assert sum(waited.values()) / (end * len(process)) == pytest.approx(facts["bubble"], abs=1e-4)
    for predicted in (facts, *(facts[f"predicted{how}"] for how in ("", " in the workers' order", " at unit costs"))):
        assert 0 <= predicted["bubble"] < 1 and len(predicted["bubble of each"]) == len(process)

    arrows = defaultdict(list)
    for e in events:
        if e["ph"] in "sf":
            arrows[e["id"]].append(e)
    crossing = sum((kind, s + (-1 if kind == "forward" else 1), i) in starts and
                   owner[s] != owner[s + (-1 if kind == "forward" else 1)]
                   for kind, s, i in starts if kind != "update")  # fmt: skip
    assert len(arrows) == crossing
    for left, came in arrows.values():
        assert (left["ph"], came["ph"], came["bp"]) == ("s", "f", "e")
        assert left["pid"] != came["pid"] and left["ts"] <= came["ts"] + early
