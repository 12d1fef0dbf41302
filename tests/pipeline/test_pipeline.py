"""The public face: push, wait, drain, evaluate, optimizers, delays, model; what simply works; lazy losses."""

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
    assert [len(stage.flights) for stage in pipe._engine.stages] == pipe.delays
    before = weights(pipe)
    pipe.evaluate(torch.randn(2, 6))
    assert torch.equal(before, weights(pipe))
    pipe.drain()
    assert [len(stage.flights) for stage in pipe._engine.stages] == [0] * 5
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

    with pytest.raises(RuntimeError, match='set copies = "scratch"'):
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

    assert torch.equal(run(), run(workers=2)) and torch.equal(run(), run(debug=pipeback.Debug(order="random")))


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
