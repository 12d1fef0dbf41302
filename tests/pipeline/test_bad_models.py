"""Models, losses and weights that a pipeline cannot train are refused by name, before half a step is trained."""

import math
import warnings

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import OPTIMIZERS, data, network, weights
from tests.pipeline.refusals import build


def refused(message, model, x=None, y=None, error=ValueError, **options):
    """Building or the first push raises, and no weight or buffer has moved."""
    before = {k: v.clone() for m in model for k, v in m.state_dict(prefix=str(id(m))).items()}
    x, y = (torch.randn(4, 6) if x is None else x), (torch.randn(4, 6) if y is None else y)
    with pytest.raises(error, match=message):
        build(model, **options).push(x, y)
    after = {k: v for m in model for k, v in m.state_dict(prefix=str(id(m))).items()}
    assert all(torch.equal(before[k], after[k]) for k in before)


class Gives(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.linear, self.give = nn.Linear(6, 6), give

    def forward(self, x):
        return self.give(self.linear(x))


def test_models():
    refused("the model is empty", nn.Sequential())
    with pytest.raises(ValueError, match="no trainable parameters; set requires_grad"):
        build(network().requires_grad_(False))
    with pytest.raises(TypeError, match="Linear has a forward of its own.*example="):
        build(nn.Linear(6, 6))
    with pytest.raises(TypeError, match="stage 1 must be a module, but is function"):
        build([nn.Linear(6, 6), lambda x: x])
    with pytest.raises(ValueError, match=r"stage 0 \(0\): weight has no shape yet; run a lazy module once"):
        build([nn.LazyLinear(6)])
    with pytest.raises(TypeError, match="Other has a forward of its own.*give its modules as a list"):
        build(type("Other", (nn.Sequential,), {"forward": lambda self, x: x})(nn.Linear(6, 6)))
    with pytest.raises(ValueError, match=r"stage 0 \(0\) is on the meta device in part"):
        build([nn.Sequential(nn.Linear(6, 6, device="meta"), nn.Linear(6, 6))])


def test_a_parameter_shared_by_two_stages():
    shared = nn.Linear(6, 6)
    refused(
        r"stages 0 and 2 share a parameter \(0.weight is 2.weight\).*one stage",
        nn.Sequential(shared, nn.ReLU(), shared),
    )
    twin = nn.Linear(6, 6)
    twin.weight = nn.Parameter(shared.weight.data)  # another parameter on the same memory
    refused("stages 0 and 1 share a parameter", nn.Sequential(shared, twin))
    norm = nn.BatchNorm1d(6, affine=False)
    refused(
        r"stages 1 and 3 share a buffer \(1.running_mean", nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm)
    )
    relu = nn.ReLU()
    build(nn.Sequential(nn.Linear(6, 6), relu, nn.Linear(6, 6), relu)).push(*data(1)[0])  # without weights it may


@pytest.mark.parametrize(
    ("give", "found"),
    [
        (lambda x: {"x": x}, "not dict"),
        (lambda x: [x, x], "not list"),
        (lambda x: (x, None), "not tuple of Tensor, NoneType"),
        (lambda x: (), "not tuple of "),
        (lambda x: 3.0, "not float"),
    ],
)
def test_outputs(give, found):
    refused(rf"stage 1 \(1\): the output must be a tensor or a tuple of tensors, {found}",
            [nn.Linear(6, 6), Gives(give), nn.Linear(6, 6)], error=TypeError)  # fmt: skip


def test_a_forward_that_fails():
    refused(r"stage 1 \(1\): the forward failed on the first micro-batch: .*shapes", [nn.Linear(6, 6), nn.Linear(5, 6)])


