"""torch.cond and torch.while_loop: a forward that calls one of them is told to keep the module whole, and the cure
trains as a loop does.
"""

import copy
import threading

import pytest
import torch
from torch import cond, nn

import pipeback
from pipeback.splitting.control_flow import as_written
from tests.helpers.choice import rare
from tests.splitting.plain_training import Model, equals_plain_training, inputs, pipeline


class Gate(nn.Module):
    """One of two layers, by a value that the layer before computes."""

    def __init__(self):
        super().__init__()
        self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, h):
        return torch.cond(h.sum() > 0, lambda h: self.yes(h).tanh(), lambda h: self.no(h).sin(), (h,))


class Named(Gate):
    """The same, by a name that its file has imported."""

    def forward(self, h):
        return cond(h.sum() > 0, lambda h: self.yes(h).tanh(), lambda h: self.no(h).sin(), (h,))


class Gated(nn.Module):
    def __init__(self, gate=Gate):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.gate, self.b = nn.Linear(4, 4), gate(), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.gate(self.a(x)))


def between(self, h):
    return torch.cond(h.sum() > 0, lambda h: self.yes(h), torch.cos, (h,))


def own():
    model = Model(between)
    model.yes = nn.Linear(4, 4)
    return model


BATCHES = [x.add(shift) for x, shift in zip(inputs(6), [0.0, -2.0, 2.0, -3.0, 3.0, 0.0], strict=True)]


def taken(model):
    """How often each branch is taken."""
    return {bool(model.a(x).sum() > 0) for x in BATCHES}


@pytest.mark.parametrize("gate", [Gate, rare(Named)])
def test_the_module_that_calls_it_is_named_and_can_be_kept_whole(gate):
    assert taken(Gated(gate)) == {True, False}
    with pytest.raises(ValueError, match="'gate'.forward calls torch.cond, which cannot be traced; keep it whole") as e:
        pipeline(Gated(gate), BATCHES[0])
    assert "stages=pipeback.Splitting(leaves=['gate'])" in str(e.value)
    pipe = equals_plain_training(Gated(gate), BATCHES, stages=pipeback.Splitting("layer", leaves=["gate"]))
    assert pipe.stages == 3


def test_a_model_that_calls_it_itself_can_be_one_stage():
    with pytest.raises(
        ValueError, match=r"Model.forward calls torch.cond, .*stages=pipeback.Splitting\(leaves=\[''\]\)"
    ):
        pipeline(own(), BATCHES[0])
    equals_plain_training(own(), BATCHES, stages=pipeback.Splitting(leaves=[""]))


@pytest.mark.parametrize("method", ["pb", rare("cerebras")])
def test_delayed_methods_train_a_module_that_calls_it(method):
    momentum = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    model = Gated()
    for made in (model, nn.Sequential(copy.deepcopy(model.a), copy.deepcopy(model.gate), copy.deepcopy(model.b))):
        before = copy.deepcopy(made)
        options = {} if isinstance(made, nn.Sequential) else {"stages": pipeback.Splitting("layer", leaves=["gate"])}
        pipe = pipeback.Pipeline(
            made, loss=nn.functional.mse_loss, optimizer=momentum, method=method, example=BATCHES[0], **options
        )
        losses = [pipe.push(x, torch.zeros(5, 4)) for x in BATCHES]
        pipe.drain()
        assert all(loss.isfinite() for loss in losses)
        assert not any(map(torch.equal, made.parameters(), before.parameters()))


def test_runtimes_agree():
    found = []
    for workers in (None, 2):
        model = Gated()
        splitting = pipeback.Splitting("layer", leaves=["gate"])
        pipe = pipeline(model, BATCHES[0], method="pb", workers=workers, stages=splitting)
        found.append([pipe.push(x, torch.zeros(5, 4)).item() for x in BATCHES])
        pipe.drain()
        pipe.close()
        found[-1] += [p.detach().clone() for p in model.parameters()]
    assert found[0][:6] == found[1][:6] and all(map(torch.equal, found[0][6:], found[1][6:]))


class Small(Gate):
    """Branches for small batches only."""

    def forward(self, h):
        return super().forward(h) if len(h) < 4 else self.no(h)


