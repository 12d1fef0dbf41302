"""The rehearsal: before the first forward, one micro-batch runs through every stage, and whatever can be checked in
advance is checked.

Buffers, weights and random state are put back; no gradient reaches an optimizer. Each stage remembers what was found
out: whether it draws random numbers, whether it changes its input in place, how many bytes a micro-batch keeps there,
and how long it takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.base import Method
from pipeback.private import listened
from pipeback.splitting.control_flow import noticed
from pipeback.splitting.module_restore import Home
from pipeback.stages import (
    compile_check,
    foreign_weights,
    judged_output,
    norm_check,
    own_memory,
    saved_graph,
    stale_weights_check,
    weight_writes,
)
from pipeback.stages.compile_check import Refused, untouched
from pipeback.stages.compiled import Compiled, faithful
from pipeback.stages.flight import Flight, Root, Value, begins, cut, for_loss, for_trial, grown, weighed
from pipeback.stages.reach import reached
from pipeback.stages.recomputed_functions import Afresh, looking
from pipeback.stages.stage import Stage
from pipeback.tensors.copies import equal, storages, tensors_in

_OTHER = "this micro-batch, which is unlike those before; nothing was trained on it"
_GOES_ON = ", and others may be pushed"


def rehearse(
    stages: Sequence[Stage],
    method: Method,
    delays: Sequence[int],
    x: Value,
    target: Any,
    *,
    warn: bool = False,
    weights: Mapping[int, str] | None = None,
    present: Callable[[Stage], AbstractContextManager[None]] = lambda stage: nullcontext(),
) -> tuple[list[float], Value]:
    """Check these stages on micro-batch (x, target); return the seconds of F + B per stage, and the last one's output.

    warn: warn of functions of the weights in a graph instead of refusing them. weights: the names of those that
    the model trains, by identity. present: a context within which a stage has its weights. Raises TypeError or
    ValueError, which name the stage and the cure; then nothing has changed.
    """
    seconds: list[float] = []
    kinds: list[Any] = []
    loss: float | None = None  # seconds of the loss behind a stage that is like others; None: not known
    kept: set[int] = set()  # memory that the stage before keeps until its own backward
    # copies, since a view of a whole push would count with the memory of all of it
    value, target = _copied(cut(x)), target.clone() if isinstance(target, Tensor) else target
    for stage in stages:
        with present(stage):
            if (
                stage.device is None
            ):  # a stage without weights works where its input comes from; the first, where it goes
                there = None if stage.index else next((s.device for s in stages if s.device is not None), None)
                stage.work_on(there or (value[0] if isinstance(value, tuple) else value).device)
            stashes = stage.keeping is None or stage.keeping.stashes
            with untouched(stage) as homes:
                with norm_check.watching(stage), stage.calling(stage.module), noticed() as calls:
                    weight_writes.check(stage, method, delays, partial(_learn, stage, value, target))
                stage.learn(changing=_changing(homes), control_flow=bool(calls), lends=False)
                matters = stashes and stage.weights and faithful(method, delays[stage.index])
                if isinstance(stage.call, Compiled) and matters:
                    stage.call.check = partial(compile_check.check, stage, method, warn)
                leaves, output = _first_run(stage, value, target, weights or {})
                mine = _learn_bytes(stage, value, target, leaves, output, kept)
                if stale_weights_check.guarded(stage, method, delays):
                    stale_weights_check.refuse(stage, value, target, method, warn)
                    if isinstance(stage.call, Afresh):  # whose graph keeps less
                        leaves, output = _run(stage, value, target)
                        mine = _learn_bytes(stage, value, target, leaves, output, kept)
                kept, output = mine, cut(output)  # without its graph, which refers to weights that may be let go
                kind = str(stage.module), [part.shape for part in stage.enter(value)[0]]
                alike = [t for t, (*other, _) in zip(seconds, kinds, strict=True) if other == [*kind]]
                seconds.append(_fastest(partial(measure, stage, value, target), min(alike, default=math.inf)))
                if stage.judges:
                    loss = _loss_alone(stage, value, target) if alike else None
                kinds.append((*kind, stage.judges and loss is None))
        value = output
    devices = {stage.device for stage in stages}
    for stage in stages:
        stage.learn(mixed=len(devices) > 1 or stage is stages[0])  # a later batch may lie anywhere
    return _alike(seconds, kinds, loss), value


def rehearse_shape(stages: Sequence[Stage], x: Value, target: Any, *, alone: bool = True) -> Value:
    """Do the cheap checks, of outputs and normalisations, for a micro-batch smaller than any before.

    alone: whether no other rank takes part, which would not know that this one goes on after an error.
    """
    value = cut(x)
    for stage in stages:
        with untouched(stage), norm_check.watching(stage), stage.calling(stage.module), noticed() as calls:
            _, given = stage.enter(value)
            # with a graph, since the module may differentiate something itself
            given = _copied(given)
            value = cut(_apart(stage, _checked(stage, _guarded(stage, given, target, _other(alone)), given, target)))
        stage.learn(control_flow=stage.learnt.control_flow or bool(calls))
    return value


def rehearse_form(
    stages: Sequence[Stage], method: Method, delays: Sequence[int], x: Value, target: Any, *, warn: bool = False,
    alone: bool = True,
) -> Value:  # fmt: skip
    """Check which functions of the weights a graph saves, for a micro-batch of a form that none has had before.

    alone: as for `rehearse_shape`.
    """
    value = cut(x)
    for stage in stages:
        if stale_weights_check.guarded(stage, method, delays) and not isinstance(stage.call, Compiled):
            stale_weights_check.refuse(stage, value, target, method, warn)
        with untouched(stage), stage.calling(stage.module), noticed() as calls:
            value = cut(_apart(stage, _guarded(stage, _copied(stage.enter(value)[1]), target, _other(alone))))
        stage.learn(control_flow=stage.learnt.control_flow or bool(calls))
    return value


def _other(alone: bool) -> str:
    return _OTHER + (_GOES_ON if alone else "")


def _learn(stage: Stage, value: Value, target: Any) -> None:
    """Find out whether module or loss draw random numbers, and whether the module changes its input in place."""
    before = stage.generator.get_state()
    copies = _copied(stage.enter(value)[1])
    try:
        with torch.no_grad():
            _checked(stage, stage.run(copies, for_trial(stage, target)), copies, target)
    except Exception:  # a loss may differentiate something itself, and whatever else fails does so once more
        stage.generator.set_state(before)
        copies = _copied(stage.enter(value)[1])
        _checked(stage, _guarded(stage, copies, target), copies, target)
    draws = not torch.equal(before, stage.generator.get_state())
    stage.generator.set_state(before)
    if draws:
        stage.random.begin(stage.generator)
    parts = copies if isinstance(copies, tuple) else (copies,)
    stage.learn(clones_input=any(part._version for part in parts))


def _changing(homes: Sequence[Home]) -> tuple[tuple[dict[str, Tensor | None], str], ...]:
    """The buffers that a forward has changed, and those beside them, which it may change another time."""
    changed = [owner for owner, key, b, then in homes if owner.get(key) is not b or not equal(b, then)]
    return tuple((owner, key) for owner, key, _, _ in homes if any(owner is other for other in changed))


def _first_run(stage: Stage, value: Value, target: Any, others: Mapping[int, str]) -> tuple[tuple[Tensor, ...], Value]:
    """Run F, and check what it gives; return its leaves and its output."""
    leaves, output = _run(stage, value, target)
    roots = grown(output)
    foreign_weights.refuse(stage, roots, others)
    if isinstance(output, tuple):  # a loss may leave out some of these
        stage.learn(reach=reached(output, leaves, stage.params))
    if stage.last and not roots and (stage.weights or any(x.requires_grad for x in leaves)):
        raise ValueError(
            f"{stage.label}: the loss does not depend on the output (it needs no gradient); "
            "compute it from the output with differentiable operations"
        )
    return leaves, output


def _run(stage: Stage, value: Value, target: Any) -> tuple[tuple[Tensor, ...], Value]:
    leaves, given = stage.enter(value)
    return leaves, _apart(stage, _checked(stage, _guarded(stage, given, target), given, target))


def _apart(stage: Stage, output: Value) -> Value:
    """Find out whether the output lies in the stage's weights; return it with copies of the parts that do."""
    if stage.judges or not own_memory.borrowed(stage.module, stage.learnt.changing, output):
        return output
    stage.learn(lends=True)
    return own_memory.apart(stage.module, stage.learnt.changing, output)


