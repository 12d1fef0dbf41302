"""Perfetto: writes a recording to a file that ui.perfetto.dev and chrome://tracing show, and reads it again.

Each worker is shown as a process. It has one row that says what the worker waits for, and one row per stage. Arrows
lead from an operation to the one on another worker that takes its output. Times are in microseconds from the first
operation.
"""

from __future__ import annotations

import json
from itertools import count
from os import PathLike
from typing import Any

from pipeback.draw.worker_bands import stages_of
from pipeback.schedules.ops import Op
from pipeback.schedules.recording import Idle, Move, Recording, Track
from pipeback.schedules.timeline import Slot, needs

WORDS = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights", "U": "update"}
KINDS = {word: kind for kind, word in WORDS.items()}
# chrome://tracing's names for blue, orange, grey and light grey; Perfetto colours by the letter of the operation
_COLOURS = {
    "F": "rail_response",
    "B": "rail_idle",
    "I": "rail_idle",
    "W": "good",
    "U": "generic_work",
    "waiting": "grey",
}


def as_json(recording: Recording) -> dict[str, Any]:
    """The content of a trace file: Chrome's trace event format, with measured and predicted bubbles in `otherData`."""
    rows, shown = count(1), []
    spans: list[dict[str, Any]] = []
    at: dict[tuple[int, str, int, int], dict[str, Any]] = {}  # (replica, kind, stage, micro-batch) -> its event
    gaps = recording.gaps()
    for n, track in enumerate(recording.tracks):
        pid, waiting = n + 1, next(rows)  # 0 would stand for the idle process
        shown += _named(pid, waiting, n, track, recording)
        row = {s: next(rows) for s, w in enumerate(recording.owner) if w == track.worker}
        for order, (s, tid) in enumerate(row.items(), start=1):
            shown += _name("thread", f"stage {s}", order, pid=pid, tid=tid)
        for slot in track.slots:
            kind, mb = slot.op
            event = {
                "ph": "X", "name": f"{slot.op} s{slot.stage}", "cat": WORDS[kind], "cname": _COLOURS[kind],
                "pid": pid, "tid": row[slot.stage], **_times(slot.start, slot.end),
                "args": {"stage": slot.stage, "micro-batch": mb, "operation": WORDS[kind]},
            }  # fmt: skip
            spans.append(event)
            at[track.replica, kind, slot.stage, mb] = event
        for name, which in (("fetching weights", "fetch"), ("updating in the store", "store")):
            some = [move for move in track.moves if move.kind == which]
            tid = next(rows) if some else 0
            shown += _name("thread", name, len(row) + 1, pid=pid, tid=tid) if some else []
            spans += [
                {"ph": "X", "name": f"{which} s{move.stage}", "cat": which, "pid": pid, "tid": tid,
                 **_times(move.start, move.end), "args": {"stage": move.stage}}
                for move in some
            ]  # fmt: skip
        spans += [
            {"ph": "X", "name": why, "cat": "waiting", "cname": _COLOURS["waiting"],
             "pid": pid, "tid": waiting, **_times(*gap)}
            for gap, why in zip(gaps[n], _reasons(recording, track, gaps[n]), strict=True)
        ]  # fmt: skip
    spans.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": [*shown, *spans, *_arrows(recording, at)],
        "displayTimeUnit": "ms",
        "otherData": _facts(recording),
    }


def write(recording: Recording, path: str | PathLike[str]) -> dict[str, Any]:
    """Write the recording to `path`; returns what was written."""
    written = as_json(recording)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(written, file)
    return written


