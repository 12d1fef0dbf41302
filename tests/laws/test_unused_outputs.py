"""Law: an output that a loss leaves out is the same to stages as one as to the event loop, but for weights that have an
effect on nothing else, of which it is told.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.helpers.choice import rare
from tests.laws.as_one import same
from tests.laws.cases import CASES, OPTIMIZERS

TOLD = r"stage 1 \(1\): linear.weight has an effect on outputs of the model alone that the loss leaves out"


class Two(nn.Module):
    """Hands on a second tensor, which a weight of its own may have made."""

    def __init__(self, makes=False):
        super().__init__()
        self.linear, self.makes = nn.Linear(6, 6), makes

    def forward(self, x):
        x, beside = x if isinstance(x, tuple) else (x, x)
        if self.makes:
            return torch.tanh(x), torch.tanh(self.linear(beside))
        return torch.tanh(self.linear(x)), beside + torch.relu(x)


def trained(vectorize, case, makes, uses, many):
    """uses: which outputs the loss of a micro-batch has, by its number. many: how many go forward together."""
    torch.manual_seed(0)
    model = [Two(makes=makes and n == 1).double() for n in range(5)]
    pipe = pipeback.Pipeline(
        model, loss=None, optimizer=OPTIMIZERS["momentum"], method=CASES[case](5), vectorize=vectorize
    )
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(2, 6, generator=generator, dtype=torch.float64)  # noqa: E731
    after, count = [], 0
    for _ in range(6):
        xs, ys = zip(*[(draw(), draw()) for _ in range(many)], strict=True)

        def judge(n, outputs, ys=ys, count=count):
            sum(mse_loss(outputs[k], ys[n]) for k in uses(count + n)).backward()
            return tuple(y.grad for y in outputs)

        (outputs,) = pipe.forward_many(xs, expected=many, judge=judge)
        pipe.backward(judge(many - 1, outputs))
        pipe.step()
        count += many
        after.append(torch.cat([p.detach().flatten() for stage in pipe.split.parts for p in stage.module.parameters()]))
    pipe.close()
    return after


@pytest.mark.parametrize("case", ["pb", rare("cerebras"), "gpipe-4"])
@pytest.mark.parametrize(
    "uses", [lambda n: [0], lambda n: [0, 1], lambda n: [0, 1][: 1 + n % 2]], ids=["one", "both", "turns"]
)
def test_weights_that_have_an_effect_on_others_too(case, uses):
    """Every weight that has an effect on the second output has one on the first."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [trained(vectorize, case, False, uses, 4) for vectorize in (True, False)]
    same(*found)


@pytest.mark.parametrize("many", [1, 4])
def test_weights_that_have_none_are_told_of(many):
    """Momentum would go on to move them; the event loop leaves them as they are, and says nothing."""
    with pytest.warns(UserWarning, match=TOLD) as told:
        trained(True, "pb", True, lambda n: [0], many)
    assert len([w for w in told if "has an effect" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(False, "pb", True, lambda n: [0], many)
        trained(True, "pb", True, lambda n: [0, 1], many)


class Same(nn.Module):
    """Hands on one tensor as two."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = torch.tanh(self.linear(x[0] + 0.5 * x[1] if isinstance(x, tuple) else x))
        return x, x


@pytest.mark.parametrize("case", ["pb", rare("gpipe-4")])
def test_one_tensor_that_is_two_outputs(monkeypatch, case):
    monkeypatch.setattr(f"{__name__}.Two", lambda makes: Same())
    found = [trained(vectorize, case, False, lambda n: [0, 1], 4) for vectorize in (True, False)]
    same(*found)
