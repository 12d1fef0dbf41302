"""What torch does not offer in public is used in one file, and is what that file says it is on this version."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeback import private

ROOT = Path(__file__).parent.parent
# used by their names everywhere: checked when `private` is imported, or what torch writes about in its documentation
EVERYWHERE = re.compile(r"torch\._foreach_\w+|torch\._dynamo\.config|torch\._assert")
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._[a-z]\w*|\b_cdata\b|_raw_saved|_saved_|_(forward|backward)(_pre)?_hooks\b|_optimizer_step_\w+_hooks|_post_accumulate_grad_hooks"
)


def uses(path):
    """Private names of torch in the code of a file: imported, attributes, and names as strings."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "functorch"):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.append(node.value)
    return [name for name in found if PRIVATE.search(name) and not EVERYWHERE.search(name)]


@pytest.mark.parametrize("room", ["pipeback", "recipes"])
def test_private_names_of_torch_are_in_one_file(room):
    own = ROOT / "pipeback" / "private.py"
    assert uses(own)
    found = {path.name: uses(path) for path in (ROOT / room).rglob("*.py") if path != own}
    assert not {name: some for name, some in found.items() if some}


def test_a_name_that_is_gone_names_the_version_and_a_cure(tmp_path):
    """torch without one of them: the library says so when it is imported, not in the middle of a training."""
    code = "import torch\nprint(torch._foreach_copy_)\ndel torch._foreach_copy_\nfrom pipeback import Pipeline\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert "built-in" in done.stdout and done.returncode
    told = done.stderr.strip().splitlines()[-1]
    assert f"torch {torch.__version__} has no torch._foreach_copy_" in told
    from packaging.requirements import Requirement

    cure = Requirement(re.search(r'pip install "(.*)"', told).group(1))
    assert cure.name == "torch" and all(cure.specifier.contains(f"{version}.0") for version in private.TESTED)


def test_the_oldest_version_tested_is_the_one_claimed():
    claimed = re.search(r'dependencies = \["torch>=([\d.]+)"\]', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert claimed.group(1) == private.TESTED[0]


def test_one_that_is_needed_late(monkeypatch):
    monkeypatch.delattr(torch, "_fused_adamw_")
    with pytest.raises(private.Moved, match=r"has no torch\._fused_adamw_, which pipeback needs"):
        private.fused_adam(decoupled=True)


def test_what_a_node_shows():
    w, x = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2)
    y = (x @ w.t()).tanh().sum()
    nodes, found, numbers = [y.grad_fn], [], []
    for node in nodes:
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
        found += list(private.shown(node))
        numbers += private.numbers_of(node)
    assert {private.identity(t) for _, t, _ in found} > {private.identity(x)}
    tanh = next(raw for name, t, raw in found if name == "result")
    tanh.register_hooks(lambda t: None, lambda _: torch.zeros(4, 3))
    y.backward()
    assert torch.equal(w.grad, x.sum(0).expand(3, 2))  # the derivative of tanh at 0 is 1
    assert all("=" in told for told in numbers)


def test_memory_has_one_identity_also_while_it_is_away():
    a, b = torch.zeros(6), torch.zeros(6)
    before = private.identity(a)
    assert private.identity(a[2:].view(2, 2)) == before == private.identity(a.untyped_storage()) != private.identity(b)
    a.untyped_storage().resize_(0)
    assert private.identity(a) == before
    with pytest.raises(private.Moved, match=r"has no UntypedStorage\._cdata"):
        private.identity(object())


def test_in_backward():
    seen = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: seen.append(private.in_backward()) or t):
        y = (x * x).sum()
    assert y.grad_fn.next_functions[0][0]._saved_self is not None  # somebody looks in
    y.backward()
    assert seen[0] is False and set(seen[1:]) == {True}


def test_hooks():
    layer, seen = nn.Linear(2, 2), []
    assert not private.hooks_of(layer)
    layer.register_forward_hook(print)
    layer.register_full_backward_pre_hook(print)
    assert len(private.hooks_of(layer)) == 2
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    assert not private.hooked(optimizer)
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    assert private.hooked(optimizer)
    private.without_step_hooks(optimizer)
    optimizer.step()
    assert not private.hooked(optimizer) and not seen
    leaf = torch.ones(2, requires_grad=True)
    private.catch(leaf, seen.append)
    (3 * leaf).sum().backward()
    assert seen[0].tolist() == [3, 3]


def test_styles_of_parallelize_module():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    style, applied = RowwiseParallel(), ColwiseParallel._apply
    with private.styles_heard(lambda module, style: seen.append((module, style)) or module):
        assert parallelize_module(model, object(), {"0": ColwiseParallel(), "1": style}) is model
    assert [module for module, _ in seen] == list(model) and seen[1][1] is style
    assert ColwiseParallel._apply is applied
    assert not any(private.is_distributed(p) for p in model.parameters())


def test_what_autograd_has_passed():
    x = torch.randn(3, requires_grad=True)
    older, newer = x.exp(), x.tanh()
    assert private.newness(newer.grad_fn) > private.newness(older.grad_fn)
    assert private.holds(older.grad_fn) and private.holds(newer.grad_fn)
    newer.sum().backward()
    assert private.holds(older.grad_fn) and not private.holds(newer.grad_fn)


def test_parametrizations_that_are_cached():
    assert not private.parametrized_once()
    with torch.nn.utils.parametrize.cached():
        assert private.parametrized_once()
    assert not private.parametrized_once()


def test_autocast_is_seen_in_one_call():
    assert not private.casts_anywhere()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert private.casts_anywhere()
        with torch.autocast("cpu", enabled=False):
            assert not private.casts_anywhere()
    assert not private.casts_anywhere()
