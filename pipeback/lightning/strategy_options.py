"""Strategy options: what a user has asked of a PipelineStrategy, checked once, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision

from pipeback import sparsities
from pipeback.lightning import find_stages, option_checks
from pipeback.methods.base import Method
from pipeback.pipeline import by_name
from pipeback.pipeline.arguments import (
    Clipping,
    Debug,
    MicroBatches,
    Processes,
    Splitting,
    Streaming,
    TensorParallel,
    as_long,
)
from pipeback.pipeline.option_checks import at_least_one
from pipeback.streaming import disk_store
from pipeback.streaming.store import DeviceStore, Store


@dataclass(frozen=True)
class StrategyOptions:
    """The options of a `PipelineStrategy`, whose docstring says what they mean; its short forms are long ones here."""

    method: str | Method | None
    micro_batch_size: int | None
    reference_batch: int | None
    splitting: Splitting
    module: str | None
    drain: str
    threads: int | None
    processes: Processes
    streaming: Streaming  # with the store as it was given, before each rank makes its own
    activations: str | Sequence[str] | Mapping[str | int, str]
    masters: bool
    compile: bool | dict[str, Any]
    debug: Debug
    plan: bool
    tensor: TensorParallel
    vectorize: bool | str = False

    @classmethod
    def checked(
        cls,
        micro_batch_size: int | MicroBatches | None,
        stages: str | int | Sequence[str] | Splitting,
        workers: int | Processes | None,
        store: str | Store | Streaming | None,
        debug: Debug | None,
        tensor: int | TensorParallel,
        **others: Any,
    ) -> StrategyOptions:
        """Make the options from the arguments of a strategy; raises ValueError or TypeError if one is wrong."""
        size, splitting = as_long(MicroBatches, micro_batch_size), as_long(Splitting, stages)
        threads = None if isinstance(workers, Processes) else workers
        processes = workers if isinstance(workers, Processes) else Processes()
        streaming, debug = as_long(Streaming, store), Debug() if debug is None else debug
        shards = as_long(TensorParallel, tensor)
        option_checks.grouped(size, splitting, threads, processes, streaming, debug, shards)
        option_checks.options(others["method"], others["drain"], others["vectorize"])
        at_least_one("reference_batch", others["reference_batch"])
        option_checks.store(streaming.store)
        sparsity, place = streaming.sparsity, None if streaming.store == "device" else streaming.store
        if sparsity is not None and place is None:
            place = DeviceStore()
        if isinstance(sparsity, str):
            sparsities.options(sparsity)  # refuses an unknown name here, where the length of the training is not known
        option_checks.masters(others["masters"], disk_store.create(place))
        return cls(
            micro_batch_size=size.size,
            splitting=splitting,
            threads=threads,
            processes=processes,
            streaming=replace(streaming, store=place),
            debug=debug,
            tensor=shards,
            **others,
        )

    @property
    def store(self) -> str | Store | None:
        """Where weights live, as it was given; None: on the device."""
        return self.streaming.store

    @property
    def counts(self) -> bool:
        """Whether the first batch must tell how many updates the training has: a policy by name asks for that."""
        return isinstance(self.streaming.sparsity, str) and self.micro_batch_size is not None

    def streams(self, ranks: int) -> bool:
        """Whether the stages are in a store and come to one device. With several devices each rank takes its stages
        from its device, where the first micro-batch is rehearsed.
        """
        return self.store is not None and ranks == 1

    def find(self, module: LightningModule, ranks: int) -> find_stages.TrainedModule:
        """Find the module that is trained and its stages; raises ValueError if there are fewer stages than ranks."""
        found = find_stages.find(module, self.module, self.splitting)
        workers = ranks // self.tensor.size
        if workers > 1 and not found.followed and len(found.stages) < workers:
            raise ValueError(find_stages.few(found.shown, len(found.stages), workers))
        return found

    def find_to_fit(
        self, trainer: Trainer, module: LightningModule, plugin: Precision, ranks: int
    ) -> find_stages.TrainedModule:
        """Return what `find` does; raises ValueError if this Trainer could not train it."""
        option_checks.trainer(trainer, module, plugin, ranks > 1, self.store is not None)
        option_checks.threads(self.threads, ranks)
        option_checks.mesh(self.tensor, ranks)
        found = self.find(module, ranks)
        if found.step is not None:
            option_checks.has_values(module)
            found.step.far = ranks > 1 or self.store is not None
        option_checks.absent(trainer, found, self.streaming.init, disk_store.create(self.store), ranks > 1)
        return found

    def facts(self, precision: str) -> dict[str, Any]:
        """The options that must be alike on all ranks, and that the pipeline does not compare itself."""
        store = disk_store.create(self.store)
        return {
            "method": repr(self.method),
            "micro_batch_size": self.micro_batch_size,
            "reference_batch": self.reference_batch,
            "module": self.module,
            "drain": self.drain,
            "timeout": self.processes.timeout,
            "store": None if store is None else (type(store).__name__, store.prefetch, store.fused),
            "precision": precision,
            "tensor_parallel": self.tensor.size,
            "plan": repr(self.tensor.plan),
        }

    def of_pipeline(
        self, store: Store | None, device: torch.device, clipping: Clipping, updates: Callable[[], int | None]
    ) -> dict[str, Any]:
        """The arguments of a `Pipeline` that the user has decided. store: of this rank; device: where it computes.

        updates: returns how many a stage will make in the whole training, or None if that is not known.
        """
        policy = by_name.sparsity(self.streaming.sparsity, updates)
        return {
            "store": replace(self.streaming, store=store, device=None if store is None else device, sparsity=policy),
            "activations": self.activations,
            "masters": self.masters,
            "compile": self.compile,
            "tensor_parallel": self.tensor,
            "debug": self.debug,
            "clip_norm": clipping,
        }
