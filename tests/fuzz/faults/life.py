"""Errors, interrupts, forks and what users do to models and optimizers in between."""

from __future__ import annotations

import gc
import os
import select
import tempfile
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.calls import sleeping
from tests.fuzz.program import Program

from .table import FAULTS, ONE, fault, layers, pipeline, train


@fault("one bad batch closes the pipeline for good")
def _() -> None:
    pipe, plain = pipeline(layers()), pipeline(layers())
    for p in (pipe, plain):
        train(p)
    for bad in (torch.randn(3, 5), torch.randn(3, 6, dtype=torch.float64)):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            pipe.push(bad, torch.randn(3, 6))
    assert train(pipe, seed=2) == train(plain, seed=2)


FAULTS["after optimizer.state.clear() behind the first push cerebras goes on with the old velocity"] = Program(
    stages=1, method="cerebras", optimizer="momentum", calls=(*ONE, ("clear",), *ONE)
)
FAULTS["one bad batch closes the pipeline of a method without delay"] = Program(
    stages=2, method="sgd", calls=(*ONE, ("bad",), *ONE)
)


@fault("KeyboardInterrupt closes the pipeline with an empty message")
def _() -> None:
    stop = [False]

    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    def loss(output: Tensor, y: Tensor) -> Tensor:
        if stop[0]:  # a forward would be taken back, and a backward is not
            output.register_hook(interrupt)
        return F.mse_loss(output, y)

    pipe = pipeline(layers(), loss=loss)
    train(pipe)
    stop[0] = True
    with pytest.raises(KeyboardInterrupt):
        train(pipe)
    stop[0] = False
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        train(pipe)


@fault("after optimizer.state.clear() cerebras predicts from the old velocity")
def _() -> None:
    found = []
    for clear in (True, False):
        pipe = pipeline(layers(), "cerebras")
        train(pipe, 12)
        for optimizer in pipe.optimizers:
            if clear:
                optimizer.state.clear()
            else:
                for state in optimizer.state.values():
                    state["momentum_buffer"].zero_()
        found.append(train(pipe, seed=2))
    assert found[0] == found[1]


@fault("load_state_dict of the model in flight ends in an autograd error")
def _() -> None:
    pipe = pipeline(layers())
    train(pipe, 12)
    pipe.model.load_state_dict(layers().state_dict())
    train(pipe, 12)


@fault("a forked child that pushes hangs")
def _() -> None:
    pipe = pipeline(layers(), workers=2)
    train(pipe)
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            train(pipe)
        except RuntimeError:
            pass
        finally:
            os.write(tell, b"done")
            os._exit(0)
    try:
        ready, _, _ = select.select([told], [], [], 2.0)
        assert ready, "nothing came from the child"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)
        pipe.close()


@fault("a forked child keeps a store locked")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipe = pipeline(layers(), store=f"disk:{folder}")
        train(pipe)
        with sleeping():
            pipe.close()
            pipeline(layers(), store=f"disk:{folder}").close()


FAULTS["an interrupt before the first update: the replicas of an optimizer that counts drift apart"] = Program(
    stages=1, method="sgd", optimizer="counting", options={"replicas": 2}, calls=(("interrupt",), ("push", 2))
)


@fault("a pipeline with activations in host memory that is dropped in flight stays")
def _() -> None:
    pipe = pipeline(layers(), activations="host")
    train(pipe, 12)
    stages = [weakref.ref(stage) for stage in pipe._engine.stages]
    del pipe
    gc.collect()
    assert not [stage for stage in stages if stage() is not None]
