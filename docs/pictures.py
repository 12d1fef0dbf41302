"""The pictures of these pages, drawn from the library itself: `python docs/pictures.py FOLDER` writes them as SVG.

Every number in them is counted by pipeback when the pages are built: delays and micro-batches in flight on the
schedules, versions in the ledger of a small pipeline that trains, predictions by asking the method's own hooks.
"""

import sys
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import planner_pictures
import schedule_pictures
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

import pipeback
from pipeback.methods.base import Past, Shift, When, overrides
from pipeback.recipes import measured
from pipeback.recipes import results as measured_results
from pipeback.schedules.timeline import in_flight

FORWARD, BACKWARD, UPDATE, INK, PALE = "#2f6f9f", "#d0743c", "#3c8c5a", "#222222", "#c8c8c8"
OPTIONS = {
    "gpipe": {"micro_batches": 4}, "one_f_one_b": {"micro_batches": 4}, "pipedream_2bw": {"micro_batches": 4},
    "interleaved": {"micro_batches": 4}, "looped_bfs": {"micro_batches": 4}, "pipemare": {"anneal": 100},
    "zb_h1": {"micro_batches": 4}, "zb_h2": {"micro_batches": 4}, "zb_v": {"micro_batches": 4},
}  # fmt: skip
STAGES, MOMENTUM = 4, 0.9


def draw_all(folder):
    """Draw every picture into the folder, unless it is there and younger than the code that it shows."""
    folder.mkdir(parents=True, exist_ok=True)
    recipes = Path(measured.__file__).parents[1]
    read = [*Path(__file__).parent.glob("*.py"), *Path(pipeback.__file__).parent.rglob("*.py")]
    read += [
        *(recipes / "sweeps").glob("*.py"),
        *(recipes / "stability").glob("*.py"),
        *(recipes / "measured").glob("*.csv"),
    ]
    code = max(path.stat().st_mtime for path in read)
    plt.rcParams.update({"svg.hashsalt": "pipeback", "font.size": 10, "axes.edgecolor": PALE, "text.color": INK})
    drawn = {"schedules": schedules, "filling": filling, "staleness": staleness, "memory": memory}
    drawn["flushes"] = schedule_pictures.flushes
    drawn |= {"planner_windows": planner_pictures.windows, "planner_crossover": planner_pictures.crossover}
    drawn |= {f"method_{name}": lambda name=name: which_weights(name) for name in pipeback.methods.available()}
    drawn |= {f"results_{name}": lambda name=name: results(name) for name in measured.names()}
    for name, draw in drawn.items():
        path = folder / f"{name}.svg"
        if path.exists() and path.stat().st_mtime > code:
            continue
        figure = draw()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def create(name):
    return pipeback.methods.create(name, **OPTIONS.get(name, {}))


def schedules():
    """GPipe, 1F1B and PB on five stages, as `pipeback draw method=gpipe,one_f_one_b,pb stages=5 ...` draws them."""
    flush = {"micro_batches": 8}
    chosen = {"gpipe": flush, "one_f_one_b": flush, "pb": {}}
    found = {name: pipeback.methods.create(name, **options).schedule for name, options in chosen.items()}
    return pipeback.draw.compare(found, stages=5, micro_batches=40, until=52)


def results(name):
    """Results, as `pipeback results` draws them from their file."""
    return measured_results.figure(measured_results.found(name))


def filling():
    """PB on four stages from its first micro-batch on."""
    slots = pipeback.timeline.timeline(create("pb").schedule, STAGES, 12)
    return pipeback.draw.picture(slots, until=22).figure


def staleness():
    """The delay D of every stage, by method."""
    stages = 8
    figure, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    lines = {
        "pb and most others": create("pb"), "pipedream, spectrain, pipeoptim, gap_aware, dc_asgd": create("pipedream"),
        "pipedream_2bw (groups of 8)": pipeback.methods.create("pipedream_2bw", micro_batches=8),
        "sgd, gpipe, one_f_one_b": create("sgd"),
    }  # fmt: skip
    for (label, method), mark in zip(lines.items(), "os^D", strict=True):
        ax.plot(range(stages), method.delays(stages), marker=mark, label=label)
    ax.set(xlabel="stage (0 has the input, 7 has the loss)", ylabel="delay D, in updates", xticks=range(stages))
    tidy(ax)
    ax.legend(frameon=False, fontsize=9)
    return figure


