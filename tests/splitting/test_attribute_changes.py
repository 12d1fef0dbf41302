"""What a forward sets in its modules, and what its calls run under: stages do the same, or are refused with a cure."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import pipeback
from tests.splitting.plain_training import Model, equals_plain_training, inputs, pipeline


class Holding(nn.Module):
    """A layer, and something that it does with itself."""

    def __init__(self, act):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), act
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, h):
        return self.act(self, self.layer(h))


def holding(act):
    model = Model(lambda own, h: own.inner(h))
    model.inner = Holding(act)
    return model


def keeps(own, h):
    own.last, own.width = h, h.shape[1]
    return h / own.width


def builds(own, h):
    if getattr(own, "table", None) is None or len(own.table) < len(h):
        own.table = torch.arange(len(h)) / 3
    return h + own.table[: len(h), None]


@pytest.mark.parametrize("act", [keeps, builds])
def test_what_is_set_before_it_is_read_need_not_be_set_again(act):
    batches = [*inputs(), *inputs(samples=7), *inputs(samples=3)]
    equals_plain_training(holding(act), batches)


def counts(own, h):
    own.calls = getattr(own, "calls", 0) + 1
    return h / own.calls


def averages(own, h):
    own.mean = 0.9 * own.mean + 0.1 * h.detach().mean(0)
    return h - own.mean


@pytest.mark.parametrize("act, name", [(counts, "calls"), (averages, "mean")])
def test_what_a_forward_takes_over_from_the_one_before_is_refused(act, name):
    with pytest.raises(ValueError, match=rf"Holding 'inner' changes self.{name} in its forward.*leaves=\['inner'\]"):
        pipeline(holding(act), inputs()[0])


def test_the_cure_of_a_buffer_that_is_set():
    equals_plain_training(holding(averages), inputs(), stages=pipeback.Splitting(leaves=["inner"]))


class Told(nn.Module):
    """Its blocks are told something by their attributes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Holding(lambda own, h: h * own.scale + own.mask) for _ in range(2))

    def forward(self, h):
        for block in self.blocks:
            block.scale, block.mask = 1 / len(h), h.detach().relu()
            h = block(h)
        return h


def test_attributes_that_are_set_from_outside_are_no_constants():
    equals_plain_training(Told(), [*inputs(), *inputs(samples=7)], stages="block")


# -- what calls run under ----------------------------------------------------------------------------------------


def test_autocast_within_a_forward():
    def between(own, h):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = own.c(torch.relu(own.c(h)))
            with torch.autocast("cpu", enabled=False):
                h = h.float() @ own.d.weight
            return (own.d(h) @ h.T @ h).float()

    model = Model(between)
    model.c, model.d = nn.Linear(4, 4), nn.Linear(4, 4)
    for stages in ("layer", 1):
        equals_plain_training(model, [x / 9 for x in inputs()], stages=stages)
    pipe = pipeline(model, inputs()[0])
    pipe.model.d.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivision|division by zero"):
        pipe.push(inputs()[0], inputs()[0])
    assert not torch.is_autocast_enabled("cpu")  # after an error, too


@pytest.mark.parametrize("store", [None, "host", "disk"])
def test_autocast_around_some_pushes(store, tmp_path):
    """It makes another form of a micro-batch, and tracing it leaves no casts of weights that a store brings later."""
    model = Model(lambda own, h: own.b(h.tanh()).tanh())
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    pipe = pipeline(model, inputs()[0], store=f"disk:{tmp_path}" if store == "disk" else store)
    for n, x in enumerate(inputs(6)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=n in (1, 2, 4)):
            found, loss = pipe.push(x, x), nn.functional.mse_loss(plain(x), x)
        assert torch.equal(found, loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_state_knows_the_forms_under_autocast():
    found = []
    for resumed in (False, True):
        pipe = pipeline(Model(lambda own, h: h.tanh()), inputs()[0], method="pb")
        losses = []
        for n, x in enumerate(inputs(6)):
            if n == 3 and resumed:
                state, pipe = pipe.state_dict(), pipeline(Model(lambda own, h: h.tanh()), inputs()[0], method="pb")
                assert [form["autocast"] for form in state["plain"]["forms"]] == [[], [["cpu", "bfloat16"]]]
                pipe.load_state_dict(state)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=n % 2 == 1):
                losses.append(pipe.push(x, x))
        found.append(losses)
    assert found[0] == found[1]


@pytest.mark.parametrize("stages", [1, 2, "layer"])
def test_layers_under_no_grad(stages):
    def between(own, h):
        with torch.no_grad():
            frozen = own.c(h)
        return frozen + h

    model = Model(between)
    model.c = nn.Linear(4, 4)
    equals_plain_training(model, inputs(), stages=stages)
    assert all(p.grad is None for p in model.c.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    model = Model(lambda own, h: h + checkpoint(own.c, h, use_reentrant=reentrant))
    model.c = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    equals_plain_training(model, inputs())


class Tied(nn.Module):
    """A head that computes with the weights of a module that it is given."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, h, other):
        return h @ other.weight.T + self.bias


def test_modules_that_are_given_modules():
    model = Model(lambda own, h: own.head(h, own.a))
    model.head = Tied()
    equals_plain_training(model, inputs())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)

    def forward(self, h, lengths):
        h = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.b(self.a(h)[0])[0], batch_first=True)[0]


def test_packed_sequences():
    equals_plain_training(Recurrent(), [(x[None].repeat(2, 1, 1), torch.tensor([5, 3])) for x in inputs()])


def test_one_layer_for_two_stages():
    class Heads(Model):
        def forward(self, h):
            first = self.a(h)
            return self.b(first) + self.b(torch.tanh(self.c(first)))

    model = Heads(None)
    model.c = nn.Linear(4, 4)
    assert equals_plain_training(model, inputs()).stages == 3
