"""Pushes are left out (`Debug(take_back=N)`) where weights have masters, and where stages are compiled."""

import shutil

import pytest
import torch

import pipeback
from tests.helpers.choice import rare
from tests.laws.cases import CASES, OPTIMIZERS, STAGES, data
from tests.laws.test_take_back import bad, same, trained
from tests.pipeline.test_dropped import loss
from tests.processes.cases import drawing, half

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
COUNT, GONE = 24, (5, 11)
COMPILES = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a compiler"
)


@pytest.mark.parametrize(
    "options",
    [
        {"masters": True, "workers": 2}, {"masters": True, "replicas": 2},
        *(pytest.param({"compile": True, "workers": w}, marks=[COMPILES, pytest.mark.soak]) for w in (None, 2)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("case", ["pb", rare("cerebras"), rare("pipedream")])
def test_masters_and_compiled_stages(case, options):
    def built(every):
        torch.manual_seed(7)
        model = half() if "masters" in options else drawing()
        return pipeback.Pipeline(
            model, loss=loss, optimizer=OPTIMIZERS["momentum"], method=CASES[case](STAGES),
            debug=pipeback.Debug(take_back=every), **options,
        )  # fmt: skip

    good = data(COUNT, 8)
    hurt, plain = built(3), built(None)
    losses, told = trained(hurt, [bad(None) if n in GONE else push for n, push in enumerate(good)])
    wanted, _ = trained(plain, [push for n, push in enumerate(good) if n not in GONE])
    assert len(told) == 2
    same(hurt, plain, losses, wanted, GONE)
