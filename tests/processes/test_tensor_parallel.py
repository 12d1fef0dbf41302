"""Law: stages that several ranks compute together equal those of one process within rounding, in float64."""

from functools import partial

import pytest
import torch

from tests.helpers.choice import mostly_rare, rare
from tests.laws.cases import CASES, STAGES
from tests.processes import tensor_cases, tensor_families
from tests.processes.tensor_cases import (
    OWN,
    adafactor,
    calm,
    far,
    found,
    language_model,
    loaded,
    made_of,
    muon,
    on_disk,
    perceptron,
    replicated,
    resumed,
    rotated,
    saved,
    separate,
    square,
    train,
    train_model,
    watched,
)

WHOLE = [case for case in CASES if not CASES[case](STAGES).elementwise]
SPREAD = [case for case in CASES if case not in WHOLE]


def odd_cases(crew, cases, tensor, **options):
    """What differs from one process, by case and rank."""
    odd = {}
    for case in cases:
        wanted = train(case, **options)
        for rank, result in enumerate(crew.run(train, case, tensor, **options)):
            if differs := far(result, wanted):
                odd[f"{case}, rank {rank}"] = differs
    return odd


@pytest.mark.parametrize(
    ("tensor", "cases"),
    [
        (2, ["pb", "pipedream", "cerebras", "gpipe-4", "zb_v"]),
        rare(4, ["pb", "spectrain"]),
        rare(2, SPREAD),
        rare(4, SPREAD),
    ],
)
def test_every_method_equals_one_process(crew, tensor, cases):
    """Four ranks: 2 workers × 2 shards, and 1 × 4."""
    assert odd_cases(crew.ranks(4), cases, tensor) == {}


@pytest.mark.parametrize("options", [{}, rare({"store": "host"}), rare({"clip_norm": 0.1})])
def test_methods_that_look_at_whole_weights(crew, options):
    """They update whole weights on every rank."""
    options = {"samples": 64, "model": square, **options}
    assert odd_cases(crew.ranks(4), ["braking"], 2, **options) == {}
    assert odd_cases(crew.ranks(4), ["eigendelay"], 2, optimizer=calm, **options) == {}


@pytest.mark.parametrize(("tensor", "cases"), [rare(2, WHOLE), rare(4, ["braking", "eigendelay-one-side"])])
def test_every_method_that_looks_at_whole_weights(crew, tensor, cases):
    options = {"samples": 64, "model": partial(square, 6 if tensor == 2 else 8), "optimizer": calm}
    assert odd_cases(crew.ranks(4), cases, tensor, **options) == {}


@pytest.mark.parametrize(("tensor", "cases", "options"), [
    (2, ["gpipe-4"], {"optimizer": muon}), rare(2, ["zb_v"], {"optimizer": adafactor}),
    (2, ["pb"], {"optimizer": rotated, "samples": 64, "model": square}), rare(4, ["pipedream"], {"optimizer": muon}),
    rare(2, ["pb"], {"optimizer": muon}), rare(2, ["pb"], {"optimizer": adafactor}),
    rare(2, ["pipedream"], {"optimizer": adafactor, "store": "host"}),
    rare(2, ["pb"], {"optimizer": muon, "store": "host", "clip_norm": 0.1}),
])  # fmt: skip
def test_optimizers_that_look_at_whole_weights(crew, tensor, cases, options):
    """They step whole weights on every rank."""
    assert odd_cases(crew.ranks(4), cases, tensor, **options) == {}


@pytest.mark.parametrize("options", [{"clip_norm": 0.05}, {"store": "host"}, {"activations": "recompute"}])
def test_options(crew, options):
    """The norm by which gradients are clipped is that of the whole weights; a store streams this rank's shards."""
    assert odd_cases(crew.ranks(4), ["pb"], 2, **options) == {}


def test_our_own_transformer(crew):
    wanted = train_model(language_model)
    for result in crew.ranks(4).run(train_model, language_model, 2, OWN):
        assert far(result, wanted) == []


@pytest.mark.parametrize("family", [rare("gpt2"), rare("llama"), rare("vit"), "mixtral"])
def test_known_families(crew, family):
    """Models of transformers, traced, with the plan of their family. Mixtral's experts travel, all to all."""
    build = getattr(tensor_families, family)
    wanted = train_model(build)
    for result in crew.ranks(4).run(train_model, build, 2):
        assert far(result, wanted) == []


def test_experts_that_are_full_drop_what_comes_later(crew):
    """The reference is written choice by choice. Every choice is counted once: it is computed, or dropped."""
    capacity = 0.75
    pipe, batches = made_of(partial(tensor_families.dropping, capacity))
    for x, y in batches:
        pipe.push(x, y)
    pipe.drain()
    wanted = found(pipe, batches[:1])
    loads = {}
    for result, load in crew.ranks(4).run(loaded, capacity):
        assert far(result, wanted) == []
        assert all(loads.setdefault(path, each) == each for path, each in load.items())
    assert sorted(loads) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    for tokens, dropped in loads.values():
        assert sum(tokens) + dropped == len(batches) * 2 * 5 * 2
        assert dropped > 0 and max(tokens) <= len(batches) * 4


