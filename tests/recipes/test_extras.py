"""Where a package is missing that a command needs, it says in one sentence what to install."""

import sys

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from pipeback.recipes import draw
from tests.recipes.cli import pipeback


@pytest.mark.parametrize(
    ("missing", "words", "sentence"),
    [
        ("matplotlib", ["draw", "pb", "out=x.png"], "pipeback draw needs matplotlib: pip install 'pipeback[recipes]'"),
        ("transformers", ["draw", "model=gpt2"], "draw needs transformers: pip install 'pipeback[recipes,models]'"),
        (
            "matplotlib",
            ["plan", "gpt:125m", "devices=8xA100", "out=x.html"],
            "pipeback plan needs matplotlib: pip install 'pipeback[recipes]'",
        ),
    ],
)
def test_before_anything_is_computed(missing, words, sentence, tmp_path, monkeypatch):
    forget(missing, monkeypatch)
    done = pipeback(*words, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.endswith(sentence) and "\n" not in done.stderr, done.stderr
    assert not done.stdout and not list(tmp_path.iterdir())


def test_a_model_that_needs_a_package(tmp_path, monkeypatch):
    forget("transformers", monkeypatch)
    done = pipeback("zoo", "gpt2", cwd=tmp_path)
    assert done.returncode == 1 and "gpt2 needs transformers: pip install 'pipeback[recipes,models]'" in done.stdout


def test_what_other_code_imports_is_not_ours(tmp_path, monkeypatch):
    """The traceback says who needs it."""
    monkeypatch.setattr(draw, "show", lambda options: __import__("no_such_package"))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        pipeback("draw", "pb", cwd=tmp_path)


def forget(package, monkeypatch):
    """As if it were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("language", "hugging_face"):
        monkeypatch.delitem(sys.modules, f"pipeback.recipes.foreign.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
