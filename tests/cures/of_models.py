"""What is refused of models that are followed, norms, sparse weights, and states of another build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pipeback
from pipeback import norms, sparsities
from tests.laws.cases import network

from .rows import BATCH, Branching, Row, build, loads, sgd, trains


class Fickle(nn.Module):
    """What a block gives has a name that somebody may change, or the block is the model's own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(6, 6), "early"

    def forward(self, state: Any) -> Any:
        return {"x": self.linear(state["x"]), self.more: 1}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Fickle() for _ in range(3)), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        state = {"x": x}
        for block in self.blocks:
            state = block(state)
        return self.head(state["x"])


def fickle(**options: Any) -> Callable[[], Any]:
    def do() -> None:
        model = Blocks()
        pipe = build(model, example=BATCH, **options)
        pipe.push(BATCH, BATCH)
        model.blocks[1].more = "late"
        pipe.push(BATCH, BATCH)
        pipe.wait()

    return do


def heard(model: Callable[[], nn.Module], when: str, **options: Any) -> Callable[[], Any]:
    """Train with a hook on the gradients of the model, from "first" on, or "later", or with a "new" pipeline then."""

    def do() -> None:
        made = model()
        if when == "first":
            made.register_full_backward_hook(lambda *given: None)
        pipe = build(made, **options)
        pipe.push(BATCH, BATCH)
        if when != "first":
            made.register_full_backward_hook(lambda *given: None)
            pipe = build(made, example=BATCH, stages=pipeback.Splitting(leaves=[""])) if when == "new" else pipe
        pipe.push(BATCH, BATCH)
        pipe.wait()

    return do


