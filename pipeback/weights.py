"""Weights in safetensors files, read and written stage by stage, for models that are never in memory as a whole.

`Pipeline(meta_model, store=pipeback.Streaming("host", init="model.safetensors"))` reads each stage's weights when the
stage gets its values; `weights.save(pipe, folder)` writes them stage by stage. Tensors are named as in the model's
state_dict. Several files have Hugging Face's layout: model-00001-of-00005.safetensors, …, and
model.safetensors.index.json.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

INDEX = "model.safetensors.index.json"
NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")  # of the files that `save` writes
WRITER = "written_by_pipeback"  # the key in an index that tells the files of `save` from a user's
PARTIAL = ".partial"
CALL = "weights.save()"
T = TypeVar("T")


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

    Micro-batches in flight stay in flight. All files are written under other names first: until all of them are whole,
    what the folder held stays. Then they get their names while there is no index, so that no mixture can be read, and
    files of an earlier export that the new index does not name are removed. Raises OSError, on every rank.
    """
    folder, ranks = Path(folder), pipe.ranks
    pipe.wait()
    place = ranks.place or 0
    taken = {part for parts in ranks.gather(pipe.held, CALL)[:place] for part in parts}  # who holds it first writes it
    path, drafts = folder / INDEX, list[Path]()
    try:
        parts = _together(ranks, lambda: _drafted(pipe, folder, taken, drafts))
        written = {key: at for part in parts for key, at in part.items()}
        before = _together(ranks, lambda: [] if place else _index_drafted(path, written))[0]
    except OSError:
        for draft in (*drafts, path.with_suffix(PARTIAL)):
            with suppress(OSError):  # it may not be there, nor its folder
                draft.unlink()
        raise
    _together(ranks, lambda: _removed([] if place else [path]))
    _together(ranks, lambda: [draft.rename(draft.with_suffix("")) for draft in drafts])
    _together(ranks, lambda: None if place else path.with_suffix(PARTIAL).rename(path))
    _together(ranks, lambda: _removed([] if place else [folder / file for file in before]))
    return path


def _together(ranks: Any, what: Callable[[], T]) -> list[T]:
    """Do it and return the results of all ranks. An error with files on one of them is raised on all."""
    result: Any = None
    fault = cause = None
    try:
        result = what()
    except OSError as error:
        fault, cause = str(error), error
    told = ranks.gather((result, fault), CALL)
    if faults := [fault for _, fault in told if fault is not None]:
        raise OSError(
            f"{'; '.join(faults)}; make room, or give a folder that can be written, and save again"
        ) from cause
    return [result for result, _ in told]


def _removed(files: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _drafted(
    pipe: Any, folder: Path, taken: Container[tuple[int, int]], drafts: list[Path]
) -> dict[str, tuple[str, int]]:
    """Write the stages that are not taken under the names of drafts; the file and the bytes of each tensor."""
    count, mine, failed = pipe.stages, dict[str, tuple[str, int]](), None
    for s, values in pipe.values():  # all of them, even after an error, since ranks may gather a stage's values
        file = f"model-{s + 1:05d}-of-{count:05d}.safetensors"
        tensors = {key: value.contiguous() for key, value in values.items()}
        shared = Counter(map(id, tensors.values()))  # a file has a copy for each name of a tied weight
        tensors = {key: value.clone() if shared[id(value)] > 1 else value for key, value in tensors.items()}
        if not tensors or (s, 0) in taken or failed is not None:
            continue
        drafts.append(draft := folder / f"{file}{PARTIAL}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _safetensors_torch().save_file(tensors, draft, metadata={"format": "pt"})
            draft.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it private, whatever the umask
        except (OSError, _safetensors().SafetensorError) as error:
            failed = OSError(f"{folder / file}: {type(error).__name__}: {error}")
            failed.__cause__ = error
        mine.update({key: (file, value.numel() * value.element_size()) for key, value in tensors.items()})
    if failed is not None:
        raise failed
    return mine


def _index_drafted(path: Path, written: Mapping[str, tuple[str, int]]) -> list[str]:
    """Write the index under the name of a draft; the files of the export before that it does not name."""
    files = {key: file for key, (file, _) in written.items()}
    metadata = {"total_size": sum(size for _, size in written.values()), WRITER: True}
    path.with_suffix(PARTIAL).write_text(json.dumps({"metadata": metadata, "weight_map": files}, indent=1))
    return sorted(_export(path).difference(files.values()))


def _export(path: Path) -> set[str]:
    """The files of an index that `save` wrote; none of an index that came from elsewhere, whose files are not ours."""
    try:
        index = json.loads(path.read_text())
        return {file for file in index["weight_map"].values() if index["metadata"].get(WRITER) and NAME.fullmatch(file)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none, or something else
        return set()


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """For each name of a tensor in a model's state_dict, all its names: tied weights have several."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: names for names in by_tensor.values() for name in names}


def _places(path: Path) -> dict[str, Path]:
    """The file that holds each tensor. Stages ask one by one: it is read anew once it was written anew."""
    index = path / INDEX if path.is_dir() else path
    if index.name.endswith(".json") and index.exists():
        return _named(index, _stamp(index))
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"init={str(path)!r}: there is no safetensors file, nor a folder with {INDEX}")
    return _held(file, _stamp(file))


def _stamp(file: Path) -> tuple[int, int, int]:
    """What changes when a file is written anew."""
    facts = file.stat()
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


@lru_cache(4)
def _named(index: Path, stamp: tuple[int, int, int]) -> dict[str, Path]:
    named = json.loads(index.read_text())["weight_map"]
    for name, file in named.items():
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(
                f"{index} says that {name!r} is in {file!r}, outside of its folder, which is not followed; move "
                "that file beside the index, and name it there by its name alone"
            )
    return {name: index.parent / file for name, file in named.items()}


@lru_cache(4)
def _held(file: Path, stamp: tuple[int, int, int]) -> dict[str, Path]:
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
