"""`pipeback draw model=...`: the table of a model's stages, as text and as a picture."""

import csv

import pytest

pytest.importorskip("rich")
pytest.importorskip("torchvision")
pytest.importorskip("lightning")

from pipeback.recipes import stages
from tests.recipes.cli import pipeback


@pytest.mark.parametrize("ending", [".png", ".txt", ".md"])
def test_the_table(ending, tmp_path):
    done = pipeback("draw", "model=unet", "stages=block", "method=pb", f"out=unet{ending}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "unet: 11 stages by d: its forward, traced; D of PipelinedBackpropagation(slack=2)"
    (last,) = (line for line in lines if line.split()[:2] == ["10", "head"])
    assert "Conv2d" in last and last.split()[-1] == "0" and "not a: UNet has a forward of its own" in done.stdout
    (total,) = (line for line in lines if line.split()[:1] == ["all"])
    assert "121,610" in total
    written = (tmp_path / f"unet{ending}").read_bytes()
    assert written.startswith(b"\x89PNG") if ending == ".png" else "121,610" in written.decode()


def test_numbers_beside_a_picture_say_how_they_came_about(tmp_path):
    done = pipeback("draw", "model=unet", "stages=block", "method=pb", "out=a.png,a.csv", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("written: a.png\nwritten: a.csv\n"), done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "a.csv").read_text("utf-8").splitlines()
    told = [line for line in lines if line.startswith("# ")]
    for words in (
        "draw model=unet stages=block method=pb out=a.png,a.csv",
        "date: 20",
        "commit: ",
        "the median of 31 ",
    ):
        assert sum(words in line for line in told) == 1, words
    rows = list(csv.DictReader(lines[len(told) :]))
    assert len(rows) == 11 and [row["stage"] for row in rows] == [str(n) for n in range(11)]
    for row in rows:
        assert 0 < float(row["first_quartile"]) <= float(row["seconds"]) <= float(row["third_quartile"])


def test_the_spread_of_repeats():
    row = stages.StageRow(0, "a", "Linear", 1, 1, 1, 3.0, 1, 0)
    assert stages.spread(row) == (3.0, 3.0)
    assert stages.spread(row._replace(times=(1.0, 2.0, 3.0, 4.0, 50.0))) == (2.0, 4.0)  # an outlier does not count


def test_models_of_conf_and_a_number(tmp_path):
    done = pipeback("draw", "model=residual_mlp", "stages=3", "method=pipedream", cwd=tmp_path)
    assert done.returncode == 0 and "3 stages by a: the children of an nn.Sequential" in done.stdout


@pytest.mark.parametrize("name", stages.names())
def test_every_model_is_known(name):
    if name == "gpt":
        pytest.skip("as large as its configuration says")
    case = stages.case(name)
    assert sum(p.numel() for p in case.model.parameters())


@pytest.mark.parametrize("words, text", [
    (["model=resnet1"], "model=resnet1 is unknown; did you mean 'resnet18'?"),
    (["model=unet", "run=run.json"], "run= does not go with model="),
    (["model=unet", "method=pb,sgd"], "model= shows the delays of one method"),
    (["model=unet", "stages=99"], "stages=99, but the model has 18 layers"),
    (["model=unet", "stages=blocks"], "stages must be a whole number of at least 1, or one of auto, block"),
    (["model=unet", "out=unet.doc"], "out=unet.doc must end in one of .txt, .md"),
    (["stages=block"], "stages=block is for a model; add model="),
])  # fmt: skip
def test_mistakes_are_one_line(words, text, tmp_path):
    done = pipeback("draw", *words, cwd=tmp_path)
    assert done.returncode and text in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_numbers_in_few_letters():
    given = [0, 7, 1234, 41_000, 999_600, 1_234_567, 148e9]
    assert [stages.flops(n) for n in given] == ["–", "7", "1.23 k", "41.0 k", "1.00 M", "1.23 M", "148 G"]
