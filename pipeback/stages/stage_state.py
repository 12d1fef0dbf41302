"""The state of a stage as tensors by name and plain values, and back: one layout for every runtime and store.

Tensor names: weight/NAME, buffer/NAME, mask/V/N (the packed index of survivors), optimizer/N/KEY, counted/N,
method/KEY/N, grad/N, late/I/N, version/V/N, random, flight/I/{x,target,saved,used,loss,random}/N,
flight/I/buffer/NAME and message/KIND/I/N, where N counts the weights or the parts of a value, V the versions and I the
micro-batches. Everything else is JSON: numbers, strings, lists and dictionaries.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor

from pipeback.splitting.module_restore import Untouched, untouched
from pipeback.stages import saved_graph, split_backward
from pipeback.stages.flight import Flight, grown
from pipeback.stages.module_settings import Settings
from pipeback.stages.optimizer_counters import restore, saved
from pipeback.stages.postponed import Postponed
from pipeback.stages.recompute import Recomputation, versions
from pipeback.stages.recomputed_functions import Afresh, as_it_was
from pipeback.stages.stage import Stage
from pipeback.stages.state_check import Corrupt, named, trained
from pipeback.stages.versions import Due
from pipeback.tensors import accelerators, copies
from pipeback.tensors.batches import Structure
from pipeback.tensors.checksum import checksum
from pipeback.tensors.layout import put
from pipeback.tensors.written_forms import read, written

Tensors = dict[str, Tensor]
Plain = dict[str, Any]


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
    _put(tensors, "weight", named(stage)["weight"], mine)
    _put(tensors, "buffer", dict(stage.module.named_buffers()))
    if stage.home.sparse is not None:
        plain["masks"] = [since for since, _ in stage.home.sparse.changes]
        for since, packed in stage.home.sparse.changes:
            _put(tensors, f"mask/{since}", {str(n): index for n, index in enumerate(packed) if index is not None})
    aliases: dict[int, str] = {}
    for n, w in enumerate(stage.weights):
        for key, value in stage.optimizer.state.get(w, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{n}/{key}"] = mine(value)
                aliases[id(value)] = f"optimizer/{n}/{key}"
            else:
                plain["optimizer"].setdefault(str(n), {})[key] = value
    plain["counted"], found = saved(stage.optimizer, stage.label)
    _put(tensors, "counted", found)
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
    _put(tensors, "grad", sums, mine)
    plain["options"] = None if stage.options is None else number(stage.options)
    if late := stage.gradients.split.waiting:
        plain["late"] = [_save_late(mb, rest, tensors, number, mine) for mb, rest in sorted(late.items())]
    for version, weights in stage.versions.kept.items():
        _put(tensors, f"version/{version}", {str(n): w for n, w in enumerate(weights)}, mine)
    plain["versions"] = sorted(stage.versions.kept)
    plain["due"] = _save_due(stage.versions.due, tensors, mine)
    plain["seed"] = stage.random.seed
    plain["trained"] = trained(stage)
    plain["afresh"] = isinstance(stage.call, Afresh)
    plain["device"] = None if stage.device is None else stage.device.type
    plain["clones_input"] = stage.learnt.clones_input  # needed to build a graph anew
    if stage.random.state is not None:
        tensors["random"] = stage.random.state.clone()
    for mb, flight in stage.flights.items():
        plain["flights"][str(mb)] = _save_flight(stage, mb, flight, tensors, number)
        if flight.owned is not None:
            _put(tensors, f"flight/{mb}/used", {str(n): w for n, w in enumerate(flight.owned)}, mine)
    plain["messages"] = [
        [kind, mb, _save_value(tensors, f"message/{kind}/{mb}", value)] for (kind, _, mb), value in messages.items()
    ]
    return tensors, plain


def _save_late(
    mb: int, rest: Postponed, tensors: Tensors, number: Callable[[Any], int], mine: Callable[[Tensor], Tensor]
) -> list[Any]:
    """The gradients of a micro-batch that wait for W: its number, which weights have one, options, count."""
    there = {str(n): g for n, g in enumerate(rest.found or ()) if g is not None}
    _put(tensors, f"late/{mb}", there, mine)
    return [mb, list(there), number(rest.options), rest.number]


def _save_due(due: Due | None, tensors: Tensors, mine: Callable[[Tensor], Tensor]) -> list[int] | None:
    """What the coming update is handed: micro-batch, version, whether there are shifted weights."""
    if due is None:
        return None
    if due.owned is not None:
        _put(tensors, f"flight/{due.mb}/used", {str(n): w for n, w in enumerate(due.owned)}, mine)
    return [due.mb, due.version, int(due.owned is not None)]


def _save_flight(stage: Stage, mb: int, flight: Flight, tensors: Tensors, number: Callable[[Any], int]) -> Plain:
    names: list[str] = []
    again = row = x = None
    if flight.row is not None:
        row = flight.row.written()
        _put(
            tensors,
            f"flight/{mb}/row",
            {str(n): value for n, value in enumerate(flight.row.tensors(mb))},
            Tensor.detach,
        )
    elif flight.again is None:
        where = f"{stage.label}, micro-batch {mb}"
        values, names = saved_graph.keep(grown(flight.output), _known(stage, flight.leaves, flight.target), where)
        _put(tensors, f"flight/{mb}/saved", {str(n): value for n, value in enumerate(values)})
    else:
        again = _save_again(tensors, f"flight/{mb}", flight)
    if flight.row is None:
        x = flight.leaves if flight.tuple_input else flight.leaves[0]
    return {
        "row": row,
        "x": _save_value(tensors, f"flight/{mb}/x", x),
        "target": _save_value(tensors, f"flight/{mb}/target", flight.target),
        "saved": names,
        "again": again,
        "autocast": accelerators.written(flight.autocast),
        "version": flight.version,
        "owned": flight.owned is not None,
        "entry": flight.entry,
        "options": number(flight.options),
    }


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
        sums = [None if name is None else _home(stage, tensors[name]) for name in names]
        stage.put_sums(sums)
        stage.gradients.count_anew(plain["count"])
        numbers = range(len(stage.weights))
        stage.versions.put({v: [_home(stage, tensors[f"version/{v}/{n}"]) for n in numbers] for v in plain["versions"]})
        if due := plain.get("due"):  # earlier states have none
            owned = [_home(stage, tensors[f"flight/{due[0]}/used/{n}"]) for n in numbers] if due[2] else None
            stage.versions.hand_over(Due(due[0], due[1], owned))
        else:
            stage.versions.hand_over(None)
        stage.random.go_to(_stream(stage, tensors["random"]) if "random" in tensors else None)
    stage.random.sow(plain["seed"])
    stage.learn(clones_input=plain["clones_input"], alike=None)  # the rehearsal will find out which are alike
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
    around = untouched(stage.module)  # made once, since it looks at every attribute of every module
    stage.put_flights({mb: _load_flight(stage, mb, p, tensors, options, around) for mb, p in flights})
    for mb, there, which, number in plain.get("late", ()):
        names = [f"late/{mb}/{n}" if str(n) in there else None for n in range(len(stage.params))]
        found = [None if name is None else _home(stage, tensors[name]) for name in names]
        stage.gradients.split.wait(mb, Postponed(None, ((), ()), options[which], number, found))
    return {
        (kind, stage.index, mb): _load_value(stage, tensors, f"message/{kind}/{mb}", shape)
        for kind, mb, shape in plain["messages"]
    }


def _load_flight(
    stage: Stage, mb: int, plain: Plain, tensors: Mapping[str, Tensor], options: dict[int, Any], around: Untouched
) -> Flight:
    if plain.get("row") is not None:
        return _load_row(stage, mb, plain, tensors, options)
    x = _load_value(stage, tensors, f"flight/{mb}/x", plain["x"])
    target = _load_value(stage, tensors, f"flight/{mb}/target", plain["target"])
    # a micro-batch in flight goes on as it began, whatever this pipeline does with later ones
    again = plain.get("again")
    # in earlier states only what is recomputed has it
    autocast = accelerators.read((plain if "autocast" in plain else again or {}).get("autocast", ()))
    if again is None:
        with accelerators.under(autocast):
            leaves, output, handles = saved_graph.rerun(stage, x, target, around)
        prefix, away = f"flight/{mb}/saved/", stage.keeping is not None and stage.keeping.away
        where, device = f"{stage.label}, micro-batch {mb}", torch.device("cpu") if away else stage.device
        values = [copies.replica(value, device) for value in _numbered(tensors, prefix)]
        known = _known(stage, leaves, target)
        saved_graph.put_back(grown(output), known, values, plain["saved"], where, stage.device, handles)
        flight = Flight(leaves, output, target, plain["version"], isinstance(x, tuple))
    else:
        flight = Flight(stage.enter(x)[0], None, target, plain["version"], isinstance(x, tuple))
        _load_again(stage, tensors, f"flight/{mb}", again, flight)
    flight.autocast = autocast
    if stage.keeping is not None:
        stage.keeping.adopt(flight)
    if plain["owned"]:
        used = [_home(stage, tensors[f"flight/{mb}/used/{n}"]) for n in range(len(stage.weights))]
        stage.versions.own(flight, used)
    stage.listen(flight)
    flight.entry, flight.options = plain["entry"], options[plain["options"]]
    return flight


def _numbered(tensors: Mapping[str, Tensor], prefix: str) -> list[Tensor]:
    """The tensors of a list, found by number: looking at all names would take quadratic time."""
    return [tensors[name] for name in takewhile(tensors.__contains__, (f"{prefix}{n}" for n in count()))]


def _load_row(stage: Stage, mb: int, plain: Plain, tensors: Mapping[str, Tensor], options: dict[int, Any]) -> Flight:
    assert stage.stack is not None  # it was checked before
    flight = Flight((), None, None, plain["version"], False)
    prefix = f"flight/{mb}/row/"
    values = _numbered(tensors, prefix)
    flight.row = stage.stack.restore(stage, mb, plain["row"], values)
    if plain["owned"]:
        used = [_home(stage, tensors[f"flight/{mb}/used/{n}"]) for n in range(len(stage.weights))]
        stage.versions.own(flight, used)
    flight.entry, flight.options = plain["entry"], options[plain["options"]]
    return flight


def _save_again(tensors: Tensors, prefix: str, flight: Flight) -> Plain:
    again = flight.again
    assert again is not None
    _put(tensors, f"{prefix}/buffer", again.buffers)
    return {
        "loss": _save_value(tensors, f"{prefix}/loss", flight.output),
        "random": _save_value(tensors, f"{prefix}/random", again.stream),
        "buffers": list(again.buffers),
        "modes": [int(mode) for mode in again.modes],
        "numbers": again.numbers.values,
    }


def _load_again(stage: Stage, tensors: Mapping[str, Tensor], prefix: str, plain: Plain, flight: Flight) -> None:
    if len(plain["modes"]) != sum(1 for _ in stage.module.modules()):
        raise Corrupt(
            f"{stage.label}: a micro-batch that was saved with activations='recompute' has to be recomputed, but "
            f"the stage had {len(plain['modes'])} modules then; build the same model"
        )
    numbers = Settings(stage.module.modules())
    if len(plain.get("numbers", ())) == len(numbers.values):  # earlier states have none
        numbers = numbers.with_values(plain["numbers"])
    flight.output = _load_value(stage, tensors, f"{prefix}/loss", plain["loss"])
    flight.again = Recomputation(
        None if plain["random"] != "tensor" else tensors[f"{prefix}/random/0"].to("cpu", copy=True),
        {name: _to(stage, tensors[f"{prefix}/buffer/{name}"]) for name in plain["buffers"]},
        tuple(map(bool, plain["modes"])),
        numbers,
        versions(flight),
    )


def _put(
    tensors: Tensors, prefix: str, values: dict[str, Tensor], taken: Callable[[Tensor], Tensor] = copies.replica
) -> None:
    tensors.update({f"{prefix}/{name}": taken(value) for name, value in values.items()})


def _to(stage: Stage, tensor: Tensor) -> Tensor:
    return copies.replica(tensor, stage.device)


def _home(stage: Stage, tensor: Tensor) -> Tensor:
    """A copy of the tensor where the stage's weights live."""
    return copies.replica(tensor, stage.weights[0].device)


