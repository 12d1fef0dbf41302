"""Attribute changes: finds attributes of modules that a forward sets, since traced stages would not set them again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from logging import Logger
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from pipeback.splitting.call_listeners import instead
from pipeback.splitting.module_walk import identical, walked
from pipeback.splitting.refusals import Unmade

Name = tuple[str, str]  # of an attribute: the path of its module, and its own
Attributes = Mapping[str, tuple[nn.Module, Mapping[str, Any] | None]]  # every module by its path; None of leaves
NOWHERE = object()
MACHINERY = set(vars(nn.Module())) - {"training"} | set(vars(nn.Module)) | {"__class__"}  # what torch reads
PLAIN = bool, int, float, complex, str, type(None), tuple, list, dict, FunctionType, BuiltinFunctionType
UNLIKE = Tensor, nn.Module, type, ModuleType, Logger  # what has attributes, and is no object like a configuration
P = ParamSpec("P")
R = TypeVar("R")


class FirstCall(ValueError):
    """A forward has set marks, as one does that installs something on its first call."""


class Changed(ValueError):
    """A forward has set these attributes to something else."""

    def __init__(self, message: str, names: Collection[Name]) -> None:
        super().__init__(message)
        self.names = names


def again(follow: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function that traces: trace again, at most twice, if a forward installed something or set attributes."""

    @wraps(follow)
    def followed(*args: P.args, **kwargs: P.kwargs) -> R:
        first: ValueError | None = None
        for left_tries in (2, 1, 0):
            try:
                return follow(*args, **kwargs)
            except (FirstCall, Changed) as error:
                if not left_tries:
                    raise
                first, kwargs["left"] = error, getattr(error, "names", ())
            except ValueError as error:  # the attribute that was set may be what made it fail
                raise (first if first is not None and type(error) in (ValueError, Unmade) else error) from None
        raise AssertionError

    return followed


class Sets:
    """Records the attributes that a forward sets.

    left: attributes for which it also records whether the forward reads them before it sets them. paths: the paths of
    the modules, by their identity.
    """

    def __init__(self, paths: Mapping[int, str], left: Collection[Name]) -> None:
        self._paths, self._left = paths, left
        self._plain = _Plain()
        self._set: set[Name] = set()
        self._read: set[Name] = set()
        self.decided: set[Name] = set()  # plain attributes that were read before they were set, outside of leaves

    @property
    def held(self) -> set[Name]:
        """Return the plain attributes that a forward has decided by and has not set itself."""
        return self.decided - self._set

    @property
    def harmless(self) -> set[Name]:
        """Return the attributes that are set before they are read, so that their old values do not matter."""
        return set(self._left) - self._read

    @contextmanager
    def heard(
        self, modules: Iterable[nn.Module], told: Callable[[nn.Module, str], None], inside: Callable[[], bool]
    ) -> Iterator[None]:
        """A context within which `told` is called for every attribute that is set in these modules.

        inside: returns whether a leaf or another thread is running.
        """
        kinds = set(map(type, modules))
        setting = [(kind, "__setattr__", self._setting(kind, told)) for kind in kinds]
        getting = [(kind, "__getattribute__", self._getting(kind, inside)) for kind in kinds]
        with instead([*setting, *getting]):
            yield

    def _setting(self, kind: type[nn.Module], told: Callable[[nn.Module, str], None]) -> Callable[..., None]:
        original, paths, known = kind.__setattr__, self._paths, self._set

        def setting(module: nn.Module, key: str, value: Any) -> None:
            if (path := paths.get(id(module))) is not None:
                told(module, key)
                known.add((path, key))
            original(module, key, value)

        return setting

    def _getting(self, kind: type[nn.Module], inside: Callable[[], bool]) -> Callable[..., Any]:
        original, paths, known, left, decided = kind.__getattribute__, self._paths, self._set, self._left, self.decided
        kinds = self._plain

        def getting(module: nn.Module, key: str) -> Any:
            value = original(module, key)
            if key in MACHINERY or (not left and (not kinds[type(value)] or inside())):
                return value
            if (path := paths.get(id(module))) is None:
                return value
            name = path, key
            if name in known:
                return value
            if name in left:
                self._read.add(name)
            if name not in decided and kinds[type(value)] and not inside() and _held_as_it_is(module, key):
                decided.add(name)
            return value

        return getting


