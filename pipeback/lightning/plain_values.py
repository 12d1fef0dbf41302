"""Plain values: what plain code may read and call, of the objects that stay from call to call."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import types
from typing import Any

from torch import Tensor, nn

from pipeback.private import hook_tables
from pipeback.tensors.structures import PLAIN

BUILTINS = {"len", "range", "zip", "enumerate", "reversed", "sum", "tuple", "list", "dict", "isinstance", "abs"}
# where functions of torch are made that have no effect beyond their result
TORCH = {
    "torch", "torch._VF", "torch.functional", "torch.nn.functional", "torch.special", "torch.linalg", "torch.fft",
    "torch._jit_internal", "torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft", "torch._tensor",
}  # fmt: skip
NUMBERS = {"ctc_loss", "tensor_split"}  # take the numbers of tensors where nobody sees it who traces operators
SETS = ("set_", "use_", "manual_", "seed", "save", "load", "compile", "print", "init", "fork", "wait", "get_rng")
TRUSTED = {
    "torch",
    "lightning",
    "omegaconf",
    "builtins",
    "collections",
    "transformers",
}  # packages whose properties only look
FUNCTIONS = types.FunctionType, staticmethod, classmethod


class NotPlain(Exception):
    """This code may do more than compute; the message goes on after "it"."""


def attribute(owner: Any, name: str) -> Any:
    """Get an attribute without running code of the user's."""
    kind = type(owner)
    for one in kind.__mro__:
        own = vars(one)
        asks = own.get("__getattr__"), own.get("__getattribute__")
        if any(asks) and one is not object and not trusted(one) and not _simple(owner):
            raise NotPlain(f"reads attributes of a {kind.__name__}, which makes them")
        if name in own and hasattr(type(own[name]), "__get__") and not isinstance(own[name], FUNCTIONS):
            if not trusted(one) and not _simple(owner):
                raise NotPlain(f"reads {name}, a property of {kind.__name__}")
            break
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise NotPlain(f"reads {name}, which is not there") from error


def _simple(owner: Any) -> bool:
    """Whether reading attributes of this runs no code of a user's: a tuple with names, or a module."""
    return isinstance(owner, types.ModuleType) or (isinstance(owner, tuple) and hasattr(owner, "_fields"))


def plain(value: Any) -> bool:
    """Whether a value is a number, a text and the like, or a tuple of such."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(plain, value)))


def entry(owner: Any, key: Any) -> Any:
    """Get an item without running code of the user's."""
    if not _simple(owner) and type(owner) not in (list, tuple, dict) and not trusted(type(owner)):
        raise NotPlain(f"reads an item of a {type(owner).__name__}")
    try:
        return owner[key]
    except LookupError as error:
        raise NotPlain(f"reads the item {key!r}, which is not there") from error


def readable(value: Any) -> bool:
    """Whether plain code may read a value: one that nobody changes but by giving it another `told`."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and not value.requires_grad
    if type(value) in (list, tuple) or table(value):
        return all(map(readable, value.values() if isinstance(value, dict) else value))
    return plain(value) or isinstance(value, type)


def told(value: Any) -> Any:
    """What differs if another value is read."""
    if isinstance(value, Tensor):
        return id(value), value._version, value.shape, value.dtype, value.device, value.requires_grad
    if type(value) in (list, tuple):
        return type(value), *map(told, value)
    if table(value):
        return type(value), *value, *map(told, value.values())
    if isinstance(value, functools.partial):
        return told(value.func), told(value.args), told(value.keywords)
    if isinstance(value, (int, float, complex)):
        return type(value), repr(
            value
        )  # 1 and True are equal, and so are 0.0 and -0.0, but they compute something else
    return getattr(value, "__func__", value)  # a method is made anew each time


def table(value: Any) -> bool:
    """Whether a value is a dictionary without code of the user's."""
    return isinstance(value, dict) and (type(value) is dict or trusted(type(value)))


def method(owner: Any, name: str) -> Any:
    """Return a method as the class of an object has it."""
    if name in vars(owner):
        raise NotPlain(f"calls {name}, which was set on an object")
    return inspect.getattr_static(type(owner), name)


def unheard(module: nn.Module) -> nn.Module:
    """Return a module to which nobody listens."""
    if any(hook_tables(module)):
        raise NotPlain(f"calls a {type(module).__name__} with hooks")
    return module


def settings(module: nn.Module, model: nn.Module) -> tuple[Any, ...]:
    """The numbers and tensors that a module of torch.nn has, but for those of the model."""
    if module is model:
        return ()
    method(module, "forward")
    own = [(name, told(value)) for name, value in vars(module).items() if name[0] != "_"]
    tensors = [told(t) for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    children = [settings(m, model) for m in module._modules.values() if m is not None]
    return unheard(module), tuple(own), tuple(tensors), tuple(children)


def of_torch_nn(module: nn.Module) -> bool:
    """Whether a module and all in it are of torch.nn, and take no numbers of tensors (see `NUMBERS`)."""
    some = [type(m) for m in module.modules()]
    return nn.CTCLoss not in some and all(kind.__module__.startswith("torch.nn.modules.") for kind in some)


def trusted(made: Any) -> bool:
    """Whether a class or a function is of one of the packages that are trusted."""
    return str(made.__module__).partition(".")[0] in TRUSTED


def of_user(found: Any) -> bool:
    """Whether this is a function or a method whose code may be looked at."""
    function = getattr(found, "__func__", found)
    return isinstance(function, types.FunctionType) and not trusted(function)


def harmless(found: Any) -> bool:
    """Whether a function has no effect beyond its result."""
    name, where = getattr(found, "__name__", ""), getattr(found, "__module__", None)
    if where == "builtins":
        return found is getattr(builtins, name, None) and name in BUILTINS
    if found is getattr(math, name, None):
        return True
    if isinstance(found, type) or name.startswith(SETS) or name.endswith("_") or name in NUMBERS:
        return False
    return where in TORCH
