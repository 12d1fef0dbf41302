"""Closed message: the error of a pipeline that has ended, with its cause and the calls that are still possible; and of
one that cannot do something amid a micro-batch.
"""

from __future__ import annotations

from pipeback.errors import RankError, StageError
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import Store

# where states can be kept in memory
TAKE_BACK = (
    "; built with debug=pipeback.Debug(take_back=100), which keeps a state every 100 pushes, a pipeline leaves such a "
    "push out and goes on"
)
ON_DISK = (
    "; or close the pipeline with pipe.close() and build the model and its Pipeline anew, which goes on from what the "
    "store committed last"
)
BEFORE_THE_STATES = (
    "; take_back did not help, since the micro-batch came before the first state that is kept: before weights or an "
    "optimizer's state were written into, or a state was loaded; call drain() before you do so"
)
AMID = (
    "a micro-batch has gone forward; call backward with its gradient first (under Lightning, ask in on_train_batch_end)"
)
_REOPENS = "load_state_dict() reopens it"
_BEFORE = (
    "with a state of pipe.state_dict() from before, as pipeback.checkpoint.load does, and `with pipe.shown():` shows "
    "the weights as they are"
)


def otherwise(outside: bool, apart: bool, store: Store | None) -> str:
    """How to go on besides. outside: its loss is computed outside. apart: stages as one, or shards of them."""
    if outside:
        return ""
    return ON_DISK if isinstance(store, DiskStore) else "" if apart else TAKE_BACK


def closed(error: BaseException, otherwise: str = "") -> RuntimeError:
    """The error that every call raises after `error` has ended the pipeline. otherwise: how to go on the next time."""
    name = type(error).__name__
    if isinstance(error, StageError):
        return RuntimeError(
            f"the pipeline is closed: {error}; other stages had gone on meanwhile, so that the micro-batch could not "
            f"be taken back; {_REOPENS} {_BEFORE}{otherwise}"
        )
    if isinstance(error, RankError) and error.operation is not None:
        return RuntimeError(
            f"the pipeline is closed: {error}; other stages had gone on meanwhile; {_REOPENS} on all ranks {_BEFORE}"
            f"{otherwise}"
        )
    if isinstance(error, Exception):
        return RuntimeError(f"the pipeline is closed: {str(error) or name}; {_REOPENS}")
    return RuntimeError(
        f"the pipeline is closed: {name} came in the middle of its work, so that stages may have made different "
        f"numbers of updates; {_REOPENS} {_BEFORE}{otherwise}"
    )
