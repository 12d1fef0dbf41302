"""Compares plain loops, every runtime of one method, and torch.distributed.pipelining, in one run.

    pipeback bench table repeats=5                        # all rows
    pipeback bench table networks=resnet20,narrow contenders=pb,threads out=some.json
    pipeback bench table contenders=ranks,torch_1f1b fused=true out=some.md  # fused optimizers; a page
    pipeback bench table page=true                        # all rows, into the files that docs/results/speed.md shows
    pipeback bench table read=some.json                   # prints earlier results without measuring

Contenders take turns in two processes of one thread each; those of one process run on the first while the second
waits. A turn is some micro-batches with the pipeline full, or whole flushes. Numbers are medians of the turns; ratios
are of the same round.

samples/s       of training: forward, backward, and an update after every `update` samples
of plain        over the plain PyTorch loop's, momentum SGD by foreach (fused=true: fused), an update per micro-batch
of ideal        over workers × those of `stages apart`: each forward by itself, each backward by itself, and one step,
                one after the other in one thread. That is the arithmetic of a pipeline and nothing else. Rows
                that merge the calls of several stages may exceed it: a plain loop's backward, stages that run as one
peak MB         resident memory at its highest above what the process held before the contender was built, one turn
                from an empty pipeline on; each in a process of its own, which has trained a plain loop and dropped it.
                Modules that it imports count, and so does compiling. Of every rank
held            the same after the turn, when the C library has returned what it had kept of freed memory: between peak
                and held lies what forward and backward need for a moment, and memory in pieces that nobody fits into
declared        the tensors that the pipeline says that it holds at most: weights, their copies, the state of method and
                optimizer, and activations (`Pipeline.memory`). Held is more by objects that are no tensors, graphs
                above all, and by imports

Then come the goals that contenders are compared with directly, as ratios of the same round.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pipeback import Pipeline
from pipeback.recipes.benches import results
from pipeback.recipes.benches.contenders import PEERS, RANKS, Contender, apart, build, peer, pipelined, plain, pushed
from pipeback.recipes.benches.peaks import Use, used
from pipeback.recipes.benches.tasks import NETWORKS, Task, tasks
from pipeback.recipes.benches.turns import everywhere, join, on_ranks, take_turns
from pipeback.recipes.output_files import writable
from pipeback.recipes.provenance import command, load, provenance

FLUSH = 8  # micro-batches between two steps of the flush schedules


class Entry(NamedTuple):
    """A row. build: takes the task, this rank and the rank of each stage. ranks: it runs on all, else on the first."""

    label: str
    build: Callable[[Task, int, list[int]], Contender]
    workers: int = 1
    ranks: bool = False
    flush: int = 1  # micro-batches per update


def loop(label: str, build: Callable[..., Contender], **options: Any) -> Entry:
    return Entry(label, lambda task, *_: build(task, task.turn, **options))


def one(label: str, method: str = "pb", **options: Any) -> Entry:
    """Return a row of a method without flushes in one process and thread."""
    return Entry(label, lambda task, *_: pushed(task, method, **options))


def two(label: str, ranks: bool, **options: Any) -> Entry:
    """Return a row of pipelined backpropagation on two workers."""
    return Entry(
        label, lambda task, *_: pipelined(task, "pb", task.turn, fill=True, **options), workers=RANKS, ranks=ranks
    )


def ours(name: str) -> Entry:
    return Entry(
        f"`{name}`, 2 ranks", lambda task, *_: pipelined(task, name, task.turn, FLUSH), RANKS, ranks=True, flush=FLUSH
    )


def theirs(name: str) -> Entry:
    schedule = PEERS[name]
    return Entry(
        f"torch's {schedule.__name__}, 2 ranks",
        lambda task, rank, owner: peer(task, rank, schedule, FLUSH, task.turn, owner), RANKS, ranks=True, flush=FLUSH,
    )  # fmt: skip


ENTRIES = {
    "plain": loop("plain loop", plain),
    "fused": loop("plain loop, fused", plain, fused=True),
    "apart": loop("stages apart", apart),
    "pb": one("`pb`, event loop"),
    "vectorized": one("`pb`, `vectorize=True`", vectorize=True),
    "auto": one('`pb`, `vectorize="auto"`', vectorize="auto"),
    "cerebras_auto": one('`cerebras`, `vectorize="auto"`', "cerebras", vectorize="auto"),
    "compiled": one("`pb`, `vectorize=True, compile=True`", vectorize=True, compile=True),
    "threads": two("`pb`, `workers=2`", ranks=False, workers=RANKS),
    "ranks": two("`pb`, 2 ranks", ranks=True),
    "ranks_auto": two('`pb`, `vectorize="auto"`, 2 ranks', ranks=True, vectorize="auto"),
    "gpipe": ours("gpipe"),
    "one_f_one_b": ours("one_f_one_b"),
    "torch_gpipe": theirs("gpipe"),
    "torch_1f1b": theirs("one_f_one_b"),
}
ALWAYS = ("plain", "apart")  # the rows with which the others are compared
NEVER = "every stage is another graph, and the compiler takes minutes; contenders=compiled does it"


def main(
    repeats: int,
    networks: str = "",
    contenders: str = "",
    out: str = "",
    read: str = "",
    page: str = "",
    fused: str = "",
) -> None:
    for name, value in (("page", page), ("fused", fused)):
        if value not in ("", "true", "false"):
            sys.exit(f"pipeback bench: {name}={value}: true or false")
    if page == "true" and (networks or contenders or fused == "true"):
        sys.exit("pipeback bench: page=true is for the whole table; leave networks=, contenders= and fused= out")
    if read and (networks or contenders or fused):
        sys.exit("pipeback bench: read= measures nothing; leave networks=, contenders= and fused= out")
    try:
        if out:
            writable("out", Path(out))
    except ValueError as error:
        sys.exit(f"pipeback bench: {error}")
    some, names = chosen("networks", networks, NETWORKS), chosen("contenders", contenders, ENTRIES)
    if read:
        found = results.load(read)
    else:
        found = measured(tasks(some, fused == "true"), names, repeats, every=bool(contenders))
    print(results.text(found), flush=True)
    if out:
        results.save(found, out)
    if page == "true":
        results.publish(found)


def chosen(option: str, given: str, known: dict[str, Any]) -> list[str]:
    """The names that were given, in the known order; all if none was given."""
    names = given.split(",") if given else list(known)
    for name in names:
        if name not in known:
            sys.exit(f"pipeback bench: {option}={given}: there is no {name!r}; there are {', '.join(known)}")
    return [name for name in known if name in names]


def measured(wanted: list[Task], names: list[str], repeats: int, every: bool = False) -> results.Results:
    """Measure the rows. every: also those that take minutes to compile."""
    begin = time.perf_counter()
    machine = {"command": command(), **provenance(), "threads": 1, "load": load()}
    found = []
    for task in wanted:
        left_out = {} if every or task.network.compiles else {"compiled": NEVER}
        mine = [name for name in ENTRIES if (name in names or name in ALWAYS) and name not in left_out]
        ranks = RANKS if any(ENTRIES[name].ranks for name in mine) else 1
        rates, notes = on_ranks(side_by_side, task, mine, repeats, ranks=ranks, start="forkserver")
        notes |= {name: why for name, why in left_out.items() if name in names}
        model = task.model()
        rows = []
        for name in ENTRIES:
            if name in rates or name in notes:
                entry = ENTRIES[name]
                speeds = [task.samples * rate for rate in rates.get(name, [])]
                use: list[Use] = []
                if speeds:
                    use = on_ranks(memory_of, task, name, ranks=RANKS if entry.ranks else 1, start="forkserver")
                rows.append(
                    results.Row(name, entry.label, entry.workers, task.samples * entry.flush, speeds,
                                [some.peak for some in use], notes.get(name, ""),
                                [some.held for some in use], [some.declared for some in use])
                )  # fmt: skip
        print(f"{task.network.name}, micro-batch {task.samples}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        found.append(
            results.Case(task.network.name, task.network.words, len(model), sum(p.numel() for p in model.parameters()),
                         task.samples, task.turn, rows)
        )  # fmt: skip
    return results.Results(machine, repeats, time.perf_counter() - begin, found)


def side_by_side(rank: int, store: str, task: Task, names: list[str], repeats: int) -> tuple[Any, dict[str, str]]:
    """Micro-batches per second of each contender and round; and why others cannot train this network."""
    contenders: dict[str, Contender] = {}
    notes: dict[str, str] = {}
    for name in names:
        if not ENTRIES[name].ranks:
            try:
                contenders[name] = ENTRIES[name].build(task, rank, []) if rank == 0 else idle(task)
            except ValueError as error:
                notes[name] = str(error)
    of_ranks = [name for name in names if ENTRIES[name].ranks]
    if of_ranks:
        join(rank, store)
        notes = everywhere(notes)[0]
        contenders = {name: one for name, one in contenders.items() if name not in notes}
        owner = cut(task)
        contenders |= {name: ENTRIES[name].build(task, rank, owner) for name in of_ranks}
    rates = take_turns(contenders, repeats)
    for contender in contenders.values():
        if contender.pipe is not None:
            contender.pipe.close()
    return rates, notes


def idle(task: Task) -> Contender:
    return Contender(lambda: 0.0, task.turn)


def cut(task: Task) -> list[int]:
    """The rank of each stage, by their times as our pipelines measure them."""
    pipe = build(task, "pb")
    pipe.push(*task.data())
    owner = pipe.owner
    pipe.close()
    return owner


def memory_of(rank: int, store: str, task: Task, name: str) -> list[Use]:
    """The memory of every rank that trains one turn, in processes that have trained before."""
    plain(task, 1).run()
    entry, owner = ENTRIES[name], []
    if entry.ranks:
        join(rank, store)
        owner = cut(task)

    def work() -> Contender:
        contender = entry.build(task, rank, owner)
        contender.run()
        return contender

    contender, found = used(work)
    if contender.pipe is not None:
        found = found._replace(declared=declared(contender.pipe) / 1e6)
    return everywhere(found)


def declared(pipe: Pipeline) -> int:
    """The bytes that this process says that it holds at most."""
    said = pipe.memory()
    states = (value for optimizer in pipe.optimizers for own in optimizer.state.values() for value in own.values())
    optimizer = sum(value.nbytes for value in states if isinstance(value, Tensor))
    held = round(said.weights * (said.copies + said.state)) + said.activations + said.host
    return held + said.rounded + said.beside + optimizer
