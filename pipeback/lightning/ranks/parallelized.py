"""Parallelized: what a `configure_model` asks for that cuts its modules itself, as ModelParallelStrategy has it.

    def configure_model(self):
        self.model = Perceptron()
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], {"up": ColwiseParallel(), ...})
        self.model.heads //= self.device_mesh["tensor_parallel"].size()

The modules are not cut here. What is asked becomes a plan for the copy of the module that is trained, and numbers that
were divided are whole again, since the LightningModule keeps whole weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from pipeback.lightning.find_stages import TrainedModule
from pipeback.pipeline.arguments import TensorParallel
from pipeback.private import is_distributed, styles_heard
from pipeback.tensor_parallel.plans import Local, style_of

MESH = ("data_parallel", "workers", "tensor_parallel")  # dimensions of `self.device_mesh`


class AbsentMesh(NamedTuple):
    """The mesh in a process without ranks, which validates alone: it has sizes only."""

    sizes: dict[str, int]

    def __getitem__(self, name: str) -> AbsentMesh:  # type: ignore[override]
        return AbsentMesh({name: self.sizes[name]})

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def size(self, mesh_dim: int | None = None) -> int:
        every = list(self.sizes.values())
        return every[mesh_dim if mesh_dim is not None else -1]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return 0


class Parallelized:
    """The modules and styles of `parallelize_module` within a `configure_model`."""

    def __init__(self) -> None:
        self._styles: list[tuple[nn.Module, Any]] = []
        self._numbers: dict[tuple[int, str], tuple[nn.Module, int]] = {}  # as they were, by module and name

    @contextmanager
    def hearing(self, module: nn.Module, size: int) -> Iterator[None]:
        """A context for `configure_model`. size: ranks that compute each stage together."""
        self._styles, self._numbers = [], {}
        original = nn.Module.__setattr__

        def setting(owner: nn.Module, name: str, value: Any) -> None:
            before, frame = owner.__dict__.get(name), inspect.currentframe()
            caller = None if frame is None else frame.f_back
            if type(before) is int and type(value) is int and caller and caller.f_code.co_name != "__init__":
                self._numbers.setdefault((id(owner), name), (owner, before))
            original(owner, name, value)

        nn.Module.__setattr__ = setting  # type: ignore[method-assign, assignment]
        try:
            with styles_heard(self._hear):
                yield
        finally:
            nn.Module.__setattr__ = original  # type: ignore[method-assign]
        self._numbers = {
            (one, name): (owner, before)
            for (one, name), (owner, before) in self._numbers.items()
            if before == size * getattr(owner, name)
        }
        for (_, name), (owner, before) in self._numbers.items():
            setattr(owner, name, before)
        if odd := next((name for name, p in module.named_parameters() if is_distributed(p)), None):
            raise ValueError(
                f"configure_model makes a DTensor of {odd}, but shards are cut from whole weights; leave that out, "
                f"{_cure(size)}"
            )

    def _hear(self, module: nn.Module, style: Any) -> nn.Module:
        self._styles.append((module, style))
        return module

    def plan(self, given: TensorParallel, found: TrainedModule) -> TensorParallel:
        """The plan that `configure_model` has asked for, or that of the strategy if it has asked for none.

        Raises ValueError naming the module and the cure.
        """
        if not self._styles:
            return given
        if given.plan is not None:
            raise ValueError(
                f"both configure_model and tensor_parallel have a plan; use tensor_parallel={given.size} alone, or "
                "leave parallelize_module out of configure_model"
            )
        paths, plan = {id(m): path for path, m in found.module.named_modules()}, dict[str, Any]()
        for (_, name), (owner, _) in self._numbers.items():
            if path := paths.get(id(owner)):
                plan[path] = Local((*plan[path].names, name) if path in plan else (name,))
        for module, style in self._styles:
            if id(module) not in paths:
                raise ValueError(
                    f"configure_model parallelizes a {type(module).__name__} outside self.{found.name}, which is "
                    "trained; leave it out"
                )
            path = paths[id(module)]
            try:
                plan[path] = style_of(path, style)
            except (TypeError, ValueError) as error:
                raise ValueError(f"configure_model: {error}; {_cure(given.size)}") from None
        return replace(given, plan=plan)


def _cure(size: int) -> str:
    return (
        "or give the plan to the strategy: tensor_parallel=pipeback.TensorParallel("
        f'{size}, plan={{"*.up": "colwise", "*.down": "rowwise"}})'
    )
