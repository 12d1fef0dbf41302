"""Training plan: the bytes, passes over the weights, waiting and fitting batches of training, before it begins.

    plan = pipe.plan(x, y)                # rehearses, trains nothing
    print(plan)
    ...
    print(beside(plan, before, pipe.traffic(), pushes))

A dry run of the real loop and order counts the bytes; its three clocks, at measured bandwidths, give the seconds
(`dry_run`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeback.byte_sizes import written
from pipeback.counts import counted, plural
from pipeback.notebook import seconds
from pipeback.notebook import table as html_table
from pipeback.plan.dry_run import Room
from pipeback.plan.forecast import HOST, Forecast, HostBytes, disk_room, foresee, host_room
from pipeback.plan.survey import PlanInputs
from pipeback.streaming.traffic import Traffic

HIDDEN = 0.05  # streaming counts as hidden where no more than this share of the time is waiting
FAR = 256  # the most micro-batches per push that are counted; beyond, bytes are taken to grow as before
WORK = 40_000  # the most operations of a dry run in the search for a window
DAY = 86_400  # seconds in a day


class Plan(NamedTuple):
    """The bytes and seconds that training will take; over processes, those of this process."""

    facts: PlanInputs
    micro_batches: int  # per push
    push: Forecast
    device: Room
    host: HostBytes
    disk: int  # bytes of the files, which hold two versions
    passes: float  # how often all weights come to the device per push
    gradient_passes: float
    hides: tuple[int | None, int | None]  # the fewest and most micro-batches per push that hide streaming
    fits: int | None  # micro-batches per push that fit on the device; None: any number
    day: float  # bytes written to files per day of training

    @property
    def window(self) -> tuple[int, int | None]:
        """The fewest and the most micro-batches per push that fit and hide streaming, or only fit if none hides it."""
        ends = [end for end in (self.hides[1], self.fits) if end is not None]
        return self.hides[0] or 1, min(ends, default=None)

    def __str__(self) -> str:
        return "\n".join([title(self), *_aligned(rows(self))])

    def __repr__(self) -> str:
        return f"Plan({title(self)})"

    def _repr_html_(self) -> str:
        return html_table(title(self), ["", "predicted", "of what"], rows(self))


# -- counting ----------------------------------------------------------------------------------------------------------


def plan(facts: PlanInputs, micro_batches: int, pushes: int | None = None) -> Plan:
    """Plan pushes of so many micro-batches.

    pushes: over how many the numbers are averaged, with an empty pipeline before and after; None: the steady state.
    """
    push = foresee(facts, micro_batches, pushes)
    weights = sum(p.load.weights for p in facts.stages.values()) * facts.replicas
    gradients = sum(p.load.gradients for p in facts.stages.values()) * facts.replicas
    return Plan(
        facts, micro_batches, push, push.device, host_room(facts, push), disk_room(facts, push),
        push.weights_in / weights if weights else 0.0, push.gradients_out / gradients if gradients else 0.0,
        hidden(facts, push, micro_batches), most(facts),
        push.written * DAY / push.seconds if push.seconds else 0.0,
    )  # fmt: skip


# -- how large a push may and should be --------------------------------------------------------------------------------


def hidden(facts: PlanInputs, push: Forecast, micro_batches: int) -> tuple[int | None, int | None]:
    """The fewest and the most micro-batches per push with which waiting is at most HIDDEN.

    (None, None): no number does this. The second is None if no number is too many. The numbers are exact to one part in
    sixteen. Larger pushes may hide less, if a stage does so many operations in a row that it waits for its own updates.
    """
    if facts.kind == "device":
        return 1, None

    def waits(m: int) -> bool:
        return (push if m == micro_batches else foresee(facts, m)).share > HIDDEN

    if facts.outside and any(facts.delays) and not facts.stacks:  # micro-batches go one by one, however many are pushed
        return (None, None) if waits(1) else (1, None)

    def edge(inside: int, outside: int) -> int:
        """The last number that is still inside."""
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


def most(facts: PlanInputs) -> int | None:
    """The most micro-batches per push that fit on the device; 0 if not even one does, None if any number does."""
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


# -- printing ----------------------------------------------------------------------------------------------------------

WHERE = {"device": "on the device", "host": "in host memory", "disk": "in files"}
Row = tuple[str, str, str]  # what, how much, of what


def title(plan: Plan) -> str:
    facts = plan.facts
    some = "" if len(facts.stages) == facts.depth else f"{len(facts.stages)} of "
    ahead = "" if facts.prefetch is None else f", {facts.prefetch} {plural('stage', facts.prefetch)} fetched ahead"
    return (
        f"{facts.method!r}: {some}{counted(facts.depth, 'stage')}, weights {WHERE[facts.kind]}{ahead}; "
        f"pushes of {plan.micro_batches} × {facts.samples} {plural('sample', facts.samples)}"
        f"{f', assumed on {facts.assumed}' if facts.assumed else ''}"
    )


def rows(plan: Plan) -> list[Row]:
    """The lines of a printed plan, one per number."""
    facts, push, device = plan.facts, plan.push, plan.device
    at_once = "" if facts.kind == "device" else f" ({push.peak_stages} of {counted(len(facts.stages), 'stage')})"
    found = [
        ("on the device", written(device.total),
         f"weights {written(device.weights)}{at_once}, gradients {written(device.gradients)}, "
         f"activations {written(device.activations)}{_allowed(facts.device_memory, facts.written[0])}")
    ]  # fmt: skip
    if plan.host.total:
        parts = ", ".join(f"{name} {written(size)}" for name, size in zip(HOST, plan.host, strict=True) if size)
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
                "weights in per push",
                written(push.weights_in),
                f"{plan.passes:.3g} {plural('pass', plan.passes)} over all weights, {to_device}",
            ),
            (
                "gradients out per push",
                written(push.gradients_out),
                f"{plan.gradient_passes:.3g} {plural('pass', plan.gradient_passes)}{away}",
            ),
            ("waiting", f"{push.share:.0%}", f"{seconds(push.stall)} of the {seconds(push.seconds)} of a push"),
            ("batch window", *_window(plan)),
        ]
    else:
        found.append(("a push takes", seconds(push.seconds), "of computing"))
    if facts.kind == "disk":
        read, write = facts.bandwidth.disk_read, facts.bandwidth.disk_write
        found.append(
            ("written per day", written(plan.day),
             f"{written(push.written)} per push, at {written(write)}/s; read at {written(read)}/s")
        )  # fmt: skip
    return found


def _window(plan: Plan) -> tuple[str, str]:
    """The batch window as text, and the reasons why it ends where it does."""
    facts, (low, high) = plan.facts, plan.window
    room = facts.written[0] if facts.device_memory else written(facts.device_room or 0)
    if plan.fits == 0:
        return "none", f"not even one micro-batch per push fits into {room}"
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
    return text, f"micro-batches per push{'; ' if beyond else ''}{', '.join(beyond)}"


def beside(plan: Plan, before: Traffic, after: Traffic, pushes: int) -> list[Row]:
    """Rows (what, predicted, measured) for the pushes between two calls of `Pipeline.traffic`, as averages per push.

    Bytes are predicted exactly if the plan was made for so many `pushes`.
    """
    facts, push = plan.facts, plan.push

    def mean(name: str) -> float:
        moved: float = getattr(after, name) - getattr(before, name)
        return moved / pushes

    moved = mean("seconds")
    found = [
        ("weights in per push", written(push.weights_in), written(mean("weights_in"))),
        ("stages fetched per push", f"{push.fetches:.4g}", f"{mean('fetches'):.4g}"),
        ("gradients out per push", written(push.gradients_out), written(mean("gradients_out"))),
        ("stages on the device", str(push.peak_stages), str(after.peak_stages)),
        ("weights on the device", written(push.peak_weights), written(after.peak_bytes)),
    ]
    if facts.kind == "disk":
        found.append(("written per push", written(push.written), written(mean("written"))))
    return [
        *found,
        ("waiting", f"{push.share:.0%}", f"{mean('stall') / moved if moved else 0.0:.0%}"),
        ("a push takes", seconds(push.seconds), seconds(moved)),
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
