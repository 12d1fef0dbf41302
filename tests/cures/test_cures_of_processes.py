"""What is refused because of the process in which it happens, or of what the disk holds, and the cure."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipeback
from pipeback import checkpoint
from pipeback.distributed import connect
from pipeback.lightning import PipelineStrategy
from tests.helpers.processes import fork_for_spawn, in_a_new_process, printed
from tests.laws.cases import data, network
from tests.lightning import ranks as lightning_ranks
from tests.lightning.cases import Regression, loader, trainer
from tests.processes.crew import Crew, free_port

from .rows import BATCH, build, refused, train, trains

pytestmark = pytest.mark.filterwarnings("ignore:.*earlier training", "ignore:.*pages of stages but no version")
RANKS = functools.partial(pipeback.Processes, timeout=10.0)


@pytest.fixture(scope="module")
def crew():
    with Crew(2) as crew:
        yield crew


def heard(crew, function, *arguments):
    """What the ranks are told, which build their next pipeline in another process group."""
    crew.ranks(2).start(function, *arguments, each=range(2))
    found = " | ".join(str(each) for each in crew.results())
    crew.again()
    return found


def ranks_train(**options: Any) -> None:
    """What each of the ranks does."""
    trains(**{"workers": RANKS(), **options})


# -- tensors -----------------------------------------------------------------------------------------------------------


class Thinned(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.linear, self.dense = nn.Linear(6, 6), dense

    def forward(self, x: Any) -> Any:
        sparse = self.linear(x).relu().to_sparse_csr()
        return sparse.to_dense() if self.dense else sparse


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.linear(x if x.layout is torch.strided else x.to_dense())


def hands_on(rank: int, dense: bool) -> None:
    ranks_train(model=nn.Sequential(Thinned(dense), Filled()))


def test_a_sparse_tensor_between_processes(crew):
    says = r"a tensor of layout torch.sparse_csr does not travel between processes; use .to_dense\(\)"
    assert re.search(says, heard(crew, hands_on, False))
    crew.ranks(2).run(hands_on, True, each=range(2))


class Pooled(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.stack([rows.mean(0) for rows in x.unbind()])


def test_a_layout_that_files_do_not_hold(tmp_path):
    """Nested tensors train, and lie in no file."""
    nested = functools.partial(torch.nested.nested_tensor, [torch.randn(3, 6), torch.randn(5, 6)])
    model = lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), Pooled())  # noqa: E731
    y = torch.randn(2, 6)
    says = "push: a nested tensor of layout torch.strided has no shape; make it with layout=torch.jagged"
    refused(lambda: build(model()).push(nested(), y), says)
    pipe = build(model())
    for _ in range(3):
        pipe.push(nested(layout=torch.jagged), y)
    says = r"flight/\d/x/0 is a torch.jagged tensor, which checkpoints do not hold; use dense tensors, or drain\(\)"
    refused(lambda: checkpoint.save(pipe, tmp_path / "nested"), says)
    pipe.drain()
    checkpoint.save(pipe, tmp_path / "drained")
    pipe.close()
    with build(model()) as again:
        checkpoint.load(again, tmp_path / "drained")
        again.push(nested(layout=torch.jagged), y)
    with build(model()) as dense:
        for _ in range(3):
            dense.push(torch.randn(2, 3, 6), y)
        checkpoint.save(dense, tmp_path / "dense")


# -- processes ---------------------------------------------------------------------------------------------------------


def in_a_child(function):
    """What the function raises in a child of fork()."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        answer = "nothing"
        try:
            function()
        except BaseException as error:
            answer = str(error)
        finally:
            os.write(tell, answer.encode())
            os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as answers:
        found = answers.read().decode()
    os.waitpid(child, 0)
    return found


def trains_in(folder: str) -> None:
    train(build(store=f"disk:{folder}"))


@pytest.mark.soak
def test_a_child_of_fork(tmp_path):
    pipe = build(store=f"disk:{tmp_path / 'own'}")
    pipe.push(BATCH, BATCH)
    found = in_a_child(lambda: pipe.push(BATCH, BATCH))
    says = (
        "build a new Pipeline in the child, with a store in another folder, or start it by multiprocessing.get_context"
    )
    assert "was forked from process" in found and says in found
    assert in_a_child(lambda: trains_in(str(tmp_path / "another"))) == "nothing"
    (context,) = re.findall(r"multiprocessing.get_context\(\"spawn\"\)", found)
    process = eval(context, {"multiprocessing": multiprocessing}).Process(target=trains_in, args=(str(tmp_path / "b"),))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    train(pipe)


def test_the_other_lightning():
    pytest.importorskip("pytorch_lightning")
    code = (
        "import pytorch_lightning as pl\nimport pipeback.lightning\n"
        "pl.Trainer(strategy='pipeback', accelerator='cpu', logger=False, enable_checkpointing=False)"
    )
    with pytest.raises(TypeError, match="pipeback works with lightning.pytorch, but this Trainer is of") as found:
        in_a_new_process(printed, code)
    cure, instead = re.search("write `(.*)` instead of `(.*)`", str(found.value)).groups()
    in_a_new_process(printed, code.replace(instead, cure))


def spawned(**options):
    return trainer(PipelineStrategy("pb", **options), devices=2)


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def forks() -> None:
    run = spawned(launcher="fork")
    run.fit(Regression(scheduler=lambda optimizer: halved(optimizer)), loader())


