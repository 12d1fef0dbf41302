"""What comparisons and sweeps refuse of their options, and the cures in the messages, typed."""

from __future__ import annotations

import re
import shlex
from functools import partial

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeback.recipes.method_entries import labels_of
from pipeback.recipes.run_checks import check_runs, check_words
from pipeback.recipes.sweep import check_reference
from pipeback.recipes.sweeps.jobs import axes
from tests.recipes.cli import pipeback

from .rows import refused


def value(word):
    """What a word of a command says."""
    return OverridesParser.create().parse_override(word).value()


@pytest.mark.parametrize(
    ("word", "cure", "labels"),
    [
        ("methods=sgd", "methods=[sgd]", ["sgd"]),
        ("methods={pb:{slack:1}}", "'methods=[{pb:{slack:1}}]'", ["pb-slack1"]),
        ("methods={pb:{slack:1},sgd:{}}", "'methods=[{pb:{slack:1},sgd:{}}]'", ["pb-slack1", "sgd"]),
        ("methods=[]", "methods=[sgd,pb]", ["sgd", "pb"]),
        ("methods=3", "methods=[sgd,pb]", ["sgd", "pb"]),
    ],
)
def test_methods(word, cure, labels):
    says = "must be a list, in brackets|methods=.. compares nothing|names none; write"
    told = refused(partial(labels_of, value(word), ["sgd"], "compares"), says)
    assert cure in told
    (typed,) = shlex.split(cure)
    assert labels_of(value(typed), ["sgd"], "compares") == labels
    assert labels_of(value("methods=[{pb:{}},pb]"), ["sgd"], "compares") == ["pb"]


@pytest.mark.parametrize(
    ("vary", "rates", "says"),
    [
        ("vary=[model.depth]", None, "must map options to lists of values, for example"),
        ("vary={seed:[1]}", None, "is set by the sweep itself, for each run; use seeds="),
        ("vary={optimizer.lr:[1]}", [1], "is what rates= varies; leave one of both out, for example rates=null"),
    ],
)
def test_vary(vary, rates, says):
    told = refused(lambda: axes({"vary": value(vary), "rates": rates}), says)
    cure = re.search(r"for example ('.*'|rates=null)", told)
    word = shlex.split(cure[1])[0] if cure else "vary=null"
    given = {"vary": value(vary), "rates": rates, word.partition("=")[0]: value(word)}
    assert axes(given) == (given["vary"] or {})


def config(strategy, logger):
    return {"trainer": {"strategy": strategy}, "logger": {"one": {"_target_": logger}}}


def test_runs():
    own, csv = {"_target_": "pipeback.lightning.PipelineStrategy"}, "lightning.pytorch.loggers.CSVLogger"
    refused(lambda: check_words(["label=x"]), "would name every run alike; leave label= out")
    check_words(["seeds=2"])
    refused(lambda: check_runs(config("auto", csv)), "play no part; leave trainer=plain and trainer.strategy= out")
    refused(lambda: check_runs(config(own, "a.WandbLogger")), "leaves no file .* choose logger=csv, or logger=both")
    check_runs(config(own, csv))
    refused(lambda: check_runs(config(own, "a.WandbLogger"), offline=True), "leaves no file")
    check_runs({**config(own, csv), "logger": {"w": {"_target_": "a.WandbLogger", "offline": True}}}, offline=True)


def test_reference(tmp_path):
    table = "# pipeback sweep\n# experiment: a, runs: 1\n# date: b\nmethod,seed,state,updates,train_loss,slow_down,"
    (tmp_path / "results.csv").write_text(f"{table}held_out_slow_down\npb,0,finished,1,1,1,1\n")
    told = refused(lambda: check_reference(str(tmp_path), ["pb"]), "or a method of this one: reference=pb")
    check_reference(told.rpartition("=")[2], ["pb"])
    refused(lambda: check_reference("cerebas", ["cerebras"]), "did you mean 'cerebras'")


@pytest.mark.parametrize("loggers", ["csv", "both"])
def test_loggers(loggers, tmp_path):
    """Both that are named pass, up to the next mistake."""
    done = pipeback("compare", f"logger={loggers}", "methods=[]", cwd=tmp_path)
    assert "methods=[] compares nothing" in done.stderr
