"""Launchers start the processes of a Trainer with several devices.

    torchrun, SLURM, ...   they have started the processes already; nothing is started here
    spawn                  `fit` starts interpreters: its arguments must be picklable, the script guarded by __main__
    fork                   `fit` forks this process; this works in notebooks
    script                 this script is run again, once per rank

"auto" is spawn, and fork in a notebook. It is never script, which would run the whole sweep again under Hydra's -m.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from pipeback.distributed.health.health import script
from pipeback.lightning import lightning_internals

LAUNCHERS = ("auto", "spawn", "fork", "script")


class Several(Protocol):
    """The part of a strategy that a launcher uses."""

    alone: bool
    start: str
    cluster_environment: Any
    num_nodes: int

    @property
    def several(self) -> bool: ...

    @property
    def num_processes(self) -> int: ...

    def check_before_launch(self, trainer: Trainer) -> None: ...


def launcher(place: Several) -> lightning_internals.Launcher | None:
    """The launcher of a strategy; None if there is nothing to start."""
    environment = place.cluster_environment
    if not place.several or environment is None:
        return None
    if environment.creates_processes_externally:
        environment.validate_settings(num_devices=place.num_processes, num_nodes=place.num_nodes)
        return None
    start = place.start
    if start == "auto":
        notebook = hasattr(sys, "ps1") and "fork" in multiprocessing.get_all_start_methods()
        start = "fork" if notebook else "spawn"
    if start == "script":
        return lightning_internals.ScriptLauncher(environment, place.num_processes, place.num_nodes)
    return ProcessFamily(place, start)


class ProcessFamily(lightning_internals.Launcher):
    """Starts the ranks of `fit` as children of this process, and takes over their results.

    Validation, test and prediction run in this process alone, which has the whole model after `fit`.
    """

    def __init__(self, place: Several, start: str) -> None:
        self._place, self._start = place, start
        self._children = _Children(place, start)  # type: ignore[arg-type]

    @property
    def is_interactive_compatible(self) -> bool:
        return self._start == "fork"

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **named: Any) -> Any:
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            self._place.alone = True
            try:
                return function(*args, **named)
            finally:
                self._place.alone = False
        lightning_internals.as_written(trainer.lightning_module)  # which is to be sent
        self._place.check_before_launch(trainer)
        ForkingPickler.register(torch.Generator, _packed)
        port = os.environ.get("MASTER_PORT")  # it will be set, and other fits must not meet there
        try:
            return self._children.launch(_Like(function), *args, trainer=trainer, **named)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if "pickle" not in str(error) and "local object" not in str(error):  # Python 3.13 names the object alone
                raise
            raise TypeError(
                f"{str(error).splitlines()[0]}: launcher='spawn' sends the LightningModule, its data and the callbacks "
                "to the processes of Trainer(devices=...). Define it at the top of a file (functools.partial instead "
                "of a lambda), or use PipelineStrategy(launcher='fork' or 'script'), or torchrun"
            ) from error
        finally:
            if port is None:
                os.environ.pop("MASTER_PORT", None)

    def kill(self, signum: Any) -> None:
        self._children.kill(signum)


class _Like:
    """A function that another process runs with the warning filters, loggers and torch threads of this one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.filters, self.threads = function, list(warnings.filters), torch.get_num_threads()
        self.levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}

    def __call__(self, *args: Any, **named: Any) -> Any:
        warnings.filters[:] = self.filters  # type: ignore[index]
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        torch.set_num_threads(min(self.threads, torch.get_num_threads()))  # bits depend on them
        with script():
            return self.function(*args, **named)


class _Children(lightning_internals.MultiProcessingLauncher):
    """Lightning's launcher, which brings back weights, metrics and the best checkpoint, and more that users read."""

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        content = {
            "callbacks": {c.state_key: c.state_dict() for c in trainer.callbacks},  # type: ignore[attr-defined]
            "progress": trainer.fit_loop.state_dict(),
            "loggers": [lightning_internals.written(logger) for logger in trainer.loggers],
            "logged": {k: torch.as_tensor(v).cpu() for k, v in trainer.logged_metrics.items()},
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        return {**super().get_extra_results(trainer), "pipeback": buffer.getvalue()}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        content = torch.load(io.BytesIO(extra["pipeback"]), weights_only=False)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            state = content["callbacks"].get(callback.state_key)
            if state:
                if "dirpath" in state and getattr(callback, "dirpath", "") is None:
                    callback.dirpath = state["dirpath"]  # of a ModelCheckpoint, which has looked for it there
                callback.load_state_dict(state)
        trainer.fit_loop.load_state_dict(content["progress"])
        trainer.fit_loop.restarting = False  # the fit is over
        trainer.logged_metrics.update(content["logged"])
        for logger, state in zip(trainer.loggers, content["loggers"], strict=True):
            vars(logger).update(state)


def _packed(generator: torch.Generator) -> Any:
    """Pickles a generator, of a sampler say. torch would send it in shared memory, which is gone when it arrives."""
    return _unpacked, (str(generator.device), generator.get_state().numpy().tobytes())


def _unpacked(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator
