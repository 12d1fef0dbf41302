"""Code reads: what a forward's own code names: global variables, and attributes of objects such as a configuration.

Tracing has fixed their values. They are found in the code of the forward, of the methods that it calls, and of
functions beside them in the same package.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

DEEP = 3  # how far functions are followed: the forward, what it calls, and what these call


class CodeReads(NamedTuple):
    """names: all names of attributes in the code. variables: (module, name) of the global variables, sorted."""

    names: frozenset[str]
    variables: tuple[tuple[str, str], ...]


@cache
def code_reads(kind: Hashable, method: str = "forward") -> CodeReads:
    """Return what the forward of a class of modules reads, or a method of another class."""
    assert isinstance(kind, type)
    names, variables = set[str](), dict[tuple[str, str], None]()
    spaces = [vars(each) for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("torch", "builtins")]
    seen, todo = set[Any](), [(f, 0) for f in _own(spaces, method)]
    while todo:
        function, depth = todo.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        for name in dict.fromkeys(_named(function.__code__)):
            names.add(name)
            found = function.__globals__.get(name, seen)
            if found is not seen and not isinstance(found, FunctionType):
                variables[str(function.__globals__.get("__name__")), name] = None
            if depth < DEEP:
                beside = [found] if isinstance(found, FunctionType) and _near(found, kind) else []
                todo += [(f, depth + 1) for f in (*_own(spaces, name), *beside)]
    return CodeReads(frozenset(names), tuple(sorted(variables)))


def _own(spaces: Iterable[Mapping[str, Any]], name: str) -> Iterator[FunctionType]:
    """Yield the functions of that name of a class and of its bases. spaces: their attributes."""
    for space in spaces:
        if name in space:
            found = space[name]
            found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
            if isinstance(found, FunctionType):
                yield found


def _near(function: FunctionType, kind: type) -> bool:
    return function.__module__.partition(".")[0] == kind.__module__.partition(".")[0]


def _named(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant)
