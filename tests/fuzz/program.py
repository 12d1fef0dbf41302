"""A configuration: model, method, optimizer, options, where it runs, and what is called, one after the other.

`Program.train` does it with the library and `Program.expected` with the recurrence; each gives what was observed:
losses, weights and outputs, by the call that showed them. A program's repr is Python that makes it again.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.laws.reference import Recurrence

from .cases import EACH_PUSH, METHODS, OPTIMIZERS, stepping
from .models import FOLLOWED, RANDOM, WHOLE, WIDTH, stages, trained
from .odd_options import NAMES
from .oracle import Network
from .replayed import Replayed

CLEARED = ("sgd", "momentum", "maximize", "nesterov", "fused-momentum")
Seen = list[tuple[str, Any]]  # (which call, what it showed)


@dataclass(frozen=True, repr=False)
class Program(Replayed):
    """A configuration.

    model, stages, seed, form: what `models.build` is given. method, optimizer: names of `cases`. decay: of weights.
    options: of `Pipeline`, those that change numbers. runtime: those that must not. outside: `forward`, `backward` and
    `step` instead of `push`. loss: a name of `models.LOSSES`. odd: an option with a value that it cannot have. calls:
    a method of `Run` or a function of `CALLS` each, with its arguments.
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
    loss: str = "mse"
    odd: tuple[str, Any] | None = None
    calls: tuple[tuple[Any, ...], ...] = (("push", 4),)

    @property
    def refused(self) -> str:
        """What the refusal of this configuration names, before anything is trained; "" where it is none."""
        if self.odd is not None:
            return NAMES.get(self.odd[0], self.odd[0])
        if self.optimizer == "halved" and stepping(self.method):
            return "Halved"
        return ""

    @property
    def has_equations(self) -> bool:
        """Whether the recurrence knows its numbers. It has no random layers, and does not cut models by their costs."""
        late = any(name == "fill" or "in flight" in values for name, *values in self.calls)  # which of B came before?
        return self.model not in RANDOM and self.form != "counted" and not late

    def train(self, dtype: torch.dtype = torch.float64, **runtime: Any) -> Seen:
        """What the library shows."""
        from .run import Run  # which is of programs

        run = Run(self, dtype, {**self.runtime, **runtime, **dict([self.odd] if self.odd else [])})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                for n, (name, *values) in enumerate(self.calls):
                    run.call(name, f"{n} {name}", *values)
                run.look(f"{len(self.calls)} end")
                run.check_random()
                run.check_alike()
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
        x = rng.integers(9, size=samples) if self.model in WHOLE else rng.normal(size=(samples, WIDTH))
        return torch.from_numpy(x), torch.from_numpy(rng.normal(size=(samples, WIDTH)))

    def data(self, samples: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same as the library is given them."""
        x, y = self.batches(samples, seed)
        return x.to(dtype) if x.is_floating_point() else x, y.to(dtype)

    def cuts(self, samples: int) -> list[list[slice]]:
        """The micro-batches of a push, each the samples that the replicas have of it."""
        replicas = self.options.get("replicas", 1)
        share, size = samples // replicas, self.options.get("micro_batch_size") or samples
        parts = [(begin, min(begin + size, share)) for begin in range(0, share, size)]
        return [[slice(r * share + a, r * share + b) for r in range(replicas)] for a, b in parts]


class _Expected:
    """A program in the recurrence. Calls that it has no method for must not change a number."""

    def __init__(self, program: Program) -> None:
        self.program = program
        _, rule, options = OPTIMIZERS[program.optimizer]
        self.network = Network(stages(program.model, program.stages, program.seed), program.loss == "sloping")
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
        prefix = "blocks." if self.program.form in FOLLOWED else ""
        for s, (stage, w) in enumerate(zip(self.network.stages, self.recurrence.weights(), strict=True)):
            values = {
                stage.get_parameter(n): torch.from_numpy(p.copy()) for n, p in zip(trained(stage), w, strict=True)
            }
            for name, value in stage.state_dict(keep_vars=True).items():
                self.seen.append((f"{at} {prefix}{s}.{name}", values.get(value, value.detach().clone())))

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
            self.network = self.recurrence.network  # type: ignore[assignment]

    def listen(self, at: str, what: str, s: int) -> None:
        self.push(at, 2)
        self.push(at, 2)
        self.drain(at)

    def gate(self, at: str, s: int, factor: float, how: str) -> None:
        self.drain(at)
        self.network.stages[s][0].gate.mul_(factor)  # type: ignore[union-attr, operator]

    def forms(self, at: str) -> None:
        self.listen(at, "", 0)

    def cast(self, at: str, samples: int) -> None:
        self.push(at, samples)  # autocast leaves float64 alone

    def clear(self, at: str) -> None:
        """Velocities are zero from here on; of optimizers that keep nothing else."""
        self.drain(at)
        if self.program.optimizer in CLEARED:
            for history in self.recurrence.history:
                history[-1] = history[-1]._replace(v=tuple(np.zeros_like(v) for v in history[-1].v))
