"""What a user changes between pushes counts as in a plain loop, for every replica, or is refused by name."""

import copy

import pytest
import torch
from torch import nn

from tests.helpers.choice import mostly_rare
from tests.laws.cases import data, network, pipeline, weights


class Scaled(nn.Module):
    """Linear, batch statistics, and a number to scale by."""

    def __init__(self, by):
        super().__init__()
        self.linear, self.norm, self.by = nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False), by

    def forward(self, x):
        return self.norm(self.linear(x)).tanh() * self.by


def scaled():
    torch.manual_seed(0)
    return nn.Sequential(*[Scaled(1.0) for _ in range(4)])


def write(model):
    with torch.no_grad():
        model[1][0].weight.mul_(0.5)
        model[3][0].bias.add_(0.1)


def load(model):
    model.load_state_dict(network(4, seed=3).state_dict())


def freeze(model):
    model[1][0].weight.requires_grad_(False)


def rescale(model):
    model[0].by, model[2].by = 0.5, 2.0


def evaluate(model):
    model.eval()


CHANGES = [(network, write), (network, load), (network, freeze), (scaled, rescale), (scaled, evaluate)]
METHODS = ["sgd", "pb", "cerebras"]


@pytest.mark.parametrize(
    ("made", "change", "method", "when"),
    mostly_rare(
        [(*each, method, when) for each in CHANGES for method in METHODS for when in (0, 6)],
        *((*each, METHODS[n % 3], 6) for n, each in enumerate(CHANGES)), *((*each, "pb", 0) for each in CHANGES),
    ),
)  # fmt: skip
def test_replicas_follow_the_users_model(made, change, method, when):
    """Two halves that are the same batch: what one pipeline does of it."""
    found = []
    for replicas in (None, 2):
        model = (made(4) if made is network else made()).double()
        pipe = pipeline(model, method, replicas=replicas)
        for n, (x, y) in enumerate(data(12, dtype=torch.float64)):
            if n == when:
                pipe.wait()
                change(model)
            pipe.push(*((x, y) if replicas is None else (torch.cat([x, x]), torch.cat([y, y]))))
        pipe.drain()
        found.append(weights(pipe))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("call", ["wait", "drain", "state_dict", "evaluate"])
@pytest.mark.parametrize("change", [write, load])
def test_replicas_follow_whatever_is_called_before_the_next_push(change, call):
    """What a call takes over of the user's writing is not lost for the further replicas."""
    found = []
    batches = data(12, dtype=torch.float64)
    for replicas in (None, 2):
        pipe = pipeline(network(4).double(), "cerebras", replicas=replicas)
        for n, (x, y) in enumerate(batches):
            if n == 6:
                pipe.wait()
                change(pipe.model)
                getattr(pipe, call)(*(batches[0] if call == "evaluate" else ()))
            pipe.push(*((x, y) if replicas is None else (torch.cat([x, x]), torch.cat([y, y]))))
        pipe.drain()
        found.append(weights(pipe))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def clear(pipe, before):
    for optimizer in pipe.optimizers:
        optimizer.state.clear()


def clear_one(pipe, before):
    pipe.optimizers[1].state.clear()


def halve(pipe, before):
    for optimizer in pipe.optimizers:
        for entry in optimizer.state.values():
            entry.get("momentum_buffer", entry.get("exp_avg")).mul_(0.5)


def go_back(pipe, before):
    for optimizer, state in zip(pipe.optimizers, before, strict=True):
        optimizer.load_state_dict(state)


OF_OPTIMIZERS = [
    (change, *each, saved)
    for saved in (False, True)
    for change in (clear, clear_one, halve, go_back)
    for each in (
        ("cerebras", "momentum", {}), ("cerebras", "momentum", {"vectorize": True}), ("pb", "adamw", {"workers": 2}),
        ("pb", "adamw", {"vectorize": True}), ("gpipe", "momentum", {}),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "method", "optimizer", "options", "saved"), mostly_rare(OF_OPTIMIZERS, *OF_OPTIMIZERS[::3])
)
def test_replicas_follow_the_state_of_the_users_optimizers(change, method, optimizer, options, saved):
    """What a user does to an optimizer's state means every replica, and a state that is saved then can be loaded."""
    found = []
    for replicas in (None, 2):
        pipe = pipeline(network(4).double(), method, optimizer, replicas=replicas, **options)
        for n, (x, y) in enumerate(data(12, dtype=torch.float64)):
            if n == 3:
                pipe.wait()
                before = copy.deepcopy([optimizer.state_dict() for optimizer in pipe.optimizers])
            if n == 7:
                pipe.wait()
                change(pipe, before)
                if saved:
                    pipe.load_state_dict(pipe.state_dict())
            pipe.push(*((x, y) if replicas is None else (torch.cat([x, x]), torch.cat([y, y]))))
        pipe.drain()
        found.append(weights(pipe))
        held = [[w for stage in stages for w in stage.weights] for stages in pipe._engine.holding.everywhere]
        for others in held[1:]:
            assert all(map(torch.equal, held[0], others))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_statistics_stay_each_replicas_own_and_a_state_is_exact():
    x, y = (torch.cat(part) for part in zip(*data(2), strict=True))
    found = []
    for resumed in (False, True):
        pipe = pipeline(scaled(), "pb", replicas=2)
        for _ in range(4):
            pipe.push(x, y)
        if resumed:
            state = pipe.state_dict()
            pipe = pipeline(scaled(), "pb", replicas=2)
            pipe.load_state_dict(state)
        pipe.wait()
        first, second = (stages[1].module.norm.running_mean for stages in pipe._engine.holding.everywhere)
        assert not torch.equal(first, second)
        for _ in range(4):
            pipe.push(x, y)
        found.append(pipe.state_dict()["stages"])
    for some, others in zip(*found, strict=True):
        # the graphs of what is in flight refer to running statistics, which go on; B does not read them
        assert all(torch.equal(value, others[name]) for name, value in some.items() if "/saved/" not in name)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"activations": "recompute"}, {"masters": True}], ids=str)
