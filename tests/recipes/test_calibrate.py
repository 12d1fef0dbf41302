"""`pipeback plan calibrate`: what cannot be measured is refused, and no option is passed over in silence."""

import io
import json
import re
import shlex

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from rich.console import Console

from pipeback.recipes import plan
from pipeback.recipes.planning import calibrate

SMALL = ["experiment=digits", "data.samples=96", "model.depth=2", "most=2", "method=pb"]


def calibrated(*words):
    """What is printed."""
    console = Console(file=io.StringIO(), width=170)
    calibrate.main(list(words), console)
    return console.file.getvalue()


def untrained(monkeypatch):
    def training(values):
        raise AssertionError("trained")

    monkeypatch.setattr(calibrate, "training", training)


@pytest.mark.filterwarnings("ignore:the loss of push")
def test_a_training_that_diverges_without_delay_is_refused(tmp_path):
    file = tmp_path / "slow.json"
    with pytest.raises(ValueError, match="without delay the training diverges within 32 updates") as error:
        calibrated(*SMALL, "updates=96", "optimizer.lr=1e9", f"out={file}")
    cure = re.search(r"for example (\S+)$", str(error.value))[1]
    assert not file.exists()
    assert "pb: slow = 1 + " in calibrated(*SMALL, "updates=96", cure, f"out={file}") and file.is_file()


def test_a_loss_that_does_not_fall_is_refused():
    with pytest.raises(ValueError, match="does not fall below that of the first 32 updates.* updates=2000, or lower"):
        calibrated(*SMALL, "updates=20")


@pytest.mark.parametrize(
    ("loss", "said"), [(2.0, "not there after 128 updates"), (float("inf"), "diverged within 128")]
)
def test_a_run_that_does_not_get_there_is_a_bound(loss, said, monkeypatch):
    def losses(made, method, most, window, target=None):
        return ([(32, 3.0), (64, 1.0)], [0]) if target is None else ([(32, 3.0), (128, loss)], [4])

    monkeypatch.setattr(calibrate, "losses", losses)
    told = calibrated(*SMALL)
    assert said in told and "more than 2.00" in told and "or more: not every run was there in 2 times" in told


def test_seeds_begin_at_that_which_is_given(tmp_path, monkeypatch):
    def losses(made, method, most, window, target=None):
        return [(32, 3.0), (64, 1.0)], [4]

    monkeypatch.setattr(calibrate, "losses", losses)
    told = calibrated(*SMALL, "seed=5", "seeds=2", f"out={tmp_path / 'slow.json'}")
    assert "seed 5:" in told and "seed 6:" in told and "seed 0" not in told
    assert json.loads((tmp_path / "slow.json").read_text("utf-8"))["made"]["seed"] == 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("methods=[pb]", "methods=[pb]: methods is an option of `pipeback compare`; write method=, such as method=pb"),
        ("method.slack=1", "calibrate would not heed method.slack=1; leave it out"),
        ("optimizer.decay=cosine", "calibrate would not heed optimizer.decay=cosine; leave it out"),
        ("seed=-1", "seed must be a whole number of at least 0, but is '-1'"),
        ("out=nowhere/slow.json", "out=nowhere/slow.json: there is no folder nowhere; make it first"),
    ],
)
def test_what_is_refused_before_anything_is_trained(words, says, monkeypatch):
    untrained(monkeypatch)
    with pytest.raises(ValueError, match=re.escape(says)):
        calibrated(*SMALL, words)


def test_the_help_has_commands_that_work(tmp_path, monkeypatch):
    """They come as far as training, with everything that is written there."""
    untrained(monkeypatch)
    monkeypatch.chdir(tmp_path)
    lines = [line.partition(" #")[0] for line in f"{plan.__doc__}{calibrate.__doc__}".splitlines()]
    typed = [shlex.split(line)[3:] for line in lines if line.startswith("    pipeback plan calibrate")]
    assert len(typed) == 3
    for words in typed:
        with pytest.raises(AssertionError, match="trained"):
            calibrated(*words)
