"""What a forward leaves behind in its modules: attributes that stages would not set again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import BuiltinFunctionType, FunctionType
from typing import Any, ParamSpec, TypeVar

from torch import nn

Name = tuple[str, str]  # of an attribute: the path of its module, and its own
Attributes = Mapping[str, tuple[nn.Module, Mapping[str, Any] | None]]  # every module by its path; None of leaves
NOWHERE = object()
MACHINERY = set(vars(nn.Module())) - {"training"} | set(vars(nn.Module)) | {"__class__"}  # what torch reads
PLAIN = bool, int, float, complex, str, type(None), tuple, list, dict, FunctionType, BuiltinFunctionType
P = ParamSpec("P")
R = TypeVar("R")


class FirstCall(ValueError):
    """A forward has set marks, as one does that installs something when it is first called."""


class Changed(ValueError):
    """A forward has set these attributes to something else."""

    def __init__(self, message: str, names: Collection[Name]) -> None:
        super().__init__(message)
        self.names = names


def again(follow: Callable[P, R]) -> Callable[P, R]:
    """Follow once more where the first call has installed something in the model, or has set attributes."""

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
            except ValueError as error:  # what is set there may be what it stumbles over
                raise (first if first is not None and type(error) is ValueError else error) from None
        raise AssertionError

    return followed


class Sets:
    """What a forward sets. left: attributes of which it is asked whether it reads them before it has set them.

    paths: of the modules, by their identity.
    """

    def __init__(self, paths: Mapping[int, str], left: Collection[Name]) -> None:
        self._paths, self._left = paths, left
        self._set: set[Name] = set()
        self._read: set[Name] = set()
        self.decided: set[Name] = set()  # plain ones that were read as they were before, outside of leaves

    @property
    def held(self) -> set[Name]:
        """Plain attributes that a forward has gone by and not set itself."""
        return self.decided - self._set

    @property
    def harmless(self) -> set[Name]:
        """Those that nobody reads before they are set: a forward does the same whatever they were."""
        return set(self._left) - self._read

    @contextmanager
    def heard(self, told: Callable[[nn.Module, str], None], inside: Callable[[], bool]) -> Iterator[None]:
        """Meanwhile it is told of everything that is set. inside: whether a leaf is running, or another thread."""
        original = nn.Module.__setattr__
        paths, own = self._paths, object.__getattribute__

        def setting(module: nn.Module, key: str, value: Any) -> None:
            if (path := self._paths.get(id(module))) is not None:
                told(module, key)
                self._set.add((path, key))
            original(module, key, value)

        def getting(module: nn.Module, key: str) -> Any:
            value = own(module, key)
            if key in MACHINERY or (path := paths.get(id(module))) is None or (path, key) in self._set:
                return value
            if (path, key) in self._left:
                self._read.add((path, key))
            plain = isinstance(value, PLAIN)
            if plain and (path, key) not in self.decided and not inside() and _held_as_it_is(module, key):
                self.decided.add((path, key))
            return value

        with ExitStack() as stack:
            stack.callback(setattr, nn.Module, "__setattr__", original)
            nn.Module.__setattr__ = setting  # type: ignore[method-assign, assignment]
            stack.callback(delattr, nn.Module, "__getattribute__")
            nn.Module.__getattribute__ = getting  # type: ignore[method-assign, assignment]
            yield


def _held_as_it_is(module: nn.Module, key: str) -> bool:
    """Whether it is an attribute, of the module or of its class; what a property gives is none."""
    return key in object.__getattribute__(module, "__dict__") or not isinstance(
        next((vars(kind)[key] for kind in type(module).__mro__ if key in vars(kind)), None),
        (property, FunctionType, staticmethod, classmethod),
    )


def attributes(model: nn.Module, leaves: Callable[[str, nn.Module], bool]) -> Attributes:
    """All modules, and the attributes of those that are looked into."""
    return {path: (module, None if leaves(path, module) else _held(module)) for path, module in model.named_modules()}


def check_unchanged(model: nn.Module, before: Attributes, harmless: Collection[Name] = ()) -> None:
    """Raise ValueError, naming module and attribute, where a forward has set one to something else.

    It is a `FirstCall` where all that has changed is a mark (None, a bool or a string): a second forward sets it to
    what it is already. A number is none: it may go by the size of the micro-batch. It is one, too, where a module has
    taken the place of another.
    """
    modules = dict(model.named_modules())
    exchanged = any(modules.get(path) is not module for path, (module, _) in before.items())
    found = [
        (path, key, vars(module).get(key))
        for path, (module, known) in before.items()
        if known is not None
        for now in [_held(module)]
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
    whole = f"keep the module{'s' * (len(paths) > 1)} whole: leaves={paths!r}"
    root = "set it in a module whose path you give in leaves=, or keep the whole model one stage: leaves=['']"
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
    """Attributes, parameters and buffers."""
    return {**vars(module), **module._parameters, **module._buffers}


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:
        return False
