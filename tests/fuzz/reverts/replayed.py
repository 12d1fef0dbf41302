"""Mendings that hand-written programs miss: those of several ranks, which the search does not draw, of costs, and two
that the search has not found within a minute.

Which program shows which of them stands in `tests/fuzz/named.py`.
"""

from __future__ import annotations

from .revert import Revert, revert

REPLAYED: dict[str, Revert] = {
    "a worker does not tell when it was drained": Revert(
        {
            "runtime/link": (("data | (start % 251) << _START | told << _OPTIONS", "data | told << _OPTIONS"),),
            "runtime/loop_progress": (
                ('if (part["fresh"], part["start"]) != (whole["fresh"], whole["start"]):', "if False:"),
            ),
        },
        {},
    ),
    "a worker does not tell its rates": revert("runtime/link", (" | told << _OPTIONS", "")),
    "all names are looked at for each micro-batch": revert(
        "stages/flight_state",
        (
            'tensors[name] for name in takewhile(tensors.__contains__, (f"{prefix}{n}" for n in count()))]',
            'tensors[f"{prefix}{n}"] for n in range(sum(name.startswith(prefix) for name in tensors))]',
        ),
    ),
    "the store of the ranks listens everywhere": revert(
        "distributed/health/heartbeat", ("    if near:", "    if False:")
    ),
    "the store of the ranks has no secret": revert(
        "distributed/health/heartbeat",
        ("    return dist.PrefixStore(secret, store), f", "    return store, f"),
        ("        return dist.PrefixStore(secret, store)\n", "        return store\n"),
    ),
    "stages=N is cut by the time that calls take": revert(
        "splitting/call_cost",
        ("self.done += BYTE * moved + OPERATION", 'self.done = __import__("time").perf_counter()'),
    ),
    "how gradients lie is told by a batch of one sample": revert(
        "stages/stage",
        ("if alike is None or tuple([leaf.shape for leaf in flight.leaves]) != alike:", "if alike is None:"),
        ("if flight.caught is None and self.index and not alike:", "if False:"),
    ),
}
