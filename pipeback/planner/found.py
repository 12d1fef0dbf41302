"""Found: the options of a search, ranked, as a table in text, HTML and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

from pipeback.counts import counted
from pipeback.notebook import table as html_table
from pipeback.planner.estimates import Estimate, Job
from pipeback.planner.hardware import Cluster
from pipeback.planner.quantities import days, gigabytes, large

HEAD = (
    "", "method", "data × pipe × tensor", "micro-batches", "recompute", "weights", "s/update", "bubble %", "waiting %",
    "MFU %", "GB device", "GB host", "GB disk", "D", "slow", "to target", "device-days", "cost",
    "binds",
)  # fmt: skip
WORDS = (1, 2, 3, 4, 5, 18)  # the columns that are no numbers
ALWAYS = 5  # the columns that are always shown
NOTHING = {"", "0.0", "0", "1.00", "device"}


class Point(NamedTuple):
    """The best option of so many devices."""

    devices: int
    best: Estimate


class Found(Sequence[Estimate]):
    """Options, best first. refused: of each method of which none fits, or of no pipeline, what needs least memory.

    again: the same search on another cluster; None where nothing fits.
    """

    def __init__(
        self, job: Job, ranked: Sequence[Estimate], refused: Sequence[Estimate],
        again: Callable[[Cluster], Found | None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.job, self.ranked, self.refused, self.again = job, list(ranked), list(refused), again

    def __len__(self) -> int:
        return len(self.ranked)

    @overload
    def __getitem__(self, n: int) -> Estimate: ...
    @overload
    def __getitem__(self, n: slice) -> list[Estimate]: ...
    def __getitem__(self, n: int | slice) -> Estimate | list[Estimate]:
        return self.ranked[n]

    def __iter__(self) -> Iterator[Estimate]:
        return iter(self.ranked)

    @property
    def best(self) -> Estimate:
        return self.ranked[0]

    def frontier(self, counts: Iterable[int] = ()) -> list[Point]:
        """The best option of several numbers of devices; counts: none for powers of two around that of the cluster."""
        here = self.job.cluster.count
        wanted = list(counts) or sorted({here} | {2**n for n in range(18) if here / 8 <= 2**n <= 8 * here})
        tried = ((number, self.again(self.job.cluster.of(number))) for number in wanted)
        return [Point(number, found.best) for number, found in tried if found is not None]

    @property
    def title(self) -> str:
        job = self.job
        return (
            f"{job.model.name} ({large(job.model.parameters)} parameters) on {job.cluster}, "
            f"{large(job.tokens)} tokens, {job.optimizer} in {job.precision.name} precision"
        )

    def rows(self, most: int | None = None) -> list[tuple[str, ...]]:
        """The cells below `HEAD`."""
        return [row(n, one) for n, one in enumerate(self.ranked[:most], start=1)]

    def columns(self, most: int | None = None) -> list[int]:
        """The columns that say something: not the same nothing in every row."""
        rows = self.rows(most)
        return [n for n in range(len(HEAD)) if n < ALWAYS or {row[n] for row in rows} - NOTHING]

    @property
    def notes(self) -> list[str]:
        """What the numbers rest on, and what does not fit."""
        job = self.job
        told = [
            "to target: until the loss that training without delay reaches with small batches after so many tokens; "
            f'updates of B tokens need 1 + B/{large(job.loss.critical_batch)} times as many, delays "slow" times',
            "binds: what costs most of the time to the target, if anything but computing takes more than a tenth",
        ]
        marks = list(dict.fromkeys(mark for one in self.ranked for mark in one.marks))
        told += [f"{DAGGER} {mark}" for mark in marks]
        for one in self.refused:
            device = job.cluster.device
            told.append(
                f"{one.title} does not fit: it needs at least {gigabytes(one.required)} GB per device, "
                f"{device.name} has {gigabytes(device.memory)}"
            )
        return told

    def table(self, most: int | None = 20) -> str:
        """The ranked options as text."""
        lines = [HEAD, *self.rows(most)]
        wide = {n: max(len(line[n]) for line in lines) for n in self.columns(most)}
        return "\n".join(
            "  ".join(line[n].ljust(w) if n in WORDS else line[n].rjust(w) for n, w in wide.items()).rstrip()
            for line in lines
        )

    def __str__(self) -> str:
        return "\n".join([self.title, self.table(), *self.notes])

    def __repr__(self) -> str:
        return f"Found({counted(len(self), 'option')} for {self.title})"

    def _repr_html_(self) -> str:
        return html_table(self.title, HEAD, self.rows(), "; ".join(self.notes))

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values; bytes, seconds and shares."""
        return {
            "model": self.job.model.name, "parameters": self.job.model.parameters, "devices": str(self.job.cluster),
            "tokens": self.job.tokens, "optimizer": self.job.optimizer,
            "critical_batch": self.job.loss.critical_batch,
            "options": [plain(one) for one in self.ranked], "refused": [plain(one) for one in self.refused],
            "notes": self.notes,
        }  # fmt: skip


DAGGER = "†"


def row(n: int, one: Estimate) -> tuple[str, ...]:
    """An option as a row of the table."""
    option, full = one.option, one.footprint.fullest.total
    chunks = f", {option.chunks} chunks" if option.chunks > 1 else ""
    return (
        f"{n}{DAGGER if one.marks else ''}",
        one.title,
        f"{option.data} × {option.pipeline} × {option.tensor}{chunks}",
        f"{option.micro_batches} × {option.micro_batch}",
        option.recompute,
        option.store,
        f"{one.step.seconds:.3g}",
        f"{100 * one.bubble:.1f}",
        f"{100 * one.waiting:.1f}",
        f"{100 * one.mfu:.1f}",
        gigabytes(full),
        gigabytes(one.footprint.host) if one.footprint.host else "",
        gigabytes(one.footprint.disk) if one.footprint.disk else "",
        str(option.delay),
        f"{one.slow.factor:.2f}",
        days(one.days * 86_400),
        amount(one.device_days),
        amount(one.cost) if one.cost else "",
        one.binds,
    )


def amount(value: float) -> str:
    """
    >>> amount(0.4), amount(7.26), amount(1234.5)
    ('0.4', '7.26', '1,234')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plain(one: Estimate) -> dict[str, Any]:
    """An option as plain values."""
    option = one.option
    fields = ("data", "pipeline", "tensor", "chunks", "micro_batch", "micro_batches", "recompute", "shard", "store")
    return {
        "method": option.technique.name, "title": one.title, **{name: getattr(option, name) for name in fields},
        "delay": option.delay, "samples_per_update": option.batch, "tokens_per_update": one.tokens_per_update,
        "seconds_per_update": one.step.seconds, "tokens_per_second": one.throughput, "seconds": one.step._asdict(),
        "bubble": one.bubble, "waiting": one.waiting, "mfu": one.mfu,
        "memory": one.memory(),
        "device_bytes": one.footprint.fullest.total, "required": one.required, "fits": one.fits,
        "host_bytes": one.footprint.host, "disk_bytes": one.footprint.disk,
        "slow": one.slow._asdict(), "batch_factor": one.batch_factor, "days_of_tokens": one.plain_days,
        "days": one.days, "device_days": one.device_days, "cost": one.cost or None, "binds": one.binds,
        "shares": one.losses, "outside_validated_range": one.marks,
    }  # fmt: skip
