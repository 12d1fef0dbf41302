"""Shared memory: a wire between processes of one host, over memory that both map, with semaphores in it.

The sender copies a message into a slot and posts `filled`; the receiver copies it out and posts `free`:

    control   token | free, filled | processes, closed | the last `bound` messages | which slots are free
    data      slot | slot | ...       a slot that is too small for a message moves to the end of the file

The lowest free slot is taken, so that two processes in step use the memory of one slot. The file has no name (memfd),
so that it is gone when both processes have ended, in whatever way.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import struct
from pathlib import Path
from typing import NamedTuple

import torch

from pipeback.distributed.transport.frame import Reader, Writer
from pipeback.distributed.transport.interruptible_wait import SLICE, Broken, Pulse
from pipeback.distributed.transport.semaphore import Semaphore, Unavailable
from pipeback.runtime.link import Name
from pipeback.tensors.layout import Message

__all__ = ["Address", "SharedWire", "Unavailable"]

_FREE, _FILLED = 128, 256  # the semaphores, in cache lines that are not fetched together
_PID, _CLOSED, _MESSAGES = 384, 400, 512  # two process numbers and two bytes, of sender and receiver; the messages
_PROCESS = struct.Struct("<q")
_MESSAGE = struct.Struct("<qqqq")  # its number from 1 on, its slot, its first byte, its bytes


class Address(NamedTuple):
    """The address at which a receiver finds the memory."""

    host: str  # the boot id of the running system
    pid: int
    fd: int
    inode: int
    token: bytes  # the first bytes of the memory
    bound: int


class SharedWire:
    """A wire over shared memory; `offer` makes the sender's end and `accept` the receiver's.

    peer: global rank of the other end, for errors. bound: messages that may be unreceived before `send` waits. pulse:
    called every 0.1 s of a wait; its error ends the wait. device: where received tensors are put. Raises Broken within
    0.3 s when the other process has ended; messages that it had sent are received first.
    """

    _closed = True
    _gone = False  # whether the other process has ended
    _process: int | None = None  # a descriptor that becomes readable when that process ends

    def __init__(self, memory: int, bound: int, peer: int, pulse: Pulse, sender: bool) -> None:
        self._memory = memory
        self.bound, self.peer, self._pulse, self._sender = bound, peer, pulse, sender
        self.device: torch.device | None = None
        self._control = mmap.mmap(memory, _control(bound))
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._free = Semaphore(self._control, _FREE, bound if sender else None)
        self._filled = Semaphore(self._control, _FILLED, 0 if sender else None)
        self._flags = _MESSAGES + bound * _MESSAGE.size  # a byte for every slot: 1 when free
        self._slots = [(0, 0)] * bound  # (first byte, bytes) of each slot; the sender sets them
        self._end = 0  # of the last slot
        self._count = 0  # messages that have passed this end
        self._writer, self._reader = Writer(), Reader()
        self._closed = False

    @classmethod
    def offer(cls, *, peer: int, bound: int, pulse: Pulse) -> tuple[SharedWire, Address]:
        """Return the sender's end and its address. Raises Unavailable if this system cannot share memory."""
        if bound < 1:
            raise ValueError(f"bound: messages that may be unreceived, at least 1; got {bound}")
        try:
            memory = os.memfd_create("pipeback", os.MFD_CLOEXEC)
        except (AttributeError, OSError) as error:
            raise Unavailable(f"no shared memory: {error}") from error
        os.ftruncate(memory, _control(bound))
        wire = cls(memory, bound, peer, pulse, True)
        wire._control[wire._flags : wire._flags + bound] = b"\1" * bound
        _PROCESS.pack_into(wire._control, _PID, os.getpid())
        wire._control[:16] = token = secrets.token_bytes(16)
        return wire, Address(_host(), os.getpid(), memory, os.fstat(memory).st_ino, token, bound)

    @classmethod
    def accept(cls, address: Address, *, peer: int, pulse: Pulse, device: torch.device | None = None) -> SharedWire:
        """Return the receiver's end. Raises Unavailable if the sender's memory cannot be reached from here."""
        wire = cls(_open(address), address.bound, peer, pulse, False)
        wire.device = device
        _PROCESS.pack_into(wire._control, _PID + 8, os.getpid())
        return wire

    def send(self, name: Name, message: Message, mark: int = 0) -> None:
        frame = self._writer.frame(name, message, mark)
        size = frame.nbytes
        self._take(self._free)
        if self._control[_CLOSED + 1]:
            self._free.post()
            raise Broken(self.peer, "it has closed its end")
        slot = self._control.find(b"\1", self._flags, self._flags + self.bound) - self._flags
        begin = self._lay(slot, size)
        frame.write(self._data[begin : begin + size])
        self._control[self._flags + slot] = 0
        place = _MESSAGES + self._count % self.bound * _MESSAGE.size
        self._count += 1
        _MESSAGE.pack_into(self._control, place, self._count, slot, begin, size)
        self._filled.post()

    def recv(self) -> tuple[Name, Message, int]:
        self._take(self._filled)
        place = _MESSAGES + self._count % self.bound * _MESSAGE.size
        number, slot, begin, size = _MESSAGE.unpack_from(self._control, place)
        if number != self._count + 1:  # there is no message: close() has posted
            self._filled.post()
            raise Broken(self.peer, "it has closed its end")
        self._count += 1
        self._map(begin + size)
        message = self._reader.read(self._data[begin : begin + size], self.device)
        self._control[self._flags + slot] = 1
        self._free.post()
        return message

    def close(self) -> None:
        """End waits at both ends. Sent messages can still be received; the memory is freed with the object."""
        if not self._closed:
            self._closed = True
            self._control[_CLOSED + (not self._sender)] = 1
            self._free.post()
            self._filled.post()

    def __del__(self) -> None:
        self.close()
        if self._process is not None:
            os.close(self._process)
        os.close(self._memory)

    # -- memory --------------------------------------------------------------------------------------------------

    def _lay(self, slot: int, size: int) -> int:
        """Return where the slot begins, which has at least `size` bytes from now on."""
        begin, room = self._slots[slot]
        if size > room:
            begin, room = self._end, 1 << max(12, (size - 1).bit_length())
            self._slots[slot] = begin, room
            self._end = begin + room
            os.ftruncate(self._memory, _control(self.bound) + self._end)
            self._map(self._end)
        return begin

    def _map(self, end: int) -> None:
        if end > self._data.numel():
            start = _control(self.bound)
            data = mmap.mmap(self._memory, os.fstat(self._memory).st_size - start, offset=start)
            self._data = torch.frombuffer(data, dtype=torch.uint8)

    # -- waiting -------------------------------------------------------------------------------------------------

    def _take(self, semaphore: Semaphore) -> None:
        seconds = 0.0  # mostly there is something at once
        while not semaphore.take(seconds):
            if self._gone:
                raise Broken(self.peer, "its process has ended")
            self._pulse()
            self._gone = seconds > 0 and self._ended()  # its last messages may still be here, so look once more
            seconds = SLICE
        if self._closed:
            semaphore.post()
            raise Broken(self.peer, "closed at this end")

    def _ended(self) -> bool:
        """Whether the other process has ended; if the system cannot tell, only the pulse ends the wait."""
        if self._process is None and (pid := _PROCESS.unpack_from(self._control, _PID + 8 * self._sender)[0]):
            try:
                self._process = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            except (AttributeError, OSError):
                return False
        if self._process is None:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))


def _open(address: Address) -> int:
    """Return a descriptor of the sender's memory."""
    if address.host != _host():
        raise Unavailable("the two processes are on different hosts")
    path = f"/proc/{address.pid}/fd/{address.fd}"
    try:
        # in another container the number may belong to another process, whose files must not be touched
        same = os.stat(path).st_ino == address.inode
        memory = os.open(path, os.O_RDWR | os.O_CLOEXEC) if same else -1
    except OSError as error:
        raise Unavailable(f"the memory of process {address.pid} cannot be opened: {error}") from error
    if same and os.pread(memory, len(address.token), 0) == address.token:
        return memory
    if same:
        os.close(memory)
    raise Unavailable("the two processes are in different containers")


def _control(bound: int) -> int:
    """Return the bytes of the first part of the memory, in whole pages."""
    size = _MESSAGES + bound * (_MESSAGE.size + 1)
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _host() -> str:
    """Return the boot id, which differs between all running systems."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        raise Unavailable(f"the boot id of this host cannot be read: {error}") from error
