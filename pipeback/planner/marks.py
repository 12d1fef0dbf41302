"""Marks: why numbers of an option lie outside what was compared with measurements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeback.planner.constants import Constants

FITTED_ON = "A100"  # whose runs the constants are of that are for all devices


def marks(one: Any) -> list[str]:
    """What to say of an option that comes in as an argument only; nothing if all of it was compared."""
    option, device, used = one.option, one.job.cluster.device, one.job.costs(one.option).constants
    found = [] if one.job.constants else list(_constants(one, used))
    if option.store != "device":
        found.append("weight streaming is compared with runs on this machine alone")
    if option.pipeline > 1 and option.technique.order.startswith("zb"):
        found.append("of zero-bubble schedules, bubbles are compared with published ones, and seconds are not")
    if option.technique.flows and option.pipeline > 1:
        found.append("of pipelines that are never drained, seconds are compared with runs on two processes alone")
    if one.slow.known == "assumed":
        found.append(f"the price of the delay is assumed: {one.slow.source}")
    numbers = {"tflops", "memory", "memory_speed"} | ({"scale_out"} if one.job.cluster.nodes > 1 else set())
    numbers |= {"host", "host_memory", "host_speed"} if option.store != "device" else set()
    numbers |= {"disk_read", "disk_write"} if option.store == "disk" else set()
    if doubtful := sorted(numbers & device.unconfirmed):
        found.append(f"of {device.name} not confirmed: {', '.join(doubtful)}")
    return found


def _constants(one: Any, used: Constants) -> Iterator[str]:
    """Where the constants' own runs end."""
    option, model, device = one.option, one.job.model, one.job.cluster.device
    fitted = used.devices[0] if used.devices else FITTED_ON
    if not device.name.startswith(fitted):
        yield f"constants of {fitted}, by the data sheet of {device.name}"
    values = {"devices": option.devices, "tensor": option.tensor, "context": model.context}
    if model.shape:
        values["width"] = model.shape.width
    for name, least, most in used.ranges:
        if name in values and not least <= values[name] <= most:
            among = f"{least:,}" if least == most else f"{least:,} to {most:,}"
            yield f"constants {used.name} are compared with runs of {name} {among} alone"
    if used.recompute and option.recompute not in used.recompute:
        yield f"constants {used.name} are compared with runs of recompute {' and '.join(used.recompute)} alone"
