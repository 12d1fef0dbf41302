"""Call trace: the record of a forward, call by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeback.private import pytree
from pipeback.splitting.autocast_regions import Autocast
from pipeback.splitting.outside_draws import Generator
from pipeback.tensors.structures import SINGLE, Form, Ref, parts


@dataclass(frozen=True)
class Attribute:
    """A parameter or buffer that is used outside of the leaf modules, by its name in the model."""

    name: str


SINGLE.add(Attribute)


@dataclass
class Call:
    """One call of a leaf module or of a torch function."""

    target: Any  # the path of the module, or the function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str  # the path of the module whose forward has made it
    grad: bool  # False where it was called within torch.no_grad()
    out: list[int] = field(default_factory=list)  # numbers of the tensors in its output
    form: Any = None  # the structure of its output, with the constants in it; None where it is one tensor
    check: Any = None  # (its value in the trace,), where Python decides by it
    autocast: Autocast = ()  # the setting, where it differs from that around the model
    left: tuple[int | str, ...] = ()  # arguments that it changes; they are appended to its output
    _taken: tuple[list[Ref], list[str]] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def module(self) -> bool:
        """Whether it calls a leaf module; otherwise it calls a function."""
        return isinstance(self.target, str)

    @property
    def told(self) -> tuple[Any, ...]:
        """What the call is, apart from the tensors that it gave."""
        return getattr(self.target, "__name__", self.target), self.args, self.kwargs, self.where, self.grad, self.check

    def refs(self) -> list[Ref]:
        """References to the numbered tensors among its arguments."""
        return (self._taken or self._looked())[0]

    def attributes(self) -> list[str]:
        """Names of the parameters and buffers among its arguments."""
        return (self._taken or self._looked())[1]

    def given(self, numbers: Mapping[str, Ref]) -> Call:
        """Return the same call with references to tensors in place of these parameters and buffers."""
        one = lambda x: numbers.get(x.name, x) if type(x) is Attribute else x  # noqa: E731
        args, kwargs = pytree.tree_map(one, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def _looked(self) -> tuple[list[Ref], list[str]]:
        leaves = parts((self.args, self.kwargs))
        refs = [x for x in leaves if type(x) is Ref]
        self._taken = refs, [x.name for x in leaves if type(x) is Attribute]
        return self._taken


@dataclass
class CallTrace:
    """The record of a forward: its calls in order. Tensors have numbers: the inputs 0, 1, …, then the outputs."""

    calls: list[Call]
    inputs: int
    out: list[int]  # numbers of the tensors of the output
    form: Form
    constants: dict[str, Tensor]  # tensors that modules hold and that are neither parameter nor buffer, by name
    forms: list[tuple[torch.Size, torch.dtype]]  # shape and type of every number
    grads: list[bool]  # whether each number needs a gradient
    changed: set[str]  # buffers and parameters that were changed in place
    costs: list[float]  # the work of every call, where it is counted
    device: torch.device  # where the input is
    decided: set[tuple[str, str]] = field(default_factory=set)  # plain attributes that were read: (module, name)
    draws: str | None = None  # the path of the first module that has drawn from generators of Python or numpy
    outside: Sequence[Generator] = ()  # those generators
    loose: set[int] = field(default_factory=set)  # numbers of the tensors whose size depends on values
    writes: Mapping[str, Sequence[int]] = field(
        default_factory=dict
    )  # parameters and buffers, and who writes into them

    def __post_init__(self) -> None:
        if not torch.is_grad_enabled():  # traced to be evaluated, where stages record no graph, whatever is said here
            self.grads = [True for _ in self.grads]
            for call in self.calls:
                call.grad = True

    @property
    def answers(self) -> list[Any]:
        """Return the values that Python has decided by."""
        return [call.check[0] for call in self.calls if call.check is not None]

    def repeats(self, other: CallTrace) -> bool:
        """Whether another forward has made the same calls, with the same numbers."""
        return [call.told for call in self.calls] == [call.told for call in other.calls]
