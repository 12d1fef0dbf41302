"""What a layer computes and holds, against the closed forms of the papers, written down once more."""

import pytest

from pipeback.planner import Model
from pipeback.planner.models import even
from pipeback.planner.timing import kept, repeated

SIZES = [(24, 2304, 24), (48, 6144, 64), (96, 12288, 96)]


@pytest.mark.parametrize("layers, h, a", SIZES)
def test_flops_and_parameters_are_megatrons(layers, h, a):
    """Narayanan et al., arXiv 2104.04473, section 5.1 and equation 2."""
    s, v = 2048, 51200
    model = Model.gpt(layers, h, a)
    formula = 72 * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model.flops == pytest.approx(formula, rel=1e-12)
    parameters = 12 * layers * h * h * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h)) + 2 * h
    assert model.parameters == pytest.approx(parameters, rel=1e-12)


@pytest.mark.parametrize("layers, h, a", SIZES)
@pytest.mark.parametrize("t", [1, 2, 8])
def test_activations_are_korthikantis(layers, h, a, t):
    """arXiv 2205.05198: section 4.1 without recomputation, 5 with the selective one, 2sbh with the full one."""
    s = 2048
    block = Model.gpt(layers, h, a).layers[1]
    assert kept(block, t, "none") == pytest.approx(s * h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert kept(block, t, "selective") == pytest.approx(34 * s * h / t)
    assert kept(block, t, "full") == 2 * s * h
    assert repeated(block, t, "none") == 0
    assert repeated(block, t, "selective") == pytest.approx(5 * a * s * s / t)
    assert repeated(block, t, "full") == pytest.approx(kept(block, t, "none") - 2 * s * h)  # its input is there


def test_a_fused_attention_keeps_no_scores():
    plain, fused = Model.gpt(2, 256, 4), Model.gpt(2, 256, 4, fused=True)
    assert fused.flops == plain.flops and fused.layers[1].scores == 0 < plain.layers[1].scores


def test_gates_and_shared_keys():
    """Llama 2 70B: 8192² for queries and the output, 8192·1024 for keys and for values, three products of 28672."""
    block = Model.named("llama:70b").layers[1]
    assert block.parameters == 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192


def test_cutting():
    model = Model.gpt(12, 64, 4)
    stages = [[(layer.name, n) for layer, n in runs] for runs in model.cut(4)]
    assert stages == [[("embedding", 1), ("block", 3)], [("block", 3)], [("block", 3)], [("block", 3), ("head", 1)]]
    for parts in (1, 5, 7, 12):
        counts = [sum(n for layer, n in runs if layer.name == "block") for runs in model.cut(parts)]
        assert sum(counts) == 12 and max(counts) - min(counts) <= 1


@pytest.mark.parametrize("weights", [[1.0] * 7, [5, 1, 1, 1, 1, 1, 5], [1, 2, 3, 4, 5, 6, 7], [9, 1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("parts", [1, 2, 3, 6, 7])
def test_even_parts_are_the_best(weights, parts):
    from itertools import combinations

    def heaviest(ends):
        return max(sum(weights[a:b]) for a, b in zip([0, *ends], ends))

    best = min(heaviest([*cut, 7]) for cut in combinations(range(1, 7), parts - 1))
    found = even(weights, parts)
    assert len(found) == parts and found == sorted(set(found)) and heaviest(found) == pytest.approx(best)
