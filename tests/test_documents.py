"""What the documents say runs: the docstrings' examples, README's and CONTRIBUTING's code."""

import doctest
import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import pipeback
from tests.laws.cases import data, network, pipeline

ROOT = Path(__file__).parent.parent


def blocks(document, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    "name", ["schedules.ops", "methods.momentum", "methods.base", "draw.figures", "sparsities.densities", "norms"]
)
def test_examples_in_docstrings(name):
    found = doctest.testmod(importlib.import_module(f"pipeback.{name}"))
    assert found.attempted and not found.failed


def test_the_method_of_contributing_is_a_method(monkeypatch):
    module = types.ModuleType("damped")
    monkeypatch.setitem(sys.modules, "damped", module)  # dataclasses look their module up
    exec(blocks("CONTRIBUTING.md")[0], module.__dict__)
    pipe = pipeline(network(), module.Damped())
    for x, y in data(20):
        loss = pipe.push(x, y)
    assert torch.isfinite(loss) and pipe.delays == [8, 6, 4, 2, 0]


def test_the_first_lines_of_the_readme():
    code = blocks("README.md")[0].replace("torch.nn.Sequential(...)", "network()")
    test_x, test_y = torch.randn(10, 6), torch.randint(0, 6, (10,))
    loader = [(torch.randn(4, 6), torch.randint(0, 6, (4,))) for _ in range(3)]
    scope = {"network": network, "loader": loader, "test_x": test_x, "test_y": test_y}
    exec(code, scope)
    assert 0 <= scope["accuracy"] <= 1 and scope["pipe"].delays == [8, 6, 4, 2, 0]
    assert len(code.strip().splitlines()) <= 9


def test_the_readme_names_every_method_and_every_option():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [n for n in pipeback.methods.available() if f"| `{n}` |" not in text] == []


def test_the_lightning_examples_of_the_readme(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    from tests.lightning.cases import Regression, loader

    monkeypatch.chdir(tmp_path)
    short, long, outside = (code for code in blocks("README.md") if "Trainer(" in code or "pipe.step()" in code)
    assert len(short.strip().splitlines()) == 3
    quiet = "accelerator='cpu', devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, "
    scope = {"module": Regression(), "loader": loader()}
    exec(short.replace("Trainer(", f"Trainer({quiet}").replace("max_epochs=10", "max_epochs=1"), scope)
    assert scope["trainer"].global_step == 12
    scope["trainer"].save_checkpoint("last.ckpt")
    exec(
        long.replace("Trainer(", f"Trainer({quiet}max_epochs=2, "), scope | {"module": Regression(), "pl": scope["pl"]}
    )
    pipe = pipeback.Pipeline(network(), loss=None, optimizer=torch.optim.SGD, method="pb")
    x, y = data(1)[0]
    exec(outside, {"pipe": pipe, "criterion": torch.nn.functional.mse_loss, "x": x, "y": y})


def test_any_model_of_the_readme(capsys):
    pytest.importorskip("transformers")
    (code,) = (code for code in blocks("README.md") if "print(pipe.split)" in code)
    (printed,) = re.findall(r"```\n(\d+ stages by .*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    tokens = torch.randint(2, 96, (2, 9))
    sgd = lambda params: torch.optim.SGD(params, lr=1e-4)  # noqa: E731
    scope = {
        "pipeback": pipeback, "torch": torch, "sgd": sgd, "tokens": tokens[:, :-1], "y": tokens[:, 1:],
        "mask": torch.ones(2, 8, dtype=torch.int64),
    }  # fmt: skip
    exec(code, scope)
    assert capsys.readouterr().out == printed and [row.delay for row in scope["rows"]] == [10, 8, 6, 4, 2, 0]
