"""Processes that hold the ends of wires and do what the tests tell them."""

import os
import threading
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeback.distributed.transport.process_group import DirectWire, GlooWire
from pipeback.distributed.transport.shared_memory import SharedWire
from pipeback.tensors.layout import outline_of
from tests.helpers.processes import forked

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


def messages():
    """Every kind of content and of place in memory, by name; the same in every process."""
    draw = torch.Generator().manual_seed(7)

    def normal(*shape, dtype=torch.float32):
        if dtype.is_complex or dtype.is_floating_point:
            return torch.randn(*shape, generator=draw, dtype=torch.complex128 if dtype.is_complex else None).to(dtype)
        return torch.randint(0, 2, shape, generator=draw).to(dtype)

    grid, images = normal(9, 9), normal(2, 3, 4, 5)
    made = {str(dtype): normal(3, 5, dtype=dtype) for dtype in DTYPES}
    made |= {f"{dtype} at 1": normal(7, dtype=dtype)[1:] for dtype in DTYPES}
    made |= {
        "0-d": normal(1)[0],
        "0-d in a grid": grid[3, 3],
        "empty": torch.empty(0),
        "empty rows": grid[:0],
        "no columns": torch.empty(4, 0, 3),
        "rows": grid[3:5],
        "column": grid[:, 1],
        "block": grid[1:6, 2:5],
        "every third": grid.view(-1)[2::3],
        "transposed": grid.t(),
        "transposed block": grid[2:, 3:].t(),
        "channels last": images.contiguous(memory_format=torch.channels_last),
        "permuted": images.permute(3, 0, 2, 1),
        "a row for all": grid[2].expand(4, 9),
        "a column for all": grid[:, 2:3].expand(9, 6),
        "one value": grid[4, 4].expand(3, 3),
        "sizes of one": normal(1, 4, 1, 3).transpose(1, 3),
        "windows": grid.view(-1).unfold(0, 5, 2),
        "conjugate": made["torch.complex64"].conj(),
        "needs a gradient": normal(4).requires_grad_(),
        "none": None,
        "pair": (grid[1], images),
        "holes": (None, grid[:, 3], None),
        "numbers": (1, 1.0, True, 0, -0.0, False, 2.5, 10**25, None, normal(3)),
        "nothing": (),
        "number": 0.1,
    }
    return made


def seen(message):
    """What must be equal at both ends: the values, exactly, and how they lie."""
    parts = message if isinstance(message, tuple) else (message,)
    values = [p.detach().resolve_conj().tolist() if isinstance(p, torch.Tensor) else repr(p) for p in parts]
    return outline_of(message).to_bytes(), values


class Ended(Exception):
    pass


class End:
    """What a child can be told. Rank 0 sends to rank 1 on all wires."""

    def __init__(self, rank, folder):
        torch.set_num_threads(1)
        self.rank, self.folder, self.until = rank, folder, float("inf")
        self.wires, self.sent = {}, 0

    def join(self, seconds=60):
        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder}/store", rank=self.rank, world_size=2,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip

    def pulse(self):
        if time.monotonic() > self.until:
            raise Ended

    def group(self):
        return dist.new_group([0, 1], backend="gloo")

    def open(self, kind, bound=4, address=None):
        """A new wire of a kind; for a shared one returns the address, and takes it."""
        peer, sender = 1 - self.rank, not self.rank
        self.close(kind)
        self.sent, self.until = 0, float("inf")
        if kind == "shared":
            if sender:
                self.wires[kind], address = SharedWire.offer(peer=peer, bound=bound, pulse=self.pulse)
                return address
            self.wires[kind] = SharedWire.accept(address, peer=peer, pulse=self.pulse)
        else:
            wire = GlooWire(self.group(), peer, sender=sender, bound=bound, pulse=self.pulse)
            self.wires[kind] = DirectWire(wire, self.group(), peer) if kind == "direct" else wire
        return None

    def close(self, kind):
        if kind in self.wires:
            self.wires.pop(kind).close()

    def send(self, kind, names):
        made = messages()
        for n, name in enumerate(names):
            self.wires[kind].send(("FB"[n % 2], n, 10**12 + n), made[name], n - 3)
        return [seen(made[name]) for name in names]

    def recv(self, kind, count):
        """Names and marks as they come, and what is seen of the messages when all have."""
        came = [self.wires[kind].recv() for _ in range(count)]
        return [(name, mark) for name, _, mark in came], [seen(message) for _, message, _ in came]

    def send_shapes(self, kind, shapes):
        for n, shape in enumerate(shapes):
            self.wires[kind].send(("F", 1, n), torch.full(shape, float(n)))

    def recv_shapes(self, kind, shapes):
        for n, shape in enumerate(shapes):
            (_, _, mb), tensor, _ = self.wires[kind].recv()
            assert mb == n and tensor.shape == torch.Size(shape) and (tensor == n).all(), (n, mb, tensor.shape)

    def send_behind(self, kind, count):
        """From a thread, so that this process still answers."""

        def work():
            for n in range(count):
                self.wires[kind].send(("F", 1, n), torch.full((100,), float(n)))
                self.sent += 1

        threading.Thread(target=work, daemon=True).start()

    def progress(self):
        return self.sent

    def waits(self, kind, call="recv", seconds=float("inf"), close_after=None):
        """Wait for a message, or for room, until the pulse raises or something else ends it: the error, and when."""
        begin = time.monotonic()
        self.until = begin + seconds
        if close_after is not None:
            threading.Timer(close_after, self.wires[kind].close).start()
        try:
            while True:
                self.wires[kind].recv() if call == "recv" else self.wires[kind].send(("F", 0, 0), torch.ones(3))
        except Exception as error:
            return type(error).__name__, str(error), getattr(error, "peer", None), time.monotonic() - begin

    def waits_behind(self, kind):
        threading.Thread(target=self.waits, args=(kind,), daemon=True).start()
        time.sleep(0.2)

    def used(self, fd):
        return os.fstat(fd).st_blocks * 512

    def leave(self, regularly):
        if regularly:
            dist.destroy_process_group()

    def die(self):
        os.kill(os.getpid(), 9)


def serve(rank, folder, pipe):
    end = End(rank, folder)
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        if name == "stop":
            return
        try:
            pipe.send((True, getattr(end, name)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Remote:
    """A child, as the tests see it."""

    context = forked()

    def __init__(self, rank, folder):
        self.pipe, other = self.context.Pipe()
        self.process = self.context.Process(target=serve, args=(rank, folder, other), daemon=True)
        self.process.start()
        other.close()

    def tell(self, name, *args):
        self.pipe.send((name, args))

    def answer(self, seconds=30):
        assert self.pipe.poll(seconds), "no answer"
        good, value = self.pipe.recv()
        assert good, value
        return value

    def ask(self, name, *args):
        self.tell(name, *args)
        return self.answer()

    def stop(self):
        """Its exit code; None if it does not end."""
        self.tell("stop")
        self.process.join(5)
        code = self.process.exitcode
        self.process.kill()
        return code


def both(ends, name, *args):
    for end in ends:
        end.tell(name, *args)
    return [end.answer() for end in ends]


def wire(ends, kind, bound=4):
    """A new wire from the first to the second."""
    if kind == "shared":
        address = ends[0].ask("open", kind, bound)
        ends[1].ask("open", kind, bound, address)
        return address
    both(ends, "open", kind, bound)
    return None
