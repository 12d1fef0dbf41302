"""Progress bars are drawn where a line can be drawn anew: in a terminal, and not in files or cells of a notebook."""

import sys

import pytest
from omegaconf import OmegaConf

from pipeback.recipes.live import redraws
from pipeback.recipes.train import trainer_of

CONFIG = {
    "trainer": {"_target_": "lightning.pytorch.Trainer", "accelerator": "cpu", "max_epochs": 1},
    "callbacks": {"bar": {"_target_": "lightning.pytorch.callbacks.RichProgressBar"}},
    "logger": {},
}


def test_without_standard_output_nothing_is_drawn(monkeypatch):
    """As after `>&-` in a shell."""
    monkeypatch.setattr(sys, "stdout", None)
    assert not redraws()


@pytest.mark.parametrize(
    ("terminal", "notebook", "drawn"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_bars(monkeypatch, terminal, notebook, drawn):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    if notebook:
        monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert redraws() == drawn
    trainer, _ = trainer_of(OmegaConf.create(CONFIG))
    assert (trainer.progress_bar_callback is not None) == drawn