def test_what_cannot_be_sent_to_other_processes(monkeypatch):
    fork_for_spawn(monkeypatch)
    says = (
        r"launcher='spawn' sends the LightningModule, its data and the callbacks .* Define it at the top of a file "
        r"\(functools.partial instead of a lambda\), or use PipelineStrategy\(launcher='fork' or 'script'\)"
    )
    fits = lambda scheduler, **options: spawned(**options).fit(Regression(scheduler=scheduler), loader())  # noqa: E731
    refused(lambda: fits(lambda optimizer: halved(optimizer), launcher="spawn"), says)
    fits(functools.partial(halved), launcher="spawn")
    in_a_new_process(forks)


def grouped(rank: int, how: str) -> None:
    """Lightning in a process that may have a group of its own already. how: of whom that is."""
    world = dist.get_world_size()
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    if how != "all":
        port = [free_port()]
        dist.broadcast_object_list(port)
        os.environ["MASTER_PORT"] = str(port[0])
        dist.destroy_process_group()
    if how == "itself":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lightning_ranks.fit(devices=world)


def test_a_group_of_other_ranks(crew):
    says = (
        "torch.distributed runs with 1 ranks, but the Trainer asks for 2; start as many, or let the Trainer start them"
    )
    assert says in heard(crew, grouped, "itself")
    for how in ("all", "nobody"):
        crew.ranks(2).run(grouped, how, each=range(2))
        crew.again()


def meshed(rank: int, own: bool) -> None:
    if rank == 1 and not own:
        time.sleep(0.5)  # rank 0 has then left already
    two, one = (dist.device_mesh.DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2]))
    ranks_train(workers=RANKS(mesh=one if own and rank == 2 else two))


def test_a_mesh_of_other_ranks():
    with Crew(3) as crew:
        crew.ranks(3).start(meshed, False, each=range(3))
        found = [str(each) for each in crew.results()]
        says = "mesh [[0, 1]] lacks rank 2, which builds a pipeline over it; give each rank the mesh that it is in"
        assert found == [*[f"rank 2 does not come to build the pipeline: {says}"] * 2, says]
        crew.again()
        crew.ranks(3).run(meshed, True, each=range(3))


def apart(rank: int, link: str) -> None:
    """As on two hosts."""
    offer = connect.SharedWire.offer

    def unavailable(**options: Any) -> Any:
        raise connect.Unavailable

    connect.SharedWire.offer = unavailable  # type: ignore[method-assign]
    try:
        ranks_train(workers=RANKS(link=link))
    finally:
        connect.SharedWire.offer = offer  # type: ignore[method-assign]


def test_memory_that_is_not_shared(crew):
    found = heard(crew, apart, "shared_memory")
    says = r"link: ranks 0 and 1 do not share memory \(other hosts, or accelerators\); use workers=pipeback.Processes\(link='(.*?)'\)"  # noqa: E501
    crew.ranks(2).run(apart, re.search(says, found)[1], each=range(2))
    crew.again()


# -- what the disk holds -----------------------------------------------------------------------------------------------


def stored(rank: int, folder: str, replicas: int = 1) -> None:
    pipe = build(workers=RANKS(), store=f"disk:{folder}", replicas=replicas)
    for x, y in data(4):
        pipe.push(x, y)
    pipe.commit()
    pipe.close()


def test_stages_that_other_ranks_hold(crew, tmp_path):
    crew.ranks(2).run(stored, tmp_path / "two", each=range(2))
    crew.again()
    says = r"does not hold stage \d, but other ranks do; start as many ranks, workers and replicas as before, or give"
    assert re.search(says, heard(crew, stored, tmp_path / "two", 2))
    for folder, replicas in ((tmp_path / "two", 1), (tmp_path / "another", 2)):
        crew.ranks(2).run(stored, folder, replicas, each=range(2))
        crew.again()


def test_versions_that_not_all_ranks_have(crew, tmp_path):
    crew.ranks(2).run(stored, tmp_path / "own", each=range(2))
    crew.again()
    for file in (tmp_path / "own" / "rank-1").glob("version-*.json"):
        file.unlink()
    says = "the ranks hold no version in common; give the store an empty folder"
    assert says in heard(crew, stored, tmp_path / "own")
    crew.ranks(2).run(stored, tmp_path / "empty", each=range(2))
    crew.again()


def test_a_folder_of_other_processes(crew, tmp_path):
    """Of one process, opened by two, and the other way round."""
    with build(store=f"disk:{tmp_path / 'one'}") as pipe:
        pipe.push(BATCH, BATCH)
        pipe.commit()
    says = "one: holds a version of a training in 1 process, and this one is in 2; start as many as before, or give"
    assert says in heard(crew, stored, tmp_path / "one")
    trains(store=f"disk:{tmp_path / 'one'}")
    for _ in range(2):
        crew.ranks(2).run(stored, tmp_path / "two", each=range(2))
        crew.again()
        says = (
            "two: holds a version of a training in 2 processes, and this one is in 1; start as many as before, or give"
        )
        refused(lambda: trains(store=f"disk:{tmp_path / 'two'}"), says)


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    pipe = build(store=f"disk:{tmp_path / 'store'}")
    pipe.push(BATCH, BATCH)
    pipe.commit()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        says = "No space left on device; what was committed last is whole, make room or give another folder and start"
        refused(lambda: (pipe.push(BATCH, BATCH), pipe.drain()), says)
    pipe.close()
    for folder in ("store", "another"):
        with build(network(4), store=f"disk:{tmp_path / folder}") as pipe:
            assert pipe.arrived == (1 if folder == "store" else 0)
            pipe.push(BATCH, BATCH)
