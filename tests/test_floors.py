"""Imports point down only; the first floor needs no torch; importing pipeback brings in nothing heavy but torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "pipeback"

# a module imports only from lower floors, or from those named before it on its own
FLOORS = [
    ["events", "schedules", "order", "timeline", "recording", "ledger", "plugins", "sizes", "recent"],
    [
        "private", "bundle", "fused", "method", "momentum", "lazy", "link", "partition", "norms",
        "accelerators", "provenance", "meta", "form", "flat", "packed", "skipping", "slot", "structures", "caches",
        "script", "callables", "data_sizes", "in_place", "left_behind", "held", "handed", "escapes", "refusals",
        "surroundings", "record", "mapped", "heard", "work", "follow", "decisions", "segment", "hidden", "inflight",
        "granularity", "ownership", "routes", "faithful", "program", "whole", "ladder", "drawing", "compiled",
        "gradients", "stage", "afresh", "strip", "settings", "repeat", "offload", "activations", "counted", "joint",
        "team", "watch", "replicas", "shelf", "densities", "masks", "sparsity", "shards", "sparse", "store",
        "forked", "pages", "disk", "residence", "rounded", "traffic", "streams", "streaming", "reread", "written",
        "worker", "undo", "digest", "snapshot", "loop", "graphs", "capture", "rings", "adaptive", "rows", "proof",
        "stash",
        "stack", "graphed", "tick",
        "steady", "vectorized", "runtime", "state", "frame", "vigil", "wire", "semaphore", "ring", "beats", "activity",
        "blame", "health", "joining", "ranks", "clocks", "processes", "wiring", "weights", "holding",
        "starting", "dry", "bandwidth", "survey", "agreement", "newer", "stashed", "rehearsal", "modes",
        "rehearsals", "breakdown", "inputs", "building", "intact", "followers", "entrance", "memory", "versions",
        "closed", "ahead", "observing",
    ],
    [
        "methods", "sparsities", "foreseen", "plan", "budget", "pipeline", "checkpoint", "bands", "lanes", "trace",
        "draw",
    ],
]  # fmt: skip
# floor 3, which nothing below imports
LIGHTNING = [
    "private", "randomness", "registry", "launch", "meeting", "place", "body", "interval", "twins", "slices", "steps",
    "suspended", "instead", "visits", "turns", "hollow", "together", "fit", "lasting", "shared", "checks", "strategy",
    "monitor", "saving",
]  # fmt: skip
RANK = {name: n for n, name in enumerate(name for floor in FLOORS for name in floor)}


def imports(path):
    """Modules of pipeback that a file imports when it runs (not those for type checkers alone)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module in ("pipeback", "pipeback.lightning")
                else [node.module]
            )


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.name)
def test_imports_point_down(path):
    if path.name == "__init__.py":
        return
    assert path.stem in RANK, f"{path.name} stands on no floor: name it in FLOORS"
    for name in imports(path):
        if name.startswith("pipeback."):
            other = name.split(".")[1]
            assert RANK[other] < RANK[path.stem], f"{path.stem} imports {other}, which is not below it"


@pytest.mark.parametrize("path", sorted((ROOT / "lightning").glob("[a-z]*.py")), ids=lambda path: path.name)
def test_lightning_stands_on_top(path):
    for name in imports(path):
        if name.startswith("pipeback.lightning"):
            other = name.split(".")[2]
            assert LIGHTNING.index(other) < LIGHTNING.index(path.stem), f"{path.stem} imports {other}, not below it"


@pytest.mark.parametrize("path", sorted((ROOT / "methods").glob("[a-z]*.py")), ids=lambda path: path.name)
def test_a_method_knows_neither_stages_nor_other_methods(path):
    allowed = {f"pipeback.{name}" for name in ("events", "schedules", "timeline", "method", "momentum")}
    assert {name for name in imports(path) if name.startswith("pipeback")} <= allowed


@pytest.mark.parametrize("path", sorted((ROOT / "sparsities").glob("[a-z]*.py")), ids=lambda path: path.name)
def test_a_sparsity_knows_masks_and_numbers_alone(path):
    allowed = {f"pipeback.{name}" for name in ("densities", "masks", "sparsity")}
    assert {name for name in imports(path) if name.startswith("pipeback")} <= allowed


def test_the_first_floor_runs_without_torch():
    code = f"""
import importlib, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("there is no torch here")
sys.meta_path.insert(0, NoTorch())
import pipeback
for name in {FLOORS[0]!r}:
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
