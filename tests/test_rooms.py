"""Imports point down: from room to room, and from file to file, typing imports included."""

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "pipeback"
FLOORS = [
    {"byte_sizes", "counts", "errors", "norms", "notebook", "plugins", "private", "weights", "schedules", "tensors"},
    {"methods", "optim", "sparsities", "splitting", "draw", "planner"},
    {"stages"},
    {"runtime"},
    {"streaming", "vectorized", "tensor_parallel"},
    {"distributed"},
    {"checkpoint", "plan"},
    {"pipeline"},
    {"lightning"},
]
FLOOR = {room: n for n, floor in enumerate(FLOORS) for room in floor}
ALONE = {  # what a room may import of pipeback, where that is less than all that lies below
    "byte_sizes": set(),
    "counts": set(),
    "errors": set(),
    "schedules": set(),
    "tensors": {"private"},
    "splitting": {"counts", "tensors", "notebook", "private"},
    "methods": {"schedules", "tensors", "plugins", "private"},
    "optim": {"tensors"},
    "sparsities": {"plugins"},
    "draw": {"counts", "schedules"},
    "planner": {"byte_sizes", "counts", "notebook", "schedules"},
    "stages": {"counts", "methods", "splitting", "tensors", "private"},
    "runtime": {"counts", "stages", "methods", "schedules", "tensors", "errors", "notebook", "private"},
    "streaming": {
        "runtime", "stages", "methods", "sparsities", "schedules", "tensors", "errors", "notebook", "private",
        "byte_sizes",
    },
    "vectorized": {"counts", "runtime", "stages", "methods", "splitting", "schedules", "tensors", "errors", "private"},
    "tensor_parallel": {"runtime", "stages", "optim", "schedules", "private"},
    "distributed": {
        "streaming", "tensor_parallel", "runtime", "stages", "methods", "sparsities", "splitting", "schedules",
        "tensors", "weights", "counts", "errors", "private",
    },
    "checkpoint": {
        "distributed", "streaming", "runtime", "stages", "methods", "schedules", "tensors", "counts", "errors",
    },
    "plan": {
        "distributed", "streaming", "runtime", "stages", "methods", "schedules", "tensors", "notebook", "private",
        "byte_sizes", "counts", "planner",
    },
}  # fmt: skip
STACKED = ("tracing", "steps", "buffers", "making", "stacks", "flushes", "ticks")  # the folders of vectorized/
INSIDE = {  # the same for a folder in a room, file by file where a room is not meant as a whole
    "distributed.health": {"counts", "distributed.health", "errors"},
    "distributed.transport": {"distributed.transport", "runtime.link", "tensors"},
    **{  # from the lowest to the highest
        f"vectorized.{folder}": {
            *(f"vectorized.{lower}" for lower in STACKED[: n + 1]),
            "counts",
            "errors",
            "methods",
            "private",
            "runtime",
            "schedules",
            "splitting",
            "stages",
            "tensors",
        }
        for n, folder in enumerate(STACKED)
    },
}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
    if (path.relative_to(ROOT).parts[0] if path.parent != ROOT else path.stem) in FLOOR
}


