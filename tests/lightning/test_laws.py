"""Laws: fit without delay is plain Lightning, fit with any method is Pipeline.push, bit for bit."""

import warnings
from collections import UserDict
from itertools import product

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import pipeback
from pipeback import methods
from pipeback.lightning import micro_batches
from tests.helpers.choice import diagonal, mostly_rare
from tests.laws.cases import CASES, FEW, OPTIMIZERS, STAGES, allowed, network, usual
from tests.lightning.cases import Regression, loader, strategy, trainer, weights


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["sgd", "gpipe", "one_f_one_b"])
def test_no_delay_is_plain_lightning(method, optimizer):
    plain, ours = Regression(optimizer=optimizer), Regression(optimizer=optimizer)
    trainer().fit(plain, loader())
    trainer(strategy(method)).fit(ours, loader())
    assert torch.equal(torch.stack(plain.losses), torch.stack(ours.losses))
    assert torch.equal(weights(plain), weights(ours))


SCHEDULERS = {
    "by epoch": lambda o: StepLR(o, 1, 0.5),
    "by step": lambda o: {"scheduler": OneCycleLR(o, 0.05, total_steps=24), "interval": "step"},
    "every second step": lambda o: {"scheduler": StepLR(o, 2, 0.7), "interval": "step", "frequency": 2},
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_schedulers_without_delay(scheduler, optimizer, recwarn):
    found = [Regression(optimizer=optimizer, scheduler=SCHEDULERS[scheduler]) for _ in range(2)]
    for module, where in zip(found, (None, strategy("sgd")), strict=True):
        trainer(where).fit(module, loader())
    assert torch.equal(weights(found[0]), weights(found[1]))
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


@pytest.mark.parametrize("case", mostly_rare(CASES, *FEW))
def test_every_method_is_push(case):
    batches = list(loader())
    method = CASES[case](STAGES)
    pipe = pipeback.Pipeline(network(), loss=mse_loss, optimizer=OPTIMIZERS[usual(method)], method=method)
    losses = [pipe.push(x, y) for _ in range(2) for x, y in batches]
    pipe.drain()
    module = Regression(optimizer=usual(method))
    trainer(strategy(CASES[case](STAGES))).fit(module, loader())
    assert torch.equal(torch.stack(losses), torch.stack(module.losses))
    for a, b in zip(pipe.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(a, b)


SLICED = [case for case in CASES if allowed(case, "adam")]


@pytest.mark.parametrize(
    ("case", "size"),
    mostly_rare(
        product(SLICED, (1, 2, 3, 5)),
        ("gpipe", 2),
        ("gpipe-4", 3),
        ("one_f_one_b", 3),
        ("one_f_one_b-3", 1),
        ("pb", 2),
        ("pipedream", 5),
        ("pipedream_2bw", 1),
        ("pipemare-t3", 2),
        ("lwp-weight", 3),
    ),
)
def test_every_method_is_push_on_slices(case, size):
    """micro_batch_size=n: the same cuts, the short ones and the methods that flush with the batch included."""
    batches = list(loader(samples=5))
    pipe = pipeback.Pipeline(
        network(), loss=mse_loss, optimizer=OPTIMIZERS["adam"], method=CASES[case](STAGES), micro_batch_size=size
    )
    for x, y in batches + batches:
        pipe.push(x, y)
    pipe.drain()
    module = Regression(optimizer="adam")
    trainer(strategy(CASES[case](STAGES), micro_batch_size=size)).fit(module, loader(samples=5))
    for a, b in zip(pipe.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_rates_reach_slices_as_in_push():
    def cycle(opt):
        return OneCycleLR(opt, 0.05, total_steps=24)

    batches = list(loader(samples=4))
    pipe = pipeback.Pipeline(
        network(), loss=mse_loss, optimizer=OPTIMIZERS["momentum"], method="cerebras", micro_batch_size=1
    )
    schedulers = [cycle(opt) for opt in pipe.optimizers]
    for x, y in batches + batches:
        pipe.push(x, y)
        for scheduler in schedulers:
            scheduler.step()
    pipe.drain()
    module = Regression(scheduler=lambda o: {"scheduler": cycle(o), "interval": "step"})
    trainer(strategy("cerebras", micro_batch_size=1)).fit(module, loader(samples=4))
    for a, b in zip(pipe.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("accumulate", "size"), [(2, None), (4, None), (3, None), (5, None), (2, 2), (5, 1)])
@pytest.mark.parametrize("method", ["gpipe", "one_f_one_b"])
def test_accumulation_flushes_with_the_optimizer_step(method, accumulate, size):
    """Twelve batches an epoch: with 5, the last flush of an epoch is short."""
    batches = list(loader(samples=4))
    pipe = pipeback.Pipeline(
        network(), loss=mse_loss, optimizer=OPTIMIZERS["momentum"], method=method, micro_batch_size=size or 4
    )
    for _ in range(2):
        for n in range(0, 12, accumulate):
            x, y = (torch.cat(part) for part in zip(*batches[n : n + accumulate], strict=True))
            pipe.push(x, y)
    module = Regression()
    trainer(strategy(method, micro_batch_size=size), accumulate_grad_batches=accumulate).fit(module, loader(samples=4))
    for a, b in zip(pipe.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("size", [None, 2])
def test_who_clears_gradients_in_place_loses_no_sums(size):
    """Lightning clears them after training_step, in which all slices but the last have gone backward."""

    class Clears(Regression):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    found = [Regression(), Clears()]
    for module in found:
        trainer(strategy("one_f_one_b", micro_batch_size=size), accumulate_grad_batches=3).fit(
            module, loader(samples=4)
        )
    assert torch.equal(weights(found[0]), weights(found[1]))


def test_accumulation_of_a_power_of_two_is_plain_lightnings():
    """Lightning divides each loss, the pipeline the sum: the same bits where the division is exact."""
    plain, ours = Regression(), Regression()
    trainer(accumulate_grad_batches=4).fit(plain, loader())
    trainer(strategy("gpipe"), accumulate_grad_batches=4).fit(ours, loader())
    assert torch.equal(weights(plain), weights(ours))


@pytest.mark.parametrize(("name", "size"), [("pipedream_2bw", None), ("pipedream_2bw", 2), ("pipemare", None)])
def test_accumulation_sets_the_interval_of_methods_that_count(name, size):
    options = {"anneal": 10} if name == "pipemare" else {}
    micro_batches = 6 if size is None else 12
    method = methods.create(name, micro_batches=micro_batches, **options)
    batches = list(loader(samples=4))
    pipe = pipeback.Pipeline(
        network(), loss=mse_loss, optimizer=OPTIMIZERS["momentum"], method=method, micro_batch_size=size
    )
    for x, y in batches + batches:
        pipe.push(x, y)
    pipe.drain()
    module = Regression()
    given = method if options else name  # by name, the interval is Lightning's alone
    trainer(strategy(given, micro_batch_size=size), accumulate_grad_batches=6).fit(module, loader(samples=4))
    for a, b in zip(pipe.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("size", [None, 1])
def test_clipping_is_a_stages_own(algorithm, size):
    batches = list(loader())
    pipe = pipeback.Pipeline(
        network(), loss=mse_loss, optimizer=OPTIMIZERS["momentum"], method="pb", micro_batch_size=size,
        clip_norm=pipeback.Clipping(**{algorithm: 0.01}),
    )  # fmt: skip
    for x, y in batches + batches:
        pipe.push(x, y)
    pipe.drain()
    module = Regression()
    trainer(strategy(micro_batch_size=size), gradient_clip_val=0.01, gradient_clip_algorithm=algorithm).fit(
        module, loader()
    )
    for a, b in zip(pipe.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_clipping_one_stage_is_plain_lightnings():
    found = [Regression(nn.Sequential(network())) for _ in range(2)]
    for module, where in zip(found, (None, strategy("pb")), strict=True):
        trainer(where, gradient_clip_val=0.05, gradient_clip_algorithm="value").fit(module, loader())
    assert torch.equal(weights(found[0]), weights(found[1]))


def test_groups_and_their_rates():
    class Grouped(Regression):
        def configure_optimizers(self):
            first, rest = self.model[0].parameters(), self.model[1:].parameters()
            biases = [p for p in rest if p.dim() == 1]
            others = [p for m in self.model[1:] for p in m.parameters() if p.dim() > 1]
            groups = [{"params": others}, {"params": list(first), "lr": 0.001}, {"params": biases, "weight_decay": 0.0}]
            return torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=1e-2)

    plain, ours = Grouped(), Grouped()
    trainer().fit(plain, loader())
    trainer(strategy("sgd")).fit(ours, loader())
    assert torch.equal(weights(plain), weights(ours))


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_precision_without_delay_is_plain_lightnings(precision):
    plain, ours = Regression(), Regression()
    trainer(precision=precision).fit(plain, loader())
    trainer(strategy("sgd"), precision=precision).fit(ours, loader())
    assert torch.equal(weights(plain), weights(ours))


def test_bf16_true_with_delay_is_push():
    batches = list(loader())
    pipe = pipeback.Pipeline(network().bfloat16(), loss=mse_loss, optimizer=OPTIMIZERS["momentum"], method="pb")
    for x, y in batches + batches:
        pipe.push(x.bfloat16(), y.bfloat16())
    pipe.drain()
    module = Regression()
    trainer(strategy("pb"), precision="bf16-true").fit(module, loader())
    for a, b in zip(pipe.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("method", "followed"), diagonal(["pb", "cerebras", "pipemare", "pipedream"], [False, True]))
def test_mixed_precision_is_push_under_autocast(method, followed):
    """A backward casts the weights that are in force then, under Lightning as under `push`."""
    how = methods.create(method, anneal=9) if method == "pipemare" else method
    batches, module = list(loader()), Regression()
    module.model = Called(network()) if followed else network()
    pipe = pipeback.Pipeline(
        Called(network()) if followed else network(), loss=mse_loss, optimizer=OPTIMIZERS["momentum"], method=how,
        stages="layer" if followed else "auto", example=batches[0][0] if followed else None,
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        for x, y in batches + batches:
            pipe.push(x, y)
    pipe.drain()
    stages = {"stages": "layer"} if followed else {}
    trainer(pipeback.lightning.PipelineStrategy(method=how, **stages), precision="bf16-mixed").fit(module, loader())
    assert module.losses[-1].dtype == torch.float32 and len(pipe.delays) > 2
    for a, b in zip(pipe.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(a, b)


class Called(nn.Module):
    """A network whose forward is its own."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        for module in self.body:
            x = module(x)
        return x


def test_without_a_method_the_optimizer_decides():
    found, wanted = Regression(optimizer="adam"), Regression(optimizer="adam")
    with pytest.warns(UserWarning, match='method="pipedream" is taken.*the optimizer is Adam'):
        trainer(pipeback.lightning.PipelineStrategy()).fit(found, loader())
    trainer(strategy("pipedream")).fit(wanted, loader())
    assert torch.equal(weights(found), weights(wanted))


def test_pipemare_by_its_name_knows_the_length_of_the_training():
    found, wanted = Regression(), Regression()
    run = trainer(strategy("pipemare"), max_epochs=3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.fit(found, loader())
    assert not [w for w in said if "anneal" in str(w.message)]
    anneal = 3 * len(loader()) // 4
    assert run.strategy.pipeline.method.anneal == anneal
    trainer(strategy(methods.create("pipemare", anneal=anneal)), max_epochs=3).fit(wanted, loader())
    assert torch.equal(weights(found), weights(wanted))


def test_the_name_is_registered():
    found = pl.Trainer(strategy="pipeback", accelerator="cpu", logger=False, enable_checkpointing=False)
    assert isinstance(found.strategy, pipeback.lightning.PipelineStrategy)
    assert found.strategy.options.method is None


def test_batches_of_tokenizers_are_cut():
    class Encoding(UserDict):
        """What tokenizers of transformers give."""

        @property
        def x(self):
            return self.data["x"]

    (one, samples), (two, rest) = micro_batches.cut(
        Encoding(x=torch.arange(5), names=["a", "b", "c", "d", "e"], kind="k"), 3
    )
    assert (samples, rest) == (3, 2) and isinstance(one, Encoding)
    assert one.x.tolist() == [0, 1, 2] and two.x.tolist() == [3, 4]
    assert two["names"] == ["d", "e"] and two["kind"] == "k"


def test_the_mean_of_what_is_logged_has_the_bits_of_float64():
    values = [torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(1 / 7, dtype=torch.float64)]
    assert micro_batches.mean(values, [1, 3]).item() == pytest.approx(1 / 12 + 3 / 28, rel=1e-15)
    assert micro_batches.mean([v.bfloat16() for v in values], [1, 3]).dtype == torch.float32
    rows = [v.expand(2) for v in values]
    assert micro_batches.mean(rows, [1, 3]).tolist() == pytest.approx([1 / 12 + 3 / 28] * 2, rel=1e-15)


class Slow(torch.optim.SGD):
    """Steps weights that have no gradient, too: every third step goes half of the way from where they were."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            state["n"] = state.get("n", 0) + 1
            slow = state.setdefault("slow", p.clone())
            if state["n"] % 3 == 0:
                slow.lerp_(p, 0.5)
                p.copy_(slow)
        return loss


class OfSlow(Regression):
    def configure_optimizers(self):
        return Slow(self.parameters(), lr=0.05)


@pytest.mark.parametrize("store", [None, "host"])
def test_an_optimizer_that_steps_weights_without_gradients(store):
    """The user's own optimizer steps none of them."""
    found, wanted = OfSlow(), OfSlow()
    trainer(strategy("sgd", store=store)).fit(found, loader())
    trainer().fit(wanted, loader())
    assert torch.equal(weights(found), weights(wanted))


def test_hooks_of_a_step_see_the_weights():
    class Heard(Regression):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            made.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["params"]))
            made.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["params"]))
            return made

    seen, module = [], Heard()
    trainer(strategy("pb"), max_epochs=1).fit(module, loader(4))
    assert len(seen) == 2 * 4
    assert all(list(map(id, ps)) == list(map(id, module.parameters())) for ps in seen)


class Looking(Regression):
    """Looks at what its model gives, before and after it trains it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.look(batch)
        loss = super().training_step(batch, batch_idx)
        self.look(batch)
        return loss

    @torch.no_grad()
    def look(self, batch):
        self.seen.append(self.model(batch[0]))


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"store": "host"}, {"module": "self"}], ids=str)
@pytest.mark.parametrize("method", ["sgd", "pb"])
def test_slices_look_at_the_weights_that_batches_of_one_would_have(method, options):
    wanted, found = Looking(), Looking()
    trainer(None if method == "sgd" else strategy(method)).fit(wanted, loader(batches=12, samples=1))
    trainer(strategy(method, micro_batch_size=1, **options)).fit(found, loader(batches=4))
    assert torch.equal(torch.stack(wanted.losses), torch.stack(found.losses))
    assert torch.equal(torch.stack(wanted.seen), torch.stack(found.seen))
