"""Prints and draws the batch windows of a model whose weights are streamed, on one device or several.

pipeback plan window gpt:13b devices=H100,GH200,CS-2 out=window.png
pipeback plan window llama:70b devices=H200 recompute=selective store=disk prefetch=2
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from matplotlib import pyplot as plt
from rich.console import Console

from pipeback.planner.hardware import device
from pipeback.planner.models import Model
from pipeback.planner.quantities import whole
from pipeback.planner.windows import Window, lines
from pipeback.planner.windows import window as window_of
from pipeback.recipes.draw import picturable
from pipeback.recipes.planning import charts
from pipeback.recipes.planning.pictures import draw_chart
from pipeback.recipes.reports.style import STYLE, WIDE

DEFAULTS = {"devices": "", "recompute": "full", "store": "host", "prefetch": "1", "out": ""}


def main(words: list[str], console: Console) -> None:
    """Print the windows. Raises ValueError for a mistake."""
    options, models = dict(DEFAULTS), []
    for word in words:
        name, given, value = word.partition("=")
        if not given or ":" in name:
            models.append(word)
        elif name in options:
            options[name] = value
        else:
            near = get_close_matches(name, options, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{word!r} is not an option of window{hint} (there are {', '.join(options)})")
    if len(models) != 1 or not options["devices"]:
        raise ValueError("name one model and its devices: pipeback plan window gpt:13b devices=H100,GH200")
    found = [
        window_of(Model.named(models[0]), device(name), recompute=options["recompute"], store=options["store"],
                  prefetch=whole("prefetch", options["prefetch"], 0))
        for name in options["devices"].split(",")
    ]  # fmt: skip
    file = Path(options["out"]).expanduser() if options["out"] else None
    if file:
        picturable(str(file))
    for one in found:
        console.print(str(one), highlight=False, markup=False, soft_wrap=True)
    if file:
        picture(found).savefig(file)
        console.print(f"written: {file}", highlight=False, markup=False, soft_wrap=True)


def picture(found: list[Window]) -> plt.Figure:
    """A panel per device."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(found), figsize=(min(WIDE, 4.2 * len(found)), 3.2), layout="constrained", squeeze=False
        )
        for ax, one in zip(axes[0], found, strict=True):
            draw_chart(charts.window(one, lines(one)), ax)
        return figure
