"""`pipeback plan`: the table, budgets that refuse, and what was measured beside what was predicted."""

import re

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from tests.recipes.cli import pipeback

SMALL = ["stages=4", "width=16", "micro_batches=4", "samples=2"]


@pytest.fixture(autouse=True)
def a_short_search(monkeypatch):
    monkeypatch.setattr("pipeback.plan.training_plan.WORK", 1000)


@pytest.mark.parametrize("store", ["device", "host", "disk", "disk:here"])
def test_the_table_and_a_run(store, tmp_path):
    done = pipeback("plan", *SMALL, f"store={store}", "method=gpipe", "run=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 stages" in done.stdout and "pushes of 4 × 2 samples" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == (["here"] if store == "disk:here" else [])
    if store == "device":
        assert "a push takes" in done.stdout
        return
    measured = done.stdout.partition("2 pushes, on average")[2]
    for name in ("weights in per push", "gradients out per push", "weights on the device"):
        found = re.search(rf"^ ?{name}  +(\S+ \S+)  +(\S+ \S+) *$", measured, re.MULTILINE)
        assert found and found[1] == found[2], name
    assert "batch window" in done.stdout and ("written per day" in done.stdout) == store.startswith("disk")


def test_an_experiment(tmp_path):
    options = ["experiment=digits", "model.depth=4", "data.samples=96", "method=pb", "store=host", "run=1"]
    done = pipeback("plan", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "5 stages" in done.stdout and "pushes of 32 × 1 sample" in done.stdout and "measured" in done.stdout


def test_what_does_not_fit(tmp_path):
    done = pipeback(
        "plan", *SMALL, "store=host", "device_memory=6 kB", "micro_batches=32", "method=gpipe", cwd=tmp_path
    )
    assert done.returncode and "on the device" in done.stdout  # the plan is told first
    assert done.stderr.startswith("pipeback plan: device_memory=6 kB is too little by") and "What fits:" in done.stderr


@pytest.mark.parametrize("words, text", [
    (["stage=3"], "'stage=3' is not an option; did you mean 'stages'?"),
    (["stages=0"], "stages must be a whole number of at least 1, but is '0'"),
    (["store=hots"], "store=hots is unknown; write device, host, disk or disk:FOLDER"),
    (["store=host", "device_memory=much"], "device_memory='much' is no size"),
    (["store=device", "device_memory=1 GB"], "budgets are kept by a store"),
    (["optimizer=SDG"], "torch.optim has no 'SDG'; did you mean 'SGD'?"),
    (["method=nope"], "nope"),
    (["experiment=digits", "method=nope"], "there is no method=nope"),
    (["experiment=digits", "store=hots"], "store=hots is unknown"),
    (["experiment=digits", "out=q.png"], "'out=q.png': files are written of a model by name, as in pipeback plan gpt"),
    (["stages=4", "json=q.json"], "devices=64xA100 out=plan.html; leave it out"),
])  # fmt: skip
def test_mistakes_are_one_line(words, text, tmp_path):
    done = pipeback("plan", *words, cwd=tmp_path)
    assert done.returncode and text in done.stderr and len(done.stderr.strip().splitlines()) == 1
