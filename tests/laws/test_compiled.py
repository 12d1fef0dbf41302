"""Law: compiled stages train as uncompiled ones, to rounding; what they keep never makes B run on other weights."""

import shutil
from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from pipeback.stages import compiled, saved_graph
from pipeback.tensors import copies
from tests.helpers.choice import mostly_rare, rare
from tests.laws.cases import CASES, OPTIMIZERS, everything, network, pipeline

pytestmark = [
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a compiler"),
    pytest.mark.filterwarnings("ignore"),
]


class Product(nn.Module):
    """Cheap to compute again."""

    def __init__(self, width):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return torch.sin(x * self.w)


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()),
        nn.Sequential(nn.Linear(6, 6), Product(6)),
        nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 6)),
    ).double()


def images():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 6)),
    ).double()


def batches(model, count=10, samples=8):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    shape = (6,) if model is small else (2, 4, 4)
    return [(draw(samples, *shape), draw(samples, 6)) for _ in range(count)]


def trained(model, case, some, **options):
    torch.manual_seed(5)
    pipe = pipeline(model(), CASES[case](3), **options)
    losses = torch.stack([pipe.push(x, y).clone() for x, y in some])
    pipe.wait()
    found = losses, everything(pipe), pipe
    pipe.close()
    return found


FEW = ["pb", "cerebras", "pipedream_2bw", "gpipe-4", "pipemare", "lwp-horizon3"]


