"""The state of a micro-batch in flight at one stage: what its forward has left there for its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor

from pipeback.splitting.module_restore import Untouched
from pipeback.stages import saved_graph
from pipeback.stages.flight import Flight, grown
from pipeback.stages.module_settings import Settings
from pipeback.stages.recompute import Recomputation, own_generators, versions
from pipeback.stages.recomputed_functions import looking
from pipeback.stages.stage import Stage
from pipeback.stages.state_check import Corrupt
from pipeback.stages.state_values import Plain, Tensors, load_value, put_all, save_value, to_device, to_home
from pipeback.stages.trained_weights import frozen as frozen_in
from pipeback.stages.trained_weights import with_frozen
from pipeback.tensors import accelerators, copies


def save(stage: Stage, mb: int, flight: Flight, tensors: Tensors, number: Callable[[Any], int]) -> Plain:
    names: list[str] = []
    again = row = x = None
    if flight.row is not None:
        row = flight.row.written()
        put_all(
            tensors,
            f"flight/{mb}/row",
            {str(n): value for n, value in enumerate(flight.row.tensors(mb))},
            Tensor.detach,
        )
    elif flight.again is None:
        where = f"{stage.label}, micro-batch {mb}"
        known = _known(stage, flight.leaves, flight.target)
        with looking(stage, known):
            values, names = saved_graph.keep(grown(flight.output), known, where)
        put_all(tensors, f"flight/{mb}/saved", {str(n): value for n, value in enumerate(values)})
    else:
        again = _save_again(stage, tensors, f"flight/{mb}", flight)
    if flight.row is None:
        x = flight.leaves if flight.tuple_input else flight.leaves[0]
    return {
        "row": row,
        "x": save_value(tensors, f"flight/{mb}/x", x),
        "target": save_value(tensors, f"flight/{mb}/target", flight.target),
        "saved": names,
        "again": again,
        "autocast": accelerators.written(flight.autocast),
        "version": flight.version,
        "owned": flight.owned is not None,
        "entry": flight.entry,
        "options": number(flight.options),
        "settings": None if flight.settings is None else flight.settings.values,
        "frozen": list(stage.learnt.frozen if flight.frozen is None else flight.frozen),
    }


def load(
    stage: Stage,
    mb: int,
    plain: Plain,
    tensors: Mapping[str, Tensor],
    options: dict[int, Any],
    around: Untouched,
    now: Settings,
    since: Settings | None,
) -> Flight:
    """Build a micro-batch in flight anew.

    around: of its modules, see `saved_graph.rerun`. now: how its modules are set. since: how they were set when the
    state was saved, if otherwise.
    """
    if plain.get("row") is not None:
        return _load_row(stage, mb, plain, tensors, options)
    x = load_value(stage, tensors, f"flight/{mb}/x", plain["x"])
    target = load_value(stage, tensors, f"flight/{mb}/target", plain["target"])
    # a micro-batch in flight goes on as it began, whatever this pipeline does with later ones
    again = plain.get("again")
    # in earlier states only what is recomputed has it
    autocast = accelerators.read((plain if "autocast" in plain else again or {}).get("autocast", ()))
    settings = settings_of(plain["settings"], now) if plain.get("settings") else since
    frozen = plain.get("frozen", [n for _, n in frozen_in([stage])])  # earlier states have none
    if again is None:
        as_set = nullcontext() if settings is None else settings.restored()
        with accelerators.under(autocast), as_set, with_frozen(stage.params, frozen):
            leaves, output, handles = saved_graph.rerun(stage, x, target, around)
        prefix, away = f"flight/{mb}/saved/", stage.keeping is not None and stage.keeping.away
        where, device = f"{stage.label}, micro-batch {mb}", torch.device("cpu") if away else stage.device
        values = [copies.replica(value, device) for value in _numbered(tensors, prefix)]
        known = _known(stage, leaves, target)
        with looking(stage, known):
            saved_graph.put_back(grown(output), known, values, plain["saved"], where, stage.device, handles)
        flight = Flight(leaves, output, target, plain["version"], isinstance(x, tuple))
    else:
        flight = Flight(stage.enter(x)[0], None, target, plain["version"], isinstance(x, tuple))
        _load_again(stage, tensors, f"flight/{mb}", again, flight, now)
    flight.autocast, flight.settings = autocast, settings
    flight.frozen = None if (*frozen,) == stage.learnt.frozen else frozen
    if stage.keeping is not None:
        stage.keeping.adopt(flight)
    if plain["owned"]:
        used = [to_home(stage, tensors[f"flight/{mb}/used/{n}"]) for n in range(len(stage.weights))]
        stage.versions.own(flight, used)
    stage.listen(flight)
    flight.entry, flight.options = plain["entry"], options[plain["options"]]
    return flight


def settings_of(saved: list[Any] | None, now: Settings) -> Settings | None:
    """How the modules were set when micro-batches in flight did F; None if they are set so now, or nothing is known."""
    if saved is None or len(saved) != len(now.values) or saved == now.values:
        return None
    return now.with_values(saved)


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
        used = [to_home(stage, tensors[f"flight/{mb}/used/{n}"]) for n in range(len(stage.weights))]
        stage.versions.own(flight, used)
    flight.entry, flight.options = plain["entry"], options[plain["options"]]
    return flight


def _save_again(stage: Stage, tensors: Tensors, prefix: str, flight: Flight) -> Plain:
    again = flight.again
    assert again is not None
    modules = sum(1 for _ in stage.module.modules())
    buffers = {name: buffer for name, buffer in again.buffers.items() if buffer is not None}
    put_all(tensors, f"{prefix}/buffer", buffers)
    put_all(tensors, f"{prefix}/drawn", {str(n): state for n, state in enumerate(again.drawn)})
    return {
        "loss": save_value(tensors, f"{prefix}/loss", flight.output),
        "random": save_value(tensors, f"{prefix}/random", again.stream),
        "buffers": list(buffers),
        "absent": [name for name in again.buffers if name not in buffers],
        "modes": [int(mode) for mode in again.settings.values[:modules]],
        "numbers": again.settings.values[modules:],
    }


def _load_again(
    stage: Stage, tensors: Mapping[str, Tensor], prefix: str, plain: Plain, flight: Flight, now: Settings
) -> None:
    if len(plain["modes"]) != sum(1 for _ in stage.module.modules()):
        raise Corrupt(
            f"{stage.label}: a micro-batch that was saved with activations='recompute' has to be recomputed, but "
            f"the stage had {len(plain['modes'])} modules then; build the same model"
        )
    modes, numbers = list(map(bool, plain["modes"])), now.values[len(plain["modes"]) :]
    if len(plain.get("numbers", ())) == len(numbers):  # earlier states have none
        numbers = plain["numbers"]
    flight.output = load_value(stage, tensors, f"{prefix}/loss", plain["loss"])
    drawn = [state.to("cpu", copy=True) for state in _numbered(tensors, f"{prefix}/drawn/")]  # earlier states have none
    own = own_generators(stage)
    flight.again = Recomputation(
        None if plain["random"] != "tensor" else tensors[f"{prefix}/random/0"].to("cpu", copy=True),
        {
            **{name: to_device(stage, tensors[f"{prefix}/buffer/{name}"]) for name in plain["buffers"]},
            **dict.fromkeys(plain.get("absent", ())),  # earlier states have none
        },
        now.with_values([*modes, *numbers]),
        versions(flight),
        *((drawn, own) if len(drawn) == len(own) else ()),
    )


def _known(stage: Stage, leaves: tuple[Tensor, ...], target: Any) -> set[int]:
    """Memory that a graph may refer to without it being stored: weights, inputs and targets."""
    return copies.storages([*_memory(stage), *leaves, *copies.tensors_in(target)])


def _memory(stage: Stage) -> list[Tensor]:
    """Tensors whose memory the graphs in flight refer to: the weights, and their place on the device."""
    slot = stage.home.slot
    return [*stage.module.parameters(), *([] if slot is None else [slot.flat.memory])]
