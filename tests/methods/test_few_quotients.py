"""Sums of quotients with nearly equal denominators, as sums of a few, against exact fractions."""

from fractions import Fraction

import pytest
import torch

from pipeback.methods.few_quotients import fewer_quotients


def steps(t, count, beta2, rows=3):
    """s and ε of Adam's steps without a gradient; every row makes fewer of them."""
    j = torch.arange(1, count + 1, dtype=torch.float64)[:, None]
    ends = torch.tensor([count - n * count // rows for n in range(rows)])
    roots = (1 - beta2 ** (t + j)).sqrt().expand(count, rows)
    sizes = torch.where(j <= ends, -1e-3 * 0.9**j * roots, 0)
    return sizes, 1e-8 * roots


def exact(sizes, tiny, root):
    return float(sum((Fraction(s) / (Fraction(root) + Fraction(e)) for s, e in zip(sizes, tiny) if s), Fraction(0)))


@pytest.mark.parametrize("root", [0.0, 1e-9, 1e-8, 3e-7, 0.1])
@pytest.mark.parametrize(("t", "beta2"), [(1, 0.99), (5, 0.999), (60, 0.99), (1000, 0.999), (100_000, 0.99)])
def test_the_sum_is_right_to_rounding(t, beta2, root):
    given = steps(t, 62, beta2)
    sums, places = fewer_quotients(*given, torch.float64)
    for row in range(3):
        wanted = exact(given[0][:, row].tolist(), given[1][:, row].tolist(), root)
        found = float((sums[:, row] / (root + places[:, row])).sum())
        assert found == pytest.approx(wanted, rel=2e-14)


@pytest.mark.parametrize(("t", "most"), [(60, 7), (1000, 3), (100_000, 1)])
def test_they_are_few(t, most):
    sums, places = fewer_quotients(*steps(t, 62, 0.99), torch.float32)
    assert len(sums) == len(places) <= most


def test_few_steps_stay_as_they_are():
    given = steps(1, 3, 0.9)
    assert all(a is b for a, b in zip(fewer_quotients(*given, torch.float64), given))


def test_no_steps():
    sums, _ = fewer_quotients(
        torch.zeros(4, 2, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64), torch.float32
    )
    assert not sums.any()


def test_an_epsilon_of_zero():
    sizes, tiny = steps(10, 20, 0.99)
    sums, places = fewer_quotients(sizes, tiny * 0, torch.float64)
    assert len(sums) == 1 and not places.any()
    assert torch.allclose(sums[0], sizes.sum(0), rtol=1e-15)
