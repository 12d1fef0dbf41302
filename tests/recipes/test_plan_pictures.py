"""Pictures of a plan: legends lie below what is written along the axes, however few options there are."""

import pytest

pytest.importorskip("matplotlib")

from matplotlib import pyplot as plt

from pipeback.planner.hardware import devices
from pipeback.planner.search import question
from pipeback.recipes.planning import pictures


@pytest.mark.parametrize("methods", ["pb", "pb,gpipe,zb_h1"])
def test_legends_lie_below_the_marks(methods):
    asking = question("gpt:125m", tokens="1B", methods=methods)
    figure = pictures.whole(asking.answer(devices("8xH100")), asking)
    try:
        figure.canvas.draw()
        axes = [ax for part in figure.subfigs for ax in part.axes if ax.get_legend()]
        assert len(axes) == 4
        for ax in axes:
            top = ax.get_legend().get_window_extent().y1
            texts = [text for text in (*ax.get_xticklabels(), ax.xaxis.label) if text.get_text()]
            assert all(text.get_window_extent().y0 > top for text in texts)
    finally:
        plt.close("all")
