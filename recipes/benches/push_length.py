"""Times pushes of a hundred to a million micro-batches, and counts the memory that they take beyond their data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pipeback.recipes.benches.network import create, pipeline
from pipeback.recipes.benches.peaks import used
from pipeback.recipes.benches.turns import interleaved, on_ranks, spread
from pipeback.recipes.markdown import table

STAGES, WIDTH = 16, 8
LENGTHS = (100, 1_000, 10_000)  # and 100,000 and 1,000,000, if they are asked for
ENDS: dict[str, bool | str] = {"event loop": False, '`vectorize="auto"`': "auto"}


def main(repeats: int, lengths: Sequence[int] = LENGTHS) -> None:
    print(f"`pb`, {STAGES} stages of width {WIDTH}, micro-batch 1: one push of so many micro-batches, its loss read.\n")
    rows = []
    for label, vectorize in ENDS.items():
        found = on_ranks(lengthened, vectorize, lengths, repeats, ranks=1)
        base = found[0][1]
        for count, seconds, beyond in found:
            each = [1e6 * some / count / STAGES for some in seconds]
            ratios = [a / count * found[0][0] / b for a, b in zip(seconds, base, strict=True)]
            rows.append([label, f"{count:,}", spread(each, ".1f"), spread(ratios), "–" if beyond is None else beyond])
    print(table(["", "micro-batches", "µs", f"of those of {lengths[0]:,}", "MB beyond the data"], rows), flush=True)


def lengthened(rank: int, store: str, vectorize: bool | str, lengths: Sequence[int], repeats: int) -> list[Any]:
    """For each length: micro-batches, the seconds of a push in each turn, and the peak in MB beyond x and y."""
    pipe = pipeline(create("pb", STAGES), STAGES, WIDTH, micro_batch_size=1, vectorize=vectorize)
    x, y = torch.randn(max(lengths), WIDTH), torch.randint(0, 10, (max(lengths),))

    def push(count: int) -> None:
        float(pipe.push(x[:count], y[:count]))

    push(4 * STAGES)
    held = []
    for count in lengths:  # shorter ones first; x and y have been there before
        use = used(partial(push, count))[1]
        held.append(None if use.peak is None else f"{use.peak:.1f}")
    seconds = interleaved({str(count): partial(push, count) for count in lengths}, repeats)
    return [(count, seconds[str(count)], mb) for count, mb in zip(lengths, held, strict=True)]
