"""Law: a model whose forward is followed trains as the sequence that one would write by hand, under every method and
on every runtime, bit for bit; synchronous methods as plain PyTorch does.
"""

import copy

import pytest
import torch
from torch import nn

import pipeback
from pipeback import checkpoint
from pipeback.streaming import disk_store
from tests.helpers.choice import mostly_rare
from tests.laws.branching import STAGES, Branching, batches, build, by_hand, loss
from tests.laws.cases import CASES, FEW, OPTIMIZERS, everything, usual

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def values(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", ["sgd", "gpipe", "one_f_one_b"])
def test_plain_training(case, optimizer):
    plain = Branching()
    opt = OPTIMIZERS[optimizer](plain.parameters())
    pipe = build(CASES[case](STAGES), optimizer)
    for x, y in batches(9):
        wanted = loss(plain(**x), y)
        opt.zero_grad()
        wanted.backward()
        opt.step()
        assert torch.equal(pipe.push(x, y), wanted.detach())
    pipe.drain()
    for (name, p), q in zip(plain.state_dict().items(), pipe.model.state_dict().values(), strict=True):
        assert torch.equal(p, q), name
    assert pipe.model.head.weight is pipe.model.embed.weight


@pytest.mark.parametrize("case", mostly_rare(CASES, *FEW))
def test_the_sequence_by_hand(case):
    method = CASES[case](STAGES)
    pipe = build(method)
    model = Branching()
    hand = pipeback.Pipeline(by_hand(model), loss=loss, optimizer=OPTIMIZERS[usual(method)], method=CASES[case](STAGES))
    assert pipe.stages == STAGES and pipe.delays == hand.delays
    for x, y in batches(23):
        assert torch.equal(pipe.push(x, y), hand.push((x["tokens"], x["mask"]), y))
    pipe.drain()
    hand.drain()
    assert torch.equal(values(pipe.model), values(hand.model))


def trained(case, drop=0.3, **options):
    pipe = build(CASES[case](STAGES), drop=drop, **options)
    losses = [pipe.push(x, y) for x, y in batches(13)]
    flying = everything(pipe)
    output = pipe.evaluate(batches(1)[0][0])["scores"]
    pipe.drain()
    losses += [pipe.push(x, y) for x, y in batches(3)]
    found = torch.stack([each.clone() for each in losses]), flying, output, everything(pipe)
    pipe.close()
    return found


SOME = ["gpipe-4", "pb", "pipedream", "pipedream_2bw", "cerebras", "spectrain", "pipemare"]


@pytest.mark.parametrize("case", mostly_rare(SOME, *SOME[:3]))
def test_runtimes(case, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "SMALL", 1)
    wanted = trained(case)
    every = [
        {"workers": 2}, {"debug": pipeback.Debug(order="random")}, {"store": "host"},
        {"store": f"disk:{tmp_path / 'a'}"}, {"store": "host", "workers": 3}, {"activations": "host"},
    ]  # fmt: skip
    for options in every:
        for found, one in zip(trained(case, **options), wanted, strict=True):
            assert torch.equal(found, one), options


@pytest.mark.parametrize("case", ["gpipe-4", "pipedream"])
def test_recomputed_activations(case):
    found, wanted = trained(case, activations="recompute"), trained(case)
    for part in (0, 2):  # losses and an output; what waits in flight is another thing
        assert torch.equal(found[part], wanted[part])


def test_replicas():
    """Two pipelines with half of each push: a form that comes later is known to both."""

    def run(replicas):
        pipe = build("pb", norm=nn.LayerNorm, replicas=replicas)
        for x, y in batches(9):
            pipe.push(x, y.unflatten(0, x["tokens"].shape))
        pipe.drain()
        return values(pipe.model)

    torch.testing.assert_close(run(2), run(None))


def test_resume_in_flight(tmp_path):
    first, second = build("cerebras", drop=0.3), build("cerebras", drop=0.3)
    every = batches(20)
    for x, y in every[:11]:
        first.push(x, y)
    checkpoint.save(first, tmp_path)
    checkpoint.load(second, tmp_path)
    for pipe in (first, second):
        for x, y in every[11:]:
            pipe.push(x, y)
        pipe.drain()
    assert torch.equal(everything(first), everything(second))


def test_evaluation_is_the_models_own():
    pipe = build("pb", drop=0.5)
    for x, y in batches(7):
        pipe.push(x, y)
    x, _ = batches(1, samples=3, lengths=(5,))[0]
    found = pipe.evaluate(x)
    model = copy.deepcopy(pipe.model).eval()
    wanted = model(**x)
    assert torch.equal(found["scores"], wanted["scores"]) and found["kind"] == "words"
    assert torch.equal(found["hidden"][0], wanted["hidden"][0]) and found["hidden"][1] is None
    assert torch.equal(pipe.evaluate({"tokens": x["tokens"]})["scores"], model(x["tokens"])["scores"])
    model.load_state_dict(pipe.model.state_dict())
    assert pipe.model.training


def test_evaluation_mode_in_training():
    """A model that is set to evaluation trains so."""
    plain, pipe = Branching(0.5).eval(), build("sgd", drop=0.5)
    pipe.model.eval()
    opt = OPTIMIZERS["momentum"](plain.parameters())
    for x, y in batches(5):
        wanted = loss(plain(**x), y)
        opt.zero_grad()
        wanted.backward()
        opt.step()
        assert torch.equal(pipe.push(x, y), wanted.detach())
    assert torch.equal(values(plain), values(pipe.model))


def test_from_the_meta_device(tmp_path):
    """Followed by shapes alone, initialised stage by stage."""
    x, y = batches(1)[0]
    with torch.device("meta"):
        model = Branching()

    def fill(module):
        torch.manual_seed(0)
        for p in module.parameters():
            p.uniform_(-0.5, 0.5)
        for name, b in module.named_buffers():
            b.fill_("var" in name)

    pipe = pipeback.Pipeline(
        model, loss=loss, optimizer=OPTIMIZERS["adam"], method="gpipe", example=x, stages="layer",
        store=pipeback.Streaming(f"disk:{tmp_path}", init=fill),
    )  # fmt: skip
    losses = [float(pipe.push(x, y)) for _ in range(30)]
    assert losses[-1] < losses[0]


def test_a_stage_from_the_meta_device_without_trained_weights():
    """Adagrad has state from its construction on, and this stage has nothing that it could be of."""
    found = []
    for device in ("meta", "cpu"):
        torch.manual_seed(0)
        with torch.device(device):
            model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 2))
        pipe = pipeback.Pipeline(
            model, loss=nn.functional.mse_loss, optimizer=lambda params: torch.optim.Adagrad(params, lr=0.1),
            method="pb", micro_batch_size=1,
        )  # fmt: skip
        pipe.push(torch.ones(4, 4), torch.ones(4, 2))
        pipe.drain()
        found.append({stage: {*optimizer.state_dict()["state"]} for stage, optimizer in enumerate(pipe.optimizers)})
    assert found[0] == found[1]
