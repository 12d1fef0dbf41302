"""Law: a state may be saved after modes or numbers of modules were set, while micro-batches are in flight."""

import pytest
import torch
from torch import nn

import pipeback
from tests.helpers.choice import diagonal
from tests.laws.cases import data, everything, pipeline
from tests.pipeline.test_train_modes import Followed

STAGES, AT = 5, 9


class Branch(nn.Module):
    """Its forward itself decides by its mode."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 6), nn.Dropout(0.4)

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        return self.drop(h) + h * 2 if self.training else torch.sigmoid(h)


def built(form, seed, method="pb", **options):
    torch.manual_seed(seed)
    layers = [Branch() for _ in range(STAGES)]
    made = nn.Sequential(*layers) if form == "sequence" else Followed(layers)
    kind = {} if form == "sequence" else {"example": data(1)[0][0], "stages": "layer"}
    optimizer = options.pop("optimizer", "sgd")
    return layers, pipeline(made, method, optimizer, **kind, **options)


def others_of(made, layers, change):
    if change == "modes":
        made.eval()
    elif change == "one mode":
        layers[2].eval()
    elif change == "numbers":
        for layer in layers:
            layer.drop.p = 0.7
    else:
        raise AssertionError(change)


@pytest.mark.parametrize(
    ("options", "change", "after"),
    diagonal(
        [{}, {"workers": 2}, {"activations": "host"}, {"activations": "recompute"}, {"replicas": 2}],
        ["modes", "one mode", "numbers"],
        [0, 2],
    ),
    ids=str,
)
def test_a_state_of_both(options, change, after):
    law("sequence", change, after, **options)


@pytest.mark.parametrize("after", [0, 2], ids=["at once", "after a push"])
@pytest.mark.parametrize("change", ["modes", "numbers"])
def test_a_followed_model(change, after):
    law("followed", change, after)


@pytest.mark.parametrize("options", [{}, {"activations": "recompute"}], ids=str)
@pytest.mark.parametrize("method", ["pipedream", "cerebras", "one_f_one_b"])
def test_methods(method, options):
    law("sequence", "modes", 2, method=method, optimizer="momentum", **options)


def law(form, change, after, **options):
    """Loading must not ask in which mode the new modules are."""
    batches = data(20, samples=4)
    layers, pipe = built(form, 0, **options)
    for x, y in batches[:AT]:
        pipe.push(x, y)
    pipe.wait()
    others_of(pipe.model, layers, change)
    for x, y in batches[AT : AT + after]:
        pipe.push(x, y)
    state = pipe.state_dict()
    again = pipe.state_dict()
    assert state.keys() == again.keys()

    def end(layers, pipe):
        losses = [pipe.push(x, y).detach().clone() for x, y in batches[AT + after :]]
        pipe.drain()
        found = torch.stack(losses), everything(pipe)
        pipe.close()
        return found

    wanted = end(layers, pipe)
    for before in (False, True):
        fresh, other = built(form, 99, **options)
        if before:
            others_of(other.model, fresh, change)
        other.load_state_dict(state)
        if not before:
            others_of(other.model, fresh, change)
        once_more = other.state_dict()
        last, third = built(form, 98, **options)
        others_of(third.model, last, change)
        third.load_state_dict(once_more)
        for made, loaded in ((fresh, other), (last, third)):
            found = end(made, loaded)
            assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_the_modules_stay_as_they_are_set():
    batches = data(12, samples=4)
    layers, pipe = built("sequence", 0)
    for x, y in batches:
        pipe.push(x, y)
    others_of(pipe.model, layers, "modes")
    fresh, other = built("sequence", 99)
    fresh[1].eval()
    modes = [module.training for module in other.model.modules()]
    other.load_state_dict(pipe.state_dict())
    assert [module.training for module in other.model.modules()] == modes


def test_another_model_is_still_refused():
    """Its graph is another one, whatever its mode."""
    _, pipe = built("sequence", 0)
    for x, y in data(8, samples=4):
        pipe.push(x, y)
    state = pipe.state_dict()
    torch.manual_seed(0)

    class Plain(Branch):
        def forward(self, x):
            return torch.relu(self.layer(x))

    other = pipeback.Pipeline(
        nn.Sequential(*[Plain() for _ in range(STAGES)]),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        method="pb",
        micro_batch_size=1,
    )
    with pytest.raises(ValueError, match="different graph"):
        other.load_state_dict(state)
