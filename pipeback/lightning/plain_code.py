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
import functools
import operator
import types
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeback.lightning.function_source import source, stored_names
from pipeback.lightning.plain_values import (
    NUMBERS,
    NotPlain,
    attribute,
    entry,
    harmless,
    method,
    of_torch_nn,
    of_user,
    plain,
    readable,
    settings,
    table,
    told,
    trusted,
    unheard,
)  # fmt: skip
from pipeback.tensors.structures import holds_tensor

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
CONTAINERS = {"items", "keys", "values", "get", "format", "join", "removeprefix", "removesuffix", "lower", "upper"}
NUMBERS_OUT = {"tolist", "numpy", "data_ptr", "storage", "untyped_storage", *NUMBERS}  # unseen by who traces operators
MAKERS = {"tensor", "as_tensor", "asarray", "new_tensor", "new", "sparse_coo_tensor"}  # take such, if there are some
LASTING = {"backward", "register_hook", "retain_grad", "share_memory_", "register_post_accumulate_grad_hook"}
METHODS = {name for name in dir(Tensor) if name[-1] != "_"} - NUMBERS_OUT - LASTING | CONTAINERS
CONTEXTS = (torch.no_grad, torch.enable_grad, torch.autocast)
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


class PlainCode:
    """The code of a method `name` of `owner`. model: what it calls to go forward, whose own code is not looked at.

    Raises `NotPlain`.
    """

    def __init__(self, owner: nn.Module, name: str, model: nn.Module) -> None:
        self.model = model
        self._reads: dict[tuple[int, str], Read] = {}
        self._alive: list[Any] = []  # so that ids are not reused
        self._seen: set[tuple[Any, ...]] = set()
        self.arguments: set[int] = set()  # those after the first that are read, by number
        self.method(owner, name, None)

    def reads(self) -> tuple[Any, ...]:
        """What it reads, as it is now. Raises `NotPlain` where that is something of another kind."""
        return tuple([(where, read()) for where, read in self._reads.items()])

    def note(self, root: int, path: str, read: Read) -> None:
        """It reads this."""
        self._reads.setdefault((root, path), read)

    def method(self, owner: Any, name: str, passed: dict[str, int] | None) -> None:
        """Look at the code of a method. passed: as of `function`."""
        self.note(id(owner), f"{name}()", lambda: method(owner, name))
        self.function(method(owner, name), owner, passed)

    def function(self, function: Any, bound: Any, passed: dict[str, int] | None) -> None:
        """Look at the code of a function of the user's. bound: its `self`; passed: which of its arguments are which
        arguments of the first function; None: it is the first.
        """
        if not isinstance(function, types.FunctionType) or trusted(function):
            raise NotPlain(f"calls {getattr(function, '__qualname__', function)}, which is no plain function")
        known = id(function), id(bound), *({} if passed is None else passed).items()
        if known in self._seen:
            return
        self._seen.add(known)
        self._alive += [function, bound]
        tree = source(function)
        defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
        if tree.args.vararg or tree.args.kwarg or not all(map(plain, defaults)):
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
        if of_torch_nn(module):
            self.note(id(module), "", lambda: settings(module, self.model))
        else:
            self.note(id(module), "", lambda: unheard(module))
            self.method(module, "forward", {})


