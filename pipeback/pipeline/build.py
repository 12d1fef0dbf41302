"""Build: turn options into stages that can be trained, place their weights, and decide which process holds them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeback.checkpoint import commits
from pipeback.distributed.agreement import agree, alike
from pipeback.distributed.held_stages import HeldStages
from pipeback.distributed.join import default_device
from pipeback.distributed.ranks import Ranks, SingleProcess, meet
from pipeback.methods.base import Method, overrides
from pipeback.pipeline import by_name
from pipeback.pipeline.method_choice import chosen
from pipeback.pipeline.named_parameters import by_stage
from pipeback.pipeline.option_checks import check_going_back, check_init, check_whole_weights
from pipeback.pipeline.options import PipelineOptions
from pipeback.pipeline.reference_batch import scaling
from pipeback.pipeline.stage_builder import StageBuilder
from pipeback.runtime.setting import Setting
from pipeback.schedules.programs import Flowing
from pipeback.splitting.split import Split, split_model
from pipeback.stages.activations import kinds
from pipeback.stages.stage import Stage
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.shards import share_out
from pipeback.streaming.store import DeviceStore, Store
from pipeback.tensor_parallel.group import TensorGroup
from pipeback.tensor_parallel.spread import Spread
from pipeback.tensor_parallel.spread import spread as spread_out
from pipeback.weights import aliases


class Built(NamedTuple):
    """The parts of a pipeline before anything has run.

    delays: delay D of every stage. optimizers: one per stage. aliases: all names of each weight and buffer. graphed:
    whether ticks of stages as one become CUDA graphs.
    """

    options: PipelineOptions
    split: Split
    method: Method
    delays: list[int]
    replicas: int
    optimizers: list[torch.optim.Optimizer]
    aliases: dict[str, list[str]]
    holding: HeldStages
    setting: Setting
    graphed: bool


def build(model: nn.Module | Sequence[nn.Module] | Split, options: PipelineOptions) -> Built:
    """The stages of `model`. Raises ValueError or TypeError, naming the stage or option and the cure.

    Over processes every rank calls it, and an error on one is told to the others.
    """
    processes = options.processes
    options.tensor.check()
    ranks = meet(processes.mesh, options.replicas, processes.timeout, options.tensor.size)
    with telling(ranks):  # from here on: the other ranks have come, too, and would wait
        options.check()
        streaming = options.streaming
        policy = by_name.sparsity(streaming.sparsity)
        home = disk_store.create(streaming.store) or (DeviceStore() if policy is not None else None)
    with telling(ranks), ExitStack() as undone:
        replicas = ranks.replicas if ranks.several else 1 if options.replicas is None else options.replicas
        spread = _spread(model, options, ranks, undone)
        if not isinstance(model, Split):
            cuts = options.splitting
            model = split_model(model, cuts.stages, options.example, cuts.leaves, cuts.balance)
        check_init(streaming.init, model.model)
        parts, n = model.parts, len(model.parts)
        factories = by_stage(options.optimizer, model.model, parts)
        method = chosen(options.method, factories, parts)
        shards = ranks.several and replicas > 1 and not isinstance(home, DeviceStore | None)
        options.check_together(method, n, replicas, ranks.count, home, shards=shards)
        every = kinds(options.activations, [part.name for part in parts])
        method.check_stages(n)
        delays = method.delays(n)
        if (reference := options.reference_batch) is not None:
            everywhere = ranks.replicas if ranks.several else replicas
            factories = [scaling(f, reference, method, options.micro_batches.size, everywhere) for f in factories]
        building = StageBuilder(method, delays, options.loss, factories, every, options.masters, options.compile)
        stages = building.stages(parts, ranks.replica)
        named = {id(t): key for key, t in model.model.state_dict(keep_vars=True).items()}
        for stage in stages:
            stage.take_names(named)
        names = aliases(model.model)
        check_whole_weights(method, policy is not None, shards)
        if ranks.several and options.debug.take_back is not None:
            devices = {p.device.type for stage in stages for p in stage.weights}
            check_going_back(options.debug.take_back, options.processes.link, devices, replicas, shards)
        if spread is not None:
            method = spread.stages(stages, method)
        if shards:
            share_out(stages, ranks.replica, replicas, policy)
        if not any(stage.weights for stage in stages):
            raise ValueError("the model has no trainable parameters; set requires_grad before the pipeline is built")
        optimizers: list[torch.optim.Optimizer] = [stage.optimizer for stage in stages]
        if isinstance(ranks, Ranks):
            _agree(ranks, stages, method, every, home, options)
        if home is not None:
            from pipeback.plan.budget import check_stages  # here, since most pipelines have no budget

            check_stages(stages, home, alone=not ranks.several and policy is None)
            home.open(ranks.place)
            undone.callback(home.close)
        if isinstance(home, DiskStore):
            commits.choose(home, ranks)
        where = streaming.device or default_device()
        holding = HeldStages(
            [stages],
            method,
            ranks,
            options.threads,
            streaming.init,
            where,
            home,
            policy,
            streaming.skip_zeros,
            shards,
            spread,
        )
        holding.compute = None if streaming.device is None else torch.device(streaming.device)
        holding.meet()
        if not ranks.several:
            holding.everywhere += building.twins(parts, model.program, replicas)
            holding.take_up()
        undone.pop_all()
    graphed = _graphed(stages, options, holding)
    setting = Setting(
        delays, options.debug.order, options.debug.seed, options.processes.link, options.threads,
        {"clip_norm": options.clipping.norm, "clip_value": options.clipping.value,
         "samples": options.micro_batches.weights == "samples" and not _alone(method, replicas),
         "check_finite": options.debug.check_finite},
        _stacks(stages, method, options, holding, graphed) if options.vectorize else [],
    )  # fmt: skip
    return Built(options, model, method, delays, replicas, optimizers, names, holding, setting, graphed)


def _spread(
    model: nn.Module | Sequence[nn.Module] | Split, options: PipelineOptions, ranks: Ranks | SingleProcess,
    undone: ExitStack,
) -> Spread | None:  # fmt: skip
    """Cut the model into this rank's shards, if several ranks compute stages together. undone: puts it back."""
    if not isinstance(ranks, Ranks) or ranks.tensor == 1:
        return None
    if isinstance(model, Split) and isinstance(model.spread, Spread):
        return model.spread
    if isinstance(model, Split):
        raise TypeError(
            "tensor_parallel cuts weights before a model is split, but model is a Split already; give the model itself "
            "with stages= and example="
        )
    alike(ranks, model if isinstance(model, nn.Module) else nn.Sequential(*model))
    found = spread_out(model, options.tensor.plan, TensorGroup(ranks.shard, ranks.tensor))
    undone.callback(found.undo)
    return found


