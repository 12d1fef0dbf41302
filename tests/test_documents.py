"""What README.md says runs, and so do the docstrings' examples. `test_pages` is the same for docs/."""

import doctest
import importlib

import pytest
import torch

import pipeback
from tests.helpers import pages
from tests.laws.cases import network


@pytest.mark.parametrize(
    "name",
    [
        "schedules.ops",
        "methods.momentum",
        "methods.chain",
        "draw.figures",
        "sparsities.densities",
        "byte_sizes",
        "norms",
        "planner.quantities",
        "planner.models",
        "planner.simulation",
    ],
)
def test_examples_in_docstrings(name):
    found = doctest.testmod(importlib.import_module(f"pipeback.{name}"))
    assert found.attempted and not found.failed


def code(word):
    (block,) = (block for block in pages.blocks("README.md", "python") if word in block.text)
    return block.text


def test_the_first_lines_of_the_readme():
    first = code("evaluate")
    test_x, test_y = torch.randn(10, 6), torch.randint(0, 6, (10,))
    loader = [(torch.randn(4, 6), torch.randint(0, 6, (4,))) for _ in range(3)]
    scope = {"network": network, "loader": loader, "test_x": test_x, "test_y": test_y}
    exec(first.replace("torch.nn.Sequential(...)", "network()"), scope)
    assert 0 <= scope["accuracy"] <= 1 and scope["pipe"].delays == [8, 6, 4, 2, 0]
    assert len(first.strip().splitlines()) <= 9


def test_the_lines_for_a_gpu_run_without_one_too():
    scope = {"torch": torch, "pipeback": pipeback, "model": network(), "loss": torch.nn.functional.cross_entropy}
    scope |= {"sgd": lambda p: torch.optim.SGD(p, lr=1e-3), "x": torch.randn(8, 6), "y": torch.randint(0, 6, (8,))}
    exec(code("current_accelerator"), scope)
    assert torch.isfinite(scope["value"])


def test_the_lines_for_lightning(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    from tests.lightning.cases import Regression, loader

    monkeypatch.chdir(tmp_path)
    quiet = "accelerator='cpu', devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, "
    short, scope = code("Trainer("), {"module": Regression(), "loader": loader()}
    assert len(short.strip().splitlines()) == 3
    exec(short.replace("Trainer(", f"Trainer({quiet}").replace("max_epochs=10", "max_epochs=1"), scope)
    assert scope["trainer"].global_step == 12


def test_no_other_code_is_in_the_readme():
    assert len(pages.blocks("README.md", "python")) == 3


def test_the_readme_is_short_and_names_every_method():
    text = (pages.ROOT / "README.md").read_text("utf-8")
    assert len(text.encode()) < 12 * 1024
    assert [name for name in pipeback.methods.available() if f"| `{name}` |" not in text] == []


def test_the_method_of_the_guide_obeys_a_law(tmp_path, monkeypatch):
    """A method that is written as the guide says equals plain torch on one stage, bit for bit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (text,) = (
        block.text for block in pages.blocks("docs/how-to/add_a_method.md", "python") if "class Damped" in block.text
    )
    (tmp_path / "damped_one.py").write_text(text, "utf-8")
    importlib.invalidate_caches()
    Damped = importlib.import_module("damped_one").Damped
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    torch.manual_seed(0)
    mine, plain = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    plain.load_state_dict(mine.state_dict())
    pipe = pipeback.Pipeline(
        [mine], loss=torch.nn.functional.mse_loss, method=Damped(), micro_batch_size=1,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )  # fmt: skip
    pipe.push(x, y)
    pipe.drain()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for one, target in zip(x.split(1), y.split(1), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(plain(one), target).backward()
        optimizer.step()
    assert torch.equal(mine.weight, plain.weight)