class _Body(ast.NodeVisitor):
    """The body of one function."""

    def __init__(
        self, code: PlainCode, function: Any, tree: ast.FunctionDef, bound: Any, passed: dict[str, int] | None
    ) -> None:
        self.code, self.function, self.tree, self.bound = code, function, tree, bound
        names = [arg.arg for arg in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
        self.me = names.pop(0) if bound is not None and names else None
        self.passed = {name: n for n, name in enumerate(names) if n} if passed is None else passed
        stored = stored_names(tree)
        if self.me in stored:
            raise NotPlain(f"sets {self.me}")
        self.local = {*names, *stored}
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
        compare: Callable[[Any], Any] | None = bool
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
            does, constant = _COMPARED.get(type(test.ops[0])), test.comparators[0].value
            compare = None if does is None else lambda value: does(value, constant)
            test = test.left
        known = self.resolved(test)
        return None if known is None or compare is None or not plain(known[0]) else bool(compare(known[0]))

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            found = self.resolved(call.func) if isinstance(call, ast.Call) else None
            if found is None or found[0] not in CONTEXTS or not isinstance(call, ast.Call):
                raise NotPlain(f"enters the context {_shown(call)}")
            for part in (*call.args, *(k.value for k in call.keywords), item.optional_vars):
                if part is not None:
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
        self.read(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            raise NotPlain(f"sets {_shown(node)}")
        self.read(node)

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.DictComp) -> None:
        """Its variables are its own."""
        around, own = self.local, set().union(*(stored_names(each.target) for each in node.generators))
        if self.me in own:
            raise NotPlain(f"sets {self.me}")
        self.visit(node.generators[0].iter)
        self.local = around | own
        self.generic_visit(node)
        self.local = around

    visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Compare(self, node: ast.Compare) -> None:
        to_none = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
        of_objects = any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops) and not to_none
        if of_objects and self.resolved(node.left) is None:
            raise NotPlain(f"asks what is which object: {_shown(node)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        found = self.resolved(node.func)
        handed = self.handed(node, found[0]) if found is not None and of_user(found[0]) else {}
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            if part not in handed:
                self.visit(part)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in MAKERS and not all(map(self.literal, node.args[:1])):
            raise NotPlain(f"calls {_shown(node.func)}, which takes numbers out of tensors")
        if found is not None and not isinstance(getattr(found[0], "__self__", None), Tensor):
            self.callee(*found, node.func, {to: self.passed[part.id] for part, to in handed.items()})
        elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            self.visit(node.func.value)
        else:
            raise NotPlain(f"calls {_shown(node.func)}")

    def literal(self, node: ast.expr) -> bool:
        """Whether an expression is made of numbers that are written there, or that stay."""
        if isinstance(node, (ast.List, ast.Tuple)):
            return all(map(self.literal, node.elts))
        if isinstance(node, ast.UnaryOp):
            return self.literal(node.operand)
        found = self.resolved(node)
        return isinstance(node, ast.Constant) or (
            found is not None and readable(found[0]) and not holds_tensor(found[0])
        )

    def handed(self, call: ast.Call, function: Any) -> dict[ast.Name, str]:
        """Which arguments of the first function are handed on to a function of the user's, and as which of its own."""
        names = [] if any(isinstance(part, ast.Starred) for part in call.args) else [*signature(function).parameters]
        pairs = [*zip(call.args, names, strict=False), *((k.value, k.arg) for k in call.keywords)]
        return {
            part: to for part, to in pairs if isinstance(part, ast.Name) and part.id in self.passed and to is not None
        }

    def callee(self, found: Any, owner: Any, node: ast.expr, passed: dict[str, int]) -> None:
        """Look at what is called. owner: the object that it was got from."""
        shown, name = _shown(node), getattr(node, "attr", "")
        if isinstance(found, nn.Module):
            self.code.called(found, shown)
        elif isinstance(owner, LightningModule) and name in ("log", "log_dict"):
            if getattr(type(owner), name) is not getattr(LightningModule, name):
                raise NotPlain(f"calls {shown}, which is the user's own")
        elif isinstance(found, functools.partial):
            if not readable(found.args) or not readable(found.keywords):
                raise NotPlain(f"calls {shown}, which holds more than numbers and tensors")
            self.callee(found.func, None, node, {})
        elif table(owner) and name in CONTAINERS and readable(owner):
            self.code.note(id(owner), "", lambda: told(owner))
        elif harmless(found):
            return
        elif of_user(found):
            bound = getattr(found, "__self__", None)
            self.code.function(getattr(found, "__func__", found), bound, passed)
        else:
            raise NotPlain(f"calls {shown}")

    def read(self, node: ast.Attribute | ast.Subscript) -> None:
        """It reads an attribute or an item."""
        if self.resolved(node) is None:
            super().generic_visit(node)
        else:
            self.value(node)

    def value(self, node: ast.expr) -> None:
        """It reads a value of an object that stays."""
        found = self.resolved(node)
        if found is None or not readable(found[0]):
            raise NotPlain(f"reads {_shown(node)}")

    def resolved(self, node: ast.expr) -> tuple[Any, Any] | None:
        """What a name with attributes and items stands for, and the object that it was got from; None: it is known in
        a call only, or it is of a tensor.
        """
        path = _path(node)
        if path is None or (path[0].id in self.local and path[0].id != self.me):
            return None
        root, steps = path

        def along() -> list[Any] | None:
            found = [self.there(root.id)]
            for get, name in steps:
                if isinstance(found[-1], Tensor):
                    return None
                found.append(get(found[-1], name))
            return found

        some = along()
        if some is None:
            return None
        mine, shown = self.bound if root.id == self.me else self.function, ast.unparse(node)
        text = shown[len(root.id) :] if mine is self.bound else shown
        self.code.note(id(mine), text, lambda: told((along() or [None])[-1]))
        return some[-1], some[-2] if steps else None

    def there(self, name: str) -> Any:
        """What a name stands for that is not set in the function."""
        if name == self.me:
            return self.bound
        if name in self.closed:
            return self.closed[name].cell_contents
        for where in (self.function.__globals__, vars(builtins)):
            if name in where:
                return where[name]
        raise NotPlain(f"reads {name}, which is not there")


def _path(node: ast.AST) -> tuple[ast.Name, list[tuple[Callable[[Any, Any], Any], Any]]] | None:
    """The name that attributes and items with constant keys are got from, and how; None: this is something else."""
    steps: list[tuple[Callable[[Any, Any], Any], Any]] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute):
            steps.append((attribute, node.attr))
        elif isinstance(node.slice, ast.Constant):
            steps.append((entry, node.slice.value))
        else:
            return None
        node = node.value
    return (node, steps[::-1]) if isinstance(node, ast.Name) else None


def _shown(node: ast.AST) -> str:
    text = ast.unparse(node).partition("\n")[0]
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"
