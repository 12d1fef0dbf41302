"""CopySlices: the autograd node that torch makes for an in-place change of a view; it hides the tensors it saved.

    y = linear(x); y += h        y is a view of what addmm gave, and its base's node becomes CopySlices(AddBackward)

CopySlices does not expose the node that it wraps. But like every node it can be called: it then does what it will do
in the backward, and we see every operation with its arguments. A tensor that none of these operations has made was
saved; the numbers among the arguments are those that the node keeps, including the place of the view. To replace the
saved values, we build the graph with hooks on everything that it saves; the hooks that a call triggers tell where each
value belongs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from pipeback.private import TorchDispatchMode, identity

_OWN = __file__, os.path.dirname(torch.__file__)
MARK = "CopySlices "  # how a line of a signature begins that says what one of its operations is given


class Use(NamedTuple):
    """One operation of a call: its name, and its arguments as words and tensors."""

    name: str
    given: list[str | Tensor]  # a number as text, "." for what the call itself has made, and what was saved


def hides(node: Any) -> bool:
    return type(node).__name__ == "CopySlices"


def uses(node: Any, where: str = "") -> list[Use]:
    """What the node will do in the backward. Nothing is changed by it, and no hook of a tensor is called.

    Raises TypeError naming `where` for a custom Function that changes a view: what it keeps on its ctx is out of reach.
    """
    (form,) = node._input_metadata
    seed = torch.ones(tuple(form.shape), dtype=form.dtype, device=form.device)
    watch = _Watch(seed)
    with torch.no_grad(), watch:
        node(seed)
    if where and watch.function:
        raise TypeError(
            f"{where}: {watch.function}, a Function of its own, changes a view in place (x.view(…), y[0], what a layer "
            "returns), and what torch keeps for it cannot be reached; give it a copy (x = x.clone() before), or "
            "drain() before saving"
        )
    return watch.uses


def tensors(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that the node has saved, each once."""
    seen = set()
    for use in uses(node):
        for each in use.given:
            if isinstance(each, Tensor) and _place(each) not in seen:
                seen.add(_place(each))
                yield each


def taken(nodes: Sequence[Any], known: set[int], where: str) -> tuple[list[Tensor], list[str]]:
    """The tensors that these nodes have saved outside the memory `known`, and a line for each operation."""
    values: list[Tensor] = []
    lines = []
    for node in filter(hides, nodes):
        numbers: dict[Any, int] = {}  # the same tensor is stored once
        for use in uses(node, where):
            words = []
            for each in use.given:
                if isinstance(each, Tensor) and not _within(each, known):
                    if _place(each) not in numbers:
                        numbers[_place(each)] = len(values)
                        values.append(each)
                    words.append(f"t{numbers[_place(each)]}")
                else:
                    words.append("w" if isinstance(each, Tensor) else each)
            lines.append(MARK + " ".join([use.name, *words]))
    return values, lines


def fit(
    nodes: Sequence[Any], known: set[int], lines: Sequence[str], handles: Handles | None
) -> list[tuple[Handle, int]] | None:
    """Find where the stored values belong in a graph that is built anew: handles, each with the number of its value.

    None if that graph is not the one that `lines` describe.
    """
    found: list[tuple[Handle, int]] = []
    made = [use for node in filter(hides, nodes) for use in uses(node)]
    if len(made) != len(lines):
        return None
    for use, line in zip(made, lines, strict=True):
        name, *words = line.removeprefix(MARK).split(" ")
        if name != use.name or len(words) != len(use.given):
            return None
        for each, word in zip(use.given, words, strict=True):
            if isinstance(each, Tensor) and not _within(each, known):
                handle = None if handles is None else handles.of(each)
                if handle is None or not word.startswith("t"):
                    return None
                found.append((handle, int(word[1:])))
            elif word != ("w" if isinstance(each, Tensor) else each):
                return None
    return found


class Handle:
    """A saved tensor of a graph that is built anew; `give`, if set, returns the tensor that replaces it."""

    __slots__ = ("give", "label", "tensor", "version")

    def __init__(self, tensor: Tensor, label: str) -> None:
        self.tensor, self.version, self.label = tensor.detach(), tensor._version, label
        self.give: Any = None


class Handles:
    """Hooks on all tensors that a graph saves while it is built; they tell which handle a saved tensor belongs to."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._seen: dict[int, tuple[Handle, Tensor]] | None = None
        self._known: set[int] = set()

    def pack(self, tensor: Tensor) -> Handle:
        return Handle(tensor, self.label)

    def unpack(self, handle: Handle) -> Tensor:
        if handle.give is not None:
            given: Tensor = handle.give(None)
            return given
        if handle.tensor._version != handle.version:  # autograd leaves this to hooks
            raise RuntimeError(
                f"{handle.label}: a tensor of shape {tuple(handle.tensor.shape)} that the backward needs was changed "
                "in place after the forward; change a clone"
            )
        if self._seen is None or _within(handle.tensor, self._known):
            return handle.tensor
        own = handle.tensor.clone()  # memory that no other saved tensor has
        self._seen[identity(own)] = handle, own
        return own

    @contextmanager
    def looking(self, known: set[int]) -> Iterator[None]:
        """Within this context the tensors that are unpacked are remembered, for `of`. known: memory to leave out."""
        self._seen, self._known = {}, known
        try:
            yield
        finally:
            self._seen = None

    def of(self, tensor: Tensor) -> Handle | None:
        """The handle that has returned this tensor, or a tensor of which this is a view."""
        found = (self._seen or {}).get(identity(tensor))
        return None if found is None else found[0]


class _Watch(TorchDispatchMode):
    """Writes down every operation, and tells what was there before from what they make."""

    def __init__(self, seed: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: list[Use] = []
        self.function: str | None = None  # a custom Function that computes
        self._made: dict[Any, Tensor] = {}
        self._make(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation

    def _make(self, tensor: Tensor) -> None:
        self._made[_place(tensor)] = tensor  # it stays, so that no other gets its place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        function = _python()
        if function is not None or func is torch.ops.aten.detach.default:  # which gives the same, now and then
            self.function = self.function or function
            return func(*args, **kwargs)
        given: list[str | Tensor] = []
        for each in _flat((args, tuple(kwargs.values()))):
            if isinstance(each, Tensor):
                given.append("." if _place(each) in self._made else each)
            elif isinstance(each, (bool, int, float, complex, str)):
                given.append(repr(each))
        self.uses.append(Use(str(func), given))
        output = func(*args, **kwargs)
        before = {_place(each) for each in given if isinstance(each, Tensor)}
        for each in _flat(output):
            if isinstance(each, Tensor) and _place(each) not in before:
                self._make(each)
        return output


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def _place(tensor: Tensor) -> Any:
    """A key that tells tensors that are alive at the same time apart: their memory, and which part of it they are."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)
    return identity(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _within(tensor: Tensor, known: set[int]) -> bool:
    return tensor.layout is torch.strided and identity(tensor) in known


def _python() -> str | None:
    """Whose Python code is running: the name of a custom Function, or "" for hooks that return saved tensors."""
    frame, found = inspect.currentframe(), None
    while frame is not None and frame.f_code is not uses.__code__:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return type(frame.f_locals["self"]).__name__.removesuffix("Backward")
        if frame.f_code is Handles.unpack.__code__ or not frame.f_code.co_filename.startswith(_OWN):
            found = ""
        frame = frame.f_back
    return found
