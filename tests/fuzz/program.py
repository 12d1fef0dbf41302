"""A configuration: model, method, optimizer, options, where it runs, and what is called, one after the other.

`Program.train` does it with the library and `Program.expected` with the recurrence; each gives what was observed:
losses, weights and outputs, by the call that showed them. A program's repr is Python that makes it again.
"""

from __future__ import annotations

import copy
import io
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pipeback
from tests.laws.reference import Recurrence

from .cases import EACH_PUSH, METHODS, OPTIMIZERS
from .models import WIDTH, build, stages
from .oracle import Network

Seen = list[tuple[str, Any]]  # (which call, what it showed)


@dataclass(frozen=True, repr=False)
class Program:
    """A configuration.

    model, stages, seed, form: what `models.build` is given. method, optimizer: names of `cases`. decay: of weights.
    options: of `Pipeline`, those that change numbers. runtime: those that must not. outside: `forward`, `backward` and
    `step` instead of `push`. calls: a method of `_Run` each, with its arguments.
    """

    model: str = "linear"
    stages: int = 3
    seed: int = 0
    form: str = "sequence"
    method: str = "pb-2"
    optimizer: str = "sgd"
    decay: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    outside: bool = False
    calls: tuple[tuple[Any, ...], ...] = (("push", 4),)

    def __repr__(self) -> str:
        plain = Program()
        given = [f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        return f"Program({', '.join(f'{name}={getattr(self, name)!r}' for name in given)})"

    @property
    def command(self) -> str:
        """What replays it."""
        return f'python -m tests.fuzz "{self!r}"'

    def train(self, dtype: torch.dtype = torch.float64, **runtime: Any) -> Seen:
        """What the library shows."""
        run = _Run(self, dtype, {**self.runtime, **runtime})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                for n, (name, *values) in enumerate(self.calls):
                    getattr(run, name)(f"{n} {name}", *values)
                run.look(f"{len(self.calls)} end")
                # read last: reading a lazy loss waits, which would hide what depends on when things are done
                return [(at, v.detach().clone() if isinstance(v, Tensor) else v) for at, v in run.seen]
            finally:
                run.close()

    def expected(self) -> Seen:
        """What the equations say."""
        run = _Expected(self)
        for n, (name, *values) in enumerate(self.calls):
            getattr(run, name, run.nothing)(f"{n} {name}", *values)
        run.look(f"{len(self.calls)} end")
        return run.seen

    def batches(self, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng((self.seed, seed))
        return torch.from_numpy(rng.normal(size=(samples, WIDTH))), torch.from_numpy(rng.normal(size=(samples, WIDTH)))

    def cuts(self, samples: int) -> list[list[slice]]:
        """The micro-batches of a push, each the samples that the replicas have of it."""
        replicas = self.options.get("replicas", 1)
        share, size = samples // replicas, self.options.get("micro_batch_size") or samples
        parts = [(begin, min(begin + size, share)) for begin in range(0, share, size)]
        return [[slice(r * share + a, r * share + b) for r in range(replicas)] for a, b in parts]


class _Run:
    """A program in the library."""

    def __init__(self, program: Program, dtype: torch.dtype, runtime: dict[str, Any]) -> None:
        self.program, self.dtype, self.runtime = program, dtype, runtime
        self.seen: Seen = []
        self.folders: list[tempfile.TemporaryDirectory[str]] = []
        self.saved: Any = None
        self.pushes = 0
        self.pipe = self.made()

    def made(self) -> pipeback.Pipeline:
        program, kind = self.program, OPTIMIZERS[self.program.optimizer]
        model, form = build(program.model, program.stages, program.seed, program.form, self.dtype)
        if "example" in form:
            form["example"] = form["example"].to(self.dtype)
        runtime = dict(self.runtime)
        if runtime.get("store") == "disk":
            self.folders.append(tempfile.TemporaryDirectory())
            runtime["store"] = f"disk:{self.folders[-1].name}"
        options = dict(program.options)
        if program.outside:
            options.pop("micro_batch_size", None)
        torch.manual_seed(program.seed)  # the streams of the stages come from it
        pipe = pipeback.Pipeline(
            model,
            loss=None if program.outside else nn.functional.mse_loss,
            optimizer=lambda ps: kind[0](ps, **{**kind[2], "weight_decay": program.decay}),
            method=METHODS[program.method].library(program.stages),
            **form, **options, **runtime,
        )  # fmt: skip
        assert pipe.stages == program.stages, f"{pipe.stages} stages, not {program.stages}: {pipe.split}"
        return pipe

    def close(self) -> None:
        with suppress(Exception):
            self.pipe.close()
        for folder in self.folders:
            folder.cleanup()

    # -- calls ---------------------------------------------------------------------------------------------------

    def push(self, at: str, samples: int) -> None:
        x, y = (v.to(self.dtype) for v in self.program.batches(samples, self.pushes))
        self.pushes += 1
        if not self.program.outside:
            self.seen.append((at, self.pipe.push(x, y)))
            return
        cuts, losses = self.program.cuts(samples), []
        for (part,) in cuts:
            output = self.pipe.forward(x[part], expected=len(cuts))
            loss = nn.functional.mse_loss(output, y[part])
            self.pipe.backward(*torch.autograd.grad(loss, output))
            losses.append(loss.detach())
        self.pipe.step()
        self.seen.append((at, torch.stack(losses).mean()))

    def read(self, at: str) -> None:
        for n, (when, value) in enumerate(self.seen):
            self.seen[n] = (when, value.detach().clone() if isinstance(value, Tensor) else value)

    def look(self, at: str) -> None:
        for name, value in self.pipe.model.state_dict().items():
            self.seen.append((f"{at} {name}", value.detach().clone()))

    def evaluate(self, at: str, samples: int) -> None:
        x, _ = self.program.batches(samples, 1000)
        self.seen.append((at, self.pipe.evaluate(x.to(self.dtype))))

    def wait(self, at: str) -> None:
        self.pipe.wait()

    def drain(self, at: str) -> None:
        self.pipe.drain()

    def rate(self, at: str, factor: float, only: int | None = None) -> None:
        for s, optimizer in enumerate(self.pipe.optimizers):
            for group in optimizer.param_groups if only in (None, s) else ():
                group["lr"] *= factor

    def decay(self, at: str, value: float) -> None:
        for optimizer in self.pipe.optimizers:
            for group in optimizer.param_groups:
                group["weight_decay"] = value

    def inspect(self, at: str, what: str) -> None:
        """Look at something, which changes nothing."""
        x, y = (v.to(self.dtype) for v in self.program.batches(4, 3000))
        if what in ("plan", "breakdown"):
            getattr(self.pipe, what)(x, y)
        elif what == "record":
            self.pipe.record(len(self.seen) % 2 == 0)
        else:
            found = getattr(self.pipe, what)
            found() if callable(found) else found

    def bad(self, at: str) -> None:
        """A batch that no stage can take: it is refused, and leaves everything as it was."""
        x, y = (v.to(self.dtype) for v in self.program.batches(4, 4000))
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            self.pipe.push(x[:, :5], y)
            self.pipe.wait()

    def zero_grad(self, at: str) -> None:
        (self.pipe.model if self.runtime.get("store") is None else self.pipe._model).zero_grad()

    def own_backward(self, at: str) -> None:
        """The user's own gradients of the weights, which training is not to see."""
        model, (x, y) = self.pipe.model, self.program.batches(2, 2000)
        kept = {name: value.clone() for name, value in model.named_buffers()}
        with torch.random.fork_rng():
            nn.functional.mse_loss(model(x.to(self.dtype)), y.to(self.dtype)).backward()
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(kept[name])

    def eval(self, at: str) -> None:
        self.pipe._model.eval()

    def train(self, at: str) -> None:
        self.pipe._model.train()

    def reload(self, at: str) -> None:
        """Everything into a new pipeline of a new model, by way of bytes."""
        buffer = io.BytesIO()
        torch.save(self.pipe.state_dict(), buffer)
        self.read(at)
        training = [module.training for module in self.pipe._model.modules()]
        self.pipe.close()
        self.pipe = self.made()
        for module, mode in zip(self.pipe._model.modules(), training, strict=True):
            module.training = mode
        buffer.seek(0)
        self.pipe.load_state_dict(torch.load(buffer, weights_only=True))

    def save(self, at: str) -> None:
        self.saved = (self.pipe.state_dict(), self.pushes)

    def load(self, at: str) -> None:
        """Back to what was saved, in the same pipeline."""
        if self.saved is not None:
            self.read(at)
            self.pipe.load_state_dict(self.saved[0])
            self.pushes = self.saved[1]


class _Expected:
    """A program in the recurrence. Calls that it has no method for must not change a number."""

    def __init__(self, program: Program) -> None:
        self.program = program
        _, rule, options = OPTIMIZERS[program.optimizer]
        self.network = Network(stages(program.model, program.stages, program.seed))
        initial, given = self.network.initial(), program.options
        self.recurrence: Recurrence = METHODS[program.method].reference(
            initial, rule, network=self.network, clip=given.get("clip_norm"), largest=given.get("clip_value"),
            samples=given.get("weights") == "samples",
        )  # fmt: skip
        self.recurrence.recompute = given.get("activations") == "recompute"
        self.rates = [{**options, "weight_decay": program.decay} for _ in range(program.stages)]
        self.seen: Seen = []
        self.pushes, self.saved = 0, None

    def nothing(self, at: str, *values: Any) -> None: ...

    def push(self, at: str, samples: int) -> None:
        x, y = (v.numpy() for v in self.program.batches(samples, self.pushes))
        self.pushes += 1
        snapshot = [[dict(o)] * len(w) for o, w in zip(self.rates, self.network.initial(), strict=True)]
        losses, sizes = [], []
        for parts in self.program.cuts(samples):
            a, b = (np.concatenate([v[part] for part in parts]) for v in (x, y))
            losses.append(self.recurrence.push(a, b, snapshot))
            sizes.append(len(a) if self.recurrence.samples else 1)
        if self.program.method in EACH_PUSH:
            self.recurrence.drain()
        self.seen.append((at, torch.tensor(np.average(losses, weights=sizes))))

    def look(self, at: str) -> None:
        for value, name in zip(self._flat(), self._names(), strict=True):
            self.seen.append((f"{at} {name}", torch.from_numpy(value.copy())))

    def _flat(self) -> Iterator[Any]:
        for w in self.recurrence.weights():
            yield from w

    def _names(self) -> Iterator[str]:
        prefix = "blocks." if self.program.form == "followed" else ""
        for s, stage in enumerate(self.network.stages):
            yield from (f"{prefix}{s}.{name}" for name, _ in stage.named_parameters())

    def evaluate(self, at: str, samples: int) -> None:
        x, _ = self.program.batches(samples, 1000)
        self.seen.append((at, torch.from_numpy(self.network.output(self.recurrence.weights(), x.numpy()))))

    def drain(self, at: str) -> None:
        self.recurrence.drain()

    def rate(self, at: str, factor: float, only: int | None = None) -> None:
        for s, rates in enumerate(self.rates):
            rates["lr"] *= factor if only in (None, s) else 1

    def decay(self, at: str, value: float) -> None:
        for rates in self.rates:
            rates["weight_decay"] = value

    def save(self, at: str) -> None:
        self.saved = copy.deepcopy((self.recurrence, self.rates, self.pushes))

    def load(self, at: str) -> None:
        if self.saved is not None:
            self.recurrence, self.rates, self.pushes = copy.deepcopy(self.saved)
