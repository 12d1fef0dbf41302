"""Join: initialises torch.distributed, and arranges its processes into pipelines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipeback.tensors import accelerators


def wanted(mesh: DeviceMesh | None) -> bool:
    """Whether the pipeline should run over processes: a group of several ranks exists, or torchrun started some."""
    if mesh is not None:
        return mesh.size() > 1
    if dist.is_available() and not dist.is_initialized() and dist.is_torchelastic_launched():
        return int(os.environ["WORLD_SIZE"]) > 1
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def join(timeout: float = 30.0) -> None:
    """Initialise torch.distributed from the environment of torchrun or `srun`, unless this was done already.

    Under torchrun `Pipeline` calls this by itself. timeout: seconds. Raises RuntimeError, which names the address of
    the master, if that does not answer.
    """
    if dist.is_initialized():
        return
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        os.environ.update(_slurm(os.environ))
    where = ", ".join(f"{key}={os.environ.get(key)}" for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    backend = accelerators.take_local(int(os.environ.get("LOCAL_RANK", 0)))
    limit = timedelta(seconds=timeout)
    store: dict[str, Any] = {}
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's store outlives a restart and still holds the old addresses of the ranks
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            tcp = dist.TCPStore(address, port, is_master=False, timeout=limit)
            store["store"] = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", tcp)
            store["rank"], store["world_size"] = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, timeout=limit, **store)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"the ranks did not find each other within {timeout:g} s ({where}): {_first_line(error)}; "
            "check that MASTER_ADDR and MASTER_PORT reach rank 0 from every host and that all ranks were started"
        ) from error


def _slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch.distributed reads from those of `srun`; rank 0 is on the job's first host."""
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", environment.get("SLURM_STEP_NODELIST", "127.0.0.1"), count=1)
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "WORLD_SIZE": environment.get("SLURM_NTASKS", "1"),
        "MASTER_ADDR": environment.get("MASTER_ADDR", first.split(",")[0]),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000)),
    }


def default_device() -> torch.device:
    """Return the device for a stage from the meta device: this rank's accelerator if there is one, else the CPU."""
    if dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        return accelerators.mine()
    return torch.device("cpu")


def layout(mesh: DeviceMesh | None, replicas: int | None, tensor: int = 1) -> list[list[int]]:
    """Return the global ranks, one row per replica: by worker, and the `tensor` ranks of a worker side by side.

    Raises TypeError or ValueError for a wrong mesh or number.
    """
    if not isinstance(mesh, DeviceMesh | None):
        raise TypeError(
            f"mesh must be None or a DeviceMesh, but is {type(mesh).__name__}; for example "
            'mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))'
        )
    if mesh is None:
        replicas = 1 if replicas is None else replicas
        if isinstance(replicas, bool) or not isinstance(replicas, int):
            raise TypeError(f"replicas must be a whole number of at least 1 or None, but is {replicas!r}")
        world = dist.get_world_size()
        if replicas < 1 or world % replicas:
            raise ValueError(f"replicas={replicas} does not divide the {world} ranks; start a multiple of it")
        if world % (replicas * tensor):
            raise ValueError(
                f"tensor_parallel={tensor} does not divide the {world // replicas} ranks of a replica; start a "
                "multiple of it"
            )
        return torch.arange(world, device="cpu").view(replicas, -1).tolist()
    if tensor > 1:
        return _with_shards(mesh, tensor)
    table = mesh.mesh
    if table.dim() > 2:
        raise ValueError(f"mesh has {table.dim()} dimensions; use (replicas, workers), or (workers,)")
    names = mesh.mesh_dim_names or ()
    if table.dim() == 2 and names and names[0] in ("pp", "pipeline", "stage", "workers"):
        table = table.T
    return table.view(-1, table.shape[-1]).tolist() if table.dim() == 1 else table.tolist()


def _with_shards(mesh: DeviceMesh, tensor: int) -> list[list[int]]:
    table, names = mesh.mesh, mesh.mesh_dim_names or ()
    told = "use (replicas, workers, tensor) or (workers, tensor)"
    if table.dim() not in (2, 3) or (names and names[-1] not in ("tp", "tensor")):
        found = f"the names {names}" if names and table.dim() in (2, 3) else f"{table.dim()} dimension(s)"
        raise ValueError(f"mesh has {found}, but with tensor_parallel={tensor} its last dimension is that one; {told}")
    if table.shape[-1] != tensor:
        raise ValueError(
            f"mesh has {table.shape[-1]} ranks in its last dimension, but tensor_parallel={tensor}; give both the same"
        )
    rows: list[list[int]] = table.reshape(table.shape[0] if table.dim() == 3 else 1, -1).tolist()
    return rows


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
