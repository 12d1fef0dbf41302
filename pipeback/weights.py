"""Weights in safetensors files, read and written stage by stage, for models that are never in memory as a whole.

`Pipeline(meta_model, store=pipeback.Streaming("host", init="model.safetensors"))` reads each stage's weights when the
stage gets its values; `weights.save(pipe, folder)` writes them stage by stage. Tensors are named as in the model's
state_dict. Several files have Hugging Face's layout: model-00001-of-00005.safetensors, …, and
model.safetensors.index.json.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

INDEX = "model.safetensors.index.json"


def fill(module: nn.Module, path: Path, names: Mapping[str, str], label: str) -> None:
    """Load a module's weights and buffers. names: from names in the module to names in the file.

    path: a safetensors file, or a folder that has one or an index. Raises ValueError naming a tensor that is missing,
    has another shape, or belongs to nothing in the module.
    """
    places, found = _places(path), 0
    persistent = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in persistent.items():
            file = places.get(names[name])
            if file is None:
                raise ValueError(
                    f"{label}: {path} has no tensor {names[name]!r}; it belongs to another model, give the weights of "
                    "this one"
                )
            found += 1
            with _opened(file) as stored:
                value = stored.get_tensor(names[name])
            if value.shape != tensor.shape:
                raise ValueError(
                    f"{label}: {names[name]!r} is {tuple(value.shape)} in {file}, but {tuple(tensor.shape)} here; "
                    "it belongs to another model, give the weights of this one"
                )
            tensor.copy_(value)
    kept = {name for name, _ in module.named_buffers()} - set(persistent)
    if kept:
        raise ValueError(
            f"{label}: buffer {min(kept)!r} is not kept in files (persistent=False); give Streaming(init=) a function"
        )
    prefixes = {full.removesuffix(key) for key, full in names.items()}
    mine = set(names.values())
    for name in sorted(places):  # where the stage is one module of the model
        if len(prefixes) == 1 and "" not in prefixes and name.startswith(tuple(prefixes)) and name not in mine:
            raise ValueError(
                f"{label}: {path} has {name!r}, which the model has not; it belongs to another model, give the weights "
                "of this one"
            )


def save(pipe: Any, folder: str | Path) -> Path:
    """Write the newest weights and buffers, one file per stage, and an index; returns its path. Every rank calls it.

    Micro-batches in flight stay in flight. Files are written under other names first, and the index last.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pipe.wait()
    count, mine = pipe.stages, {}
    for s, values in pipe.values():
        file = f"model-{s + 1:05d}-of-{count:05d}.safetensors"
        tensors = {key: value.contiguous() for key, value in values.items()}
        shared = Counter(map(id, tensors.values()))  # a file has a copy for each name of a tied weight
        tensors = {key: value.clone() if shared[id(value)] > 1 else value for key, value in tensors.items()}
        if tensors:
            _safetensors_torch().save_file(tensors, folder / f"{file}.partial", metadata={"format": "pt"})
            os.replace(folder / f"{file}.partial", folder / file)
        mine.update({key: (file, value.numel() * value.element_size()) for key, value in tensors.items()})
    everything = {key: at for part in pipe.ranks.gather(mine, "weights.save()") for key, at in part.items()}
    index = {
        "metadata": {"total_size": sum(size for _, size in everything.values())},
        "weight_map": {key: file for key, (file, _) in everything.items()},
    }
    path = folder / INDEX
    if pipe.ranks.index == 0 and not pipe.ranks.replica:
        path.with_suffix(".partial").write_text(json.dumps(index, indent=1))
        os.replace(path.with_suffix(".partial"), path)
    pipe.ranks.gather(None, "weights.save()")
    return path


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """For each name of a tensor in a model's state_dict, all its names: tied weights have several."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: names for names in by_tensor.values() for name in names}


@lru_cache(4)
def _places(path: Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    index = path / INDEX if path.is_dir() else path
    if index.name.endswith(".json") and index.exists():
        named = json.loads(index.read_text())["weight_map"]
        for name, file in named.items():
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise ValueError(
                    f"{index} says that {name!r} is in {file!r}, outside of its folder, which is not followed; move "
                    "that file beside the index, and name it there by its name alone"
                )
        return {name: index.parent / file for name, file in named.items()}
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"init={str(path)!r}: there is no safetensors file, nor a folder with {INDEX}")
    with _opened(file) as stored:
        return dict.fromkeys(stored.keys(), file)


def _opened(file: Path) -> Any:
    """A safetensors file, opened. Raises ValueError if it is another file, or damaged."""
    library = _safetensors()
    try:
        return library.safe_open(file, framework="pt")
    except library.SafetensorError as error:
        raise ValueError(
            f"{file} is no whole safetensors file ({error}); write the weights with pipeback.weights.save() or "
            "safetensors.torch.save_file()"
        ) from error


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("weights in files need safetensors: pip install 'pipeback[checkpoint]'") from error
    return safetensors


def _safetensors_torch() -> Any:
    _safetensors()
    import safetensors.torch

    return safetensors.torch
