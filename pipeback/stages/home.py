"""Home: where a stage's weights live, on its device or in a store.

The protocols declare what a stage asks of objects that rooms above define and that it therefore cannot import: the
surviving weights of a sparse stage, a rank's share of the weights, a recomputed forward, and a stack of stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeback.private import identity
from pipeback.stages.device_slot import DeviceSlot
from pipeback.tensors.flat_buffer import FlatBuffer
from pipeback.tensors.weight_list import WeightList


class Survivors(Protocol):
    """The weights of a sparse stage that are not masked, and where their values are (`sparse_weights`)."""

    numbers: Any
    policy: Any
    changes: Any

    @property
    def packed(self) -> Any: ...

    @property
    def index_bytes(self) -> int: ...

    def packed_at(self, version: int) -> Any: ...

    def begin(self, weights: Sequence[Tensor], where: torch.device) -> None: ...

    def cut_state(self, stage: Any) -> None: ...

    def skipping(self, stage: Any, device: torch.device) -> Any: ...

    def expanded(self, stage: Any, n: int, value: Tensor) -> Tensor: ...

    def dense(self, stage: Any) -> list[Tensor]: ...

    def gathered(self, dense: Sequence[Tensor | None]) -> list[Tensor | None]: ...

    def gather_into(self, stage: Any, dense: Sequence[Tensor]) -> None: ...

    def change(self, stage: Any, gradients: Sequence[Tensor | None], update: int) -> None: ...

    def restore(self, stage: Any, changes: Any) -> None: ...


class WeightShare(Protocol):
    """The slice of a stage's weights that this rank keeps, where the replicas share them out (`shards`)."""

    share: int
    column: Any

    @property
    def nbytes(self) -> int: ...

    def home(self, device: torch.device, *, pinned: bool) -> Any: ...

    def cut(self, n: int, whole: Tensor, rank: int | None = None) -> Tensor: ...

    def cut_state(self, stage: Any) -> None: ...

    def norm(self, grads: Sequence[Tensor | None]) -> Tensor: ...

    def gather(self, mine: Tensor, whole: Tensor) -> None: ...

    def scatter(
        self, grads: Sequence[Tensor | None], number: float, version: int
    ) -> tuple[list[Tensor | None], float, int]: ...

    def whole(self, tensors: Mapping[str, Tensor], keep: Any) -> dict[str, Tensor]: ...

    def pieces(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...

    def fits(self, name: str, tensor: Tensor) -> bool: ...


class WeightShards(Protocol):
    """This rank's shards of a stage that several ranks compute together (`tensor_parallel/sharding`)."""

    cuts: Any
    data_dependent: bool

    @property
    def count(self) -> int: ...

    def norm(self, grads: Sequence[Tensor | None], *, computing: bool = ...) -> Tensor: ...

    def whole(self, tensors: Mapping[str, Tensor], keep: Any = ...) -> dict[str, Tensor]: ...

    def state(
        self, tensors: Mapping[str, Tensor], plain: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def own(self, plain: dict[str, Any]) -> dict[str, Any]: ...

    def going_on(self, plain: dict[str, Any]) -> dict[str, Any]: ...

    def shards(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...


class Repetition(Protocol):
    """A forward that B does once more (`recompute`)."""

    @property
    def stream(self) -> Tensor | None: ...

    @property
    def buffers(self) -> dict[str, Tensor | None]: ...

    @property
    def settings(self) -> Any: ...

    @property
    def drawn(self) -> Sequence[Tensor]: ...

    def __call__(self, stage: Any, flight: Any) -> Any: ...


class JoinedMemory(Protocol):
    """The memory in which the weights of several stages lie one after the other (`joined_homes`)."""

    count: int
    rows: list[Tensor]

    def bring(self) -> int | None: ...


class StackedFlight(Protocol):
    """What the forward of a stacked stage has left for its backward."""

    @property
    def kind(self) -> Any: ...

    def tensors(self, mb: int) -> list[Tensor]: ...

    def written(self) -> list[Any]: ...


class StageStack(Protocol):
    """Stages that run as one (`vectorized/stacks/stack`)."""

    stages: Any
    first: int
    numbers: list[int]
    rows: Any
    stash: Any
    spare: list[Tensor]

    @property
    def held(self) -> int: ...

    def spread(self) -> None: ...

    @property
    def beside(self) -> int: ...

    @property
    def proved(self) -> bool: ...

    @property
    def one_kind(self) -> Any: ...

    def renew(self) -> None: ...

    def call_of(self, stage: Any) -> Any: ...

    def restart(self, stage: Any) -> None: ...

    def restore(self, stage: Any, mb: int, plain: Any, values: Any) -> Any: ...


class Home:
    """Where the weights of a stage live: on its device, or in a store that brings them there."""

    def __init__(self, module: nn.Module) -> None:
        self.places = _places(module)  # the parameters: who has them, by which name, and at which address
        self.flat: FlatBuffer | None = None  # the weights in a store, outside the device
        self.slot: DeviceSlot | None = None  # their place on the device, if they are only there when needed
        self.apart = False  # whether the store keeps each stage by itself: in a file of its own, or a slice of it
        self.joined: JoinedMemory | None = None  # the memory of which both are parts, with those of other stages
        self.sparse: Survivors | None = None  # which of the weights survive
        self.share: WeightShare | None = None  # what this rank's store keeps of the weights, if others keep the rest
        self.shards: WeightShards | None = None  # this rank's shards, if other ranks compute the stage with it
        self.spilled: Sequence[Tensor | None] | None = None  # sums of gradients that left the device with the weights

    def look(self, module: nn.Module) -> None:
        """Note the new addresses of the module's parameters."""
        self.places = _places(module)

    def let_go(self) -> None:
        """Note that this process holds no weights of the stage."""
        self.places, self.flat, self.slot, self.spilled = [], None, None, None

    def move(self, flat: FlatBuffer, slot: DeviceSlot, *, apart: bool) -> None:
        """Move to a store: `flat` holds the values of the weights, which are used at `slot`. apart: see above."""
        self.flat, self.slot, self.apart = flat, slot, apart

    def join(self, joined: JoinedMemory, flat: FlatBuffer) -> None:
        """Move to a part of memory of the same store that holds the weights of other stages, too."""
        self.joined, self.flat = joined, flat

    def refill(self, flat: FlatBuffer) -> None:
        """Move to other memory of the same store, as weights of another size need."""
        self.flat = flat

    def thin(self, sparse: Survivors | None) -> None:
        """Note which of the weights survive; None: all do."""
        self.sparse = sparse

    def divide(self, share: WeightShare) -> None:
        """Note the share of the weights that this rank's store keeps."""
        self.share = share

    def spread(self, shards: WeightShards) -> None:
        """Note that other ranks hold the other shards of the weights."""
        self.shards = shards

    def holds(self, w: Tensor, p: Tensor) -> bool:
        """Whether a weight, which an optimizer steps, shares the memory of its parameter, or that in the store; a
        master does not.
        """
        if self.slot is None:
            return w.dtype != p.dtype or w.data_ptr() == p.data_ptr()
        if self.flat is None or self.sparse is not None or self.share is not None:
            return True
        place = next(view for other, view in zip(self.slot.params, self.flat.views, strict=True) if other is p)
        storage = w.untyped_storage()  # once, since another thread may bring the weights of a disk store meanwhile
        away = storage.nbytes() == w.element_size()  # it shows one NaN in its whole shape, or has one number
        return away or w.device != place.device or identity(storage) == identity(place.untyped_storage())

    def spill(self, sums: Sequence[Tensor | None]) -> None:
        """Keep these gradient sums where the weights live."""
        self.spilled = sums

    def bring_sums(self) -> Sequence[Tensor | None]:
        """Return the gradient sums that were kept here, and keep them no longer."""
        sums, self.spilled = self.spilled or (), None
        return sums

    def attach(self, weights: WeightList) -> None:
        """Make these weights, which an optimizer steps, share memory with those in the store."""
        assert self.flat is not None and self.slot is not None
        mine = [view for p, view in zip(self.slot.params, self.flat.views, strict=True) if p.requires_grad]
        for w, view in zip(weights, mine, strict=True):
            if w.device == view.device:
                w.data = view
            else:
                torch.utils.swap_tensors(w, nn.Parameter(view))
        weights.forget()


def _places(module: nn.Module) -> list[tuple[Any, str, nn.Parameter, int]]:
    return [
        (owner._parameters, key, p, p.data_ptr())
        for owner in module.modules()
        for key, p in owner._parameters.items()
        if p is not None
    ]
