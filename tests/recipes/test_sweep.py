"""`pipeback sweep` end to end, tiny: every run is that of `pipeback train`, goes on after a kill, and is one line."""

import json
import math
import os
import shlex
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from pipeback.recipes import sweep
from pipeback.recipes.live import state
from pipeback.recipes.sweeps import table
from pipeback.recipes.sweeps.curves import Curve, curve, held_out, held_out_slow_down, reaches, slow_down, smoothed
from pipeback.recipes.sweeps.jobs import Job, last_checkpoint
from pipeback.recipes.sweeps.summary import sheets
from tests.helpers.processes import fork_for_spawn
from tests.recipes.cli import TINY, apart, config, facts, numbers, pipeback, rows

SWEPT = ["methods=[sgd,{pb:{slack:1}}]", "rates=[0.03,0.1]", "seeds=2", "jobs=1", "out=here"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two methods, two rates, two seeds, in this process."""
    folder = tmp_path_factory.mktemp("swept")
    done = pipeback("sweep", *TINY, *SWEPT, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_line_for_every_run(swept):
    folder, said = swept
    found = table.load(folder / "here" / "results.csv")
    runs = [(row.method, row.options, row.seed) for row in found.rows]
    assert runs == [
        (method, {"optimizer.lr": rate}, seed)
        for seed in (0, 1) for rate in ("0.03", "0.1") for method in ("sgd", "pb-slack1")
    ]  # fmt: skip
    for row in found.rows:
        out = folder / "here" / f"{row.method}-lr{row.options['optimizer.lr']}-seed{row.seed}"
        told = state(out)
        assert told["state"] == row.state == "finished" and row.updates == 3
        assert row.measures["accuracy"] == pytest.approx(told["measures"]["val/accuracy"], rel=1e-4)
        losses = [line["train/loss"] for line in rows(out) if "train/loss" in line]
        assert row.train_loss == pytest.approx(sum(losses) / 3, rel=1e-4)
        assert not (out / "checkpoints").exists()
        of = facts(out)
        longer = of["stages"] if row.method == "sgd" else 1 / (1 - of["bubble"])
        assert row.time == pytest.approx(of["batch_size"] * longer, rel=1e-4)  # updates count as batches
    assert "8 runs in" in said and "pb-slack1 lr 0.1 seed 1" in said
    assert found.command == "pipeback sweep " + " ".join(f"'{w}'" if "[" in w else w for w in [*TINY, *SWEPT])
    assert {"date", "commit", "machine", "torch"} <= set(found.facts) and found.experiment == "digits"
    assert len((folder / "here" / "results.csv").read_bytes()) < 4000


def test_a_run_is_that_of_train(swept, tmp_path):
    folder, _ = swept
    options = ["method=pb", "method.slack=1", "optimizer.lr=0.1", "seed=1", "callbacks=none", "out=one"]
    assert pipeback("train", *TINY, *options, cwd=tmp_path).returncode == 0
    mine = folder / "here" / "pb-slack1-lr0.1-seed1"
    assert numbers(mine) == numbers(tmp_path / "one")
    assert config(mine).optimizer == config(tmp_path / "one").optimizer


def test_the_same_command_takes_finished_runs_over(swept):
    folder, _ = swept
    before = {p: p.stat().st_mtime_ns for p in (folder / "here").glob("*/*")}
    lines = (folder / "here" / "results.csv").read_text().splitlines()[3:]  # below what tells the date
    done = pipeback("sweep", *TINY, *SWEPT, cwd=folder)
    assert "8 finished runs taken over" in done.stdout and "0 runs in" in done.stdout
    assert {p: p.stat().st_mtime_ns for p in (folder / "here").glob("*/*")} == before
    assert (folder / "here" / "results.csv").read_text().splitlines()[3:] == lines
    done = pipeback("sweep", *TINY, *SWEPT, "jobs=2", cwd=folder)
    assert done.returncode == 0 and "0 runs in" in done.stdout, done.stderr  # nothing to do for several processes


def test_runs_that_are_taken_over_keep_their_commit(swept):
    """And their date, and their machine."""
    folder, _ = swept
    facts = folder / "here" / "pb-slack1-lr0.1-seed1" / "hparams.yaml"
    before = facts.read_text()
    told = table.load(folder / "here" / "results.csv").facts
    facts.write_text(before.replace(told["commit"], "abc1234").replace(told["date"], "2026-01-02"))
    try:
        assert pipeback("sweep", *TINY, *SWEPT, cwd=folder).returncode == 0
    finally:
        facts.write_text(before)
    found = table.load(folder / "here" / "results.csv")
    assert [row.commit for row in found.rows] == [told["commit"]] * 7 + ["abc1234"]
    both = {name: f"{told[name]} and {other}" for name, other in (("commit", "abc1234"), ("date", "2026-01-02"))}
    assert found.facts == {**told, **both} and found.notes[-1] == table.SEVERAL


def test_any_option_is_varied_and_each_choice_has_its_reference(tmp_path):
    vary = "vary={model.depth:[3,4],optimizer:[sgd,adamw]}"
    options = ["methods=[sgd,pb]", vary, "jobs=1", "out=here"]
    done = pipeback("sweep", *TINY, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = table.load(tmp_path / "here" / "results.csv")
    assert {tuple(row.options.items()) for row in found.rows} == {
        (("model.depth", depth), ("optimizer", optimizer)) for depth in ("3", "4") for optimizer in ("sgd", "adamw")
    }
    slow = {row.options["optimizer"]: row.slow_down for row in found.rows if row.method == "sgd"}
    assert slow["sgd"] == 1.0 and math.isnan(slow["adamw"])  # over that of SGD, which has one point
    assert config(tmp_path / "here" / "pb-depth3-optimizeradamw-seed0").optimizer.name == "AdamW"


@pytest.mark.soak
def test_every_method_has_its_own_rates(tmp_path):
    """A method is named with its options, or without them."""
    rates = "rates={sgd:[0.1,0.03],pb-slack1:[0.03],pb:[0.01]}"
    options = ["methods=[sgd,pb,{pb:{slack:1}}]", rates, "jobs=1", "out=here"]
    done = pipeback("sweep", *TINY, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = table.load(tmp_path / "here" / "results.csv")
    runs = [(row.method, row.options["optimizer.lr"]) for row in found.rows]
    notes = sheets(found)[0].notes
    assert "In this table, updates are counted in batches of 32 samples" in notes  # micro_batch_size is 1
    assert "one of those tried (" in notes and "sgd: 0.03, 0.1" in notes and "pb-slack1: 0.03" in notes
    assert runs == [("sgd", "0.1"), ("sgd", "0.03"), ("pb-slack1", "0.03"), ("pb", "0.01")]


def test_a_reference_from_another_sweep(swept, tmp_path):
    folder, _ = swept
    options = ["methods=[pb]", "rates=[0.1]", "jobs=1", "out=here", f"reference={folder / 'here'}"]
    done = pipeback("sweep", *TINY, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "here" / "results.csv").read_text()
    (row,) = table.load(tmp_path / "here" / "results.csv").rows
    assert math.isnan(row.slow_down) and "sgd of another sweep" in text  # all three updates are one mean
    assert str(folder.parent) not in text and "reference=here" in text


LONG = ["data.samples=192", "batch_size=8", "model.depth=4", "epochs=3", "validate_every=1.0", "methods=[cerebras]",
        "trainer.log_every_n_steps=1", "trainer.strategy.vectorize=false", "rates=[0.03]", "jobs=1"]  # fmt: skip


def test_a_killed_run_goes_on_with_equal_bits(tmp_path):
    assert pipeback("sweep", *LONG, "out=whole", cwd=tmp_path).returncode == 0
    command = apart("sweep", *LONG, "out=cut", cwd=tmp_path)
    run = tmp_path / "cut" / "cerebras-lr0.03-seed0"
    try:
        end = time.monotonic() + 100
        while not list(run.glob("checkpoints/*.ckpt")):
            assert time.monotonic() < end and command.is_alive()
            time.sleep(0.01)
    finally:
        os.killpg(command.pid, signal.SIGKILL)
        command.join()
    assert state(run)["state"] == "running" and last_checkpoint(run) is not None
    begun = int(last_checkpoint(run).stem)
    assert 0 < begun < 72
    assert pipeback("sweep", *LONG, "out=cut", cwd=tmp_path).returncode == 0
    assert state(run)["state"] == "finished" and not (run / "checkpoints").exists()

    def by_samples(folder):
        return {(row["samples_seen"], name): row[name] for row in numbers(folder) for name in row}

    assert by_samples(run) == by_samples(tmp_path / "whole" / "cerebras-lr0.03-seed0")
    found, wanted = (table.load(tmp_path / name / "results.csv").rows for name in ("cut", "whole"))
    assert found == wanted or str(found) == str(wanted)  # nan is not itself


def test_a_checkpoint_that_was_cut_short_is_not_taken(tmp_path):
    import torch

    (tmp_path / "checkpoints").mkdir()
    torch.save({"step": 5}, tmp_path / "checkpoints" / "5.ckpt")
    whole = (tmp_path / "checkpoints" / "5.ckpt").read_bytes()
    (tmp_path / "checkpoints" / "9.ckpt").write_bytes(whole[: len(whole) // 2])
    assert last_checkpoint(tmp_path).name == "5.ckpt" and last_checkpoint(tmp_path / "none") is None


def test_divergence_is_a_line_and_ends_nothing(tmp_path):
    options = ["methods=[sgd,pb]", "rates=[0.1,1e30]", "jobs=1", "out=here", "epochs=2"]
    done = pipeback("sweep", *TINY, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = table.load(tmp_path / "here" / "results.csv").rows
    assert [row.state for row in found] == ["finished", "finished", "diverged", "diverged"]
    assert [row.slow_down for row in found if math.isfinite(row.slow_down)] == [1] == [found[0].slow_down]


def test_runs_that_log_no_loss_are_told_of_before_they_are_done(tmp_path):
    few = ["methods=[sgd]", "rates=[0.1]", "jobs=1", "out=here", "trainer.log_every_n_steps=50"]
    done = pipeback("sweep", *TINY, *few, cwd=tmp_path)
    assert done.returncode == 0 and "log no training loss at trainer.log_every_n_steps=50" in done.stderr
    (row,) = table.load(tmp_path / "here" / "results.csv").rows
    assert row.updates == 0 and math.isnan(row.train_loss) and math.isnan(row.slow_down) and row.measures
    cure = done.stderr.strip().rpartition("give ")[2]
    done = pipeback("sweep", *TINY, *few[:-1], cure, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr
    assert math.isfinite(table.load(tmp_path / "here" / "results.csv").rows[0].train_loss)
    assert len(list((tmp_path / "here").glob("*/metrics.csv"))) == 2  # beside the other run, not over it


def test_a_failure_is_named_and_the_others_are_written(tmp_path, monkeypatch):
    from pipeback.recipes import work

    run = work.run

    def breaks(values, more):
        if values["label"] == "pb":
            raise RuntimeError("no such memory")
        return run(values, more)

    monkeypatch.setattr(work, "run", breaks)
    done = pipeback("sweep", *TINY, "methods=[pb,sgd]", "jobs=1", "out=here", cwd=tmp_path)
    assert done.returncode == 1 and "pb-seed0 failed; here/pb-seed0/log.txt tells how" in done.stderr
    assert [row.method for row in table.load(tmp_path / "here" / "results.csv").rows] == ["sgd"]
    monkeypatch.undo()
    assert pipeback("sweep", *TINY, "methods=[pb,sgd]", "jobs=1", "out=here", cwd=tmp_path).returncode == 0
    assert [row.method for row in table.load(tmp_path / "here" / "results.csv").rows] == ["pb", "sgd"]


@pytest.mark.soak
def test_several_processes_give_the_same_file(swept, tmp_path, monkeypatch):
    """The processes begin anew, so that entries made of methods=[{pb:{slack:1}}] have to reach them."""
    folder, _ = swept
    fork_for_spawn(monkeypatch)
    words = ["jobs=2" if word == "jobs=1" else word for word in SWEPT]
    assert pipeback("sweep", *TINY, *words, cwd=tmp_path).returncode == 0
    mine, others = (place / "here" / "results.csv" for place in (tmp_path, folder))
    assert mine.read_text().splitlines()[3:] == others.read_text().splitlines()[3:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["methods=[cerebas]"], "did you mean 'cerebras'?"),
        (["methods=[]"], "methods=[] trains nothing; write methods=all, or name some: methods=[sgd,pb]"),
        (["methods={pb:{slack:1},sgd:{}}"], "write 'methods=[{pb:{slack:1},sgd:{}}]'"),
        (["label=x"], "leave label= out"),
        (["logger=none"], "logger= leaves no file that is read"),
        (["trainer=plain"], "methods play no part"),
        (["vary={seed:[1,2]}"], "vary: seed is set by the sweep itself, for each run; use seeds="),
        (["vary={method:[pb,sgd]}"], "use methods="),
        (["vary={label:[a,b]}"], "leave it out of vary="),
        (["vary={optimizer.lr:[0.1]}", "rates=[0.2]"], "optimizer.lr is what rates= varies"),
        (["vary=[model.depth]"], "vary=[model.depth] must map options to lists of values"),
        (
            ["methods=[sgd,pb]", "reference=bp"],
            "reference=bp is neither a method of this sweep, which has sgd, pb, nor",
        ),
        (["methods=[sgd,cerebras]", "reference=cerebas"], "did you mean 'cerebras'?"),
        (["data.samples=-3"], "data.samples must be a whole number of at least 1, but is -3"),
        (["methods=[eigendelay]"], "written for Adam and AdamW"),
        (["rates=0.1"], "rates=0.1 must be a list of values, for example rates=[0.1]"),
        (["rates=[]"], "must be a list of values"),
        (["methods=[sgd]", "rates={sgd:0.1}"], "a method must have a list of values, for example 'rates={sgd:[0.1]}'"),
        (["methods=[sgd,pb]", "rates={sgd:[1]}"], "rates has none for pb; name it, for example 'rates={pb:[1]}'"),
        (["methods=[sgd]", "rates={sgd:[1],pb:[1]}"], "rates: pb: methods= has no such method; it has sgd"),
        (["vary={model.depth:4}"], "model.depth must have a list of values, for example 'vary={model.depth:[4]}'"),
        (["methods=[sgd]", "vary={model.dept:[4]}"], "did you mean 'model.depth'?"),
        (["seeds=0"], "seeds must be a whole number of at least 1, but is 0"),
        (["-m"], "methods=[...]"),
        (["method=pb"], "methods=[...]"),
        (["experiment=digts"], "did you mean 'digits'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_shows_before_anything_starts(arguments, message, tmp_path):
    done = pipeback("sweep", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_cures_work_as_typed(tmp_path):
    for word in ("rates=0.1", "vary={model.depth:3}"):
        told = pipeback("sweep", *TINY, "methods=[sgd]", word, cwd=tmp_path).stderr
        cure = shlex.split(told.partition("for example ")[2])[0]
        done = pipeback("sweep", *TINY, "methods=[sgd]", cure, "jobs=1", "out=here", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert {row.options.get("model.depth") for row in table.load(tmp_path / "here" / "results.csv").rows} == {"3"}


def test_what_a_file_loses_is_said_and_batches_are_those_of_the_runs(tmp_path):
    """Lines of another configuration, too, whose runs stay."""
    words = [*TINY, "methods=[{sgd:{}},sgd]", "jobs=1", "out=here"]
    done = pipeback("sweep", *words, "vary={batch_size:[32,48]}", cwd=tmp_path)
    assert done.returncode == 0 and "loses" not in done.stdout, done.stderr
    found = table.load(tmp_path / "here" / "results.csv")
    assert "updates are counted in batches of 32 or 48 samples, of several updates each" in found.notes
    again = pipeback("sweep", *words, "vary={batch_size:[48]}", cwd=tmp_path).stdout.replace("\n", " ")
    assert "results.csv loses 1 line of other runs, whose folders stay; out= of its own keeps both" in again
    other = pipeback("sweep", *words, "vary={batch_size:[48]}", "model.depth=3", cwd=tmp_path)
    assert "loses 1 line" in other.stdout.replace("\n", " ")
    assert len(list((tmp_path / "here").glob("*/progress.json"))) == 3


def test_places_of_this_machine_are_left_out():
    assert sweep.public("data.root=/home/me/data") == "data.root=data"
    assert sweep.public("out=/home/me/out/") == "out=out" and sweep.public("reference=~/a/b") == "reference=b"
    assert (
        sweep.public("rates=[1e-3,2e-3]") == "rates=[1e-3,2e-3]" and sweep.public("data.root=data") == "data.root=data"
    )


# -- curves -----------------------------------------------------------------------------------------------------------


def test_smoothing_is_the_mean_of_the_last_updates():
    found = smoothed(range(1, 11), [float(n) for n in range(10)], width=4)
    assert found.updates == list(range(4, 11)) and found.losses == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]
    assert smoothed([1, 2], [3.0, 5.0], width=50) == Curve([2], [4.0])
    assert found.at(5) == 2.5 and found.end == 7.5 and math.isnan(found.at(3))


def test_a_slow_down_compares_updates_at_one_loss():
    reference = Curve([100, 200, 300, 400], [4.0, 3.0, 2.5, 2.25])
    late = Curve([100, 200, 300, 400], [5.0, 4.0, 3.5, 3.0])  # is at 400 where the reference is at 200
    assert slow_down(late, reference) == 2.0 and slow_down(reference, reference) == 1.0
    early = Curve([100, 200, 300, 400], [3.0, 2.25, 2.0, 1.9])
    assert slow_down(early, reference) == 0.5
    assert reaches(reference, 3.5) == 150 and reaches(reference, 1.0) == math.inf and reaches(reference, 5.0) == 100
    assert math.isnan(slow_down(late, Curve([50, 400], [2.9, 2.0])))  # it was there before its first point
    short = Curve([7], [2.1])
    assert math.isnan(slow_down(Curve([7], [2.5]), short)) and slow_down(short, short) == 1.0
    assert math.isnan(slow_down(Curve([], []), reference)) and math.isnan(slow_down(Curve([1], [math.inf]), reference))


def test_folders_of_one_name_are_two_runs(tmp_path, monkeypatch):
    """Two sweeps of one process, each in its own working directory, and a folder whose run is done once more."""
    here = [Job("sgd", {}, 0, Path("here/sgd"), True, {})]

    def ends(loss):
        (tmp_path / "here" / "sgd").mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path)
        Path("here/sgd/metrics.csv").write_text(f"step,train/loss,val/loss\n0,{loss},\n")
        Path("here/sgd/progress.json").write_text('{"state": "finished"}')
        return table.rows_of(here, "sgd")[0].train_loss

    assert ends(1.0) == 1.0
    tmp_path /= "other"
    assert ends(2.0) == 2.0
    assert ends(3.0) == 3.0


def test_a_reference_from_another_sweep_has_the_options_that_either_sweep_varied(tmp_path):
    """By the configurations of its runs, in which a group of options stands as a whole, and a folder by any path."""

    def run(folder, depth, optimizer, lr, seconds, root="text"):
        options = {"model": {"depth": depth}, "optimizer": {"name": optimizer, "lr": lr}, "data": {"root": root}}
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.yaml").write_text(json.dumps({"label": "sgd", "seed": 0, **options}))
        losses = "".join(f"{n},{8 - n / seconds:.6f},\n" for n in range(400))
        (tmp_path / folder / "metrics.csv").write_text(f"step,train/loss,val/loss\n{losses}")
        (tmp_path / folder / "progress.json").write_text('{"state": "finished"}')
        return options

    varied = [(depth, name, lr) for depth in (3, 4) for name in ("SGD", "AdamW") for lr in (0.1, 0.3)]
    for n, (depth, name, lr) in enumerate(varied):  # the second rate is the better one
        run(f"first/{n}", depth, name, lr, 100 * (1 + n // 2) - (1 if lr == 0.3 else 0))
    rows = [
        table.Row("sgd", {"model.depth": str(depth), "optimizer": name}, 0, "finished", 400, {}, 1, 1, 1, {})
        for depth, name, _ in varied
    ]
    table.save(tmp_path / "first" / table.FILE, table.Results("pipeback sweep", "some", {"date": "now"}, [], rows))

    def slow_downs(varied, *runs):
        """Of runs, by the options that their sweep varied; nan: no reference has their options."""
        jobs = []
        for depth, name, root in runs:
            home = f"second/{len(list(tmp_path.glob('second/*')))}"
            options = {**run(home, depth, name, 0.7, 400, root), "method": {"scale": 4.0}}
            mine = {key: options[key.split(".")[0]][key.split(".")[1]] for key in varied}
            jobs.append(Job("pb", mine, 0, tmp_path / home, True, options))
        return [row.slow_down for row in table.rows_of(jobs, str(tmp_path / "first"))]

    def against(*numbers):
        late = curve(tmp_path / "second" / "0")  # all runs of the second sweep have the same losses
        return [pytest.approx(slow_down(late, curve(tmp_path / "first" / str(n)))) for n in numbers]

    assert slow_downs(["model.depth"], (3, "SGD", "text"), (4, "SGD", "text")) == against(1, 5)
    assert slow_downs([], (4, "AdamW", "text")) == slow_downs(["method.scale"], (4, "AdamW", "text")) == against(7)
    assert slow_downs(["data.root"], (3, "AdamW", "/home/me/text")) == against(3)
    assert all(map(math.isnan, slow_downs(["data.root"], (3, "AdamW", None))))
    assert all(map(math.isnan, slow_downs(["model.depth"], (5, "SGD", "text"))))
    assert len({str(one.expected) for one in against(1, 3, 5, 7)}) == 4


def test_a_held_out_slow_down_is_that_of_the_drained_model(tmp_path):
    """Lightning numbers the last validation, of the drained pipeline, one further; a resumed run logs some twice."""
    lines = ["step,train/loss,val/loss", *(f"{n},1.0," for n in range(400))]
    lines += ["99,,4.0", "199,,3.0", "299,,2.6", "299,,2.5", "399,,2.1", "400,,2.25"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    found = held_out(tmp_path)
    assert found == Curve([100, 200, 300, 400], [4.0, 3.0, 2.5, 2.25])
    worse = Curve([200, 400], [3.5, 3.0])
    assert held_out_slow_down(worse, found) == 2.0 and held_out_slow_down(found, found) == 1.0
    assert held_out_slow_down(Curve([400], [1.0]), found) == 1.0  # a better one needs no more
    assert math.isnan(held_out_slow_down(Curve([400], [4.5]), found))  # where the reference was is not known
    assert held_out(tmp_path / "none") == Curve([], []) and math.isnan(held_out_slow_down(Curve([], []), found))
