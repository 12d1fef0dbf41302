"""Save and load: writes the state of a pipeline to files that are complete or absent, and reads it.

    FOLDER/step-00001234/            1234 micro-batches had arrived
        stage-000.safetensors        the tensors of stage 0, distinct elements only, in logical order
        …
        state.json                   plain values; bytes and SHA-256 of every file; how each tensor lies in memory

Every rank writes its own stages. The tensors that differ in further replicas are in stage-000.replica-1.safetensors
and so on. The layout is by stages alone, so a checkpoint loads on any number of ranks and workers.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from pipeback.checkpoint import folders
from pipeback.checkpoint.pipeline_state import Share, StageShare, merge
from pipeback.errors import CheckpointError, RankError
from pipeback.streaming import sealed_file
from pipeback.tensors import copies
from pipeback.tensors.layout import Layout, form_of

__all__ = ["CheckpointError", "latest", "load", "read", "save"]

# dtypes that every version of safetensors has; tensors of other dtypes are stored as bytes
NATIVE = {
    getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
Tensors = dict[str, Tensor]
S = TypeVar("S")
T = TypeVar("T")


def save(pipe: Any, folder: str | Path, *, keep: int = 2, facts: Any = None) -> Path:
    """Write FOLDER/step-… and return its path once it is whole. Every rank calls this, on one file system.

    Micro-batches in flight are saved too, and stay in flight.

    keep   how many whole checkpoints remain in the folder, the new one included; older ones are removed after it is
           whole
    facts  any JSON values of the caller, of which those of rank 0 are saved; `load` returns them

    Raises CheckpointError on every rank if any rank fails. Earlier checkpoints stay, and training can go on.
    """
    _safetensors()
    if keep < 1:
        raise ValueError(f"keep={keep}: at least the new checkpoint remains; give 1 or more")
    crew = _Crew(pipe, "checkpoint.save()")
    crew.together(pipe.wait, patiently=False)
    draft = folders.Draft(Path(folder), pipe.plain()["arrived"])
    try:
        crew.together(draft.open, only=0)
        holders = crew.gather(pipe.held)
        taken = {part for parts in holders[: crew.me] for part in parts}  # before the first push all hold all
        files, share = crew.together(lambda: _written(pipe, draft.partial, taken))
        light = share._replace(parts=[part for part in share.parts if part[:2] not in taken])
        everything = crew.gather((dict(files), light))
        whole = merge([light for _, light in everything], pipe.plain())
        content = {
            "files": {name: entry for some, _ in everything for name, entry in some.items()},
            "state": {"format": whole["format"], "plain": whole["plain"]},
            "facts": facts,
        }
        crew.together(lambda: draft.finish(content), only=0)
        if crew.me == 0:
            folders.prune(draft.folder, keep)
    except CheckpointError:
        draft.close()
        crew.gather(None)  # no rank continues until the partial folder is gone
        raise
    finally:
        draft.close()
    return draft.path


def load(pipe: Any, path: str | Path) -> Any:
    """Load a checkpoint, or the newest whole one of a folder, into `pipe`; return its facts. Every rank calls this.

    Each rank reads the stages that it will hold. Contents are checked before anything changes. In a folder, damaged
    checkpoints are skipped with a warning.
    Raises CheckpointError if `path` is a damaged checkpoint or a folder without a whole one; ValueError if the
    checkpoint does not fit `pipe`.
    """
    _safetensors()
    crew, path = _Crew(pipe, "checkpoint.load()"), Path(path)
    found = crew.gather(crew.together(lambda: folders.candidates(path), only=0))[0]
    for candidate in found:
        try:
            state, facts = crew.together(partial(_read, candidate, pipe.would_hold, in_turn=pipe.streamed))
        except CheckpointError as error:
            if candidate == path:
                raise
            warnings.warn(f"passed over: {error}", stacklevel=2)
        else:
            pipe.load_state_dict(state)
            if facts is not None:
                _ = pipe.pushes  # whoever keeps facts knows where training stands
            return facts
    raise CheckpointError(f"{path}: there is no whole checkpoint in this folder; train from the start, or name another")


def latest(folder: str | Path) -> Path | None:
    """Return the newest whole checkpoint, judged by state.json and the sizes of the files; None if there is none."""
    return next(folders.whole(Path(folder)), None)


def read(path: str | Path, stages: Collection[int] | None = None) -> dict[str, Any]:
    """Return the state in a checkpoint for `Pipeline.load_state_dict`; its tensors are on the CPU and were checked.

    stages: read the tensors of these stages only; the dictionaries of the others are empty. Raises CheckpointError.
    """
    return _read(Path(path), lambda plain: stages)[0]


# -- ranks ---------------------------------------------------------------------------------------------------------


class _Crew:
    """All ranks of a pipeline, its replicas included, in one public call."""

    def __init__(self, pipe: Any, call: str) -> None:
        self._ranks, self._call = pipe.ranks, call
        self.me = self._ranks.place or 0
        """Place in what `gather` returns."""
        self._rank = getattr(self._ranks, "rank", 0)

    def gather(self, value: T) -> list[T]:
        values: list[T] = self._ranks.gather(value, self._call)
        return values

    def together(self, what: Callable[[], T], *, only: int | None = None, patiently: bool = True) -> T:
        """Return the result of `what()`, or None if `only` another rank calls it; all ranks raise an error of one.

        patiently: it may last longer than ranks wait for each other, so another thread does it while this one beats.
        """
        result: Any = None
        cause = fault = None
        try:
            if patiently and self._ranks.several:
                result = self._patiently(what if only in (None, self.me) else _nothing)
            elif only in (None, self.me):
                result = what()
        except RankError:
            raise
        except Exception as error:
            said = error if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            cause, fault = error, f"rank {self._rank} ({socket.gethostname()}, process {os.getpid()}): {said}"
        if faults := [fault for fault in self.gather(fault) if fault]:
            raise CheckpointError("; ".join(faults)) from cause
        return cast(T, result)

    def _patiently(self, what: Callable[[], T]) -> T:
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(what)
            while True:
                wait([work], timeout=self._ranks.timeout / 4)
                if all(self.gather(work.done())):
                    return work.result()


def _nothing() -> Any:
    """Do nothing, while another rank works."""


# -- tensors in files ----------------------------------------------------------------------------------------------


def _written(
    pipe: Any, folder: Path, taken: Collection[tuple[int, int]]
) -> tuple[list[tuple[str, dict[str, Any]]], Share]:
    """Write this rank's stages, two at once: one is hashed while the other waits for the disk."""
    files: list[Future[tuple[str, dict[str, Any]]]] = []
    room = Semaphore(2)

    def write(part: StageShare) -> tuple[str, dict[str, Any]]:
        try:
            return _write(folder, part)
        finally:
            room.release()

    with ThreadPoolExecutor(2) as pool:

        def take(stage: Any, tensors: Tensors) -> None:
            if (stage.index, stage.replica) not in taken:
                room.acquire()
                files.append(pool.submit(write, StageShare(stage.index, stage.replica, tensors, {})))

        share = pipe.share(take)
        return [file.result() for file in files], share


