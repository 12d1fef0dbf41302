"""`pipeback bench kernels`, tiny: what it tells apart. No times."""

from functools import partial

import pytest
import torch

from pipeback.recipes.benches import kernels, turns
from pipeback.recipes.benches.contenders import Contender
from pipeback.recipes.benches.tasks import NETWORKS, Network
from pipeback.recipes.benches.vectorized import Linear, blocks

TINY = Network("tiny", "4 layers of width 8", partial(blocks, Linear, 4, 8), (8,), {2: 8})


def told(*does):
    return kernels.kernels(Contender(lambda: [work() for work in does] and 0.0, 1))


def test_what_is_a_product_an_update_or_something_else():
    a, image, weight = torch.randn(64, 64), torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert told(lambda: a @ a).products > 0 == told(lambda: a @ a).update
    for work in (lambda: torch.conv2d(image, weight), lambda: torch.bmm(a[None], a[None])):
        some = told(work)
        assert some.products > 0 == some.update
    some = told(lambda: torch._foreach_mul_([a.clone()], 2.0))
    assert some.update > 0 == some.products
    some = told(lambda: torch.layer_norm(a, (64,)), lambda: a.relu())
    assert some.others > 0 == some.products + some.update


def test_a_table_per_network(monkeypatch, capsys):
    monkeypatch.setattr(turns, "LEAST", 1e-6)
    monkeypatch.setitem(NETWORKS, "tiny", TINY)
    kernels.main(1, networks="tiny", contenders="fused,pb")
    head, _, loop, pb = capsys.readouterr().out.strip().splitlines()
    assert "tiny, micro-batch 2" in head and "products" in head
    numbers = [float(cell) for cell in loop.split("|")[2:-2]]
    assert "plain loop, fused" in loop and numbers[-1] == 1
    assert "`pb`, event loop" in pb and float(pb.split("|")[-2]) > 0


def test_the_loop_is_needed():
    with pytest.raises(SystemExit, match="name it, too"):
        kernels.main(1, networks="narrow", contenders="pb,auto")
