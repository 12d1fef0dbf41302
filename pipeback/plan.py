"""Plan: what training will take, before it begins: bytes, weight passes, waiting, and the batches that fit.

    plan = pipe.plan(x, y)                # rehearses, trains nothing
    print(plan)
    ...
    print(beside(plan, before, pipe.traffic(), pushes))

Bytes are counted by a dry run of the real loop and order, seconds by three clocks at measured bandwidths (`dry`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, gcd
from typing import NamedTuple

from pipeback.disk import SELDOM
from pipeback.dry import Room, drive
from pipeback.sizes import written
from pipeback.stage import Stage
from pipeback.store import HostStore, Store
from pipeback.streaming import Traffic
from pipeback.survey import Facts, loops, period, said, slot_bytes
from pipeback.timeline import in_flight

HIDDEN = 0.05  # streaming counts as hidden where no more than this share of the time is waiting
FAR = 256  # micro-batches a push that are counted; beyond, bytes grow as they did
WORK = 40_000  # operations of a dry run at most, in the search for a window
DAY = 86_400  # seconds


class Foreseen(NamedTuple):
    """What a dry run has counted; moved bytes and seconds are those of one push, on average."""

    weights_in: float
    fetches: float
    gradients_out: float
    sums_in: float
    written: float  # to files
    seconds: float
    stall: float
    device: Room  # when it was fullest, buffers among the weights
    peak_weights: int  # of weights alone
    peak_stages: int
    peak_flights: dict[int, int]  # micro-batches between F and B, of each stage
    host_gradients: int

    @property
    def share(self) -> float:
        """Of the time, that is waiting."""
        return self.stall / self.seconds if self.seconds else 0.0


class Host(NamedTuple):
    """Bytes in host memory, by what they are of."""

    weights: int = 0
    optimizer: int = 0
    method: int = 0
    older: int = 0
    gradients: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class Plan(NamedTuple):
    """What training will take. Bytes and seconds; over processes, those of this one."""

    facts: Facts
    micro_batches: int  # of a push
    push: Foreseen
    device: Room
    host: Host
    disk: int  # bytes of the files, of two versions
    passes: float  # times that all weights come to the device in a push
    gradient_passes: float
    hides: tuple[int | None, int | None]  # micro-batches a push, from which on and up to which streaming is hidden
    fits: int | None  # micro-batches a push that fit on the device; None: any number
    day: float  # bytes written to files in a day of training

    @property
    def window(self) -> tuple[int, int | None]:
        """Micro-batches a push, at least and at most, that hide streaming and fit; or fit, where none hides it."""
        ends = [end for end in (self.hides[1], self.fits) if end is not None]
        return self.hides[0] or 1, min(ends, default=None)

    def __str__(self) -> str:
        return "\n".join([title(self), *_aligned(rows(self))])


# -- counting ----------------------------------------------------------------------------------------------------------


def plan(facts: Facts, micro_batches: int, pushes: int | None = None) -> Plan:
    """pushes: averages are of so many, from a quiet pipeline to a quiet one again; None: of the steady state."""
    push = foresee(facts, micro_batches, pushes)
    weights = sum(p.load.weights for p in facts.stages.values()) * facts.replicas
    gradients = sum(p.load.gradients for p in facts.stages.values()) * facts.replicas
    return Plan(
        facts, micro_batches, push, push.device, host_room(facts, push), disk_room(facts, push),
        push.weights_in / weights if weights else 0.0, push.gradients_out / gradients if gradients else 0.0,
        hidden(facts, push, micro_batches), most(facts),
        push.written * DAY / push.seconds if push.seconds else 0.0,
    )  # fmt: skip


def foresee(facts: Facts, micro_batches: int, pushes: int | None = None, prefetch: int | None = None) -> Foreseen:
    """Run so many pushes dry, after others that fill the pipeline. prefetch: another one than that of the store."""
    ahead = facts.prefetch if prefetch is None else prefetch
    cycle, fill = period(facts.method), fills(facts, micro_batches)
    quiet = pushes is not None
    pushes = pushes or min(64, max(2, cycle // gcd(cycle, micro_batches)))
    counts, dries = [], []
    commits = 0
    for loop, dry in loops(facts, ahead):
        arrived = 0

        def one(loop=loop, dry=dry) -> None:
            nonlocal arrived, commits
            drive(loop, micro_batches)
            arrived += micro_batches
            if facts.kind == "disk" and _commits(facts, arrived, loop.fresh or loop.order.empty):
                dry.rest()
                arrived, commits = 0, commits + 1

        for _ in range(fill):
            one()
        if quiet:
            dry.rest()
        before, commits = dry.number.copy(), 0
        for _ in range(pushes):
            one()
        if quiet:
            dry.rest()
        counts.append(dry.number.since(before))
        dries.append(dry)
    many = facts.replicas
    rooms = [dry.most for dry in dries]
    buffers = sum(p.buffers for p in facts.stages.values())
    files = commits * sum(p.small for p in facts.stages.values()) + sum(
        count.updates[s] * p.newly + count.spills[s] * (p.load.gradients if p.load.left is None else p.load.left)
        for count in counts
        for s, p in facts.stages.items()
    )
    mean = lambda name: many * sum(getattr(count, name) for count in counts) / pushes  # noqa: E731
    slowest = max(counts, key=lambda count: count.seconds)
    return Foreseen(
        mean("weights_in"), mean("fetches"), mean("gradients_out"), mean("sums_in"),
        many * files / pushes if facts.kind == "disk" else 0.0,
        slowest.seconds / pushes, slowest.stall / pushes,
        Room(
            many * (sum(room.weights for room in rooms) + buffers),
            many * sum(room.gradients for room in rooms),
            many * sum(room.activations for room in rooms),
        ),
        many * sum(dry.peak_weights for dry in dries),
        max(dry.peak_stages for dry in dries),
        {s: place.peak_flights for dry in dries for s, place in dry.stages.items()},
        many * sum(dry.host_gradients for dry in dries),
    )  # fmt: skip


def fills(facts: Facts, micro_batches: int) -> int:
    """Pushes after which every one is like the one before."""
    if facts.method.flush_each_push:
        return 1
    return ceil((max(in_flight(facts.method.schedule, facts.depth)) + period(facts.method)) / micro_batches)


def _commits(facts: Facts, arrived: int, flushed: bool) -> bool:
    """As `DiskStore.due`."""
    method = facts.method
    flushes = (method.flush_each_push or period(method) > 1) and not any(facts.delays)
    if facts.commit_every is None and flushes:
        return flushed
    return arrived >= (facts.commit_every or SELDOM)


def host_room(facts: Facts, push: Foreseen) -> Host:
    """In host memory: all of a host store; of a disk store what is open for an update, and for a method that shifts."""
    waiting = facts.replicas * sum(p.waiting * push.peak_flights[s] for s, p in facts.stages.items())
    if facts.kind == "device":
        return Host(activations=waiting)
    kept = [Host(p.home, p.optimizer, p.method, p.older) for p in facts.stages.values()]
    if facts.kind == "host":
        whole = Host(*(facts.replicas * sum(column) for column in zip(*kept, strict=True)))
        return whole._replace(gradients=push.host_gradients, activations=waiting)
    largest = max(kept, key=sum)
    most = (facts.prefetch or 0) + 1
    queued = sorted((p.load.gradients for p in facts.stages.values()), reverse=True)[:most]
    open_at_once = facts.replicas * len(facts.workers) * (2 if facts.method.copies != "live" else 1)
    gradients = min(push.host_gradients, sum(queued) * facts.replicas)
    return Host(*(open_at_once * part for part in largest))._replace(gradients=gradients, activations=waiting)


def disk_room(facts: Facts, push: Foreseen) -> int:
    """The version that was committed last, and the one that is written beside it; what is in flight comes and goes."""
    if facts.kind != "disk":
        return 0
    flying = 0
    if any(facts.delays):
        flying = sum(p.load.activations * push.peak_flights[s] for s, p in facts.stages.items())
    return facts.replicas * (2 * sum(p.pages for p in facts.stages.values()) + 2 * flying)


# -- how large a push may and should be --------------------------------------------------------------------------------


def hidden(facts: Facts, push: Foreseen, micro_batches: int) -> tuple[int | None, int | None]:
    """The fewest and the most micro-batches a push with which waiting is at most HIDDEN.

    (None, None): with no number. The second is None where no number is too many. What was counted is exact to a
    sixteenth; larger pushes may hide less, when a stage does so much in a row that it waits for its own updates.
    """
    if facts.kind == "device":
        return 1, None

    def waits(m: int) -> bool:
        return (push if m == micro_batches else foresee(facts, m)).share > HIDDEN

    def edge(inside: int, outside: int) -> int:
        """The last one inside."""
        while abs(outside - inside) > max(1, max(inside, outside) // 16):
            middle = (inside + outside) // 2
            inside, outside = (inside, middle) if waits(middle) else (middle, outside)
        return inside

    far = max(1, min(1024, WORK // (9 * facts.depth)))
    tried = [2**n for n in range(far.bit_length())]
    hides = [not waits(m) for m in tried]
    if not any(hides):
        return None, None
    first = hides.index(True)
    low = edge(tried[first], tried[first - 1]) if first else 1
    after = hides.index(False, first) if False in hides[first:] else None
    return low, None if after is None else edge(tried[after - 1], tried[after])


def most(facts: Facts) -> int | None:
    """Micro-batches a push that fit on the device; 0: not even one. None: any number."""
    limit = facts.device_memory or facts.device_room
    if limit is None:
        return None

    def need(m: int) -> int:
        return foresee(facts, m, 1).device.total

    low, high = 0, 1
    while need(high) <= limit:
        low, high = high, 2 * high
        if low >= FAR:
            grows = need(FAR) - need(FAR // 2)
            return None if grows <= 0 else FAR + (limit - need(FAR)) * (FAR // 2) // grows
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= limit else (low, middle)
    return low


# -- refusing ----------------------------------------------------------------------------------------------------------


def check_stages(stages: Sequence[Stage], store: Store, *, alone: bool = True) -> None:
    """Raises ValueError where the largest stage, or all weights in the host, cannot fit whatever is pushed.

    alone: all stages are this process's.
    """
    device, host = store.budgets
    largest = max(stages, key=slot_bytes)
    place, own = slot_bytes(largest), largest.bytes()
    if device is not None and place + own > device:
        raise ValueError(
            f"device_memory={said(store)[0]}: {largest.label} alone takes {written(place + own)}, {written(place)} for "
            f"its weights and {written(own)} for their gradients; split it into stages of at most "
            f"{written(device // 2)} of weights, or give device_memory of at least {written(place + own)} "
            f"({place + own})"
        )
    whole = sum(map(slot_bytes, stages))
    if alone and host is not None and isinstance(store, HostStore) and whole > host:
        raise ValueError(
            f"host_memory={said(store)[1]}: the weights of all {len(stages)} stages take {written(whole)}; keep them "
            f'in files, store="disk:FOLDER", or give host_memory of at least {written(whole)} ({whole})'
        )


def check(facts: Facts, micro_batches: int) -> None:
    """Raises ValueError where a push of so many micro-batches does not fit into the budgets."""
    if facts.device_memory is None and facts.host_memory is None:
        return
    push = foresee(facts, micro_batches, 1)
    if facts.device_memory is not None and push.device.total > facts.device_memory:
        raise ValueError(_device_refusal(facts, push, micro_batches))
    host = host_room(facts, push)
    if facts.host_memory is not None and host.total > facts.host_memory:
        raise ValueError(_host_refusal(facts, host, push))


def _device_refusal(facts: Facts, push: Foreseen, micro_batches: int) -> str:
    limit, need, ahead = facts.device_memory, push.device, facts.prefetch
    assert limit is not None
    big = max(facts.stages.values(), key=lambda p: p.load.weights)
    cures = []
    for fewer in range((ahead or 0) - 1, -1, -1):
        if (with_it := foresee(facts, micro_batches, 1, fewer).device.total) <= limit:
            cures.append(f"prefetch={fewer} ({written(with_it)})")
            break
    if (smaller := _smaller(facts, micro_batches)) is not None:
        cures.append(smaller)
    if micro_batches > 1 and (fit := most(facts)):
        cures.append(f"at most {fit} {_batches(fit)} a push ({written(foresee(facts, fit, 1).device.total)})")
    if not cures:
        cures.append(f"a model cut into more stages, of which {big.label} is the largest")
    cures.append(f"device_memory of at least {written(need.total)} ({need.total})")
    elsewhere = ""
    if facts.keeps and 2 * need.activations > need.total:
        elsewhere = '. activations="host" or "recompute" keep less on the device'
    stages = f"{push.peak_stages} of {len(facts.stages)} stages, the largest {big.label} of {written(big.load.weights)}"
    return (
        f"device_memory={facts.written[0]} is too little by {written(need.total - limit)}: the device would hold "
        f"{written(need.total)}, weights {written(need.weights)} ({stages}), gradients {written(need.gradients)} and "
        f"activations {written(need.activations)} (pushes of {micro_batches} × {facts.samples} samples). "
        f"What fits: {'; '.join(cures)}{elsewhere}"
    )


def _smaller(facts: Facts, micro_batches: int) -> str | None:
    """The largest micro_batch_size, by halves, with which the same samples a push fit."""
    size = facts.samples // 2
    while size:
        scaled = {
            s: p._replace(load=p.load._replace(activations=ceil(p.load.activations * size / facts.samples)))
            for s, p in facts.stages.items()
        }
        there = foresee(facts._replace(stages=scaled), ceil(micro_batches * facts.samples / size), 1).device.total
        if facts.device_memory is not None and there <= facts.device_memory:
            return f"micro_batch_size={size} ({written(there)})"
        size //= 2
    return None


def _host_refusal(facts: Facts, host: Host, push: Foreseen) -> str:
    limit = facts.host_memory
    assert limit is not None
    cures = []
    if facts.kind == "host":
        on_disk = host_room(facts._replace(kind="disk"), push)
        if on_disk.total <= limit:
            cures.append(f'store="disk:FOLDER" ({written(on_disk.total)})')
    if host.older:
        cures.append("a method that keeps no older weights")
    cures.append(f"host_memory of at least {written(host.total)} ({host.total})")
    parts = ", ".join(f"{name} {written(size)}" for name, size in zip(_HOST, host, strict=True) if size)
    return (
        f"host_memory={facts.written[1]} is too little by {written(host.total - limit)}: the host would hold "
        f"{written(host.total)}, {parts}. What fits: {'; '.join(cures)}"
    )


_HOST = ("weights", "optimizer state", "method state", "older weights", "gradients", "activations")


# -- to be read --------------------------------------------------------------------------------------------------------

WHERE = {"device": "on the device", "host": "in host memory", "disk": "in files"}
Row = tuple[str, str, str]  # what, how much, of what


def title(plan: Plan) -> str:
    facts = plan.facts
    ahead = "" if facts.prefetch is None else f", {facts.prefetch} {_plural('stage', facts.prefetch)} fetched ahead"
    return (
        f"{facts.method!r}: {len(facts.stages)} of {facts.depth} stages, weights {WHERE[facts.kind]}{ahead}; "
        f"pushes of {plan.micro_batches} × {facts.samples} {_plural('sample', facts.samples)}"
    ).replace(f"{facts.depth} of {facts.depth} stages", f"{facts.depth} stages")


def rows(plan: Plan) -> list[Row]:
    """What the plan says, one line a number."""
    facts, push, device = plan.facts, plan.push, plan.device
    at_once = "" if facts.kind == "device" else f" ({push.peak_stages} of {len(facts.stages)} stages)"
    found = [
        ("on the device", written(device.total),
         f"weights {written(device.weights)}{at_once}, gradients {written(device.gradients)}, "
         f"activations {written(device.activations)}{_allowed(facts.device_memory, facts.written[0])}")
    ]  # fmt: skip
    if plan.host.total:
        parts = ", ".join(f"{name} {written(size)}" for name, size in zip(_HOST, plan.host, strict=True) if size)
        found.append(
            ("in host memory", written(plan.host.total), parts + _allowed(facts.host_memory, facts.written[1]))
        )
    if facts.kind == "disk":
        found.append(("in files", written(plan.disk), "at most: the last committed version, and the one being written"))
    if facts.kind != "device":
        speed, back = facts.bandwidth.to_device, facts.bandwidth.from_device
        to_device, away = f"at {written(speed)}/s", "" if back == float("inf") else f", at {written(back)}/s"
        found += [
            (
                "weights in, a push",
                written(push.weights_in),
                f"{plan.passes:.3g} {_plural('pass', plan.passes)} over all weights, {to_device}",
            ),
            (
                "gradients out, a push",
                written(push.gradients_out),
                f"{plan.gradient_passes:.3g} {_plural('pass', plan.gradient_passes)}{away}",
            ),
            ("waiting", f"{push.share:.0%}", f"{_time(push.stall)} of the {_time(push.seconds)} of a push"),
            ("batch window", *_window(plan)),
        ]
    else:
        found.append(("a push takes", _time(push.seconds), "of computing"))
    if facts.kind == "disk":
        read, write = facts.bandwidth.disk_read, facts.bandwidth.disk_write
        found.append(
            ("written a day", written(plan.day),
             f"{written(push.written)} a push, at {written(write)}/s; read at {written(read)}/s")
        )  # fmt: skip
    return found


def _window(plan: Plan) -> tuple[str, str]:
    """Both ends, and what lies beyond them."""
    facts, (low, high) = plan.facts, plan.window
    room = facts.written[0] if facts.device_memory else written(facts.device_room or 0)
    if plan.fits == 0:
        return "none", f"not even one micro-batch a push fits into {room}"
    beyond = []
    if plan.hides[0] is None:
        beyond.append(f"waiting stays above {HIDDEN:.0%} whatever is pushed")
    else:
        ends = (["fewer"] if low > 1 else []) + (
            ["more"] if plan.hides[1] is not None and plan.hides[1] == high else []
        )
        if ends:
            beyond.append(f"with {' or '.join(ends)}, waiting exceeds {HIDDEN:.0%}")
    if plan.fits is not None and plan.fits == high:
        beyond.append(f"more do not fit into {room}")
    if high is not None and low > high:
        text = f"none: {low} > {high}"
    elif plan.hides[0] is None:
        text = "any" if high is None else f"up to {high}"
    else:
        text = f"{low}+" if high is None else f"{low} to {high}"
    return text, f"micro-batches a push{'; ' if beyond else ''}{', '.join(beyond)}"


def beside(plan: Plan, before: Traffic, after: Traffic, pushes: int) -> list[Row]:
    """(what, predicted, measured) of the pushes between two calls of `Pipeline.traffic`; bytes and seconds of one push.

    Exact in bytes for a plan of so many `pushes`.
    """
    facts, push = plan.facts, plan.push

    def mean(name: str) -> float:
        return (getattr(after, name) - getattr(before, name)) / pushes

    moved = mean("seconds")
    found = [
        ("weights in, a push", written(push.weights_in), written(mean("weights_in"))),
        ("stages fetched, a push", f"{push.fetches:.4g}", f"{mean('fetches'):.4g}"),
        ("gradients out, a push", written(push.gradients_out), written(mean("gradients_out"))),
        ("stages on the device", str(push.peak_stages), str(after.peak_stages)),
        ("weights on the device", written(push.peak_weights), written(after.peak_bytes)),
    ]
    if facts.kind == "disk":
        found.append(("written, a push", written(push.written), written(mean("written"))))
    return [
        *found,
        ("waiting", f"{push.share:.0%}", f"{mean('stall') / moved if moved else 0.0:.0%}"),
        ("a push takes", _time(push.seconds), _time(moved)),
    ]


def table(plan: Plan, before: Traffic, after: Traffic, pushes: int) -> str:
    """`beside` as text."""
    return "\n".join(_aligned([("", "predicted", "measured"), *beside(plan, before, after, pushes)]))


def _aligned(lines: Iterable[Row]) -> list[str]:
    lines = list(lines)
    first, second = (max(len(line[n]) for line in lines) for n in (0, 1))
    return [f"{a:<{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in lines]


def _allowed(budget: int | None, said: str) -> str:
    return "" if budget is None else f"; the budget is {said}"


def _batches(count: int) -> str:
    return "micro-batch" if count == 1 else "micro-batches"


def _plural(word: str, count: float) -> str:
    return word if count == 1 else f"{word}es" if word.endswith("s") else f"{word}s"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