class _Plain(dict[type, bool]):
    """Whether values of a type are plain, or objects with attributes; looking it up is far cheaper than isinstance."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, PLAIN) or (kind.__dictoffset__ != 0 and not issubclass(kind, UNLIKE))
        return self[kind]


def _held_as_it_is(module: nn.Module, key: str) -> bool:
    """Whether the key is an attribute of the module or of its class, and not a property."""
    return key in object.__getattribute__(module, "__dict__") or not isinstance(
        next((vars(kind)[key] for kind in type(module).__mro__ if key in vars(kind)), None),
        (property, FunctionType, staticmethod, classmethod),
    )


def attributes(modules: Mapping[str, nn.Module], leaf: Mapping[int, bool]) -> Attributes:
    """Return all modules of a model, with the attributes of those that are traced into. leaf: which are not, by id."""
    return {path: (module, None if leaf[id(module)] else _held(module)) for path, module in modules.items()}


def check_unchanged(model: nn.Module, before: Attributes, harmless: Collection[Name] = ()) -> None:
    """Raise ValueError, naming module and attribute, where a forward has set one to something else.

    The error is a `FirstCall` if only marks (None, a bool or a string) have changed, because a second forward sets them
    to the values that they have then. A number is not a mark, since it may depend on the size of the micro-batch. The
    error is also a `FirstCall` if a module has replaced another one.
    """
    modules = walked(model)
    exchanged = any(modules.get(path) is not module for path, (module, _) in before.items())
    found = [
        (path, key, vars(module).get(key))
        for path, (module, known) in before.items()
        if known is not None
        for now in [_held(module)]
        if not identical(now, known)
        for key in sorted({*known, *now})
        if not _same(known.get(key, NOWHERE), now.get(key, NOWHERE))
    ]
    for path, key, _ in found:
        if (path, key) in harmless:
            module, known = before[path]
            assert known is not None
            if key in known:
                vars(module)[key] = known[key]
            else:
                del vars(module)[key]
    found = [(path, key, value) for path, key, value in found if (path, key) not in harmless]
    if exchanged:
        raise FirstCall("a module of the model is another one after its forward")
    if not found:
        return
    path, key, _ = found[0]
    kind = type(model.get_submodule(path)).__name__
    name = f"{kind} {path!r}" if path else kind
    paths = list(dict.fromkeys(each for each, _, _ in found))
    whole = f"keep the module{'s' * (len(paths) > 1)} whole: stages=pipeback.Splitting(leaves={paths!r})"
    root = (
        "set it in a module whose path you give in stages=pipeback.Splitting(leaves=[...]), or keep the whole model "
        "one stage: stages=pipeback.Splitting(leaves=[''])"
    )
    cure = root if "" in paths else whole
    message = (
        f"{name} changes self.{key} in its forward, which stages would not do again for each micro-batch; "
        f"make it a buffer that is changed in place, or {cure}"
    )
    if all(isinstance(value, (type(None), bool, str)) for _, _, value in found):
        raise FirstCall(message)
    names = {(path, key) for path, key, _ in found}
    held = any(
        key in {**model.get_submodule(path)._parameters, **model.get_submodule(path)._buffers} for path, key in names
    )
    raise Changed(message, () if held else names)


def _held(module: nn.Module) -> dict[str, Any]:
    """Return the attributes, parameters and buffers of a module by their names."""
    return {**vars(module), **module._parameters, **module._buffers}


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:
        return False
