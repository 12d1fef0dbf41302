"""What modules are set to between pushes: a stage that begins to draw has a stream of its own from then on."""

import pytest
import torch
from torch import nn

from pipeback.stages.module_settings import Settings
from tests.laws.cases import data, everything, pipeline, weights


class Followed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def sequence():
    return nn.Sequential(*Followed().layers)


def dropouts(model, p):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"vectorize": "auto"}], ids=str)
def test_a_stage_that_begins_to_draw(options, monkeypatch):
    """The caller's random state stays, every runtime draws alike, and a state has the streams."""
    monkeypatch.setattr("pipeback.vectorized.stacks.whole_cost.gain", lambda stack, under, whole: 100.0)
    found = []
    for some in ({}, options):
        model = sequence()
        dropouts(model, 0)
        pipe = pipeline(model, "pb", **some)
        for x, y in data(5):
            pipe.push(x, y)
        pipe.wait()
        dropouts(model, 0.3)
        torch.manual_seed(len(found))  # nobody draws from it
        before = torch.get_rng_state()
        for x, y in data(7):
            pipe.push(x, y)
        state = pipe.state_dict()
        for x, y in data(3, seed=9):
            pipe.push(x, y)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(weights(pipe))
        again = pipeline(sequence(), "pb", **some)
        again.load_state_dict(state)
        for x, y in data(3, seed=9):
            again.push(x, y)
        assert torch.equal(everything(again), everything(pipe))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert options.get("vectorize") or torch.equal(*found)


@pytest.mark.parametrize("followed", [False, True])
def test_a_model_that_begins_to_train(followed):
    """Modules of a followed model are the user's, and its segments are not."""
    model = Followed() if followed else sequence()
    options = {"example": data(1)[0][0], "stages": "layer"} if followed else {}
    pipe = pipeline(model, "pb", **options)
    model.eval()
    for x, y in data(3):
        pipe.push(x, y)
    model.train()
    before = torch.get_rng_state()
    for x, y in data(3):
        pipe.push(x, y)
    pipe.wait()
    assert torch.equal(torch.get_rng_state(), before)
    assert all("random" in tensors for tensors in pipe.state_dict()["stages"])


def test_stages_that_run_as_one_compute_with_other_numbers():
    """In flight are micro-batches of both."""
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(0.1)) for _ in range(5)]).double()
        pipe = pipeline(model, "pb", vectorize=on, micro_batch_size=3)
        some = data(40, dtype=torch.float64)
        for n in range(4):
            pipe.wait()
            for layer in model:
                layer[1].negative_slope = 0.1 + n / 5
            pipe.push(*(torch.cat([pair[k] for pair in some[10 * n : 10 * n + 10]]) for k in (0, 1)))
        found.append(weights(pipe))
    assert pipe.vectorized["stages 0 … 3"].startswith("as one")
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_a_model_that_is_evaluated_and_then_trains_in_evaluation_mode():
    """What needs a gradient does not go by who came first with this form."""
    found = []
    for before in (False, True):
        model, (x, y) = Followed(), data(1)[0]
        pipe = pipeline(model, "sgd", example=x, stages="layer")
        if before:
            pipe.evaluate(x)
        model.eval()
        pipe.push(x, y)
        found.append(weights(pipe))
    assert torch.equal(*found)


def test_a_push_looks_at_the_settings_of_all_stages_in_one_pass(monkeypatch):
    looks, changed = [], Settings.changed
    for stages in (3, 12):
        pipe = pipeline(nn.Sequential(*(nn.Linear(6, 6) for _ in range(stages))).double(), "pb")
        pairs, seen = data(30, dtype=torch.float64), []
        for pair in pairs[:-1]:
            pipe.push(*pair)
        with monkeypatch.context() as patch:
            patch.setattr(Settings, "changed", lambda settings, seen=seen: seen.append(0) or changed(settings))
            pipe.push(*pairs[-1])
        looks.append(len(seen))
    assert looks[0] == looks[1]


class Scaled(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.scale * self.linear(x))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"workers": 2}, {"replicas": 2}, {"activations": "recompute", "method": "pipedream"},
        {"vectorize": True}, {"vectorize": True, "method": "gpipe"},
    ],
    ids=str,
)  # fmt: skip
def test_a_number_of_the_class_that_an_instance_hides(options):
    """What was traced, or copied to a replica, has the number of the class."""
    options = {"method": "pb", **options}
    found = []
    for how in ({}, options):
        layers = [Scaled() for _ in range(4)]
        how = {**how, "replicas": options.get("replicas")}
        method = options["method"]
        pipe = pipeline(layers, method, **{k: v for k, v in how.items() if k != "method"})
        for n, (x, y) in enumerate(data(16, samples=2)):
            if n == 8:
                pipe.wait()
                for layer in layers:
                    layer.scale = 2.0
            pipe.push(x, y)
        pipe.drain()
        found.append(weights(pipe))
        settings = Settings(pipe.model.modules())
        assert not settings.changed()
        layers[0].other = 3.0
        assert settings.changed()
        settings.put()
        assert not settings.changed() and not hasattr(layers[0], "other") and layers[0].scale == 2.0
        pipe.close()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
