"""Pipeline state: the state of a whole pipeline, in one layout for every runtime, number of workers and store.

    {"format": 2, "stages": [tensors by name, one dictionary per stage], "plain": JSON values}

Further replicas are kept beside the first: tensors under replica/R/…, plain values in "replicas". They have the same
weights, so only the rest is kept: buffers, gradient sums, random streams, micro-batches in flight and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from pipeback.counts import counted
from pipeback.methods.base import PLACES, Method
from pipeback.runtime.loop import Loop, Messages
from pipeback.runtime.loop_progress import check_progress, merge_progress
from pipeback.stages import stage_state, state_check
from pipeback.stages.joint_optimizer import Options, plain_groups, restored
from pipeback.stages.stage import Stage
from pipeback.stages.state_values import Tensors

FORMAT = 2
COMMON = ("weight/", "optimizer/", "counted/", "method/", "version/")  # the same in every replica

Plain = dict[str, Any]
Opened = Callable[[Stage], AbstractContextManager[None]]


class StageShare(NamedTuple):
    """The state of one stage of one replica."""

    stage: int
    replica: int
    tensors: Tensors
    plain: Plain


class Share(NamedTuple):
    """The part of a state that one process holds: its stages, the progress of its loops, and options by `since`."""

    parts: list[StageShare]
    loops: dict[int, Plain]  # by replica
    groups: dict[int, Any]


def share(
    stages: Sequence[Stage],
    loops: Sequence[Loop],
    opened: Opened = lambda stage: nullcontext(),
    take: Callable[[Stage, Tensors], None] | None = None,
    copy: bool = True,
    alone: bool = False,
) -> Share:
    """Return copies of the state of these stages and loops; no operation may be running.

    opened: a context in which a stage is in host memory. take: is called with the tensors of each stage in turn; the
    share then holds none. copy=False: the tensors are those in use, which may be out of memory; if they are split over
    ranks, they are this rank's pieces. alone: with what all replicas have in common, whichever this one is.
    """
    groups: dict[int, Any] = {}

    def number(options: Options) -> int:
        if options.since not in groups:
            groups[options.since] = [plain_groups(g) for g in options.groups]
        return options.since

    waiting: dict[int, Messages] = {}
    progress: dict[int, list[Plain]] = {}
    for loop in loops:
        waiting.setdefault(loop.replica, {}).update(loop.waiting())
        progress.setdefault(loop.replica, []).append(loop.progress(number))
    parts = []
    for stage in stages:
        mine = {name: m for name, m in waiting.get(stage.replica, {}).items() if name[1] == stage.index}
        with opened(stage):
            tensors, plain = stage_state.save(stage, mine, number, copy=copy)
        own = partial(_own, stage)
        if stage.home.share is None or stage.home.flat is None:
            tensors = {k: v for k, v in tensors.items() if alone or own(k)}
        elif copy:  # otherwise this rank's store keeps its pieces
            tensors = stage.home.share.whole(tensors, own)
        if stage.home.shards is not None:
            _saveable(stage)
            if copy:
                tensors, plain = stage.home.shards.state(tensors, plain)
            else:  # this rank's store keeps its shards
                plain = stage.home.shards.own(plain)
        if take is not None:
            take(stage, tensors)
            tensors = {}
        parts.append(StageShare(stage.index, stage.replica, tensors, plain))
    return Share(parts, {r: merge_progress(some) for r, some in progress.items()}, groups)


def _saveable(stage: Stage) -> None:
    """Raise ValueError for micro-batches in flight whose graphs depend on where their tokens have gone."""
    spread = stage.home.shards is not None and stage.home.shards.data_dependent
    if spread and any(flight.again is None for flight in stage.flights.values()):
        raise ValueError(
            f"{stage.label}: micro-batches in flight hold tokens that have travelled to experts on other ranks; call "
            'pipe.drain() before the state is taken, or build the pipeline with activations="recompute"'
        )


def _own(stage: Stage, name: str) -> bool:
    """Whether a tensor belongs to the part of the state that this replica keeps."""
    return not (stage.replica and name.startswith(COMMON))


def merge(shares: Sequence[Share], plain: Plain) -> dict[str, Any]:
    """Return the state from the shares of all processes. plain: the values that belong to no stage."""
    parts = sorted((part for each in shares for part in each.parts), key=lambda part: (part.stage, part.replica))
    count = 1 + max(part.stage for part in parts)
    tensors: list[Tensors] = [{} for _ in range(count)]
    plains: list[Plain] = [{} for _ in range(count)]
    for part in parts:
        if part.replica:
            tensors[part.stage].update({f"replica/{part.replica}/{k}": v for k, v in part.tensors.items()})
            plains[part.stage].setdefault("replicas", []).append(part.plain)
        else:
            tensors[part.stage].update(part.tensors)
            plains[part.stage].update(part.plain)
    loops: dict[int, list[Plain]] = {}
    for each in shares:
        for replica, progress in each.loops.items():
            loops.setdefault(replica, []).append(progress)
    groups = {str(since): g for each in shares for since, g in sorted(each.groups.items())}
    whole = {
        **plain,
        "loops": [merge_progress(loops[replica]) for replica in sorted(loops)],
        "stages": plains,
        "groups": {**groups, **plain["groups"]},
    }
    return {"format": FORMAT, "stages": tensors, "plain": whole}


def of_one(own: Share, plain: Plain, stages: int) -> dict[str, Any]:
    """Return a state that only the process with this share, taken `alone`, can load. stages: how many there are."""
    tensors: list[Tensors] = [{} for _ in range(stages)]
    plains: list[Plain] = [{} for _ in range(stages)]
    for s, replica, some, values in own.parts:
        where = {k: f"replica/{replica}/{k}" for k in some if replica and not k.startswith(COMMON)}
        tensors[s] = {where.get(k, k): value for k, value in some.items()}
        plains[s] = {**values, "replicas": [values] * replica}
    last = max(own.loops)
    groups = {str(since): group for since, group in own.groups.items()} | plain["groups"]
    whole = {**plain, "loops": [own.loops[last]] * (last + 1), "stages": plains, "groups": groups}
    return {"format": FORMAT, "stages": tensors, "plain": whole}


def load(stage: Stage, state: dict[str, Any], options: dict[int, Options], opened: Opened, present: Opened) -> Messages:
    """Load a stage's part of the state into the stage; return the messages that wait for it.

    opened: a context in which a stage is in host memory and may be changed. present: a context in which it is on its
    device.
    """
    tensors, plain = state["stages"][stage.index], state["plain"]["stages"][stage.index]
    tensors = _part(stage, tensors)
    if stage.replica:
        plain = plain["replicas"][stage.replica - 1]
    if stage.home.share is not None and stage.home.flat is not None:
        tensors = stage.home.share.pieces(tensors)
    if stage.home.shards is not None:
        plain = stage.home.shards.going_on(plain)
    with opened(stage):
        stage_state.load(stage, tensors, plain, options)
    with present(stage) if plain["flights"] else nullcontext():
        return stage_state.load_flights(stage, tensors, plain, options)


def _part(stage: Stage, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of a stage's own replica among those of all replicas, and its shards of them."""
    if stage.replica:
        prefix = f"replica/{stage.replica}/"
        mine = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        tensors = {**{k: v for k, v in tensors.items() if k.startswith(COMMON)}, **mine}
    return tensors if stage.home.shards is None else stage.home.shards.shards(tensors)