@pytest.mark.parametrize(
    ("gate", "sizes", "options"),
    [
        (Gate, (5, 5, 5, 3), {}),
        (Gate, (5, 5, 5, 5), {"store": "host"}),
        (Small, (5, 5, 3, 3), {}),
        rare(Gate, (5, 5, 5, 3), {"workers": 2, "store": "host"}),
        rare(Small, (5, 5, 3, 3), {"activations": "recompute"}),
    ],
)
def test_weights_that_share_memory(gate, sizes, options):
    """torch.cond refuses to compile branches of such weights, which other shapes ask it to do once more."""
    batches = [x[:size] for x, size in zip(BATCHES, sizes, strict=False)]
    model = Gated(gate)
    plain, splitting = copy.deepcopy(model), pipeback.Splitting("layer", leaves=["gate"])
    torch._dynamo.reset()
    pipe = pipeline(model, batches[0], stages=splitting, **options)
    losses = [pipe.push(x, torch.zeros(len(x), 4)) for x in batches]
    held_out = pipe.evaluate(BATCHES[4][:4], torch.zeros(4, 4))
    with pipe.present(1):
        assert len({weight.untyped_storage().data_ptr() for weight in model.gate.parameters()}) == 1
    pipe.close()
    torch._dynamo.reset()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, found in zip(batches, losses, strict=True):
        loss = nn.functional.mse_loss(plain(x), torch.zeros(len(x), 4))
        assert torch.equal(found, loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = nn.functional.mse_loss(plain(BATCHES[4][:4]), torch.zeros(4, 4))
    assert torch.equal(torch.as_tensor(held_out), wanted)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("activations", ["device", "recompute"])
def test_what_is_in_flight_goes_on_from_a_state(activations):
    made = lambda model: pipeline(  # noqa: E731
        model, BATCHES[0], method="pb", stages=pipeback.Splitting("layer", leaves=["gate"]), store="host",
        activations=activations,
    )  # fmt: skip
    torch._dynamo.reset()
    pipe = made(Gated())
    for x in BATCHES:
        pipe.push(x, torch.zeros(5, 4))
    other = made(Gated())
    other.load_state_dict(pipe.state_dict())
    found = []
    for each in (pipe, other):
        each.drain()
        found.append([p.detach().clone() for p in each.model.parameters()])
        each.close()
    assert all(map(torch.equal, *found))


class Thrice(nn.Module):
    """One layer, again and again."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, h):
        return torch.while_loop(lambda n, h: n < 3, lambda n, h: (n + 1, self.layer(h).tanh()), (torch.tensor(0), h))[1]


class InPython(Thrice):
    def forward(self, h):
        for _ in range(3):
            h = self.layer(h).tanh()
        return h


@pytest.mark.parametrize("options", [{}, {"store": "host"}, rare({"workers": 2, "method": "pb"})], ids=str)
def test_while_loop(options):
    with pytest.raises(ValueError, match="'gate'.forward calls torch.while_loop, .*keep it whole.*leaves=") as e:
        pipeline(Gated(Thrice), BATCHES[0])
    assert "stages=pipeback.Splitting(leaves=['gate'])" in str(e.value)
    options = {"stages": pipeback.Splitting("layer", leaves=["gate"]), **options}
    if "method" not in options:
        equals_plain_training(Gated(Thrice), BATCHES, plain=Gated(InPython), **options)
        return
    found = []
    for gate in (Thrice, InPython):
        pipe = pipeline(Gated(gate), BATCHES[0], **options)
        found.append([pipe.push(x, torch.zeros(5, 4)).item() for x in BATCHES])
        pipe.close()
    assert found[0] == found[1]


def test_the_gradients_of_a_loop():
    """They are the numerical ones, by weights that its body reads, too."""
    loop, x = Thrice().double(), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def run(x, *weights):
        with as_written():
            return torch.func.functional_call(loop, dict(zip(("layer.weight", "layer.bias"), weights, strict=True)), x)

    assert torch.autograd.gradcheck(run, (x, *loop.parameters()))


def test_only_the_thread_that_asks_runs_a_branch_at_once():
    original, code, seen = torch.cond, torch.cond.__code__, []

    def other():
        seen.append(torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(2),)))

    with as_written():
        here = torch.cond(torch.tensor(False), torch.sin, torch.cos, (torch.ones(2),))
        with as_written(lambda name: KeyError(name)), pytest.raises(KeyError):
            torch.cond(torch.tensor(False), torch.sin, torch.cos, (torch.ones(2),))
        assert torch.cond is original and torch.cond.__code__ is not code
        with pytest.raises(RuntimeError):
            torch.cond(torch.tensor([True, False]), torch.sin, torch.cos, (torch.ones(2),))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert torch.cond is original and torch.cond.__code__ is code
    assert torch.while_loop.__code__.co_name == "while_loop"
    assert torch.equal(here, torch.ones(2).cos()) and torch.equal(seen[0], torch.ones(2).sin())