def _each(items: Iterable[S], what: Callable[[S], T]) -> list[T]:
    """Return the results of `what(item)`, two at once: one is hashed while the other waits for the disk."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(what, items))


def _write(folder: Path, part: StageShare) -> tuple[str, dict[str, Any]]:
    """Write the tensors of a stage to the disk; return the file's name and its description for state.json."""
    name, sparse = _file(part.stage, part.replica), _sparse(part.tensors)
    tensors = {k: t for k, t in part.tensors.items() if k not in sparse} | {
        f"{key}#{n}": piece for key in sparse for n, piece in enumerate(copies.pieces(part.tensors[key]))
    }
    with sealed_file.naming(file := folder / name):
        forms = {key: _form(key, tensor) for key, tensor in tensors.items()}
        _safetensors().save_file(_packed(tensors), file)
        file.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it private, whatever the umask
        sealed_file.sync(file)
        size, digest = file.stat().st_size, sealed_file.digest(file)
    held = {"tensors": forms, **({"sparse": sparse} if sparse else {})}
    return name, {"size": size, "sha256": digest, "stage": part.stage, "replica": part.replica, **held}


def _sparse(tensors: Tensors) -> dict[str, list[Any]]:
    """Return layout, shape and whether it is coalesced of every sparse tensor; its indices and values are stored."""
    return {
        key: [str(t.layout).removeprefix("torch."), list(t.shape), t.layout is torch.sparse_coo and t.is_coalesced()]
        for key, t in tensors.items()
        if len(copies.pieces(t)) > 1
    }


