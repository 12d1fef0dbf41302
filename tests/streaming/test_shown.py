"""What is read and written within `Pipeline.shown` and `Pipeline.present`, where weights live in a store."""

import copy

import pytest
import torch

import pipeback
from pipeback.streaming import disk_store
from tests.laws.cases import data, everything, network, pipeline, weights


@pytest.fixture(params=["host", "disk"])
def store(request, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "SMALL", 1)
    return "host" if request.param == "host" else f"disk:{tmp_path}"


def trained(store=None, method="gpipe", pushes=3, **options):
    pipe = pipeline(network().double(), method, store=store, **options)
    go_on(pipe, 0, pushes)
    return pipe


def go_on(pipe, first, last):
    for x, y in data(last)[first:]:
        pipe.push(x.double(), y.double())


def go_on_alike(pipe, wanted):
    for each in (pipe, wanted):
        go_on(each, 3, 6)
    assert torch.equal(weights(pipe), weights(wanted))
    pipe.close()


def halve(pipe):
    with torch.no_grad():
        for p in pipe._engine.model.parameters():
            p.mul_(0.5)


@pytest.mark.parametrize("method", ["gpipe", "pb"])
def test_what_was_written_before_an_error_is_kept(method, store):
    pipe, wanted = trained(store, method), trained(None, method)
    with pytest.raises(KeyError), pipe.shown(changes=True):
        halve(pipe)
        raise KeyError("of the user")
    wanted.wait()
    halve(wanted)
    go_on_alike(pipe, wanted)


def test_without_changes_an_error_keeps_nothing_on_disk(tmp_path):
    pipe, wanted = trained(f"disk:{tmp_path}"), trained()
    with pytest.raises(KeyError), pipe.shown():
        halve(pipe)
        raise KeyError("of the user")
    go_on_alike(pipe, wanted)


def test_changes_of_a_context_within_another_are_kept(store):
    pipe, wanted = trained(store), trained()
    with pipe.shown(), pipe.shown(changes=True):
        halve(pipe)
    halve(wanted)
    go_on_alike(pipe, wanted)


@pytest.mark.parametrize("method", ["gpipe", "pb"])
def test_changes_reach_the_weights_and_optimizers_of_all_replicas(method, store):
    pipe = trained(store, method, 0, replicas=2, optimizer="momentum")
    wanted = trained(None, method, 0, optimizer="momentum")

    def go_on_twice(each):
        for x, y in data(3):
            each.push(torch.cat([x, x.flip(0)]).double(), torch.cat([y, y.flip(0)]).double())

    for each in (pipe, wanted):
        go_on_twice(each)
        with each.shown(changes=True):
            halve(each)
            for optimizer in each.optimizers:
                for state in optimizer.state.values():
                    state["momentum_buffer"].zero_()
        go_on_twice(each)
        each.drain()
    torch.testing.assert_close(weights(pipe), weights(wanted), rtol=1e-12, atol=1e-12)
    pipe.close()


def test_all_replicas_see_weights_that_host_memory_shows():
    pipe, wanted = trained("host", "sgd", 0, replicas=2), trained(None, "sgd", 0)
    for each in (pipe, wanted):
        for first in (0, 2, 4):
            for x, y in data(6)[first : first + 2]:
                each.push(torch.cat([x, x]).double(), torch.cat([y, y]).double())
            each.wait()
            halve(each)
    torch.testing.assert_close(weights(pipe), weights(wanted), rtol=1e-12, atol=1e-12)
    pipe.close()


def test_a_pipeline_may_be_closed_while_weights_are_shown(store):
    pipe = trained(store)
    with pipe.shown(changes=True):
        pipe.close()


def showing(pipe, how):
    return pipe.present(1) if how == "present" else pipe.shown(changes=how == "changes")


SAYS = "weights are shown within `with pipe.{}`, where nothing is trained.*; leave that context first"
CALLS = {"present": r"present\(1\)", "shown": r"shown\(\)", "changes": r"shown\(changes=True\)"}


@pytest.mark.parametrize("method", ["gpipe", "pb"])
@pytest.mark.parametrize("how", CALLS)
def test_nothing_is_trained_while_weights_are_shown(how, method, store):
    pipe, wanted = trained(store, method), trained(None, method)
    state, x = pipe.state_dict(), data(1)[0]
    calls = [
        lambda: go_on(pipe, 3, 4),
        pipe.drain,
        lambda: pipe.load_state_dict(state),
        lambda: pipe.plan(*x),
        *([] if store == "host" else [pipe.commit]),
    ]
    with showing(pipe, how):
        for call in calls:
            with pytest.raises(RuntimeError, match=SAYS.format(CALLS[how])):
                call()
        pipe.wait()
    for each in (pipe, wanted):
        go_on(each, 3, 6)
        each.drain()
    assert torch.equal(weights(pipe), weights(wanted))
    pipe.close()


