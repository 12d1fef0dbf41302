"""Place: the devices of a strategy. With several, each has a process; rank 0 holds the last stages and the loss.

To Lightning there is one replica of the data: `world_size` is 1 and nothing is summed over the ranks. Every rank sees
the same batches, and rank 0 decides wherever ranks could decide differently.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed.device_mesh import DeviceMesh

from pipeback.lightning import lightning_internals, option_checks, random_state
from pipeback.lightning.checkpoint_file import CheckpointFile
from pipeback.lightning.ranks.launchers import LAUNCHERS, launcher
from pipeback.lightning.ranks.meeting import Meeting, join
from pipeback.lightning.ranks.parallelized import MESH, AbsentMesh, Parallelized
from pipeback.pipeline.arguments import Processes, TensorParallel


class Place(SingleDeviceStrategy):
    """A strategy that runs on Trainer(devices=N), with the exchange between its ranks."""

    def __init__(
        self,
        start: str,
        processes: Processes,
        tensor: TensorParallel,
        accelerator: Accelerator | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        if start not in LAUNCHERS:
            raise ValueError(f"launcher must be one of {', '.join(LAUNCHERS)}, but is {start!r}")
        self.start, self.processes, self.tensor = start, processes, tensor
        self.cluster_environment: ClusterEnvironment | None = None
        self.num_nodes = 1
        self.alone = False  # whether this process validates alone, as the one that starts the others does
        self.meeting: Meeting | None = None
        self.parallelized = Parallelized()
        self.lost = False  # whether weights are not in the module, but on ranks that have failed, or in files
        self._devices: list[torch.device] = []

    # -- ranks ---------------------------------------------------------------------------------------------------

    @property
    def several(self) -> bool:
        """Whether the Trainer has several devices, each with a process of its own."""
        return self.ranks > 1

    @property
    def ranks(self) -> int:
        """The number of devices on all hosts."""
        return self.num_processes * self.num_nodes

    @property
    def num_processes(self) -> int:
        return len(self._devices)

    @property
    def node_rank(self) -> int:
        return 0 if self.cluster_environment is None else self.cluster_environment.node_rank()

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        return self._devices[self.local_rank] if self._devices else torch.device("cpu")

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Set by the Trainer from its options accelerator and devices."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._devices = list(devices)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What the user has given; else, and for one that wraps none yet, a `CheckpointFile`."""
        lightning_internals.default_checkpoint_io(self, CheckpointFile)
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, given: CheckpointIO) -> None:
        lightning_internals.set_checkpoint_io(self, given)

    def set_world_ranks(self) -> None:
        environment = self.cluster_environment
        if environment is None:
            return
        if not self.several:
            if isinstance(environment, TorchElasticEnvironment):
                environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
            return
        self.local_rank = environment.local_rank()
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.ranks)
        self.global_rank = environment.global_rank()
        vars(rank_zero_only)["rank"] = self.global_rank  # what its documentation asks for

    def _configure_launcher(self) -> None:
        self._launcher = launcher(self)

    def setup_environment(self) -> None:
        if self.several and not self.alone:
            option_checks.mesh(self.tensor, self.ranks)
            self.set_world_ranks()
        super().setup_environment()
        if self.several and not self.alone and self.meeting is None:
            assert self.cluster_environment is not None
            # processes that were started here may take a while to import what they need; those elsewhere may not exist
            timeout = self.processes.timeout
            seconds = timeout if self.launcher is None else max(timeout, 300.0)
            join(self.cluster_environment, self.root_device, seconds)
            self.meeting = Meeting(self.root_device, self.tensor.size)
            # all ranks see the same data, so that there is nothing to accumulate
            warnings.filterwarnings("ignore", ".*sync_dist=True.* when logging on epoch level")
        module = self.lightning_module
        if self.tensor.size > 1 and module is not None and is_overridden("configure_model", module):
            sizes = dict(zip(MESH, (1, self.ranks // self.tensor.size, self.tensor.size), strict=True))
            whole = None if self.meeting is None else self.meeting.table[None]
            mesh = AbsentMesh(sizes) if whole is None else DeviceMesh(self.root_device.type, whole, mesh_dim_names=MESH)
            lightning_internals.show_mesh(module, mesh)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Hear which modules `configure_model` wants to be cut, if devices compute stages together."""
        module = self.lightning_module
        with (
            nullcontext()
            if self.tensor.size == 1 or module is None
            else self.parallelized.hearing(module, self.tensor.size)
        ):
            yield

    # -- meeting -------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if self.meeting is not None:
            self.meeting.gather(f"barrier {name or ''}".strip())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self.meeting is None else self.meeting.broadcast("broadcast", obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return bool(decision) if self.meeting is None else self.meeting.broadcast("a decision", bool(decision))

    # -- what a strategy adds --------------------------------------------------------------------------------------

    def check_before_launch(self, trainer: Trainer) -> None:
        """Raise the errors that can be found before the processes start."""

    def before_reading(self, dataloader: Any) -> None:
        """Called with a DataLoader before anything is read from it."""

    def end_training(self) -> None:
        """Called before the devices are given back."""

    # -- data ----------------------------------------------------------------------------------------------------

    def same_random_numbers(self) -> None:
        """Give every rank the random state of rank 0: the same order of the data, the same augmentations."""
        if self.meeting is not None:
            random_state.load(self.meeting.broadcast("random numbers", random_state.save()))

    def process_dataloader(self, dataloader: Any) -> Any:
        self.before_reading(dataloader)
        if self.meeting is not None:
            self.same_random_numbers()
            init = getattr(dataloader, "worker_init_fn", None)
            if isinstance(init, partial) and init.func is pl_worker_init_function:
                dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)
        return super().process_dataloader(dataloader)

    def teardown(self) -> None:
        self.end_training()
        if self.several and not self.alone and self.cluster_environment is not None:
            self.cluster_environment.teardown()
        if not self.lost:
            super().teardown()
            return
        # there is nothing to move
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