def memory():
    """What each stage holds at the peak under 1F1B, PB and PipeDream: micro-batches in flight, weight copies."""
    stages = 8
    chosen = {
        "one_f_one_b": pipeback.methods.create("one_f_one_b", micro_batches=8), "pb": create("pb"),
        "pipedream": create("pipedream"),
    }  # fmt: skip
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.2), layout="constrained")
    for n, (name, method) in enumerate(chosen.items()):
        at = [s + 0.27 * (n - 1) for s in range(stages)]
        axes[0].bar(at, in_flight(method.schedule, stages), width=0.25, label=name)
        axes[1].bar(at, [method.held(s, stages) for s in range(stages)], width=0.25, label=name)
    axes[0].set(title="micro-batches whose activations wait", xlabel="stage", xticks=range(stages))
    axes[1].set(title="copies of the stage's weights", xlabel="stage", xticks=range(stages))
    for ax in axes:
        ax.title.set_fontsize(10)
        tidy(ax)
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def which_weights(name):
    """One micro-batch at every stage: the version that F and B run on, and the update that applies its gradient."""
    method = create(name)
    rows = [one_stage(name, method, s) for s in range(STAGES)]
    figure, ax = plt.subplots(figsize=(6.8, 2.7), layout="constrained")
    for s, (forward, backward, update, aims) in enumerate(rows):
        ax.plot([forward, update + 1], [s, s], color=PALE, linewidth=1, zorder=1)
        ax.scatter([update + 1], [s + 0.0], marker="D", s=46, color=UPDATE, zorder=3)
        point(ax, forward, aims[0], s - 0.13, FORWARD, "o")
        point(ax, backward, aims[1], s + 0.13, BACKWARD, "s")
    least, most = min(min(row[:2]) for row in rows), max(update + 1 for _, _, update, _ in rows)
    ax.set(
        ylim=(STAGES - 0.5, -0.6), xlim=(least - 0.6, most + 0.6), xticks=range(least, most + 1),
        yticks=range(STAGES), ylabel="stage",
        xlabel="version of the stage's weights, counted from the one that is newest when F runs",
    )  # fmt: skip
    tidy(ax)
    keys = [("o", FORWARD, "F runs on"), ("s", BACKWARD, "B runs on"), ("D", UPDATE, "version that U makes")]
    marks = [Line2D([], [], marker=m, color=c, linestyle="none", label=text) for m, c, text in keys]
    if any(aim is not None for row in rows for aim in row[3]):
        marks.append(Line2D([], [], marker="o", color=INK, markerfacecolor="white", label="shifted from, to"))
    ax.legend(handles=marks, frameon=False, fontsize=9, ncols=4, loc="lower left", bbox_to_anchor=(-0.02, 1.0))
    return figure


def tidy(ax):
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(length=0)


def point(ax, version, aim, height, colour, mark):
    """A mark at a version; where the weights are shifted, a hollow one there, and an arrow to where they aim."""
    if aim is None:
        ax.scatter([version], [height], marker=mark, s=46, color=colour, zorder=3)
        return
    ax.scatter([version], [height], marker=mark, s=36, facecolor="white", edgecolor=colour, zorder=3)
    arrow = {"arrowstyle": "-|>", "color": colour, "shrinkA": 4, "shrinkB": 3}
    ax.annotate("", (aim, height), (version, height), arrowprops=arrow)
    ax.scatter([aim], [height], marker=mark, s=46, color=colour, zorder=3)


def one_stage(name, method, s):
    """Versions of F, B and U of a micro-batch in the steady state, relative to the newest at F; where shifts aim."""
    first, versions, newest, updated = ledger(name)
    i = first
    forward, backward = versions["F", s, i], versions["B", s, i]
    zero = newest["F", s, i]
    used = forward - zero
    back = backward - zero
    update = updated[s, i] - zero
    D = method.delays(STAGES)[s]
    when = When(s, STAGES, i, forward, D, (1.0,), (D,))
    return used, back, update, (aim(method, "forward_weights", used, when), aim(method, "backward_weights", back, when))


def aim(method, hook, version, when):
    """Where a shifted version aims, in updates along the last displacement; None: the hook leaves the weights alone."""
    weights, ones = [torch.zeros(())], [torch.ones(())]
    state = {"velocity": ones, "drift": ones, "displacement": ones, "direction": ones, "ahead": ones, "updates": 0}
    if hook == "backward_weights" and method.copies == "stash":
        return aim(method, "forward_weights", version, when) if overrides(method, "forward_weights") else None
    arguments = (weights, state, when) if hook == "forward_weights" else (weights, None, state, when)
    chosen = getattr(method, hook)(*arguments)
    if isinstance(chosen, Past) or not isinstance(chosen, Shift):
        return None
    moved = chosen.coefficients[0]  # of the velocity, which weights move against, or of a displacement, along it
    kept = method.init(weights)
    along = -moved if chosen.directions[0] is not None and not {"velocity", "direction"}.isdisjoint(kept) else moved
    if moved and "ahead" in kept:
        along = sum(MOMENTUM**j for j in range(1, when.delay + 1))  # steps to which momentum is committed
    return None if not along else version + along


def ledger(name):
    """A micro-batch well inside the steady state; which versions every F and B of a pipeline that trains used, the
    newest version at the time of every operation, and the version on which each micro-batch's update was made."""
    if name not in _LEDGERS:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(STAGES)))
        pipe = pipeback.Pipeline(
            layers, loss=torch.nn.functional.mse_loss, method=create(name), micro_batch_size=1,
            optimizer=adam if name == "eigendelay" else momentum,
        )  # fmt: skip
        pipe.push(torch.randn(48, 3), torch.randn(48, 3))
        first = 24
        versions = {(record.kind, record.stage, record.mb): record.version for record in pipe.ledger}
        newest, updated = {}, {}
        method = pipe.method
        for s in range(STAGES):
            count = 0
            for op in pipeback.until(method.schedule_at(0, 48)(s, STAGES), 48):
                if op.kind == "U":
                    for i in range(min(48, op.mb + 1)):
                        updated.setdefault((s, i), count)
                    count += 1
                else:
                    newest[op.kind, s, op.mb] = count
        _LEDGERS[name] = (first, versions, newest, updated)
    return _LEDGERS[name]


_LEDGERS = {}


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=MOMENTUM)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(MOMENTUM, 0.999))


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