class _Stages(Sequence[Tensors]):
    """The tensors of every stage, read on access; those of the last stage that was read are cached."""

    def __init__(self, path: Path, files: Sequence[tuple[str, dict[str, Any]]], count: int) -> None:
        self._path, self._files, self._count = path, files, count
        self._last: tuple[int, Tensors] = (-1, {})

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, stage: Any) -> Any:
        if stage >= self._count:
            raise IndexError(stage)
        if self._last[0] != stage:
            self._last = (-1, {})  # freed before the next are read
            self._last = stage, self.read(stage)
        return self._last[1]

    def read(self, stage: int) -> Tensors:
        mine = [item for item in self._files if item[1]["stage"] == stage]
        return {k: v for name, facts in mine for k, v in _tensors(self._path / name, facts).items()}


def _read(
    path: Path, choose: Callable[[dict[str, Any]], Collection[int] | None], *, in_turn: bool = False
) -> tuple[dict[str, Any], Any]:
    """Return state and facts of a checkpoint. choose: plain values of the state -> the stages to read, None: all.

    in_turn: a stage's tensors are read on access; the content of all files is checked now.
    """
    try:
        document = folders.look(path)
        stages = choose(document["state"]["plain"])
        files = [item for item in document["files"].items() if stages is None or item[1]["stage"] in stages]
        _each(files, lambda item: _check(path / item[0], item[1]))
        stored = _Stages(path, files, len(document["state"]["plain"]["stages"]))
        loaded = stored if in_turn else _each(range(len(stored)), stored.read)
    except CheckpointError as error:
        others = [p for p in (*folders.whole(path.parent), *folders.whole(path)) if p != path]
        cure = f"the newest whole checkpoint besides is {others[0]}" if others else "there is no other whole checkpoint"
        raise CheckpointError(f"{error}; {cure}") from error
    return {**document["state"], "stages": loaded}, document["facts"]


def _check(file: Path, facts: dict[str, Any]) -> None:
    with sealed_file.naming(file):
        sealed_file.check_digest(file, sealed_file.digest(file), facts["sha256"])


def _tensors(file: Path, facts: dict[str, Any]) -> Tensors:
    with sealed_file.naming(file):
        tensors = {}
        prefix = f"replica/{facts['replica']}/" if facts["replica"] else ""  # as `pipeline_state.merge` names them
        with _safetensors().safe_open(file, framework="pt") as stored:  # the file is mapped, so memory holds one copy
            for name, (dtype, shape, stride, shift) in facts["tensors"].items():
                form = Layout(getattr(torch, dtype), tuple(shape), tuple(stride), shift)
                tensors[prefix + name] = tensor = form.empty(torch.device("cpu"))
                once, values = _once(tensor), stored.get_tensor(name)
                once.copy_(values if form.dtype in NATIVE else values.clone().view(form.dtype).view(once.shape))
        for name, (layout, shape, coalesced) in facts.get("sparse", {}).items():
            keys = [key for key in tensors if key.rpartition("#")[0] == prefix + name]
            pieces = [tensors.pop(key) for key in sorted(keys)]
            tensors[prefix + name] = copies.made_of(getattr(torch, layout), shape, coalesced, pieces)
        return tensors


def _file(stage: int, replica: int) -> str:
    return f"stage-{stage:03d}{f'.replica-{replica}' if replica else ''}.safetensors"


def _form(name: str, tensor: Tensor) -> list[Any]:
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{name} is a {tensor.layout} tensor, which checkpoints do not hold; use dense tensors, or drain() before "
            "saving"
        )
    form = form_of(tensor)
    return [str(form.dtype).removeprefix("torch."), list(form.shape), list(form.stride), form.shift]


def _once(tensor: Tensor) -> Tensor:
    """Return the tensor with one element along expanded dimensions."""
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _packed(tensors: Tensors) -> Tensors:
    """Return the distinct elements, contiguous, on the CPU and in memory of their own, as safetensors requires."""
    packed, memory = {}, set()
    for name, tensor in tensors.items():
        values = _once(tensor.detach()).resolve_conj().resolve_neg().cpu().contiguous()
        if values.dtype not in NATIVE:
            values = values.view(-1).view(torch.uint8)
        if values.untyped_storage().data_ptr() in memory:
            values = values.clone()
        memory.add(values.untyped_storage().data_ptr())
        packed[name] = values
    return packed


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install 'pipeback[checkpoint]'") from error
    return safetensors.torch
