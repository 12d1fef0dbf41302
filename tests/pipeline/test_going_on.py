"""After a bad batch a pipeline goes on as if it had not come; after an interrupt it says what is so and what to do."""

import os
import select
import signal
from weakref import WeakSet

import pytest
import torch
from torch import nn

import pipeback
from pipeback.streaming import fork_guard
from tests.laws.cases import OPTIMIZERS, data, everything, network, pipeline

BAD = {
    "width": lambda: (torch.randn(3, 5), torch.randn(3, 6)),
    "target's width": lambda: (torch.randn(3, 6), torch.randn(3, 5)),
    "target's length": lambda: (torch.randn(3, 6), torch.randn(2, 6)),
    "type": lambda: (torch.randn(3, 6).double(), torch.randn(3, 6)),
    "dimensions": lambda: (torch.randn(3, 6, 2), torch.randn(3, 6)),
    "none": lambda: (torch.randn(3, 6), None),
    "empty": lambda: (torch.randn(0, 6), torch.randn(0, 6)),
}


def drawing():
    """Dropout, so that a stream that was drawn from shows; and batch statistics."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(6, 6))


@pytest.mark.filterwarnings("ignore:.*takes its statistics", "ignore:Using a target size")
@pytest.mark.parametrize(
    ("model", "options"),
    [(drawing, {}), (drawing, {"workers": 2}), (network, {"store": "host"}), (network, {"vectorize": True})],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_bad_batch_leaves_everything_as_it_was(model, options):
    found = []
    for bad in (False, True):
        torch.manual_seed(7)  # a stage's stream is of its own seed
        pipe = pipeline(model(), "cerebras", **options)
        for n, (x, y) in enumerate(data(12)):
            if bad and n in (4, 9):
                for name, batch in BAD.items():
                    with pytest.raises((ValueError, TypeError)) as error:
                        pipe.push(*batch())
                    if name == "width":
                        assert "stage 0" in str(error.value) and "nothing was trained on it" in str(error.value)
            pipe.push(x, y)
        assert pipe.arrived == 12
        found.append(everything(pipe))
        pipe.close()
    # a wait in between changes what stages that run as one do together, and so how it is rounded
    assert (found[0] - found[1]).abs().max() <= (1e-6 if "vectorize" in options else 0)


def test_another_length_is_rehearsed_once():
    calls = []

    class Counting(nn.Linear):
        def forward(self, x):
            calls.append(x.shape[1])
            return super().forward(x)

    pipe = pipeline(nn.Sequential(Counting(6, 6), nn.Linear(6, 6)), "pb")
    found = []
    for length in (3, 5, 3, 5, 4, 4):
        calls.clear()
        pipe.push(torch.randn(2, length, 6), torch.randn(2, length, 6))
        found.append(len(calls) == 1)
    assert found == [False, False, True, True, False, True]


def interrupted(**options):
    stop = []

    def stops(gradient):
        raise KeyboardInterrupt

    def loss(output, target):
        if stop:
            output.register_hook(stops)
        return nn.functional.mse_loss(output, target)

    pipe = pipeback.Pipeline(network(), loss=loss, optimizer=OPTIMIZERS["momentum"], method="pb", **options)
    for x, y in data(7):
        pipe.push(x, y)
    return pipe, stop


def test_an_interrupt_says_what_is_so_and_its_cure_works():
    pipe, stop = interrupted()
    state = pipe.state_dict()
    stop.append(True)
    with pytest.raises(KeyboardInterrupt):
        pipe.push(*data(1)[0])
    stop.clear()
    for call in (pipe.wait, pipe.drain, pipe.state_dict, lambda: pipe.push(*data(1)[0])):
        with pytest.raises(RuntimeError, match="closed: KeyboardInterrupt came in the middle.*pipe.state_dict.*shown"):
            call()
    with pipe.shown():
        assert all(torch.isfinite(w).all() for w in pipe._engine.model.parameters())
    pipe.load_state_dict(state)
    other, _ = interrupted()
    for x, y in data(3, seed=5):
        assert pipe.push(x, y) == other.push(x, y)
    assert torch.equal(everything(pipe), everything(other))


def test_an_error_without_words_is_named():
    pipe, _ = interrupted()
    pipe._engine.error = AssertionError()
    with pytest.raises(RuntimeError, match="the pipeline is closed: AssertionError; load_state_dict"):
        pipe.wait()


def test_an_interrupt_while_waiting_for_threads_is_no_harm(monkeypatch):
    found = []
    for stopped in (False, True):
        pipe, _ = interrupted(workers=2)
        if stopped:
            join = pipe._engine.runtime.join

            def stop():
                raise KeyboardInterrupt

            monkeypatch.setattr(pipe._engine.runtime, "join", stop)
            with pytest.raises(KeyboardInterrupt):
                pipe.wait()
            monkeypatch.setattr(pipe._engine.runtime, "join", join)
        for x, y in data(3, seed=5):
            pipe.push(x, y)
        found.append(everything(pipe))
        pipe.close()
    assert torch.equal(*found)


# -- children of fork() --------------------------------------------------------------------------------------------


def in_child(do):
    """What `do()` says in a forked process; the test fails where nothing comes."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(tell, str(do()).encode())
        except BaseException as error:
            os.write(tell, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    try:
        assert select.select([told], [], [], 30)[0], "the child hangs"
        return os.read(told, 10_000).decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("options", [{"workers": 2}, {"replicas": 2}, {"store": "host"}, {"store": "disk"}], ids=str)
def test_a_forked_child_is_refused_and_its_parent_goes_on(options, tmp_path):
    options = {**options, "store": f"disk:{tmp_path}"} if options.get("store") == "disk" else options
    pipe, wanted = (pipeline(network(), "pb", **some) for some in (options, {}))
    for x, y in data(6, samples=4):
        pipe.push(x, y)
        wanted.push(x, y)
    for call in (lambda: pipe.push(*data(1, samples=4)[0]), pipe.wait, pipe.drain, pipe.state_dict):
        said = in_child(call)
        assert said.startswith("RuntimeError: process ") and 'get_context("spawn")' in said
    assert in_child(pipe.close) == "None"

    def cure():
        return pipeline(network(), "pb").push(*data(1)[0]).item() > 0

    assert in_child(cure) == "True"
    for x, y in data(6, samples=4, seed=2):
        pipe.push(x, y)
        wanted.push(x, y)
    if "replicas" not in options:
        assert torch.equal(everything(pipe), everything(wanted))
    pipe.close()


def test_an_event_loop_goes_on_in_a_child():
    pipe = pipeline(network(), "pb")
    pipe.push(*data(1)[0])
    assert in_child(lambda: pipe.push(*data(1)[0]).item()) == str(pipe.push(*data(1)[0]).item())


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("late", [False, True])
def test_the_lock_of_a_store_is_the_parents(late, tmp_path, monkeypatch):
    """late: the child has not come to releasing its copy of the lock."""
    pipe = pipeline(network(), "pb", store=f"disk:{tmp_path}")
    pipe.push(*data(1)[0])
    if late:
        monkeypatch.setattr(fork_guard, "_locked", WeakSet())
    stays, ends = os.pipe()
    child = os.fork()
    if not child:
        os.read(stays, 1)
        os._exit(0)
    try:
        with pytest.raises(RuntimeError, match="uses this store"):
            pipeline(network(), "pb", store=f"disk:{tmp_path}")
        pipe.close()
        with pytest.warns(UserWarning, match="no version"):
            pipeline(network(), "pb", store=f"disk:{tmp_path}").close()  # while the child lives
    finally:
        os.write(ends, b".")
        os.waitpid(child, 0)
