"""Law: `clip` between pushes bounds the updates that begin later and no others, whoever makes them and when."""

import time

import pytest
import torch
from torch import nn

import pipeback
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, STAGES, data, network


class Late(torch.optim.SGD):
    """Its steps take longer than `clip` does."""

    def step(self, closure=None):
        time.sleep(0.002)
        return super().step(closure)


def trained(case, **options):
    pipe = pipeback.Pipeline(
        network(dtype=torch.float64), loss=nn.functional.mse_loss, method=CASES[case](STAGES),
        optimizer=lambda params: Late(params, lr=0.5), **options,
    )  # fmt: skip
    for n, (x, y) in enumerate(data(12, samples=4, dtype=torch.float64)):
        pipe.push(x, y)
        pipe.clip(*((None, 1e-6), (None, None), (1e-6, None))[n % 3])
    pipe.drain()
    found = torch.cat([p.detach().flatten() for p in pipe.model.parameters()])
    pipe.close()
    return found


@pytest.mark.parametrize("case", mostly_rare(["pb", "pipedream", "gpipe"], "pb"))
@pytest.mark.parametrize(
    "options",
    [{"store": "host"}, {"replicas": 2}, {"workers": 2}, {"store": "host", "replicas": 2}],
    ids=str,
)
def test_equals_one_thread_with_resident_weights(case, options):
    torch.testing.assert_close(trained(case, **options), trained(case), rtol=1e-12, atol=1e-12)
