"""Law: with masters, weights of a half type are float32 weights, rounded where they are computed with."""

import copy

import pytest
import torch
from torch import nn

import pipeback
from tests.helpers.choice import mostly_rare
from tests.laws.by_versions import by_versions
from tests.laws.cases import CASES, FEW, OPTIMIZERS, STAGES, allowed, data, everything, network, pipeline

HALVES = [torch.bfloat16, torch.float16]


def halved(dtype=torch.bfloat16, seed=0):
    return network(dtype=dtype, seed=seed)


def batches(count=19, dtype=torch.bfloat16, samples=3, seed=1):
    return data(count, samples=samples, dtype=dtype, seed=seed)


def masters(pipe):
    """All weights in one vector, as a state holds them."""
    return torch.cat(
        [t.flatten() for tensors in pipe.state_dict()["stages"] for n, t in tensors.items() if n.startswith("weight/")]
    )


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def as_one(some, case, optimizer, dtype, **options):
    pipe = pipeline(halved(dtype), CASES[case](STAGES), optimizer, masters=True, **options)
    losses = torch.stack([pipe.push(x, y).double() for x, y in some])
    flying = masters(pipe)
    pipe.drain()
    return pipe, losses, flying, masters(pipe), vector(pipe.model)


def by_hand(some, sizes, optimizer, dtype, clip_norm=None):
    """Float32 masters, a half copy of the model, a plain optimizer a stage."""
    model = halved(dtype)
    own = [[nn.Parameter(p.detach().float()) for p in stage.parameters()] for stage in model]
    opts = [OPTIMIZERS[optimizer](w) for w in own]
    losses, at = [], 0
    for size in sizes:
        for x, y in some[at : at + size]:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()  # sums in the half type
            losses.append(loss.detach())
        at += size
        for stage, ws, opt in zip(model, own, opts, strict=True):
            for p, w in zip(stage.parameters(), ws, strict=True):
                w.grad, p.grad = p.grad.float() / size, None
            if clip_norm:
                norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(w.grad) for w in ws]))
                for w in ws:
                    w.grad *= torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
            opt.step()
            with torch.no_grad():
                for p, w in zip(stage.parameters(), ws, strict=True):
                    p.copy_(w.to(dtype))
    return torch.stack(losses), torch.cat([w.detach().flatten() for ws in own for w in ws]), vector(model)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("case", "group"), [("sgd", 1), ("gpipe-4", 4), ("one_f_one_b-3", 3)])
