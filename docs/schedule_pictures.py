"""The picture of schedules that fill the bubble of a flush, one row per worker; see `pictures`."""

from itertools import accumulate

from matplotlib import pyplot as plt
from matplotlib.patches import Patch, Rectangle

import pipeback
from pipeback.schedules import one_f_one_b
from pipeback.schedules.placement import Placed, place
from pipeback.schedules.split import zb_h1, zb_h2
from pipeback.schedules.timeline import timeline
from pipeback.schedules.worker_programs import interleaved, looped_bfs, zb_v

WORKERS, FLUSH = 4, 8
WHOLE = {"F": 2, "B": 4, "I": 2, "W": 2, "U": 0}  # of a part that is all a worker holds
HALF = {kind: time // 2 for kind, time in WHOLE.items()}
COLOURS = {"F": "#2f6f9f", "B": "#d0743c", "I": "#d0743c", "W": "#3c8c5a"}
NAMES = {"F": "F, forward", "B": "B, backward (or I, gradient of the input)", "W": "W, gradient of the weights"}


def found():
    """Each schedule by name, with what its operations cost."""
    parts = list(range(2 * WORKERS))
    loop, v = place("loop", WORKERS, parts), place("v", WORKERS, parts)
    return {
        "one_f_one_b": (one_f_one_b(FLUSH), WHOLE), "looped_bfs": (Placed(looped_bfs(FLUSH), loop), HALF),
        "interleaved": (Placed(interleaved(FLUSH), loop), HALF), "zb_h1": (zb_h1(FLUSH), WHOLE),
        "zb_h2": (zb_h2(FLUSH), WHOLE), "zb_v": (Placed(zb_v(FLUSH), v), HALF),
        "pb": (pipeback.schedules.flowing(2), WHOLE),
    }  # fmt: skip


def idle(schedule, costs):
    """The idle share of a worker's time, flush after flush."""
    stages = 2 * WORKERS if isinstance(schedule, Placed) else WORKERS
    begins = [s.start for s in timeline(schedule, stages, 8 * FLUSH, costs) if s.stage == 0 and s.op.kind == "F"]
    period = begins[6 * FLUSH] - begins[5 * FLUSH]
    return 1 - FLUSH * sum(WHOLE[kind] for kind in "FIW") / period


def flushes():
    """One flush of each schedule on four workers, and PB, which has none, in its steady state."""
    schedules = found()
    figure, axes = plt.subplots(len(schedules), 1, figsize=(8.4, 1.02 * len(schedules) + 0.5), layout="constrained")
    for ax, (name, (schedule, costs)) in zip(axes, schedules.items(), strict=True):
        placed = isinstance(schedule, Placed)
        owner = schedule.placement.owner if placed else list(range(WORKERS))
        slots = list(timeline(schedule, len(owner), FLUSH if name != "pb" else 60, costs))
        begin, end = (120, 192) if name == "pb" else (0, 72)
        shown = [slot for slot in slots if slot.op.kind != "U" and slot.end > begin and slot.start < end]
        for slot in shown:
            second = placed and slot.stage >= WORKERS
            box = Rectangle(
                (slot.start - begin, owner[slot.stage] - 0.42), slot.end - slot.start, 0.84, linewidth=0.5,
                facecolor=COLOURS[slot.op.kind], edgecolor="white", alpha=0.5 if second else 1.0,
            )  # fmt: skip
            ax.add_patch(box)
        told = "no flush, the steady state" if name == "pb" else "one flush"
        ax.set_title(f"{name}: {told}; {idle(schedule, costs):.0%} idle", fontsize=9, loc="left")
        ax.set(xlim=(0, 72), ylim=(WORKERS - 0.4, -0.6), yticks=range(WORKERS), xticks=[])
        ax.tick_params(length=0, labelsize=8)
        ax.spines[["top", "right", "bottom"]].set_visible(False)
    axes[-1].set_xlabel("time; rows are workers, and the second part of the stages that a worker holds is paler")
    keys = [Patch(color=COLOURS[kind], label=text) for kind, text in NAMES.items()]
    figure.legend(handles=keys, frameon=False, fontsize=8.5, ncols=3, loc="outside upper center")
    return figure


def held(schedule, costs, stages):
    """The most micro-batches between F and the end of their backward, at each worker; of a part of two, a half each."""
    slots = list(timeline(schedule, stages, 8 * FLUSH, costs))
    last = "W" if any(slot.op.kind == "W" for slot in slots) else "B"
    each = stages // WORKERS
    owner = schedule.placement.owner if isinstance(schedule, Placed) else [s // each for s in range(stages)]
    found = []
    for worker in range(WORKERS):
        mine = [slot for slot in slots if owner[slot.stage] == worker]
        steps = [(slot.start, 1) for slot in mine if slot.op.kind == "F"]
        steps += [(slot.end, -1) for slot in mine if slot.op.kind == last]
        found.append(max(accumulate(step for _, step in sorted(steps))) / each)
    return found


if __name__ == "__main__":
    for name, (schedule, costs) in found().items():
        stages = 2 * WORKERS if isinstance(schedule, Placed) else WORKERS
        print(f"{name:12} {idle(schedule, costs):.4f} idle, held:", *held(schedule, costs, stages))
    print("pb with two stages per worker, held:", *held(pipeback.schedules.flowing(2), HALF, 2 * WORKERS))
