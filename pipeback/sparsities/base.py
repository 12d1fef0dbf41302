"""What a policy of sparse training is: which tensors are sparse, how dense each is, and which weights survive when.

    at the start:       m_l = masks(w, d)_l            w_l ← m_l ⊙ w_l
    after update t:     m_l ← change(w, m, g, d)_l     w_l ← m_l ⊙ w_l        if due(t)

    m_l        mask of tensor l: True where a weight survives
    d_l        density of tensor l, out of `densities`
    g_l        gradient of tensor l that update t applied, dense if dense_gradient(t)
    t          updates of the stage, counted from 1

Pure logic: a policy computes masks from numbers, and neither changes nor remembers a tensor. Its caller keeps masks,
values and optimizer state, by one rule: an entry in the old mask and in the new one keeps its value and its optimizer
state, one only in the new mask begins with value 0 and fresh state, and one only in the old mask is dropped.

Every hook has a default, so that a policy is only what it changes: without any, it is a static mask by magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipeback.sparsities.densities import DISTRIBUTIONS, Shape
from pipeback.sparsities.masks import anywhere, largest, survivors

# their weights may have several dimensions; those of other norms have one
DENSE = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
FACTORS = ("weight_g", "weight_v")  # of torch.nn.utils.weight_norm


class At(NamedTuple):
    """Where and when masks are made. The random numbers follow from it, so that every runtime draws the same."""

    seed: int
    stage: int  # s
    update: int = 0  # t; 0 before the first
    first: int = 0  # the place of the first of these tensors among the stage's: a stage may be done in pieces

    def generator(self, n: int) -> torch.Generator:
        """The random stream of tensor n, on the CPU: each tensor and update has a stream of its own."""
        words = f"{self.seed} {self.stage} {self.first + n} {self.update}"
        digest = blake2b(words.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(repr=False, kw_only=True)
class Sparsity:
    """The base of every policy; subclasses override what they change and nothing else.

    density        share of the weights of all sparsified tensors that survive, above 0 and up to 1
    distribution   "uniform": every tensor alike; "erk": Erdős–Rényi-Kernel, denser where a tensor is small
    exclude        patterns of names (as of files: * ? []) of parameters that stay dense: ("head.*", "*.in_proj_weight")
    keep_first     the first tensor stays dense, as in RigL's uniform distribution; it is not counted in `density`
    keep_last      the last one
    """

    density: float = 0.1
    distribution: Literal["uniform", "erk"] = "uniform"
    exclude: Sequence[str] = ()
    keep_first: bool = False
    keep_last: bool = False

    def __post_init__(self) -> None:
        check_share(self, "density", self.density)
        check_choice(self, "distribution", self.distribution, *DISTRIBUTIONS)
        self.exclude = (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude)
        for name in ("keep_first", "keep_last"):
            check_choice(self, name, getattr(self, name), False, True)

    @classmethod
    def derived(cls, updates: int) -> dict[str, Any]:
        """Values for options that a name alone leaves out. updates: how many a stage makes in the whole training."""
        return {}

    def chooses(self, module: nn.Module, name: str, parameter: Tensor) -> bool:
        """Whether a parameter is sparsified: of two dimensions or more, no bias, norm or embedding, not excluded, and
        none that another weight is computed from: weight normalisation divides by the norm of a row, which may be 0.

        module: the one that owns the parameter. name: the parameter's name in the model, such as "4.conv.weight".
        """
        dense = parameter.ndim < 2 or not parameter.numel() or not parameter.is_floating_point()
        if dense or isinstance(module, DENSE):
            return False
        own = name.rpartition(".")[2]
        if own.startswith("bias") or own in FACTORS:  # MultiheadAttention's bias_k has three dimensions
            return False
        if isinstance(module, nn.utils.parametrize.ParametrizationList):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def densities(self, shapes: Sequence[Shape]) -> list[float]:
        """The density d of every sparsified tensor of the whole model, in the order of its layers."""
        first = int(self.keep_first)
        end = max(first, len(shapes) - int(self.keep_last))
        inner = DISTRIBUTIONS[self.distribution](shapes[first:end], self.density)
        return [*[1.0] * len(shapes[:first]), *inner, *[1.0] * len(shapes[end:])]

    def masks(self, weights: Sequence[Tensor], densities: Sequence[float], at: At) -> list[Tensor]:
        """The masks of a stage's sparsified tensors before the first update; later masks have no more survivors.

        weights: dense. Raises ValueError naming the tensor that holds NaN, as does `change`.
        """
        return [
            largest(magnitude("weight", w, at, n), survivors(d, w.numel()))
            for n, (w, d) in enumerate(zip(weights, densities, strict=True))
        ]

    def due(self, update: int) -> bool:
        """Whether the masks change after this update."""
        return False

    def dense_gradient(self, update: int) -> bool:
        """Whether `change`, after this update, reads the gradient of weights that do not survive."""
        return False

    def change(
        self,
        weights: Sequence[Tensor],
        masks: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        densities: Sequence[float],
        at: At,
    ) -> list[Tensor]:
        """The masks after update `at.update`, at which a change is due.

        weights: after the step, in dense shape; their entries outside the masks are not read. gradients: those that the
        step applied; they are read only if `dense_gradient` said so, and may otherwise be None.
        """
        return list(masks)

    def options(self) -> dict[str, Any]:
        """The policy's options as plain values, on which a saved state must agree."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={v!r}" for k, v in self.options().items())
        return f"{type(self).__name__}({inner})"


def changing(updates: int) -> tuple[int, int]:
    """Until which update masks change, three quarters of a training of so many, and every how many: 100 at most."""
    until = max(1, 3 * updates // 4)
    return until, min(100, max(1, until // 10))


def scattered(weights: Sequence[Tensor], densities: Sequence[float], at: At) -> list[Tensor]:
    """Masks of survivors at random places, for `Sparsity.masks`."""
    return [
        anywhere(survivors(d, w.numel()), torch.ones_like(w, dtype=torch.bool), at.generator(n))
        for n, (w, d) in enumerate(zip(weights, densities, strict=True))
    ]


def magnitude(what: str, tensor: Tensor | None, at: At, n: int, among: Tensor | None = None) -> Tensor:
    """|x| of a weight or gradient. Raises ValueError naming tensor n of the stage if it is missing or holds NaN.

    among: a mask; entries outside it are 0.
    """
    where = f"tensor {at.first + n} of stage {at.stage}, update {at.update}"
    if tensor is None:
        raise ValueError(f"the {what} of {where} is missing; this policy needs it dense after the updates that are due")
    if among is not None and among.shape != tensor.shape:
        raise ValueError(f"the {what} of {where} has shape {tuple(tensor.shape)}, its mask {tuple(among.shape)}")
    size = tensor.detach().abs()
    if among is not None:
        size = size.masked_fill(~among, 0)
    if size.isnan().any():
        raise ValueError(f"the {what} of {where} is NaN: training diverged; lower the learning rate or give clip_norm=")
    return size


def check_share(policy: Sparsity, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{type(policy).__name__}: {name} must be a share, above 0 and up to 1, but is {value!r}")


def check_count(policy: Sparsity, name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{type(policy).__name__}: {name} must be a whole number of at least {least}, but is {value!r}"
        )


def check_choice(policy: Sparsity, name: str, value: Any, *choices: Any) -> None:
    if value not in choices:
        listed = " or ".join(map(repr, choices))
        raise ValueError(f"{type(policy).__name__}: {name} must be {listed}, but is {value!r}")
