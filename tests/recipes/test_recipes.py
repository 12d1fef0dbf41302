"""The commands end to end, tiny: every experiment, the files they write, and what they say to bad input."""

import gzip
import io
import json
import struct
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("hydra")
pytest.importorskip("sklearn")

from hydra.core.global_hydra import GlobalHydra

from pipeback.recipes.main import main

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted(file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml"))
TINY = ["quick=true", "data.samples=96", "model.depth=4", "evaluate_every=32"]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def pipeback(*arguments, cwd):
    """The command, in this process, which has torch and Hydra loaded."""
    out, err, threads, code = io.StringIO(), io.StringIO(), torch.get_num_threads(), 0
    GlobalHydra.instance().clear()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["pipeback", *map(str, arguments)])
        try:
            main()
        except SystemExit as end:  # a message as the code is what Python itself would print
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            err.write(end.code if isinstance(end.code, str) else "")
    torch.set_num_threads(threads)
    return Done(code, out.getvalue(), err.getvalue())


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    """A folder in MNIST's format, with a few random images."""
    root = tmp_path_factory.mktemp("mnist")
    (root / "MNIST" / "raw").mkdir(parents=True)
    pixels = bytes((7 * i * i + i // 28) % 256 for i in range(784))
    for part, n in (("train", 128), ("t10k", 32)):
        images = struct.pack(">IIII", 2051, n, 28, 28) + pixels * n
        labels = struct.pack(">II", 2049, n) + bytes(i % 10 for i in range(n))
        for name, content in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            (root / "MNIST" / "raw" / name).write_bytes(content)
            (root / "MNIST" / "raw" / f"{name}.gz").write_bytes(gzip.compress(content))
    return root


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_trains(experiment, mnist, tmp_path):
    root = [f"data.root={mnist}"] if experiment == "mnist" else []
    done = pipeback("train", f"experiment={experiment}", *TINY, *root, "method=pb", "out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = records(tmp_path / "run" / "runs" / "pb-seed0.jsonl")
    assert [r["kind"] for r in run] == ["run", "test", "test", "test", "result"]
    assert run[0]["delays"][0] == 2 * (run[0]["stages"] - 1)
    assert run[-2]["samples"] == 96 and 0 <= run[-2]["accuracy"] <= 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]  # no clutter
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_same_seed_same_run(tmp_path):
    for out in ("a", "b"):
        assert pipeback("train", *TINY, "method=cerebras", f"out={out}", cwd=tmp_path).returncode == 0
    a, b = (records(tmp_path / out / "runs" / "cerebras-seed0.jsonl")[:-1] for out in ("a", "b"))
    assert a == b


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    options = ["methods=[sgd,pipedream]", "equal_delay=true", "epochs=2", "seeds=2", "jobs=1", "out=here"]
    done = pipeback("compare", *TINY, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "here", done.stdout


def test_compare_writes_everything(compared):
    out, said = compared
    assert {p.name for p in out.iterdir()} == {
        "config.yaml", "runs", "tables.md", "report.html", "accuracy.png", "final.png", "schedules.png"
    }  # fmt: skip
    assert len(list((out / "runs").iterdir())) == 6  # sgd, pipedream, and pipedream at slack 2; two seeds each
    for name in ("accuracy", "final", "schedules"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "Every method at its own delay" in said and "At equal delay" in said and "±" in said


def test_compare_is_fair(compared):
    """One seed: the same first loss for all, because weights and data order are the same."""
    runs = [records(file) for file in sorted((compared[0] / "runs").glob("*seed1.jsonl"))]
    assert sorted(run[0]["delays"][0] for run in runs) == [0, 4, 8]
    assert len({run[0]["method"]["name"] for run in runs}) == 2
    assert {run[0]["optimizer"]["lr"] for run in runs} == {runs[0][0]["optimizer"]["lr"]}
    assert runs[0][0]["optimizer"]["momentum"] == pytest.approx(0.9 ** (1 / 32))


def test_report_is_self_contained(compared):
    page = (compared[0] / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert 'src="http' not in page and "href=" not in page
    made = ("pipeback compare quick=true data.samples=96", "6 runs in here", f"{torch.__version__}</dd>")
    for text in ("pipedream slack=2", "weight\ncopies", "bubble\n%", "micro_batch_size: 1", *made):
        assert text in page


def test_report_is_rebuilt_from_files(compared, tmp_path):
    done = pipeback("report", compared[0], "out=again.html", "title='Again & again'", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "again.html").read_text()
    assert "<h1>Again &amp; again</h1>" in page
    assert f"pipeback report {compared[0]} out=again.html" in page  # as it was typed
    assert (tmp_path / "tables.md").read_text() == (compared[0] / "tables.md").read_text()


def test_two_processes_give_the_same(compared, tmp_path):
    """The script itself, `jobs=2`: as many bits as in one process."""
    options = ["methods=[sgd,pipedream]", "equal_delay=false", "epochs=2", "seeds=1", "jobs=2", "out=here"]
    command = [sys.executable, ROOT / "recipes" / "compare.py", *TINY, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for file in (tmp_path / "here" / "runs").iterdir():
        assert records(file)[:-1] == records(compared[0] / "runs" / file.name)[:-1]


def test_divergence_is_shown(tmp_path):
    options = ["methods=[sgd,pb]", "optimizer.lr=1e30", "jobs=1", "out=here"]
    done = pipeback("compare", *TINY, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "diverged" in done.stdout and "diverged" in (tmp_path / "here" / "tables.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["foo"], "unknown command 'foo'"),
        (["trian"], "did you mean 'train'?"),
        (["compare", "methods=[cerebas]"], "unknown method 'cerebas'; did you mean 'cerebras'?"),
        (["compare", "method.sc.horizn=3"], "horizn"),
        (["train", "data.scaling=loud"], "data.scaling must be standard, unit or symmetric, but is 'loud'"),
        (["compare", "seeds=0"], "seeds must be a whole number of at least 1, but is 0"),
        (["compare", "experiment=digts"], "digits_deep"),
        (["train", "method=pbb"], "Available options in 'method'"),
        (["train", "method=sc", "optimizer=adamw", *TINY], "SGD"),
        (["train", "data.root=nowhere", *TINY], "data.root=nowhere: there is no digits.csv.gz"),
        (["train", "experiment=mnist", *TINY], "data.download=true"),
        (["train", "optimizer.name=SDG", *TINY], "did you mean 'SGD'?"),
        (["report", "nowhere"], "there is no folder or file nowhere"),
        (["report"], "which runs?"),
    ],
)  # fmt: skip
def test_bad_input_reads_well(arguments, message, tmp_path):
    done = pipeback(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