@pytest.mark.parametrize("how", CALLS)
def test_nothing_is_trained_outside_while_weights_are_shown(how, store):
    model, sgd = network().double(), lambda params: torch.optim.SGD(params, lr=0.1)
    pipe = pipeback.Pipeline(model, loss=None, optimizer=sgd, method="pb", store=store)
    x = data(1)[0][0].double()
    pipe.backward(torch.ones_like(pipe.forward(x)))
    with showing(pipe, how):
        for call in (lambda: pipe.forward(x), lambda: pipe.backward(x), pipe.step, pipe.forget):
            with pytest.raises(RuntimeError, match=SAYS.format(CALLS[how])):
                call()
    pipe.backward(torch.ones_like(pipe.forward(x)))
    pipe.step()
    pipe.close()


INNER = {
    "evaluate": lambda pipe: [pipe.evaluate(data(1)[0][0].double())],
    "run": lambda pipe: [pipe.run(data(1)[0][0].double())],
    "state_dict": lambda pipe: [v for stage in pipe.state_dict()["stages"] for k, v in stage.items() if "weight/" in k],
    "values": lambda pipe: [value for _, found in pipe.values() for value in found.values()],
}


@pytest.mark.parametrize("inner", INNER)
def test_what_is_shown_is_computed_with(inner, store):
    """It stays shown afterwards, and what is written after that is kept, too."""
    pipe, wanted = trained(store), trained()
    with pipe.shown(changes=True):
        halve(pipe)
        found = INNER[inner](pipe)
        halve(pipe)
    halve(wanted)
    assert all(map(torch.equal, found, INNER[inner](wanted)))
    halve(wanted)
    go_on_alike(pipe, wanted)


def test_without_a_store_pushes_may_come_within():
    pipe, wanted = trained(), trained()
    with pipe.shown(), pipe.present(1):
        go_on(pipe, 3, 6)
    go_on(wanted, 3, 6)
    assert torch.equal(weights(pipe), weights(wanted))


@pytest.mark.parametrize("method", ["gpipe", "pipedream", "spectrain"])
def test_on_disk_an_optimizer_is_nan_outside(method, tmp_path, monkeypatch):
    """It can be read and saved, its process goes on, and so do training and commits."""
    monkeypatch.setattr(disk_store, "SMALL", 1)
    pipe, wanted = trained(f"disk:{tmp_path}", method, 9), trained(None, method, 9)
    optimizer = pipe.optimizers[1]
    pipe.wait()
    saved = copy.deepcopy(optimizer.state_dict())["state"][0]["momentum_buffer"]
    found = [
        saved,
        *optimizer.param_groups[0]["params"],
        *(entry["momentum_buffer"] for entry in optimizer.state.values()),
    ]
    assert all(bool(t.isnan().all()) for t in found)
    with pipe.shown():
        there = [entry["momentum_buffer"].clone() for entry in optimizer.state.values()]
    wanted.wait()
    assert all(map(torch.equal, there, (e["momentum_buffer"] for e in wanted.optimizers[1].state.values())))
    pipe.commit()
    pipe.close()
    again = pipeline(network().double(), method, store=f"disk:{tmp_path}")
    for each in (again, wanted):
        go_on(each, 9, 12)
    assert torch.equal(everything(again), everything(wanted))
    again.close()


def test_an_optimizer_state_that_is_replaced_is_trained_with(store):
    pipe, wanted = trained(store), trained()
    for each in (pipe, wanted):
        each.wait()
        for entry in each.optimizers[1].state.values():
            entry["momentum_buffer"] = torch.ones(entry["momentum_buffer"].shape, dtype=torch.float64)
        go_on(each, 3, 6)
    assert torch.equal(everything(pipe), everything(wanted))
    pipe.close()


@pytest.mark.parametrize("method", ["gpipe", "pb"])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("kind", ["disk", "sparse"])
def test_what_is_written_into_nan_is_noticed(kind, asks, method, tmp_path):
    """Also if the weights were fetched meanwhile; the same within `shown` is trained with."""
    sparse = pipeback.Streaming("host", sparsity=pipeback.sparsities.create("magnitude", density=0.5))
    pipe = trained(sparse if kind == "sparse" else f"disk:{tmp_path}", method)
    pipe.drain()
    with pipe.shown(changes=True):
        halve(pipe)
    pipe.evaluate(data(1)[0][0].double())
    go_on(pipe, 3, 4)
    pipe.wait()
    layer = pipe._engine.stages[1].module
    head = next(m for m in layer.modules() if isinstance(m, torch.nn.Linear))
    torch.nn.init.zeros_(head.weight)
    if asks:
        pipe.evaluate(data(1)[0][0].double())
    with pytest.raises(
        RuntimeError, match=r"stage 1 .*its weights are in the store.*`with pipe.shown\(changes=True\):`"
    ):
        go_on(pipe, 4, 5)
    with pipe.shown(changes=True):
        torch.nn.init.zeros_(head.weight)
    with pipe.shown():
        assert not head.weight.any()
    go_on(pipe, 4, 6)
    pipe.close()
