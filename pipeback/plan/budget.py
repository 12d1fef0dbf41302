"""Budget: refuses a push that exceeds device_memory or host_memory, with the numbers and the nearest that fits."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from pipeback.byte_sizes import written
from pipeback.counts import counted
from pipeback.plan.forecast import HOST, Forecast, HostBytes, foresee, host_room
from pipeback.plan.survey import PlanInputs, said, slot_bytes
from pipeback.plan.training_plan import most
from pipeback.stages.stage import Stage
from pipeback.streaming.store import HostStore, Store


def check_stages(stages: Sequence[Stage], store: Store, *, alone: bool = True) -> None:
    """Raise ValueError if the largest stage, or all weights in host memory, exceed the budgets whatever is pushed.

    alone: this process has all stages.
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


def check(facts: PlanInputs, micro_batches: int) -> None:
    """Raise ValueError if a push of so many micro-batches exceeds the budgets."""
    if facts.device_memory is None and facts.host_memory is None:
        return
    push = foresee(facts, micro_batches, 1)
    if facts.device_memory is not None and push.device.total > facts.device_memory:
        raise ValueError(_device_refusal(facts, push, micro_batches))
    host = host_room(facts, push)
    if facts.host_memory is not None and host.total > facts.host_memory:
        raise ValueError(_host_refusal(facts, host, push))


def _device_refusal(facts: PlanInputs, push: Forecast, micro_batches: int) -> str:
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
        fitting = written(foresee(facts, fit, 1).device.total)
        cures.append(f"at most {counted(fit, 'micro-batch')} per push ({fitting})")
    if not cures:
        cures.append(f"a model cut into more stages, of which {big.label} is the largest")
    cures.append(f"device_memory of at least {written(need.total)} ({need.total})")
    elsewhere = ""
    if facts.keeps and 2 * need.activations > need.total:
        elsewhere = '. activations="host" or "recompute" keep less on the device'
    some = f"{push.peak_stages} of {counted(len(facts.stages), 'stage')}"
    stages = f"{some}, the largest {big.label} of {written(big.load.weights)}"
    return (
        f"device_memory={facts.written[0]} is too little by {written(need.total - limit)}: the device would hold "
        f"{written(need.total)}, weights {written(need.weights)} ({stages}), gradients {written(need.gradients)} and "
        f"activations {written(need.activations)} (pushes of {micro_batches} × {counted(facts.samples, 'sample')}). "
        f"What fits: {'; '.join(cures)}{elsewhere}"
    )


def _smaller(facts: PlanInputs, micro_batches: int) -> str | None:
    """The largest micro_batch_size, by halving, with which a push of as many samples fits."""
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


def _host_refusal(facts: PlanInputs, host: HostBytes, push: Forecast) -> str:
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
    parts = ", ".join(f"{name} {written(size)}" for name, size in zip(HOST, host, strict=True) if size)
    return (
        f"host_memory={facts.written[1]} is too little by {written(host.total - limit)}: the host would hold "
        f"{written(host.total)}, {parts}. What fits: {'; '.join(cures)}"
    )
