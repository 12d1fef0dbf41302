"""Wires between real processes: what comes out is what went in, in order, lying alike; waits end."""

import os
import random
import subprocess
import sys

import pytest
import torch

from pipeback.distributed.transport.shared_memory import SharedWire, Unavailable
from pipeback.tensors.layout import MessageLayout, form_of, outline_of
from tests.helpers.choice import diagonal
from tests.helpers.wire_ends import Remote, both, messages, seen, wire

KINDS = ["shared", "gloo", "direct"]


def couple(folder, seconds=60):
    ends = [Remote(rank, str(folder)) for rank in (0, 1)]
    both(ends, "join", seconds)
    return ends


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    ends = couple(tmp_path_factory.mktemp("wires"))
    yield ends
    for end in ends:
        end.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_out_is_what_went_in(ends, kind):
    wire(ends, kind)
    names = [*messages(), *messages(), *(name for name in messages() for _ in range(3))]
    ends[0].tell("send", kind, names)
    headers, came = ends[1].ask("recv", kind, len(names))
    assert headers == [(("FB"[n % 2], n, 10**12 + n), n - 3) for n in range(len(names))]
    for name, sent, received in zip(names, ends[0].answer(), came, strict=True):
        assert sent == received, name


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_change_with_any_message(ends, kind):
    wire(ends, kind, bound=3)
    draw = random.Random(3)
    shapes = [(draw.choice([0, 1, 5, 300, 40_000]), draw.randint(1, 3)) for _ in range(150)]
    ends[0].tell("send_shapes", kind, shapes)
    ends[1].ask("recv_shapes", kind, shapes)
    ends[0].answer()


@pytest.mark.parametrize("kind", KINDS)
def test_large_messages(ends, kind):
    wire(ends, kind, bound=2)
    shapes = [(10,), (1 << 23,), (1 << 23,), (3,), (1 << 20,)]  # 32 MB
    ends[0].tell("send_shapes", kind, shapes)
    ends[1].ask("recv_shapes", kind, shapes)
    ends[0].answer()


@pytest.mark.parametrize(("kind", "bound"), diagonal(KINDS, [1, 5]))
def test_a_full_wire_waits_and_goes_on(ends, kind, bound):
    wire(ends, kind, bound)
    ends[0].ask("send_behind", kind, 20)
    sent = settled(ends[0])
    # gloo has one more on its way, if only it fits the receive that is posted
    assert bound <= sent <= bound + (kind != "shared")
    ends[1].ask("recv_shapes", kind, [(100,)] * 20)
    assert settled(ends[0]) == 20


def settled(end):
    """Messages sent when no more are for a while."""
    last = -1
    while (sent := end.ask("progress")) != last:
        last = sent
        end.process.join(0.3)
    return sent


@pytest.mark.parametrize("kind", KINDS)
def test_the_pulse_ends_a_wait_for_a_message(ends, kind):
    wire(ends, kind)
    ends[1].tell("waits", kind, "recv", 0.3)
    error, text, _, seconds = ends[1].answer()
    assert error == "Ended" and 0.2 < seconds < 2, text


@pytest.mark.parametrize("kind", KINDS)
def test_the_pulse_ends_a_wait_for_room(ends, kind):
    wire(ends, kind)
    error, text, _, seconds = ends[0].ask("waits", kind, "send", 0.3)
    assert error == "Ended" and 0.2 < seconds < 2, text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["recv", "send"])
def test_close_ends_a_wait_of_another_thread(ends, kind, call):
    wire(ends, kind)
    error, text, _, seconds = ends[call == "recv"].ask("waits", kind, call, 20, 0.3)
    assert error == "Broken" and "closed at this end" in text and seconds < 2


def test_close_is_seen_at_the_other_end(ends):
    wire(ends, "shared")
    ends[0].ask("send_shapes", "shared", [(2,), (3,)])
    ends[0].ask("close", "shared")
    ends[1].ask("recv_shapes", "shared", [(2,), (3,)])  # what was sent is not lost
    assert ends[1].ask("waits", "shared")[:3] == (
        "Broken", "the connection to rank 0 is broken: it has closed its end", 0
    )  # fmt: skip
    wire(ends, "shared")
    ends[1].ask("close", "shared")
    assert ends[0].ask("waits", "shared", "send")[2] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["recv", "send"])
