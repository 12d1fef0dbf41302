"""Lightning's fits on a GPU: the numbers of the CPU, and in float32 the same bits in every way to train there."""

from __future__ import annotations

import pytest
import torch

from tests.simulated.fits import fit
from tests.simulated.test_simulated import FITS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HERE = {"sim": "cuda:0"}
AS_ONE = {
    "stages as one": {"method": "pb", "vectorize": True},
    "whichever is faster": {"method": "cerebras", "vectorize": "auto"},
}


def run(where=("cuda:0",), resumed="", **options):
    return fit(list(where), resumed=HERE.get(resumed, resumed), **options)


@pytest.mark.parametrize("name", FITS | AS_ONE)
def test_the_numbers_of_the_cpu(name):
    options = (FITS | AS_ONE)[name] | {"draws": False, "precision": "64-true"}
    plain = {key: value for key, value in options.items() if key not in ("where", "resumed", "vectorize")}
    wanted, found = fit(["cpu"], **plain), run(**options)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        told = lambda m, k=key: f"{k}: {m}"  # noqa: E731
        torch.testing.assert_close(found[key].double(), value.double(), rtol=1e-9, atol=1e-9, msg=told)


@pytest.mark.parametrize(
    ("method", "options"),
    [("pb", {"activations": "host"}), ("gpipe", {"activations": "recompute"}), ("pb", {"workers": 2})], ids=str,
)  # fmt: skip
def test_the_bits_of_the_event_loop(method, options):
    wanted, found = run(method=method), run(method=method, **options)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