@pytest.mark.parametrize(
    ("norm", "x", "message"),
    [
        (
            nn.BatchNorm1d(6),
            torch.randn(1, 6),
            r"BatchNorm1d '1' would see one value per channel.*pipeback.norms.to_group_norm\(model\), or use a larger",
        ),
        (nn.BatchNorm2d(6), torch.randn(1, 6, 1, 1), "BatchNorm2d '1' would see one value per channel"),
        (nn.BatchNorm3d(6), torch.randn(1, 6, 1, 1, 1), "BatchNorm3d '1' would see one value per channel"),
        (nn.SyncBatchNorm(6), torch.randn(1, 6, 1, 1), "SyncBatchNorm '1' would see one value per channel"),
        (nn.GroupNorm(6, 6), torch.randn(4, 6), "GroupNorm '1' would see one value per group"),
        (nn.InstanceNorm1d(6), torch.randn(2, 6, 1), "InstanceNorm1d '1' would see one value per group"),
        (nn.InstanceNorm2d(6), torch.randn(2, 6, 1, 1), "InstanceNorm2d '1' would see one value per group"),
        (nn.InstanceNorm3d(6), torch.randn(2, 6, 1, 1, 1), "InstanceNorm3d '1' would see one value per group"),
    ],
)
def test_a_normalisation_of_one_value(norm, x, message):
    model = [nn.Sequential(nn.Identity(), norm), nn.Sequential(nn.Flatten(), nn.Linear(6, 6))]
    refused(rf"stage 0 \(0\): {message}", model, x, torch.randn(len(x), 6))


def test_a_layer_norm_of_one_value_warns_and_trains_as_in_a_plain_loop():
    model = lambda: nn.Sequential(nn.LayerNorm(1), nn.Flatten(), nn.Linear(6, 6))  # noqa: E731
    x, y = torch.randn(4, 6, 1), torch.randn(4, 6)
    made, plain = model(), model()
    plain.load_state_dict(made.state_dict())
    with pytest.warns(UserWarning, match=r"stage 0 \(0\): LayerNorm normalises over a single value"):
        loss = build(made, "sgd").push(x, y)
    expected = nn.functional.mse_loss(plain(x), y)
    expected.backward()
    assert torch.equal(loss, expected)
    OPTIMIZERS["momentum"](plain.parameters()).step()
    assert all(map(torch.equal, made.parameters(), plain.parameters()))


def test_a_normalisation_of_few_values_warns():
    pipe = build([nn.BatchNorm1d(6), nn.Linear(6, 6)])
    with pytest.warns(
        UserWarning, match=r"stage 0 \(0\): BatchNorm1d takes its statistics from 4 values per channel.*poor"
    ):
        pipe.push(torch.randn(4, 6), torch.randn(4, 6))


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d, (2,)), (nn.BatchNorm1d, (16,)), (nn.BatchNorm2d, (2, 2)), (nn.BatchNorm2d, (8, 8)),
        (nn.BatchNorm3d, (4, 4, 4)), (nn.SyncBatchNorm, (8, 8)),
    ],
)  # fmt: skip
def test_a_batch_norm_of_one_sample_warns_whatever_its_places(norm, shape):
    model = lambda: nn.Sequential(norm(6), nn.Flatten(), nn.Linear(6 * math.prod(shape), 6))  # noqa: E731
    x, y = torch.randn(4, 6, *shape), torch.randn(4, 6)
    told = (
        rf"stage 0 \(0\): {norm.__name__} takes its statistics from one sample, {math.prod(shape)} values per channel, "
        r"so that.*; replace it before the pipeline is built, pipeback.norms.to_group_norm\(model\), or use a larger"
    )
    with pytest.warns(UserWarning, match=told):
        build(model(), micro_batch_size=1).push(x, y)
    with warnings.catch_warnings():  # as it says
        warnings.simplefilter("error")
        build(pipeback.norms.to_group_norm(model()), micro_batch_size=1).push(x, y)
        if math.prod(shape) >= 16:
            build(model(), micro_batch_size=2).push(x, y)
        build(model().eval(), micro_batch_size=1).push(x, y)


def test_an_instance_norm_without_samples_counts_its_places():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = [nn.Sequential(nn.InstanceNorm2d(6), nn.Flatten(1)), nn.Linear(4, 6)]
        build(model).push(torch.randn(6, 4, 1), torch.randn(6, 6))


