"""Law: any two methods with the same delays are a chain, or are refused by name; PB in a chain changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch

import pipeback
from pipeback import Method, methods
from pipeback.methods.base import When
from tests.helpers.choice import mostly_rare, rare
from tests.laws import as_one
from tests.laws.cases import OPTIMIZERS, STAGES, data, everything, network, pipeline

FLOWING: dict[str, Callable[[], Method]] = {
    name: lambda name=name, options=options: methods.create(name, slack=2, **options)
    for name, options in {
        "pb": {}, "pipedream": {}, "pipemare": {"anneal": 6}, "spectrain": {}, "lwp": {}, "sc": {}, "cerebras": {},
        "ef": {}, "pipeoptim": {}, "msnag": {}, "gap_aware": {}, "dc_asgd": {}, "braking": {}, "staleness_lr": {},
        "eigendelay": {},
    }.items()
}  # fmt: skip
FLOWING["lwp-weight"] = lambda: methods.create("lwp", form="weight")
FLOWING["pipemare-t1"] = lambda: methods.create("pipemare", slack=2, anneal=6, t2=False)  # shifts no weights
FLOWING["spectrain-v2"] = lambda: methods.create("spectrain", slack=2, version=2)
FLOWING["eigendelay-plain"] = lambda: methods.create("eigendelay", sides=0)  # Adam's moments stay where they are
PAIRS = list(permutations(FLOWING, 2))
LAST = ("sc", "cerebras", "eigendelay", "eigendelay-plain")  # they make the step themselves
READS = ("pipeoptim", "msnag")  # Adam's second moment
MOMENTUM = ("lwp", "cerebras", "spectrain", "spectrain-v2")


def optimizer(*names: str) -> str | None:
    """An optimizer that all of these methods allow; None if there is none."""
    for name in ("momentum", "adamw"):
        allowed = True
        for method in names:
            try:
                FLOWING[method]().check(OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))]), STAGES)
            except ValueError:
                allowed = False
        if allowed:
            return name
    return None


def trained(method: Method, name: str, **options: Any) -> tuple[pipeback.Pipeline, torch.Tensor]:
    pipe = pipeline(network(), method, name, micro_batch_size=3, **options)
    for x, y in data(14):
        pipe.push(x, y)
        for stage in pipe._engine.stages:
            assert stage.copies() <= method.held(stage.index, STAGES)
    return pipe, everything(pipe)


@pytest.mark.parametrize("pair", [pytest.param(pair, id="+".join(pair)) for pair in PAIRS])
def test_two_methods_are_a_chain_or_refused_by_name(pair: tuple[str, str]) -> None:
    one, other = (FLOWING[name]() for name in pair)
    if pair[0] in LAST:
        with pytest.raises(ValueError, match="makes the step itself, with nothing inside; put it last") as told:
            pipeback.chain(one, other)
        assert repr(one) in str(told.value)
        return
    if pair[0] in READS and pair[1] == "eigendelay":
        with pytest.raises(ValueError, match="leave one of them out") as told:
            pipeback.chain(one, other)
        assert repr(one) in str(told.value) and repr(other) in str(told.value)
        return
    if (given := optimizer(*pair)) is None:
        assert any(name in MOMENTUM for name in pair) and pair[1].startswith("eigendelay")
        with pytest.raises(ValueError, match="is written for .*; use method="):
            trained(pipeback.chain(one, other), "adamw")
        return
    method = pipeback.chain(one, other)
    _, found = trained(method, given)
    assert torch.isfinite(found).all()
    assert method.delays(STAGES) == one.delays(STAGES) == other.delays(STAGES)


RUN = [pair for pair in PAIRS if pair[0] not in LAST and optimizer(*pair)]
RUN = [pair for pair in RUN if not (pair[0] in READS and pair[1] == "eigendelay")]
SOME = (("dc_asgd", "eigendelay"), ("gap_aware", "pipeoptim"), ("braking", "cerebras"), ("ef", "msnag"),
        ("pipemare", "dc_asgd"), ("pipemare", "msnag"), ("staleness_lr", "spectrain-v2"))  # fmt: skip


@pytest.mark.parametrize(
    "pair",
    [rare(pair, id="+".join(pair)) if pair not in SOME else pytest.param(pair, id="+".join(pair)) for pair in RUN],
)
def test_every_chain_has_the_same_bits_in_workers_and_stores_and_goes_on(pair: tuple[str, str]) -> None:
    given = optimizer(*pair)
    assert given is not None
    make = lambda: pipeback.chain(*(FLOWING[name]() for name in pair))  # noqa: E731
    pipe, wanted = trained(make(), given)
    for options in ({"workers": 2}, {"store": "host"}):
        other, found = trained(make(), given, **options)
        other.close()
        assert torch.equal(found, wanted), options
    state = pipe.state_dict()
    resumed = pipeline(network(seed=9), make(), given, micro_batch_size=3)
    resumed.load_state_dict(state)
    for x, y in data(6, seed=4):
        pipe.push(x, y)
        resumed.push(x, y)
    assert torch.equal(everything(resumed), everything(pipe))


ALONG = [("pipemare-t1", name) for name in ("lwp", "cerebras", "spectrain", "spectrain-v2", "msnag", "gap_aware")]
ALONG += [("pipemare", "msnag"), ("pipemare", "pipemare-t1"), ("lwp-weight", "pipemare-t1"), ("lwp-weight", "pipemare")]


@pytest.mark.parametrize(
    "names",
    # rounding chooses the bases of so small micro-batches
    mostly_rare({"+".join(pair): pair for pair in RUN if "eigendelay" not in pair}, *map("+".join, ALONG)),
)
def test_every_chain_has_the_same_numbers_as_one(names: str) -> None:
    pair = names.split("+")
    method = pipeback.chain(*(FLOWING[name]() for name in pair))
    one, other = as_one.pipelines(method, optimizer(*pair))
    as_one.same(as_one.pushed(other), as_one.pushed(one))


@pytest.mark.parametrize("name", [name for name in FLOWING if name != "pb"])
def test_pb_in_a_chain_changes_nothing(name: str) -> None:
    given = optimizer(name)
    assert given is not None
    parameters = lambda pipe: torch.cat([p.detach().flatten() for p in pipe.model.parameters()])  # noqa: E731
    wanted = parameters(trained(FLOWING[name](), given)[0])
    chains = [("pb", name)] if name in LAST else [("pb", name), (name, "pb")]
    for pair in chains:
        pipe, _ = trained(pipeback.chain(*(FLOWING[each]() for each in pair)), given)
        assert torch.equal(parameters(pipe), wanted), pair


@pytest.mark.parametrize("hook", ["forward", "backward"])
def test_shifts_of_two_methods_are_added_up(hook: str) -> None:
    """LWP over 1 and over 2 updates is LWP over 3; SpecTrain after LWP shifts the backward alone as well."""
    lwp = lambda T: methods.create("lwp", horizon=T)  # noqa: E731
    chained = pipeback.chain(lwp(1), lwp(2)) if hook == "forward" else pipeback.chain(lwp(0), FLOWING["spectrain"]())
    alone = lwp(3) if hook == "forward" else FLOWING["spectrain"]()
    found = []
    for method in (chained, alone):
        pipe = pipeline(network(dtype=torch.float64), method, "momentum")
        for x, y in data(30, dtype=torch.float64):
            pipe.push(x, y)
        pipe.drain()
        found.append(torch.cat([p.detach().flatten() for p in pipe.model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_a_method_without_hooks_says_nothing_in_a_chain() -> None:
    """So stages that run as one, which ask what a chain corrects, take chains with `pb` in them."""
    when = When(1, 3, 0, 0, 2, (0.1, 0.1), (2, 2))
    sc = methods.create("sc")
    assert pipeback.chain(methods.create("pb"), sc).correction(when, {}) == sc.correction(when, {})
