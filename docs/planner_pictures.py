"""The pictures of the planner's pages: batch windows of two devices, and what never flushing gains and costs."""

from matplotlib import pyplot as plt

from pipeback.planner.crossover import crossings, first
from pipeback.planner.hardware import device
from pipeback.planner.loss import Loss
from pipeback.planner.models import Model
from pipeback.planner.techniques import technique
from pipeback.planner.windows import PHASES, lines, window

COMPUTING, MOVING, PRICES, WINDOW = "#2f6f9f", "#d0743c", ("#d0743c", "#3c8c5a", "#8a5fa8"), "#dfeee4"


def windows():
    """`pipeback plan window gpt:13b devices=H100,CS-2` as a picture."""
    figure, axes = plt.subplots(1, 2, figsize=(8.2, 4.1), layout="constrained")
    for ax, name in zip(axes, ("H100", "CS-2"), strict=True):
        found = window(Model.named("gpt:13b"), device(name))
        points = lines(found)
        tokens = [point.tokens for point in points]
        if found.open:
            ax.axvspan(found.low.tokens, found.high.tokens, color=WINDOW, linewidth=0, label="window")
        phase = PHASES[found.low.name]
        ax.loglog(tokens, [1e3 * point.computing for point in points], color=COMPUTING, label=phase.computing)
        ax.loglog(tokens, [1e3 * point.moving for point in points], color=MOVING, label=phase.moving)
        edges = f"from {found.low.tokens:,.0f} ({found.low.name}) to {found.high.tokens:,.0f} (memory)"
        ax.set_title(f"{name}: {edges if found.open else 'empty'}", fontsize=10)
        ax.set(xlabel="tokens per weight pass", xlim=(tokens[0], tokens[-1]))
        plain(ax)
        ax.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(-0.02, -0.18))
    axes[0].set_ylabel("milliseconds")
    return figure


def crossover():
    """From how many stages on PipeDream beats 1F1B with flushes of 96 micro-batches, at three prices of a delay."""
    figure, ax = plt.subplots(figsize=(6.8, 3.6), layout="constrained")
    flushing, flowing = technique("one_f_one_b"), technique("pipedream")
    published = next(price.kappa for price in flowing.slow if price.optimizer == "adamw")
    for share, colour in zip((1, 10, 50), PRICES, strict=True):
        loss = Loss(slow={"pipedream": published / share})
        points = crossings(flushing, flowing, 96, loss)
        wins = first(points)
        ends = f"pays from {wins} stages on" if wins else "pays nowhere here"
        label = f"delays, κ = {published / share:.2g}: {ends}"
        ax.loglog([p.stages for p in points], [p.slow for p in points], color=colour, marker="o", ms=3, label=label)
    ax.loglog([p.stages for p in points], [p.gain for p in points], color=COMPUTING, lw=2.2, label="never flushing")
    ticks = [1, 2, 4, 8, 16, 32, 64, 128]
    ax.set_xticks(ticks, [str(n) for n in ticks])
    ax.set_yticks([1, 2, 5, 10, 20, 50], [f"{n}×" for n in (1, 2, 5, 10, 20, 50)])
    ax.minorticks_off()
    ax.set(xlabel="stages", ylabel="factor of time, gained or paid", xlim=(1, 128))
    plain(ax)
    ax.legend(frameon=False, fontsize=9)
    return figure


def plain(ax):
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(length=0, which="both")