def test_a_short_last_micro_batch_is_checked_too():
    pipe = build([nn.BatchNorm1d(6), nn.Linear(6, 6)], micro_batch_size=32)
    before = weights(build([nn.BatchNorm1d(6), nn.Linear(6, 6)]))
    with pytest.raises(ValueError, match="would see one value per channel"):
        pipe.push(torch.randn(65, 6), torch.randn(65, 6))
    assert len(before) == len(weights(pipe))
    assert len(pipe.ledger) == 0


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_so_is_a_push_that_is_smaller_as_a_whole():
    pipe = build([nn.BatchNorm1d(6), nn.Linear(6, 6)])
    pipe.push(torch.randn(4, 6), torch.randn(4, 6))
    with pytest.raises(ValueError, match="would see one value per channel"):
        pipe.push(torch.randn(1, 6), torch.randn(1, 6))
    pipe.push(torch.randn(4, 6), torch.randn(4, 6))  # refused before anything was trained on it


class WeightNorm(nn.Module):
    """weight_norm, spectral_norm and the like, as users write them."""

    def __init__(self, wrap):
        super().__init__()
        self.linear = wrap(nn.Linear(6, 6))

    def forward(self, x):
        return self.linear(x)


class Rotated(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("turn", torch.randn(6, 6))

    def forward(self, x):
        return nn.functional.linear(x, self.weight @ self.turn, self.bias)


@pytest.mark.parametrize(
    "stage",
    [
        lambda: WeightNorm(nn.utils.parametrizations.spectral_norm),
        lambda: WeightNorm(nn.utils.parametrizations.orthogonal),
        Rotated,
    ],
    ids=["spectral norm", "orthogonal", "product"],
)
def test_functions_of_the_weights_would_be_stashed_silently(stage):
    torch.manual_seed(0)
    model = [nn.Linear(6, 6), stage(), nn.Linear(6, 6)]
    refused(r"stage 1 \(1\): its graph saves a function of the weights.*method=\"pipedream\"", model)
    build(model, "pipedream").push(torch.randn(4, 6), torch.randn(4, 6))
    build(model, "gpipe").push(torch.randn(4, 6), torch.randn(4, 6))  # no delay, no harm


def test_they_may_be_accepted_with_a_warning():
    model = [nn.Linear(6, 6), Rotated(), nn.Linear(6, 6)]
    with pytest.warns(UserWarning, match=r"stage 1 \(1\): its graph saves a function of the weights"):
        build(model, debug=pipeback.Debug(weight_functions="warn")).push(torch.randn(4, 6), torch.randn(4, 6))


def test_autocast_sees_new_weights_within_one_push():
    """Torch keeps cast weights by identity for as long as the context lasts; updates must not be lost on them."""
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    together, apart = build(network(), "sgd", micro_batch_size=2), build(network(), "sgd")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        together.push(x, y)
    for i in range(0, 8, 2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            apart.push(x[i : i + 2], y[i : i + 2])
    assert torch.equal(weights(together), weights(apart))


@pytest.mark.parametrize(
    "stage",
    [
        lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5)),
        lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()),
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1), nn.PReLU(6)),
        lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*takes its statistics", "ignore:.*enable_nested_tensor")
def test_ordinary_layers_are_not_suspected(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), stage(), nn.Linear(6, 6))
    nn.init.zeros_(model[2].weight)  # zeros hide nothing and accuse nobody
    build(model).push(torch.randn(8, 6), torch.randn(8, 6))


def test_losses():
    loss = lambda out, target: (out - target) ** 2  # noqa: E731
    pipe = pipeback.Pipeline(network(), loss=loss, optimizer=OPTIMIZERS["sgd"], method="pb")
    with pytest.raises(ValueError, match=r"loss must return a 0-d floating-point tensor.*shape \(4, 6\)"):
        pipe.push(torch.randn(4, 6), torch.randn(4, 6))


