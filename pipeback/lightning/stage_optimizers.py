"""One optimizer per stage, with the options and the state of the optimizer of the LightningModule.

Schedulers, monitors and checkpoints still see the user's optimizer. Its state holds the very same objects as those of
the stages' optimizers, which this file calls twins; its options are copied to them when they change. With a store,
whose threads read the state of the twins, the user has dictionaries of their own with the same tensors.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.lightning.update_size import UpdateSize
from pipeback.pipeline.own_parameters import OfWeights
from pipeback.pipeline.pipeline import Pipeline
from pipeback.private import without_step_hooks
from pipeback.stages.optimizer_counters import counted

IMPLEMENTATION = ("foreach", "fused")  # options that twins keep for themselves, since a store may have chosen them


class StageOptimizers(OfWeights):
    """Makes the optimizers of the stages: call it with the weights of each stage, in the order of the stages.

    trained: the user's parameters that each stage trains, in the order in which its module has them. size: scales rates
    to the samples of an update. piece: what this rank keeps of the state of a parameter. stored: the weights are in a
    store.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trained: Sequence[Sequence[nn.Parameter]], size: UpdateSize,
        piece: Callable[[nn.Parameter, dict[str, Any]], dict[str, Any]], *, stored: bool = False,
    ) -> None:  # fmt: skip
        self.optimizer, self.trained, self._size, self._piece = optimizer, trained, size, piece
        self._stored = stored
        self._groups = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        held = [group["params"] for group in optimizer.param_groups]
        self._sizes, self._weights = list(map(len, held)), list(chain.from_iterable(held))
        self._made: list[tuple[Any, list[tuple[Tensor, nn.Parameter]], list[int]]] = []
        self._options = self._current()
        self._shared: list[Any] = []  # the user's state as the twins share it, by identity
        self._lent: list[dict[str, Any]] = []  # with a store: what these held

    def __call__(self, weights: list[Tensor]) -> torch.optim.Optimizer:
        """Make a twin over `weights`."""
        twin = twin_of(self.optimizer)
        # the pipeline's weights are other parameters, in the order of the user's
        mine = self.trained[len(self._made)]
        pairs = list(zip(weights, mine, strict=True)) if mine else []
        groups: dict[int, list[Tensor]] = {} if mine else {0: weights}
        for w, p in pairs:
            groups.setdefault(self._groups[id(p)], []).append(w)
        numbers = sorted(groups)
        twin.param_groups = [{"params": groups[g], **self._options[g]} for g in numbers]
        self._made.append((twin, pairs, numbers))
        self._share(twin, pairs)
        self._note()
        made: torch.optim.Optimizer = twin
        return made

    def follow(self, pipe: Pipeline, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Hand options that have changed, for example the learning rate of a scheduler, to every stage, and so a state
        that was cleared or loaded. optimizers: those of the Trainer.

        Raises ValueError if the optimizer, or what its groups hold, is no longer that of the beginning of fit.
        """
        if len(optimizers) != 1 or optimizers[0] is not self.optimizer:
            raise ValueError(
                "the Trainer has got another optimizer within fit, but the stages step with that of its beginning; set "
                'options of its groups instead (group["lr"] = 0.01), or let the fit end before, and call fit of '
                "another Trainer"
            )
        self.check_groups()
        if self._replaced():
            if any(_nowhere(w, self.optimizer.state[p]) for _, pairs, _ in self._made for w, p in pairs):
                raise RuntimeError(
                    "a state was loaded into the optimizer within fit, but over several devices the weights of the "
                    "LightningModule are on the meta device then, and torch moves the state there; use "
                    "Trainer(devices=1), or for an empty state optimizer.state.clear()"
                )
            with pipe.shown(changes=True):
                self.give()
        self.follow_options()

    def check_groups(self, *, more: bool = False) -> None:
        """Raise ValueError if a weight is in another group of the user's optimizer than at the beginning of fit, or in
        none; more: or if a group has got more weights. A push names those that were frozen when fit began.
        """
        held = [group["params"] for group in self.optimizer.param_groups]
        if list(map(len, held)) == self._sizes and all(map(is_, chain.from_iterable(held), self._weights)):
            return
        now = {id(p): g for g, params in enumerate(held) for p in params}
        if (more and now != self._groups) or any(now.get(p) != g for p, g in self._groups.items()):
            raise ValueError(
                "the groups of the optimizer hold other weights than when fit began, whose groups the optimizers of "
                "the stages have; set options of groups only, and requires_grad_(False) for what is not to be trained, "
                "or let the fit end before, and call fit of another Trainer"
            )

    def follow_options(self) -> bool:
        """Hand options that have changed to every stage; return whether any have."""
        now = self._current()
        changed = now != self._options
        if changed:
            self._options = now
            for twin, _, numbers in self._made:
                for n, (group, g) in enumerate(zip(twin.param_groups, numbers, strict=True)):
                    counts = {k for k in now[g] if (n, k) in counted(twin).options}  # counters of its own steps
                    group.update({k: v for k, v in now[g].items() if k not in IMPLEMENTATION and k not in counts})
        return changed

    def give(self) -> None:
        """Give the twins the state that was loaded into the original."""
        for twin, pairs, _ in self._made:
            self._share(twin, pairs)
            for w, p in pairs:
                if w.dtype != p.dtype:  # a master: torch has cast what it has loaded to the type of the user's weight
                    state = twin.state[w]
                    state.update({k: v.to(w.dtype) for k, v in state.items() if _like(v, p)})
            for w, _ in pairs if self._stored else ():
                state = twin.state[w]
                with_w = {k: v for k, v in state.items() if isinstance(v, Tensor) and (v.dim() or not w.dim())}
                state.update({k: _owned(v, w.device) for k, v in with_w.items()})
        self._note()
        self.follow_options()

    def take(self) -> None:
        """Give the original the state that was loaded into the twins."""
        self._collect()
        self._options = []  # the twins have those of the last micro-batch; a scheduler may have changed them since
        self.follow_options()

    def collect(self) -> None:
        """Let the original have the state of the twins; it is empty for stages on other ranks. What the user
        has put into the original since is newer, and stays.
        """
        if not self._replaced():
            self._collect()

    def _collect(self) -> None:
        for twin, pairs, _ in self._made:
            for w, p in pairs:
                self.optimizer.state[p] = dict(twin.state[w]) if self._stored else twin.state[w]
        self._note()

    def _note(self) -> None:
        self._shared = list(self.optimizer.state.values())
        self._lent = list(map(dict, self._shared)) if self._stored else []

    def _replaced(self) -> bool:
        """Whether the user's state has other dictionaries than the twins share, or lent ones hold something else."""
        state, shared = self.optimizer.state, self._shared
        return (
            len(state) != len(shared)
            or not all(map(is_, state.values(), shared))
            or any(
                now.keys() != then.keys() or not all(map(is_, now.values(), then.values()))
                for now, then in zip(shared, self._lent, strict=False)
            )
        )

    def detach(self) -> None:
        """Let the original have a copy of the state of the twins, which is about to be freed."""
        for twin, pairs, _ in self._made:
            for w, p in pairs:
                self.optimizer.state[p] = copy.deepcopy(twin.state[w])

    def state_dict(self) -> dict[str, Any]:
        """The state dictionary of the original, as if it had made the steps."""
        found = self.optimizer.state_dict()
        # a parameter that was never stepped has no state in plain training, here an empty one
        return {**found, "state": {n: state for n, state in found["state"].items() if state}}

    def dense_state_dict(self, expanded: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
        """Return the same for twins that step the entries of sparse weights. expanded: (weight, its state) -> dense."""
        self.collect()
        kept: dict[Tensor, Any] = {p: self.optimizer.state[p] for _, pairs, _ in self._made for _, p in pairs}
        for _, pairs, _ in self._made:
            for w, p in pairs:
                self.optimizer.state[p] = {
                    key: expanded(w, v) if isinstance(v, Tensor) and v.shape == w.shape else v
                    for key, v in kept[p].items()
                }
        found = copy.deepcopy(self.state_dict())
        self.optimizer.state.update(kept)
        return found

    def _share(self, twin: Any, pairs: list[tuple[Tensor, nn.Parameter]]) -> None:
        twin.state = defaultdict(dict)
        for w, p in pairs:
            given = self.optimizer.state[p]
            twin.state[w] = self._piece(p, dict(given) if self._stored else given)

    def _current(self) -> list[dict[str, Any]]:
        return [
            {
                k: v.clone() if isinstance(v, Tensor) else v
                for k, v in self._size.options(group).items()
                if k != "params"
            }
            for group in self.optimizer.param_groups
        ]


def twin_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return another optimizer of its class, whose parameter groups and state are still to be set."""
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's wrapper is bound to the original
    without_step_hooks(twin)  # the user's hooks hear of the original's steps
    return twin


def _nowhere(w: Tensor, state: dict[str, Any]) -> bool:
    """Whether a state has no values although its weight has."""
    return not w.is_meta and any(isinstance(value, Tensor) and value.is_meta for value in state.values())


def _like(value: Any, p: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype == p.dtype


def _owned(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor into memory of its own: what was read from a file lies in a buffer of that file."""
    if value.device == device and value.untyped_storage().resizable():
        return value
    return value.to(device, copy=True)