def _learn_bytes(
    stage: Stage, value: Value, target: Any, leaves: Sequence[Tensor], output: Value, handed: Collection[int]
) -> set[int]:
    """Learn the bytes that a micro-batch holds; `handed`: the memory that the stage before keeps.

    Returns which memory under the output this stage keeps until its backward.
    """
    weights = storages(list(stage.module.parameters()))
    known = {*weights}
    with looking(stage, known):
        graph, entered = saved_graph.held(grown(output), leaves, known), saved_graph.held([], leaves, weights)
    mine = sum(size for memory, size in entered.items() if memory in handed)
    stage.learn(activation_bytes=sum(graph.values()), handed_bytes=mine)
    # at once, as memory that is freed may get the same identity
    kept = storages(tensors_in(output)) & {*(graph if stage.keeping is None else entered), *weights}
    if stage.keeping is not None:
        stage.keeping.learn(stage, value, target)
        stage.learn(**stage.keeping.measure(stage, *_trial(stage, value, target)))
    return kept


def _trial(stage: Stage, value: Value, target: Any) -> tuple[Flight, Value]:
    """Run F as in training; return the flight and what B would differentiate. The random stream is put back."""
    assert stage.keeping is not None
    with stage.random.at(stage.random.state):
        leaves, given = stage.enter(value)
        mine = for_trial(stage, target) if stage.judges else None
        flight = Flight(leaves, None, mine, stage.version, type(value) is tuple)
        stage.keeping.forward(stage, flight, given)
        return flight, flight.output if flight.again is None else flight.again(stage, flight)