def test_synchronous_training_is_the_loop_written_by_hand(case, group, optimizer, dtype):
    some = batches(dtype=dtype)
    sizes = [group] * (19 // group) + ([19 % group] if 19 % group else [])
    for clip_norm in (None, 0.05):
        model = halved(dtype)
        pipe = pipeline(model, CASES[case](STAGES), optimizer, masters=True, clip_norm=clip_norm)
        losses = torch.stack([pipe.push(x, y) for x, y in some])
        pipe.drain()
        wanted = by_hand(some, sizes, optimizer, dtype, clip_norm)
        for found, expected in zip((losses, masters(pipe), vector(model)), wanted, strict=True):
            assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize(("case", "slack"), [("pb", 2), ("pb-slack1", 1), ("pipedream", 1), ("lwp-weight", 2)])
def test_flowing_methods_are_their_recurrence_on_masters(case, slack):
    """Float32 sums may be fused differently; the half weights come out alike but for a rare tie."""
    some = batches(12)
    pipe = pipeline(halved(), CASES[case](STAGES), masters=True)
    for x, y in some:
        pipe.push(x, y)
    pipe.drain()
    wanted = by_versions(
        halved(), some, slack, stash=case == "pipedream", ahead=case == "lwp-weight", keep=torch.float32,
        half=torch.bfloat16,
    )  # fmt: skip
    torch.testing.assert_close(masters(pipe), torch.cat([w.flatten() for w in wanted]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", mostly_rare(CASES, *FEW))
def test_runtimes_agree(case):
    some = batches()

    def run(**options):
        pipe = pipeline(halved(), CASES[case](STAGES), masters=True, **options)
        losses = torch.stack([pipe.push(x, y).clone() for x, y in some])
        flying = everything(pipe)
        pipe.drain()
        result = losses, flying, everything(pipe), vector(pipe.model)
        pipe.close()
        return result

    expected = run()
    assert expected[3].dtype == torch.bfloat16
    for options in ({"workers": 2}, {"debug": pipeback.Debug(order="random")}, {"activations": "host"}):
        for found, wanted in zip(run(**options), expected, strict=True):
            assert torch.equal(found, wanted), options


@pytest.mark.parametrize("case", mostly_rare(CASES, *FEW))
def test_without_weights_of_a_half_type_nothing_changes(case):
    found = []
    for keep in (False, True):
        pipe = pipeline(network(), CASES[case](STAGES), masters=keep)
        losses = torch.stack([pipe.push(x, y) for x, y in data(15)])
        found.append((losses, everything(pipe), pipe.memory()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize("keep", [False, True])
def test_small_updates_are_not_lost(keep):
    """Each step of 2⁻¹⁰ is a quarter of the distance from 1 to the next bfloat16; forty of them are not."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity()).to(torch.bfloat16)
    nn.init.constant_(model[0].weight, 1.0)
    pipe = pipeback.Pipeline(
        model, loss=lambda out, y: -out.mean(), optimizer=lambda p: torch.optim.SGD(p, lr=2.0**-10), method="gpipe",
        masters=keep,
    )  # fmt: skip
    for _ in range(40):
        pipe.push(torch.ones(1, 1, dtype=torch.bfloat16))
    assert model[0].weight.item() == (1.0 if not keep else 1.0 + 40 * 2.0**-10)


@pytest.mark.parametrize("case", mostly_rare(CASES, *FEW))
def test_resume_anywhere_has_the_same_bits(case):
    some = batches(21)
    for optimizer in ("momentum", "adam"):
        if not allowed(case, optimizer):
            continue
        for activations in ("device", "recompute") if optimizer == "adam" else ("device",):
            pipe = pipeline(halved(), CASES[case](STAGES), optimizer, masters=True, activations=activations)
            for x, y in some[:11]:
                pipe.push(x, y)
            state = pipe.state_dict()
            assert all(t.dtype == torch.float32 for n, t in state["stages"][0].items() if n.startswith("weight/"))
            other = pipeline(halved(seed=9), CASES[case](STAGES), optimizer, masters=True, activations=activations)
            other.load_state_dict(copy.deepcopy(state))
            assert torch.equal(everything(other), everything(pipe))
            for x, y in some[11:]:
                pipe.push(x, y), other.push(x, y)
            assert torch.equal(everything(other), everything(pipe))
            assert torch.equal(vector(other.model), vector(pipe.model))


def test_checkpoint_files_hold_masters(tmp_path):
    pipe, other = (pipeline(halved(seed=s), "cerebras", masters=True) for s in (0, 5))
    for x, y in batches(7):
        pipe.push(x, y)
    pipeback.checkpoint.save(pipe, tmp_path / "state")
    pipeback.checkpoint.load(other, tmp_path / "state")
    assert torch.equal(everything(pipe), everything(other)) and torch.equal(vector(pipe.model), vector(other.model))


def test_a_state_without_masters_is_refused_by_name():
    with_masters, without = pipeline(halved(), "pb", masters=True), pipeline(halved(), "pb")
    for one, other in ((with_masters, without), (without, with_masters)):
        with pytest.raises(ValueError, match=r"stage 0 \(0\): weight .* same masters="):
            one.load_state_dict(other.state_dict())


def test_mixed_types_and_frozen_weights():
    """Float32 norms between half layers: only half weights get masters, and frozen ones stay as they are."""

    class Cast(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.dtype = dtype

        def forward(self, x):
            return x.to(self.dtype)

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(
            *[
                nn.Sequential(nn.Linear(6, 6).bfloat16(), Cast(torch.float32), nn.LayerNorm(6), Cast(torch.bfloat16))
                for _ in range(3)
            ]
        )
        model[1][0].weight.requires_grad_(False)
        return model

    for case in ("cerebras", "pipedream", "gpipe-4", "pipemare"):
        model = build()
        pipe = pipeline(model, CASES[case](3), masters=True)
        for x, y in batches(9):
            pipe.push(x, y)
        pipe.drain()
        state = pipe.state_dict()["stages"]
        assert state[1]["weight/0.weight"].dtype == torch.bfloat16
        assert state[1]["weight/0.bias"].dtype == state[1]["weight/2.weight"].dtype == torch.float32
        for tensors, stage in zip(state, model, strict=True):
            for name, p in stage.named_parameters():
                assert torch.equal(tensors[f"weight/{name}"].to(p.dtype), p)
        assert torch.equal(model[1][0].weight, build()[1][0].weight)


def test_weights_written_from_outside_become_masters():
    model = halved()
    pipe = pipeline(model, "gpipe", masters=True)
    (x, y), *_ = batches(1)
    pipe.push(x, y)
    before = masters(pipe).clone()
    with torch.no_grad():
        model[0][0].weight.fill_(0.5)
    pipe.push(x, y)
    after = pipe.state_dict()["stages"][0]["weight/0.weight"]
    assert (after - 0.5).abs().max() < 0.1
    rest = masters(pipe)[36:]
    assert not torch.equal(rest, rest.bfloat16().float()), "the others keep the bits that rounding takes"
    assert before.dtype == torch.float32


@pytest.mark.parametrize("case", ["gpipe-4", "pb", "cerebras", "pipedream", "pipemare"])
def test_memory_counts_masters(case):
    method = CASES[case](STAGES)
    pipe = pipeline(halved(), method, masters=True)
    for x, y in batches(19):
        pipe.push(x, y)
    memory, count = pipe.memory(), vector(pipe.model).numel()
    assert memory.weights == 4 * count and memory.rounded == 2 * count
    held = [method.held(s, STAGES) for s in range(STAGES)]
    assert memory.copies == pytest.approx(sum(held) / STAGES)
    x, y = batches(1)[0]
    assert pipe.plan(x, y).device.weights >= memory.weights + memory.rounded


def test_replicas_agree_with_one_pipeline():
    """Two replicas with one half each sum as one pipeline that sees both as micro-batches of one update."""
    some = batches(8)
    pipe = pipeline(halved(), "gpipe", masters=True, replicas=2)
    one = pipeline(halved(), "gpipe", masters=True, micro_batch_size=3)
    for (x, y), (a, b) in zip(some[::2], some[1::2], strict=True):
        for each in (pipe, one):
            each.push(torch.cat([x, a]), torch.cat([y, b]))
    assert torch.equal(masters(pipe), masters(one))
    pipe.close()


def test_many_micro_batches_are_counted_in_half_types_too():
    """A replica's count travels with its sums: 300 is no bfloat16."""
    model = halved()
    pipe = pipeline(model, "gpipe", replicas=2, micro_batch_size=1)
    one = pipeline(halved(), "gpipe", micro_batch_size=1)
    x = torch.ones(150, 6, dtype=torch.bfloat16)
    y = torch.zeros(150, 6, dtype=torch.bfloat16)
    seen = []
    update = type(pipe._engine.stages[0]).average
    for each in (pipe, one):
        for stage in (s for stages in each._engine.holding.everywhere for s in stages):
            stage.average = lambda sums, *rest, stage=stage: seen.append(sums.number) or update(stage, sums, *rest)
        each.push(torch.cat([x, x]), torch.cat([y, y]))
        each.wait()
    assert set(seen) == {300.0}
    pipe.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"masters": 1}, "masters must be True or False"),
        ({"masters": True, "store": "host"}, "masters=True does not go with store=HostStore"),
        (
            {"masters": True, "store": pipeback.Streaming(sparsity="magnitude")},
            "masters=True does not go with sparsity",
        ),
    ],
)
def test_what_does_not_go_is_refused(options, says):
    with pytest.raises((ValueError, TypeError), match=says):
        pipeline(halved(), "gpipe", **options)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("case", "optimizer"),
    mostly_rare(
        [(case, name) for case in FEW for name in ("momentum", "adamw") if allowed(case, name)],
        ("pb", "momentum"), ("gpipe-4", "adamw"), ("pipedream-vertical", "momentum"), ("cerebras", "momentum"),
        ("spectrain-v2", "momentum"),
    ),
)  # fmt: skip
def test_stages_that_run_as_one_round_masters_of_their_own(case, optimizer, dtype):
    """To torch's tolerance of bfloat16; stages stepped alike have the same bits on most processors."""
    some = batches(25, dtype=dtype)
    _, *wanted = as_one(some, case, optimizer, dtype)
    pipe, *found = as_one(some, case, optimizer, dtype, vectorize=True)
    assert any(told.startswith("as one") for told in pipe.vectorized.values())
    why = "masters", "no tick is one", "whole flushes"
    assert all(any(some in told for some in why) for told in pipe.vectorized.values() if "as one" in told)
    torch.testing.assert_close(found, wanted, rtol=1.6e-2, atol=1e-3, check_dtype=False)
    _are_masters(pipe, dtype)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("options", [{"workers": 2}, {"replicas": 2}], ids=str)