def options_of(plain: Plain, optimizers: Sequence[Any]) -> dict[int, Options]:
    """Return the options with which the state's micro-batches were pushed, by `Options.since`."""
    return {
        int(since): Options(
            optimizers,
            int(since),
            [
                [restored(saved, group) for saved, group in zip(some, opt.param_groups, strict=True)]
                for some, opt in zip(groups, optimizers, strict=True)
            ],
        )
        for since, groups in plain["groups"].items()
    }


def put_options(plain: Plain, optimizers: Sequence[Any]) -> None:
    """Set the options of the optimizers to those in the state."""
    for opt, groups in zip(optimizers, plain["groups"][str(plain["current"])], strict=True):
        for group, saved in zip(opt.param_groups, groups, strict=True):
            group.update(restored(saved, group))


def fits(
    state: Any,
    stages: Sequence[Stage],
    method: Method,
    optimizers: Sequence[Any],
    *,
    weights: str,
    replicas: int,
    sparsity: str,
    size: int | None,
) -> Plain:
    """Return the plain values of a state that fits this pipeline. Raises ValueError, which says what differs.

    size: samples per micro-batch, which may differ from the state's.
    """
    if not isinstance(state, dict) or "format" not in state or "plain" not in state:
        raise ValueError("this is not a state of Pipeline.state_dict(); load a model's own state into pipe.model")
    if state["format"] != FORMAT:
        raise ValueError(
            f"the state has format {state['format']}, this version of pipeback reads {FORMAT}; "
            "load it with the version of pipeback that wrote it"
        )
    plain: dict[str, Any] = state["plain"]
    name, options = type(method).__name__, method.options()
    if (plain["method"], _trained(plain["method_options"])) != (name, _trained(options)):
        raise ValueError(
            f"the state belongs to method {plain['method']} {plain['method_options']}, the pipeline runs {name} "
            f"{options}; build the pipeline with the method of the state"
        )
    if len(state["stages"]) != len(stages):
        raise ValueError(
            f"the state has {counted(len(state['stages']), 'stage')}, the pipeline has {len(stages)}; build the "
            "model of the state"
        )
    if plain["weights"] != weights:
        raise ValueError(
            f"the state was trained with weights={plain['weights']!r}, the pipeline has {weights!r}; build the "
            f"pipeline with micro_batch_size=pipeback.MicroBatches({size!r}, weights={plain['weights']!r})"
        )
    if plain["replicas"] != replicas:
        raise ValueError(
            f"the state was trained with replicas={plain['replicas']}, the pipeline has {replicas}; each has "
            "micro-batches of its own in flight, so resume with as many"
        )
    if plain.get("sparsity", "None") != sparsity:
        raise ValueError(
            f"the state was trained with sparsity={plain['sparsity']}, the pipeline has {sparsity}; build the pipeline "
            "with that of the state"
        )
    counts = [len(groups) for groups in plain["groups"][str(plain["current"])]]
    if counts != [len(opt.param_groups) for opt in optimizers]:
        raise ValueError(
            "the optimizers of the state have other parameter groups than those here; build the pipeline with the "
            "optimizer function that was given then"
        )
    mine = [type(opt).__name__ for opt in optimizers]
    if plain["optimizer"] != mine:
        raise ValueError(
            f"the state belongs to optimizers {sorted(set(plain['optimizer']))}, the pipeline has {sorted(set(mine))}; "
            "build the pipeline with those of the state"
        )
    for place in plain["loops"]:
        check_progress(place, plain["arrived"], len(stages))
    for stage, tensors, mine in zip(stages, state["stages"], plain["stages"], strict=True):
        if tensors:  # other stages are empty if only own ones were read
            state_check.check(stage, _part(stage, tensors), mine)
    return plain


def _trained(options: Mapping[str, Any]) -> Plain:
    """The options of a method on which numbers depend; a chain has them with prefixes."""
    return {key: value for key, value in options.items() if key.rpartition("/")[2] not in PLACES}
