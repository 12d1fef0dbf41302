"""The public face: push, wait, drain, evaluate, optimizers, delays, model; what simply works; lazy losses."""

import gc
import threading
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import OPTIMIZERS, data, network, pipeline, weights


def test_push_gives_the_mean_loss_of_what_was_pushed():
    x, y = torch.randn(7, 6), torch.randn(7, 6)
    pipe, model = pipeline(network(), "gpipe", micro_batch_size=3), network()
    losses = torch.stack([nn.functional.mse_loss(model(x[i : i + 3]), y[i : i + 3]) for i in (0, 3, 6)])
    loss = pipe.push(x, y)
    assert loss.shape == () and not loss.requires_grad and type(loss) is torch.Tensor
    assert torch.equal(loss, losses.mean())


def test_micro_batches_of_a_push_are_those_of_single_pushes():
    x, y = torch.randn(9, 6), torch.randn(9, 6)
    together, apart = pipeline(network(), "cerebras", micro_batch_size=1), pipeline(network(), "cerebras")
    together.push(x, y)
    for i in range(9):
        apart.push(x[i : i + 1], y[i : i + 1])
    assert torch.equal(weights(together), weights(apart))


def test_quiesce_is_not_drain():
    pipe = pipeline(network(), "pb")
    for x, y in data(12):
        pipe.push(x, y)
    pipe.wait()
    assert [len(stage.flights) for stage in pipe._stages] == pipe.delays
    before = weights(pipe)
    pipe.evaluate(torch.randn(2, 6))
    assert torch.equal(before, weights(pipe))
    pipe.drain()
    assert [len(stage.flights) for stage in pipe._stages] == [0] * 5
    assert not torch.equal(before, weights(pipe))
    after = weights(pipe)
    pipe.drain()  # again: nothing is in flight
    assert torch.equal(after, weights(pipe))
    pipe.push(*data(1)[0])


def test_evaluate_is_the_model_in_evaluation_mode_and_leaves_no_trace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)), nn.Linear(6, 3))
    model[1][0].eval()  # frozen statistics stay frozen
    pipe = pipeback.Pipeline(model, loss=nn.functional.cross_entropy, optimizer=OPTIMIZERS["momentum"], method="pb")
    pipe.push(torch.randn(20, 6), torch.randint(0, 3, (20,)))
    x, generator = torch.randn(5, 6), torch.get_rng_state()
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    found = pipe.evaluate(x)
    assert not found.requires_grad
    assert [m.training for m in (model, model[1], model[1][0], model[1][1])] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(buffers[k], v) for k, v in model.named_buffers())
    assert torch.equal(found, model.eval()(x))


def test_the_users_modules_are_trained_in_place():
    model = network()
    parameters = list(model.parameters())
    pipe = pipeline(model, "pb")
    for x, y in data(20):
        pipe.push(x, y)
    assert pipe.model is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not torch.equal(parameters[0], next(network().parameters()))
    listed = pipeline(list(network()), "pb")
    assert isinstance(listed.model, nn.Sequential) and len(listed.model) == 5


def test_rates_are_those_of_the_moment_of_the_push():
    """With the rate set to 0 after push i, updates of later micro-batches stand still; those of earlier ones do not."""
    pipe, batches = pipeline(network(), "pb", "sgd"), data(30)
    for x, y in batches[:12]:
        pipe.push(x, y)
    for opt in pipe.optimizers:
        opt.param_groups[0]["lr"] = 0.0
    moving = [weights(pipe)]
    for x, y in batches[12:]:
        pipe.push(x, y)
        moving.append(weights(pipe))
    moved = [not torch.equal(a, b) for a, b in pairwise(moving)]
    assert moved == [True] * 8 + [False] * 10  # stage 0 is 8 updates late
    assert all(opt.param_groups[0]["lr"] == 0.0 for opt in pipe.optimizers)


def test_schedulers_attach_to_every_stage():
    import warnings

    model = nn.Sequential(nn.Linear(6, 6), nn.Flatten(), nn.Linear(6, 6))
    pipe = pipeline(model, "cerebras")
    assert len(pipe.optimizers) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plans = [
            torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=12, cycle_momentum=False)
            for opt in pipe.optimizers
        ]
        for x, y in data(11):
            pipe.push(x, y)
            for plan in plans:
                plan.step()


