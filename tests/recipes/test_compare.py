"""`pipeback compare` end to end, tiny."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from rich.console import Console

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from pipeback.recipes import forks
from pipeback.recipes.live import Live, state
from tests.helpers.choice import rare
from tests.recipes.cli import TINY, apart, config, facts, joblib_processes, numbers, pipeback


@pytest.fixture
def no_report(monkeypatch):
    """It takes longer than all the rest."""
    from pipeback.recipes import compare

    monkeypatch.setattr(compare, "report", lambda *given: None)


COMPARED = ["methods=[sgd,{pipedream:{slack:2}}]", "seeds=2", "out=here"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two methods, two seeds, in this process."""
    folder = tmp_path_factory.mktemp("compared")
    done = pipeback("compare", *TINY, *COMPARED, "jobs=1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "here", done.stdout


def test_everything_is_written(compared):
    out, said = compared
    runs = {"sgd-seed0", "sgd-seed1", "pipedream-slack2-seed0", "pipedream-slack2-seed1"}
    assert {p.name for p in out.iterdir() if (p / "metrics.csv").is_file()} == runs
    assert (out / "report.html").is_file()
    for run in runs:
        assert state(out / run)["state"] == "finished" and state(out / run)["measures"]["val/accuracy"] > 0
        assert config(out / run).out == f"here/{run}" and "seeds" not in config(out / run)
    assert "4 runs" in said and "pipedream-slack2 seed 1" in said and "±" in said
    assert "Epoch" not in said and "update size" in (out / "sgd-seed0" / "log.txt").read_text()


def test_it_is_fair(compared):
    """The same optimizer, and per seed the same data in the same order, from the same weights."""
    out = compared[0]
    found = {run.name: facts(run) for run in out.iterdir() if (run / "hparams.yaml").is_file()}
    assert len({json.dumps(each["optimizer"]) for each in found.values()}) == 1
    assert found["pipedream-slack2-seed0"]["delays"] == [8, 6, 4, 2, 0]
    assert found["pipedream-slack2-seed0"]["method"] == "pipedream-slack2"


def test_a_run_is_what_train_makes_of_it(compared, tmp_path):
    options = ["method=pipedream", "method.slack=2", "seed=1", "callbacks=minimal", "out=run"]
    assert pipeback("train", *TINY, *options, cwd=tmp_path).returncode == 0
    assert numbers(tmp_path / "run") == numbers(compared[0] / "pipedream-slack2-seed1")


@pytest.mark.soak
@pytest.mark.parametrize("forked", [True, False])
def test_two_processes_give_the_same(forked, compared, no_report, tmp_path, monkeypatch):
    monkeypatch.setattr(forks, "SAFE", forked and forks.SAFE)
    with joblib_processes():
        done = pipeback("compare", *TINY, *COMPARED, "seeds=1", "jobs=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("sgd-seed0", "pipedream-slack2-seed0"):
        assert numbers(tmp_path / "here" / name) == numbers(compared[0] / name)
    assert yaml.safe_load((tmp_path / "here" / "multirun.yaml").read_text())["hydra"]["launcher"]["n_jobs"] == 2


def test_runs_are_named_by_their_methods_whatever_an_experiment_calls_them(no_report, tmp_path):
    """It lies in a folder that an option of Hydra names."""
    (tmp_path / "my" / "experiment").mkdir(parents=True)
    (tmp_path / "my" / "experiment" / "own.yaml").write_text("# @package _global_\nname: own\nlabel: mine\n")
    words = ["--config-dir", "my", "experiment=own", "methods=[{pb:{}},{pb:{slack:1},sgd:{}}]", "jobs=1", "out=here"]
    done = pipeback("compare", *TINY, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {run.parent.name for run in tmp_path.glob("here/*/metrics.csv")} == {
        "pb-seed0",
        "pb-slack1-seed0",
        "sgd-seed0",
    }
    assert "3 finished runs of this" in pipeback("compare", *TINY, *words, cwd=tmp_path).stdout


def test_divergence_does_not_stop_the_others(tmp_path):
    options = ["methods=[sgd,{gpipe:{micro_batches:8}}]", "optimizer.lr=1e30", "jobs=1", "out=here"]
    done = pipeback("compare", *TINY, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [state(p)["state"] for p in sorted((tmp_path / "here").glob("*-seed0"))] == ["diverged", "diverged"]
    assert done.stdout.count("diverged") >= 2 and (tmp_path / "here" / "report.html").is_file()


def test_failure_does_not_stop_the_others(no_report, tmp_path, monkeypatch):
    """A run that breaks is named at the end, and where its traceback is; the others are reported."""
    from pipeback.recipes import work

    run = work.run

    def breaks(values, more):
        if values["label"] == "pb":
            raise RuntimeError("no such memory")
        return run(values, more)

    monkeypatch.setattr(work, "run", breaks)
    done = pipeback("compare", *TINY, "methods=[pb,sgd]", "jobs=1", "out=here", cwd=tmp_path)
    assert done.returncode == 1 and "pb, seed 0 failed" in done.stderr and "failed: no such memory" in done.stdout
    assert "Traceback" in (tmp_path / "here" / "pb-seed0" / "log.txt").read_text()
    assert state(tmp_path / "here" / "sgd-seed0")["state"] == "finished"


def test_nothing_that_a_run_wrote_is_deleted_and_finished_runs_are_taken_over(monkeypatch, tmp_path):
    from pipeback.recipes import compare as module

    reported = []
    monkeypatch.setattr(module, "report", lambda sources, *rest: reported.append([Path(p).name for p in sources]))

    def compare(*options):
        done = pipeback("compare", *TINY, "jobs=1", "out=here", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout, {p: p.stat().st_mtime_ns for p in (tmp_path / "here").glob("*/*") if p.is_file()}

    _, first = compare("methods=[sgd]")
    said, second = compare("methods=[sgd,pb]")
    assert "1 finished run of this configuration taken over" in said and "1 run in " in said
    said, third = compare("methods=[pb]")  # the report is not of this method alone
    assert "0 runs in " in said and "1 earlier run of other methods or seeds" in said and third == second
    said, other = compare("methods=[sgd]", "model.depth=3")
    assert "sgd-seed0 holds another run, which stays: this one goes to here/sgd-seed0-2" in said.replace("\n", " ")
    _, again = compare("methods=[sgd]", "again=true")
    found = [first, second, other, again]
    for earlier, later in pairwise(found):
        assert earlier.items() <= later.items()
    assert {p.parent.name for p in again} == {"sgd-seed0", "pb-seed0", "sgd-seed0-2", "sgd-seed0-3"}
    assert reported == [["sgd-seed0"], ["sgd-seed0", "pb-seed0"], ["pb-seed0", "sgd-seed0"], ["sgd-seed0-2"],
                        ["sgd-seed0-3", "pb-seed0"]]  # fmt: skip


def test_a_run_that_was_stopped_is_called_unfinished(tmp_path):
    from pipeback.recipes.run_folders import place

    home, told = tmp_path / "pb-seed0", "epochs: 3\nout: there\n"
    home.mkdir()
    (home / "config.yaml").write_text("epochs: 3\nout: here\n")
    for progress, done, stopped in (("running", False, True), ("finished", True, False)):
        (home / "progress.json").write_text(f'{{"state": "{progress}"}}')
        found = place("pb", 0, home, told, again=False)
        assert (found.done, found.stopped, found.out == home) == (done, stopped, done)
    assert not place("pb", 0, home, "epochs: 4\nout: there\n", again=False).stopped


@pytest.mark.soak
def test_no_file_of_the_user_is_imported_in_place_of_a_module(tmp_path):
    (tmp_path / "colorsys.py").write_text("raise SystemExit")
    code = (
        "import os\nfrom concurrent.futures import ProcessPoolExecutor\nfrom pipeback.recipes import forks\n"
        "forks.IMPORTED = ['colorsys', *forks.IMPORTED]\n"
        "with ProcessPoolExecutor(1, forks.context()) as pool:\n"
        '    print(pool.submit(eval, \'__import__("sys").modules["colorsys"].__file__\').result())\n'
        '    print(pool.submit(eval, \'__import__("os").environ.get("PYTHONSAFEPATH")\').result())\n'
        "print(os.environ.get(forks.SAFE_PATH))\n"
    )
    python = [sys.executable, "-c", code]
    found = subprocess.run(python, check=True, text=True, capture_output=True, cwd=tmp_path).stdout.split()
    assert found[0].endswith("colorsys.py") and str(tmp_path) not in found[0]
    assert found[1] == found[2] == str(os.environ.get(forks.SAFE_PATH))


@pytest.mark.soak
def test_what_processes_are_forked_from_touches_no_gpu():
    """CUDA that was asked for its devices before a fork cannot be used after it."""
    code = (
        "import torch\nfor name in ('_cuda_getDeviceCount', '_cuda_init', '_accelerator_getAccelerator'):\n"
        "    assert hasattr(torch._C, name)\n"
        "    setattr(torch._C, name, lambda *given: 1 / 0)\n"
        "for name in ('is_available', 'device_count'):\n"
        "    setattr(torch.cuda, name, lambda: 1 / 0)\n"
    )
    imports = "".join(f"import {name}\n" for name in forks.IMPORTED)
    subprocess.run([sys.executable, "-c", code + imports], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, rare(signal.SIGTERM)])
def test_a_signal_ends_every_process_and_says_how_to_go_on(number, tmp_path):
    words = ["methods=[sgd,pb]", "data.samples=96", "epochs=5000", "jobs=2", "out=here", *TINY[-2:]]
    command = apart("compare", *words, cwd=tmp_path)
    try:
        within(200, lambda: len(list((tmp_path / "here").glob("*/metrics.csv"))) == 2)
        os.kill(command.pid, number)
        command.join(100)
        said = (tmp_path / "said.txt").read_text()
        assert command.exitcode == 128 + number, said
        assert "Traceback" not in said and "The same command goes on: finished runs are taken over" in said
        within(100, lambda: not alive(command.pid))
    finally:
        if alive(command.pid):
            os.killpg(command.pid, signal.SIGKILL)


def within(seconds, true):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def alive(group):
    """Whether a process of this group runs; those that nobody has asked for their exit status have ended."""
    listed = subprocess.run(["ps", "-axo", "pgid=,stat="], check=True, text=True, capture_output=True).stdout
    each = map(str.split, listed.splitlines())
    return any(int(pgid) == group and not state.startswith("Z") for pgid, state in each)


@pytest.mark.parametrize("all_of_them", [False, rare(True)])
def test_without_methods_those_run_that_the_optimizer_allows(all_of_them, tmp_path, monkeypatch):
    """all_of_them: of the real list; composing each takes a part of a second."""
    from pipeback.recipes import compare

    found = []
    monkeypatch.setattr(compare, "compare", lambda runs, *rest: found.append([run.label for run in runs]))
    if not all_of_them:
        monkeypatch.setattr(compare, "ALL", ("sgd", "lwp", "pb", "eigendelay", "spectrain_slack2"))
    pipeback("compare", *TINY, "quick=false", cwd=tmp_path)
    pipeback("compare", *TINY, cwd=tmp_path)
    pipeback("compare", *TINY, "methods=all", "optimizer=adamw", cwd=tmp_path)
    assert found[0] == [label for label in compare.ALL if label != "eigendelay"] and found[1] == list(compare.FEW)
    momentum = {"lwp", "cerebras", "spectrain", "spectrain_slack2"}
    assert found[2] == [label for label in compare.ALL if label not in momentum]


def test_all_are_the_entries_of_the_group():
    from pipeback.recipes import compare

    entries = {path.stem for path in (Path(__file__).parents[2] / "conf" / "method").glob("*.yaml")}
    assert set(compare.ALL) == entries - {"installed", "gpipe_batch"}


def test_live_shows_what_runs_tell(tmp_path):
    console = Console(file=io.StringIO(), width=120)
    with Live({tmp_path / "a": "sgd seed 0"}, console, every=0.01):
        (tmp_path / "a").mkdir()
        told = {"state": "finished", "measures": {"val/accuracy": 0.5}, "samples_per_second": 12.0}
        (tmp_path / "a" / "progress.json").write_text(json.dumps(told))
    assert "accuracy 50.0%" in console.file.getvalue() and "12 samples/s" in console.file.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["methods=[cerebas]"], "did you mean 'cerebras'?"),
        (["methods=[sgd,{pb:{slak:1}}]"], "did you mean 'method.slack'?"),
        (["methods=[{pb:1}]"], "neither a name nor"),
        (["methods={pb:{slack:1}}"], "must be a list, in brackets; write 'methods=[{pb:{slack:1}}]'"),
        (["methods=sgd"], "methods=sgd must be a list, in brackets; write methods=[sgd]"),
        (["methods=[{pb:{}},cerebas]"], "did you mean 'cerebras'?"),
        (["label=x"], "label=x would name every run alike; leave label= out"),
        (["trainer=plain"], "trainer.strategy=auto has no pipeline, so that methods play no part"),
        (["logger=none"], "choose logger=csv"),
        (["logger=wandb"], "logger= leaves no file that is read"),
        (["methods=[]"], "methods=[] compares nothing; write methods=all, or name some: methods=[sgd,pb]"),
        (["methods=[lwp]", "optimizer=adamw"], "momentum SGD"),
        (["methods=[eigendelay]"], "written for Adam and AdamW"),
        (["methods=[pipedream_2bw]", "model.depth=40"], "pipedream_2bw"),
        (["seeds=0"], "seeds must be a whole number of at least 1, but is 0"),
        (["jobs=two"], "jobs: Value 'two'"),
        (["experiment=digts"], "did you mean 'digits'?"),
        (["sedes=2"], "did you mean 'seeds'?"),
        (["-m"], "methods=[...]"),
        (["method=pb"], "methods=[...]"),
        (["data.root=nowhere"], "there is no digits.csv.gz"),
        (["model=transformer"], "is for sequences of tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_shows_before_anything_starts(arguments, message, tmp_path):
    done = pipeback("compare", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_cfg_job(tmp_path):
    done = pipeback("compare", "methods=[sgd]", "seeds=3", "--cfg", "job", cwd=tmp_path)
    found = yaml.safe_load(done.stdout)
    assert found["seeds"] == 3 and found["methods"] == ["sgd"] and found["out"] == "outputs/compare/${name}"
    assert list(tmp_path.iterdir()) == []
