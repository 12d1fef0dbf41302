"""What a forward leaves behind in its modules: attributes that stages would not set again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

Attributes = Mapping[str, tuple[nn.Module, Mapping[str, Any] | None]]  # every module by its path; None of leaves
NOWHERE = object()
P = ParamSpec("P")
R = TypeVar("R")


class FirstCall(ValueError):
    """A forward has set marks, as one does that installs something when it is first called."""


def twice(follow: Callable[P, R]) -> Callable[P, R]:
    """Follow once more where the first call has installed something."""

    @wraps(follow)
    def followed(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return follow(*args, **kwargs)
        except FirstCall:
            return follow(*args, **kwargs)

    return followed


def attributes(model: nn.Module, leaves: Callable[[str, nn.Module], bool]) -> Attributes:
    """All modules, and the attributes of those that are looked into."""
    return {
        path: (module, None if leaves(path, module) else dict(vars(module))) for path, module in model.named_modules()
    }


def check_unchanged(model: nn.Module, before: Attributes) -> None:
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
        for key in sorted({*known, *vars(module)})
        if not _same(known.get(key, NOWHERE), vars(module).get(key, NOWHERE))
    ]
    if exchanged:
        raise FirstCall("a module of the model is another one after its forward")
    if not found:
        return
    path, key, _ = found[0]
    kind = type(model.get_submodule(path)).__name__
    error = FirstCall if all(isinstance(value, (type(None), bool, str)) for _, _, value in found) else ValueError
    name = f"{kind} {path!r}" if path else kind
    cure = f"keep the module whole: leaves=[{path!r}]" if path else "set it in a module whose path you give in leaves="
    raise error(
        f"{name} changes self.{key} in its forward, which stages would not do again for each micro-batch; "
        f"make it a buffer that is changed in place, or {cure}"
    )


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:
        return False
