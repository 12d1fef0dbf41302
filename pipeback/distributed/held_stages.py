"""Held stages: the stages that this process holds; gets, shows and frees their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeback import weights
from pipeback.distributed.ranks import Ranks, SingleProcess
from pipeback.distributed.shown_weights import ShownWeights
from pipeback.methods.base import Method
from pipeback.schedules.placement import Placement, place
from pipeback.sparsities.base import Sparsity
from pipeback.splitting.partition import balance
from pipeback.stages.contiguous import lay_contiguously
from pipeback.stages.rebound_weights import staying
from pipeback.stages.recomputed_functions import Afresh
from pipeback.stages.stage import Stage
from pipeback.streaming.fetch_policy import together
from pipeback.streaming.shards import ReplicaGroup
from pipeback.streaming.sparse_weights import SparseWeights, choose
from pipeback.streaming.store import Store
from pipeback.tensor_parallel.spread import Spread
from pipeback.tensors import copies, meta


class HeldStages:
    """The stages of a pipeline, for every replica in this process. Stages of other processes are on the meta device.

    init: gives a module from the meta device its values; None: the `reset_parameters` of its layers do. device: the
    device on which such a stage is put.
    shards: every replica's store keeps a slice of each stage.
    """

    def __init__(
        self,
        everywhere: list[list[Stage]],
        method: Method,
        ranks: Ranks | SingleProcess,
        workers: int | None,
        init: Callable[[nn.Module], object] | str | Path | None,
        device: torch.device | str,
        store: Store | None,
        sparsity: Sparsity | None = None,
        skip_zeros: bool | str = False,
        shards: bool = False,
        spread: Spread | None = None,
    ) -> None:
        self.everywhere, self.method, self.ranks, self.device = everywhere, method, ranks, device
        self.init = Path(init).absolute() if isinstance(init, (str, Path)) else init
        self.store, self.sparsity, self.skip_zeros, self.shards = store, sparsity, skip_zeros, shards
        self.spread = spread  # how the model's weights are spread over ranks that compute stages together; None: not
        self.workers = ranks.count if ranks.several else workers or 1
        self.stages = everywhere[0]
        self.compute: torch.device | None = None  # the device where stages of a store compute; None: that of the module
        self.seconds = [1.0] * len(self.stages)  # seconds of F (forward) and B (backward) of each stage, once measured
        self._shared_by: list[float] | None = None  # those by which the stages were shared out, once they are
        self.owner: list[int] | None = None  # the worker of each stage, once each process holds its own only
        self.showing = ShownWeights()

    @property
    def shared(self) -> bool:
        """Whether several workers share the stages, or several replicas each have them."""
        return self.workers > 1 or len(self.everywhere) > 1

    @property
    def later(self) -> bool:
        """Whether stages get their worker, or their place in a store, as late as at the first push."""
        return self.shared or self.ranks.several

    @property
    def most_as_one(self) -> int | None:
        """The most stages that may run as one, since they are on the device at once; None: weights stay there."""
        return None if self.store is None else together(self.store.prefetch)

    def balance(self) -> list[int]:
        """Return the worker of each stage."""
        return self.placement().owner

    def placement(self, seconds: Sequence[float] | None = None) -> Placement:
        """Where stages are. seconds: of each stage, if others than those that were measured here."""
        chunks = self.method.chunks if self.workers > 1 else 1
        parts = balance(self.seconds if seconds is None else seconds, self.workers * chunks)
        return place(self.method.placement, self.workers, parts)

    def would_hold(self, seconds: list[float]) -> list[int] | None:
        """Return the stages that this process will hold, given the measured seconds per stage; None: all."""
        if not self.ranks.several or len(seconds) != len(self.stages):
            return None
        return [s for s, worker in enumerate(self.placement(seconds).owner) if worker == self.ranks.index]

    @property
    def mine(self) -> list[Stage]:
        """Return the stages that this process holds, of all its replicas."""
        if self.owner is not None:
            return [stage for stage in self.stages if self.owner[stage.index] == self.ranks.index]
        return [stage for stages in self.everywhere for stage in stages]

    def hide(self) -> None:
        """Remove the gradients that were shown to a caller who computes the loss outside the pipeline."""
        for stage in self.mine:
            stage.gradients.hide()

    def take_over(self) -> None:
        """Take over what such a caller has left in `.grad`."""
        for stage in self.mine:
            stage.gradients.take_over()

    def show_between(self, shows: bool) -> None:
        """Set whether such a caller is shown the sums of gradients between operations."""
        for stage in self.mine:
            stage.gradients.show_between(shows)

    def initialise(self, stage: Stage) -> None:
        """Initialise a stage from the meta device; further replicas in this process get the values of the first."""
        first = self.stages[stage.index]
        if stage is not first and not self.ranks.several:
            with self.present(first), torch.no_grad():
                values = [t.detach().clone() for t in (*first.module.parameters(), *first.module.buffers())]
            stage.take_up(self.method, partial(_filled, values=values, device=self.device))
            return
        # another stream than that of the stage's random layers
        seed = (stage.random.seed * 1_000_003 + stage.index + 0x5EED) % 2**63
        init = self.init
        if isinstance(init, Path):
            init = partial(weights.fill, path=init, names=stage.names, label=stage.label)
        stage.take_up(self.method, lambda module: meta.initialise(module, stage.label, seed, self.device, init))

    @contextmanager
    def present(self, stage: Stage) -> Iterator[None]:
        """A context in which a stage has its weights that no process holds yet."""
        if stage.home.slot is not None and self.store is not None and not stage.home.slot.flat.here:
            stage.home.slot.arrive()
            try:
                self.store.read(stage, stage.home.slot)
                yield
            finally:
                stage.home.slot.leave()
            return
        if stage.here:
            yield
            return
        self.initialise(stage)
        try:
            yield
        finally:
            stage.let_go()

    @contextmanager
    def all_present(self, stages: Iterable[Stage]) -> Iterator[None]:
        """A context in which these stages have their weights at once."""
        with ExitStack() as stack:
            for stage in stages:
                stack.enter_context(self.present(stage))
            yield

    def present_as_one(self, stage: Stage) -> AbstractContextManager[None]:
        """As `present`, with all stages that run as one with this one: graphs are checked on the weights of all."""
        return self.present(stage) if stage.stack is None else self.all_present(stage.stack.stages)

    def opened(self, stage: Stage, *, changes: bool = False) -> AbstractContextManager[None]:
        """A context in which all state of a stage is in memory. changes: whether the store keeps it on exit."""
        if self.store is None or stage.home.slot is None:
            return nullcontext()
        return self.store.opened(stage, changes=changes, whole=True)

    @contextmanager
    def saving(self, stage: Stage, *, opened: bool = True) -> Iterator[None]:
        """A context in which a stage's micro-batches in flight can be saved: they may hold functions of its weights."""
        with ExitStack() as stack:
            if isinstance(stage.call, Afresh) and stage.flights:
                stack.enter_context(self.present(stage))
            if opened:
                stack.enter_context(self.opened(stage))
            yield

    def values(self, stage: Stage) -> dict[str, Tensor]:
        """Return copies of a stage's newest weights and buffers, dense and on the CPU, by name."""
        with self.present(stage):
            found = {name: value.detach().to("cpu", copy=True) for name, value in stage.module.state_dict().items()}
        if stage.home.shards is None:
            return found
        whole = stage.home.shards.whole({f"weight/{name}": value for name, value in found.items()})
        return {name.removeprefix("weight/"): value for name, value in whole.items()}

    def meet(self) -> None:
        """Join the ranks that compute stages together; every rank calls this once they have met."""
        if self.spread is not None and isinstance(self.ranks, Ranks):
            self.spread.group.join(self.ranks, next(p.device for s in self.stages for p in s.module.parameters()))

    def meet_again(self, *, back: bool = False) -> None:
        """Meet the other ranks anew after an error; every rank calls it. back: to go back to a state they keep."""
        ranks = self.ranks
        assert isinstance(ranks, Ranks)
        if back:
            self.ranks = ranks.anew()
        else:
            ranks.leave()  # what has failed, or left, is told once
            self.ranks = Ranks(ranks.mesh, ranks.timeout, tensor=ranks.tensor)
            self.ranks.goes_back, self.ranks.guard = ranks.goes_back, ranks.guard
        self.meet()

    def together(self) -> AbstractContextManager[None]:
        """A context in which the ranks that compute stages together communicate."""
        return nullcontext() if self.spread is None else self.spread.group.together()

    def whole(self, model: nn.Module) -> nn.Module:
        """Return a copy of the user's model with the newest weights of all stages; every rank calls this."""
        # buffers, such as batch statistics, differ between replicas; those of the first are used
        own = {s.index: self.values(s) for s in self.mine if self.shards or not s.replica}
        parts = self.ranks.gather({} if self.ranks.replica or self.ranks.shard else own, "model")
        whole = copies.deep(model)
        if self.spread is not None:
            self.spread.whole(whole)
        meta.move([t for t in (*whole.parameters(), *whole.buffers()) if t.is_meta], "cpu")
        for buffer in (b for b in whole.buffers() if b.layout is torch.strided):
            buffer.data = buffer.data.contiguous()  # an expanded buffer cannot be written into
        values = [(self.stages[s].names, found) for part in parts for s, found in part.items()]
        named = {names[key]: value for names, found in values for key, value in found.items()}
        whole.load_state_dict(named, strict=False)  # tensors that no stage uses stay as they were
        return whole

    @contextmanager
    def shown(self, *, changes: bool = False) -> Iterator[None]:
        """A context in which parameters show the values that the store has; no stage is on the device."""
        with ExitStack() as stack:
            for stage in self.mine:
                if stage.home.slot is not None and stage.home.flat is not None:
                    stack.enter_context(self.opened(stage, changes=changes))
                    dense = stage.home.flat.views if stage.home.sparse is None else stage.home.sparse.dense(stage)
                    stack.enter_context(stage.home.slot.showing(dense))
                    if changes and stage.home.sparse is not None:
                        stack.callback(stage.home.sparse.gather_into, stage, dense)
                if changes:
                    stack.enter_context(staying([*stage.module.parameters(), *stage.weights]))
            yield

    def lay(self) -> None:
        """Move the small weights of each worker into one strip, before any graph refers to their old places."""
        if self.store is not None or (self.spread is not None and not self.method.elementwise):
            return
        owner = self.balance()
        for stages in self.everywhere:
            for worker in set(owner):
                mine = [stage for stage in stages if owner[stage.index] == worker and stage.here]
                lay_contiguously([stage for stage in mine if stage.stack is None and not stage.flights])

    def measured(self, seconds: list[float]) -> None:
        """Take these seconds, unless the stages are shared out already: they stay where they are."""
        if self._shared_by is None and seconds:
            self.seconds = seconds

    def share_out(self, seconds: list[float] | None = None) -> None:
        """Give every worker its stages, by what was measured; over processes, this rank keeps its own only.

        seconds: those of a state with micro-batches in flight; None: stages from the meta device are initialised.
        """
        values = seconds is None
        if seconds is not None:
            self.seconds = seconds
        elif self._shared_by is None and self.ranks.several:
            self.seconds = self.ranks.gather(self.seconds, "push()")[0]
        self._shared_by = self.seconds
        if not self.ranks.several:
            return
        self.owner = self.balance()
        for stage, worker in zip(self.stages, self.owner, strict=True):
            if worker != self.ranks.index:
                if stage.here:
                    stage.let_go()
            elif not stage.here:
                if values:
                    self.initialise(stage)
                else:
                    stage.take_up(self.method, partial(meta.take_up, device=stage.device or self.device))
        self.take_up()

    def column(self) -> ReplicaGroup | None:
        """The group of ranks over whose stores this rank's stages are split; None: they are not split."""
        if not self.shards or not isinstance(self.ranks, Ranks):
            return None
        return self.ranks.column(self.mine[0].device or torch.device(self.device))

    def take_up(self) -> None:
        """Initialise the stages that this process keeps, and put them into the store, if there is one.

        It goes stage by stage, so that a model from the meta device that lives in a store is never whole in memory.
        """
        sparse: list[list[SparseWeights | None]] = []
        if self.store is not None and self.sparsity is not None:
            sparse = [choose(self.sparsity, stages, self.skip_zeros) for stages in self.everywhere]
        column = self.column()
        for stage in self.mine:
            if stage.home.share is not None:
                stage.home.share.column = column
            if not stage.here:
                self.initialise(stage)
            if self.store is not None and stage.home.slot is None:
                device = self.compute or stage.device or torch.device(self.device)
                which = sparse[stage.replica][stage.index] if sparse else None
                self.store.hold(stage, self.method, device, which)


def _filled(module: nn.Module, values: Iterable[Tensor], device: torch.device | str) -> None:
    """Give a module from the meta device these values for its weights and buffers."""
    meta.take_up(module, device)
    with torch.no_grad():
        for tensor, value in zip((*module.parameters(), *module.buffers()), values, strict=True):
            tensor.copy_(value)
