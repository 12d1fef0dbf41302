"""pipeback: train deep networks by pipelined backpropagation.

    pipe = pipeback.Pipeline(model, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), method="pb")
    loss = pipe.push(x, y)

Names are imported when first used, so that schedules and timelines need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeback import checkpoint, draw, methods, norms, plan, schedules, sparsities, timeline, weights
    from pipeback.disk import DiskStore
    from pipeback.events import Op, Schedule, until
    from pipeback.health import RankError
    from pipeback.joining import join
    from pipeback.ledger import Record
    from pipeback.memory import Memory
    from pipeback.method import Method, Past, Shift, State, Weights, When, chain
    from pipeback.momentum import scale_hyperparameters
    from pipeback.pages import StoreError
    from pipeback.pipeline import Pipeline
    from pipeback.plan import Plan
    from pipeback.sparsity import Sparsity
    from pipeback.store import HostStore, Store
    from pipeback.traffic import Traffic
    from pipeback.watch import Watch
    from pipeback.worker import StageError

__version__ = "0.1.0"

_HOME = {
    "join": "joining",
    "Op": "events", "Schedule": "events", "until": "events", "Record": "ledger",
    "Method": "method", "Past": "method", "Shift": "method", "State": "method", "Weights": "method", "When": "method",
    "chain": "method", "scale_hyperparameters": "momentum", "Memory": "memory", "Pipeline": "pipeline",
    "Plan": "plan", "RankError": "health", "Sparsity": "sparsity", "StageError": "worker",
    "Watch": "watch", "DiskStore": "disk", "HostStore": "store", "Store": "store", "StoreError": "pages",
    "Traffic": "traffic",
}  # fmt: skip

__all__ = [
    "DiskStore",
    "HostStore",
    "Memory",
    "Method",
    "Op",
    "Past",
    "Pipeline",
    "Plan",
    "RankError",
    "Record",
    "Schedule",
    "Shift",
    "Sparsity",
    "StageError",
    "State",
    "Store",
    "StoreError",
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
    "plan",
    "scale_hyperparameters",
    "schedules",
    "sparsities",
    "timeline",
    "until",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"pipeback.{_HOME[name]}"), name)
    if name in __all__:
        return import_module(f"pipeback.{name}")
    raise AttributeError(f"module 'pipeback' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
