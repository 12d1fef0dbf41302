"""Refusals: what is said where nothing fits, with the nearest that does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeback.planner import catalogue
from pipeback.planner.candidates import BATCHES, Fixed
from pipeback.planner.estimates import Estimate, Job
from pipeback.planner.found import Found
from pipeback.planner.hardware import Cluster, device
from pipeback.planner.quantities import gigabytes, large
from pipeback.planner.ranking import ranked
from pipeback.planner.techniques import Technique

MOST = 2**17  # devices that are tried


class NothingFits(ValueError):
    """No option of a search fits. required: bytes of device memory that the nearest one needs; 0 if there is none."""

    def __init__(self, text: str, required: float = 0.0) -> None:
        super().__init__(text)
        self.required = required


def nothing_fits(job: Job, techniques: Sequence[Technique], fixed: Fixed, found: Found) -> NothingFits:
    """What to raise where a search has found nothing."""
    if not found.refused:
        if not fixed.told and (fewer := _fewer(job, techniques, fixed)) is not None:
            return NothingFits(
                f"{job.cluster} are more devices than updates of {job.model.name} can be shared out to, which have at "
                f"most {BATCHES:g} critical batches of {large(job.loss.critical_batch)} tokens; "
                f"give devices={fewer.job.cluster}, or a larger critical_batch="
            )
        return NothingFits(
            f"no way to share {job.cluster} out agrees with what is fixed ({fixed.told or 'nothing'}); "
            "leave batch=, stages=, replicas= or micro_batch= open, or give other devices="
        )
    here = job.cluster.device
    if enough := [one for one in found.refused if one.required <= here.memory]:
        return _host_lacks(job, techniques, fixed, min(enough, key=lambda one: one.footprint.host))
    nearest = min(found.refused, key=lambda one: one.required)
    full = nearest.footprint.fullest
    most, size = max(zip(full, full._fields), key=lambda pair: pair[0])
    cures = [f"devices={one.job.cluster}" for one in _elsewhere(job, techniques, fixed)]
    if fixed.stores == ("device",):
        stores = replace(fixed, stores=("host", "disk"))
        cures += [f"store={one.option.store}" for one in ranked(job, techniques, stores)][:1]
    return NothingFits(
        f"{job.model.name} does not fit on {job.cluster}: {_told(nearest)} needs least, "
        f"{gigabytes(nearest.required)} GB per device, of which {gigabytes(most)} GB are {size}, and {here.name} has "
        f"{gigabytes(here.memory)} GB. "
        f"What fits: {', '.join(cures) or 'nothing in the catalogue; cut the model or the context'}",
        nearest.required,
    )


def _host_lacks(job: Job, techniques: Sequence[Technique], fixed: Fixed, nearest: Estimate) -> NothingFits:
    """What to raise where the devices have memory enough, and their host has not."""
    needed, there = (job.cluster.count * one for one in (nearest.footprint.host, job.cluster.device.host_memory))
    cures = [f"host={math.ceil(needed / 1e8) / 10:g}GB"]
    if ranked(job, techniques, replace(fixed, stores=("device",))):
        cures.append("store=device")
    return NothingFits(
        f"{job.model.name} does not fit on {job.cluster}: {_told(nearest)} needs {gigabytes(needed)} GB of host "
        f"memory, and there are {there / 1e9:.3g} GB. What fits: {', '.join(cures)}",
        nearest.required,
    )


def _fewer(job: Job, techniques: Sequence[Technique], fixed: Fixed) -> Estimate | None:
    """The best option of the most devices, a power of two, that can be shared out; None if there is none."""
    number = 2 ** (job.cluster.count.bit_length() - 1)
    while number:
        if found := ranked(replace(job, cluster=job.cluster.of(number)), techniques, fixed):
            return found.best
        number //= 2
    return None


def _told(one: Estimate) -> str:
    option = one.option
    ways = f"data={option.data}, stages={option.pipeline}, tensor={option.tensor}"
    return f"{one.title} ({ways}, recompute={option.recompute})"


def _elsewhere(job: Job, techniques: Sequence[Technique], fixed: Fixed) -> Iterator[Estimate]:
    """The fewest more devices of this kind, and as many of the kind with the least memory that suffices."""
    number = job.cluster.count
    while number < MOST:
        number *= 2
        if found := ranked(replace(job, cluster=job.cluster.of(number)), techniques, fixed):
            yield found.best
            break
    others = sorted((device(name) for name in catalogue.table("devices")), key=lambda one: one.memory)
    for other in others:
        there = Cluster(other, job.cluster.count)
        larger = other.memory > job.cluster.device.memory
        if larger and (found := ranked(replace(job, cluster=there), techniques, fixed)):
            yield found.best
            break