def test_parameter_groups():
    def build(params):
        decayed = [p for p in params if p.dim() > 1]
        plain = [p for p in params if p.dim() <= 1]
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": plain}], lr=0.02, momentum=0.9)

    model = network()
    opt = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ],
        lr=0.02,
        momentum=0.9,
    )
    for method in ("sgd", "pb", "cerebras"):
        pipe = pipeback.Pipeline(network(), loss=nn.functional.mse_loss, optimizer=build, method=method)
        for x, y in data(15):
            pipe.push(x, y)
            if method == "sgd":
                nn.functional.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
        if method == "sgd":
            assert torch.equal(weights(pipe), torch.cat([p.detach().flatten().double() for p in model.parameters()]))


def test_stages_without_weights_frozen_ones_and_unused_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 6))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model[4].register_parameter("unused", nn.Parameter(torch.ones(3)))
    frozen = model[0].weight.clone(), model[2].bias.clone(), model[4].unused.clone()
    for method in pipeback.methods.available():
        options = {"pipemare": {"anneal": 5}, "pipedream_2bw": {"micro_batches": 6}}.get(method, {})
        pipe = pipeline(model, pipeback.methods.create(method, **options))
        before = weights(pipe)
        for x, y in data(14):
            pipe.push(x, y)
        pipe.drain()
        assert not torch.equal(before, weights(pipe))
        for a, b in zip(frozen, (model[0].weight, model[2].bias, model[4].unused), strict=True):
            assert torch.equal(a, b)


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x)), x, torch.arange(len(x))


class Merge(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, parts):
        y, x, order = parts
        return self.linear(y)[order] + x


def test_tuples_across_stages_and_integers_in_them():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), Fork(), Merge(), nn.Linear(6, 6))
    import copy

    plain = copy.deepcopy(model)
    opt = OPTIMIZERS["momentum"](plain.parameters())
    pipe = pipeline(model, "sgd")
    for x, y in data(10):
        pipe.push(x, y)
        nn.functional.mse_loss(plain(x), y).backward()
        opt.step()
        opt.zero_grad()
    assert torch.equal(weights(pipe), torch.cat([p.detach().flatten().double() for p in plain.parameters()]))


def test_tuples_as_input_and_as_target():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, pair):
            return self.linear(pair[0]) * pair[1]

    def loss(out, target):
        return nn.functional.mse_loss(out * target[1], target[0])

    pipe = pipeback.Pipeline(
        [First(), nn.Linear(6, 6)], loss=loss, optimizer=OPTIMIZERS["momentum"], method="pb", micro_batch_size=2
    )
    value = pipe.push((torch.randn(5, 6), torch.rand(5, 1)), (torch.randn(5, 6), torch.ones(5, 1)))
    assert torch.isfinite(value)


def test_modules_that_change_their_input_in_place():
    torch.manual_seed(0)
    parts = lambda inplace: nn.Sequential(  # noqa: E731
        nn.Linear(6, 6), nn.ReLU(inplace=inplace), nn.Linear(6, 6), nn.ReLU(inplace=inplace), nn.Linear(6, 6)
    )
    careful, hasty = parts(False), parts(True)
    hasty.load_state_dict(careful.state_dict())
    for method in ("pb", "cerebras"):
        a, b = pipeline(careful, method), pipeline(hasty, method)
        for x, y in data(15):
            assert torch.equal(a.push(x, y), b.push(x, y))
        assert torch.equal(weights(a), weights(b))


@pytest.mark.parametrize("method", ["pb", "cerebras"])
def test_a_gradient_sent_upstream_is_not_changed_by_clipping(method):
    """y = x + b: the gradients of b and of x are one tensor; clipping b must leave x's alone."""

    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3, 6))

        def forward(self, x):
            return x + self.bias

    clipped, free = (
        pipeline([nn.Linear(6, 6), Bias(), nn.Linear(6, 6)], method, "momentum", clip_norm=c) for c in (1e-6, None)
    )
    clipped._stages[0].module.load_state_dict(free._stages[0].module.state_dict())
    clipped._stages[2].module.load_state_dict(free._stages[2].module.state_dict())
    x, y = data(1)[0]
    for pipe in (clipped, free):
        pipe.push(x, y)
    messages = [pipe._runtime.loop.waiting()["B", 1, 0] for pipe in (clipped, free)]
    assert torch.equal(*messages)


def test_clipping_is_per_stage():
    pipe = pipeline(network(), "gpipe", "sgd", clip_norm=1e-3)
    before = [torch.cat([w.detach().flatten().clone() for w in stage.weights]) for stage in pipe._stages]
    pipe.push(*data(1)[0])
    for stage, old in zip(pipe._stages, before, strict=True):
        moved = torch.cat([w.detach().flatten() for w in stage.weights]) - old
        assert moved.norm() == pytest.approx(0.05 * 1e-3, rel=2e-2)  # rate 0.05, norm cut to 1e-3 in every stage


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(6, 6), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)


