"""Calls that need more than the pipeline: checkpoints and weights in files, forks, interrupts, memory that is freed."""

from __future__ import annotations

import gc
import io
import json
import os
import select
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import pipeback
from pipeback import checkpoint, weights
from pipeback.streaming.sealed_file import sealed, unsealed

from .models import stages

Run = Any  # that of run.py, which calls these

CALLS: dict[str, Callable[..., None]] = {}
SECONDS = 3.0  # after which something hangs


def call(made: Callable[..., None]) -> Callable[..., None]:
    CALLS[made.__name__] = made
    return made


# -- files ---------------------------------------------------------------------------------------------------------


@call
def damaged(run: Run, at: str, how: str) -> None:
    """A checkpoint that somebody has damaged or edited is refused, and changes nothing."""
    before = {name: value.detach().clone() for name, value in run.pipe.model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(run.pipe, folder)
        (step,) = Path(folder).glob("step-*")
        damage(step, how)
        with at_once("loading"), pytest.raises((RuntimeError, ValueError)):
            checkpoint.load(run.pipe, step)
    after = run.pipe.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "half a state was loaded"


def damage(step: Path, how: str) -> None:
    """What disks and people do to a folder of a checkpoint. how: "bit", "short", "name", "place" or "far"."""
    file = step / "stage-000.safetensors"
    if how in ("bit", "short"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content if how == "bit" else content[:-1])
        return
    document = unsealed(step / "state.json")
    loops = document["state"]["plain"]["loops"]  # none before the first push
    if how == "name" or not loops:
        file.rename(step.parent / file.name)
        document["files"][f"../{file.name}"] = document["files"].pop(file.name)
    elif how == "far":
        loops[0]["order"]["fetched"][-1] += 10**12
    else:
        loops[0]["order"]["forwards"][0] += 1
    (step / "state.json").write_bytes(sealed(document))


@contextmanager
def at_once(what: str) -> Iterator[None]:
    """AssertionError where it works for seconds and does not end."""

    def stop(*_: object) -> None:
        raise AssertionError(f"{what} takes for ever")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@call
def export(run: Run, at: str, moved: bool) -> None:
    """Weights in files are those of the model, and fill a new one. moved: a file lies elsewhere, which is refused."""
    program = run.program
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder, "inside")
        index = weights.save(run.pipe, inside)
        found = {name: value for file in inside.glob("*.safetensors") for name, value in load_file(file).items()}
        wanted = run.pipe.model.state_dict()
        assert set(found) == set(wanted), f"{sorted(set(wanted) ^ set(found))} is not in both"
        assert all(torch.equal(value, wanted[name]) for name, value in found.items()), "other weights are in the files"
        document = json.loads(index.read_text())
        if moved:
            name, file = min(document["weight_map"].items())
            (inside / file).rename(Path(folder, file))
            for name in [n for n, other in document["weight_map"].items() if other == file]:
                document["weight_map"][name] = f"../{file}"
            index.write_text(json.dumps(document))
        model = nn.Sequential(*stages(program.model, program.stages, program.seed, run.dtype)).to("meta")
        made = lambda: pipeback.Pipeline(  # noqa: E731
            model, loss=nn.functional.mse_loss, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), method="sgd",
            store=pipeback.Streaming(init=inside),
        )  # fmt: skip
        if moved:
            with pytest.raises(ValueError, match="outside of its folder"):
                made()
        else:
            other = made().model.state_dict()
            assert all(torch.equal(value, other[name]) for name, value in wanted.items()), "filled otherwise"


@call
def reopen(run: Run, at: str, lost: bool, child: bool) -> None:
    """A store on the disk goes on in a new pipeline. lost: without its last version, which is refused.

    child: while another process that was forked from this one lives.
    """
    if not run.pushes or run.runtime.get("store") != "disk":
        return  # there is nothing to commit
    run.pipe.commit()
    run.read(at)
    with sleeping() if child else nullcontext(), run.anew():
        run.pipe.close()
        folder = Path(run.folders[-1].name)
        versions = {file: file.read_bytes() for file in folder.rglob("version-*.json")}
        if lost:
            for file in versions:
                file.unlink()
            with pytest.raises(RuntimeError, match="version"):
                run.made(store=folder)
            for file, content in versions.items():
                file.write_bytes(content)
        run.pipe = run.made(store=folder)


# -- the life of processes and of memory -----------------------------------------------------------------------------


@contextmanager
def sleeping() -> Iterator[None]:
    """Another process, forked from this one, lives meanwhile."""
    wait, go = os.pipe()
    child = os.fork()
    if not child:
        os.close(go)
        os.read(wait, 1)  # until the parent is done
        os._exit(0)
    try:
        yield
    finally:
        os.close(go)
        os.close(wait)
        os.waitpid(child, 0)


@call
def fork(run: Run, at: str) -> None:
    """A child of fork() is refused, at once, where there are threads or a store; else torch alone says what it can."""
    if "store" not in run.runtime and not (run.pushes and run.pipe._engine.threads):
        return
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        answer = b"went on"
        try:
            x, y = run.program.data(4, 8000, run.dtype)
            run.pipe.forward(x) if run.program.outside else run.pipe.push(x, y)
            run.pipe.wait()
        except RuntimeError as error:
            answer = str(error).encode()
        except BaseException as error:
            answer = repr(error).encode()
        finally:
            os.write(tell, answer)
            os._exit(0)
    try:
        ready, _, _ = select.select([told], [], [], SECONDS)
        answer = os.read(told, 1000) if ready else b"nothing"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)
    assert b"was forked" in answer, f"{answer!r} came from a child that pushed"


@call
def interrupt(run: Run, at: str) -> None:
    """An interrupt in the middle of a push closes the pipeline, with words, and a state from before reopens it."""
    state = run.pipe.state_dict()
    run.read(at)
    batch = run.program.data(4, 9000, run.dtype)
    run.interrupted = True
    try:
        run.pipe.push(*batch)
        run.pipe.drain()
    except (KeyboardInterrupt, RuntimeError):  # the latter of threads
        pass
    else:
        raise AssertionError("an interrupt was lost")
    run.interrupted = False
    try:
        run.pipe.push(*batch)
    except RuntimeError as error:
        assert "KeyboardInterrupt" in str(error), str(error)
    run.pipe.load_state_dict(state)


@call
def drop(run: Run, at: str) -> None:
    """A pipeline that nobody has any more is freed, whatever is in flight."""
    buffer = io.BytesIO()
    torch.save(run.pipe.state_dict(), buffer)
    run.read(at)
    gone = [weakref.ref(stage) for stages in run.pipe._engine.holding.everywhere for stage in stages]
    with run.anew():
        other, run.pipe = run.made(), None  # type: ignore[assignment]
        end = time.monotonic() + SECONDS  # threads have to end first
        while gc.collect() >= 0 and time.monotonic() < end and any(stage() is not None for stage in gone):
            time.sleep(0.01)
        run.pipe = other
    assert all(stage() is None for stage in gone), "stages of a pipeline that was dropped stay"
    buffer.seek(0)
    run.pipe.load_state_dict(torch.load(buffer, weights_only=True))


@call
def forms(run: Run, at: str) -> None:
    """Stages that run as one keep memory for a few forms of micro-batches."""
    for _ in range(2):
        run.push(at, 2)
    run.pipe.drain()
    for stack in run.pipe._engine.setting.stacks:
        kept = sum(bool(rings.nbytes) for rings in stack._rings.values())
        assert kept <= 3, f"memory for {kept} forms of micro-batches is kept"