class Turning(nn.Module):
    """A buffer that two layers read, and the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("turn", torch.ones(6))

    def forward(self, x: Any) -> Any:
        x = self.b(self.a(x + self.turn) + self.turn)
        self.turn.add_(1)
        return x


class Again(nn.Module):
    """A normalisation that is called twice, or one for each place, which may share their weights."""

    def __init__(self, one: bool) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(6, momentum=0.5)
        self.second = self.first if one else nn.BatchNorm1d(6, momentum=0.5)
        self.between = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.second(self.between(self.first(x)))


def batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))


def looked_up(replicas: int = 1, max_norm: float | None = None) -> None:
    model = nn.Sequential(nn.Embedding(9, 6, max_norm=max_norm), nn.Linear(6, 6))
    pipe = build(model, replicas=replicas, micro_batch_size=1)
    pipe.push(torch.randint(9, (4,)), torch.randn(4, 6))
    pipe.wait()


def normed(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, **options))


def hooked(remove: bool) -> nn.Module:
    model = normed()
    handle = model[1].register_forward_hook(lambda *given: None)
    if remove:
        handle.remove()
    return norms.to_group_norm(model)


def parametrized(remove: bool) -> nn.Module:
    model = normed()
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Softplus())
    if remove:
        torch.nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    return norms.to_group_norm(model)


def sparse(policy: str = "magnitude", **options: Any) -> Callable[[], None]:
    return lambda: trains(store=pipeback.Streaming(sparsity=sparsities.create(policy, **options)))


def flat() -> nn.Module:
    """A model whose weights all have one dimension."""
    return nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6))


class Whole(torch.optim.SGD):
    """An optimizer with a step of its own, which may look at whole matrices."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Half(nn.Linear):
    """A layer of a half type, or not, between tensors of float32."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.to(self.weight.dtype)).float()


def half(masters: bool) -> dict[str, Any]:
    return {"model": nn.Sequential(*(Half(6, 6, dtype=torch.bfloat16) for _ in range(3))), "masters": masters}


def grouped(params: Any, first: int) -> torch.optim.Optimizer:
    both = list(params)
    return sgd([{"params": both[first]}, {"params": both[1 - first], "weight_decay": 0.1}])


def single() -> dict[str, Any]:
    return {"model": nn.Sequential(*(Half(6, 6) for _ in range(3)))}


def one_frozen() -> nn.Module:
    model = network(4)
    model[1].requires_grad_(False)
    return model


ROWS: dict[str, Row] = {
    # models that are followed
    "another structure": Row(
        fickle(stages="block"),
        r"stage \d \(blocks.1\).*gave another structure than when the model was traced.*leaves=",
        fickle(stages=pipeback.Splitting("block", leaves=[""])),
    ),
    "a buffer that stages change": Row(
        lambda: build(Turning(), stages="layer", example=BATCH),
        "buffer 'turn' is changed by the forward, and stages 0 and 1 read it.*leaves=",
        lambda: trains(model=Turning(), stages=pipeback.Splitting("layer", leaves=[""]), example=BATCH),
    ),
    "hooks on the gradients of a model": Row(
        heard(Branching, "first", example=BATCH, stages="layer"),
        r"the model \(Branching\) has hooks on its gradients .*, which are called with the whole module only;.*leaves=",
        heard(Branching, "first", example=BATCH, stages=pipeback.Splitting(leaves=[""])),
    ),
    "such hooks between pushes": Row(
        heard(Branching, "later", example=BATCH, stages="layer"),
        "has got hooks on its gradients after the pipeline was built, which its stages.* build a new Pipeline",
        heard(Branching, "new", example=BATCH, stages="layer"),
    ),
    "hooks on a sequence between pushes": Row(
        heard(lambda: network(3), "later"),
        "modules were added to the model, hooks were registered on it.* build a new Pipeline",
        heard(lambda: network(3), "new"),
    ),
    "a module with buffers in two stages": Row(
        lambda: build(Again(True), stages="layer", example=BATCH),
        r"BatchNorm1d 'first' is called in stages 0 and \d, and its buffer.*use two modules",
        lambda: trains(model=Again(False), stages="layer", example=BATCH),
    ),
    "an embedding with a largest norm in replicas": Row(
        lambda: looked_up(replicas=2, max_norm=1.0),
        "max_norm, by which each replica would bound the rows.*drift apart; use replicas=1, or max_norm=None",
        lambda: [looked_up(max_norm=1.0), looked_up(replicas=2)],
    ),
    # norms
    "one value": Row(
        lambda: build(batch_norm(), micro_batch_size=1).push(BATCH, BATCH),
        r"BatchNorm1d would see one value per channel.*, pipeback.norms.to_group_norm\(model\), or use a larger micro",
        lambda: [
            build(pipeback.norms.to_group_norm(batch_norm()), micro_batch_size=1).push(BATCH, BATCH),
            build(batch_norm(), micro_batch_size=4).push(BATCH, BATCH),
        ],
    ),
    "groups of no channel": Row(
        lambda: norms.to_group_norm(normed(), 0), "group_size .*at least 1.*the default is 2",
        lambda: [trains(model=norms.to_group_norm(normed(), n)) for n in (2, 3)],
    ),
    "groups of one channel": Row(
        lambda: norms.to_group_norm(normed(), 1), r"1 \(BatchNorm1d\): .*groups of one channel.*larger group_size",
        lambda: trains(model=norms.to_group_norm(normed(), 2)),
    ),
    "a norm with hooks": Row(
        lambda: hooked(False), r"1 \(BatchNorm1d\) has hooks.*remove them before", lambda: trains(model=hooked(True))
    ),
    "a norm with parametrizations": Row(
        lambda: parametrized(False), r"1 \(ParametrizedBatchNorm1d\) has parametrizations; remove them with",
        lambda: trains(model=parametrized(True)),
    ),
    "a lazy norm": Row(
        lambda: norms.to_group_norm(nn.Sequential(nn.LazyBatchNorm1d())), "run the model once before",
        lambda: (lambda m: (m(BATCH), trains(model=norms.to_group_norm(nn.Sequential(nn.Linear(6, 6), m[0]))))[1])(
            nn.Sequential(nn.LazyBatchNorm1d())
        ),
    ),
    # sparsity
    "no density": Row(
        sparse(density=0), "Magnitude: density must be a share, above 0 and up to 1", sparse(density=0.5)
    ),
    "too seldom": Row(
        sparse("set", density=0.5, every=0), "every must be a whole number of at least 1, but is 0",
        sparse("set", density=0.5, every=1),
    ),
    "an exclusion of nothing": Row(
        sparse(density=0.5, exclude=["none"]), "exclude='none' names no parameter; there are 0", sparse(
            density=0.5, exclude=["0*"]),
    ),
    "nothing to sparsify": Row(
        lambda: trains(model=flat(), store=pipeback.Streaming(sparsity="magnitude")),
        "no parameter is sparsified.*leave sparsity out",
        lambda: trains(model=flat()),
    ),
    "sparsity of whole matrices": Row(
        lambda: trains(store=pipeback.Streaming(sparsity="magnitude"), optimizer=lambda ps: Whole(ps, lr=0.1)),
        r"sparsity: Whole of stage 0 \(0\) may look at whole matrices.*such as SGD",
        lambda: trains(store=pipeback.Streaming(sparsity="magnitude"), optimizer=sgd),
    ),
    # states
    "without masters": Row(
        loads(half(False), **half(True)), r"stage 0 \(0\).*float32 masters.*with the same masters=",
        loads(half(True), **half(True)),
    ),
    "without masters, in flight": Row(
        loads(half(True), **single()),
        r"stage 0 \(0\): its micro-batches in flight were computed with weights of torch.float32, and here they are of "
        "torch.bfloat16; call pipe.drain.* or build the pipeline with weights of that type",
        loads(single(), **single()),
    ),
    "other members of groups": Row(
        loads({"optimizer": lambda ps: grouped(ps, 1)}, optimizer=lambda ps: grouped(ps, 0)),
        r"stage 0 \(0\): the optimizer's parameter groups have other weights than .*with the same groups of weights",
        loads({"optimizer": lambda ps: grouped(ps, 0)}, optimizer=lambda ps: grouped(ps, 0)),
    ),
    "other frozen weights": Row(
        loads({"model": one_frozen()}), r"stage 1 \(1\): weight .*set requires_grad as it was", loads({})
    ),
    "another shape": Row(
        loads({"model": nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))}),
        "this state belongs to another model; build that one", loads({}),
    ),
    "as one, in flight": Row(
        loads({}, model=network(4), vectorize=True), "only go on in a stack; build the pipeline with vectorize=True",
        loads({"vectorize": True}, vectorize=True),
    ),
    "as one, in flight, with too little room": Row(
        loads({"vectorize": True, "model": network(4), "store": pipeback.HostStore(prefetch=0)}, model=network(4),
              vectorize=True),
        "no room on the device at once with prefetch=0; build the store with prefetch=2",
        loads({"vectorize": True, "model": network(4), "store": pipeback.HostStore(prefetch=2)}, model=network(4),
              vectorize=True),
    ),
    "as one, in flight in one worker": Row(
        loads({"vectorize": True, "workers": 4, "model": network(4)}, model=network(4), vectorize=True),
        "saved with 1 worker or ranks, and this pipeline has 4 workers or ranks.*workers=1",
        loads({"vectorize": True, "workers": 1, "model": network(4)}, model=network(4), vectorize=True),
    ),
}  # fmt: skip
