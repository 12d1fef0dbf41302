"""What torch.compile has compiled trains as it was before: same bits, same names, one warning that names it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.laws.cases import network


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x):
        return self.second(self.first(x).relu())


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def itself():
    model = Own()
    model.compile(backend="aot_eager")
    return model


def inside():
    model = Own()
    model.first, model.second[0] = compiled(model.first), compiled(model.second[0])
    return model


def twice():
    """One compiled module under two names."""
    model = network(2)
    model.add_module("again", model[1])
    model[1] = model.again = compiled(model[1])
    return model


CASES = {
    "a model": (lambda: compiled(Own()), Own, "model"),
    "by its own compile()": (itself, Own, "model"),
    "submodules": (inside, Own, "model.first, model.second.0"),
    "a sequence": (lambda: compiled(network(3)), lambda: network(3), "model"),
    "children": (lambda: nn.Sequential(*map(compiled, network(3))), lambda: network(3), "model.0, model.1, model.2"),
    "a list": (lambda: [compiled(m) for m in network(3)], lambda: network(3), r"model\[0\], model\[1\], model\[2\]"),
}


def train(model):
    options = {"stages": "layer"} if not isinstance(model, list | nn.Sequential) else {}
    torch.manual_seed(1)
    batches = [(torch.randn(3, 6), torch.randn(3, 6)) for _ in range(5)]
    pipe = pipeback.Pipeline(
        model, loss=mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), method="pb",
        example=None if isinstance(model, list) else batches[0][0], **options,
    )  # fmt: skip
    for x, y in batches:
        pipe.push(x, y)
    pipe.drain()
    return pipe.model.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_before_it_was_compiled(case):
    make, plain, names = CASES[case]
    with pytest.warns(UserWarning, match=f"torch.compile has compiled {names}. The stages train.*compile=True") as said:
        found = train(make())
    assert len([w for w in said if "torch.compile" in str(w.message)]) == 1
    wanted = train(plain())
    assert list(found) == list(wanted) and all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_one_module_under_two_names_stays_one():
    from pipeback.splitting.uncompiled import uncompiled

    model = twice()
    with pytest.warns(UserWarning, match="model.1, model.again"):
        assert uncompiled(model) is model
    assert model.again is model[1] and isinstance(model[1], nn.Sequential | nn.Linear)


@pytest.mark.filterwarnings("ignore:torch.compile has compiled")
def test_the_compiled_model_has_the_trained_weights():
    """It is the same module: what the user kept shows what was trained."""
    model = Own()
    fast = compiled(model)
    before = fast(torch.ones(1, 6)).detach().clone()
    trained = train(fast)
    assert all(torch.equal(trained[k], v) for k, v in model.state_dict().items())
    assert not torch.equal(fast(torch.ones(1, 6)), before)


@torch.compile(backend="aot_eager")
def gated(x, weight):
    return torch.tanh(x) * weight


class Written(nn.Linear):
    """torch.compile has its forward, and calls a compiled function inside."""

    @torch.compile(backend="aot_eager")
    def forward(self, x):
        return gated(super().forward(x), self.bias)


class Between(nn.Module):
    """Calls a compiled function between its modules."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.weight = nn.ModuleList([kind(6, 6) for _ in range(3)]), nn.Parameter(torch.ones(6))

    def forward(self, x):
        for layer in self.layers:
            x = gated(layer(x), self.weight)
        return x


@pytest.mark.parametrize("kind", [nn.Linear, Written])
def test_compiled_functions(kind):
    """Difference 0 to plain training, whether they lie between modules or within them."""
    made, plain = Between(kind), Between(kind)
    some = [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(3)]
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    pipe = pipeback.Pipeline(
        made, loss=mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), method="sgd", stages="layer",
        example=some[0][0],
    )  # fmt: skip
    assert pipe.stages == 3
    for x, y in some:
        loss = mse_loss(plain(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        assert torch.equal(pipe.push(x, y), loss)
    assert all(map(torch.equal, made.parameters(), plain.parameters()))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("made", [lambda: nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.Linear(6, 6))), Own])
def test_modules_of_torch_jit_are_refused(made):
    model = made()
    if isinstance(model, Own):
        model.second = torch.jit.script(model.second)
    with pytest.raises(TypeError, match=r"model\.(1|second) was made by torch.jit.*give the module of which"):
        pipeback.Pipeline(
            model, loss=mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), method="sgd",
            example=torch.randn(2, 6),
        )  # fmt: skip
