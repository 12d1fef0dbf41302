"""Blame: finds the rank at fault when ranks wait for one another, from what each reports that it is doing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeback.counts import counted
from pipeback.distributed.health.heartbeat import Heartbeat


class Verdict(NamedTuple):
    """The rank at fault, `what` it has done in words, and the `seconds` for which nothing has moved."""

    rank: int
    what: str
    seconds: float


def blame(
    rank: int, on: Sequence[int], what: str, seconds: float, statuses: Mapping[int, Heartbeat], timeout: float
) -> Verdict:
    """Follow the chain of waits from `rank`, which waits for the ranks `on`, to a rank that does not wait.

    If all ranks wait, their calls do not match. seconds: how long `rank` has waited. statuses: those of all ranks, in
    pipeline order. timeout: for the message.
    """
    seen: set[int] = set()
    waited = dict.fromkeys(on, (seconds, rank, what))  # the longest wait for a rank: (seconds, who, what)
    todo = list(on)
    while todo:
        r = todo.pop()
        if r in seen:
            continue
        seen.add(r)
        for others, thing, lasted in statuses[r].waits:
            todo += others
            waited |= {o: (lasted, r, thing) for o in others if o not in waited or waited[o][0] < lasted}
    # a rank has blocked others for as long as it does the same thing while they wait
    ways = {r: waited[r][0] if s.left else min(s.seconds, waited[r][0]) for r, s in statuses.items() if r in seen}
    ends = {r: lasted for r, lasted in ways.items() if not statuses[r].waits}
    if ends:
        r = max(ends, key=lambda r: ends[r])
        _, waiter, thing = waited[r]
        return Verdict(r, _end(statuses[r], waiter, thing, timeout), ends[r])
    return _mismatch({r: s for r, s in statuses.items() if r in seen}, timeout)


def ended(waiter: int, what: str) -> str:
    """Return the message about a rank that has left while another still waits for it."""
    return (
        f"has left the pipeline (its script has ended, or closed it) while rank {waiter} waits for it ({what}): "
        "do all ranks push the same batches?"
    )


def silent(seconds: float, stopped: bool, timeout: float) -> str:
    """Return the message about a rank whose beats do not arrive."""
    since = f"has not answered for {seconds:.1f} s: "
    if stopped:
        return since + "its process is stopped (SIGSTOP, a debugger)"
    return (
        f"{since}its process, host or network is down, or it hangs in code that lets no other thread run; "
        f"{_longer('if that', timeout)}"
    )


def _longer(what: str, timeout: float) -> str:
    return f"{what} may take so long, use workers=pipeback.Processes(timeout={2 * timeout:g}) (now {timeout:g} s)"


def _end(status: Heartbeat, waiter: int, what: str, timeout: float) -> str:
    if status.left:
        return ended(waiter, what)
    doing, reason = status.doing, ""
    if doing == "in its own code":
        doing += f", having pushed {counted(status.pushed, 'micro-batch')},"
        reason = "every rank must make the same calls in the same order; "
    return (
        f"is {doing} for {status.seconds:.1f} s while rank {waiter} waits for it ({what}): {reason}"
        f"{_longer('if it', timeout)}"
    )


def _mismatch(seen: Mapping[int, Heartbeat], timeout: float) -> Verdict:
    """Return the verdict if all ranks wait: it names the rank whose call differs, and the call of each rank."""
    calls = Counter(status.waits[0][1] for status in seen.values())
    odd = min(reversed(list(seen)), key=lambda r: calls[seen[r].waits[0][1]])
    told = "; ".join(
        f"rank {r} ({status.doing}) waits for rank{'s' * (len(on) > 1)} {' and '.join(map(str, on))} ({what})"
        for r, status in seen.items()
        for on, what, _ in status.waits
    )
    why = "the ranks wait for one another, "
    if len(calls) == 1:
        why += "in one call: is their connection broken? " + _longer("If it", timeout)
    else:
        why += "as they do not make the same calls in the same order"
    lasted = min(max(seconds for _, _, seconds in status.waits) for status in seen.values())
    return Verdict(odd, f"{why}: {told}", lasted)
