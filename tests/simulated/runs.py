"""Trainings that `test_simulated.py` asks for, in a process whose accelerator is the simulated one.

A run is compared with the same one on the CPU: losses, what is in flight after some pushes, and what a drain leaves.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pipeback
from pipeback import sparsities
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore
from pipeback.tensors import accelerators
from pipeback.tensors.accelerators import on
from tests.laws.cases import CASES, OPTIMIZERS
from tests.simulated import device as sim

STAGES, WIDTH, SAMPLES = 4, 8, 4
OTHERS = {"adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1)}
RIGL = {"until": 12, "every": 2}


def network(dtype: torch.dtype, draws: bool) -> nn.Sequential:
    """Convolution, norms, a buffer that changes, plain layers, and dropout if it draws."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(3 * WIDTH, WIDTH)),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Dropout(0.5 * draws)),
        nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.5), nn.Tanh()),
        nn.Linear(WIDTH, 5),
    ).to(dtype)


def batches(count: int, pushed: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    shape = SAMPLES * pushed, 1, WIDTH
    return [
        (torch.randn(shape, generator=draw).to(dtype), torch.randint(5, shape[:1], generator=draw))
        for _ in range(count)
    ]


def kept(pipe: pipeback.Pipeline, when: str) -> dict[str, Tensor]:
    """All that the pipeline holds, by name; left out is what a graph has saved, whose nodes depend on the device."""
    return {
        f"{name} of stage {s} {when}": tensor
        for s, tensors in enumerate(pipe.state_dict()["stages"])
        for name, tensor in sorted(tensors.items())
        if "flight/" not in name
    }


def build(
    where: list[str], run: dict[str, Any], folder: Path, sparsity: str | None = None, store: Any = None, **options: Any
) -> pipeback.Pipeline:
    """where: the device of each stage, in turn."""
    model = network(run["dtype"], run["draws"])
    for n, stage in enumerate(model):
        stage.to(where[n % len(where)])
    if store is not None:
        kind, prefetch = store
        store = HostStore(prefetch=prefetch) if kind == "host" else DiskStore(folder, prefetch=prefetch)
    policy = sparsity and sparsities.create(sparsity, density=0.4, **RIGL if sparsity == "rigl" else {})
    torch.manual_seed(5)
    return pipeback.Pipeline(
        model, loss=nn.functional.cross_entropy, optimizer=(OPTIMIZERS | OTHERS)[run["optimizer"]],
        method=CASES[run["case"]](STAGES), micro_batch_size=SAMPLES,
        store=pipeback.Streaming(store, sparsity=policy), **options,
    )  # fmt: skip


def train(
    where: list[str],
    case: str,
    optimizer: str = "momentum",
    pushes: int = 6,
    pushed: int = 2,
    draws: bool = True,
    half: bool = False,
    double: bool = False,
    resumed: str = "",
    drained: bool = False,
    unused: bool = False,
    astray: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """resumed: the device on which a state goes on that was taken in flight, or `drained`.

    astray: targets stay on the CPU. unused: weights are fetched for nobody, and what then gets their memory must keep
    what it writes there.
    """
    dtype = torch.bfloat16 if half else torch.float64 if double else torch.float32
    run = dict(case=case, optimizer=optimizer, draws=draws, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        pipe, found = build(where, run, Path(folder, "first"), **options), {}
        for n, (x, y) in enumerate(batches(pushes, pushed, run["dtype"])):
            if n == pushes // 2 and drained:
                pipe.drain()
            if n == pushes // 2 and resumed:
                state = pipe.state_dict()
                pipe.close()
                where = [resumed]
                pipe = build(where, run, Path(folder, "then"), **options)
                pipe.load_state_dict(state)
            there = y if astray else y.to(where[(STAGES - 1) % len(where)])
            found[f"loss of push {n}"] = pipe.push(x, there).detach().clone()
            if unused:
                found[f"after push {n}"] = written_over(pipe)
        found |= kept(pipe, "in flight")
        pipe.drain()
        found |= kept(pipe, "at the end")
        pipe.close()
    return {name: part.cpu() for name, part in found.items()}


def written_over(pipe: pipeback.Pipeline) -> Tensor:
    """What lies, after another fetch, in memory that belonged to weights that nobody came to use."""
    residence: Any = pipe._engine.loops[0].worker.residence
    stage = residence.stages[1]
    residence.rest()
    residence.ready("F", 1, pipe.arrived)
    residence.rest()
    memory = torch.zeros(stage.home.slot.nbytes, dtype=torch.uint8, device=stage.home.slot.device)
    residence.ready("F", 2, pipe.arrived)
    residence.rest()
    return memory


def exchange(where: list[str]) -> dict[str, Tensor]:
    """What gradients become that another thread exchanges on the device, as NCCL does where ranks have it."""
    pipe = build(where, dict(case="pb", optimizer="sgd", draws=False, dtype=torch.float32), Path(), store=["host", 1])
    ((x, y),) = batches(1, 1, torch.float32)
    pipe.push(x, y.to(where[0]))
    residence: Any = pipe._engine.loops[0].worker.residence
    grads = [torch.linspace(0, 1, 64, device=where[0]).exp().cumsum(0)]

    def tripled() -> tuple[list[Tensor | None], float, int]:
        return [3 * grads.pop()], 1.0, 0

    leave = residence._streams.handed(grads) if where != ["cpu"] else lambda made: made()
    with ThreadPoolExecutor(1) as other:
        ((gradient,), _, _) = other.submit(leave, tripled).result()
    pipe.close()
    return {"gradient": gradient}


def fit(where: list[str], **run: Any) -> dict[str, Tensor]:
    """See `fits`."""
    from tests.simulated.fits import fit  # importing Lightning takes as long as several runs

    return fit(where, **run)


_streams = accelerators._streams


def broken(where: list[str], **options: Any) -> dict[str, Tensor]:
    """Whether three NaN losses in a row end a training, at the latest where the device has done its work."""
    run = dict(case="pb", optimizer="momentum", draws=False, dtype=torch.float32)
    pipe, raised = build(where, run, Path(), **options), 0
    for n, (x, y) in enumerate(batches(70, 1, torch.float32)):
        try:
            pipe.push(x * math.nan if n in (5, 6, 7) else x, y.to(where[(STAGES - 1) % len(where)]))
        except FloatingPointError as error:
            assert "push 5, 6 and 7" in str(error), error
            raised += 1
            break
        if n == 40 and where != ["cpu"]:
            torch.accelerator.synchronize(where[0])
    pipe.close()
    return {"raised": torch.tensor(raised)}


_expected: dict[str, dict[str, Tensor]] = {}


def compared(run: dict[str, Any]) -> str:
    """What differs from the CPU, or nothing."""
    policy, where, beside = run.pop("policy"), run.pop("where", ["sim:0"]), run.pop("beside", False)
    accelerators._streams = _streams if run.pop("streams", True) else lambda kind: False
    do = {"exchange": exchange, "fit": fit, "broken": broken}.get(run.pop("kind", ""), train)
    key = json.dumps({"do": do.__name__, **run, "resumed": ""}, sort_keys=True)
    if key not in _expected:
        _expected[key] = do(["cpu"], **{k: v for k, v in run.items() if k != "resumed"})
    sim.policy(policy)
    try:
        with on(torch.Stream(where[0])) if beside else nullcontext():
            found = do(where, **run)
    finally:
        sim.policy(sim.AT_ONCE)
        torch.accelerator.synchronize("sim:0")
        torch.accelerator.synchronize("sim:1")
    wanted = _expected[key]
    if found.keys() != wanted.keys():
        return f"only in one of both: {sorted(found.keys() ^ wanted.keys())}"
    odd = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    return f"{len(odd)} of {len(wanted)} differ: {', '.join(odd[:5])}; {found[odd[0]]}" if odd else ""


def answer(pipe: Any, folder: Path) -> None:
    """Answer each run that is asked for, with what differs. folder: where the compiled device is."""
    torch.set_num_threads(1)
    sim.register(folder)
    if "RANK" in os.environ:
        pipeback.join()
    disk_store.SMALL = 1  # these networks are small
    while True:
        try:
            run = pipe.recv()
        except EOFError:
            return
        try:
            found = compared(run)
        except Exception:
            found = traceback.format_exc()
        pipe.send(found)
