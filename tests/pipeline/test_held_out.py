"""`evaluate` over batches: the means of a loader are those of a plain evaluation of the whole model."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import pipeback
from pipeback.pipeline.held_out import joined
from tests.laws import branching
from tests.laws.cases import CASES, OPTIMIZERS, network

X, Y = torch.randn(23, 6, dtype=torch.float64), torch.randint(0, 3, (23,))


def accuracy(output, y):
    return (output.argmax(1) == y).double().mean()


def model():
    torch.manual_seed(0)
    layers = nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)), nn.Linear(6, 6), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def trained(net, **options):
    given = {"loss": cross_entropy, "optimizer": OPTIMIZERS["momentum"], "method": "pb", **options}
    pipe = pipeback.Pipeline(net, **given)
    for n in range(3):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        pipe.push(x, torch.arange(8) % 3)
    return pipe


def batches():
    return list(zip(X.split(7), Y.split(7), strict=True))


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"store": "host"}, {"replicas": 2}], ids=str)
def test_a_loader_equals_the_whole_model_in_evaluation_mode(options):
    with trained(model(), **options) as pipe:
        loader = DataLoader(TensorDataset(X, Y), batch_size=7)  # the last batch has 2 samples
        found = pipe.evaluate(loader, metrics={"accuracy": accuracy})
        ways = [
            pipe.evaluate(loader),
            pipe.evaluate(batches()),
            pipe.evaluate(iter(batches())),
            pipe.evaluate(X, Y, batch_size=7),
            pipe.evaluate(loader, batch_size=4),
            pipe.evaluate(X, Y),
        ]
        output = pipe.evaluate(X, batch_size=7)
        with pipe.shown(), torch.no_grad():
            wanted = pipe.model.eval()(X)
    assert list(found) == ["loss", "accuracy"]
    assert all(loss.shape == () and loss.dtype == torch.float64 and not loss.requires_grad for loss in ways)
    assert all(abs(loss - cross_entropy(wanted, Y)) < 1e-14 for loss in [found["loss"], *ways])
    assert abs(found["accuracy"] - accuracy(wanted, Y)) < 1e-14
    assert (output - wanted).abs().max() < 1e-14 and output.shape == wanted.shape


def test_nothing_else_changes():
    one, other = trained(model()), trained(model())
    one.evaluate(X, Y, batch_size=5, metrics={"accuracy": accuracy})
    one.evaluate(X, batch_size=5)
    x, y = X[:8], Y[:8]
    for pipe in (one, other):
        pipe.push(x, y)
        pipe.drain()
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert all(m.training for m in one.model.modules())


def test_a_traced_model_with_a_dict_and_a_structured_output():
    pipe = branching.build(CASES["pb"](branching.STAGES))
    some = branching.batches(5, lengths=(6,))
    for x, y in some:
        pipe.push(x, y)
    x, y = {k: torch.cat([x[k] for x, _ in some]) for k in some[0][0]}, torch.cat([y for _, y in some])
    whole = pipe.evaluate(x)
    with pytest.raises(
        ValueError, match=r"shape \(36, 7\) in it.*cannot be concatenated; leave batch_size out"
    ):  # per token
        pipe.evaluate(x, batch_size=6)
    wanted = branching.loss(whole, y).double()
    with pytest.raises(ValueError, match="evaluate as many targets as samples, or use batch_size=None"):  # y, too
        pipe.evaluate(x, y, batch_size=6)
    for found in (pipe.evaluate(x, y), pipe.evaluate(some), pipe.evaluate((x, y) for x, y in some)):
        assert found.dtype == torch.float64
        assert abs(found - wanted) < 1e-6 * abs(wanted)


def test_outputs_of_any_structure_are_joined():
    found = joined([{"a": X[:4], "b": (Y[:4], 1)}, {"a": X[4:6], "b": (Y[4:6], 1)}], [4, 2])
    assert torch.equal(found["a"], X[:6]) and torch.equal(found["b"][0], Y[:6]) and found["b"][1] == 1
    with pytest.raises(ValueError, match="other values in it from batch to batch"):
        joined([{"a": X[:4], "n": 4}, {"a": X[4:6], "n": 2}], [4, 2])


def test_without_a_loss():
    pipe = pipeback.Pipeline(network(), loss=None, optimizer=OPTIMIZERS["momentum"], method="pb")
    x, y = torch.randn(5, 6), torch.randn(5, 6)
    with pytest.raises(ValueError, match=r'this pipeline has loss=None; give .* metrics=\{"loss": lambda output, y'):
        pipe.evaluate(x, y)
    found = pipe.evaluate(x, y, metrics={"loss": lambda output, y: mse_loss(output, y)})
    assert found.keys() == {"loss"} and abs(found["loss"] - mse_loss(pipe.evaluate(x), y)) < 1e-7


def test_what_is_refused_and_the_cures():
    pipe = trained(model())
    some, loss = batches(), pipe.evaluate(X, Y)
    for wrong, kind, says, cured in (
        (lambda: pipe.evaluate(some, Y), TypeError, "which have their own; leave y out", lambda: pipe.evaluate(some)),
        (
            lambda: pipe.evaluate(TensorDataset(X, Y)), TypeError, r"DataLoader\(dataset, batch_size=256\)",
            lambda: pipe.evaluate(DataLoader(TensorDataset(X, Y), batch_size=256)),
        ),
        (
            lambda: pipe.evaluate({"x": x, "labels": y} for x, y in some), TypeError,
            r'pairs: pipe.evaluate\(\(b, b\["labels"\]\) for b in loader\)',
            lambda: pipe.evaluate((b["x"], b["labels"]) for b in ({"x": x, "labels": y} for x, y in some)),
        ),
        (
            lambda: pipe.evaluate((x, x, y) for x, y in some), TypeError,
            r"got 3 parts; .*\(\(\(x0, x1\), y\) for x0, x1, y in loader\)", lambda: pipe.evaluate(some),
        ),
        (lambda: pipe.evaluate(x for x, _ in some), TypeError, r"got a Tensor; .*\(\(x, None\) for x in", lambda: loss),
        (lambda: pipe.evaluate(iter([])), ValueError, "got no batches", lambda: pipe.evaluate(iter(some))),
        (lambda: pipe.evaluate(X, Y, batch_size=0), ValueError, "at least 1", lambda: pipe.evaluate(X, Y)),
        (
            lambda: pipe.evaluate(X, Y[:5], batch_size=4), ValueError,
            r"but have \[23, 5\]; evaluate as many targets as samples, or use batch_size=None", lambda: loss,
        ),
        (lambda: pipe.evaluate(some, metrics=accuracy), TypeError, 'metrics={"accuracy": lambda', lambda: loss),
        (lambda: pipe.evaluate(some, metrics={"loss": accuracy}), ValueError, "rename it", lambda: loss),
        (
            lambda: pipe.evaluate(some, metrics={"hits": lambda o, y: o.argmax(1) == y}), ValueError,
            r"hits must be one number.*shape \(7,\); .* \.float\(\)\.mean\(\)",
            lambda: pipe.evaluate(some, metrics={"h": lambda o, y: (o.argmax(1) == y).float().mean()})["loss"],
        ),
    ):  # fmt: skip
        with pytest.raises(kind, match=says):
            wrong()
        assert abs(cured() - loss) < 1e-14


def test_an_output_that_has_no_samples():
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    pipe = trained(nn.Sequential(*model(), Mean()), loss=lambda output, y: output)
    with pytest.raises(ValueError, match=r"a tensor of shape \(\) in it, .* leave batch_size out"):
        pipe.evaluate(X, batch_size=7)
    assert pipe.evaluate(X).shape == ()
