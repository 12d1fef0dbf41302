"""What a rank finds out on its own: facts about processes, who is at fault, who reaches the store."""

import json
import os
import pickle
import time
from pathlib import Path

import pytest

from pipeback.distributed.health.blame import blame
from pipeback.distributed.health.health import Health
from pipeback.distributed.health.heartbeat import Heartbeat, host_store, join_store, my_facts, one_host
from pipeback.errors import RankError
from tests.distributed.ranks import RANKS, SOON


def test_facts_tell_a_process_from_a_later_one():
    facts = my_facts()
    assert not facts.gone(facts.place) and not facts.stopped(facts.place)
    assert not facts._replace(place="elsewhere", process=2**22 + 1).gone(facts.place)  # nothing is known
    assert facts._replace(process=2**22 + 1).gone(facts.place)
    if facts.born:
        assert facts._replace(born="1").gone(facts.place)


def test_nobody_listens_at_the_address():
    with pytest.raises(ConnectionError, match="not reached at 127.0.0.1:9 .* MASTER_ADDR"):
        join_store("127.0.0.1:9", 0.5)


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(RankError("rank 1 is gone", 1)))
    assert (str(error), error.rank) == ("rank 1 is gone", 1)


def test_a_rank_is_at_fault_only_as_long_as_it_is_waited_for():
    own = Heartbeat(doing="in its own code", seconds=100.0)
    assert blame(0, [1], "x", 25.0, {0: Heartbeat(), 1: own}, 30.0).seconds == 25.0
    busy = Heartbeat(doing="in the forward of stage 1, micro-batch 2", seconds=0.1)
    assert blame(0, [1], "x", 25.0, {0: Heartbeat(), 1: busy}, 30.0).seconds == 0.1


def test_a_wait_through_a_rank_leads_on():
    statuses = {
        0: Heartbeat(waits=[([1], "x", 29.0)]),
        1: Heartbeat(waits=[([2], "y", 28.0), ([0, 2], "state_dict()", 3.0)]),
        2: Heartbeat(doing="in its own code", seconds=40.0, pushed=7),
    }
    verdict = blame(0, [1], "x", 29.0, statuses, 30.0)
    assert (verdict.rank, verdict.seconds) == (2, 28.0)
    assert "having pushed 7 micro-batches, for 40.0 s while rank 1 waits for it (y)" in verdict.what


# -- who else reaches the store ------------------------------------------------------------------------------------


def listening(port):
    """The addresses that something listens at on this port, as /proc writes them."""
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return {at.rpartition(":")[0] for _, at, _, state, *_ in lines if state == "0A" and int(at[-4:], 16) == port}


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="there is no /proc/net here")
def test_on_one_host_the_store_listens_on_loopback():
    store, address = host_store(5, near=True)
    port = int(address.rpartition(":")[2])
    assert listening(port) == {"0100007F"}
    other = join_store(address, 5)
    other.set("a", "b")
    assert store.get("a") == b"b"
    far, address = host_store(5)
    assert listening(int(address.rpartition(":")[2])) - {"0100007F"}
    join_store(address, 5, near=True).set("a", "b")
    assert far.get("a") == b"b"


def test_who_meets_does_not_hang_with_the_store():
    """Calls of one store wait for one another, and one whose server stands still waits for long."""

    class Still:
        def __getattr__(self, name):
            return lambda *given: None

        def multi_get(self, names):
            return [b""] * len(names)

        def check(self, names):
            time.sleep(60)

    facts = {RANKS[1]: my_facts(), RANKS[0]: my_facts()._replace(host="elsewhere", place="elsewhere")}
    health = Health(Still(), RANKS[1], [RANKS[0], RANKS[1]], facts, 1.5)
    begin = time.monotonic()
    with pytest.raises(RankError):
        health.meet("built")
    assert time.monotonic() - begin < 5


def test_which_ranks_are_on_one_host():
    mine = my_facts()
    assert one_host([mine, mine]) == bool(mine.place)
    assert not one_host([mine, mine._replace(place="elsewhere")])
    assert not one_host([mine._replace(place=""), mine._replace(place="")])


def test_who_does_not_know_the_secret_cannot_tell_of_a_fault():
    store, address = host_store(5, near=True)
    facts = dict.fromkeys(RANKS[:1], my_facts())
    health = Health(store, RANKS[0], RANKS[:1], facts, 3.0)
    stranger = join_store(address.rpartition("@")[2], 5)
    stranger.set("fault", json.dumps((RANKS[0], "made up")))
    assert not health.failed.wait(2.5)
    health.check()
    join_store(address, 5).set("fault", json.dumps((RANKS[0], "told by a rank")))
    assert health.failed.wait(SOON)
    with pytest.raises(RankError, match="told by a rank"):
        health.check()
    health.leave()
