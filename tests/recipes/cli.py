"""`pipeback ...` in this process, which has torch, Lightning and Hydra loaded; and what a run left in its folder."""

import csv
import io
import logging
import os
import sys
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest
import torch
import yaml
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from pipeback.recipes import forks
from pipeback.recipes.main import main
from tests.helpers.processes import forked

# of digits: three batches an epoch, five stages, every number logged
SMALL = ["quick=true", "data.samples=96", "model.depth=4", "validate_every=1.0", "trainer.log_every_n_steps=1"]
# no stages run as one: to find out whether they should takes longer than the run, and they round in another way
TINY = [*SMALL, "trainer.strategy.vectorize=false"]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def pipeback(*arguments, cwd, run=main):
    """run: what is run instead of `pipeback`, with these arguments."""
    out, err, threads, code = io.StringIO(), io.StringIO(), torch.get_num_threads(), 0
    GlobalHydra.instance().clear()
    methods = dict(ConfigStore.instance().repo.get("method", {}))
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        patch.chdir(cwd)
        # no file in conf/ has a mode, for which Hydra would compose everything once more
        patch.setattr(Hydra, "get_mode", lambda *given, **named: None)
        patch.setattr(forks, "begin", forked)  # of what other tests need, too
        patch.setattr(sys, "argv", ["pipeback", *map(str, arguments)])
        try:
            run()
        except SystemExit as end:  # a message as the code is what Python itself would print
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            err.write(end.code if isinstance(end.code, str) else "")
    assert "HYDRA_FULL_ERROR" not in os.environ
    torch.set_num_threads(threads)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    if "method" in ConfigStore.instance().repo:
        ConfigStore.instance().repo["method"] = methods
    return Done(code, out.getvalue(), err.getvalue())


def apart(command, *arguments, cwd):
    """`pipeback COMMAND ...` in a process of its own, the first of its group, with all that it says in said.txt."""
    process = forked().Process(target=_apart, args=(command, [*map(str, arguments)], str(cwd)))
    process.start()
    return process


def _apart(command, words, folder):
    os.setsid()
    os.chdir(folder)
    with open("said.txt", "w") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    sys.argv = ["pipeback", command, *words]
    main()


@contextmanager
def joblib_processes():
    """Hydra's launcher for several processes; skips where it is not installed.

    Those that it keeps are ended before, since they stay in the folder of the test that started them, and a run writes
    into a path that begins there.
    """
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(kill_workers=True)
    try:
        yield
    finally:
        get_reusable_executor().shutdown(kill_workers=True)


def rows(run):
    """Of metrics.csv: numbers by column, what is empty left out."""
    with open(run / "metrics.csv", newline="") as lines:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]


def numbers(run):
    """What the run computed: its losses and measures, without times and without the step, which Lightning miscounts by
    one after a checkpoint made at the validation that ends an epoch.
    """
    names = ("samples_seen", "train/loss", "val/loss", "val/accuracy")
    found = [{k: row[k] for k in names if k in row} for row in rows(run)]
    return [row for row in found if "train/loss" in row or "val/loss" in row]


def facts(run):
    return yaml.safe_load((run / "hparams.yaml").read_text())


def config(run):
    return OmegaConf.load(run / "config.yaml")