@pytest.mark.parametrize("case", ["pb", "cerebras"])
def test_masters_of_stages_that_run_as_one_within_workers_and_replicas(case, options):
    some = batches(25)
    _, *wanted = as_one(some, case, "momentum", torch.bfloat16, **options)
    pipe, *found = as_one(some, case, "momentum", torch.bfloat16, vectorize=True, **options)
    assert any("as one" in told for told in pipe.vectorized.values())
    torch.testing.assert_close(found, wanted, rtol=1.6e-2, atol=1e-3, check_dtype=False)
    _are_masters(pipe, torch.bfloat16)


def _are_masters(pipe, dtype):
    for stage in pipe._engine.stages:
        for w, p in zip(stage.weights, stage.params, strict=True):
            assert w.dtype == torch.float32 and torch.equal(w.to(dtype), p)
            assert not torch.equal(w, p.float())  # a master is more than its rounding


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("case", ["pb", "pipedream", "lwp-weight"])
def test_masters_of_stages_that_run_as_one_go_on_in_flight(case):
    some = batches(24)
    whole, before, after = (pipeline(halved(), CASES[case](STAGES), masters=True, vectorize=True) for _ in range(3))
    for pipe, part in ((whole, some), (before, some[:11])):
        for x, y in part:
            pipe.push(x, y)
    after.load_state_dict(before.state_dict())
    for x, y in some[11:]:
        after.push(x, y)
    assert torch.equal(everything(after), everything(whole))
    _are_masters(after, torch.bfloat16)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_weights_written_while_stages_run_as_one_reach_their_masters():
    found = []
    for on in ({}, {"vectorize": True}):
        pipe = pipeline(halved(), "pb", masters=True, **on)
        for n, (x, y) in enumerate(batches(20)):
            if n == 10:
                with torch.no_grad():
                    pipe.model[2][0].weight.mul_(0.5)
            pipe.push(x, y)
        pipe.drain()
        found.append(masters(pipe))
    torch.testing.assert_close(*found, rtol=1.6e-2, atol=1e-3)