def imports(path):
    """The modules of pipeback that a file names anywhere, for type checkers or not."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name[9:] for alias in node.names if alias.name.startswith("pipeback."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pipeback":
            inside = node.module[9:]
            for name in ((inside + "." + alias.name).strip(".") for alias in node.names):
                yield name if name in FILES else inside


@cache
def below():
    """Parsed when a test asks: whoever collects tests parses nothing."""
    return {name: set(imports(path)) for name, path in FILES.items()}


@pytest.mark.parametrize("room", sorted(FLOOR))
def test_rooms_import_downwards(room):
    named = {(name, other) for name in FILES if name.partition(".")[0] == room for other in below()[name]}
    for name, other in sorted(named):
        there = other.partition(".")[0]
        allowed = there in ALONE.get(room, FLOOR) and (FLOOR[there] < FLOOR[room] or there == "private")
        assert there == room or allowed, f"{name} imports {other}, which is not in a room below {room}"


@pytest.mark.parametrize("folder", sorted(INSIDE))
def test_folders_in_rooms_import_what_they_say(folder):
    for name in (name for name in FILES if name.startswith(folder)):
        for other in below()[name]:
            assert any(f"{other}.".startswith(f"{allowed}.") for allowed in INSIDE[folder]), f"{name} imports {other}"


def test_the_strategy_alone_knows_several_devices():
    inside = "lightning.ranks"
    knowing = {n for n, named in below().items() if any(o.startswith(inside) for o in named) and inside not in n}
    assert knowing == {"lightning.strategy"}


def test_no_file_stands_in_a_circle():
    left = {name: {other for other in named if other in FILES and other != name} for name, named in below().items()}
    while ends := [name for name, named in left.items() if not named]:
        for name in ends:
            del left[name]
        left = {name: named.difference(ends) for name, named in left.items()}
    assert not left, f"these files import each other: {left}"


MOST = 400  # lines of a file
FACES = {"pipeback/pipeline/pipeline.py": 350, "pipeback/lightning/strategy.py": 350}  # what a user reads


def test_a_file_is_one_concept():
    """And has the length of one, tests and recipes included."""
    folder = ROOT.parent
    lines = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8").count("\n")
        for room in ("pipeback", "recipes", "tests")
        for path in (folder / room).rglob("*.py")
    }
    assert set(FACES) <= set(lines)
    long = {name: count for name, count in lines.items() if count > FACES.get(name, MOST)}
    assert not long, f"cut them by what they are about: {long}"


def test_every_room_says_what_it_is():
    for name, path in FILES.items():
        if path.stem == "__init__":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            told = [line for line in (ast.get_docstring(tree) or "").splitlines() if line]
            assert 2 <= len(told) <= 3, f"{name}: two or three lines say what the room is and what it imports"
            doors = [
                node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
            ]
            assert len(doors) == 1 or "." in name, f"{name}: a room has one __all__, its door"
            assert all(len(door.elts) <= 8 for door in doors), name


def test_a_class_name_means_one_thing():
    found = defaultdict(list)
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    assert not {name: files for name, files in found.items() if len(files) > 1}


def test_imports_for_type_checkers_alone_are_of_other_packages():
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                assert "pipeback" not in ast.unparse(node), name


PARTS = {
    "base",
    "answers",
    "momentum",
    "adam",
    "columns",
    "direction",
    "few_quotients",
    "gradients",
    "rates",
    "option_checks",
    "flushing",
}  # what methods share


@pytest.mark.parametrize("path", sorted((ROOT / "methods").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_a_method_knows_no_other(path):
    inside = {name for name in imports(path) if name.startswith("methods")}
    assert inside <= {f"methods.{name}" for name in PARTS - {path.stem}}
    if path.stem == "base":
        assert not inside


@pytest.mark.parametrize("path", sorted((ROOT / "sparsities").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_a_policy_knows_masks_and_numbers_alone(path):
    assert set(imports(path)) <= {f"sparsities.{name}" for name in ("base", "densities", "masks")}


def test_schedules_and_the_planner_run_without_torch():
    names = sorted(name for name in FILES if name.startswith(("schedules", "planner")))
    code = f"""
import importlib, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("there is no torch here")
sys.meta_path.insert(0, NoTorch())
import pipeback
for name in {names!r}:
    importlib.import_module("pipeback." + name)
assert pipeback.timeline.delays(pipeback.schedules.flowing(2), 3) == [4, 2, 0]
assert "Pipeline" in dir(pipeback) and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_core_needs_torch_alone():
    """And of torch not what takes seconds: its compilers."""
    others = ["matplotlib", "hydra", "omegaconf", "lightning", "wandb", "sklearn", "rich", "jinja2", "torchmetrics",
              "torch._dynamo", "torch._inductor", "torch.fx.experimental.proxy_tensor", "sympy", "triton"]  # fmt: skip
    code = f"""
import sys, torch
old = set(sys.modules)
import pipeback
pipeback.Pipeline, pipeback.methods.create("pb")
print(*set({others}) & (set(sys.modules) - old))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == ""
