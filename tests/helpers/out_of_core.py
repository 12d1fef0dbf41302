"""What test_out_of_core runs in a process of its own, whose memory is then its own.

python -m tests.helpers.out_of_core FOLDER STAGES WIDTH BATCHES    prints JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

import pipeback
from pipeback.recipes.resident import resident

SAMPLES, MICRO_BATCHES = 32, 4


def build(stages: int, width: int, store: str | None) -> pipeback.Pipeline:
    """Built without memory: every stage gets its values in the store."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(stages)])
    return pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, method="gpipe", store=store, micro_batch_size=SAMPLES,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
    )  # fmt: skip


def train(pipe: pipeback.Pipeline, width: int, batches: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, SAMPLES * MICRO_BATCHES, width, generator=generator)
    return [pipe.push(x, y).item() for _ in range(batches)]


def main(folder: str, stages: int, width: int, batches: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    twins = [train(build(6, 64, store), 64, 4) for store in (None, f"disk:{folder}/twin")]  # also loads all code
    before = resident("VmRSS")
    pipe = build(stages, width, f"disk:{folder}/store")
    built = resident("VmRSS")
    losses = train(pipe, width, batches)
    pipe.wait()
    weights = pipe.memory().weights
    return {
        "before": before, "built": built, "peak": resident("VmHWM"), "losses": losses, "twins": twins,
        "weights": weights / 1e6, "traffic": pipe.traffic()._asdict(),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