def _method_tensor(stage: Stage, name: str | None, tensors: Mapping[str, Tensor]) -> Tensor | None:
    if name is None:
        return None
    if name.startswith("optimizer/"):
        _, n, key = name.split("/", 2)
        kept: Tensor = stage.optimizer.state[stage.weights[int(n)]][key]
        return kept
    return _home(stage, tensors[name])


def _known(stage: Stage, leaves: tuple[Tensor, ...], target: Any) -> set[int]:
    """Memory that a graph may refer to without it being stored: weights, inputs and targets."""
    known = copies.storages([*_memory(stage), *leaves, *copies.tensors_in(target)])
    return stage.call.look(known) if isinstance(stage.call, Afresh) else known


def _memory(stage: Stage) -> list[Tensor]:
    """Tensors whose memory the graphs in flight refer to: the weights, and their place on the device."""
    slot = stage.home.slot
    return [*stage.module.parameters(), *([] if slot is None else [slot.flat.memory])]


def _save_value(tensors: Tensors, prefix: str, value: Any) -> Any:
    """Store a tensor or a tuple of tensors and Nones; returns its shape as JSON."""
    if isinstance(value, Tensor):
        tensors[f"{prefix}/0"] = copies.replica(value)
        return "tensor"
    if isinstance(value, tuple):
        for n, part in enumerate(value):
            if isinstance(part, Tensor):
                tensors[f"{prefix}/{n}"] = copies.replica(part)
        return ["tensor" if isinstance(part, Tensor) else _json(part, prefix) for part in value]
    return _json(value, prefix)


def _json(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return {"value": value}
    if isinstance(value, Structure):
        return written(value.form)
    raise TypeError(f"{where}: a {type(value).__name__} cannot be saved; targets in flight must be tensors or numbers")


def _load_value(stage: Stage, tensors: Mapping[str, Tensor], prefix: str, shape: Any) -> Any:
    def part(n: int, kind: Any) -> Any:
        if kind == "tensor":
            return _to(stage, tensors[f"{prefix}/{n}"])
        return Structure(read(kind)) if "structure" in kind else kind["value"]

    return tuple(part(n, kind) for n, kind in enumerate(shape)) if isinstance(shape, list) else part(0, shape)