def test_a_killed_peer_is_noticed(tmp_path, kind, call):
    ends = couple(tmp_path)
    wire(ends, kind)
    dead, left = ends if call == "recv" else ends[::-1]
    if call == "recv":
        ends[0].ask("send_shapes", kind, [(5,), (5,)])
        ends[1].ask("recv_shapes", kind, [(5,)])
    left.tell("waits", kind, call)
    dead.tell("die")
    error, _, peer, seconds = left.answer()
    assert error == "Broken" and peer == (0 if call == "recv" else 1) and seconds < 3
    assert left.stop() == 0


@pytest.mark.parametrize("regularly", [True, False])
def test_processes_end_with_receives_posted(tmp_path, regularly):
    ends = couple(tmp_path)
    for kind in KINDS:
        wire(ends, kind)
        ends[0].ask("send_shapes", kind, [(5,), (6,)])
        ends[1].ask("recv_shapes", kind, [(5,)])  # the other is never received
    both(ends, "leave", regularly)
    assert [end.stop() for end in ends] == [0, 0]


@pytest.mark.parametrize("regularly", [True, False])
def test_processes_end_while_a_thread_waits(tmp_path, regularly):
    ends = couple(tmp_path)
    for kind in KINDS:
        wire(ends, kind)
        ends[1].ask("waits_behind", kind)
    both(ends, "leave", regularly)
    assert [end.stop() for end in ends] == [0, 0]


def test_messages_in_step_touch_the_memory_of_one(ends):
    address = wire(ends, "shared", bound=64)
    for _ in range(20):
        ends[0].ask("send_shapes", "shared", [(1000,)])
        ends[1].ask("recv_shapes", "shared", [(1000,)])
    assert ends[0].ask("used", address.fd) <= 5 * 4096


def test_memory_that_is_out_of_reach():
    wire, address = SharedWire.offer(peer=1, bound=2, pulse=lambda: None)
    with pytest.raises(ValueError, match="at least 1"):
        SharedWire.offer(peer=1, bound=0, pulse=lambda: None)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    wrong = [dict(host="elsewhere"), dict(inode=1), dict(token=b"?" * 16), dict(fd=9999), dict(pid=child.pid)]
    for change in wrong:
        with pytest.raises(Unavailable):
            SharedWire.accept(address._replace(**change), peer=0, pulse=lambda: None)
    here = SharedWire.accept(address, peer=0, pulse=lambda: None)
    wire.send(("F", 1, 2), None)
    assert here.recv() == (("F", 1, 2), None, 0)


def test_no_shared_memory_on_this_system(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(Unavailable, match="no shared memory"):
        SharedWire.offer(peer=1, bound=2, pulse=lambda: None)


def test_what_cannot_travel():
    wire, address = SharedWire.offer(peer=1, bound=1, pulse=lambda: None)
    here = SharedWire.accept(address, peer=0, pulse=lambda: None)
    for message, word in [("text", "a str cannot travel"), ([1], "a list"), (torch.eye(2).to_sparse(), "to_dense")]:
        with pytest.raises(TypeError, match=word):
            wire.send(("F", 1, 0), message)
    wire.send(("F", 1, 0), 1.5)  # and the wire is as before
    assert here.recv()[1] == 1.5


@pytest.mark.parametrize("name", messages())
def test_an_outline_survives_bytes_and_packing(name):
    message = messages()[name]
    outline = MessageLayout.from_bytes(outline_of(message).to_bytes())
    assert outline == outline_of(message)
    buffer = torch.zeros(outline.nbytes + 64, dtype=torch.uint8)
    outline.pack(message, buffer, 64)
    assert seen(outline.unpack(buffer, 64)) == seen(message)


def test_only_elements_travel():
    grid = torch.randn(8, 8)
    for tensor, count in [(grid[2].expand(5, 8), 8), (grid[:, 1], 8), (grid[0, 0].expand(9, 9), 1), (grid[:0], 0)]:
        assert form_of(tensor).nbytes == 4 * count