def _guarded(stage: Stage, given: Value, target: Any, which: str = "the first micro-batch") -> Value:
    try:
        return stage.run(given, for_trial(stage, target))
    except Refused:
        raise
    except Exception as error:
        what, cured = _failed(stage, given, target, error)
        raise ValueError(f"{stage.label}: the {what} failed on {which}: {error}{cured}") from error


def _failed(stage: Stage, given: Value, target: Any, error: Exception) -> tuple[str, str]:
    """Whether the forward or the loss has failed, and a cure."""
    if stage.judges:
        if "not have been used in the graph" in str(error):
            return "loss", "; if it differentiates by the input of an earlier stage, such as the model's, give stages=1"
        with suppress(Exception), torch.no_grad():
            output = judged_output.structured(stage.module, given, stage.call(given))
            return "loss", judged_output.cure(output, for_loss(None, target))
    return "forward", ""


def _handed_on(stage: Stage, given: Value, target: Any) -> Any:
    """What the model returns, if that is all that the loss returns; otherwise None."""
    assert stage.loss is not None
    with suppress(Exception), torch.no_grad():
        output = judged_output.structured(stage.module, given, stage.call(given))
        if stage.loss(output, for_loss(stage.device, target)) is output:
            return output
    return None


def _checked(stage: Stage, output: Any, given: Value, target: Any) -> Value:
    """Raise unless the output is a tensor or a tuple of tensors or, on the last stage, a loss."""
    if stage.judges:
        if not isinstance(output, Tensor) or output.dim() != 0 or not output.is_floating_point():
            own = None if output is None or isinstance(output, Tensor) else _handed_on(stage, given, target)
            cured = judged_output.loss_cure(output, stage.loss) if own is None else judged_output.cure(own)
            raise ValueError(
                "loss must return a 0-d floating-point tensor, the mean over the micro-batch, but returned "
                f"{judged_output.shown(output)}{cured}"
            )
        return output
    parts = output if isinstance(output, tuple) else (output,)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        inner = f" of {', '.join(type(part).__name__ for part in parts)}" if isinstance(output, tuple) else ""
        raise TypeError(
            f"{stage.label}: the output must be a tensor or a tuple of tensors, not {type(output).__name__}{inner}: "
            "return what the next stage needs as a tuple, or have the model traced, which lets any structure cross: "
            'Pipeline(example=...), PipelineStrategy(stages="layer")'
        )
    return output