def test_losses_that_do_not_train():
    def pushed(loss):
        pipe = pipeback.Pipeline(network(), loss=loss, optimizer=OPTIMIZERS["sgd"], method="pb")
        pipe.push(torch.randn(4, 6), torch.randn(4, 6))

    with pytest.raises(ValueError, match=r"stage 4 \(4\): the loss does not depend on the output"):
        pushed(lambda out, target: out.detach().mean())

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out, target):
            return self.scale * nn.functional.mse_loss(out, target)

    with pytest.raises(ValueError, match="loss has weights of its own.*into the last stage"):
        pushed(Weighted())


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True),
        lambda model: nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()), model.parameters()
        ),
        lambda model: model.double(),
    ],
    ids=["assign", "vector", "double"],
)
def test_weights_that_were_moved_are_noticed(move):
    model = network()
    pipe = build(model)
    pipe.push(*data(1)[0])
    move(model)
    with pytest.raises(RuntimeError, match="stage 0.*was moved, cast or replaced.*in place, or build a new Pipeline"):
        pipe.push(*data(1)[0])


@pytest.mark.parametrize("size", [2, 4, None])
def test_a_weight_or_module_that_was_replaced_is_noticed_at_the_next_push(size):
    """However many micro-batches a push has: every weight is looked at."""
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    for key in ("weight", "bias"):
        model = network()
        pipe = build(model, micro_batch_size=size)
        pipe.push(x, y)
        setattr(model[2][0], key, nn.Parameter(getattr(model[2][0], key).detach().clone()))
        with pytest.raises(RuntimeError, match=f"stage 2.*{key} was moved, cast or replaced; copy values.*in place"):
            pipe.push(x, y)
    for replace in (lambda m: m[1].register_module("0", nn.Linear(6, 6)), lambda m: m.register_module("1", nn.ReLU())):
        model = network()
        pipe = build(model, micro_batch_size=size)
        pipe.push(x, y)
        replace(model)
        with pytest.raises(RuntimeError, match=r"module '1(.0)?' of the model was replaced.*build a new Pipeline"):
            pipe.push(x, y)
        build(model, micro_batch_size=size).push(x, y)


def test_a_loss_that_is_not_finite_is_raised_before_its_backward():
    model = network()
    pipe = build(model, debug=pipeback.Debug(check_finite=True))
    batches = data(12)
    for x, y in batches[:8]:
        pipe.push(x, y)
    before = weights(pipe)
    with pytest.raises(pipeback.StageError, match=r"stage 4 \(4\), micro-batch 8: the loss is nan.*clip_norm="):
        pipe.push(batches[8][0], batches[8][1] * float("nan"))
    assert torch.equal(before, torch.cat([p.detach().flatten().double() for p in model.parameters()]))
    assert torch.isfinite(pipe.push(*batches[9]))


def test_the_stage_that_overflowed_first_is_named():
    pipe = build(
        [nn.Linear(6, 6), Gives(lambda x: x * torch.inf), nn.Linear(6, 6), nn.Linear(6, 6)],
        debug=pipeback.Debug(check_finite=True),
    )
    with pytest.raises(pipeback.StageError, match=r"stage 1 \(1\), micro-batch 0: the output is not finite"):
        pipe.push(torch.randn(4, 6), torch.randn(4, 6))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("where", ["module", "weight", "gradient", "last"])
def test_hooks_that_are_added_to_stages_that_run_as_one(where):
    """No hook is passed over: they are refused there, and heard by the last stage, which is no part of it."""
    heard = []

    def hook(*given):
        heard.append(where)

    def add(model):
        if where == "module":
            model[1][1].register_forward_hook(hook)
        elif where == "weight":
            model[1][0].weight.register_hook(hook)
        elif where == "gradient":
            model[1][0].bias.register_post_accumulate_grad_hook(hook)
        else:
            model[4].register_forward_hook(hook)

    def push(pipe, count):
        for x, y in data(count, seed=3):
            pipe.push(x, y)
        pipe.wait()

    model = network()
    pipe = build(model, vectorize=True)
    push(pipe, 14)
    add(model)
    if where == "last":
        push(pipe, 10)
        assert len(heard) == 10
        return
    with pytest.raises(RuntimeError, match="stage 1.*runs as one.*register hooks before the first push, or .*=False"):
        push(pipe, 1)
    for options in ({}, {"vectorize": "auto"}):  # the cures
        model, heard[:] = network(), []
        add(model)
        pipe = build(model, **options)
        push(pipe, 10)
        pipe.drain()
        assert len(heard) >= 10
