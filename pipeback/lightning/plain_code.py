"""Plain code: whether a `training_step` does nothing but compute with its batch, by functions of torch, and log.

Of such code all that a call does can be known from the operators that it runs. Code is plain if each statement is an
assignment to a local name, an `if`, `for`, `with` or `return`, or a call; and if what it calls is

    a function of torch that has no effect beyond its result, or a method of a tensor
    a module of torch.nn, the trained model, self.log or self.log_dict
    a function, a method or the forward of a module of the user's, whose code is plain, too

What it reads of objects that stay, such as `self.weight_of_loss`, may change from batch to batch, so it is noted.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import operator
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeback.private import hook_tables
from pipeback.tensors.structures import PLAIN

Read = Callable[[], Any]  # -> a value that tells whether what is read has changed

STATEMENTS = (
    ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.If, ast.For, ast.With, ast.Pass, ast.Assert,
    ast.Continue, ast.Break,
)  # fmt: skip
EXPRESSIONS = (
    ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Dict, ast.BinOp, ast.UnaryOp,
    ast.BoolOp, ast.Compare, ast.IfExp, ast.JoinedStr, ast.FormattedValue, ast.Starred, ast.Slice, ast.Call,
    ast.ListComp, ast.GeneratorExp, ast.DictComp,
)  # fmt: skip
BUILTINS = {"len", "range", "zip", "enumerate", "reversed", "sum", "tuple", "list", "dict", "isinstance", "abs"}
CONTAINERS = {"items", "keys", "values", "get", "format", "join", "removeprefix", "removesuffix", "lower", "upper"}
NUMBERS_OUT = {"tolist", "numpy", "data_ptr", "storage", "untyped_storage", "dlpack"}  # unseen by who traces operators
LASTING = {"backward", "register_hook", "retain_grad", "share_memory_", "register_post_accumulate_grad_hook"}
METHODS = {name for name in dir(Tensor) if name[-1] != "_"} - NUMBERS_OUT - LASTING | CONTAINERS
# where functions of torch are made that have no effect beyond their result
TORCH = {
    "torch", "torch._VF", "torch.functional", "torch.nn.functional", "torch.special", "torch.linalg", "torch.fft",
    "torch._jit_internal", "torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft", "torch.nn._reduction", "torch._tensor",
}  # fmt: skip
CONTEXTS = (torch.no_grad, torch.enable_grad, torch.autocast)
SETS = ("set_", "use_", "manual_", "seed", "save", "load", "compile", "print", "init", "fork", "wait", "get_rng")
TRUSTED = {"torch", "lightning"}  # packages whose properties only look


class NotPlain(Exception):
    """This code may do more than compute; the message goes on after "it"."""


class PlainCode:
    """The code of a method `name` of `owner`. model: what it calls to go forward, whose own code is not looked at.

    Raises `NotPlain`.
    """

    def __init__(self, owner: nn.Module, name: str, model: nn.Module) -> None:
        self.model = model
        self._reads: dict[tuple[int, str], Read] = {}
        self._alive: list[Any] = []  # so that ids are not reused
        self._seen: set[tuple[Any, int]] = set()
        self.arguments: set[int] = set()  # those after the first that are read, by number
        self._owner, self._name = owner, name
        self.method(owner, name, owner, {})

    def reads(self) -> tuple[Any, ...]:
        """What it reads, as it is now. Raises `NotPlain` where that is something of another kind."""
        return tuple([read() for read in self._reads.values()])

    def note(self, root: int, path: str, read: Read) -> None:
        """It reads this."""
        self._reads.setdefault((root, path), read)

    def method(self, owner: Any, name: str, bound: Any, passed: dict[str, int]) -> None:
        """Look at the code of a method, which must be the one of its class."""
        self.note(id(owner), f"{name}()", lambda: _method(owner, name))
        self.function(_method(owner, name), bound, passed)

    def function(self, function: Any, bound: Any, passed: dict[str, int]) -> None:
        """Look at the code of a function of the user's. bound: its `self`; passed: which of its arguments are which
        arguments of the first function.
        """
        if not isinstance(function, types.FunctionType):
            raise NotPlain(f"calls {getattr(function, '__qualname__', function)}, which is no plain function")
        known = (function.__code__, id(bound), *passed.items())
        if known in self._seen:
            return
        self._seen.add(known)  # type: ignore[arg-type]
        self._alive += [bound]
        tree = _parsed(function)
        if tree.args.vararg or tree.args.kwarg or not all(map(_plain, function.__defaults__ or ())):
            raise NotPlain(f"calls {function.__qualname__}, whose arguments are not all plain")
        _Body(self, function, tree, bound, passed).look()

    def called(self, module: nn.Module, shown: str) -> None:
        """Look at a module that is called."""
        if module is self.model:
            return
        holds = any(m is self.model for m in module.modules())
        if not holds and any(p.requires_grad for p in module.parameters()):
            raise NotPlain(f"calls {shown}, which has weights to train")
        if type(module).__call__ is not nn.Module.__call__:
            raise NotPlain(f"calls {shown}, whose class is called in a way of its own")
        self._alive.append(module)
        if _of_torch_nn(module):
            self.note(id(module), "", lambda: _settings(module, self.model))
        else:
            self.note(id(module), "", lambda: _unheard(module))
            self.method(module, "forward", module, {})


class _Body(ast.NodeVisitor):
    """The body of one function."""

    def __init__(self, code: PlainCode, function: Any, tree: ast.FunctionDef, bound: Any, passed: dict[str, int]):
        self.code, self.function, self.tree, self.bound, self.passed = code, function, tree, bound, dict(passed)
        names = [arg.arg for arg in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
        self.me = names.pop(0) if bound is not None and names else None
        self.names = names
        stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.local = {*names, *stored}
        if self.me in stored:
            raise NotPlain(f"sets {self.me}")
        if bound is code._owner and function.__name__ == code._name:
            self.passed = {name: n for n, name in enumerate(names) if n}
        self.closed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def look(self) -> None:
        for statement in self.tree.body:
            self.visit(statement)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and not isinstance(node, STATEMENTS):
            raise NotPlain(f"has a statement that may do more than compute: {_shown(node)}")
        if isinstance(node, ast.expr) and not isinstance(node, EXPRESSIONS):
            raise NotPlain(f"has an expression that may do more than compute: {_shown(node)}")
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            raise NotPlain(f"sets {_shown(node)}")
        super().generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        for part in (node.target, node.value):
            if part is not None:
                self.visit(part)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        taken = self.decided(node.test)
        for statement in (*(node.body if taken is not False else ()), *(node.orelse if taken is not True else ())):
            self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        taken = self.decided(node.test)
        for part in (*([node.body] if taken is not False else ()), *([node.orelse] if taken is not True else ())):
            self.visit(part)

    def decided(self, test: ast.expr) -> bool | None:
        """Which way an `if` goes whose test is a value that stays, or its comparison with a constant; None: unknown."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            found = self.decided(test.operand)
            return None if found is None else not found
        against: tuple[Any, ...] = ()
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
            test, against = test.left, (type(test.ops[0]), test.comparators[0].value)
        known = self.resolved(test)
        if known is None or not _plain(known[0]):
            return None
        if not against:
            return bool(known[0])
        compare = _COMPARED.get(against[0])
        return None if compare is None else bool(compare(known[0], against[1]))

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            found = self.resolved(call.func) if isinstance(call, ast.Call) else None
            if found is None or found[0] not in CONTEXTS or not isinstance(call, ast.Call):
                raise NotPlain(f"enters the context {_shown(call)}")
            for part in (*call.args, *(k.value for k in call.keywords)):
                self.visit(part)
        for statement in node.body:
            self.visit(statement)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            return
        if node.id == self.me:
            raise NotPlain(f"hands on {self.me} itself")
        if node.id in self.local:
            if node.id in self.passed:
                self.code.arguments.add(self.passed[node.id])
            return
        self.value(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            raise NotPlain(f"sets {_shown(node)}")
        root = _root(node)
        if root is None or (root.id in self.local and root.id != self.me):
            self.visit(node.value)
        else:
            self.value(node)

    def visit_Call(self, node: ast.Call) -> None:
        found = self.resolved(node.func)
        handed = self.arguments(node) if found is not None and _of_user(found[0]) else {}
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            if not (isinstance(part, ast.Name) and part.id in handed):
                self.visit(part)
        if found is not None and not isinstance(getattr(found[0], "__self__", None), Tensor):
            self.callee(*found, node.func, {to: self.passed[name] for name, to in handed.items()})
        elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            self.visit(node.func.value)
        else:
            raise NotPlain(f"calls {_shown(node.func)}")

    def arguments(self, call: ast.Call) -> dict[str, str]:
        """Which names of arguments that are passed on become which of the called function."""
        found: Any = self.resolved(call.func)
        function = getattr(found[0], "__func__", found[0])
        names = [*inspect.signature(found[0]).parameters] if isinstance(function, types.FunctionType) else []
        by_place = [(part, name) for part, name in zip(call.args, names, strict=False)]
        by_name = [(keyword.value, keyword.arg) for keyword in call.keywords]
        handed = [(part.id, to) for part, to in (*by_place, *by_name) if isinstance(part, ast.Name) and to is not None]
        return {name: to for name, to in handed if name in self.passed}

    def callee(self, found: Any, owner: Any, node: ast.expr, passed: dict[str, int]) -> None:
        """Look at what is called. owner: the object that it was got from."""
        shown, name = _shown(node), getattr(node, "attr", "")
        if isinstance(found, nn.Module):
            self.code.called(found, shown)
        elif isinstance(owner, LightningModule) and name in ("log", "log_dict"):
            if getattr(type(owner), name) is not getattr(LightningModule, name):
                raise NotPlain(f"calls {shown}, which is the user's own")
        elif _harmless(found):
            return
        elif _of_user(found):
            bound = getattr(found, "__self__", None)
            self.code.function(getattr(found, "__func__", found), bound, passed)
        else:
            raise NotPlain(f"calls {shown}")

    def value(self, node: ast.expr) -> None:
        """It reads a value of an object that stays."""
        found = self.resolved(node)
        if found is None or not _readable(found[0]):
            raise NotPlain(f"reads {_shown(node)}")

    def resolved(self, node: ast.expr) -> tuple[Any, Any] | None:
        """What a name with attributes stands for, and the object that it was got from; None: it is known in a call
        only.
        """
        root, path = _root(node), list[str]()  # path: the attributes
        if root is None or (root.id in self.local and root.id != self.me):
            return None
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value

        def first() -> Any:
            if root.id == self.me:
                return self.bound
            if root.id in self.closed:
                return self.closed[root.id].cell_contents
            for where in (self.function.__globals__, vars(builtins)):
                if root.id in where:
                    return where[root.id]
            raise NotPlain(f"reads {root.id}, which is not there")

        def both() -> tuple[Any, Any]:
            found, owner = first(), None
            for name in path:
                found, owner = _attribute(found, name), found
            return found, owner

        self.code.note(id(self.bound if root.id == self.me else self.function), ".".join(path), lambda: _told(both()[0]))
        return both()


def _parsed(function: Any) -> ast.FunctionDef:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise NotPlain(f"calls {function.__qualname__}, whose source is not at hand") from error
    static = [d for d in getattr(tree, "decorator_list", []) if not (isinstance(d, ast.Name) and d.id == "staticmethod")]
    if not isinstance(tree, ast.FunctionDef) or static or hasattr(function, "__wrapped__"):
        raise NotPlain(f"calls {function.__qualname__}, which is not a plain function")
    return tree


def _root(node: ast.expr) -> ast.Name | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node if isinstance(node, ast.Name) else None


def _shown(node: ast.AST) -> str:
    text = ast.unparse(node).partition("\n")[0]
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"


def _attribute(owner: Any, name: str) -> Any:
    """Get an attribute without running code of the user's."""
    kind = type(owner)
    for one in kind.__mro__:
        own = vars(one)
        asks = own.get("__getattr__"), own.get("__getattribute__")
        if any(asks) and one is not object and not _trusted(one) and not _simple(owner):
            raise NotPlain(f"reads attributes of a {kind.__name__}, which makes them")
        if name in own and hasattr(type(own[name]), "__get__") and not isinstance(own[name], _CODE):
            if not _trusted(one) and not _simple(owner):
                raise NotPlain(f"reads {name}, a property of {kind.__name__}")
            break
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise NotPlain(f"reads {name}, which is not there") from error


_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_CODE = types.FunctionType, staticmethod, classmethod


def _simple(owner: Any) -> bool:
    """Whether reading attributes of this runs no code of a user's: a tuple with names, or a module."""
    return isinstance(owner, types.ModuleType) or (isinstance(owner, tuple) and hasattr(owner, "_fields"))


def _plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, (tuple, list)) and all(map(_plain, value)))


