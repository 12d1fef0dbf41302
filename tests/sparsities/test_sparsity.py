"""Policies of sparse training: each equals its paper's rule written down again in plain Python and float64."""

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pipeback
from pipeback import sparsities
from pipeback.sparsities.base import At, Sparsity
from pipeback.sparsities.densities import erk
from pipeback.sparsities.masks import anywhere, largest, survivors
from tests.helpers.processes import in_a_new_process, printed
from tests.sparsities.policies import DTYPES, OPTIONS, SHAPES, best, places, policy

# -- the registry ------------------------------------------------------------------------------------------------------


def test_names():
    assert sparsities.available()[:4] == ["magnitude", "gradual", "set", "rigl"] == list(OPTIONS)
    assert pipeback.Sparsity is Sparsity and pipeback.sparsities is sparsities


@pytest.mark.parametrize("name", OPTIONS)
def test_a_policy_file_opens_with_its_rule(name):
    opening = sys.modules[type(policy(name)).__module__].__doc__
    assert "m_l" in opening and "arXiv" in opening and "Left out" in opening


def test_unknown_names_and_options_suggest():
    with pytest.raises(
        ValueError, match="unknown sparsity 'rigle'; did you mean 'rigl'.*magnitude, gradual, set, rigl"
    ):
        sparsities.create("rigle")
    with pytest.raises(ValueError, match="sparsity 'set' has no option 'densty'; did you mean 'density'"):
        sparsities.create("set", densty=0.1)
    with pytest.raises(ValueError, match="sparsity 'rigl' needs the option until="):
        sparsities.create("rigl")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("magnitude", {"density": 0}), ("magnitude", {"density": 1.5}), ("magnitude", {"density": "a"}),
        ("magnitude", {"distribution": "er"}), ("gradual", {"steps": 0}), ("gradual", {"every": 2.5}),
        ("gradual", {"start": -1}), ("gradual", {"initial": 0}), ("set", {"fraction": 0}), ("set", {"every": True}),
        ("set", {"initial": "zeros"}), ("rigl", {"until": 0}), ("rigl", {"keep_first": "yes"}),
    ],
)  # fmt: skip
def test_options_are_checked_when_a_policy_is_built(name, options):
    (option,) = options
    with pytest.raises(ValueError, match=f"{option} must be"):
        policy(name, **options)


def test_options_are_plain_values():
    made = policy("set", exclude=["head.*"])
    assert made.options()["exclude"] == ["head.*"] and "fraction=0.3" in repr(made)
    assert policy("set", **made.options()) == made
    assert policy("set", exclude="head.*").exclude == ("head.*",)  # one pattern, not six letters


PLUGIN = """
from dataclasses import dataclass
from pipeback import Sparsity

@dataclass(repr=False, kw_only=True)
class Once(Sparsity):
    after: int = 7
    def due(self, update):
        return update == self.after
"""


def test_an_outside_package_adds_a_policy(tmp_path):
    (tmp_path / "once.py").write_text(PLUGIN)
    info = tmp_path / "once-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: once\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[pipeback.sparsities]\nonce = once:Once\nwrong = pipeback.methods.pb:PipelinedBackpropagation\n"
    )
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from pipeback import sparsities
assert sparsities.available()[4:] == ["once", "wrong"]
print(sparsities.create("once", density=0.5), sparsities.create("once").due(7))
try:
    sparsities.create("wrong")
except ValueError as error:
    print(error)