def test_lazy_losses():
    pipe = pipeline([nn.Linear(6, 6), Slow(0.05), nn.Linear(6, 6)], "pb", workers=2)
    pipe.push(*data(1)[0])  # the rehearsal is behind us
    x, y = data(2)[1]
    begin = time.perf_counter()
    losses = [pipe.push(x, y) for _ in range(4)]
    sent = time.perf_counter() - begin
    assert isinstance(losses[0], torch.Tensor) and losses[0].shape == ()
    values = [float(loss) for loss in losses]
    read = time.perf_counter() - begin
    assert sent < read / 2  # push did not wait for the forwards, reading did
    assert values == [loss.item() for loss in losses]
    assert float(sum(losses)) == pytest.approx(sum(values))
    assert torch.stack(losses).tolist() == values
    assert f"{losses[0]:.4f}" == f"{values[0]:.4f}" and str(values[0])[:6] in repr(losses[0])
    assert (losses[0] + 1).item() == pytest.approx(values[0] + 1)
    assert losses[0] == losses[0] and bool(losses[0] < values[0] + 1)
    assert losses[0].dtype == torch.float32 and losses[0].detach().numpy().shape == ()
    assert type(losses[0] * 2) is torch.Tensor
    pipe.close()


def test_threads_stop_with_their_pipeline():
    before = threading.active_count()
    pipe = pipeline(network(), "pb", workers=3)
    for x, y in data(5):
        pipe.push(x, y)
    assert threading.active_count() == before + 3
    del pipe
    gc.collect()
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.05)
    assert threading.active_count() == before


def test_a_failed_worker_fails_the_losses_that_wait():
    class Bomb(nn.Module):
        def forward(self, x):
            if bool((x > 1e6).any()):
                raise RuntimeError("bang")
            return x

    pipe = pipeline([nn.Linear(6, 6), nn.Identity(), Bomb(), nn.Linear(6, 6)], "pb", workers=2)
    pipe.push(*data(1)[0])
    loss = pipe.push(torch.full((3, 6), 1e9), torch.zeros(3, 6))
    with pytest.raises(pipeback.StageError, match=r"stage 2 \(2\), micro-batch 1: the forward failed: bang"):
        float(loss)


def test_a_user_method_may_choose_its_weights_freely():
    """A plug-in that returns plain tensors: lookahead by hand equals lwp in its weight form."""

    class ByHand(pipeback.Method):
        copies = "scratch"
        schedule = staticmethod(pipeback.schedules.flowing(2))

        def init(self, weights):
            return {"moved": [torch.zeros_like(w) for w in weights]}

        def forward_weights(self, weights, state, when):
            assert (when.stages, when.delay) == (5, 2 * (4 - when.stage))
            return [w + when.delay * d for w, d in zip(weights, state["moved"], strict=True)]

        def update(self, weights, optimizer, state, when):
            before = [w.clone() for w in weights]
            optimizer.step()
            return {"moved": [w - b for w, b in zip(weights, before, strict=True)]}

    hand, ours = pipeline(network(), ByHand()), pipeline(network(), pipeback.methods.create("lwp", form="weight"))
    for x, y in data(30):
        hand.push(x, y)
        ours.push(x, y)
    torch.testing.assert_close(weights(hand), weights(ours), rtol=1e-5, atol=1e-6)


def test_a_method_that_shifts_must_say_so():
    class Undeclared(pipeback.Method):
        schedule = staticmethod(pipeback.schedules.flowing(2))

        def forward_weights(self, weights, state, when):
            return [w + 1 for w in weights]

    with pytest.raises(RuntimeError, match='declare copies = "scratch"'):
        pipeline(network(), Undeclared()).push(*data(1)[0])


def test_bfloat16_weights_train():
    pipe = pipeline(network(dtype=torch.bfloat16), "cerebras")
    for x, y in data(12, dtype=torch.bfloat16):
        loss = pipe.push(x, y)
    assert loss.dtype == torch.bfloat16 and torch.isfinite(loss)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: stages on the device, and on two devices")
