"""Heartbeat: the facts that ranks know of one another (identity, activity, whether alive), and the store for them.

The store is the pipeline's own and is served by its first rank: torch's default one may end before the pipeline does. A
process that reaches the store can end the run. So it listens on loopback where all ranks are on one host, and its keys
begin with a secret, which ranks learn from torch's default store.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist


class RankIdentity(NamedTuple):
    """The identity of a rank."""

    host: str
    place: str  # processes of one place see each other's process numbers and loopback; empty: unknown
    process: int
    born: str  # distinguishes a process from a later one of the same number; empty: unknown

    def gone(self, here: str) -> bool:
        """Whether the process has ended, as far as the place `here` can see it."""
        return self._seen(here) in ("", "Z", "X")

    def stopped(self, here: str) -> bool:
        """Whether the process is stopped (SIGSTOP, a debugger), as far as the place `here` can see it."""
        return self._seen(here) in ("T", "t")

    def _seen(self, here: str) -> str:
        """Return the state of the process as in /proc; "" if there is no such process, "?" if that is unknown."""
        if not here or self.place != here:
            return "?"
        if not self.born:  # this system has no /proc
            try:
                os.kill(self.process, 0)
            except ProcessLookupError:
                return ""
            except PermissionError:
                pass
            return "?"
        state, born = _stat(self.process)
        return state if born in (self.born, "?") else ""


def my_facts() -> RankIdentity:
    """Return the facts of this process."""
    host, process = socket.gethostname(), os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        return RankIdentity(host, " ".join([boot, *spaces]), process, _stat(process)[1])
    except OSError:
        # not os.kill(n, 0), which on Windows would end process n
        return RankIdentity(host, "" if os.name == "nt" else f"{host} {uuid.getnode()}", process, "")


def _stat(process: int) -> tuple[str, str]:
    """Return the state and the start time of a process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    except OSError:
        return "?", "?"
    fields = text.rpartition(")")[2].split()  # the name before it may contain blanks and brackets
    return fields[0], fields[19]


class Heartbeat(NamedTuple):
    """A beat: what a rank reports that it is doing. Seconds are durations on its own clock at the time of the beat."""

    beat: int = 0  # how many beats it has written; a rank is silent while this number stays
    doing: str = "starting"
    seconds: float = 0.0  # how long it has been doing that
    waits: Sequence[tuple[list[int], str, float]] = ()  # (ranks, what, seconds); empty while its loop works
    pushed: int = 0  # micro-batches that it has pushed
    left: bool = False  # whether it has ended its part
    over: bool = False  # whether it needs the store no longer, since it has left or knows the fault

    def dump(self) -> str:
        return json.dumps(self)

    @staticmethod
    def load(text: bytes) -> Heartbeat:
        return Heartbeat(*json.loads(text))


def one_host(facts: Iterable[RankIdentity]) -> bool:
    """Whether all of these ranks see each other's loopback."""
    places = {each.place for each in facts}
    return len(places) == 1 and "" not in places


def host_store(timeout: float, near: bool = False) -> tuple[dist.Store, str]:
    """Return a store that this process serves, and the address "SECRET@HOST:PORT" at which the other ranks join it.

    timeout: seconds that a call waits. near: whether it listens on loopback alone; otherwise on all interfaces.
    """
    port, listening = 0, None
    if near:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port, listening = server.getsockname()[1], server.detach()  # owned by the store from here on
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout),
        master_listen_fd=listening,
    )  # fmt: skip
    secret = secrets.token_hex(16)
    return dist.PrefixStore(secret, store), f"{secret}@{'127.0.0.1' if near else _own_address()}:{store.port}"


def join_store(address: str, timeout: float, near: bool = False) -> dist.Store:
    """Return the store that another rank serves at `address`.

    near: whether it is reached by loopback. Raises ConnectionError if it is not reached within `timeout` seconds.
    """
    secret, _, address = address.rpartition("@")
    host, _, port = address.rpartition(":")
    host = "127.0.0.1" if near else host
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout))
        return dist.PrefixStore(secret, store)
    except RuntimeError as error:  # torch's own errors are RuntimeErrors
        raise ConnectionError(
            f"the first rank of the pipeline is not reached at {address} from {socket.gethostname()}: every host must "
            "be able to connect to it (set MASTER_ADDR to a name or address that all hosts know; mind firewalls)"
        ) from error


def _own_address() -> str:
    """Return the address of this host for the others: the one that it would use itself to reach MASTER_ADDR."""
    master = os.environ.get("MASTER_ADDR", "")
    with suppress(OSError):
        # "connecting" a datagram socket sends nothing; 192.0.2.1 belongs to no host, so this finds the default route
        for family, kind, _, _, there in socket.getaddrinfo(master or "192.0.2.1", 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(there)
                own = probe.getsockname()[0]
                # this is the master itself, whose name may be a loopback address in its own /etc/hosts
                return master if master and (own == "::1" or own.startswith("127.")) else own
    return "127.0.0.1"