"""
    first, second = in_a_new_process(printed, code).splitlines()
    assert first.startswith("Once(density=0.5,") and first.endswith("after=7) True")
    assert second.endswith("built a PipelinedBackpropagation; a plug-in must build a pipeback.Sparsity")


# -- which tensors, and how dense --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_is_sparsified():
    model = nn.ModuleDict(
        {
            "token": nn.Embedding(9, 8),
            "conv": nn.Conv2d(3, 4, 3),
            "bn": nn.BatchNorm2d(4),
            "ln": nn.LayerNorm((4, 8)),
            "rms": nn.RMSNorm((4, 8)),
            "attention": nn.MultiheadAttention(8, 2, add_bias_kv=True),
            "rnn": nn.LSTM(8, 8),
            "head": nn.Linear(8, 9),
            # their norms divide, and one of a row without survivors is 0
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            "once normed": nn.utils.weight_norm(nn.Linear(8, 8)),
        }
    )

    def chosen(rule):
        return {
            f"{at}.{name}"
            for at, module in model.named_modules()
            for name, p in module.named_parameters(recurse=False)
            if rule.chooses(module, f"{at}.{name}", p)
        }

    everything = {
        "conv.weight", "attention.in_proj_weight", "attention.out_proj.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0",
        "head.weight",
    }  # fmt: skip
    assert chosen(policy("magnitude")) == everything
    assert chosen(policy("rigl", exclude=("head.*", "rnn.weight_[ih]h_*"))) == {
        "conv.weight", "attention.in_proj_weight", "attention.out_proj.weight",
    }  # fmt: skip
    assert not policy("set").chooses(nn.Linear(1, 1), "0.weight", torch.zeros(3, 0))
    assert not policy("set").chooses(nn.Linear(1, 1), "0.weight", torch.zeros(3, 3, dtype=torch.int8))


def erk_by_bisection(shapes, density):
    """ε of min(1, ε·raw) such that the weights kept are as many as wanted."""
    sizes = [math.prod(shape) for shape in shapes]
    raw = [sum(shape) / size for shape, size in zip(shapes, sizes)]
    low, high = 0.0, 1 / min(raw)
    for _ in range(200):
        middle = (low + high) / 2
        kept = math.fsum(min(1.0, middle * r) * n for r, n in zip(raw, sizes))
        low, high = (middle, high) if kept < density * sum(sizes) else (low, middle)
    return [min(1.0, high * r) for r in raw]


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=2, max_size=4).map(tuple), min_size=1, max_size=8),
    st.floats(0.001, 1.0),
)
def test_erk_is_its_equation_and_keeps_as_many_as_wanted(shapes, density):
    found = erk(shapes, density)
    assert found == pytest.approx(erk_by_bisection(shapes, density), rel=1e-9)
    total = sum(math.prod(shape) for shape in shapes)
    assert math.fsum(d * math.prod(shape) for d, shape in zip(found, shapes)) == pytest.approx(density * total)
    assert all(0 < d <= 1 for d in found)


def test_erk_by_hand():
    # sums 8 and 20, sizes 16 and 64: ε·28 = 40 at density 0.5
    assert erk([(4, 4), (16, 4)], 0.5) == pytest.approx([40 / 28 * 8 / 16, 40 / 28 * 20 / 64])
    # at 0.9 the first would be 1.29: it is full, and the second keeps 72 − 16 of its 64
    assert erk([(4, 4), (16, 4)], 0.9) == pytest.approx([1, 56 / 64])
    assert erk([], 0.5) == [] and erk([(3, 3), (9, 9)], 1.0) == pytest.approx([1, 1])


def test_first_and_last_may_stay_dense():
    assert policy("magnitude", density=0.2).densities(SHAPES) == [0.2] * 5
    assert policy("magnitude", density=0.2, keep_first=True).densities(SHAPES) == [1, 0.2, 0.2, 0.2, 0.2]
    both = policy("rigl", density=0.2, keep_first=True, keep_last=True)
    assert both.densities(SHAPES) == [1, *erk(SHAPES[1:-1], 0.2), 1]
    assert both.densities(SHAPES[:1]) == [1] and both.densities([]) == []


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_survivors():
    assert [survivors(0.1, n) for n in (0, 1, 4, 26, 100)] == [0, 1, 1, 3, 10]
    assert survivors(1.0, 7) == 7 and survivors(0.5, 5) == 2 and survivors(0.5, 7) == 4  # half to even


@given(st.data(), st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_largest_takes_the_earlier_of_equals(data, scores):
    """Few values, so that nearly all are equal to others."""
    among = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    inside = {i for i, there in enumerate(among) if there}
    count = data.draw(st.integers(0, len(inside)))
    for dtype in DTYPES:
        found = largest(torch.tensor(scores, dtype=dtype), count, torch.tensor(among))
        assert places(found) == best(scores, count, inside)


def test_choosing_counts_places_in_rows_whatever_the_strides():
    scores = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).t()
    assert largest(scores, 3).tolist() == [[True, True], [True, False]]
    assert largest(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), 7).flatten().nonzero().view(
        -1
    ).tolist() == list(range(7))
    with pytest.raises(ValueError, match="3 entries are to be chosen among fewer"):
        largest(torch.ones(4), 3, torch.tensor([True, False, True, False]))
    with pytest.raises(ValueError, match="3 entries are to be drawn among 2"):
        anywhere(3, torch.tensor([True, False, True, False]), torch.Generator())


def test_random_places_are_equally_likely():
    among = torch.tensor([True, False, True, True, False, True, True, True])
    hits = torch.zeros(8)
    for update in range(4000):
        hits += anywhere(2, among, At(0, 0, update).generator(0))
    share = hits / 4000
    assert share[~among].sum() == 0
    assert (share[among] - 2 / 6).abs().max() < 4.5 * math.sqrt(2 / 6 * 4 / 6 / 4000)
