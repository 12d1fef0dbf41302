"""Recompute (activations="recompute"): a stage keeps only its input from its forward (F) to its backward (B).

B repeats the forward:

    F   y = f(x, w_F)    without a graph; the stage keeps x and whatever the repeat needs
    B   y' = f(x, w_B)   with a graph, differentiated at once, on the weights in force at B

If B runs on F's weights (flushes, stashing), y' is y, bit for bit. Otherwise B's activations belong to the newer
weights w_B, while the reported loss is that of F. Buffers change only at F; the repeat uses the random numbers and
buffers of F. All other side effects of the module, including those of its hooks, happen twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeback.splitting import outside_draws
from pipeback.splitting.segment import Segment
from pipeback.stages.flight import Flight, Value, cut, for_trial, grown
from pipeback.stages.module_settings import Settings
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

    def __call__(self, stage: Stage, flight: Flight) -> Value:
        """Return the output with its graph; the stage is left as it was."""
        if self.versions != versions(flight):
            raise RuntimeError("its input or target was changed in place after the forward; change a clone")
        leaves = tuple(leaf.clone() for leaf in flight.leaves) if stage.learnt.clones_input else flight.leaves
        given = leaves if flight.tuple_input else leaves[0]
        # casts of F in torch's cache have no graph, and B's weights may be others
        with (
            stage.random.at(self.stream), torch.enable_grad(), _swapped(stage.module, self.buffers),
            accelerators.under(flight.autocast), self.settings.restored(),
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
        self.graphless = False  # whether the forward gives the same bits without a graph; some kernels do not

    def forward(self, stage: Stage, flight: Flight, given: Value) -> Value:
        """F: return the output, without a graph."""
        module = stage.module
        names = [name for name, _ in module.named_buffers()] if self.changes is None else self.changes
        found = {name: _owner(module, name).get(name.rpartition(".")[2]) for name in names}
        buffers = {name: None if b is None else b.detach().clone() for name, b in found.items()}
        if self.settings is None or self.settings.changed():
            self.settings = Settings.of(module)
        flight.again = Recomputation(stage.random.state, buffers, self.settings, versions(flight))
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
        states = outside_draws.read(outside)
        self.changes, self.graphless = _learn(stage, x, target)
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
        kept = [*flight.leaves, *tensors_in(flight.target), *buffers]
        weights = list(stage.module.parameters())
        here = held_bytes([], kept, weights)
        return {
            "activation_bytes": here,
            "repeat_bytes": held_bytes(grown(output), kept, weights) - here,
            "host_bytes": 0 if flight.again.stream is None else flight.again.stream.nbytes,
        }


def _learn(stage: Stage, x: Value, target: Any) -> tuple[list[str], bool]:
    state = stage.generator.get_state()
    outputs, changed, graphless = [], set(), True
    for graph in (False, True):
        before = {name: b.detach().clone() for name, b in stage.module.named_buffers()}
        others = {name: b.clone() for name, b in before.items()}
        stage.generator.set_state(state)
        with torch.set_grad_enabled(graph), _swapped(stage.module, others):
            try:
                outputs.append(cut(stage.run(stage.enter(x)[1], for_trial(stage, target))))
            except Exception:
                if graph:
                    raise
                graphless = False  # the module differentiates something itself
                continue
            for name, b in before.items():
                after = stage.module.get_buffer(name)
                if after is not others[name] or after._version or not equal(after, b):
                    changed.add(name.rpartition(".")[0])
    # if a module changes one buffer, it may change all of them: batch statistics need not move at every batch; and so
    # it may change one that somebody sets later
    names = [name for name, _ in stage.module.named_buffers() if name.rpartition(".")[0] in changed]
    places = stage.module.named_modules()
    names += [f"{path}.{key}".lstrip(".") for path, m in places for key, b in m._buffers.items() if b is None]
    return names, graphless and all(equal(a, b) for a, b in zip(*map(tensors_in, outputs), strict=True))


@contextmanager
def _swapped(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> Iterator[None]:
    """The module with other tensors for its buffers, which it may change; its own come back untouched."""
    homes = []
    for name in buffers:
        owner, key = _owner(module, name), name.rpartition(".")[2]
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


def _owner(module: nn.Module, name: str) -> dict[str, Tensor | None]:
    """The buffers of the module that has the one of this name."""
    return module.get_submodule(name.rpartition(".")[0])._buffers


def versions(flight: Flight) -> tuple[int, ...]:
    """The version counters of the input and the target of a flight."""
    return tuple([t._version for t in (*flight.leaves, *tensors_in(flight.target))])
