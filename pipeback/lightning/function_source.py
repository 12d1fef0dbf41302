"""Function source: a function as a syntax tree, if that is what it was made of."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
import types
from typing import Any

from pipeback.lightning.plain_values import NotPlain

_AROUND = {"PUSH_NULL", "RESUME", "COPY_FREE_VARS", "PRECALL", "NOP"}


def stored_names(tree: ast.AST) -> set[str]:
    """The names that are set in a tree, but for those of a comprehension, whose scope is its own."""
    if isinstance(tree, (ast.ListComp, ast.GeneratorExp, ast.DictComp)):
        return set()
    if isinstance(tree, ast.Name):
        return {tree.id} if isinstance(tree.ctx, ast.Store) else set()
    return {name for part in ast.iter_child_nodes(tree) for name in stored_names(part)}


def source(function: Any) -> ast.FunctionDef:
    """The source of a function, as a tree. Raises `NotPlain` where it is not at hand, or no longer what it does."""
    name = function.__qualname__
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise NotPlain(f"calls {name}, whose source is not at hand") from error
    decorators = [ast.unparse(each) for each in getattr(tree, "decorator_list", [])]
    if not isinstance(tree, ast.FunctionDef) or {*decorators} - {"staticmethod"} or hasattr(function, "__wrapped__"):
        raise NotPlain(f"calls {name}, which is not a plain function")
    if not _made_of(function.__code__, tree):
        raise NotPlain(f"calls {name}, whose source is another one by now")
    return tree


def _made_of(code: types.CodeType, tree: ast.FunctionDef) -> bool:
    """Whether a function was made of this source, which may have been edited since."""
    module = compile(ast.Module([tree], []), code.co_filename, "exec")
    found = next(c for c in module.co_consts if isinstance(c, types.CodeType) and c.co_name == code.co_name)
    return _does(code) == _does(found)


def _does(code: types.CodeType) -> list[str]:
    """What a function does, but for how it gets at what lies around it, which is not in its own source."""
    every = [i for i in dis.get_instructions(code) if i.opname not in _AROUND]
    some = [i for i in every if not isinstance(i.argval, types.CodeType)]
    shown = [i.argrepr.rpartition(" + ")[2] for i in some]
    inside = [what for i in every if isinstance(i.argval, types.CodeType) for what in _does(i.argval)]
    mine = [i.opname if not text or text.startswith("to ") else text for i, text in zip(some, shown, strict=True)]
    return mine + inside