@pytest.mark.parametrize(
    ("model", "case"),
    [
        (small, "pb"), rare(images, "pb"), rare(images, "pipedream"), rare(images, "pipemare"),
        *[rare(small, case) for case in FEW if case != "pb"],
    ],
)  # fmt: skip
def test_losses_and_weights_equal_uncompiled_ones(case, model):
    some = batches(model)
    losses, _, plain = trained(model, case, some)
    found, _, pipe = trained(model, case, some, compile=True)
    torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-10)
    for a, b in zip(pipe._engine.model.state_dict().values(), plain._engine.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert list(pipe._engine.model.state_dict()) == list(model().state_dict())
    assert type(pipe._engine.model[0]) is nn.Sequential


def test_every_stage_is_compiled_and_compiled_in_the_rehearsal():
    with_delay = pipeline(small(), "pb", compile=True)
    x, y = batches(small, 1)[0]
    with_delay.plan(x, y)  # rehearses
    counts = torch._dynamo.utils.counters
    before = counts["aot_autograd"]["total"], counts["inductor"]["fxgraph_cache_hit"]
    with_delay.push(x, y)
    with_delay.push(x, y)
    assert (counts["aot_autograd"]["total"], counts["inductor"]["fxgraph_cache_hit"]) == before
    for stage in with_delay._engine.stages:
        _, given = stage.enter(torch.randn(8, 6, dtype=torch.float64).requires_grad_(stage.index > 0))
        kinds = {type(node).__name__ for node in saved_graph.nodes([stage.call(given)])}
        assert kinds == {"CompiledFunctionBackward", "AccumulateGrad"} - ({"AccumulateGrad"} - kinds)


def pairs(model, call, x):
    """Gradients of F on some weights and B on others, and the saved tensors that are no weight's memory."""
    weights = copies.storages(list(model.parameters()))
    old = [p.detach().clone() for p in model.parameters()]
    y = call(x)
    extra = [t for _, t, _ in saved_graph.saved([y]) if t.untyped_storage()._cdata not in weights]
    for n, p in enumerate(model.parameters()):
        p.data.add_(0.3 + 0.1 * n)
    found = torch.autograd.grad(y, list(model.parameters()), torch.cos(torch.arange(y.numel()).double()).view_as(y))
    for p, value in zip(model.parameters(), old, strict=True):
        p.data.copy_(value)
    return found, extra


@pytest.mark.parametrize(
    ("index", "kind"), [rare(0, "a copy of a convolution's weight"), (1, "a product computed again")]
)
def test_why_plain_torch_compile_will_not_do(index, kind):
    """What torch.compile does by itself, and that the options given to it mend it. If the first half fails, torch has
    changed, and compiled.py may do with less.
    """
    model, x = (images()[0], batches(images, 1)[0][0]) if index == 0 else (small()[1], batches(small, 1)[0][0])
    wanted, _ = pairs(model, model, x)
    plain, _ = pairs(model, torch.compile(model), x)
    mended, _ = pairs(model, torch.compile(model, **compiled.options(True, keep=True)), x)
    differ = [not torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in zip(plain, wanted, strict=True)]
    if kind.startswith("a copy"):
        _, extra = pairs(model, torch.compile(model), x)
        copies = [t for t in extra if t.shape == model[0].weight.shape]
        assert copies and torch.equal(copies[0], model[0].weight)
    else:
        assert any(differ)
    for a, b in zip(mended, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


REFUSED = r"stage 0 \(0\): its (compiled backward does not run|graph saves a function).*compile=True"


def plain_inductor(**more):
    """Options that undo what is given to torch.compile."""
    return {"options": {"layout_optimization": True, "custom_partitioner_fn": None, **more}}


@pytest.mark.parametrize(
    ("model", "case"),
    [(images, "pb"), (small, "pb"), *[rare(m, c) for m in (images, small) for c in ("cerebras", "pipemare")]],
)
def test_graphs_that_would_train_on_other_weights_are_refused(model, case):
    pipe = pipeline(model(), CASES[case](3), compile=plain_inductor())
    with pytest.raises(ValueError, match=REFUSED):
        pipe.push(*batches(model, 1)[0])


@pytest.mark.parametrize(
    ("model", "case"), mostly_rare(product((images, small), ("pipedream", "gpipe-4")), (small, "pipedream"))
)
def test_graphs_that_train_on_the_weights_of_the_forward_are_taken(model, case):
    some = batches(model)
    losses, _, _ = trained(model, case, some)
    found, _, _ = trained(model, case, some, compile=plain_inductor())
    torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("model", [rare(images), small])
def test_graphs_that_would_train_on_other_weights_are_warned_of(model):
    pipe = pipeline(model(), "pb", compile=plain_inductor(), debug=pipeback.Debug(weight_functions="warn"))
    with pytest.warns(UserWarning, match=REFUSED):
        pipe.push(*batches(model, 1)[0])


class Later(nn.Module):
    """Another graph for batches of three: one that is compiled long after the rehearsal."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(6).double())
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x):
        x = self.linear(x)
        return torch.sin(x * self.w) if x.shape[0] == 3 else x + self.w


def test_graphs_that_come_up_later_are_checked_too():
    model = nn.Sequential(Later(), nn.Linear(6, 6).double())
    pipe = pipeline(model, "pb", compile=plain_inductor())
    for x, y in batches(small, 3):
        pipe.push(x, y)
    x, y = batches(small, 1, samples=3)[0]
    with pytest.raises((pipeback.StageError, ValueError), match=r"stage 0 \(0\).*its compiled backward does not run"):
        for _ in range(3):
            pipe.push(x, y)


def test_sparse_gradients():
    some = [(torch.randint(0, 9, (4, 3)), y[:4]) for _, y in batches(small, 4)]

    def losses(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(18, 6)).double()
        pipe = pipeline(model, "pb", **options)
        return torch.stack([pipe.push(*each).detach() for each in some])

    torch.testing.assert_close(losses(compile=True), losses(), rtol=0, atol=1e-10)


def test_variable_shapes_and_hooks_that_come_later():
    some = batches(small, 4) + batches(small, 4, samples=5) + batches(small, 3, samples=7)
    found, _, _ = trained(small, "pb", some, compile=True)
    losses, _, _ = trained(small, "pb", some)
    torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-10)
    model, seen = small(), []
    pipe = pipeline(model, "gpipe", compile=True)
    x, y = some[0]
    pipe.push(x, y)
    handle = model[0][0].register_forward_hook(lambda *_: seen.append(1))
    pipe.push(x, y)
    handle.remove()
    pipe.push(x, y)
    assert seen == [1]


@pytest.mark.parametrize("case", ["pb", rare("pipedream"), rare("gpipe-4")])
@pytest.mark.parametrize(
    "options", [{"workers": 2}, {"store": "host"}, {"activations": "host"}, {"activations": "recompute"}], ids=str
)
def test_other_runtimes_with_random_layers(case, options):
    """Bit for bit where the same code runs; a recomputing stage of a flowing method is another training."""
    some = batches(small)
    if options.get("activations") == "recompute":
        found, wanted = trained(small, case, some, compile=True, **options), trained(small, case, some, **options)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-10, atol=1e-10)
        return
    wanted, found = trained(small, case, some, compile=True), trained(small, case, some, compile=True, **options)
    assert torch.equal(found[0], wanted[0])
    if "activations" not in options:
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)


@pytest.mark.parametrize("case", ["cerebras", rare("pb"), rare("pipedream"), rare("gpipe-4")])
def test_resume_in_flight(case):
    some = batches(small, 12)
    pipe, other = (pipeline(small(), CASES[case](3), compile=True) for _ in range(2))
    for x, y in some[:7]:
        pipe.push(x, y)
    other.load_state_dict(pipe.state_dict())
    for x, y in some[7:]:
        pipe.push(x, y), other.push(x, y)
    assert torch.equal(everything(pipe), everything(other))


def test_many_stages_of_one_class_are_all_compiled():
    """torch gives up after eight modules that share code."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, eps=10.0**-n)) for n in range(2, 12)])
    pipe = pipeline(model, "pb", compile={"backend": "aot_eager"})
    x = torch.randn(4, 6)
    pipe.push(x, x)
    for stage in pipe._engine.stages:
        leaf = torch.randn(4, 6).requires_grad_()
        assert type(stage.call(leaf).grad_fn).__name__ == "CompiledFunctionBackward"


@pytest.mark.parametrize(("build", "compile"), [(network, {"backend": "aot_eager"}), rare(small, True)])
def test_half_weights_with_masters(build, compile):
    model = build().to(torch.bfloat16)
    pipe = pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=OPTIMIZERS["momentum"], method="pb", masters=True, compile=compile
    )
    for x, y in batches(small, 5):
        assert pipe.push(x.bfloat16(), y.bfloat16()).isfinite()


@pytest.mark.parametrize("seed", [0, rare(1), rare(2)])
@pytest.mark.parametrize("dtype", [rare(torch.float32), torch.bfloat16])
def test_rounding_hides_nothing(dtype, seed):
    """What differs by rounding is taken, what differs by weights is not, in a type of eight bits too."""
    build = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), Product(16)) for _ in range(2)]).to(dtype)  # noqa: E731
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.manual_seed(seed)
    pipeline(build(), "pb", compile=True).push(x, x)
    with pytest.raises(ValueError, match=REFUSED):
        pipeline(build(), "pb", compile=plain_inductor()).push(x, x)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("yes", "compile must be True, False or a dict"),
        ({"fast": True}, "compile has no option 'fast'; torch.compile takes .*backend"),
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead' replays CUDA graphs.*max-autotune-no-cudagraphs"),
    ],
)
def test_bad_options(asked, says):
    with pytest.raises((TypeError, ValueError), match=says):
        pipeline(small(), "pb", compile=asked)
