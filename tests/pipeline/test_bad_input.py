"""Bad input: every message names the stage or the option and the cure, and nothing has been trained when it comes."""

import pickle

import pytest
import torch
from torch import nn

import pipeback
from tests.helpers.long_forms import grouped
from tests.laws.cases import OPTIMIZERS, data, network, weights
from tests.pipeline.refusals import build


def test_optimizers():
    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times.*use SGD or Adam"):
        pipeback.Pipeline(network(), loss=nn.functional.mse_loss, optimizer=torch.optim.LBFGS, method="pb")
    with pytest.raises(TypeError, match="stage 0: optimizer must be a function from parameters.*returned list"):
        pipeback.Pipeline(network(), loss=nn.functional.mse_loss, optimizer=list, method="pb")
    with pytest.raises(TypeError, match="optimizer must be a function, but is SGD"):
        optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
        pipeback.Pipeline(network(), loss=nn.functional.mse_loss, optimizer=optimizer, method="pb")
    with pytest.raises(ValueError, match="stage 0: the optimizer must take exactly the parameters it is given"):
        own = network().parameters()
        pipeback.Pipeline(
            network(), loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(own, 0.1), method="pb"
        )


@pytest.mark.parametrize("name", ["lwp", "cerebras", "spectrain", "sc"])
def test_equations_that_an_optimizer_does_not_allow(name):
    def made(optimizer):
        return pipeback.Pipeline(network(), loss=nn.functional.mse_loss, optimizer=optimizer, method=name)

    for optimizer in () if name == "sc" else ("adam", "adamw"):  # spikes have a form for Adam
        with pytest.raises(
            ValueError, match=r"stage 0 \(0\): .*momentum SGD, but the optimizer is Adam.*form=\"weight\""
        ):
            made(OPTIMIZERS[optimizer])
    with pytest.raises(ValueError, match='plain momentum, but nesterov=True.*form="weight"'):
        made(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True))
    with pytest.raises(ValueError, match=r'plain momentum, but dampening=0.5.*form="weight"'):
        made(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5))
    if name == "sc":
        made(OPTIMIZERS["sgd"])
    else:
        with pytest.raises(ValueError, match=r'momentum=0; set momentum or use .*create\("lwp", form="weight"\)'):
            made(OPTIMIZERS["sgd"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size must be a whole number of at least 1 or None, but is 0"),
        ({"workers": 1.5}, "workers must be a whole number"),
        ({"workers": 6}, "workers=6 but the model has 5 stages"),
        ({"clip_norm": -1.0}, "clip_norm must be above 0 or None"),
        ({"micro_batch_size": pipeback.MicroBatches(weights="even")}, "weights must be one of equal, samples"),
        ({"debug": pipeback.Debug(order="best")}, "order must be one of grouped, upstream, sticky, random"),
        ({"store": "disc:here"}, "store='disc:here' is unknown; give None, 'host', 'disk:FOLDER', or a Store"),
        ({"method": "pip"}, "unknown method 'pip'; did you mean"),
        ({"stages": pipeback.Splitting(balance="luck")}, "balance must be one of time, memory, but is 'luck'"),
        ({"debug": pipeback.Debug(check_finite="x")}, "check_finite must be one of False, True, but is 'x'"),
        ({"debug": pipeback.Debug(check_finite=1)}, "check_finite must be one of False, True, but is 1"),
        ({"vectorize": 1}, 'vectorize must be True, False, "auto" or "cuda_graph", but is 1'),
        ({"store": pipeback.Streaming("host", device="luck")}, "device must be None, a torch.device or its name"),
        ({"store": pipeback.Streaming(skip_zeros="yes")}, "skip_zeros must be one of False, True, auto, but is 'yes'"),
        (
            {"store": pipeback.Streaming(skip_zeros=True)},
            r'skip_zeros=True needs sparse weights.* no sparsity; leave .* store=pipeback.Streaming\(sparsity="set"\)',
        ),
        ({"clip_norm": "x"}, "clip_norm must be above 0 or None, but is 'x'"),
        ({"workers": pipeback.Processes(timeout=True)}, "timeout must be above 0 seconds, but is True"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        build(network(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": 5}, 'store must be None, "host", "disk:FOLDER" or a pipeback.Store, but is 5'),
        (
            {"store": pipeback.Streaming(sparsity=0.9)},
            r"sparsity must be None, a name of pipeback.sparsities.available\(\)",
        ),
        ({"compile": "yes"}, "compile must be True, False or a dict of options of torch.compile, but is 'yes'"),
        ({"debug": pipeback.Debug(seed=1.5)}, "seed must be a whole number, for example debug=.*, but is 1.5"),
        ({"store": pipeback.Streaming(init=3)}, "init must be None, a function of a module, or the path"),
        (
            {"stages": pipeback.Splitting(leaves="encoder")},
            r"leaves must be a list of paths of modules, for example stages=pipeback.Splitting\(leaves=\[",
        ),
        (
            {"store": pipeback.Streaming(device=0.5)},
            'device must be None, a torch.device or its name, for example "cpu"',
        ),
    ],
)
def test_options_of_another_type(options, message):
    with pytest.raises(TypeError, match=message):
        build(network(), **options)


def test_the_cures_of_options():
    for options in (
        {"sparsity": "set", "skip_zeros": True}, {"skip_zeros": False}, {"balance": "memory"}, {"check_finite": True},
        {"store": None}, {"store": "host"}, {"compile": False}, {"seed": 1}, {"leaves": []}, {"device": "cpu"},
    ):  # fmt: skip
        build(network(), **grouped(options)).push(*data(1)[0])


def test_pushes():
    pipe = build(network(), micro_batch_size=2)
    for x, y, error, message in [
        ([1.0], None, TypeError, "push takes a tensor or a tuple of tensors, but got list"),
        (torch.tensor(1.0), None, ValueError, "0-d tensor"),
        (torch.randn(0, 6), torch.randn(0, 6), ValueError, "is empty"),
        (torch.randn(4, 6), torch.randn(3, 6), ValueError, r"one length.*\[4, 3\]"),
        (torch.randn(4, 6), {"label": torch.randn(3, 6)}, ValueError, r"one length.*\[4, 3\]"),
        (torch.randn(4, 6), {"label": object()}, TypeError, "y must be tensors.*but has something of type object"),
    ]:
        with pytest.raises(error, match=message):
            pipe.push(x, y)
    assert torch.isfinite(pipe.push(*data(1)[0]))  # none of these closed it


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.bad = bool((x == 77).any())
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.bad:
            raise RuntimeError("bang")
        return g


class Bomb(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.linear, self.where = nn.Linear(6, 6), forward

    def forward(self, x):
        if self.where and bool((x == 77).any()):
            raise RuntimeError("bang")
        return x + 0 * self.linear(Explodes.apply(x))


@pytest.mark.parametrize(("where", "workers"), [("backward", None), ("forward", 2), ("backward", 2)])
def test_an_error_inside_a_stage_closes_the_pipeline_and_a_state_reopens_it(where, workers):
    pipe = build([nn.Identity(), Bomb(where == "forward"), nn.Linear(6, 6), nn.Linear(6, 6)], workers=workers)
    for x, y in data(9):
        pipe.push(x, y)
    state = pipe.state_dict()
    with pytest.raises(pipeback.StageError, match=rf"stage 1 \(1\), micro-batch 9: the {where} failed: bang"):
        pipe.push(torch.full((3, 6), 77.0), torch.zeros(3, 6))
        pipe.drain()
    for call in (lambda: pipe.push(*data(1)[0]), pipe.wait, pipe.drain, pipe.state_dict, lambda: pipe.model):
        with pytest.raises(RuntimeError, match="the pipeline is closed: stage 1"):
            call()
    pipe.load_state_dict(state)
    assert torch.isfinite(pipe.push(*data(1)[0]))
    pipe.drain()
    pipe.close()


def test_states_of_another_model_or_method():
    pipe = build(network())
    pipe.push(*data(1)[0])
    state = pipe.state_dict()
    for other, message in [
        (
            build(network(), "sc"),
            r"belongs to method PipelinedBackpropagation \{'slack': 2\}, the pipeline runs SpikeCompensation",
        ),
        (
            build(network(), pipeback.methods.create("pb", slack=1)),
            "the pipeline runs PipelinedBackpropagation {'slack': 1}",
        ),
        (build(network(stages=4)), "the state has 5 stages, the pipeline has 4"),
        (build(network(width=7)), r"stage 0 \(0\): weight '0.weight' is \(7, 7\).*\(6, 6\).*another model"),
        (
            build([nn.Linear(6, 6)] * 1 + [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]),
            "the model lacks|lacks weight",
        ),
        (build(network(), optimizer="adam"), r"belongs to optimizers \['SGD'\], the pipeline has \['Adam'\]"),
    ]:
        before = weights(other)
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
        assert torch.equal(before, weights(other))
    with pytest.raises(ValueError, match="not a state of Pipeline.state_dict"):
        pipe.load_state_dict(network().state_dict())
    with pytest.raises(ValueError, match="format 99, this version of pipeback reads 2"):
        pipe.load_state_dict({**state, "format": 99})


def test_states_hold_no_pickles(tmp_path):
    pipe = build(network(), "pipedream")
    for x, y in data(9):
        pipe.push(x, y)
    torch.save(pipe.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    import json

    assert json.loads(json.dumps(state["plain"])) == state["plain"]
    assert all(isinstance(t, torch.Tensor) for tensors in state["stages"] for t in tensors.values())
    with pytest.raises(pickle.UnpicklingError):
        torch.save({"bad": build}, tmp_path / "bad.pt")
        torch.load(tmp_path / "bad.pt", weights_only=True)


@pytest.mark.parametrize("who", ["evaluate", "run"])
def test_what_is_evaluated_must_be_tensors_too(who):
    layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
    x = {"x": torch.randn(3, 4)}
    pipe = pipeback.Pipeline(layers, loss=None, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), method="sgd")
    for odd, told in ((x, "dict"), ([x["x"]], "list"), ((x["x"], "y"), "tuple with a str in it")):
        with pytest.raises(
            TypeError, match=rf"^{who} takes a tensor or a tuple of tensors, but got {told}: the modules"
        ):
            getattr(pipe, who)(odd)
    (given,) = tuple(x.values())  # as the message says
    assert torch.equal(getattr(pipe, who)(given), nn.Sequential(*layers)(given))

    class Model(nn.Sequential):  # as it says, too
        def forward(self, x):
            return super().forward(x)

    pipe = pipeback.Pipeline(
        Model(*layers),
        loss=None,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        method="sgd",
        stages="layer",
        example=x,
    )
    assert torch.equal(getattr(pipe, who)(x), nn.Sequential(*layers)(given))


def test_a_field_of_a_long_form_is_told_its_place():
    for given, place in (
        ({"leaves": ["1"]}, "stages=pipeback.Splitting(leaves=['1'])"),
        ({"stages": 4, "balance": "memory"}, "stages=pipeback.Splitting(4, balance='memory')"),
        ({"weights": "samples", "micro_batch_size": 2}, "micro_batch_size=pipeback.MicroBatches(2, weights='samples')"),
        ({"workers": 2, "timeout": 60}, "workers=pipeback.Processes(timeout=60)"),
        ({"clip_value": 1.0}, "clip_norm=pipeback.Clipping(value=1.0)"),
        ({"check_finite": True}, "debug=pipeback.Debug(check_finite=True)"),
    ):
        with pytest.raises(TypeError) as told:
            build(network(), **given)
        name = next(name for name in given if name not in ("stages", "micro_batch_size", "workers"))
        assert str(told.value) == f"Pipeline has no argument {name!r}; give {place}"
        argument, _, value = place.partition("=")
        cut = {"example": data(1)[0][0]} if "leaves" in given else {}
        if argument != "workers":
            build(network(), **{argument: eval(value), **cut}).push(*data(1)[0])
    with pytest.raises(TypeError, match="Pipeline has no argument 'micro_batchsize'; did you mean 'micro_batch_size'"):
        build(network(), micro_batchsize=2)
