"""Ordinary mistakes at `pipeback train` end in one sentence that names the option; Ctrl-C says how to go on."""

import io
import runpy
import signal
import sys

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from pipeback.recipes import callbacks, command, logs, train
from pipeback.recipes.live import state
from pipeback.recipes.report import as_options
from tests.recipes.cli import TINY, pipeback

UNREADABLE = {"torn": "a: [1\nb: {", "typo": "_target_: pipebak.nothing"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out=a file"], "out=a file: a file is a file, and a run needs a folder"),
        (["out=a file/below"], "a file is a file, and a run needs a folder"),
        (["out="], "out= names no folder; leave it out, or write for example out=outputs/mine"),
        (["seed=-1"], "seed must be a whole number from 0 to 4294967295, but is -1"),
        (["ckpt_path=a file"], "ckpt_path=a file is no checkpoint"),
        (["optimizer.lr=-1"], "optimizer.lr must be a number of at least 0, but is -1"),
        (["model.width=-4"], "model.width must be a whole number of at least 1, but is -4"),
        (["data.root=a file"], "data.root=a file"),
        (["--config-dir", "conf", "optimizer=torn"], "a file of the configuration is not YAML: "),
        (["--config-dir", "conf", "optimizer=typo"], "Error loading 'pipebak.nothing'"),
        (["trainer.limit_train_batches=3"], "but Trainer takes it; write +trainer.limit_train_batches=... to add it"),
        (["method=lwp", "optimizer=adamw"], "use method=lwp_w, or one of those"),
        (["out=Größe", "epochs=0"], "epochs must be a whole number of at least 1"),
    ],
)
def test_a_mistake_is_one_sentence(words, message, tmp_path):
    (tmp_path / "a file").write_text("hello")
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    for name, text in UNREADABLE.items():
        (tmp_path / "conf" / "optimizer" / f"{name}.yaml").write_text(text)
    done = pipeback("train", *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert {each.name for each in tmp_path.iterdir()} == {"a file", "conf"}


def test_a_fault_of_the_library_keeps_its_traceback():
    for fault in (RuntimeError("no"), ImportError("cannot import name 'x'"), OSError("no"), KeyError("no")):
        with pytest.raises(type(fault)), command.mistakes("train"):
            raise fault


@pytest.mark.parametrize("value", ["Größe", "a<b", "a&b", "it's", "a(b)", "epoch=3", "~/out", "1;2", "x #1"])
def test_values_with_any_characters(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    word = as_options([f"title={value}", "runs=x"])[0]
    assert OverridesParser.create().parse_override(word).value() == value
    assert command.quoted(word) == word


def test_what_has_a_grammar_is_left():
    for kept in ("methods=[sgd,pb]", "seed=0,1", "seed=range(0,3)", "out=${name}", "model={a: 1}", "out='a b'"):
        assert command.quoted(kept) == kept
    assert command.quoted("label=a, ü") == "label=a,'ü'"


@pytest.mark.parametrize(
    ("words", "sorted_"),
    [
        (["--info", "config", "a=1"], ["a=1", "--info", "config"]),
        (["--info", "a=1"], ["a=1", "--info"]),
        (["-i", "~a", "b=1"], ["~a", "b=1", "-i"]),
        (["--experimental-rerun", "x.pickle", "a=1"], ["a=1", "--experimental-rerun", "x.pickle"]),
        (["-cn", "b", "a=1", "-m"], ["a=1", "-cn", "b", "-m"]),
    ],
)
def test_the_value_of_a_flag_stays_behind_it(words, sorted_):
    assert command.ordered(words) == sorted_


def test_w_and_b_before_a_login(monkeypatch):
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    def refuses(self, params):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(WandbLogger, "log_hyperparams", refuses)
    with pytest.raises(ValueError, match="No API key configured.*give logger=wandb_offline or logger=csv"):
        logs.begin([WandbLogger(offline=True)], {}, None)


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C at the beginning of the second epoch."""

    def hears(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(callbacks.Lines, "on_train_epoch_start", hears)
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)  # Lightning no longer listens


def test_ctrl_c_says_how_to_go_on_and_a_checkpoint_of_another_model_does_not_fit(interrupted, tmp_path):
    done = pipeback("train", *TINY, "epochs=2", "out=my run", "logger=none", cwd=tmp_path)
    assert done.returncode == 130, done.stderr
    word = "ckpt_path=my run/checkpoints/last.ckpt"
    assert done.stderr.endswith(f"pipeback train: stopped. The same command with '{word}' goes on\n")
    assert train.stopped(tmp_path / "my run", 1e12) == "pipeback train: stopped before the first checkpoint"
    done = pipeback("train", *TINY, "model.depth=3", word, "out=other", "logger=none", cwd=tmp_path)
    assert done.returncode == 2 and f"{word} does not fit: give the options of its run" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", ["5", "1e3", "0.50"])
def test_a_folder_may_be_called_by_a_number(number, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(train, "run", lambda values, say: seen.append(values))
    done = pipeback("train", *TINY, f"out={number}", "label=7", cwd=tmp_path)
    assert done.returncode == 0 and f"`pipeback report {number}` shows it" in done.stdout, done.stderr
    assert (seen[0]["out"], seen[0]["logger"]["csv"]["save_dir"], seen[0]["label"]) == (number, number, "7")


def test_a_sweep_goes_on_from_no_checkpoint_of_another(tmp_path):
    done = pipeback("sweep", *TINY, "methods=[sgd]", "ckpt_path=last.ckpt", cwd=tmp_path)
    assert done.returncode == 2 and "leave ckpt_path= out" in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.depth=null"], "model.depth must not be null; give a value, for example model.depth="),
        (["model.width=null"], "model.width must not be null; give a value, for example model.width="),
        (["validate_every=1000"], "validate_every=1000 (trainer.val_check_interval) is more than the 3 batches of an"),
    ],
)
def test_what_is_refused_before_anything_is_written(words, message, tmp_path):
    given = [word for word in TINY if words[0].partition("=")[0] not in word]
    done = pipeback("train", *given, *words, "out=here", cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_command_goes_on_where_its_output_has_no_code_for_a_sign(monkeypatch, capsys):
    """And says once what shows it; `python -m pipeback` is the command, too."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["pipeback", "draw", "pb"])
    runpy.run_module("pipeback", run_name="__main__")
    sys.stdout.flush()
    assert b"0 ? F0 F1" in written.getvalue() and b"B7" in written.getvalue()
    assert capsys.readouterr().err.count("set PYTHONIOENCODING=utf-8 in front of the command") == 1


@pytest.mark.parametrize("text", ["", '{"state": "fini', "\0" * 16])
def test_a_progress_file_that_was_cut_short_is_of_a_run_that_has_not_begun(text, tmp_path):
    (tmp_path / "progress.json").write_text(text)
    assert state(tmp_path) == {}
