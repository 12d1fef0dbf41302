"""Only a stage writes its attributes, and those of what it consists of; others call a method that says what happens."""

import ast
from pathlib import Path

import pytest

import pipeback

ROOT = Path(pipeback.__file__).parent
PARTS = {  # the classes that a stage consists of, and where a stage has them
    "stage": ("Stage", None), "home": ("Home", "home"), "masters": ("Masters", "masters"),
    "versions": ("Versions", "versions"), "gradients": ("Gradients", "gradients"),
    "random_stream": ("StageStream", "random"), "learnt": ("Learnt", "learnt"),
}  # fmt: skip
STAGES = {"stage", "stages", "first", "last", "s", "one", "some", "mine", "end", "each"}  # what stages are called
MOST = 25  # attributes of a stage


def attributes(name):
    """What the class assigns to itself."""
    tree = ast.parse((ROOT / "stages" / f"{name}.py").read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == PARTS[name][0])
    found = {target.attr for target in targets(body) if ast.unparse(target.value) == "self"}
    return found | {node.target.id for node in body.body if isinstance(node, ast.AnnAssign)}


def targets(tree):
    """The attributes that are assigned, added to or deleted anywhere in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node


def written(text, own):
    """Lines at which `text` assigns an attribute of a stage, or of a part of one."""
    for target in targets(ast.parse(text)):
        *_, holder = ast.unparse(target.value).split(".")
        word = holder.split("[")[0].strip("_")
        part = next((name for name, (_, at) in PARTS.items() if at == word), None)
        if (word in STAGES and target.attr in own["stage"]) or (part and target.attr in own[part]):
            yield target.lineno


@pytest.fixture(scope="module")
def own():
    return {name: attributes(name) for name in PARTS}


def test_a_stage_has_few_attributes(own):
    assert len(own["stage"]) <= MOST, sorted(own["stage"])


def test_only_a_stage_writes_what_it_has(own):
    paths = [path for path in ROOT.rglob("*.py") if path != ROOT / "stages" / "stage.py"]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in written(path.read_text(), own)]
    assert found == []


@pytest.mark.parametrize("line", [
    "stage.version += 1", "self.stages[s].version, x = 0, 1", "self.stage.call = f", "stage.home.slot = None",
    "stage.random.state = state", "for stage.options in some: pass", "del stage.flights",
    "stages[s].gradients.count = 0", "stage.learnt.mixed = True",
])  # fmt: skip
def test_a_line_that_writes_is_seen(line, own):
    assert list(written(line, own))


def test_names_that_stages_are_given_are_known():
    """Every name of the library whose annotation is `Stage` is one that the other tests look at."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) == "Stage":
                found.add(node.arg)
    assert found <= STAGES
