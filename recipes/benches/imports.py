"""Times `import pipeback` beyond `import torch`; against another source tree, building a pipeline, too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

from pipeback.recipes.benches.against import Rows
from pipeback.recipes.benches.network import pipeline
from pipeback.recipes.benches.turns import spread


def main(repeats: int) -> None:
    """Time the import in new processes that have imported torch."""
    code = (
        "import time, torch; a = time.perf_counter(); import pipeback; pipeback.Pipeline; b = time.perf_counter(); "
        "print(b - a)"
    )
    # once before, so that Python has compiled all modules
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    some = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout)
        for _ in range(min(repeats, 5))
    ]
    print(f"import pipeback, with its Pipeline, beyond import torch: {spread([1e3 * s for s in some], '.0f')} ms.")


def rows() -> Rows:
    """What `against=` compares, beside the import."""
    return {("20 blocks of width 64", "`Pipeline(...)`, with its model"): build}


def build(turns: Iterable[None]) -> None:
    for _ in turns:
        for _ in range(5):
            pipeline("pb")
