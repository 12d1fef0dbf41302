"""Files."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import pipeback
from pipeback import checkpoint, weights
from pipeback.streaming.sealed_file import sealed, unsealed

from .table import fault, layers, pipeline, train


@fault("a store whose last version is missing begins at zero without a word")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipe = pipeline(layers(), store=f"disk:{folder}")
        train(pipe)
        pipe.commit()
        pipe.close()
        for version in Path(folder).rglob("version-*.json"):
            version.unlink()
        with pytest.raises(RuntimeError, match="version"):
            pipeline(layers(), store=f"disk:{folder}")


@contextmanager
def _edited(change: Callable[[Path, Any], None]) -> Iterator[Path]:
    """A checkpoint whose state.json somebody has changed, with the checksum that belongs to it."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = pipeline(layers())
        train(pipe, 6)
        checkpoint.save(pipe, folder)
        step = Path(folder, "step-00000006")
        document = unsealed(step / "state.json")
        change(step, document)
        (step / "state.json").write_bytes(sealed(document))
        yield step


@fault("names in state.json that lead out of the folder are followed")
def _() -> None:
    def out(step: Path, document: Any) -> None:
        shutil.move(step / "stage-000.safetensors", step.parent / "stage-000.safetensors")
        document["files"]["../stage-000.safetensors"] = document["files"].pop("stage-000.safetensors")

    with _edited(out) as step, pytest.raises(RuntimeError, match="not followed"):
        checkpoint.load(pipeline(layers()), step)


@fault("a state with a place that cannot be hangs a load")
def _() -> None:
    def far(step: Path, document: Any) -> None:
        document["state"]["plain"]["loops"][0]["order"]["fetched"][1] = 10**12

    def stop(*_: object) -> None:
        raise AssertionError("loading takes for ever")

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        with _edited(far) as step, pytest.raises(ValueError, match="load another one"):
            signal.setitimer(signal.ITIMER_VIRTUAL, 5.0)
            checkpoint.load(pipeline(layers()), step)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@fault("names in an index of weights that lead out of it are followed")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder, "inside")
        inside.mkdir()
        save_file({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, Path(folder, "other.safetensors"))
        index = dict.fromkeys(("0.weight", "0.bias"), "../other.safetensors")
        (inside / weights.INDEX).write_text(json.dumps({"weight_map": index}))
        model = nn.Sequential(nn.Linear(2, 2, device="meta"))
        with pytest.raises(ValueError, match="outside of its folder"):
            pipeline(model, "sgd", store=pipeback.Streaming(init=inside))


@fault("weights.save leaves out a name of tied weights")
def _() -> None:
    first, last = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
    last.weight = first.weight
    pipe = pipeline(nn.Sequential(nn.Sequential(first, last), nn.Linear(7, 7)))
    with tempfile.TemporaryDirectory() as folder:
        weights.save(pipe, folder)
        found = {name for file in Path(folder).glob("*.safetensors") for name in load_file(file)}
    assert found == set(pipe.model.state_dict())
