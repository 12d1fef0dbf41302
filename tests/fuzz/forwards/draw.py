"""Forwards, drawn by hypothesis, which also shrinks one that fails: simple things come first in every choice."""

from __future__ import annotations

from hypothesis import strategies as st

from ..strategies import often
from .forward import FORMS, Forward
from .layers import LAYERS
from .steps import STEPS

RUNTIMES = [
    {}, {"workers": 2}, {"store": "host"}, {"workers": 3}, {"workers": 2, "store": "host"}, {"activations": "host"},
    {"activations": "recompute"}, {"vectorize": "auto"},
]  # fmt: skip
METHODS = ["sgd", "pb", "pipedream", "cerebras", "gpipe", "spectrain", "one_f_one_b"]
SAME_WEIGHTS = ("sgd", "gpipe", "one_f_one_b", "pipedream")  # in F and in B


@st.composite
def forwards(draw: st.DrawFn, kind: type[Forward] = Forward) -> Forward:
    """Any forward that a trace claims to follow."""
    layers = tuple(draw(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=6)))
    names = st.sampled_from(list(STEPS))
    step = st.tuples(st.one_of(st.integers(0, len(layers) - 1), names), st.integers(0, 4), st.booleans())
    forward = kind(
        layers=layers, steps=tuple(draw(st.lists(step, min_size=1, max_size=10))), gathers=draw(st.booleans()),
        seed=draw(st.integers(0, 99)), method=draw(st.sampled_from(METHODS)),
        stages=draw(st.sampled_from(["layer", "auto", 2])), form=draw(st.sampled_from(list(FORMS))),
        runtime=dict(draw(st.sampled_from(RUNTIMES))), resume=draw(often(None, st.integers(1, 5), 3)),
    )  # fmt: skip
    if forward.runtime.get("activations") == "recompute" and (forward.method not in SAME_WEIGHTS or forward.transposes):
        del forward.runtime["activations"]  # B on other weights, or a kernel that torch chooses by the graph
    return forward
