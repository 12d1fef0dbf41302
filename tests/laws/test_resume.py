"""Law: save at any micro-batch, in flight, load in a new process, and train on: the same bits."""

from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from pipeback.tensors import copies
from tests.helpers.choice import mostly_rare, rare
from tests.helpers.processes import in_a_new_process
from tests.laws.cases import CASES, EACH, OPTIMIZERS, STAGES, allowed, data, everything, network, pipeline, sequences


def resumed(path, threads):
    """In a new process: load every state, train on, and compare."""
    torch.set_num_threads(threads)
    rows = []
    for line in torch.load(path, weights_only=True):
        label, optimizer, layer = line["label"], line["optimizer"], line["layer"]
        if layer is None:
            pipe = pipeline(network(seed=99), CASES[label](STAGES), optimizer, workers=line["workers"])
            batches = data(24)
        else:
            pipe, batches = layered(layer, label, seed=99, activations=line["activations"])
        pipe.load_state_dict(line["state"])
        for x, y in batches[line["at"] :]:
            pipe.push(x, y)
        same = torch.equal(everything(pipe), line["wanted"])
        pipe.drain()
        rows.append((same and torch.equal(everything(pipe), line["wanted_drained"]), label, layer, line["at"]))
    return rows


def all_resume(lines, tmp_path):
    torch.save(lines, tmp_path / "states.pt")
    rows = in_a_new_process(resumed, tmp_path / "states.pt", torch.get_num_threads(), seconds=3600)
    assert len(rows) == len(lines)
    assert [row for row in rows if not row[0]] == []


def record(pipe, batches, at, label, optimizer=None, workers=None, layer=None, activations="device"):
    for x, y in batches[:at]:
        pipe.push(x, y)
    state = pipe.state_dict()
    for x, y in batches[at:]:
        pipe.push(x, y)
    wanted = everything(pipe)
    pipe.drain()
    return {
        "label": label, "optimizer": optimizer, "at": at, "workers": workers, "layer": layer,
        "activations": activations,
        "state": state, "wanted": wanted, "wanted_drained": everything(pipe),
    }  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("every", [False, True])
def test_every_method_in_a_new_process(every, tmp_path):
    """Each in a variant with an optimizer, or in every variant with two."""
    lines = []
    for n, case in enumerate(CASES if every else EACH):
        for optimizer in ("momentum", "adam"):
            first = "adam" if (n % 2 and allowed(case, "adam")) or not allowed(case, "momentum") else "momentum"
            if allowed(case, optimizer) and (every or optimizer == first):
                at = 9 + n % 9
                pipe = pipeline(network(), CASES[case](STAGES), optimizer)
                lines.append(record(pipe, data(24), at, case, optimizer, workers=2 if n % 4 == 0 else None))
    all_resume(lines, tmp_path)