def _fastest(measured: Callable[[], float], expected: float = math.inf) -> float:
    """Return the seconds of the fastest of a few runs; they are repeated for a while until one is undisturbed.

    expected: the seconds of a stage that looks alike; a stage that seems much slower gets more time to show it.
    """
    begun = time.perf_counter()
    fastest, left = math.inf, 16
    while left:
        begin = time.thread_time()
        seconds = measured()
        fastest, left = min(fastest, seconds), left - 1
        if left < 13 and seconds < 1.1 * (time.thread_time() - begin):
            break
        if time.perf_counter() - begun > (0.1 if fastest < 1.5 * expected else 0.5):
            break
    return fastest


def _alike(seconds: Sequence[float], kinds: Sequence[Any], loss: float | None) -> list[float]:
    """Give stages of one kind the same time. A busy machine is slower by half for a while, but rarely four times.

    loss: the seconds that the last stage takes for the loss, if it is like others but for that.
    """
    least: list[float] = []
    others = seconds if loss is None else seconds[:-1]
    for n, (own, kind) in enumerate(zip(seconds, kinds, strict=True)):
        fastest = min((t for t, other in zip(others, kinds) if other == kind), default=own)
        if loss is not None and n == len(others):
            fastest += min(loss, max(0.0, own - fastest))  # each of them is too much on a busy machine
        least.append(fastest if own < 4 * fastest else own)
    return least


def _loss_alone(stage: Stage, value: Value, target: Any) -> float | None:
    """The seconds of F and B of the loss without the module; None if it cannot be computed apart."""
    assert stage.loss is not None
    given, loss = stage.enter(value)[1], stage.loss
    with suppress(Exception):
        with torch.no_grad():
            output = cut(stage.call(given))

        def judged() -> float:
            begin = time.perf_counter()
            leaf = output.detach().requires_grad_()
            mine = for_loss(stage.device, for_trial(stage, target))
            known = loss(judged_output.structured(stage.module, given, leaf), mine)
            torch.autograd.grad(known, leaf)
            return time.perf_counter() - begin

        return _fastest(judged)
    return None


def measure(stage: Stage, value: Value, target: Any) -> float:
    """The seconds of one F and B, after a first run; for a stage that has its weights and is `untouched`."""
    begin = time.perf_counter()
    if stage.keeping is None:
        leaves, given = stage.enter(value)
        roots = grown(_guarded(stage, given, target))
    else:
        flight, output = _trial(stage, value, target)
        leaves, roots = flight.leaves, grown(output)
    starts = [x for x in leaves if x.requires_grad]
    inputs = starts + [p for p in stage.params if p.requires_grad]  # some may have been frozen since
    if roots and inputs:
        try:
            seeds = [_seed(y) for y in roots]
            grads = torch.autograd.grad([begins(y) for y in roots], inputs, seeds, allow_unused=True)
        except Exception as error:
            # of torch, on gradients that nobody accumulates
            forbidden = isinstance(error, RuntimeError) and "autograd.grad()" in str(error) and listened(stage.module)
            cure = (
                "; push once before you enter FlopCounterMode or anything else with hooks on gradients of modules, and "
                "without workers="
            )
            told = f"{error}".rstrip(".") + cure if forbidden else error
            raise ValueError(f"{stage.label}: the backward failed on the first micro-batch: {told}") from error
        # of others little is known: a batch of one sample lies in memory in every order
        alike = all(x.dim() <= 2 for x in leaves) and all(map(_alike_in_memory, starts, grads))
        stage.learn(alike=tuple(x.shape for x in leaves) if alike else None)
    if stage.device is not None and stage.device.type != "cpu":
        torch.accelerator.synchronize(stage.device)
    return time.perf_counter() - begin


def _seed(output: Tensor | Root) -> Tensor:
    """A gradient for this output."""
    if isinstance(output, Root):
        return weighed(output, 1)
    return torch.ones_like(output) if output.layout is torch.strided else output.detach()


def _alike_in_memory(x: Tensor, gradient: Tensor | None) -> bool:
    """Whether a gradient has the strides of its tensor, where they count."""
    if x.layout is not torch.strided:
        return False
    strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (x, gradient) if t is not None]
    return strides[0] == strides[-1]


def _copied(value: Value) -> Value:
    return tuple(part.clone() for part in value) if isinstance(value, tuple) else value.clone()
