"""What the time of a contender is made of: products of matrices and convolutions, the update, other kernels, the rest.

Each network is trained by the plain loop with a fused optimizer, and by pipelines on one device, in turns; then again
with torch's profiler. A contender cannot be faster than its products, which no schedule takes away.

ms            milliseconds per micro-batch without the profiler, medians of the turns
products      of these, as the profiler has them: matrix products, convolutions, attention, and their gradients
update        the optimizer's kernels (fused and foreach ones); what methods do beside them is among the others
others        all other operations of torch: norms, activations, copies, views
rest          what is left: Python, autograd, and what waits
at most       how many times faster than the fused loop a contender would be that had these products and no more
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from collections.abc import Mapping
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile

from pipeback.recipes.benches.contenders import Contender
from pipeback.recipes.benches.table import ENTRIES, chosen
from pipeback.recipes.benches.tasks import NETWORKS, Task, tasks
from pipeback.recipes.benches.turns import take_turns
from pipeback.recipes.markdown import table

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler tells when it begins and ends
LOOP, CONTENDERS = "fused", ("fused", "pb", "auto", "cerebras_auto")
PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "baddbmm_", "_slow_conv2d_forward", "_slow_conv2d_backward", "mkldnn_convolution",
    "convolution_backward", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip


class Kernels(NamedTuple):
    """Milliseconds per micro-batch that operations take by themselves, without those that they call."""

    products: float
    update: float
    others: float


def main(repeats: int, networks: str = "", contenders: str = "") -> None:
    names = chosen("contenders", contenders, {name: ENTRIES[name] for name in CONTENDERS})
    if LOOP not in names:
        sys.exit(f"pipeback bench: contenders={contenders}: the others are compared with {LOOP!r}; name it, too")
    for n, task in enumerate(tasks(chosen("networks", networks, NETWORKS))):
        print("\n" * (n > 0) + text(task, measured(task, names, repeats)), flush=True)


def measured(task: Task, names: list[str], repeats: int) -> dict[str, tuple[float, Kernels]]:
    """By contender: milliseconds per micro-batch, and what kernels take of them; medians of turns in turn."""
    runs = {name: ENTRIES[name].build(task, 0, []) for name in names}
    rates = take_turns(runs, repeats)
    found: dict[str, list[Kernels]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, run in runs.items():
            gc.collect()
            found[name].append(kernels(run))
    return {
        name: (1e3 / statistics.median(rates[name]), Kernels(*map(statistics.median, zip(*some, strict=True))))
        for name, some in found.items()
    }


def kernels(contender: Contender) -> Kernels:
    """What the profiler hears of one turn."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        contender.run()
    products = update = others = 0.0
    for event in found.key_averages():
        room, _, name = event.key.partition("::")
        if room != "aten":
            continue
        milliseconds = event.self_cpu_time_total / 1e3
        if name in PRODUCTS:
            products += milliseconds
        elif name.startswith(("_fused_", "_foreach_")):
            update += milliseconds
        else:
            others += milliseconds
    return Kernels(*(part / contender.turn for part in (products, update, others)))


def text(task: Task, found: Mapping[str, tuple[float, Kernels]]) -> str:
    loop, _ = found[LOOP]
    rows = []
    for name, (milliseconds, some) in found.items():
        parts = [milliseconds, *some, max(0.0, milliseconds - sum(some)), loop / milliseconds]
        most = "" if name == LOOP else f"{loop / some.products:.2f}"
        rows.append([ENTRIES[name].label, *(f"{part:.2f}" for part in parts), most])
    head = f"{task.network.name}, micro-batch {task.samples}"
    return table([head, "ms", "products", "update", "others", "rest", "of the fused loop", "at most"], rows)
