"""Recompute (activations="recompute"): a stage keeps only its input from its forward (F) to its backward (B).

B repeats the forward:

    F   y = f(x, w_F)    without a graph; the stage keeps x and whatever the repeat needs
    B   y' = f(x, w_B)   with a graph, differentiated at once, on the weights in force at B

If B runs on F's weights (flushes, stashing), y' is y, bit for bit. Otherwise B's activations belong to the newer
weights w_B, while the reported loss is that of F. Buffers change only at F; the repeat uses the random numbers and
buffers of F, also where a module draws from a torch.Generator in an attribute. All other side effects of the module,
including those of its hooks, happen twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.splitting import outside_draws
from pipeback.splitting.module_walk import held
from pipeback.splitting.segment import Segment
from pipeback.stages.flight import Flight, Value, cut, for_trial, grown
from pipeback.stages.module_settings import Settings
from pipeback.stages.run_modules import buffers_around, run_modules
from pipeback.stages.saved_graph import held_bytes
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators
from pipeback.tensors.copies import equal, tensors_in


class Recomputation(NamedTuple):
    """The circumstances of F, so that it can be repeated exactly."""

    stream: Tensor | None  # the state of the stage's random stream
    buffers: dict[str, Tensor | None]  # by name: those that F changed, as they were
    settings: Settings  # modes and numbers of the modules, as a dropout's probability
    versions: tuple[int, ...]  # of the input and target, as autograd counts changes in place
    drawn: Sequence[Tensor] = ()  # the states of `own`
    own: Sequence[outside_draws.Generator] = ()  # generators of torch that the modules draw from

    def __call__(self, stage: Stage, flight: Flight) -> Value:
        """Return the output with its graph; the stage is left as it was."""
        if self.versions != versions(flight):
            raise RuntimeError("its input or target was changed in place after the forward; change a clone")
        leaves = tuple(leaf.clone() for leaf in flight.leaves) if stage.learnt.clones_input else flight.leaves
        given = leaves if flight.tuple_input else leaves[0]
        # casts of F in torch's cache have no graph, and B's weights may be others
        with (
            stage.random.at(self.stream), torch.enable_grad(), _swapped(stage, self.buffers),
            accelerators.under(flight.autocast), self.settings.restored(), outside_draws.at(self.own, self.drawn),
        ):  # fmt: skip
            return stage.compute(given, flight.target)


class Recompute:
    """The policy by which one stage recomputes; the rehearsal finds out which buffers its forward changes."""

    stashes = False  # no graph waits for its backward, so none refers to functions of older weights
    apart = True  # the graph of one backward is gone before that of the next is built
    away = False

    def __init__(self) -> None:
        self.changes: Sequence[str] | None = None  # names of buffers; None: it is not known, they may all be
        self.settings: Settings | None = None  # of the module, as they were at the last forward
        self.draws = True  # whether the forward may draw from generators of torch in attributes of the modules
        self.graphless = False  # whether the forward gives the same bits without a graph; some kernels do not

    def forward(self, stage: Stage, flight: Flight, given: Value) -> Value:
        """F: return the output, without a graph."""
        names = [name for name, _ in held(run_modules(stage), "_buffers")] if self.changes is None else self.changes
        found = {name: buffers_around(stage, name).get(name.rpartition(".")[2]) for name in names}
        buffers = {name: None if b is None else b.detach().clone() for name, b in found.items()}
        if self.settings is None or self.settings.changed():
            self.settings = Settings.of(stage.module)
        own = own_generators(stage) if self.draws else []
        drawn = outside_draws.read(own)
        flight.again = Recomputation(stage.random.state, buffers, self.settings, versions(flight), drawn, own)
        with torch.set_grad_enabled(not self.graphless):
            output = cut(stage.compute(given, flight.target))
        if stage.judges:
            flight.output = output.clone()  # the loss; torch's may be the corner of a whole batch's memory
        return output

    def adopt(self, flight: Flight) -> None:
        """Do nothing: a flight from a state that was saved with its graph keeps it."""

    def learn(self, stage: Stage, x: Value, target: Any) -> None:
        """Which buffers the forward changes, and whether it gives the same bits without a graph.

        Raises ValueError if the forward draws random numbers of Python or numpy, which a repeat would not draw again.
        """
        outside = outside_draws.generators(stage.module.modules())
        states, own = outside_draws.read(outside), own_generators(stage)
        before = outside_draws.read(own)
        self.changes, self.graphless = _learn(stage, x, target)
        self.draws = outside_draws.drawn(own, before)
        if outside_draws.drawn(outside, states):
            raise ValueError(
                f"{stage.label}: activations='recompute' repeats the forward, which draws random numbers of Python or "
                "numpy, so that the repeat would have others; have it draw with torch, or keep what it computes: "
                "activations='device'"
            )

    def measure(self, stage: Stage, flight: Flight, output: Value) -> dict[str, int]:
        """The bytes that a micro-batch holds, and those that its repeat holds beyond that."""
        assert flight.again is not None
        buffers = [buffer for buffer in flight.again.buffers.values() if buffer is not None]
        states = (flight.again.stream, *flight.again.drawn)
        kept = [*flight.leaves, *tensors_in(flight.target), *buffers]
        weights = list(stage.module.parameters())
        here = held_bytes([], kept, weights)
        return {
            "activation_bytes": here,
            "repeat_bytes": held_bytes(grown(output), kept, weights) - here,
            "host_bytes": sum(state.nbytes for state in states if state is not None),
        }


def _learn(stage: Stage, x: Value, target: Any) -> tuple[list[str], bool]:
    state, own = stage.generator.get_state(), own_generators(stage)
    drawn = outside_draws.read(own)
    outputs, changed, graphless, modules = [], set(), True, run_modules(stage)
    for graph in (False, True):
        before = {name: b.detach().clone() for name, b in held(modules, "_buffers")}
        others = {name: b.clone() for name, b in before.items()}
        stage.generator.set_state(state)
        outside_draws.write(own, drawn)
        with torch.set_grad_enabled(graph), _swapped(stage, others):
            try:
                outputs.append(cut(stage.run(stage.enter(x)[1], for_trial(stage, target))))
            except Exception:
                if graph:
                    raise
                graphless = False  # the module differentiates something itself
                continue
            for name, b in before.items():
                after = buffers_around(stage, name).get(name.rpartition(".")[2])
                if after is None or after is not others[name] or after._version or not equal(after, b):
                    changed.add(name.rpartition(".")[0])
    # if a module changes one buffer, it may change all of them: batch statistics need not move at every batch; and so
    # it may change one that somebody sets later
    names = [name for name, _ in held(modules, "_buffers") if name.rpartition(".")[0] in changed]
    names += [f"{path}.{key}".lstrip(".") for path, m in modules.items() for key, b in m._buffers.items() if b is None]
    return names, graphless and all(equal(a, b) for a, b in zip(*map(tensors_in, outputs), strict=True))


@contextmanager
def _swapped(stage: Stage, buffers: Mapping[str, Tensor | None]) -> Iterator[None]:
    """The modules with other tensors for their buffers, which they may change; their own come back untouched."""
    homes, module = [], stage.module
    for name in buffers:
        owner, key = buffers_around(stage, name), name.rpartition(".")[2]
        homes.append((owner, key, owner.get(key)))
    pairs = [(own, other) for (_, _, own), other in zip(homes, buffers.values(), strict=True)]
    others = {id(own): other for own, other in pairs if own is not None and other is not None}
    try:
        for (owner, key, _), other in zip(homes, buffers.values(), strict=True):
            owner[key] = other
        with module.__instead__(others) if buffers and isinstance(module, Segment) else nullcontext():
            yield
    finally:
        for owner, key, own in homes:
            owner[key] = own


def own_generators(stage: Stage) -> list[outside_draws.Generator]:
    """The generators of torch in attributes of the stage's modules."""
    return outside_draws.torch_generators(run_modules(stage).values())


def versions(flight: Flight) -> tuple[int, ...]:
    """The version counters of the input and the target of a flight."""
    return tuple([t._version for t in (*flight.leaves, *tensors_in(flight.target))])
