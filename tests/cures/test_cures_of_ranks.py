"""What is said where ranks differ, or none can do what is asked, and the same with what the message says."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from tests.laws.cases import data, network, pipeline
from tests.lightning import ranks as lightning_ranks
from tests.lightning.cases import Regression, loader
from tests.processes.crew import Crew

from .rows import sgd

TIMEOUT = 10.0
Do = Callable[[int], Any]  # by one rank


@pytest.fixture(scope="module")
def crew():
    with Crew(2) as crew:
        yield crew


def pushed(pipe: Any, between: Callable[[], Any] = lambda: None) -> None:
    for n, (x, y) in enumerate(data(12)):
        if n == 6:
            between()
        pipe.push(x, y)
    pipe.drain()
    pipe.close()


def clipped(rank: int, some: bool) -> None:
    norm = None if some and rank else 1.0
    pushed(pipeline(network(4), "pb", workers=pipeback.Processes(timeout=TIMEOUT), clip_norm=norm))


def replicated(rank: int, some: bool) -> None:
    pushed(pipeline(network(4), "pb", workers=pipeback.Processes(timeout=TIMEOUT), replicas=3 if some else 2))


def threaded(rank: int, some: bool) -> None:
    pushed(pipeline(network(4), "pb", workers=2 if some else pipeback.Processes(timeout=TIMEOUT)))


def narrow(rank: int, some: bool) -> None:
    pushed(pipeline(network(1 if some else 2), "pb", workers=pipeback.Processes(timeout=TIMEOUT)))


def drained(rank: int, some: bool) -> None:
    pipe = pipeline(network(4), "pb", workers=pipeback.Processes(timeout=TIMEOUT))
    pushed(pipe, lambda: None if some and not rank else pipe.drain())


def rated(rank: int, some: bool) -> None:
    pipe = pipeline(network(4), "pb", workers=pipeback.Processes(timeout=TIMEOUT))

    def halve() -> None:
        for optimizer in pipe.optimizers if not (some and rank) else ():
            optimizer.param_groups[0]["lr"] *= 0.5

    pushed(pipe, halve)


def other_batch(rank: int, some: bool) -> None:
    pipe = pipeline(network(4), "pb", workers=pipeback.Processes(timeout=TIMEOUT))
    for x, y in data(12, seed=2 if some and rank else 1):
        pipe.push(x, y)
    pipe.close()


def fewer(rank: int, some: bool) -> None:
    """One rank builds no pipeline at all."""
    if not (some and rank):
        pushed(pipeline(network(4), "pb", workers=pipeback.Processes(timeout=2.0 if some else TIMEOUT)))


def forgotten(rank: int, some: bool) -> None:
    pipe = built(loss=None, method="gpipe")
    output = pipe.forward(data(1)[0][0])
    if some:
        pipe.forget()
    pipe.backward(None if output is None else torch.zeros_like(output))
    pipe.step()
    pipe.close()


def built(**options: Any) -> Any:
    given = {"loss": mse_loss, "optimizer": sgd, "method": "pb", "workers": pipeback.Processes(timeout=TIMEOUT)}
    return pipeback.Pipeline(network(4), **{**given, **options})


def watched(rank: int, some: bool) -> None:
    pipe = built(replicas=2, store="host" if some else None)
    pushed(pipe, lambda: pipe.watch())


def kept_linked(rank: int, some: bool) -> None:
    link = pipeback.Processes(timeout=TIMEOUT, link="nccl" if some else "gloo")
    pushed(built(debug=pipeback.Debug(take_back=3), workers=link))


def kept_split(rank: int, some: bool) -> None:
    pushed(built(debug=pipeback.Debug(take_back=3), replicas=2, store="host" if some else None))


def sparse(rank: int, some: bool) -> None:
    store = pipeback.Streaming("host", sparsity="set")
    pushed(built(replicas=2, store=store if some else None))
    if not some:
        pushed(built(store=store))


class Whole(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def linked(rank: int, some: bool) -> None:
    link = pipeback.Processes(timeout=TIMEOUT, link="nccl" if some else "gloo")
    pushed(built(method="looped_bfs", workers=link))


def far_loss(rank: int, some: bool) -> None:
    method = pipeback.methods.create("pb", placement="v" if some else "neighbours")
    pipe = built(loss=None, method=method)
    for x, _ in data(4):
        output = pipe.forward(x)
        pipe.backward(None if output is None else torch.zeros_like(output))
        pipe.step()
    pipe.close()


def whole(rank: int, some: bool) -> None:
    def optimizer(params: Any) -> Any:
        return Whole(params, lr=0.01)

    if some:
        pushed(built(replicas=2, store="host", optimizer=optimizer))
    pushed(built(replicas=2, store="host"))
    pushed(built(replicas=2, optimizer=optimizer))
    pushed(built(store="host", optimizer=optimizer))


def braked(rank: int, some: bool) -> None:
    if some:
        pushed(built(replicas=2, store="host", method="braking"))
    pushed(built(replicas=2, method="braking"))
    pushed(built(store="host", method="braking"))
    pushed(built(replicas=2, store="host", method="pb"))


def meshed(rank: int, some: bool) -> None:
    shape = (2, 1, 1) if some else (2, 1)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", shape)
    pushed(built(workers=pipeback.Processes(mesh=mesh, timeout=TIMEOUT)))


def no_mesh(rank: int, some: bool) -> None:
    mesh = [0, 1] if some else torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2))
    pushed(built(workers=pipeback.Processes(mesh=mesh, timeout=TIMEOUT)))


def half_meta(rank: int, some: bool) -> None:
    with torch.device("meta" if some and rank else "cpu"):
        model = network(4)
    pipe = pipeback.Pipeline(
        model, loss=mse_loss, optimizer=sgd, method="pb", workers=pipeback.Processes(timeout=TIMEOUT)
    )
    pushed(pipe)


class Peeks(Regression):
    """Calls the model where a rank cannot serve it, or as the message says."""

    def __init__(self, where: str, some: bool) -> None:
        super().__init__()
        self.where, self.some = where, some

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        asks = self.where == "after" and self.trainer.global_step == 3
        if asks and not self.some:
            self.looked(batch[0])
        output = self.model(batch[0])
        if asks and self.some:
            self.looked(batch[0])
        return mse_loss(output, batch[1])

    def looked(self, x: Any) -> None:
        with torch.no_grad():
            self.model.eval()(x)
        self.model.train()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.where == "gradients":
            with torch.set_grad_enabled(self.some):
                self.model(batch[0])
        elif self.where == "training":
            self.model.train()
            if not self.some:
                self.model.eval()
            self.model(batch[0])
            self.model.train()


def peeked(rank: int, some: bool, where: str) -> None:
    lightning_ranks.fit(module=partial(Peeks, where, some), val=partial(loader, 2), inference_mode=False)


PEEKS = {
    "after": "where the other ranks leave training_step; call it before",
    "gradients": r"its stages are on several devices, which give gradients there only: call it in torch.no_grad\(\)",
    "training": r"over several devices that is not possible: call self.model.eval\(\) before, and train\(\) afterwards",
}


@pytest.mark.parametrize("where", PEEKS)
def test_calls_that_several_devices_cannot_serve(crew, where):
    do = partial(peeked, where=where)
    found = crew.ranks(2).run(told, do, True, each=range(2))
    crew.again()
    assert any(re.search(PEEKS[where], text) for text in found), found
    assert crew.ranks(2).run(told, do, False, each=range(2)) == ["", ""]
    crew.again()


class Resets(Regression):
    """Takes the optimizer back to its state of the second epoch, or as the message says."""

    def __init__(self, some: bool) -> None:
        super().__init__()
        self.some = some

    def on_train_epoch_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.current_epoch == 1:
            self.kept = optimizer.state_dict()
        elif self.current_epoch == 2 and self.some:
            optimizer.load_state_dict(self.kept)
        elif self.current_epoch == 2:
            optimizer.state.clear()


def reset(rank: int, some: bool) -> None:
    lightning_ranks.fit(module=partial(Resets, some), max_epochs=3)


class Halves(Regression):
    """Writes into its weights amid a fit, or as the message says."""

    def __init__(self, some: bool) -> None:
        super().__init__()
        self.some = some
        if not some:
            self.halve()

    def halve(self) -> None:
        with torch.no_grad():
            next(self.parameters()).mul_(0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.some and batch_idx == 2:
            self.halve()


def written(rank: int, some: bool) -> None:
    lightning_ranks.fit(module=partial(Halves, some))


ROWS: dict[Callable[[int, bool], None], str] = {
    clipped: "rank 1 has clip_norm None, rank 0 has 1.0; start the same script with the same options",
    replicated: "replicas=3 does not divide the 2 ranks; start a multiple of it",
    threaded: "workers=2: over processes each rank is a worker; leave workers out",
    narrow: "2 ranks share a pipeline but the model has 1 stage; start at most one rank per stage, or give replicas=",
    drained: r"every rank must call drain\(\) at the same micro-batch",
    rated: r"had different rates \(lr\); set them in pipe.optimizers, or step schedulers, alike on every rank",
    other_batch: "every rank must push the same data, in the same order",
    forgotten: "forget: the other ranks are ahead already; give backward a gradient of zeros",
    watched: "watch measures whole weights, of which a rank's store has a slice; use store=None",
    kept_linked: "take_back=3: a wait for NCCL does not end when another rank has failed; use workers=pipeback.Proce",
    kept_split: "take_back=3: a store splits weights over the ranks of the replicas, which could not go back to a",
    sparse: "a store splits weights over the ranks of the replicas, but not sparse ones; use store=None",
    linked: r"parts of the stages each do not exchange tensors by NCCL; use workers=pipeback.Processes\(link='gloo'\)",
    far_loss: "loss=None over several ranks does not go with placement='v'; use placement='neighbours'",
    whole: "may look at whole matrices, but every replica's store keeps a slice of them; use one of torch",
    reset: r"torch moves the state there; use Trainer\(devices=1\), or for an empty state optimizer.state.clear\(\)",
    written: r"what was written is lost; use Trainer\(devices=1\), or write before fit",
    braked: "looks at whole weights, but every replica's store keeps a slice of them; use store=None, or one replica",
    meshed: r"mesh has 3 dimensions; use \(replicas, workers\), or \(workers,\)",
    no_mesh: "mesh must be None or a DeviceMesh, but is list; for example mesh=torch.distributed.device_mesh.init_dev",
    half_meta: "is on the meta device on some ranks; build it there on all of them, or on none",
    fewer: r"rank 1 did not come to build the pipeline within 2 s; every rank must call Pipeline\(...\)",
}


def told(rank: int, do: Callable[[int, bool], None], some: bool) -> str:
    try:
        do(rank, some)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("do", ROWS, ids=lambda do: do.__name__)
def test_the_cure_of_ranks_works(crew, do):
    found = crew.ranks(2).run(told, do, True, each=range(2))
    crew.again()
    assert any(re.search(ROWS[do], text) for text in found), found
    assert crew.ranks(2).run(told, do, False, each=range(2)) == ["", ""]
    crew.again()


def committed(rank: int, some: bool, folder: str) -> None:
    pipe = built(store=f"disk:{folder}/{some}")
    if some:
        pipe.commit()
    pipe.push(*data(1)[0])
    pipe.commit()
    pipe.close()


def test_a_commit_before_the_first_push(crew, tmp_path):
    do = partial(committed, folder=str(tmp_path))
    found = crew.ranks(2).run(told, do, True, each=range(2))
    crew.again()
    assert any("no rank has its stages before the first push; call it afterwards" in text for text in found), found
    assert crew.ranks(2).run(told, do, False, each=range(2)) == ["", ""]
    crew.again()
