"""A program in the library: what users call, one after the other, and what it shows."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeback
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore
from tests.helpers.long_forms import grouped

from .calls import CALLS
from .cases import METHODS, OPTIMIZERS
from .models import FOLLOWED, LOSSES, WHOLE, Gated, Scaled, blocks, build, stages
from .program import CLEARED, Program, Seen


class Run:
    """A program in the library."""

    def __init__(self, program: Program, dtype: torch.dtype, runtime: dict[str, Any]) -> None:
        self.program, self.dtype, self.runtime = program, dtype, runtime
        self.seen: Seen = []
        self.folders: list[tempfile.TemporaryDirectory[str]] = []
        self.saved: Any = None
        self.pushes, self.interrupted = 0, False
        self.pipe = self.made()

    def made(
        self, runtime: dict[str, Any] | None = None, freeze: bool = False, store: Path | None = None
    ) -> pipeback.Pipeline:
        """A new pipeline. freeze: its first weight is frozen. store: a folder from before."""
        program, kind = self.program, OPTIMIZERS[self.program.optimizer]
        model, form = build(program.model, program.stages, program.seed, program.form, self.dtype)
        if "example" in form:
            form["example"] = program.data(2, 6000, self.dtype)[0]
        if freeze:
            first = model.blocks[0] if program.form in FOLLOWED else model[0]
            next(p for p in first.parameters() if p.requires_grad).requires_grad_(False)
        runtime = dict(self.runtime if runtime is None else runtime)
        ahead = runtime.pop("ahead", 1)
        if runtime.get("store") == "disk":
            if store is None:
                self.folders.append(tempfile.TemporaryDirectory())
            runtime["store"] = DiskStore(store or self.folders[-1].name, prefetch=ahead)
        elif runtime.get("store") == "host":
            runtime["store"] = HostStore(prefetch=ahead)
        options, names = dict(program.options), [name for name, *_ in program.calls]
        if program.outside:
            options.pop("micro_batch_size", None)
        torch.manual_seed(program.seed)  # the streams of the stages come from it
        pipe = pipeback.Pipeline(
            model,
            loss=None if program.outside else self.loss if "interrupt" in names else LOSSES[program.loss],
            optimizer=lambda ps: kind[0](ps, **{**kind[2], "weight_decay": program.decay}),
            method=METHODS[program.method].library(program.stages),
            **grouped({**form, **options, **runtime}),
        )  # fmt: skip
        assert pipe.stages == program.stages, f"{pipe.stages} stages, not {program.stages}: {pipe.split}"
        self.random = torch.get_rng_state()
        return pipe

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.interrupted:
            raise KeyboardInterrupt
        return LOSSES[self.program.loss](output, target)

    def call(self, name: str, at: str, *values: Any) -> None:
        """One of the methods below, or of the functions of `CALLS`."""
        CALLS[name](self, at, *values) if name in CALLS else getattr(self, name)(at, *values)

    def check_random(self) -> None:
        """Nobody has drawn from the caller's generator."""
        assert torch.equal(torch.get_rng_state(), self.random), "training drew from the caller's generator"

    def check_alike(self) -> None:
        """Stages that run as one have the same constants, of which no weight tells."""
        if not self.pipe.arrived:
            return  # they are told apart by what they compute on the first micro-batch
        for stack in self.pipe._engine.setting.stacks:
            found = {tuple(m.by for m in s.module.modules() if isinstance(m, Scaled)) for s in stack.stages}
            assert len(found) == 1, f"stages with the constants {found} are taken for alike"

    def close(self) -> None:
        with suppress(Exception):
            self.pipe.close()
        for folder in self.folders:
            folder.cleanup()

    # -- calls ---------------------------------------------------------------------------------------------------

    def push(self, at: str, samples: int) -> None:
        x, y = self.program.data(samples, self.pushes, self.dtype)
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

    def cast(self, at: str, samples: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.push(at, samples)

    def rehearse(self, at: str, name: str, samples: int) -> None:
        """What a later push of this kind finds out, found out now."""
        with torch.autocast("cpu", dtype=torch.bfloat16) if name == "cast" else nullcontext():
            self.pipe.plan(*self.program.data(samples, 7000, self.dtype))

    def read(self, at: str) -> None:
        for n, (when, value) in enumerate(self.seen):
            self.seen[n] = (when, value.detach().clone() if isinstance(value, Tensor) else value)

    def look(self, at: str) -> None:
        for name, value in self.pipe.model.state_dict().items():
            self.seen.append((f"{at} {name}", value.detach().clone()))
        for stages_ in zip(*self.pipe._engine.holding.everywhere, strict=True) if "store" not in self.runtime else ():
            for others in zip(*(stage.weights for stage in stages_), strict=True):
                same = all(torch.equal(others[0].nan_to_num(), w.nan_to_num()) for w in others)
                assert same, f"replicas differ in {stages_[0].label}"

    def evaluate(self, at: str, samples: int) -> None:
        x, _ = self.program.data(samples, 1000, self.dtype)
        self.seen.append((at, self.pipe.evaluate(x)))

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
        x, y = self.program.data(4, 3000, self.dtype)
        if what in ("plan", "breakdown"):
            getattr(self.pipe, what)(x, y)
        elif what == "record":
            self.pipe.record(len(self.seen) % 2 == 0)
        else:
            found = getattr(self.pipe, what)
            found() if callable(found) else found

    def bad(self, at: str) -> None:
        """A batch that no stage can take, and an empty one: they are refused, and leave everything as it was."""
        x, y = self.program.data(4, 4000, self.dtype)
        with pytest.raises(ValueError, match="the batch that push got is empty"):
            self.pipe.push(x[:0], y[:0])
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            self.pipe.push(x.to(self.dtype) if self.program.model in WHOLE else x[:, :5], y)
            self.pipe.wait()

    def zero_grad(self, at: str) -> None:
        (self.pipe.model if self.runtime.get("store") is None else self.pipe._engine.model).zero_grad()

    def own_backward(self, at: str) -> None:
        """The user's own gradients of the weights, which training is not to see."""
        model, (x, y) = self.pipe.model, self.program.data(2, 2000, self.dtype)
        kept = {name: value.clone() for name, value in model.named_buffers()}
        with torch.random.fork_rng():
            nn.functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for name, value in model.named_buffers():
                if not torch.equal(value, kept[name]):
                    value.copy_(kept[name])

    def eval(self, at: str) -> None:
        self.pipe._engine.model.eval()

    def train(self, at: str) -> None:
        self.pipe._engine.model.train()

    def reload(self, at: str) -> None:
        """Everything into a new pipeline of a new model, by way of bytes."""
        buffer = io.BytesIO()
        torch.save(self.pipe.state_dict(), buffer)
        self.read(at)
        with self.anew():
            self.pipe.close()
            self.pipe = self.made()
        buffer.seek(0)
        self.pipe.load_state_dict(torch.load(buffer, weights_only=True))

    @contextmanager
    def anew(self) -> Iterator[None]:
        """The pipeline is another one afterwards, whose modules are set as they were."""
        settings = self.settings()
        yield
        self.put(settings)

    def settings(self) -> list[tuple[bool, float | None]]:
        """Of each module, whether it trains, and the rate of a dropout: a state has neither."""
        return [(module.training, getattr(module, "p", None)) for module in self.pipe._engine.model.modules()]

    def put(self, settings: list[tuple[bool, float | None]]) -> None:
        for module, (training, p) in zip(self.pipe._engine.model.modules(), settings, strict=True):
            module.training = training
            if p is not None:
                module.p = p

    def move(self, at: str, workers: int) -> None:
        """The same into another number of threads."""
        self.runtime = {**self.runtime, "workers": workers or None}
        self.reload(at)

    def save(self, at: str) -> None:
        self.saved = (self.pipe.state_dict(), self.pushes, self.settings())

    def load(self, at: str) -> None:
        """Back to what was saved, in the same pipeline."""
        if self.saved is not None:
            self.read(at)
            state, self.pushes, settings = self.saved
            self.pipe.wait()
            self.put(settings)
            self.pipe.load_state_dict(state)

    # -- what users do to models and optimizers -------------------------------------------------------------------

    def block(self, s: int) -> nn.Module:
        """The module of a stage, as the user has it."""
        return self.pipe._engine.model.get_submodule(f"blocks.{s}" if self.program.form in FOLLOWED else str(s))

    def replace(self, at: str, s: int) -> None:
        """A weight that was replaced is named before the next micro-batch, and another one puts it back."""
        every = [(m, key, p) for m in self.block(s).modules() for key, p in m._parameters.items() if p is not None]
        if not every:
            return
        owner, key, p = every[0]
        self.pipe.wait()  # threads would compute with the other one until it is named
        owner._parameters[key] = nn.Parameter(p.detach().clone(), p.requires_grad)
        x, y = self.program.data(4, 5000, self.dtype)
        with pytest.raises(RuntimeError, match=f"{key} was moved, cast or replaced"):
            self.pipe.push(x, y)
        owner._parameters[key] = p

    def listen(self, at: str, what: str, s: int) -> None:
        """A hook that is added hears of the next micro-batch, or is refused."""
        self.push(at, 2)  # hooks that are there before the first one have stages run as they are
        heard: list[int] = []
        block = self.block(s)
        p = next((p for p in block.parameters() if p.requires_grad), None)
        self.pipe.wait()
        if what == "step" and p is not None:
            handle: Any = self.pipe.optimizers[s].register_step_post_hook(lambda *given: heard.append(1))
        elif what == "weight" and p is not None:
            handle = p.register_post_accumulate_grad_hook(lambda p: heard.append(1))
        else:
            leaf = next(m for m in block.modules() if not list(m.children()))  # a followed model calls these alone
            handle = leaf.register_forward_hook(lambda *given: heard.append(1))
        try:
            self.push(at, 2)
        except RuntimeError as error:
            assert "hook" in str(error)
            handle.remove()
            self.pushes -= 1
            self.push(at, 2)
            heard.append(1)
        self.drain(at)
        handle.remove()
        assert heard, f"a hook of a {what} at stage {s} heard nothing"

    def foreign(self, at: str) -> None:
        """A state of a model in which other weights are frozen is refused before anything changes."""
        other = self.made({}, freeze=True)
        state = other.state_dict()
        other.close()
        with pytest.raises(ValueError, match="stage 0"):
            self.pipe.load_state_dict(state)

    def fill(self, at: str) -> None:
        """The user's model is given other weights, in flight."""
        self.pipe.wait()
        program = self.program
        count = blocks(program.form, program.stages)
        for s, stage in enumerate(stages(program.model, count, program.seed + 1, self.dtype)):
            values = {n: v for n, v in stage.state_dict().items() if not n.endswith("mask")}  # expanded
            self.block(s).load_state_dict(values, strict=False)

    def gate(self, at: str, s: int, factor: float, how: str) -> None:
        """A buffer of a stage is written into, "in flight" or not, or "replaced"."""
        self.pipe.wait() if how == "in flight" else self.pipe.drain()
        layer = next(m for m in self.block(s).modules() if isinstance(m, Gated))
        if how == "replaced":
            layer.gate = layer.gate * factor
        else:
            layer.gate.mul_(factor)

    def clear(self, at: str) -> None:
        """Velocities are zero from here on."""
        self.pipe.drain()
        for optimizer in self.pipe.optimizers if self.program.optimizer in CLEARED else ():
            optimizer.state.clear()

    def dropout(self, at: str, p: float) -> None:
        self.pipe.wait()
        for module in self.pipe._engine.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = p
