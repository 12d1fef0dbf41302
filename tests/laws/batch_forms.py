"""The structures in which users push: the same numbers, a and b of x and label and weight of y, in each of them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Record:
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any


class Frozen(Mapping[str, Any]):
    """A mapping of one's own."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.items_of = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


class Encoding(UserDict[str, Any]):
    """What a tokenizer gives: attributes for its items, and something of every text that is never equal."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.encodings = [object()]

    def __getattr__(self, key: str) -> Any:
        if key == "data" or key not in self.data:
            raise AttributeError(key)
        return self.data[key]


# how a and b stand in it, and how they are read
FORMS: dict[str, tuple[Any, Any]] = {
    "dict": (lambda a, b: {"a": a, "b": b}, lambda q: (q["a"], q["b"])),
    "ordered": (lambda a, b: OrderedDict(a=a, b=b), lambda q: (q["a"], q["b"])),
    "encoding": (lambda a, b: Encoding({"a": a, "b": b}), lambda q: (q.a, q["b"])),
    "user dict": (lambda a, b: UserDict(a=a, b=b), lambda q: (q["a"], q["b"])),
    "mapping": (lambda a, b: Frozen({"a": a, "b": b}), lambda q: (q["a"], q["b"])),
    "tuple": (lambda a, b: (a, b), lambda q: (q[0], q[1])),
    "list": (lambda a, b: [a, b], lambda q: (q[0], q[1])),
    "named tuple": (Pair, lambda q: (q.a, q.b)),
    "dataclass": (Record, lambda q: (q.a, q.b)),
    "slots": (Slotted, lambda q: (q.a, q.b)),
    "nested": (lambda a, b: {"a": {"u": [a]}, "b": (Pair(b, 2),)}, lambda q: (q["a"]["u"][0], q["b"][0].a)),
    "encoding in a list": (lambda a, b: [Encoding({"a": a, "b": Record(b, "word")})], lambda q: (q[0].a, q[0].b.a)),
}
KEYWORDS = ("dict", "ordered", "encoding", "user dict", "mapping", "tuple", "list", "named tuple", "dataclass", "slots")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def through(self, a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = self.third(torch.tanh(self.second(torch.relu(self.first(a + b)))))
        return found


class Keywords(Layers):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.through(a, b)


class Whole(Layers):
    """Takes its batch as one argument."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, batch: Any) -> Tensor:
        return self.through(*FORMS[self.form][1](batch))


def weighed(form: str) -> Callable[[Tensor, Any], Tensor]:
    """The loss for targets of a form."""

    def loss(output: Tensor, target: Any) -> Tensor:
        label, weight = FORMS[form][1](target)
        return (cross_entropy(output, label, reduction="none") * weight).mean()

    return loss


def numbers(count: int, samples: int = 8) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(a, b, label, weight) of each push."""
    torch.manual_seed(1)
    return [
        (torch.randn(samples, 4), torch.randn(samples, 4), torch.randint(0, 3, (samples,)), torch.rand(samples))
        for _ in range(count)
    ]
