"""Following a model where Python stands between tensors: operators, numbers of numpy, sizes that depend on values."""

import ast
import copy
import operator

import numpy as np
import pytest
import torch
from torch import nn

import pipeback
from pipeback.splitting.traced_model import TracedModel
from tests.splitting.plain_training import Model, equal_in_every_runtime, equals_plain_training, inputs, pipeline


def some(counts):
    """Inputs, and how many of their rows are meant."""
    return [(x, torch.tensor([1, n])) for x, n in zip(inputs(len(counts)), counts, strict=True)]


class Half(torch.autograd.Function):
    """Rows, and no gradient of the others."""

    @staticmethod
    def forward(ctx, h, rows):
        ctx.rows = rows
        return h[rows] + 0.0

    @staticmethod
    def backward(ctx, grad):
        found = grad.new_zeros(5, 4)
        found[ctx.rows] = grad
        return found, None


def test_a_slice_of_tensors_for_a_function_is_refused():
    model = Model(lambda model, h, n: Half.apply(h, slice(0, n.max())))
    with pytest.raises(ValueError, match="slice"):
        pipeline(model, some([2])[0])


def test_functions_without_gradient_are_told_apart_where_forms_look_alike():
    """Both have four rows behind the first stage, which only the function between tells apart."""

    def between(model, h, n):
        with torch.no_grad():
            factor = torch.relu(h) if len(n) == 2 else torch.tanh(h)
        return h * factor

    x, (more,) = inputs()[0], inputs(1)
    pipe = pipeline(Model(between), (x, torch.zeros(2)), stages=["b"])
    pipe.push((x, torch.zeros(2)), x), pipe.push((more, torch.zeros(3)), more)
    equals_plain_training(Model(between), [(x, torch.zeros(2)), (more, torch.zeros(3))], stages=["b"])


BOTH = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne")


@pytest.mark.parametrize("name", BOTH)
def test_operators_between_tensors_and_numbers(name):
    act = getattr(operator, name)

    def between(own, h):
        d = h.detach().abs() + 1
        return h + torch.tanh(act(d, 2) + act(2, d) + 0.5 * act(d, d))

    equals_plain_training(Model(between), inputs())


@pytest.mark.parametrize("name", ["neg", "pos", "abs", "invert"])
def test_operators_of_one_tensor(name):
    act = getattr(operator, name)
    between = lambda own, h: h + act(h > 0 if name == "invert" else h)  # noqa: E731
    equals_plain_training(Model(between), inputs())


@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv", "ipow"])
def test_operators_in_place(name):
    act = getattr(operator, name)
    equals_plain_training(Model(lambda own, h: act(h.clone(), 2)), inputs())


def test_products():
    equals_plain_training(Model(lambda own, h: torch.tanh((h @ h.T) @ h)), inputs())


@pytest.mark.parametrize("number", [np.sqrt(4), np.float32(1.5), np.int64(3), np.bool_(True), np.float64("inf")])
def test_numbers_of_numpy(number):
    equals_plain_training(Model(lambda own, h: h / (number + 1.0) + h.sum(np.int64(1), keepdim=True)), inputs())


# -- sizes that depend on values ---------------------------------------------------------------------------------


READ = {
    "len": len,
    "shape": lambda kept: kept.shape[0],
    "size": lambda kept: kept.size(0),
    "numel": lambda kept: kept.numel() // 4,
    "nbytes": lambda kept: kept.nbytes / 16,
    "stride": lambda kept: kept.T.contiguous().stride(0),
    "of what comes of it": lambda kept: (2 * kept).shape[0],
}


def kept_by(how):
    return lambda own, h, i: h[i > 0].sum(0) / how(h[i > 0]) + h


@pytest.mark.parametrize("how", READ)
def test_a_size_that_python_reads_is_never_the_first_micro_batchs(how):
    same = [(x, torch.tensor([1, 1, 0, 0, 1])) for x in inputs()]
    equals_plain_training(Model(kept_by(READ[how])), same)
    pipe = pipeline(Model(kept_by(READ[how])), same[0])
    pipe.push(same[0], torch.zeros(5, 4))
    other = (same[1][0], torch.tensor([1, 0, 0, 0, 0]))
    with pytest.raises(pipeback.StageError, match=r"stage \d.*sizes gave \[[14], [14]\], but \[[34], [34]\] when"):
        pipe.push(other, torch.zeros(5, 4))


class Kept(nn.Module):
    def forward(self, h, i):
        return kept_by(len)(self, h, i)


def test_the_deciding_module_as_a_leaf_is_the_cure():
    def between(own, h, i):
        return own.kept(h, i)

    model = Model(between)
    model.kept = Kept()
    batches = [(x, (torch.arange(5) <= n).long()) for n, x in enumerate(inputs())]
    equals_plain_training(model, batches, stages=pipeback.Splitting(leaves=["kept"]))


def test_sizes_that_nobody_reads_may_change():
    def between(own, h, i):
        kept = h[i > 0]
        return torch.zeros_like(h).index_add(0, (i > 0).nonzero().flatten(), 2 * kept) + h

    batches = [(x, (torch.arange(5) <= n).long()) for n, x in enumerate(inputs())]
    equals_plain_training(Model(between), batches)


# -- what a forward does to its modules and inputs ---------------------------------------------------------------


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, h):
        self.width = h.shape[1]
        return self.layer(h) / self.width


def test_a_number_that_a_forward_leaves_is_that_of_each_form():
    model = Model(lambda own, h: own.inner(h))
    model.inner = Remembers()
    equals_plain_training(model, inputs())
    equals_plain_training(model, inputs(), stages=pipeback.Splitting(leaves=["inner"]))


