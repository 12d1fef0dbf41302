"""`pipeback zoo`: models from elsewhere train with a plain loop's bits; a failure is shown, and the status tells."""

import math

import pytest

pytest.importorskip("rich")
pytest.importorskip("torchvision")
pytest.importorskip("transformers")

from pipeback.recipes import foreign, zoo
from tests.recipes.cli import pipeback


def test_some_models(tmp_path):
    done = pipeback("zoo", "lstm", "unet", "gpt2", "micro_batches=3", "--markdown", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert found[0] == list(zoo.HEADS) and len(found) == 2 + 1 + 2 + 2
    for cells in found[2:]:
        assert cells[0] in ("lstm", "unet", "gpt2") and cells[5] == "0" and int(cells[4]) >= 4, cells
        assert all(math.isfinite(float(loss)) for loss in cells[6:]), cells
    assert [cells[2] for cells in found[2:]].count("c: transformers' GPT2LMHeadModel") == 2


def test_a_model_that_fails(tmp_path, monkeypatch):
    built = foreign.build("lstm")
    wrong = built._replace(loss=lambda output, y: output.sum() * math.nan)
    monkeypatch.setattr(zoo, "build", lambda name: wrong if name == "lstm" else foreign.build(name))
    done = pipeback("zoo", "lstm", "micro_batches=2", cwd=tmp_path)
    assert done.returncode == 1 and "nan" in done.stdout
    monkeypatch.setattr(zoo, "piped", lambda *given: 1 / 0)
    done = pipeback("zoo", "unet", "micro_batches=1", cwd=tmp_path)
    assert done.returncode == 1 and "unet, a block a stage: ZeroDivisionError" in done.stdout


@pytest.mark.parametrize("word, text", [
    ("gtp2", "'gtp2' is no model and no option; did you mean 'gpt2'?"),
    ("micro_batches=0", "'micro_batches=0' is no model and no option"),
    ("lr=much", "'lr=much' is no model and no option"),
])  # fmt: skip
def test_mistakes_are_one_line(word, text, tmp_path):
    done = pipeback("zoo", word, cwd=tmp_path)
    assert done.returncode and text in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.soak
@pytest.mark.parametrize("name", [*foreign.WHERE, *foreign.OTHERS])
def test_every_model(name):
    for row in zoo.rows(name, 20, 1e-4):
        assert row.good, row
