"""Law: PB with late W is PB whose updates take the gradient of `late` micro-batches before, in every runtime."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import pipeback
from pipeback import methods
from pipeback.methods.pb import PipelinedBackpropagation
from tests.helpers.choice import diagonal
from tests.laws.cases import STAGES, data, everything, network, pipeline, weights


@dataclass(repr=False)
class Queued(PipelinedBackpropagation):
    """PB that puts each gradient into a queue, from which an update takes it `behind` updates later."""

    behind: int = 1

    def init(self, weights):
        return {"queue": []}

    def update(self, weights, optimizer, state, when):
        queue = [*state["queue"], [w.grad.clone() for w in weights]]
        if len(queue) > self.behind:
            for w, g in zip(weights, queue.pop(0), strict=True):
                w.grad.copy_(g)
            optimizer.step()
        return {"queue": queue}


def layers(stages=STAGES):
    """Several layers per stage, so that I and W are different work."""
    torch.manual_seed(3)
    one = lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh())  # noqa: E731
    return nn.Sequential(*[one() for _ in range(stages)])


def layers_that_need_weights(stages=STAGES):
    """Weight norm, whose gradient depends on the weights, weights that are used twice, and a PReLU."""
    torch.manual_seed(3)
    norm = nn.utils.parametrizations.weight_norm
    first = [nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), norm(nn.Linear(6, 6))]
    shared = nn.Linear(6, 6)
    return nn.Sequential(*first, nn.Sequential(shared, nn.Tanh(), shared), nn.PReLU(6), nn.Linear(6, 6))


MODELS = {"one layer": network, "layers": layers, "whole": layers_that_need_weights}


def trained(method, model, optimizer="momentum", count=23, **options):
    pipe = pipeline(MODELS[model](), method, optimizer, **options)
    losses = [pipe.push(x, y).clone().double().reshape(1) for x, y in data(count)]
    found, whole = torch.cat([*losses, weights(pipe)]), pipe.unsplit
    pipe.close()
    assert list(whole) == (["stage 1 (1)", "stage 2 (2)", "stage 3 (3)"] if model == "whole" and method.late else [])
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("slack", "late"), [(2, 1), (2, 3), (1, 2), (0, 2)])
def test_it_takes_earlier_gradients(slack, late, model):
    wanted = trained(Queued(slack, behind=late), model)
    assert torch.equal(trained(methods.create("pb", slack=slack, late=late), model), wanted)


def test_delays_grow():
    method = methods.create("pb", late=3)
    assert method.delays(4) == [9, 7, 5, 3]
    assert methods.create("pb", late=0).delays(4) == methods.create("pb").delays(4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", [
    {"workers": 2}, {"workers": STAGES}, {"activations": "host"}, {"activations": {2: "host"}},
    *({"debug": pipeback.Debug(order=order)} for order in ("skewed", "random", "sticky", "upstream")),
], ids=str)  # fmt: skip
def test_runtimes_are_equal(options, model):
    if model == "whole" and options == {"activations": "host"}:
        pytest.skip("host memory keeps no functions of weights")
    pipe, other = (pipeline(MODELS[model](), methods.create("pb", late=2), **some) for some in ({}, options))
    for x, y in data(17):
        assert torch.equal(pipe.push(x, y), other.push(x, y))
    pipe.drain(), other.drain()
    assert torch.equal(everything(pipe), everything(other))
    other.close()


@pytest.mark.parametrize(
    ("at", "options", "model"), diagonal([1, 4, 9, 14], [{}, {"workers": 2}, {"clip_norm": 0.1}], MODELS), ids=str
)
def test_resumed_in_flight(at, options, model):
    """Between I and W, too: the state holds the gradients that are not in the sums yet."""
    batches = data(20)
    one = pipeline(MODELS[model](), methods.create("pb", late=3), **options)
    for x, y in batches[:at]:
        one.push(x, y)
    state = one.state_dict()
    names = {name.partition("/")[0] for tensors in state["stages"] for name in tensors}
    assert "late" in names or at < 2
    there = {name: value for name, value in options.items() if name != "workers"}
    other = pipeline(MODELS[model](), methods.create("pb", late=3), **there)
    other.load_state_dict(state)
    for x, y in batches[at:]:
        assert torch.equal(one.push(x, y), other.push(x, y))
    one.drain(), other.drain()
    assert torch.equal(everything(one), everything(other))
    one.close(), other.close()


@pytest.mark.parametrize("method", [methods.create("pb", late=2), methods.create("zb_h1", micro_batches=4)], ids=str)
def test_replicas(method):
    """In any number of threads the same bits, and those of one pipeline on all samples to 1e-12."""
    found = []
    for options in ({}, {"replicas": 2}, {"replicas": 2, "workers": 3}):
        pipe = pipeline(network(dtype=torch.float64), method, **options)
        losses = [pipe.push(x, y).clone() for x, y in data(15, samples=4, dtype=torch.float64)]
        pipe.wait()
        found.append(torch.cat([torch.stack(losses), weights(pipe)]))
        pipe.close()
    assert torch.equal(found[1], found[2])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("late", [1, 3])
def test_on_workers_of_two_parts(late, options):
    """In a V, where each worker holds an early part and a late one."""
    one, other = (
        pipeline(layers(), methods.create("pb", late=late, placement=placement), **options)
        for placement in ("neighbours", "v")
    )
    for x, y in data(15):
        assert torch.equal(one.push(x, y), other.push(x, y))
    one.drain(), other.drain()
    assert torch.equal(everything(one), everything(other))
    one.close(), other.close()


@pytest.mark.parametrize("options", [
    {"masters": True}, {"micro_batch_size": pipeback.MicroBatches(2, weights="samples")},
], ids=str)  # fmt: skip
def test_masters_and_unequal_samples(options):
    def run(method, **more):
        dtype = torch.bfloat16 if "masters" in options else torch.float32
        pipe = pipeline(network(dtype=dtype), method, **options, **more)
        for n in range(15):
            x, y = data(1, samples=3 + n % 3, seed=n)[0]
            pipe.push(x.to(dtype), y.to(dtype))
        pipe.wait()
        found = weights(pipe)
        pipe.close()
        return found

    late = methods.create("pb", late=2)
    assert torch.equal(run(late), run(late, workers=2))
    if "masters" in options:
        assert torch.equal(run(late), run(Queued(behind=2)))


def test_an_update_has_the_rate_of_its_own_micro_batch():
    """One stage, late by two: the third gradient alone is applied, when two more have come."""
    pipe = pipeback.Pipeline(
        nn.Sequential(nn.Linear(6, 6)), loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.0),
        method=methods.create("pb", late=2),
    )  # fmt: skip
    seen = []
    for n, (x, y) in enumerate(data(7)):
        for group in pipe.optimizers[0].param_groups:
            group["lr"] = 0.1 if n == 2 else 0.0
        before = weights(pipe)
        pipe.push(x, y)
        seen.append(not torch.equal(weights(pipe), before))
    assert seen == [n == 4 for n in range(7)]


class Fails(nn.Module):
    armed = False

    def forward(self, x):
        if Fails.armed:
            raise RuntimeError("armed")
        return x


@pytest.mark.parametrize("method", [methods.create("pb", late=2), methods.create("zb_h2", micro_batches=5)], ids=str)
@pytest.mark.parametrize("at", [0, 3])
def test_a_forward_that_fails_is_taken_back(at, method):
    def model():
        made = layers()
        made[at].append(Fails())
        return made

    plain, hurt = (pipeline(model(), method) for _ in range(2))
    for n, (x, y) in enumerate(data(12)):
        if n in (1, 5, 9):
            Fails.armed = True
            with pytest.raises(pipeback.StageError, match="nothing was trained on it"):
                hurt.push(x, y)
            Fails.armed = False
        assert torch.equal(plain.push(x, y), hurt.push(x, y))
    plain.drain(), hurt.drain()
    assert torch.equal(everything(plain), everything(hurt))


@pytest.mark.parametrize(("options", "says"), [
    ({"vectorize": True}, "does not go with vectorize=True; use vectorize=False"),
    ({"store": "host"}, "does not go with store='host'; use store=None"),
])  # fmt: skip
def test_what_cannot_split_is_refused(options, says):
    with pytest.raises(ValueError, match=f"which updates between the two parts of a backward, {says}"):
        pipeline(network(), methods.create("pb", late=1), **options)


def test_mistakes():
    with pytest.raises(ValueError, match="late must be a whole number of at least 0, but is -1"):
        methods.create("pb", late=-1)
