"""pipeback: train deep networks by pipelined backpropagation.

pipe = pipeback.Pipeline(model, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), method="pb")
loss = pipe.push(x, y)
"""

from pipeback import methods, schedules, timeline
from pipeback.events import Op, Schedule, until
from pipeback.ledger import Record
from pipeback.method import Method, Past, Shift, State, Weights, When, chain
from pipeback.momentum import scale_hyperparameters
from pipeback.pipeline import Memory, Pipeline
from pipeback.worker import StageError

__version__ = "0.1.0"

__all__ = [
    "Memory",
    "Method",
    "Op",
    "Past",
    "Pipeline",
    "Record",
    "Schedule",
    "Shift",
    "StageError",
    "State",
    "Weights",
    "When",
    "chain",
    "methods",
    "scale_hyperparameters",
    "schedules",
    "timeline",
    "until",
]
