"""How many weights each tensor keeps when the model keeps the share d: one density per tensor.

    uniform    d_l = d
    erk        d_l = min(1, ε·Σ_j n_j / Π_j n_j)         with ε such that  Σ_l d_l·N_l = d·Σ_l N_l

    n_j        sizes of the tensor: n_in, n_out and, of a convolution, the sides of its kernel
    N_l        Π_j n_j, weights of tensor l

Erdős–Rényi-Kernel gives small tensors a higher density than large ones: the survivors of a layer grow with the sum of
its sizes, not with their product. Of matrices it is the Erdős–Rényi graph of SET.

Evci et al., arXiv 1911.11134, section 3 (1); Mocanu et al., arXiv 1707.04780, eq. 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Shape = Sequence[int]


def uniform(shapes: Sequence[Shape], density: float) -> list[float]:
    return [density] * len(shapes)


def erk(shapes: Sequence[Shape], density: float) -> list[float]:
    """Erdős–Rényi-Kernel over all tensors of the model.

    >>> [round(d, 3) for d in erk([(16, 3, 3, 3), (32, 16, 3, 3), (10, 32)], 0.2)]
    [0.551, 0.112, 1.0]
    """
    sizes = [prod(shape) for shape in shapes]
    raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
    full: set[int] = set()  # tensors whose share would exceed 1; what they cannot take goes to the others
    while len(full) < len(shapes):
        rest = density * sum(sizes) - sum(sizes[n] for n in full)
        epsilon = rest / sum(sum(shapes[n]) for n in range(len(shapes)) if n not in full)
        over = {n for n in range(len(shapes)) if n not in full and epsilon * raw[n] > 1}
        if not over:
            return [1.0 if n in full else epsilon * raw[n] for n in range(len(shapes))]
        full |= over
    return [1.0] * len(shapes)


DISTRIBUTIONS = {"uniform": uniform, "erk": erk}
