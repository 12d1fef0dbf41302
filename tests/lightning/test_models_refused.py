"""Models that cannot be split within a trainer are refused, and their cures work."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.lightning.cases import Regression, loader, strategy, trainer, weights
from tests.lightning.models import Case, case, data

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use_cache=True"),
    pytest.mark.filterwarnings("ignore:.*nested tensors"),
]


class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)


class Numpy(Strange):
    def forward(self, x):
        return self.second(torch.from_numpy(self.first(x).detach().numpy()))


class Parts(nn.Module):
    """Its sequence is not called as such."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x):
        for part in self.body:
            x = x + part(x)
        return x


class Twice(Regression):
    def training_step(self, batch, batch_idx):
        return mse_loss(self.model(batch[0]) + self.model(batch[0]), batch[1])


@pytest.mark.parametrize(("module", "options", "message"), [
    (lambda: Regression(Numpy()), {}, "Numpy.forward calls Tensor.numpy.*leaves="),
    (lambda: Twice(Parts()), {"stages": "layer"}, "called self.model twice.*call it once.*module=\"self\""),
    (lambda: Regression(Parts()), {}, "did not call self.model.body.*module=\"self\""),
    (lambda: case("recurrent"), {"stages": ["lsmt"]}, "no module 'lsmt'; did you mean 'lstm'"),
    (lambda: case("recurrent"), {"stages": pipeback.Splitting(leaves=["lsmt"])},
     "leaves: Recurrent has no module 'lsmt'"),
    (lambda: case("recurrent"), {"stages": "layers"}, "did you mean 'layer'"),
    (lambda: case("recurrent"), {"stages": 9}, "stages=9, but the model has 3 layers"),
])  # fmt: skip
def test_bad_input(module, options, message):
    module = module()
    before = weights(module)
    with pytest.raises((ValueError, TypeError), match=message):
        trainer(strategy("pb", **options)).fit(module, data("recurrent") if isinstance(module, Case) else loader())
    assert torch.equal(before, weights(module)), "half a step was trained"


@pytest.mark.parametrize(
    ("module", "cure"),
    [(Regression, {"stages": "layer"}), (Regression, {"module": "self"}), (Twice, {"module": "self"})],
)
def test_the_cures_of_parts_and_of_two_calls(module, cure):
    plain, ours = module(Parts()), module(Parts())
    ours.load_state_dict(plain.state_dict())
    trainer().fit(plain, loader())
    trainer(strategy("sgd", **cure)).fit(ours, loader())
    assert torch.equal(weights(plain), weights(ours))


class Adding(Regression):
    """Changes the model's output in place."""

    def training_step(self, batch, batch_idx):
        output = self.model(batch[0])
        output += 1
        return mse_loss(output, batch[1])


def test_an_output_that_is_changed_in_place():
    with pytest.raises(RuntimeError, match="in-place operation") as raised:
        trainer(strategy("pb")).fit(Adding(), loader())
    assert "write output = output + x for output += x" in raised.value.__notes__[0]
    trainer(strategy("pb", module="self")).fit(Adding(), loader())
