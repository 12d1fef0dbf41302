"""Board: a part of a store that every process reaches, on which the ranks of a pipeline write that they have come.

They do so when they build the pipeline and, if one of them has failed, when they go back to a state that they keep.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist

from pipeback.distributed.health.heartbeat import RankIdentity
from pipeback.errors import RankError

REFUSED = "refused"  # the key that says which rank does not come, and why
ALL = b"all have come"


class Board:
    """The board of these global ranks, as `rank` sees it. Pipelines of other ranks may write on it at the same time:
    but for `REFUSED`, every key names a rank of this one.

    known: the facts of all ranks, if these go back. Then either all of them come, or each is told who did not.
    """

    def __init__(
        self, store: dist.Store, rank: int, everyone: Sequence[int], known: Mapping[int, RankIdentity] | None = None
    ) -> None:
        self._store, self._rank, self._everyone, self._known = store, rank, everyone, known

    def set(self, what: str, text: str) -> None:
        self._store.set(f"{what} {self._rank}", text)

    def get(self, what: str, of: int, seconds: float) -> str:
        """Return the text that rank `of` writes, once it is there. Raises what `all` raises if it never comes."""
        name = f"{what} {of}"
        self._wait([name], seconds)
        if not self._store.check([name]):
            raise self._lack([of], seconds)
        return self._store.get(name).decode()

    def all(self, what: str, mine: str, seconds: float) -> dict[int, bytes]:
        """Write a text, and return those of all ranks.

        Raises RuntimeError naming ranks that have written none, and RankError at once if one will write none.
        """
        board = self._store
        self.set(what, mine)
        names = {rank: f"{what} {rank}" for rank in self._everyone}
        self._wait(list(names.values()), seconds)
        missing = [rank for rank, name in names.items() if not board.check([name])]
        if self._known is not None:
            decided = f"{what} decided by those of {self._everyone[0]}"
            word = board.compare_set(decided, "", self._absence(missing, seconds) if missing else ALL.decode())
            if word != ALL:
                rank, told = json.loads(word)
                raise RankError(told, rank)
        if missing:
            raise self._lack(missing, seconds)
        return {rank: board.get(name) for rank, name in names.items()}

    def _wait(self, names: list[str], seconds: float) -> None:
        """Wait until these are there, but no longer than it takes to know that they will not be."""
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            while not self._store.check(names) and time.monotonic() < deadline:
                if self._store.check([REFUSED]) or self._gone():
                    break
                time.sleep(0.01)

    def _lack(self, missing: Sequence[int], seconds: float) -> Exception:
        """Return the error of ranks that have written nothing."""
        if self._store.check([REFUSED]):
            refused, why = json.loads(self._store.get(REFUSED))
            return RankError(f"rank {refused} does not come to build the pipeline: {why}", refused)
        return RuntimeError(
            f"{_ranks(missing)} did not come to build the pipeline within {seconds:g} s; every rank must call "
            "Pipeline(...), as often as the others (workers=pipeback.Processes(timeout=...) is the time they have)"
        )

    def _gone(self) -> list[int]:
        """The ranks that have ended since one of them failed."""
        known = self._known or {}
        return [rank for rank in known if rank != self._rank and known[rank].gone(known[self._rank].place)]

    def _absence(self, missing: Sequence[int], seconds: float) -> str:
        """What all ranks are told if some do not come to go back."""
        gone = [rank for rank in self._gone() if rank in missing]
        rank = (gone or missing)[0]
        why = (
            "its process has ended (killed by a signal, out of memory?)" if gone else
            f"it has made no call of the pipeline for {seconds:g} s (workers=pipeback.Processes(timeout=...) is the "
            "time that ranks have)"
        )  # fmt: skip
        return json.dumps((rank, f"rank {rank} did not come to go back to the last state after an error: {why}"))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
