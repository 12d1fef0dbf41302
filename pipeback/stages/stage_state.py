"""The state of a stage as tensors by name and plain values, and back: one layout for every runtime and store.

Tensor names: weight/NAME, buffer/NAME, mask/V/N (the packed index of survivors), optimizer/N/KEY, counted/N,
method/KEY/N, grad/N, late/I/N, version/V/N, random, flight/I/{x,target,saved,used,loss,random}/N,
flight/I/buffer/NAME and message/KIND/I/N, where N counts the weights or the parts of a value, V the versions and I the
micro-batches. Everything else is JSON: numbers, strings, lists and dictionaries.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeback.stages import flight_state, split_backward
from pipeback.stages.module_settings import Settings
from pipeback.stages.optimizer_counters import restore, saved
from pipeback.stages.postponed import Postponed
from pipeback.stages.recomputed_functions import Afresh, as_it_was
from pipeback.stages.run_modules import untouched
from pipeback.stages.stage import Stage
from pipeback.stages.state_check import members, named, trained, types
from pipeback.stages.state_values import Plain, Tensors, load_value, put_all, save_value, to_home
from pipeback.stages.versions import Due
from pipeback.tensors import copies
from pipeback.tensors.checksum import checksum
from pipeback.tensors.layout import put


def save(
    stage: Stage, messages: dict[tuple[str, int, int], Any], number: Callable[[Any], int], *, copy: bool = True
) -> tuple[Tensors, Plain]:
    """Return everything a stage holds, as tensors by name and plain values.

    messages: those sent to this stage and not yet received. number: numbers the options of a flight. copy: whether to
    copy weights and state; otherwise the tensors in use are returned, which need not be in memory.
    """
    split_backward.finish(stage)  # no graph has to be saved of what has gone back to the input
    mine: Callable[[Tensor], Tensor] = copies.replica if copy else Tensor.detach
    tensors: Tensors = {}
    plain: Plain = {
        "version": stage.version,
        "count": stage.gradients.count,
        "optimizer": {},
        "method": {},
        "flights": {},
    }
    put_all(tensors, "weight", named(stage)["weight"], mine)
    put_all(tensors, "buffer", dict(stage.module.named_buffers()))
    if stage.home.sparse is not None:
        plain["masks"] = [since for since, _ in stage.home.sparse.changes]
        for since, packed in stage.home.sparse.changes:
            put_all(tensors, f"mask/{since}", {str(n): index for n, index in enumerate(packed) if index is not None})
    aliases: dict[int, str] = {}
    for n, w in enumerate(stage.weights):
        for key, value in stage.optimizer.state.get(w, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{n}/{key}"] = mine(value)
                aliases[id(value)] = f"optimizer/{n}/{key}"
            else:
                plain["optimizer"].setdefault(str(n), {})[key] = value
    plain["counted"], found = saved(stage.optimizer, stage.label)
    put_all(tensors, "counted", found)
    for key, value in stage.state.items():
        if isinstance(value, list):
            # what the method only reads of the optimizer (a velocity) is stored once, and found again by name
            plain["method"][key] = [
                None if x is None else aliases.get(id(x), f"method/{key}/{n}") for n, x in enumerate(value)
            ]
            for n, x in enumerate(value):
                if x is not None and id(x) not in aliases:
                    tensors[f"method/{key}/{n}"] = mine(x)
        else:
            plain["method"][key] = value
    sums = {str(n): g for n, g in enumerate(stage.grads()) if g is not None and stage.gradients.count}
    plain["grads"] = list(sums)
    put_all(tensors, "grad", sums, mine)
    plain["options"] = None if stage.options is None else number(stage.options)
    if late := stage.gradients.split.waiting:
        plain["late"] = [_save_late(mb, rest, tensors, number, mine) for mb, rest in sorted(late.items())]
    for version, weights in stage.versions.kept.items():
        put_all(tensors, f"version/{version}", {str(n): w for n, w in enumerate(weights)}, mine)
    plain["versions"] = sorted(stage.versions.kept)
    plain["due"] = _save_due(stage.versions.due, tensors, mine)
    plain["seed"] = stage.random.seed
    plain["trained"], plain["members"], plain["types"] = trained(stage), members(stage), types(stage)
    plain["afresh"] = isinstance(stage.call, Afresh)
    plain["device"] = None if stage.device is None else stage.device.type
    # needed to build a graph anew
    plain["clones_input"], plain["control_flow"] = stage.learnt.clones_input, stage.learnt.control_flow
    if stage.random.state is not None:
        tensors["random"] = stage.random.state.clone()
    plain["settings"] = None if stage.learnt.settings is None else stage.learnt.settings.values
    for mb, flight in stage.flights.items():
        plain["flights"][str(mb)] = flight_state.save(stage, mb, flight, tensors, number)
        if flight.owned is not None:
            put_all(tensors, f"flight/{mb}/used", {str(n): w for n, w in enumerate(flight.owned)}, mine)
    plain["messages"] = [
        [kind, mb, save_value(tensors, f"message/{kind}/{mb}", value)] for (kind, _, mb), value in messages.items()
    ]
    return tensors, plain


def _save_late(
    mb: int, rest: Postponed, tensors: Tensors, number: Callable[[Any], int], mine: Callable[[Tensor], Tensor]
) -> list[Any]:
    """The gradients of a micro-batch that wait for W: its number, which weights have one, options, count."""
    there = {str(n): g for n, g in enumerate(rest.found or ()) if g is not None}
    put_all(tensors, f"late/{mb}", there, mine)
    return [mb, list(there), number(rest.options), rest.number]


def _save_due(due: Due | None, tensors: Tensors, mine: Callable[[Tensor], Tensor]) -> list[int] | None:
    """What the coming update is handed: micro-batch, version, whether there are shifted weights."""
    if due is None:
        return None
    if due.owned is not None:
        put_all(tensors, f"flight/{due.mb}/used", {str(n): w for n, w in enumerate(due.owned)}, mine)
    return [due.mb, due.version, int(due.owned is not None)]


def load(stage: Stage, tensors: Mapping[str, Tensor], plain: Plain, options: dict[int, Any]) -> None:
    """Put a saved state into the stage, all but its micro-batches in flight. `check` must have passed."""
    with torch.no_grad():
        if stage.home.sparse is not None:
            there = [[tensors.get(f"mask/{since}/{n}") for n in range(len(stage.weights))] for since in plain["masks"]]
            stage.home.sparse.restore(
                stage, [(since, tuple(p)) for since, p in zip(plain["masks"], there, strict=True)]
            )
        for kind, mine in named(stage).items():
            for name, value in mine.items():
                put(value.data, tensors[f"{kind}/{name}"])
        stage.masters.round()
        stage.stand_at(plain["version"], None if plain["options"] is None else options[plain["options"]])
        state = stage.optimizer.state
        state.clear()
        for n, w in enumerate(stage.weights):
            prefix = f"optimizer/{n}/"
            entries = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
            # a step counter stays where the optimizer keeps it, on the CPU; the rest goes to the weight
            state_of = {k: v.clone() if v.dim() == 0 else v.to(w.device, copy=True) for k, v in entries.items()}
            state_of.update(plain["optimizer"].get(str(n), {}))
            if state_of:
                state[w] = state_of
        if "counted" in plain:
            found = {k.removeprefix("counted/"): v for k, v in tensors.items() if k.startswith("counted/")}
            newest = options[max(options)].groups[stage.index]
            restore(
                stage.optimizer, plain["counted"], found, stage.weights[0].device if stage.weights else None, newest
            )
        stage.put_state(
            {
                key: [_method_tensor(stage, name, tensors) for name in value] if isinstance(value, list) else value
                for key, value in plain["method"].items()
            }
        )
        names = [f"grad/{n}" if str(n) in plain["grads"] else None for n in range(len(stage.params))]
        sums = [None if name is None else to_home(stage, tensors[name]) for name in names]
        stage.put_sums(sums)
        stage.gradients.count_anew(plain["count"])
        numbers = range(len(stage.weights))
        kept = {v: [to_home(stage, tensors[f"version/{v}/{n}"]) for n in numbers] for v in plain["versions"]}
        stage.versions.put(kept)
        if due := plain.get("due"):  # earlier states have none
            owned = [to_home(stage, tensors[f"flight/{due[0]}/used/{n}"]) for n in numbers] if due[2] else None
            stage.versions.hand_over(Due(due[0], due[1], owned))
        else:
            stage.versions.hand_over(None)
        stage.random.go_to(_stream(stage, tensors["random"]) if "random" in tensors else None)
    stage.random.sow(plain["seed"])
    control_flow = plain.get("control_flow", False)  # earlier states have none
    # the rehearsal will find out which are alike
    stage.learn(clones_input=plain["clones_input"], control_flow=control_flow, alike=None)
    stage.call_by(as_it_was(stage, plain.get("afresh", False)))  # graphs in flight are built anew as they were


def _stream(stage: Stage, saved: Tensor) -> Tensor:
    """Return the saved random stream; one of another kind of generator becomes the seed of a new one."""
    generator = stage.generator
    if len(saved) == len(generator.get_state()):
        return saved.clone()
    warnings.warn(
        f"{stage.label}: its random numbers cannot go on as in the state, which was saved on another kind of device; "
        f"from here on it draws other ones on {generator.device.type}",
        stacklevel=2,
    )
    return torch.Generator(generator.device).manual_seed(checksum([saved])).get_state()


def load_flights(
    stage: Stage, tensors: Mapping[str, Tensor], plain: Plain, options: dict[int, Any]
) -> dict[tuple[str, int, int], Any]:
    """Put what is in flight into a stage that has its weights on its device; returns the waiting messages."""
    if stage.stack is not None:
        stage.stack.restart(stage)
    flights = sorted(((int(mb), p) for mb, p in plain["flights"].items()), key=lambda pair: pair[0])
    # made once, since they look at every attribute of every module
    around, now = untouched(stage), Settings.of(stage.module)
    since = flight_state.settings_of(plain.get("settings"), now)  # earlier states have none
    stage.learn(settings=now)
    stage.put_flights({mb: flight_state.load(stage, mb, p, tensors, options, around, now, since) for mb, p in flights})
    for mb, there, which, number in plain.get("late", ()):
        names = [f"late/{mb}/{n}" if str(n) in there else None for n in range(len(stage.params))]
        found = [None if name is None else to_home(stage, tensors[name]) for name in names]
        stage.gradients.split.wait(mb, Postponed(None, ((), ()), options[which], number, found))
    return {
        (kind, stage.index, mb): load_value(stage, tensors, f"message/{kind}/{mb}", shape)
        for kind, mb, shape in plain["messages"]
    }


def _method_tensor(stage: Stage, name: str | None, tensors: Mapping[str, Tensor]) -> Tensor | None:
    if name is None:
        return None
    if name.startswith("optimizer/"):
        _, n, key = name.split("/", 2)
        kept: Tensor = stage.optimizer.state[stage.weights[int(n)]][key]
        return kept
    return to_home(stage, tensors[name])