def read(path: str | PathLike[str]) -> Recording:
    """The recording in a file that `write` wrote. Raises ValueError for any other file, OSError if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            written = json.load(file)
        facts, events = written["otherData"], written["traceEvents"]
        tracks = [
            Track(t["name"], t["worker"], t["replica"], [], t["clock uncertainty µs"] / 1e6) for t in facts["tracks"]
        ]
        moves: list[list[Move]] = [[] for _ in tracks]
        for event in events:
            if event["ph"] == "X" and event["cat"] in ("fetch", "store"):
                start = event["ts"] / 1e6
                move = Move(start, start + event["dur"] / 1e6, event["cat"], event["args"]["stage"])
                moves[event["pid"] - 1].append(move)
            if event["ph"] == "X" and event["cat"] in KINDS:
                start, told = event["ts"] / 1e6, event["args"]
                op = Op(KINDS[event["cat"]], told["micro-batch"])  # type: ignore[arg-type]
                slot = Slot(start, start + event["dur"] / 1e6, told["stage"], op)
                tracks[event["pid"] - 1].slots.append(slot)
        tracks = [track._replace(moves=some) for track, some in zip(tracks, moves, strict=True)]
        return Recording(tracks, facts["owner"], facts["name"])
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is not a trace that pipeback wrote ({type(error).__name__}: {error})") from error


def _times(start: Any, end: Any) -> dict[str, float]:
    """Start and length in microseconds, rounded to nanoseconds. The end is rounded too, so that none overlap."""
    begin = round(1e6 * float(start), 3)
    return {"ts": begin, "dur": round(round(1e6 * float(end), 3) - begin, 3)}


def _name(what: str, name: str, order: int, **where: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": f"{what}_name", **where, "args": {"name": name}},
        {"ph": "M", "name": f"{what}_sort_index", **where, "args": {"sort_index": order}},
    ]


def _named(pid: int, tid: int, n: int, track: Track, recording: Recording) -> list[dict[str, Any]]:
    mine = [s for s, w in enumerate(recording.owner) if w == track.worker]
    copy = f", replica {track.replica}" if recording.tracks[-1].replica else ""
    return [
        *_name("process", f"{track.name}{copy}: {stages_of(mine)}", n, pid=pid, tid=tid),
        *_name("thread", "waiting", 0, pid=pid, tid=tid),
    ]


def _reasons(recording: Recording, track: Track, gaps: list[tuple[float, float]]) -> list[str]:
    """Return what the worker waited for in each gap: a message of another worker, if the next operation needs one."""
    after = {float(slot.start): slot for slot in reversed(track.slots)}
    found = []
    for _, end in gaps:
        slot = after.get(end)
        before = slot and needs(slot.op, slot.stage, recording.stages)
        if slot is None:
            found.append("done")
        elif before is None or recording.owner[before[1]] == track.worker:
            found.append("between operations")
        else:
            found.append(f"waits for {before[0]}{before[2]} s{before[1]}")
    return found


def _arrows(recording: Recording, at: dict[tuple[int, str, int, int], dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for (replica, kind, s, mb), event in at.items():
        before = needs(Op(kind, mb), s, recording.stages)  # type: ignore[arg-type]
        sender = at.get((replica, *before)) if before else None
        if sender is None or sender["pid"] == event["pid"]:
            continue
        # the message leaves before the operation's end is noted, and an arrow never leads back in time
        left = max(sender["ts"], min(sender["ts"] + sender["dur"] - min(0.5, sender["dur"] / 2), event["ts"]))
        both = {"cat": "message", "name": "activation" if kind == "F" else "gradient", "id": len(found) // 2 + 1}
        found.append({"ph": "s", **both, "pid": sender["pid"], "tid": sender["tid"], "ts": round(left, 3)})
        found.append({"ph": "f", "bp": "e", **both, "pid": event["pid"], "tid": event["tid"], "ts": event["ts"]})
    return found


def _facts(recording: Recording) -> dict[str, Any]:
    def bubbles(idle: Idle) -> dict[str, Any]:
        return {"bubble": idle.share, "bubble of each": idle.each, "bubble in steady state": idle.steady}

    return {
        "name": recording.name, "stages": recording.stages, "owner": recording.owner,
        "tracks": [{"name": t.name, "worker": t.worker, "replica": t.replica,
                    "clock uncertainty µs": 1e6 * t.uncertainty} for t in recording.tracks],
        **bubbles(recording.idle()),
        "predicted": bubbles(recording.predicted().idle()),
        "predicted in the workers' order": bubbles(recording.in_order().idle()),
        "predicted at unit costs": bubbles(recording.unit().idle()),
    }  # fmt: skip
