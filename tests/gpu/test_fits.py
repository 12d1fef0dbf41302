"""Lightning's fits on a GPU: the numbers of the CPU, and in float32 the same bits in every way to train there."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tests.laws.as_one import model, same
from tests.laws.cases import CASES
from tests.lightning.cases import Regression, dataset, strategy, trainer
from tests.simulated.fits import fit
from tests.simulated.test_simulated import FITS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:an update is of"),
]
GPU = "cuda:0"
HERE = {"sim": GPU}


def run(where=(GPU,), resumed="", **options):
    return fit(list(where), resumed=HERE.get(resumed, resumed), **options)


@pytest.mark.parametrize("name", FITS)
def test_the_numbers_of_the_cpu(name):
    options = FITS[name] | {"draws": False, "precision": "64-true"}
    plain = {key: value for key, value in options.items() if key not in ("where", "resumed")}
    wanted, found = fit(["cpu"], **plain), run(**options)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        told = lambda m, k=key: f"{k}: {m}"  # noqa: E731
        torch.testing.assert_close(found[key].double(), value.double(), rtol=1e-9, atol=1e-9, msg=told)


@pytest.mark.parametrize(
    ("method", "options"),
    [("pb", {"activations": "host"}), ("gpipe", {"activations": "recompute"}), ("pb", {"workers": 2})],
    ids=str,
)
def test_the_bits_of_the_event_loop(method, options):
    wanted, found = run(method=method), run(method=method, **options)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def batches(vectorize, case, accelerator, **options):
    """Weights and losses of batches of 48 slices, over 7 stages of which 5 are alike."""
    torch.manual_seed(3)
    module, how = Regression(model()), strategy(CASES[case](7), micro_batch_size=1, vectorize=vectorize)
    data = DataLoader(dataset(4, 48), batch_size=48)
    trainer(how, accelerator=accelerator, precision="64-true", **options).fit(module, data)
    told = " ".join(how.vectorized.values())
    assert ("as one" in told or "as a graph" in told) == bool(vectorize), told
    return torch.cat([value.flatten().cpu() for value in module.state_dict().values()]), torch.stack(
        module.losses
    ).cpu()


@pytest.mark.parametrize("vectorize", [True, "cuda_graph"])
@pytest.mark.parametrize(("case", "options"), [("pb", {}), ("cerebras", {}), ("pb", {"gradient_clip_val": 0.05})])
def test_stages_as_one(case, options, vectorize):
    same(batches(vectorize, case, "gpu", **options), batches(False, case, "cpu", **options), within=1e-9)
