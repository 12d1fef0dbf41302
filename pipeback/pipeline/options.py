"""Options: the arguments of `Pipeline` in their long form, and whether they go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pipeback.methods.base import Method
from pipeback.pipeline.arguments import (
    Clipping,
    Debug,
    MicroBatches,
    Processes,
    Splitting,
    Streaming,
    TensorParallel,
)
from pipeback.pipeline.option_checks import (
    at_least_one,
    check_functions,
    check_goes_with,
    check_masters,
    check_placement,
    check_workers,
    such,
)
from pipeback.schedules.split import splits
from pipeback.stages.activations import recomputes
from pipeback.stages.stage import OptimizerFactory
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore, Store


class PipelineOptions(NamedTuple):
    """The arguments of `Pipeline` except the model, in their long form if they have one.

    threads: workers in this process. None: the event loop.
    """

    loss: Callable[[Any, Any], Tensor] | None
    optimizer: OptimizerFactory
    method: str | Method | None
    micro_batches: MicroBatches
    splitting: Splitting
    example: Any
    threads: int | None
    processes: Processes
    replicas: int | None
    streaming: Streaming
    activations: str | Sequence[str] | Mapping[str | int, str]
    masters: bool
    compile: bool | dict[str, Any]
    vectorize: bool | Literal["auto", "cuda_graph"]
    clipping: Clipping
    debug: Debug
    reference_batch: int | None = None
    tensor: TensorParallel = TensorParallel()

    def check(self) -> None:
        """Raise ValueError or TypeError if an option has a wrong type or a value that it cannot take."""
        such("debug", self.debug, (Debug,), "a pipeback.Debug or None")
        for group in (
            self.micro_batches,
            self.splitting,
            self.processes,
            self.streaming,
            self.tensor,
            self.clipping,
            self.debug,
        ):
            group.check()
        at_least_one("workers", self.threads)
        at_least_one("replicas", self.replicas)
        at_least_one("reference_batch", self.reference_batch)
        such("compile", self.compile, (bool, dict), "True, False or a dict of options of torch.compile")
        words = (True, False, "auto", "cuda_graph")
        if (
            not isinstance(self.vectorize, bool | str) or self.vectorize not in words
        ):  # 1 is no True, though equal to it
            raise ValueError(f'vectorize must be True, False, "auto" or "cuda_graph", but is {self.vectorize!r}')

    def check_together(
        self, method: Any, stages: int, replicas: int, ranks: int, store: Store | None, *, shards: bool
    ) -> None:
        """Raise ValueError or TypeError if options exclude each other, or do not fit the model, ranks or store.

        stages: how many the model has. replicas, ranks: how many there are. store: the one that holds the weights.
        shards: whether every rank's store keeps a slice of each weight.
        """
        check_functions(method, self.loss, self.optimizer)
        check_workers(stages, ranks, self.threads)
        check_placement(method, stages, max(ranks, self.threads or 1))
        if method.chunks > 1 and max(ranks, self.threads or 1) > 1:
            as_one = [("vectorize", self.vectorize, False, "vectorize=False")]
            check_goes_with(f"placement={method.placement!r} on several workers", "", as_one)
            apart = method.placement == "v" and ranks > 1  # the loss is then on the first rank, not on the last one
            given = ("placement", method.placement if apart else "neighbours", "neighbours", "placement='neighbours'")
            check_goes_with("loss=None over several ranks", "", [given] if self.loss is None else [])
        if splits(method.schedule) and any(method.delays(stages)):
            whole = (
                ("vectorize", self.vectorize, False, "vectorize=False"),
                ("tensor_parallel", self.tensor.size, 1, "tensor_parallel=1"),
                ("store", self.streaming.store, None, "store=None"),
            )
            check_goes_with(f"{method!r}, which updates between the two parts of a backward,", "", whole)
        workers = ("workers", self.threads, None, "workers=None")
        copies = ("replicas", replicas, 1, "replicas=1")
        if self.loss is None:
            sized = ("micro_batch_size", self.micro_batches.size, None, "micro_batch_size=None")
            equal = ("weights", self.micro_batches.weights, "equal", "micro_batch_size=None")
            finite = ("check_finite", self.debug.check_finite, False, "debug=pipeback.Debug(check_finite=False)")
            scaled = ("reference_batch", self.reference_batch, None, "reference_batch=None")
            check_goes_with("loss=None", "", (sized, equal, finite, copies, scaled))
        if self.tensor.size > 1:
            both = self.streaming.store if replicas > 1 else None
            apart = [
                ("vectorize", self.vectorize, False, "vectorize=False"),
                ("compile", self.compile, False, "compile=False"),
                ("sparsity", self.streaming.sparsity, None, "store=None"),
                ("replicas with a store", both, None, "store=None"),
                workers,
            ]
            check_goes_with(f"tensor_parallel={self.tensor.size}", ", or leave tensor_parallel out", apart)
        if self.debug.take_back is not None:
            disk = self.streaming.store if isinstance(store, DiskStore) else None
            beside: list[tuple[str, Any, Any, str]] = [
                ("loss", "given" if self.loss is not None else None, "given", "a loss, and push"),
                ("vectorize", self.vectorize, False, "vectorize=False"),
                ("store", disk, None, 'store="host"'),
                ("tensor_parallel", self.tensor.size, 1, "tensor_parallel=1"),
            ]
            check_goes_with(f"take_back={self.debug.take_back}", ", or leave take_back out", beside)
        check_masters(self.masters, store)
        order = self.debug.order
        among: list[tuple[str, Any, Any, str]] = [
            workers,
            copies,
            ("ranks", ranks, 1, "ranks=1"),
            ("store", self.streaming.store, None, "store=None"),
            ("sparsity", self.streaming.sparsity, None, "store=None"),
        ]
        if self.vectorize and isinstance(store, HostStore | DiskStore):
            among = [one for one in among if one[0] != "store"]
            graphs = self.vectorize if self.vectorize == "cuda_graph" else True
            check_goes_with("a store", ", or vectorize=False", [("vectorize", graphs, True, "vectorize=True")])
        if self.vectorize:
            kept = self.activations if recomputes(self.activations) else "device"
            among.append(("activations", self.activations, kept, f"activations={kept!r}"))
            among.append(("order", order, "grouped", 'debug=pipeback.Debug(order="grouped")'))
            apart = [one for one in among if one[0] not in ("workers", "replicas", "ranks")]
            check_goes_with(f"vectorize={self.vectorize!r}", ", or vectorize=False", apart)
        elif order == "skewed":
            among.append(("loss", "given" if self.loss is not None else None, "given", "a loss, and push"))
            check_goes_with('order="skewed"', "", among)
