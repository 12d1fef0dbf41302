"""Stage script: the work of a stage for one form of micro-batch, written as a function in Python.

    def forward(x0, x1):
        v2 = m_0(x0, None); x0 = None
        v3 = add_1(v2, x1); v2 = x1 = None
        return (v3,)

Everything but literals is a global of that function: modules and weights are m_n, functions and other values have their
own names. So blocks that are alike have the same text, which is compiled once. A value that is no longer needed is
released at once.
"""

from __future__ import annotations

import builtins
import copy
import keyword
import linecache
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any
from zlib import crc32

from torch import Tensor, nn

LITERALS = (int, bool, str, type(None), type(...))


class Name:
    """A value of the script. last: the line that needs it last."""

    def __init__(self, text: str, last: int = -1) -> None:
        self.text, self.last = text, last


class Script:
    """A script under construction: write it line by line, call `end`, and then call its `function`."""

    function: Callable[..., tuple[Any, ...]]

    def __init__(self) -> None:
        self._inputs: list[Name] = []
        self._lines: list[tuple[list[Name], bool, str]] = []  # (names it defines, whether it unpacks, text)
        self._count = 0
        self._given: dict[int, str] = {}  # the names of globals by identity
        self._once: dict[Any, Name] = {}  # what `once` has written
        self.held: dict[str, Any] = {}  # modules, parameters, buffers and constants
        self.others: dict[str, Any] = {}  # functions, and values that are no literals
        self.paths: dict[str, str] = {}  # the path in the model of each value in `held`
        self.source = ""

    # -- writing -------------------------------------------------------------------------------------------------

    def take(self) -> Name:
        """Add an argument to the function."""
        self._inputs.append(self._new("x"))
        return self._inputs[-1]

    def part(self, path: str, part: nn.Module | Tensor) -> Name:
        """Return the name of the module, weight or buffer at that path."""
        if id(part) not in self._given:
            self._given[id(part)] = name = f"m_{len(self.held)}"
            self.held[name], self.paths[name] = part, path
        return Name(self._given[id(part)])

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Name:
        """Write a line that calls a function or a part; return the name of its output."""
        found = self._new("v")
        self._lines.append(([found], False, self._called(function, args, kwargs or {})))
        return found

    def once(self, function: Any, args: Sequence[Any]) -> Name:
        """Write a line as `call` does, or return the name that the same line has defined before."""
        key = function, *args
        if key not in self._once:
            self._once[key] = self.call(function, args)
        return self._once[key]

    def unpack(self, function: Any, args: Sequence[Any], count: int) -> list[Name]:
        """Write a line that calls a function, which returns a list of `count` values; return their names."""
        found = [self._new("v") for _ in range(count)]
        self._lines.append((found, True, self._called(function, args, {})))
        return found

    def end(self, gives: Sequence[Name]) -> Script:
        """Write the return of these values, and compile the script."""
        names = [name.text for name in self._inputs]
        for name in gives:
            name.last = len(self._lines)
        free: list[list[str]] = [[] for _ in range(len(self._lines) + 1)]
        for name in self._inputs:
            free[max(name.last, 0)].append(name.text)
        written = [f"def forward({', '.join(names)}):"]
        for n, (found, several, text) in enumerate(self._lines):
            if any(name.last >= 0 for name in found):
                for name in found:
                    free[max(name.last, n)].append(name.text)
                text = f"{_tuple(name.text for name in found) if several else found[0].text} = {text}"
            gone = "".join(f"{name} = " for name in free[n])
            written.append(f"    {text}; {gone}None" if gone else f"    {text}")
        written.append(f"    return {_tuple(name.text for name in gives)}")
        self.source = "\n".join(written)
        self._lines, self._given, self._once = [], {}, {}
        self._compile()
        return self

    def _new(self, letter: str) -> Name:
        self._count += 1
        return Name(f"{letter}{self._count - 1}")

    def _called(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        texts = [self._text(arg) for arg in args]
        odd = {key: value for key, value in kwargs.items() if not key.isidentifier() or keyword.iskeyword(key)}
        texts += [f"{key}={self._text(value)}" for key, value in kwargs.items() if key not in odd]
        texts += [f"**{self._text(odd)}"] if odd else []
        called = self._text(function) if isinstance(function, Name) else self._other(function)
        return f"{called}({', '.join(texts)})"

    def _text(self, value: Any) -> str:
        kind = type(value)
        if kind is Name:
            value.last = len(self._lines)
            found: str = value.text
            return found
        if kind in LITERALS or (kind is float and math.isfinite(value)):
            return repr(value)
        if kind is slice and all(type(end) in LITERALS for end in (value.start, value.stop, value.step)):
            return repr(value)
        if kind is tuple:
            return _tuple(map(self._text, value))
        if kind is list:
            return f"[{', '.join(map(self._text, value))}]"
        if kind is dict:
            return f"{{{', '.join(f'{self._text(key)}: {self._text(part)}' for key, part in value.items())}}}"
        return self._other(value)

    def _other(self, value: Any) -> str:
        """Return the name of a global that holds this value."""
        if id(value) not in self._given:
            name = re.sub(r"\W", "_", getattr(value, "__name__", type(value).__name__))
            self._given[id(value)] = f"{name}_{len(self.others)}"
            self.others[self._given[id(value)]] = value
        return self._given[id(value)]

    # -- running -------------------------------------------------------------------------------------------------

    def _compile(self) -> None:
        code = _compiled(self.source)  # a copy for each script: torch.compile counts recompilations per code object
        around = {"__builtins__": builtins, "__name__": __name__}
        self.function = FunctionType(code.replace(co_filename=code.co_filename), {**around, **self.others, **self.held})

    def put(self, others: Mapping[int, Any]) -> None:
        """Run with other parts instead of those with these identities; with none, run with its own again."""
        around = self.function.__globals__
        around.update((name, others.get(id(part), part)) for name, part in self.held.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> Script:
        found = Script()
        found.__dict__.update(vars(self), held=copy.deepcopy(self.held, memo))
        found._compile()
        return found

    def __reduce__(self) -> Any:
        kept = {key: value for key, value in vars(self).items() if key != "function"}
        return _again, (kept,)

    def code(self) -> str:
        """Return the script as Python, with the paths of the model's modules."""
        return re.sub(r"\bm_\d+\b", lambda found: f"self.{self.paths[found[0]]}", self.source)

    def does(self, other: Script) -> bool:
        """Whether another script does the same."""
        return (
            self.source == other.source
            and all(a is b for a, b in zip(self.held.values(), other.held.values(), strict=True))
            and all(_same(a, b) for a, b in zip(self.others.values(), other.others.values(), strict=True))
        )


def _again(kept: dict[str, Any]) -> Script:
    found = Script()
    found.__dict__.update(kept)
    found._compile()
    return found


@lru_cache(4096)
def _compiled(source: str) -> CodeType:
    file = f"<pipeback.splitting.stage_script {crc32(source.encode()):08x}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # for tracebacks
    return next(c for c in compile(source, file, "exec").co_consts if isinstance(c, CodeType))


def _tuple(texts: Iterable[str]) -> str:
    found = tuple(texts)
    return f"({', '.join(found)}{',' * (len(found) == 1)})"


def _same(a: Any, b: Any) -> bool:
    """Whether two functions or values are interchangeable."""
    if a is b:
        return True
    if type(a) is not type(b) or bool(getattr(a, "expects", None) != getattr(b, "expects", None)):
        return False
    if callable(a):
        inner = getattr(a, "function", None), getattr(b, "function", None)
        return _told(a) == _told(b) and (inner[0] is None or _same(*inner))
    return repr(a) == repr(b)


def _told(function: Any) -> tuple[Any, Any]:
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return getattr(function, "__module__", None), name