@pytest.mark.parametrize("method", ["pb", "cerebras", "pipedream", "spectrain"])
def test_stages_on_a_gpu(method):
    split = [part.to("cuda" if s % 2 else "cpu") for s, part in enumerate(network())]
    pipe, reference = pipeline(split, method), pipeline(network(), method)
    for x, y in data(20):
        a, b = pipe.push(x, y.cpu()), reference.push(x, y)
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-4)


def test_push_trains_also_under_no_grad():
    free, bound = pipeline(network(), "pb"), pipeline(network(), "pb")
    for x, y in data(12):
        free.push(x, y)
        with torch.no_grad():
            bound.push(x, y)
    assert torch.equal(weights(free), weights(bound))
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"outside torch.inference_mode\(\)"):
        free.push(*data(1)[0])


class Squared(torch.autograd.Function):
    """Keeps a tensor and a number on ctx, not through save_for_backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.x, ctx.times, ctx.name = x.detach() * 1, float(x.detach().mean()), "squared"
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.x * g * (1 + ctx.times)


def test_what_custom_functions_keep_is_saved_in_flight():
    class Square(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.linear, self.function = nn.Linear(6, 6), function

        def forward(self, x):
            return self.function(self.linear(x))

    def built(function, seed):
        torch.manual_seed(seed)
        return pipeline([nn.Linear(6, 6), Square(function), nn.Linear(6, 6), nn.Linear(6, 6)], "pb")

    whole, half, other = (built(Squared.apply, seed) for seed in (0, 0, 1))
    batches = data(16)
    for x, y in batches[:9]:
        whole.push(x, y)
        half.push(x, y)
    other.load_state_dict(half.state_dict())
    for x, y in batches[9:]:
        whole.push(x, y)
        other.push(x, y)
    assert torch.equal(weights(whole), weights(other))

    class Opaque(Squared):
        @staticmethod
        def forward(ctx, x):
            ctx.x, ctx.times, ctx.what = x.detach(), 0.0, object()
            return x * x

    pipe = built(Opaque.apply, 0)
    pipe.push(*batches[0])
    with pytest.raises(TypeError, match=r"stage 1 \(1\), micro-batch 0: .*ctx.what, a object.*save_for_backward"):
        pipe.state_dict()

    threshold = built(lambda x: torch.clamp(x, max=x.detach().mean().item()), 0)
    for x, y in batches[:9]:
        threshold.push(x, y)
    with pytest.raises(ValueError, match="builds another graph.*numbers taken from it"):
        threshold.load_state_dict(threshold.state_dict())
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        threshold.push(*batches[0])


def test_a_state_loaded_into_one_of_the_optimizers_is_followed():
    for method in ("pb", "cerebras"):
        pipe, untouched = pipeline(network(), method), pipeline(network(), method)
        batches = data(24)
        for x, y in batches[:14]:
            pipe.push(x, y)
            untouched.push(x, y)
        zero = pipe.optimizers[2].state_dict()
        for entry in zero["state"].values():
            entry["momentum_buffer"] = torch.zeros_like(entry["momentum_buffer"])
        pipe.optimizers[2].load_state_dict(zero)
        pipe.optimizers[3].state.clear()
        pipe.push(*batches[14])
        moved = [
            torch.cat([b.flatten() for b in (s["momentum_buffer"] for s in opt.state.values())])
            for opt in pipe.optimizers
        ]
        untouched.push(*batches[14])
        for n, opt in enumerate(untouched.optimizers):
            kept = torch.cat([b.flatten() for b in (s["momentum_buffer"] for s in opt.state.values())])
            assert (moved[n].norm() < 0.8 * kept.norm()) == (n in (2, 3)), (method, n)


def test_step_hooks_are_called_and_subclasses_keep_their_own_state():
    class Counting(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.steps = [0]

        def step(self, closure=None):
            self.steps[0] += 1
            return super().step(closure)

    pipe = pipeback.Pipeline(network(), loss=nn.functional.mse_loss, optimizer=lambda p: Counting(p, 0.1), method="pb")
    heard = []
    for x, y in data(10):
        pipe.push(x, y)
    assert [opt.steps[0] for opt in pipe.optimizers] == [10 - d for d in pipe.delays]
    plain = pipeline(network(), "pb")
    plain.push(*data(1)[0])
    plain.optimizers[4].register_step_post_hook(lambda *_: heard.append(1))
    for x, y in data(5):
        plain.push(x, y)
    assert len(heard) == 5


def test_gradients_that_others_left_do_not_count():
    clean, dirty = network(), network()
    dirty(torch.randn(2, 6)).sum().backward()
    a, b = pipeline(clean, "pb"), pipeline(dirty, "pb")
    for x, y in data(6):
        a.push(x, y)
        dirty(torch.randn(2, 6)).sum().backward()
        b.push(x, y)
    a.drain()
    b.drain()
    assert torch.equal(weights(a), weights(b))


def test_optimizers_of_every_kind_of_group():
    """An empty group on a stage without biases, and rates that are tensors."""

    def split(params):
        decayed, plain = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=torch.tensor(0.01))

    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 6, bias=False))
    pipe = pipeback.Pipeline(model, loss=nn.functional.mse_loss, optimizer=split, method="pb")
    before = weights(pipe)
    for x, y in data(8):
        pipe.push(x, y)
    assert torch.isfinite(weights(pipe)).all() and not torch.equal(weights(pipe), before)


def test_complex_values_cross_boundaries():
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.fft.rfft(x)

    class Magnitude(nn.Module):
        def forward(self, x):
            return x.abs()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Spectrum(), Magnitude(), nn.Linear(4, 6))
    before = model[0].weight.clone()
    pipe = pipeline(model, "pb")
    for x, y in data(12):
        pipe.push(x, y)
    assert not torch.equal(before, model[0].weight)


def test_a_closed_pipeline_stands_still_and_its_losses_say_so():
    pipe = pipeline([nn.Linear(6, 6), Slow(0.02), nn.Linear(6, 6)], "pb", workers=2)
    losses = [pipe.push(x, y) for x, y in data(6)]
    pipe.close()
    frozen = torch.cat([p.detach().flatten().clone() for p in pipe._model.parameters()])
    time.sleep(0.2)
    assert torch.equal(frozen, torch.cat([p.detach().flatten() for p in pipe._model.parameters()]))
    with pytest.raises(RuntimeError, match="closed before this loss was there"):
        float(losses[-1])


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_a_short_batch_is_looked_at_without_disturbing_the_workers():
    def run(workers):
        torch.manual_seed(0)
        model = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)]
        pipe = pipeline(model, "pb", workers=workers)
        for n in (20, 20, 20, 19, 18, 17, 16, 8, 4):
            pipe.push(*data(1, samples=n)[0])
        result = weights(pipe)
        pipe.close()
        return result

    assert torch.equal(run(None), run(2))


def test_the_mode_may_change_between_pushes():
    """Dropout that was off when training began has its own stream as soon as it draws."""

    def run(**options):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4)]).eval()
        pipe = pipeline(model, "pb", **options)
        for n, (x, y) in enumerate(data(12)):
            if n == 5:
                pipe.wait()
                model.train()
            pipe.push(x, y)
        result = weights(pipe)
        pipe.close()
        return result

    assert torch.equal(run(), run(workers=2)) and torch.equal(run(), run(order="random"))


def test_several_threads_may_push_and_look():
    pipe = pipeline(network(), "pb")
    pipe.push(*data(1)[0])
    failed = []

    def work(n):
        try:
            for x, y in data(15, seed=n):
                pipe.push(x, y)
                pipe.state_dict()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    pipe.drain()
    assert sum(r.kind == "B" for r in pipe.ledger) == 5 * 46


def test_evaluate_before_the_first_push_leaves_its_input_alone():
    pipe = pipeline([nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Dropout()], "pb")
    x = torch.randn(4, 6)
    kept = x.clone()
    found = pipe.evaluate(x)
    assert torch.equal(x, kept) and not found.requires_grad
    found.numpy()
    pipe.drain()
    pipe.wait()


def test_what_was_recorded_stays_when_recording_ends():
    pipe = pipeline(network(), "pb")
    pipe.record()
    pipe.push(*data(1)[0])
    pipe.record(False)
    pipe.push(*data(1)[0])
    assert len(pipe.recorded) == 5 + 2


def test_checkpointed_activations_train_and_say_why_they_cannot_be_saved_in_flight():
    class Recomputed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.layers, self.reentrant = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), reentrant

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=self.reentrant)

    pipe = pipeline([nn.Linear(6, 6), Recomputed(False), nn.Linear(6, 6)], "pipedream")
    for x, y in data(6):
        pipe.push(x, y)
    with pytest.raises(ValueError, match=r"stage 1 \(1\).*activation checkpointing.*drain\(\) before saving"):
        pipe.load_state_dict(pipe.state_dict())
    with pytest.raises(ValueError, match=r"stage 1 \(1\): the backward failed on the first micro-batch"):
        pipeline([nn.Linear(6, 6), Recomputed(True), nn.Linear(6, 6)], "pb").push(*data(1)[0])
