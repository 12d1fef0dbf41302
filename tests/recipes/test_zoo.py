"""`pipeback zoo`: models from elsewhere train with a plain loop's bits; a failure is shown, and the status tells."""

import math
from functools import partial

import pytest

pytest.importorskip("rich")
pytest.importorskip("torchvision")
pytest.importorskip("transformers")

from pipeback import StageError
from pipeback.recipes import census, foreign, zoo
from tests.recipes.cli import pipeback


def test_some_models(tmp_path):
    done = pipeback("zoo", "lstm", "unet", "gpt2", "micro_batches=3", "--markdown", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(
        "```shell\npipeback zoo lstm unet gpt2 micro_batches=3 --markdown\n```\n\nMeasured on "
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
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
    assert done.returncode == 1 and "unet, one stage per block: ZeroDivisionError" in done.stdout


@pytest.mark.parametrize("word, text", [
    ("gtp2", "'gtp2' is no model and no option; did you mean 'gpt2'?"),
    ("micro_batches=0", "'micro_batches=0' is no model and no option"),
    ("lr=much", "'lr=much' is no model and no option"),
])  # fmt: skip
def test_mistakes_are_one_line(word, text, tmp_path):
    done = pipeback("zoo", word, cwd=tmp_path)
    assert done.returncode and text in done.stderr and len(done.stderr.strip().splitlines()) == 1


def trained(script):
    """What training a model gives or raises, one after the other, and the options it was given."""
    seen = []

    def train(case, method, options):
        if method != "sgd":
            return 4, "d", math.nan
        seen.append(options)
        found = script[len(seen) - 1]
        if isinstance(found, Exception):
            raise found
        return 4, "d", found

    return train, seen


LEAVES = "stages=pipeback.Splitting(leaves="


@pytest.mark.parametrize("script, verdict", [
    ([0.0], "ok"),
    ([1e-9], "failed"),
    ([ValueError('no blocks; use stages="layer"'), 0.0], "cured"),
    ([ValueError(f"give {LEAVES}['a'])"), ValueError(f"give {LEAVES}['b'])"), 0.0], "cured"),
    ([ValueError(f"give {LEAVES}['a'])"), ValueError(f"give {LEAVES}['a'])"), 0.0], "failed"),
    ([ValueError('use stages="layer"'), 1e-9], "failed"),
    ([ValueError("push use_cache=False"), 0.0], "cured"),
    ([ValueError("push use_cache=False"), ValueError("push use_cache=False")], "failed"),
    ([ValueError("it cannot be"), 0.0], "failed"),
    ([RuntimeError('crashed; use stages="layer"'), 0.0], "failed"),
    ([StageError(f"give {LEAVES}['a'])", "forward", 0, 1), 0.0], "cured"),
])  # fmt: skip
def test_a_verdict_of_the_census_is_what_comes_of_what_is_said(script, verdict):
    train, seen = trained(script)
    found = census.line("lstm", foreign.build, train, lambda case, options: 2.5)
    assert found.verdict == verdict
    assert set(seen[-1]["stages"].leaves) == {c for c in "ab" if f"['{c}']" in str(script[:-1])}
    counted = census.counts([found])
    assert counted.startswith(f"1 model: {int(verdict == 'ok')} ok, {int(verdict == 'cured')} refused with a cure")
    told = "2.5 at the median of 1 vision models" if found.stages else "nothing was cut"
    assert f"passes that cutting takes: {told}" in counted


@pytest.mark.soak
def test_the_census_of_two_models(tmp_path):
    names = ("CTRLLMHeadModel", "ResNetForImageClassification")
    done = pipeback("zoo", "--others", *names, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 models: 2 ok, 0 refused with a cure, 0 failed; 100.0 % train exactly" in done.stdout
    assert "passes that cutting takes: " in done.stdout and "at the median of 2 transformers models" in done.stdout


@pytest.mark.parametrize("name, verdict", [("lraspp_mobilenet_v3_large", "ok"), ("mvit_v2", "ok")])
def test_scenes(name, verdict):
    line = census.line(name, foreign.build, partial(zoo.trained, count=2, lr=1e-4), lambda case, options: 1.0)
    assert (line.verdict, line.pb) == (verdict, "trains")


@pytest.mark.soak
@pytest.mark.parametrize("name", foreign.WHERE)
def test_every_model(name):
    for row in zoo.rows(name, 20, 1e-4):
        assert row.good, row


@pytest.mark.soak
@pytest.mark.parametrize("name", foreign.OTHERS)
def test_every_model_of_others(name):
    """Cut as it is, or by what its refusal types."""
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    line = census.line(name, foreign.build, partial(zoo.trained, count=3, lr=1e-4), zoo.passes)
    assert line.verdict in ("ok", "cured"), line
