"""A static mask by magnitude.

    m_l = 1 at the d_l·N_l largest |w_l|, before the first update; it never changes

The sparsity that needs no policy while it trains: the reference of the others, and a way to train on what a pruned
checkpoint has left.

One-shot magnitude pruning: Han et al., arXiv 1506.02626, section 3, with a share of each tensor where the paper takes a
multiple of its standard deviation. Left out: a second pruning after training; build a new pipeline for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.sparsities.base import Sparsity


@dataclass(repr=False, kw_only=True)
class Magnitude(Sparsity):
    """Only the options of every policy."""
