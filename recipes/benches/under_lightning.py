"""Compares Lightning with Pipeline.push: samples per second on batches cut into micro-batches of one sample."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import pipeback
from pipeback.recipes.benches.against import Rows
from pipeback.recipes.benches.network import create, network, sgd
from pipeback.recipes.benches.turns import spread, timed
from pipeback.recipes.benches.vectorized import Transformer, blocks
from pipeback.recipes.markdown import table

METHODS = ("pb", "cerebras")
COUNT = 8  # batches of a turn


class Case(NamedTuple):
    """A network, its loss, a batch, and how many stages it has."""

    words: str
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[], tuple[Tensor, Tensor]]
    stages: int


def classes(samples: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 64), torch.randint(0, 10, (samples,))


def sequences(width: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(64, 16, width), torch.randn(64, 16, width)


NARROW = Case("20 blocks of width 64", partial(network, 20), cross_entropy, classes, 20)
LONG = NARROW._replace(words="20 blocks of width 64, batches of 256", batch=partial(classes, 256))
DEEP = Case("48 blocks of width 64", partial(network, 48), cross_entropy, classes, 48)
TRANSFORMER = Case("12 transformer blocks, d 64, T 16", partial(blocks, Transformer, 12, 64), mse_loss, sequences, 13)
WIDER = Case(
    "12 transformer blocks, d 128, T 16", partial(blocks, Transformer, 12, 128), mse_loss, partial(sequences, 128), 13
)
ONES = (NARROW, LONG, DEEP, TRANSFORMER, WIDER)


def main(repeats: int) -> None:
    """Run one fit; after every batch the same batch is pushed into other pipelines, so that times are paired."""
    print("Lightning with the strategy: micro-batches of one sample, in batches of 64 where nothing is said.\n")
    rows = []
    for name in METHODS:
        for watched in (False, True):
            ratios, _ = paired(NARROW, name, False, watched, repeats)
            rows.append([NARROW.words, label(name, watched), spread(ratios), ""])
    for case in ONES:
        if case not in (LONG, WIDER):  # which would take long, and say the same
            rows.append([case.words, "`pb`, event loop", spread(paired(case, "pb", False, False, repeats)[0]), ""])
        unread, read = paired(case, "pb", "auto", False, repeats)
        rows.append([case.words, '`pb`, `vectorize="auto"`', spread(unread), spread(read)])
    print(table(["", "", "of the samples/s of `Pipeline.push`", "with its loss read after each push"], rows))
    print('\nWhat bounds `vectorize="auto"`, in the time of a push whose loss is not read:\n')
    head = ["", "a push, its loss read", "losses of the slices", "Lightning, an empty step", "push over all three"]
    print(table(head, [[case.words, *bounds(case, repeats)] for case in ONES]))
    print("\nWhere `training_step` calls `self(x)`, and the layers are the LightningModule's own, `pb`:\n")
    head = ["", "stage by stage, of `self.model(x)`", '`"auto"`, of `self.model(x)`', '`"auto"`, of stage by stage']
    print(table(head, [[case.words, *map(spread, own(case, repeats))] for case in (NARROW, DEEP, TRANSFORMER)]))


def own(case: Case, repeats: int) -> list[list[float]]:
    """Return the samples/s of fits of a module with layers of its own, by turn, over those of one with a model: with
    stages one by one, and with "auto"; and those of "auto" over those of one by one.
    """
    found: list[list[float]] = []
    for _ in range(repeats):
        took: dict[tuple[bool, bool | str], float] = {}
        for each in ((True, False), (False, False), (True, "auto"), (False, "auto")):
            clock, batches = Clock(), data(4 * COUNT, case)
            loaded: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
            fit("pb", loaded, False, clock, case=case, own=each[0], vectorize=each[1])
            took[each] = clock.per_batch()
        found.append([
            *(took[False, way] / took[True, way] for way in (False, "auto")), took[True, False] / took[True, "auto"]
        ])  # fmt: skip
    return [list(column) for column in zip(*found, strict=True)]


def bounds(case: Case, repeats: int) -> list[str]:
    """Return what a batch takes at least: Lightning waits for its loss before it gives the next one, `training_step`
    computes a loss per slice and autograd its gradient, and Lightning's loop runs once per batch.
    """
    pipes, (x, y) = [pipeline(case, "pb", "auto") for _ in range(2)], data(1, case)[0]
    with torch.no_grad():
        output = case.build()(x[:1])
    runs: dict[str, Callable[[], object]] = {
        "push": lambda: [pipes[0].push(x, y) for _ in range(COUNT)],
        "read": lambda: [float(pipes[1].push(x, y)) for _ in range(COUNT)],
        "losses": lambda: judge(case, output, y, COUNT),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*runs, "loop")}
    for turn in range(-1, repeats):
        took = {name: timed(run) for name, run in runs.items()} | {"loop": COUNT * empty_loop()}
        for name in seconds if turn >= 0 else ():
            seconds[name].append(took[name])
    pushes = seconds.pop("push")
    shares = [[some / push for some, push in zip(each, pushes, strict=True)] for each in seconds.values()]
    return [*map(spread, shares), spread([1 / sum(some) for some in zip(*shares, strict=True)])]


def judge(case: Case, output: Tensor, targets: Tensor, times: int) -> None:
    """Compute the loss of every slice, and the gradient of its output."""
    for target in targets.split(1) * times:
        case.loss(output.detach().requires_grad_(), target).backward()


def empty_loop() -> float:
    """The seconds per batch of Lightning's own loop, with a training_step that does nothing."""

    class Empty(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.weight

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    clock = Clock()
    run(Empty(), torch.utils.data.DataLoader(data(4 * COUNT), batch_size=None), "auto", [clock])  # type: ignore
    return clock.per_batch()


class Clock(pl.Callback):
    """When batches end, but for the first ones, which are a warm-up; also of processes that `fit` has started."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def per_batch(self) -> float:
        """The seconds per batch."""
        return (self.ends[-1] - self.ends[COUNT]) / (len(self.ends) - 1 - COUNT)

    def state_dict(self) -> dict[str, Any]:
        return {"ends": self.ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ends = state["ends"]


def run(
    module: Any, batches: Any, strategy: Any, callbacks: list[Any], devices: int = 1, precision: str = "32-true"
) -> None:
    """Fit without logs, files and bars."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "devices": devices, "logger": False, "enable_checkpointing": False, "max_epochs": 1,
        "enable_progress_bar": False, "enable_model_summary": False, "callbacks": callbacks, "precision": precision,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a loader without workers, of a run without a log
        pl.Trainer(strategy=strategy, **quiet).fit(module, batches)


def paired(
    case: Case, method: str, vectorize: bool | str, watched: bool, repeats: int
) -> tuple[list[float], list[float]]:
    """Return the samples/s of a fit over those of `push`, by turn: of pushes whose loss is not read, and is read."""

    class Paired(pl.Callback):
        def __init__(self) -> None:
            self.pipes = [pipeline(case, method, vectorize) for _ in range(2)]
            self.seconds: list[list[float]] = []
            self.began = 0.0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            middle = time.perf_counter()
            self.pipes[0].push(*batch)
            unread = time.perf_counter()
            float(self.pipes[1].push(*batch))
            end = time.perf_counter()
            if batch_idx >= COUNT:  # the first ones are a warm-up
                self.seconds.append([middle - self.began, unread - middle, end - unread])
            self.began = time.perf_counter()

    found = Paired()
    batches: Any = torch.utils.data.DataLoader(data(COUNT * (repeats + 1), case), batch_size=None)  # type: ignore
    fit(method, batches, watched, found, case=case, vectorize=vectorize)
    turns = [
        [sum(some) for some in zip(*found.seconds[n : n + COUNT], strict=True)]
        for n in range(0, len(found.seconds), COUNT)
    ]
    return [unread / fit for fit, unread, _ in turns], [read / fit for fit, _, read in turns]


def pipeline(case: Case, method: str, vectorize: Any) -> pipeback.Pipeline:
    how = create(method, case.stages)
    return pipeback.Pipeline(
        case.build(), loss=case.loss, optimizer=sgd, method=how, micro_batch_size=1, vectorize=vectorize
    )


def label(method: str, watched: bool) -> str:
    return f"`{method}`" + (" with `PipelineMonitor`" if watched else "")


def data(batches: int, case: Case = NARROW) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [case.batch() for _ in range(batches)]


class Dataset(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The same, which processes can be sent. number: of the case, in `ONES`."""

    def __init__(self, batches: int, number: int) -> None:
        self.batches, self.number = batches, number

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(n)  # every rank has the same
        return ONES[self.number].batch()


def fit(
    method: str,
    batches: Iterable[Any],
    watched: bool,
    *callbacks: Any,
    case: Case = NARROW,
    vectorize: bool | str = False,
    own: bool = False,
) -> None:
    """Fit a network for one epoch. watched: by a `PipelineMonitor`. own: the LightningModule has its layers."""
    from pipeback.lightning import PipelineMonitor, PipelineStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            if own:
                self.layers = nn.ModuleList(case.build().children())
            else:
                self.model = case.build()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = case.loss(self(x) if own else self.model(x), y)
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.parameters())

    where = PipelineStrategy(create(method, case.stages), micro_batch_size=1, vectorize=vectorize)
    run(Module(), batches, where, [PipelineMonitor(), *callbacks] if watched else list(callbacks))


def rows() -> Rows:
    """What `against=` compares."""
    words = f"{NARROW.words}, batches of 64"
    both = (False, True)
    apart = {(words, label(name, watched)): partial(train, name, watched) for name in METHODS for watched in both}
    cases = (NARROW, LONG, DEEP, TRANSFORMER)
    return apart | {
        (case.words, '`pb`, `vectorize="auto"`'): partial(train, "pb", False, case=case, vectorize="auto")
        for case in cases
    }


def train(
    method: str, watched: bool, turns: Iterable[None], *, case: Case = NARROW, vectorize: bool | str = False
) -> None:
    """A turn has this many batches; Lightning asks for one ahead, which makes no difference from turn to turn."""
    batches = data(COUNT, case)
    fit(method, (batch for _ in turns for batch in batches), watched, case=case, vectorize=vectorize)