def _readable(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and not value.requires_grad
    return _plain(value) or isinstance(value, type)


def _told(value: Any) -> Any:
    """What differs if another value is read."""
    if _plain(value):
        return tuple(value) if isinstance(value, list) else value
    if isinstance(value, Tensor):
        return id(value), value._version, value.shape, value.dtype, value.device, value.requires_grad
    return getattr(value, "__func__", value)  # a method is made anew each time


def _method(owner: Any, name: str) -> Any:
    if name in vars(owner):
        raise NotPlain(f"calls {name}, which was set on an object")
    return inspect.getattr_static(type(owner), name)


def _unheard(module: nn.Module) -> nn.Module:
    """Raise `NotPlain` if someone listens to a module."""
    if any(hook_tables(module)):
        raise NotPlain(f"calls a {type(module).__name__} with hooks")
    return module


def _settings(module: nn.Module, model: nn.Module) -> tuple[Any, ...]:
    """The numbers and tensors that a module of torch.nn has, but for those of the model."""
    if module is model:
        return ()
    _method(module, "forward")
    own = [(name, _told(value)) for name, value in vars(module).items() if name[0] != "_"]
    tensors = [_told(t) for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    children = [_settings(m, model) for m in module._modules.values() if m is not None]
    return _unheard(module), tuple(own), tuple(tensors), tuple(children)


def _of_torch_nn(module: nn.Module) -> bool:
    return all(type(m).__module__.startswith("torch.nn.modules.") for m in module.modules())


def _trusted(made: Any) -> bool:
    return str(made.__module__).partition(".")[0] in TRUSTED


def _of_user(found: Any) -> bool:
    """Whether this is a function or a method whose code may be looked at."""
    function = getattr(found, "__func__", found)
    return isinstance(function, types.FunctionType) and not _trusted(function)


def _harmless(found: Any) -> bool:
    """Whether a function has no effect beyond its result."""
    name, where = getattr(found, "__name__", ""), getattr(found, "__module__", None)
    if where == "builtins":
        return found is getattr(builtins, name, None) and name in BUILTINS
    if found is getattr(math, name, None):
        return True
    if isinstance(found, type) or name.startswith(SETS) or name.endswith("_"):
        return False
    return where in TORCH or found is getattr(torch, name, None) and where is None