class Attention(nn.Module):
    """nn.TransformerEncoderLayer as a stage."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    def forward(self, x):
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class Skip(nn.Module):
    """Carries a tuple across the boundary."""

    def __init__(self, opens):
        super().__init__()
        self.linear, self.opens = nn.Linear(8, 8), opens

    def forward(self, x):
        if self.opens:
            return torch.relu(self.linear(x)), x
        return self.linear(x[0]) + x[1]


LAYERS = {
    "linear": lambda: [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())],
    "layer norm": lambda: [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())],
    "dropout": lambda: [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4))],
    "conv": lambda: [nn.Conv1d(5, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.ReLU(inplace=True)],
    "batch norm": lambda: [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5))],
    "attention": lambda: [Attention()],
    "lstm": lambda: [Recurrent()],
    "embedding": lambda: [nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8))],
    "tuples": lambda: [Skip(True), Skip(False)],
}


def layered(layer, method, seed=0, **options):
    torch.manual_seed(seed)
    middle = LAYERS[layer]() + LAYERS[layer]() if layer != "embedding" else LAYERS[layer]()
    pipe = pipeback.Pipeline(
        nn.Sequential(*middle, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
        loss=lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten()),
        optimizer=OPTIMIZERS["momentum"], method=method, **options,
    )  # fmt: skip
    return pipe, sequences((4, 5), indices=layer == "embedding")


@pytest.mark.filterwarnings("ignore:.*takes its statistics", "ignore:.*enable_nested_tensor")
@pytest.mark.parametrize("every", [False, rare(True)])
def test_every_kind_of_activations_in_a_new_process(every, tmp_path):
    """With every layer, on the device too; methods in turn."""
    lines = []
    for n, layer in enumerate(LAYERS):
        for m, kind in enumerate(("device", "host", "recompute")):
            for method in ("pb", "pipedream") if every else (("pb", "pipedream")[(n + m) % 2],):
                pipe, batches = layered(layer, method, activations=kind)
                lines.append(record(pipe, batches, 10 + n % 5, method, layer=layer, activations=kind))
    all_resume(lines, tmp_path)


def taken_up(state, kind, layer, method, batches):
    """All that comes of a state: drained at once, and after some more."""
    found = []
    for more in ([], batches):
        pipe, _ = layered(layer, method, seed=99, activations=kind)
        pipe.load_state_dict(state)
        for x, y in more:
            pipe.push(x, y)
        pipe.drain()
        found.append(everything(pipe))
    return found


@pytest.mark.filterwarnings("ignore:.*takes its statistics", "ignore:.*enable_nested_tensor")
@pytest.mark.parametrize(("layer", "method"), mostly_rare(
    product(["dropout", "batch norm", "attention", "lstm", "tuples"], ["pb", "pipedream", "gpipe-4"]),
    ("dropout", "pb"), ("batch norm", "pipedream"), ("attention", "pb"), ("lstm", "pipedream"), ("tuples", "gpipe-4"),
))  # fmt: skip
def test_what_is_in_flight_goes_on_as_it_began(layer, method):
    """A state saved under one kind of activations, taken up under another."""
    method = CASES[method](STAGES)
    states = {}
    for kind in ("device", "host", "recompute"):
        pipe, batches = layered(layer, method, activations=kind)
        for x, y in batches[:11]:
            pipe.push(x, y)
        states[kind] = pipe.state_dict()
    batches = batches[11:18]
    wanted = {kind: taken_up(state, kind, layer, method, batches) for kind, state in states.items()}
    same = method.copies == "stash" or not any(pipe.delays)  # B on F's weights: there is no difference at all
    for saved, state in states.items():
        for kind in states:
            if kind != saved:
                drained, more = taken_up(state, kind, layer, method, batches)
                assert torch.equal(drained, wanted[saved][0])
                if same or "recompute" not in (kind, saved):
                    assert torch.equal(more, wanted[saved][1])
                    assert torch.equal(more, wanted["device"][1])


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_every_moment(case, tmp_path):
    all_resume([record(pipeline(network(), CASES[case](STAGES)), data(24), at, case) for at in range(1, 24)], tmp_path)


def test_saving_changes_nothing_and_later_pushes_do_not_change_the_state():
    batches = data(20)
    silent, saving = (pipeline(network(), "cerebras") for _ in range(2))
    for x, y in batches[:12]:
        silent.push(x, y)
        saving.push(x, y)
        state = saving.state_dict()
    copy = {k: v.clone() for k, v in state["stages"][0].items()}
    for x, y in batches[12:]:
        silent.push(x, y)
        saving.push(x, y)
    assert torch.equal(everything(silent), everything(saving))
    assert all(torch.equal(state["stages"][0][k], v) for k, v in copy.items())


def test_rates_remembered_in_flight_are_saved():
    """U(i) uses the rate of the moment when i was pushed, also when a state was saved in between."""
    batches = data(20)

    def train(pipe, begin, end):
        for i in range(begin, end):
            for opt in pipe.optimizers:
                opt.param_groups[0]["lr"] = 0.05 / (1 + i)
            pipe.push(*batches[i])

    whole = pipeline(network(), "cerebras")
    train(whole, 0, 20)
    half, other = pipeline(network(), "cerebras"), pipeline(network(seed=5), "cerebras")
    train(half, 0, 11)
    other.load_state_dict(half.state_dict())
    assert other.optimizers[0].param_groups[0]["lr"] == 0.05 / 11
    train(other, 11, 20)
    assert torch.equal(everything(whole), everything(other))


@pytest.mark.parametrize("case", ["pb", "pipedream", "gpipe-4", "one_f_one_b-3", "zb_h1-4"])
def test_slices_of_a_batch_in_flight(case):
    """A slice seldom begins where an allocation does, and kernels round otherwise at other places."""
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(15, 6, generator=generator), torch.randn(15, 6, generator=generator)) for _ in range(4)]
    whole, first, second = (pipeline(network(), CASES[case](STAGES), micro_batch_size=3) for _ in range(3))
    for x, y in batches:
        whole.push(x, y)
    for x, y in batches[:2]:
        first.push(x, y)
    second.load_state_dict(first.state_dict())
    for x, y in batches[2:]:
        second.push(x, y)
    assert torch.equal(everything(whole), everything(second))


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t[3:5], lambda t: t[:, 1], lambda t: t.t(), lambda t: t[2].expand(4, 9), lambda t: t[0, 0],
        lambda t: t[:0], lambda t: t[1:, 2:5],
    ],
)  # fmt: skip
def test_replicas_lie_where_the_original_does(make):
    original = make(torch.randn(9, 9))
    copy = copies.replica(original)
    assert torch.equal(original, copy) and original.stride() == copy.stride()
    assert original.data_ptr() % 64 == copy.data_ptr() % 64
    assert original.untyped_storage().data_ptr() != copy.untyped_storage().data_ptr()


@pytest.mark.parametrize("frozen", ["here", "there"])
def test_other_weights_train(frozen):
    """Found before anything changes; with the cure the state loads."""

    def made(freeze):
        model = network(3)
        for name, p in model[1].named_parameters():
            p.requires_grad_(not (freeze and name.endswith("bias")))
        return pipeline(model, "pb")

    one, other = made(frozen == "there"), made(frozen == "here")
    for pipe, some in ((one, data(5)), (other, data(7, seed=3))):
        for x, y in some:
            pipe.push(x, y)
    before, state = everything(other), one.state_dict()
    told = ("is frozen", "trained") if frozen == "here" else ("trains", "frozen")
    with pytest.raises(ValueError, match=f"stage 1 .*bias' {told[0]} here, but was {told[1]} .* set requires_grad as"):
        other.load_state_dict(state)
    assert torch.equal(everything(other), before)
    cured = made(frozen == "there")
    cured.load_state_dict(state)
    assert torch.equal(everything(cured), everything(one))
