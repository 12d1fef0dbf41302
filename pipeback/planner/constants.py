"""Constants: the numbers of the cost model that no data sheet has; in the catalogue, with how they were fitted."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from pipeback.planner import catalogue


@dataclass(frozen=True)
class Constants:
    """What `costs` multiplies by."""

    efficiency: float  # of the peak, that large products reach
    small_tokens: float  # tokens at which a product takes twice as long as its FLOP say
    small_width: float  # width at which a product takes twice as long as its FLOP say
    fused_attention: float  # of what large products reach, that a fused attention does
    activation_moves: float  # times that a kept activation is moved to or from memory per forward
    score_moves: float  # times that a kept attention score is
    launch: float  # seconds to launch the kernels of a module, per forward
    launch_reduction: float  # seconds to launch an all-reduce
    scale_up: float  # share of a node's links that collectives reach
    scale_out: float  # share of the network that collectives across nodes reach
    latency: float  # seconds of a collective, beside its bytes
    message: float  # share of the network that messages between stages reach; above 1: some are hidden
    message_latency: float  # seconds of a message, beside its bytes
    reduce: float  # share of the network that the gradients' all-reduce reaches
    optimizer: float  # bytes per parameter that a step of Adam moves
    step: float  # seconds per step for all else
    name: str = ""
    fitted_on: str = ""
    valid: str = ""  # what they have been compared with
    ranges: tuple[tuple[str, int, int], ...] = ()  # least and most devices, tensor, width and context of those runs
    recompute: tuple[str, ...] = ()  # how they recompute; empty: any way
    shard: str = ""  # the options that they are for, as `Option.shard` has it; "": any
    devices: tuple[str, ...] = ()  # and the devices; empty: any


NUMBERS = tuple(one.name for one in fields(Constants) if one.type == "float")
UNITS = {
    "small_tokens": "tokens", "small_width": "width", "activation_moves": "times", "score_moves": "times",
    "launch": "s", "launch_reduction": "s", "latency": "s", "message_latency": "s", "optimizer": "bytes", "step": "s",
}  # fmt: skip


def constants(name: str = "default") -> Constants:
    """The constants of this name in the catalogue. Raises ValueError for an unknown name, or a missing number."""
    entries: dict[str, Any] = catalogue.table("constants")
    key = catalogue.key("set of constants", name, entries)
    entry = {one: value for one, value in entries[key].items() if one in {f.name for f in fields(Constants)}}
    missing = [number for number in NUMBERS if number not in entry]
    if missing:
        raise ValueError(f"[constants.{key}] has no {missing[0]}; write the entry as `pipeback plan fit` prints it")
    ranges = tuple((name, least, most) for name, (least, most) in entry.get("ranges", {}).items())
    several = {name: tuple(entry.get(name, ())) for name in ("devices", "recompute")}
    return Constants(**{**entry, **several, "name": key, "ranges": ranges})


def best_for(device: str, shard: str) -> Constants:
    """The set that is for such options on this device, or else the default."""
    return _best_for(device, shard, os.environ.get(catalogue.OWN, ""))


@lru_cache(maxsize=64)
def _best_for(device: str, shard: str, own: str) -> Constants:
    """own: the user's files, with which the answer may change."""
    for name in catalogue.table("constants"):
        found = constants(name)
        if device in found.devices and found.shard in ("", shard):
            return found
    return constants()