def _alone(method: Method, replicas: int) -> bool:
    """Whether every update is of one micro-batch: its mean needs no weights, which would round."""
    single = isinstance(method.schedule, Flowing) and method.schedule.every == 1
    return single and replicas == 1 and not (method.flush_each_push or overrides(method, "schedule_at"))


def _graphed(stages: Sequence[Stage], options: PipelineOptions, holding: HeldStages) -> bool:
    """Whether ticks become CUDA graphs: where that was asked for, and by "auto" where one worker has all stages on one
    GPU, and nothing looks at single stages or micro-batches.
    """
    if options.vectorize != "auto":
        return options.vectorize == "cuda_graph"
    clipping, weights = options.clipping, options.micro_batches.weights
    looks = options.loss is None or options.masters or clipping.norm or clipping.value or weights == "samples"
    devices = {stage.device for stage in stages if stage.device is not None}
    on_one = len(devices) == 1 and next(iter(devices)).type == "cuda"
    return on_one and not (looks or options.compile or holding.shared or holding.store is not None)


def _stacks(
    stages: Sequence[Stage], method: Method, options: PipelineOptions, holding: HeldStages, graphed: bool
) -> Sequence[Any]:
    """Return stacks of stages that may run as one; none yet where they are made later."""
    from pipeback.vectorized.stacks import choose_stacks  # here: its room takes a sixth of the time of the import

    most = holding.most_as_one
    if not choose_stacks.check(stages, method, options.compile, options.vectorize, most) or holding.later:
        return []
    return choose_stacks.stacked(stages, method, options.compile, graphed, len(stages), most=most)


def _agree(
    ranks: Ranks, stages: Sequence[Stage], method: Method, every: Sequence[str], home: Store | None,
    options: PipelineOptions,
) -> None:  # fmt: skip
    """Raise an error if ranks were given different options."""
    agree(
        ranks, stages, method=repr(method), micro_batch_size=options.micro_batches.size,
        weights=options.micro_batches.weights, clip_norm=options.clipping.norm, clip_value=options.clipping.value,
        check_finite=options.debug.check_finite, reference_batch=options.reference_batch, link=options.processes.link,
        activations=options.activations if isinstance(options.activations, str) else every,
        masters=options.masters, compile=repr(options.compile),
        take_back=options.debug.take_back,
        store=home and f"{type(home).__name__}(prefetch={home.prefetch})", tensor_parallel=options.tensor.size,
        plan=repr(options.tensor.plan), vectorize=options.vectorize, skip_zeros=options.streaming.skip_zeros,
        sparsity=repr(by_name.sparsity(options.streaming.sparsity)),
    )  # fmt: skip


@contextmanager
def telling(ranks: Ranks | SingleProcess) -> Iterator[None]:
    """Tell the other ranks of an error before training; they would otherwise wait for this one."""
    try:
        yield
    except BaseException as error:
        ranks.failed(error)
        raise


@contextmanager
def releasing(release: Callable[[], object]) -> Iterator[None]:
    """Release what a pipeline holds that cannot be built."""
    try:
        yield
    except BaseException:
        release()
        raise


class StoreUse:
    """The use of a store by its owner. It ends when it is called, or with the owner, and another may use the store."""

    def __init__(self, owner: object, store: Store | None) -> None:
        self._store = store
        self._end = None if store is None else weakref.finalize(owner, store.close)

    def check(self) -> None:
        """Raise RuntimeError if it has ended, and what is in the store cannot be read any more."""
        over = self._end is not None and not self._end.alive
        if isinstance(self._store, DiskStore) and (over or self._store.closed):
            raise RuntimeError("the store was closed with the pipeline; build a new Pipeline, which goes on from it")

    def __call__(self) -> None:
        if self._store is not None and self._end is not None and self._end.alive:
            self._store.close()  # if it fails, it may be tried again
            self._end.detach()
