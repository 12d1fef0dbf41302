"""`import pipeback` beyond `import torch`."""

from __future__ import annotations

import statistics
import subprocess
import sys


def main(repeats: int) -> None:
    """Seconds of an import in a new process, torch there already."""
    code = (
        "import time, torch; a = time.perf_counter(); import pipeback; pipeback.Pipeline; b = time.perf_counter(); "
        "print(b - a)"
    )
    some = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(min(repeats, 5))
    ]
    print(f"import pipeback, with its Pipeline, beyond import torch: {statistics.median(some) * 1e3:.0f} ms")
