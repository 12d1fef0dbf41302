"""Places of a sweep: folders among its options are told apart, by as many parts as that takes, and so are its runs."""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")

from pipeback.recipes.sweeps import table
from pipeback.recipes.sweeps.jobs import Job, folder, planned
from pipeback.recipes.sweeps.places import named, shortened


def test_folders_whose_last_parts_are_alike_are_told_apart():
    assert named(["/a/v1/digits", "/b/text"]) == {"/a/v1/digits": "digits", "/b/text": "text"}
    assert named(["/a/v1/digits", "/a/v2/digits"]) == {"/a/v1/digits": "v1/digits", "/a/v2/digits": "v2/digits"}
    assert named(["~/v1/x/digits", "~/v2/x/digits"])["~/v2/x/digits"] == "v2/x/digits"
    assert set(named(["/a/b", "a/b", "b"]).values()) == {"/a/b", "a/b", "b"}
    assert named(["None", "3", "3.0"]) == {"None": "None", "3": "3", "3.0": "3.0"}
    assert shortened("vary={data.root:[/a/b,~/c/]}") == "vary={data.root:[b,c]}"


def run(out, root, label="sgd", lr=0.1, seconds=100.0):
    """A run that has ended, of these data; its loss falls as fast as `seconds` say."""
    out.mkdir(parents=True)
    told = {"label": label, "seed": 0, "optimizer": {"lr": lr}, "data": {"root": root}}
    (out / "config.yaml").write_text(json.dumps(told))
    losses = "".join(f"{n},{8 - n / seconds:.6f},\n" for n in range(400))
    (out / "metrics.csv").write_text(f"step,train/loss,val/loss\n{losses}")
    (out / "progress.json").write_text('{"state": "finished"}')
    return Job(label, {"data.root": root}, 0, out, True, told)


def saved(folder, jobs):
    found = table.Results("pipeback sweep", "some", {"date": "now"}, table.notes("sgd"), table.rows_of(jobs, "sgd"))
    table.save(folder / table.FILE, found)
    return found


def test_two_folders_are_two_lines_and_none_is_lost(tmp_path):
    jobs = [run(tmp_path / "here" / str(n), f"/far/v{n}/digits") for n in range(2)]
    found = saved(tmp_path / "here", jobs)
    assert [row.options["data.root"] for row in found.rows] == ["v0/digits", "v1/digits"]
    assert table.missing(tmp_path / "here" / table.FILE, jobs) == 0
    assert table.missing(tmp_path / "here" / table.FILE, jobs[:1]) == 1  # which alone is called digits
    saved(tmp_path / "here", jobs[:1])
    assert table.missing(tmp_path / "here" / table.FILE, jobs) == 0


def test_a_reference_has_the_folder_of_the_run(tmp_path):
    others = [run(tmp_path / "first" / str(n), f"/far/v{n}/digits", seconds=50 * (1 + n)) for n in range(2)]
    saved(tmp_path / "first", others)

    def slow_downs(*roots):
        home = tmp_path / "second" / str(len(list(tmp_path.glob("second/*"))))
        jobs = [run(home / str(n), root, "pb", seconds=100) for n, root in enumerate(roots)]
        return [row.slow_down for row in table.rows_of(jobs, str(tmp_path / "first"))]

    assert slow_downs("/near/v1/digits") == [1.0]
    assert slow_downs("/near/v0/digits", "/near/v1/digits")[0] > 1.5
    assert math.isnan(slow_downs("/near/v2/digits")[0])


def test_folders_of_this_machine_are_no_others(tmp_path):
    """Folders that are not here may be copies of those on another machine."""
    for name in ("v1/digits", "v2/digits"):
        Path(tmp_path / name).mkdir(parents=True)
    saved(tmp_path / "first", [run(tmp_path / "first" / "0", f"{tmp_path}/v1/digits")])
    for root, slow in ((f"{tmp_path}/v2/digits", math.nan), (f"{tmp_path}/v1/digits", 1.0), ("/far/digits", 1.0)):
        job = run(tmp_path / "second" / root.replace("/", "_"), root, "pb")
        assert table.rows_of([job], str(tmp_path / "first"))[0].slow_down == pytest.approx(slow, nan_ok=True)


@pytest.mark.parametrize(
    ("key", "values", "names"),
    [
        ("optimizer.lr", [0.1, 0.1000001, 0.1000002], ["sgd-lr0.1-seed0", "sgd-lr0.1-seed0-2", "sgd-lr0.1-seed0-3"]),
        ("data.root", ["d/a", "d_a"], ["sgd-rootd_a-seed0", "sgd-rootd_a-seed0-2"]),
        ("validate_every", [1, 1.0], ["sgd-validate_every1-seed0", "sgd-validate_every1-seed0-2"]),
        ("validate_every", [1, 2], ["sgd-validate_every1-seed0", "sgd-validate_every2-seed0"]),
    ],
)
def test_runs_whose_folders_are_spelt_alike_have_one_each(key, values, names, tmp_path):
    """Whichever of them have begun when the command is given again."""

    def compose(label, varied, seed, home=None):
        told = {"label": label, "seed": seed, **varied, "out": str(home or tmp_path / folder(label, varied, seed))}
        return told, json.dumps(told)

    def plan(values):
        return planned({"sgd": [{key: value} for value in values]}, [0], compose)

    jobs = plan(values)
    assert [job.out.name for job in jobs] == [Path(job.values["out"]).name for job in jobs] == names
    for n, job in enumerate(jobs):
        job.out.mkdir()
        (job.out / "config.yaml").write_text(json.dumps(job.values))
        (job.out / "progress.json").write_text('{"state": "finished"}')
        again = plan(values)
        assert [job.out.name for job in again] == names and [job.done for job in again].count(True) == n + 1
    assert [(job.out.name, job.done) for job in plan(values[::-1])] == [(name, True) for name in names[::-1]]


def test_choices_of_one_configuration_are_one_run(tmp_path):
    def compose(label, varied, seed, home=None):
        told = {"lr": float(varied["optimizer.lr"]), "out": str(home or tmp_path / folder(label, varied, seed))}
        return told, json.dumps(told)

    assert len(planned({"sgd": [{"optimizer.lr": 1}, {"optimizer.lr": 1.0}]}, [0], compose)) == 1
