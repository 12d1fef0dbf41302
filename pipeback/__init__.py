"""pipeback: train deep networks by pipelined backpropagation.

    pipe = pipeback.Pipeline(model, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), method="pb")
    loss = pipe.push(x, y)

Names are imported when first used, so that schedules and timelines need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeback import checkpoint, draw, methods, norms, optim, plan, schedules, sparsities, weights
    from pipeback.distributed.join import join
    from pipeback.errors import PushLeftOut, RankError, StageError, StoreError
    from pipeback.methods.base import Method, Past, Shift, State, Weights, When
    from pipeback.methods.chain import chain
    from pipeback.methods.momentum import scale_hyperparameters
    from pipeback.pipeline.arguments import (
        Clipping,
        Debug,
        MicroBatches,
        Processes,
        Splitting,
        Streaming,
        TensorParallel,
    )
    from pipeback.pipeline.memory_use import Memory
    from pipeback.pipeline.pipeline import Pipeline
    from pipeback.plan.training_plan import Plan
    from pipeback.runtime.ledger import Record
    from pipeback.runtime.staleness import Watch
    from pipeback.schedules import timeline
    from pipeback.schedules.ops import Op, Schedule, until
    from pipeback.sparsities.base import Sparsity
    from pipeback.streaming.disk_store import DiskStore
    from pipeback.streaming.store import HostStore, Store
    from pipeback.streaming.traffic import Traffic

__version__ = "0.2.0"

_HOME = {
    "join": "distributed.join", "timeline": "schedules.timeline",
    "Op": "schedules.ops", "Schedule": "schedules.ops", "until": "schedules.ops", "Record": "runtime.ledger",
    "Method": "methods.base", "Past": "methods.base", "Shift": "methods.base", "State": "methods.base",
    "Weights": "methods.base", "When": "methods.base", "chain": "methods.chain",
    "scale_hyperparameters": "methods.momentum", "Memory": "pipeline.memory_use", "Pipeline": "pipeline.pipeline",
    "Clipping": "pipeline.arguments", "Debug": "pipeline.arguments", "MicroBatches": "pipeline.arguments",
    "Processes": "pipeline.arguments", "Splitting": "pipeline.arguments", "Streaming": "pipeline.arguments",
    "TensorParallel": "pipeline.arguments",
    "Plan": "plan.training_plan", "Sparsity": "sparsities.base", "Watch": "runtime.staleness",
    "PushLeftOut": "errors", "RankError": "errors", "StageError": "errors", "StoreError": "errors",
    "DiskStore": "streaming.disk_store", "HostStore": "streaming.store", "Store": "streaming.store",
    "Traffic": "streaming.traffic",
}  # fmt: skip

__all__ = [
    "Clipping",
    "Debug",
    "DiskStore",
    "HostStore",
    "Memory",
    "Method",
    "MicroBatches",
    "Op",
    "Past",
    "Pipeline",
    "Plan",
    "Processes",
    "PushLeftOut",
    "RankError",
    "Record",
    "Schedule",
    "Shift",
    "Sparsity",
    "Splitting",
    "StageError",
    "State",
    "Store",
    "StoreError",
    "Streaming",
    "TensorParallel",
    "Traffic",
    "Watch",
    "Weights",
    "When",
    "chain",
    "checkpoint",
    "draw",
    "join",
    "methods",
    "norms",
    "optim",
    "plan",
    "scale_hyperparameters",
    "schedules",
    "sparsities",
    "timeline",
    "until",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name == "timeline":
        return import_module(f"pipeback.{_HOME[name]}")
    if name in _HOME:
        return getattr(import_module(f"pipeback.{_HOME[name]}"), name)
    if name in __all__:
        return import_module(f"pipeback.{name}")
    raise AttributeError(f"module 'pipeback' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