def test_what_is_installed_at_the_first_call_is_installed():
    def between(own, h):
        if not getattr(own, "installed", False):
            own.installed = True
            own.b.register_forward_hook(lambda module, given, output: 2 * output)
        return h

    equals_plain_training(Model(between), inputs())


class Adds(nn.Module):
    """Adds its weight to what it is given, in place; to a part of it only, where that is asked for."""

    def __init__(self, part):
        super().__init__()
        self.weight, self.part = nn.Parameter(torch.ones(4)), part

    def forward(self, x):
        (x[:2] if self.part else x).add_(self.weight)
        return x


class Embedded(nn.Module):
    """What enters the second stage is changed in place there."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Embedding(9, 4), Adds(part), nn.Linear(4, 4)

    def forward(self, i):
        return self.c(self.b(self.a(i)))


@pytest.mark.parametrize("part", [False, True])
def test_what_enters_a_stage_may_be_changed_in_place(part):
    batches = [torch.arange(5) + n for n in range(4)]
    assert equals_plain_training(Embedded(part), batches).stages == 3
    equal_in_every_runtime(lambda: Embedded(part), batches)


class Table(nn.Module):
    """Puts another buffer in the place of its own when it is first called."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(1, 4))

    def forward(self, x):
        if len(self.table) != len(x):
            self.table = torch.arange(len(x) * 4.0).view(-1, 4) / 100
        return self.layer(x) + self.table


def test_the_cure_for_several_modules_names_them_all():
    model = Model(lambda own, h: own.second(own.first(h)))
    model.first, model.second = Table(), Table()
    with pytest.raises(
        ValueError, match=r"changes self.table .* keep the modules whole: stages=pipeback.Splitting.leaves="
    ) as told:
        pipeline(model, inputs()[0])
    leaves = ast.literal_eval(str(told.value).partition("leaves=")[2].removesuffix(")"))
    assert leaves == ["first", "second"]
    equals_plain_training(model, inputs(), stages=pipeback.Splitting(leaves=leaves))


class Penalised(nn.Module):
    """Gives the gradient of what it computes, as a potential's forces are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = torch.tanh(self.b(torch.tanh(self.a(x)))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_forward_that_goes_back_through_stages_is_refused_with_a_cure_that_works():
    with pytest.raises(ValueError, match=r"stage \d cannot do what the forward does there.*leaves="):
        pipeline(Penalised(), inputs()[0])
    model = Model(lambda own, h: own.inner(h))
    model.inner = Penalised()
    equals_plain_training(model, inputs(), stages=pipeback.Splitting(leaves=["inner"]))


class Auxiliary(Model):
    """Its middle stage is a head that is called in training only."""

    def forward(self, x):
        h = self.a(x)
        more = self.c(h) if self.training else 0
        return more + self.b(h)


def test_heads_that_are_called_in_training_only():
    model = Auxiliary(None)
    model.c = nn.Linear(4, 4)
    pipe = equals_plain_training(model, inputs())
    assert pipe.stages == 3
    found = pipe.evaluate(inputs()[0])
    assert torch.equal(found, copy.deepcopy(pipe.model).eval()(inputs()[0]))
    pipe.push(inputs()[0], inputs()[0])


@pytest.mark.parametrize("quiet", [False, True])
def test_what_is_evaluated_first_may_be_trained_on_later(quiet):
    """In evaluation mode, whose way through the model was found out where there were no gradients."""

    def between(model, h):
        if not quiet:
            return h * 2 + torch.relu(h)
        with torch.no_grad():
            return h * 2

    model, x = Model(between), inputs()[0]
    plain = copy.deepcopy(model).eval()
    pipe = pipeline(model, x)
    assert torch.equal(pipe.evaluate(x), plain(x))
    pipe.model.eval()
    pipe.push(x, torch.zeros(5, 4))
    nn.functional.mse_loss(plain(x), torch.zeros(5, 4)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for found, wanted in zip(pipe.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)


# -- how a model is while it is followed, and when it is cut ------------------------------------------------------


class Looks(nn.Module):
    """Looks at what its classes are while it is followed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.seen = []

    def forward(self, x):
        self.seen.append(dict(vars(nn.Module)))
        return self.layers[1](self.layers[0](x))


def test_following_changes_the_classes_of_a_model_alone_and_leaves_them_as_they_were():
    before = {kind: dict(vars(kind)) for kind in (nn.Module, Looks, nn.Linear)}
    model = Looks()
    TracedModel(model, torch.randn(2, 3), "layer")
    assert {kind: dict(vars(kind)) for kind in before} == before
    # Python goes through the hundreds of subclasses of nn.Module when a slot of it is changed
    assert len(model.seen) > 1 and all(seen == before[nn.Module] for seen in model.seen)


class Attends(nn.Module):
    """One attention, used twice, beside a parameter of the model's own; it drops out in training alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.between, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        for layer in (self.between, self.last):
            x = layer(self.attention(x, x, x, need_weights=False)[0] * self.scale)
        return x if self.training else 2 * x


@pytest.mark.parametrize("stages", ["layer", "sublayer", ["between"]], ids=str)
def test_a_model_may_be_in_evaluation_when_it_is_cut(stages):
    model, plain = Attends(), Attends()
    batches = [torch.randn(3, 5, 4) for _ in range(3)]
    model.eval()
    pipe = pipeline(model, batches[0], stages=stages)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for mode in (False, True, False, True):
        model.train(mode)
        plain.train(mode)
        for x in batches:
            loss = nn.functional.mse_loss(plain(x), x)
            assert torch.equal(pipe.push(x, x), loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert torch.equal(pipe.evaluate(batches[0]), plain.eval()(batches[0]))
