"""Hardware: devices, the links between them, and clusters of them, from the catalogue or by numbers.

cluster = devices("64xA100")                                   # as the catalogue has it, eight per node
cluster = devices("8xH100", link="50 GB/s", host="1 TB")       # another network; host memory of all together
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple

from pipeback.planner import catalogue
from pipeback.planner.quantities import size, speed, whole

GIGA = 1e9


class Link(NamedTuple):
    """A link of a device, one way."""

    speed: float  # bytes per second
    name: str = "link"


@dataclass(frozen=True)
class Device:
    """What one device computes, holds and moves."""

    name: str
    flops: float  # operations per second at the peak: dense products in a 16-bit type
    memory: float  # bytes
    memory_speed: float  # bytes per second
    host: Link  # from host memory
    scale_up: Link  # to the devices of its node
    scale_out: Link  # to other nodes
    per_node: int = 8
    host_memory: float = 0.0  # bytes
    host_speed: float = 50 * GIGA  # bytes per second of host memory
    disk_read: float = 3 * GIGA
    disk_write: float = 2 * GIGA
    title: str = ""
    source: str = "given by you"
    unconfirmed: frozenset[str] = field(default_factory=frozenset)  # numbers without a primary source

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "memory_speed", "host_speed", "disk_read", "disk_write", "per_node"):
            if not getattr(self, name) > 0:
                raise ValueError(f"device {self.name}: {name} must be above 0, but is {getattr(self, name)!r}")
        for link in ("host", "scale_up", "scale_out"):
            if not getattr(self, link).speed > 0:
                raise ValueError(
                    f"device {self.name}: {link} must be above 0 B/s, but is {getattr(self, link).speed!r}"
                )
        if not self.host_memory >= 0:
            raise ValueError(f"device {self.name}: host_memory must be at least 0, but is {self.host_memory!r}")

    @property
    def intensity(self) -> float:
        """Operations per byte of the host link: tokens per weight pass from which 16-bit weights stream for free."""
        return self.flops / self.host.speed


def device(name: str) -> Device:
    """A device of the catalogue. Raises ValueError for an unknown one, and suggests the nearest."""
    entries = catalogue.table("devices")
    also = {other: known for known, entry in entries.items() for other in entry.get("also", ())}
    key = catalogue.key("device", name, [*entries, *also])
    return _built(also.get(key, key), entries[also.get(key, key)])


def _built(name: str, entry: Mapping[str, Any]) -> Device:
    given = catalogue.defaults("devices")
    for need in ("tflops", "memory", "memory_speed", "host", "scale_up"):
        if need not in entry:
            raise ValueError(f"[devices.{name}] has no {need}; give it in the unit that devices.toml names")
    values = {"scale_out": entry["scale_up"], **given, **entry}
    taken = {one for one in given.get("unconfirmed", ()) if one not in entry}
    speeds = {
        one: values[one] * GIGA for one in ("memory_speed", "host_memory", "host_speed", "disk_read", "disk_write")
    }
    return Device(
        name, flops=values["tflops"] * 1e12, memory=values["memory"] * GIGA, per_node=values["per_node"], **speeds,
        host=Link(values["host"] * GIGA, "host link"), scale_up=Link(values["scale_up"] * GIGA, "links in the node"),
        scale_out=Link(values["scale_out"] * GIGA, "network"), title=values.get("title", name),
        source=values.get("source", "a file of your own"),
        unconfirmed=frozenset(entry.get("unconfirmed", ())) | taken,
    )  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """So many devices of one kind; those of a node are numbered one after the other."""

    device: Device
    count: int = 1

    def __post_init__(self) -> None:
        whole("devices", self.count)

    @property
    def nodes(self) -> int:
        return ceil(self.count / self.device.per_node)

    def of(self, count: int) -> Cluster:
        """So many devices of the same kind."""
        return replace(self, count=count)

    def __str__(self) -> str:
        return f"{self.count}x{self.device.name}"


def devices(
    text: str | Cluster | Device, *, link: str | float | None = None, host: str | float | None = None
) -> Cluster:
    """A cluster from text such as "64xA100" or "H100".

    link: the network's speed per device, one way: "50 GB/s". host: the host memory of all devices together: "1 TB".
    Raises ValueError for what cannot be read, and suggests the nearest device.
    """
    if isinstance(text, Cluster):
        cluster = text
    elif isinstance(text, Device):
        cluster = Cluster(text)
    else:
        found = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?([A-Za-z][\w.-]*)\s*", text)
        if found is None:
            raise ValueError(f"devices={text!r} cannot be read; write for example devices=64xA100")
        cluster = Cluster(device(found[2]), whole("devices", found[1] or 1))
    if link is not None:
        known = cluster.device.unconfirmed - {"scale_out"}
        there = Link(speed("link", link), "network")
        cluster = replace(cluster, device=replace(cluster.device, scale_out=there, unconfirmed=known))
    if host is not None:
        known = cluster.device.unconfirmed - {"host_memory"}
        each = size("host", host) / cluster.count
        cluster = replace(cluster, device=replace(cluster.device, host_memory=each, unconfirmed=known))
    return cluster
