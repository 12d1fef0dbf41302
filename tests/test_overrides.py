"""A class is abstract or final: none overrides a method that a base of the library has implemented.

A subclass implements what its base leaves open: abstract methods, and hooks, whose body is a docstring. What differs
otherwise is composed.
"""

import ast

import pytest

from tests.test_rooms import FILES

OPEN = {  # bases whose methods a subclass may override, and why
    "methods.base.Method": "users write methods; every hook has the default of plain SGD",
    "sparsities.base.Sparsity": "users write policies; every hook has the default of masks that never change",
}
CONSTRUCTORS = {"__init__", "__post_init__", "__new__", "__init_subclass__"}


def read(texts):
    """(its classes, what it imports of the library) of each module, both by name."""
    modules = {}
    for name, text in texts.items():
        nodes = list(ast.walk(ast.parse(text)))
        imported = {
            alias.asname or alias.name: (node.module[9:], alias.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pipeback"
            for alias in node.names
        }
        modules[name] = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}, imported
    return modules


def home(modules, module, name):
    """(module, name) of the class of the library that `name` is in a module, through imports and doors; else None."""
    classes, imported = modules.get(module, ({}, {}))
    if name in classes:
        return module, name
    first, _, rest = name.partition(".")
    if first not in imported:
        return None
    there, what = imported[first]
    return home(modules, f"{there}.{what}".strip("."), rest) if rest else home(modules, there, what)


def bases(modules, module, name):
    """All bases of a class that are the library's, the bases of bases included."""
    for base in modules[module][0][name].bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        found = home(modules, module, ast.unparse(base))
        if found is not None:
            yield found
            yield from bases(modules, *found)


def members(body):
    """The names that a class defines, with the function of each, or None."""
    for node in body.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            yield from ((target.id, None) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, None


def implemented(function):
    """Whether a function is more than an abstract method or a hook."""
    if any(ast.unparse(decorator).endswith("abstractmethod") for decorator in function.decorator_list):
        return False
    return not all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node))
        for node in function.body
    )


def overridden(modules):
    """Every (class, method, base) where the class overrides what the base has implemented."""
    for module, (classes, _) in modules.items():
        for name, body in classes.items():
            own = {member for member, _ in members(body)} - CONSTRUCTORS
            for base in bases(modules, module, name):
                for member, function in members(modules[base[0]][0][base[1]]):
                    if member in own and function is not None and implemented(function):
                        yield f"{module}.{name}", member, ".".join(base)


@pytest.fixture(scope="module")
def modules():
    return read({name: path.read_text(encoding="utf-8") for name, path in FILES.items()})


def test_no_class_overrides_what_is_implemented(modules):
    found = [
        f"{name}.{method} overrides the one of {base}; compose, or leave the method of {base} abstract"
        for name, method, base in overridden(modules)
        if base not in OPEN
    ]
    assert not found, "\n".join(found)


def test_every_open_base_is_there_and_used(modules):
    assert {base for *_, base in overridden(modules)} >= set(OPEN)


BASE = """
from abc import ABC, abstractmethod
class Base(ABC):
    def __init__(self): self.x = 1
    @abstractmethod
    def ask(self): return 1
    def hook(self):
        '''Called.'''
    def later(self): raise NotImplementedError
    def stub(self): ...
    @property
    def ready(self): return True
    def work(self): return self.ask()
"""


@pytest.mark.parametrize("line, base", [
    ("from pipeback.a import Base", "Base"), ("from pipeback.a import Base as B", "B[int]"),
    ("from pipeback import a", "a.Base"), ("from pipeback.door import Base", "Base"),
    ("from pipeback.a import Base\nclass Middle(Base): pass", "Middle"),
])  # fmt: skip
@pytest.mark.parametrize("member, seen", [
    ("def work(self): return 2", True), ("async def work(self): pass", True), ("work = None", True),
    ("def ready(self): return False", True), ("ready: bool = False", True), ("ready: bool", False),
    ("def ask(self): return 2", False), ("def hook(self): return 2", False), ("def later(self): return 2", False),
    ("def stub(self): return 2", False), ("def other(self): return 2", False), ("def __init__(self): pass", False),
])  # fmt: skip
def test_an_override_is_seen(line, base, member, seen):
    door = "from pipeback.a import Base"
    found = list(overridden(read({"a": BASE, "door": door, "b": f"{line}\nclass Sub({base}):\n    {member}\n"})))
    assert [name for name, *_ in found] == (["b.Sub"] if seen else [])
