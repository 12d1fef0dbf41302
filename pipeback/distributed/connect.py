"""Connect: chooses the transport between ranks: shared memory for CPU stages of one host, else torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeback.distributed.ranks import Ranks
from pipeback.distributed.transport.process_group import DirectWire, GlooWire
from pipeback.distributed.transport.receive_ahead import ReceiveAhead
from pipeback.distributed.transport.shared_memory import SharedWire, Unavailable
from pipeback.runtime.link import Closed, Name, Wire, WireLink
from pipeback.tensors.checksum import checksum
from pipeback.tensors.layout import Message

WORDS = {"F": "the activation", "B": "the gradient", "E": "the evaluation"}
# messages that may be unreceived where a worker sends to another one for several of its parts: more than there can be,
# as both would wait if both had to
MOST = 1 << 14
LOSSES = 1024  # losses that may be unreceived: `RankRunner` sends several at once
Ends = tuple[int, int, str]  # (sender, receiver, kind): F activations, B gradients, L losses and outputs


def connect(
    ranks: Ranks,
    owner: list[int],
    bound: int,
    closed: threading.Event,
    transport: str,
    devices: set[str],
    parts: int = 1,
) -> tuple[WireLink, list[Wire]]:
    """Return the link of this rank to its neighbours, and the wires for losses and outputs. Every rank calls it.

    bound: how many messages may wait to be received. devices: the kinds of device that this rank's stages are on.
    parts: of the stages on each rank.
    """
    line, me = ranks.line, ranks.index

    def pulse() -> None:
        if closed.is_set() or ranks.health.own is not None:  # its own thread raises that error
            raise Closed
        ranks.health.check()
        link.blocked()

    # a wire per direction, whatever goes that way: workers of several parts send both kinds both ways
    pairs = {pair for a, b in pairwise(owner) if a != b for pair in ((a, b), (b, a))}
    ends = [(line[a], line[b], "F" if a < b else "B") for a, b in sorted(pairs)]
    judge = line[owner[-1]]
    ends += [(judge, other, "L") for other in line if other != judge]
    wires = _shared(ranks, ends, bound if parts == 1 else MOST, pulse, transport, devices)
    missing = sorted(set(ends) - set().union(*ranks.gather(set(wires), "push()")))
    if missing and transport == "shared_memory":
        a, b, _ = missing[0]
        raise ValueError(
            f"link: ranks {a} and {b} do not share memory (other hosts, or accelerators); use "
            "workers=pipeback.Processes(link='auto')"
        )
    if missing:
        everywhere = set().union(*ranks.gather(devices, "push()"))
        direct = transport == "nccl" or (transport == "auto" and everywhere == {"cuda"} and dist.is_nccl_available())
        if direct and parts > 1:
            raise ValueError(
                f"link: ranks that hold {parts} parts of the stages each do not exchange tensors by NCCL; use "
                "workers=pipeback.Processes(link='gloo')"
            )
        wires.update(_grouped(ranks, missing, bound, pulse, direct))

    def watched(worker: int, name: Name) -> AbstractContextManager[None]:
        return ranks.health.waiting(line[worker], f"{WORDS[name[0]]} of micro-batch {name[2]} for stage {name[1]}")

    out = {line.index(b): wire for (a, b, kind), wire in wires.items() if a == ranks.rank and kind != "L"}
    into = {line.index(a): wire for (a, b, kind), wire in wires.items() if b == ranks.rank and kind != "L"}
    results = [wire for (_, _, kind), wire in wires.items() if kind == "L"]
    link = WireLink(me, owner, out, into, watched=watched, mark=_mark)
    if parts > 1:
        link.into = {w: ReceiveAhead(one, pulse) if isinstance(one, GlooWire) else one for w, one in into.items()}
    return link, results


def _shared(
    ranks: Ranks, ends: list[Ends], bound: int, pulse: Callable[[], None], transport: str, devices: set[str]
) -> dict[Ends, Wire]:
    """Return wires over shared memory, for those ends of this rank that can have them."""
    wires: dict[Ends, Wire] = {}
    able = transport in ("auto", "shared_memory") and devices == {"cpu"} and bool(ranks.facts[ranks.rank].place)
    offers: dict[Ends, Any] = {}
    for a, b, kind in ends:
        if able and a == ranks.rank and ranks.facts[b].place == ranks.facts[a].place:
            with suppress(Unavailable):
                most = LOSSES if kind == "L" else bound
                wires[a, b, kind], offers[a, b, kind] = SharedWire.offer(peer=b, bound=most, pulse=pulse)
    everything = {end: address for some in ranks.gather(offers, "push()") for end, address in some.items()}
    for end in ends:
        if able and end[1] == ranks.rank and end in everything:
            with suppress(Unavailable):
                wires[end] = SharedWire.accept(everything[end], peer=end[0], pulse=pulse)
    accepted = set().union(*ranks.gather({e for e in wires if e[1] == ranks.rank}, "push()"))
    for end in [e for e in wires if e not in accepted]:
        wires.pop(end).close()
    return wires


def _grouped(ranks: Ranks, ends: list[Ends], bound: int, pulse: Callable[[], None], direct: bool) -> dict[Ends, Wire]:
    """Return wires over process groups, one group per direction, since NCCL has no tags."""
    wires: dict[Ends, Wire] = {}
    for kind in "FBL":
        # a rank may wait for losses for days
        group = ranks.group(ranks.line, "gloo", 1e8 if kind == "L" else None)
        payload = ranks.group(ranks.line, "nccl") if direct and kind != "L" else None
        for a, b, k in ends:
            if k == kind and ranks.rank in (a, b):
                sender, peer = a == ranks.rank, b if a == ranks.rank else a
                most = LOSSES if kind == "L" else bound
                wire = GlooWire(group, peer, sender=sender, bound=most, pulse=pulse)
                wires[a, b, k] = wire if payload is None else DirectWire(wire, payload, peer)
    return wires


def _mark(mb: int, x: Message, target: Message) -> int:
    """Return a number that differs between micro-batches. Content on an accelerator is read rarely, as that waits."""
    parts = [*(x if isinstance(x, tuple) else (x,)), *(target if isinstance(target, tuple) else (target,))]
    seldom = mb >= 16 and mb % 64
    return checksum([p.shape if isinstance(p, Tensor) and seldom and p.device.type != "cpu" else p for p in parts])