KEPT_WHOLE = [
    *((case, {}) for case in ("cerebras", "pipemare", "pipeoptim", "ef", "braking")),
    ("eigendelay", {"model": square, "samples": 64, "optimizer": calm}),
    # shard, basis: 6×6
    ("eigendelay-one-side", {"model": partial(square, 12), "samples": 64, "optimizer": calm}),
    ("pb", {"optimizer": adafactor}),
    ("pb", {"optimizer": muon}),
    # shard, basis: 6×6
    ("gpipe-4", {"model": partial(square, 12), "samples": 64, "optimizer": rotated}),
]
STATES = [(*each, flying, folder) for each in KEPT_WHOLE for flying in (None, "recompute") for folder in (False, True)]


@pytest.mark.parametrize(
    ("case", "options", "flying", "folder"),
    mostly_rare(STATES, ("cerebras", {}, "recompute", True)),
)
def test_a_state_loads_on_any_mesh(crew, tmp_path, case, options, flying, folder):
    """Saved under 2 × 2, it goes on in one process and under 1 × 4, and back; a basis is whole on every rank."""
    most = 2 if "model" in options else 4  # shards into which the layers can be cut
    saved, resumed = partial(tensor_cases.saved, **options), partial(tensor_cases.resumed, **options)
    crew, alone, mesh = crew.ranks(4), str(tmp_path / "alone"), str(tmp_path / "mesh")
    one = saved(case, 1, alone, flying)
    states = crew.run(saved, case, 2, mesh, flying)
    wanted = resumed(case, 1, one, flying)
    assert far(resumed(case, 1, mesh if folder else states[0], flying), wanted) == []
    for tensor, source in ((2, alone), (most, mesh)) if folder else ((2, one), (most, states[1])):
        for result in crew.run(resumed, case, tensor, source, flying):
            assert far(result, wanted) == []


def refused(*arguments):
    try:
        resumed(*arguments)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", ["cerebras", *map(rare, ["pb", "pipemare", "pipedream", "ef"])])
@pytest.mark.parametrize(
    ("model", "flying"), [(perceptron, "device"), rare(separate, "device"), rare(separate, "recompute")]
)
def test_micro_batches_in_flight_go_on_with_as_many_shards(crew, tmp_path, case, model, flying):
    """Their graphs hold what each rank has computed. The number of workers may be another; that of shards may not."""
    folder = str(tmp_path)
    wanted = resumed(case, 1, saved(case, 1, str(tmp_path / "alone"), flying, model), flying, model)
    states = crew.ranks(4).run(saved, case, 2, folder, flying, model)
    for ranks, source in ((4, states[0]), (4, folder), (2, folder)):
        for result in crew.ranks(ranks).run(resumed, case, 2, source, flying, model):
            assert far(result, wanted) == []
    told = "its micro-batches in flight hold activations as 2 ranks computed them, and here 1 rank would go on"
    assert told in refused(case, 1, folder, flying, model)
    crew = crew.ranks(4)
    assert all("as 2 ranks computed them" in text for text in crew.run(refused, case, 4, folder, flying, model))
    crew.again()


@pytest.mark.parametrize("options", [{}, rare({"store": "host", "clip_norm": 0.05})])
def test_watched_gaps_are_those_of_whole_weights(crew, options):
    wanted = watched(1, **options)
    assert all(value == value for some in wanted for value in some)
    seen = set()
    for result in crew.ranks(4).run(watched, 2, **options):
        for mine, one in zip(result, wanted, strict=True):
            there = [s for s, value in enumerate(mine) if value == value]
            seen.update(there)
            assert all(abs(mine[s] - one[s]) <= 1e-10 for s in there)
    assert seen == set(range(len(wanted[0])))


@pytest.mark.parametrize("case", ["cerebras", *map(rare, ["pipedream", "pipemare", "gpipe-4"])])
def test_a_store_on_disk_has_the_shards_of_its_rank(crew, tmp_path, case):
    wanted = resumed(case, 1, saved(case, 1, str(tmp_path / "alone"), "device"), "device")
    folder = str(tmp_path / "store")
    for result in crew.ranks(4).run(on_disk, case, 2, folder, 20):
        assert far(result, wanted) == []
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [f"rank-{n}" for n in range(4)]


def test_micro_batches_in_flight_of_one_process_do_not_go_on_in_shards(crew, tmp_path):
    saved("cerebras", 1, str(tmp_path), "device")
    told = "its micro-batches in flight hold activations as 1 rank computed them, and here 2 ranks would go on"
    assert all(told in text for text in crew.ranks(4).run(refused, "cerebras", 2, str(tmp_path), "device"))
    crew.again()


def test_replicas_whose_stages_are_spread(crew):
    """A mesh of 2 replicas × 1 worker × 2 shards."""
    wanted = replicated(1)
    for weights in crew.ranks(4).run(replicated, 2):
        assert all(torch.allclose(weights[name], value, rtol=0, atol=1e-10) for name, value in wanted.items())