def test_a_weight_that_is_frozen_in_between(options):
    """And trained again later: the bits of the plain loop."""
    model = network(4)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    pipe = pipeline(model, "sgd", **options)
    for n, (x, y) in enumerate(data(9)):
        if n in (3, 6):
            pipe.wait()
            for some in (model, plain):
                some[1][0].weight.requires_grad_(n == 6)
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
        pipe.push(x, y)
    pipe.drain()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"vectorize": True}, {"store": "host"}], ids=str)
def test_a_weight_that_is_to_be_trained_later(options):
    model = network(5)
    for stage in model:
        stage[0].bias.requires_grad_(False)
    pipe = pipeline(model, "pb", **options)
    for x, y in data(4):
        pipe.push(x, y)
    pipe.wait()
    model[2][0].bias.requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"stage 2 \(2\): 0.bias was frozen when the pipeline was built.*build a new"
    ):
        pipe.push(*data(1)[0])
    pipe = pipeline(model, "pb", **({} if options.get("vectorize") else options))  # the cure
    before = model[2][0].bias.clone()
    for x, y in data(4):
        pipe.push(x, y)
    pipe.drain()
    assert not torch.equal(pipe.model[2][0].bias, before)


@pytest.mark.parametrize("method", ["pb", "pipedream"])
def test_a_weight_that_cannot_be_frozen_in_between(method):
    model, options = network(5), {"store": "host"}
    pipe = pipeline(model, method, **options)
    for x, y in data(4):
        pipe.push(x, y)
    pipe.wait()
    model[2][0].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"stage 2 \(2\) lives in a store, where 0.bias cannot be frozen in between"):
        pipe.push(*data(1)[0])
    for stage in model:
        stage[0].bias.requires_grad_(False)
    pipe = pipeline(model, method, **options)  # the cure
    for x, y in data(4):
        pipe.push(x, y)
    pipe.drain()


class Limited(nn.Module):
    """A limit that small numbers do not reach."""

    def __init__(self, limit):
        super().__init__()
        self.linear, self.limit, self.function = nn.Linear(6, 6), limit, torch.tanh

    def forward(self, x):
        return self.function(self.linear(x).clamp(-self.limit, self.limit))


@pytest.mark.parametrize("limits", [(10.0, 20.0), (10, 20)])
def test_limits_that_differ_are_no_reason_to_run_as_one(limits):
    model = nn.Sequential(*[Limited(limits[s % 2]) for s in range(6)])
    for stage in model:
        stage.function = torch.relu
    pipe = pipeline(model, "pb", vectorize=True)
    pipe.push(*data(1)[0])
    assert all(told.startswith("as a graph") for told in pipe.vectorized.values()) and len(pipe.vectorized) == 5


def _function(stage):
    stage.function = torch.relu


def _limit(stage):
    stage.limit = 3


def _forward(stage):
    stage.forward = lambda x: stage.linear(x) / 2


@pytest.mark.parametrize("which", [slice(None), slice(2, 3)], ids=["all stages", "one"])
@pytest.mark.parametrize("change", [_function, _limit, _forward])
def test_stages_that_run_as_one_see_what_their_modules_hold(change, which):
    found = []
    for vectorize in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[Limited(2) for _ in range(6)]).double()
        pipe, losses = pipeline(model, "pb", vectorize=vectorize), []
        for n, (x, y) in enumerate(data(20, dtype=torch.float64)):
            if n == 5:
                pipe.wait()
                for stage in model[which]:
                    change(stage)
            losses.append(pipe.push(9 * x, y))
        found.append([float(loss) for loss in losses])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("store", ["host", "disk"])
def test_replicas_in_a_store(store, tmp_path):
    found = []
    for home in (None, store if store == "host" else f"disk:{tmp_path}"):
        pipe = pipeline(network(4), "pb", replicas=2, store=home)
        for x, y in data(8, 4):
            pipe.push(x, y)
        pipe.drain()
        found.append(weights(pipe))
    assert torch.equal(*found)
