"""activations= one kind a stage: each stage keeps what its kind says; the bits are those of the kinds alone."""

import ast
from pathlib import Path

import pytest
import torch

import pipeback
from pipeback.stages.activations import KINDS, kinds
from pipeback.stages.offload import HostActivations
from pipeback.stages.recompute import Recompute
from tests.laws.cases import CASES, STAGES, data, everything, network, pipeline

MIXED = {0: "recompute", "2": "host"}


def trained(case, activations, **options):
    pipe = pipeline(network(), CASES[case](STAGES), activations=activations, **options)
    losses = torch.stack([pipe.push(x, y).clone() for x, y in data(13)])
    pipe.drain()
    result = losses, everything(pipe)
    pipe.close()
    return pipe, result


@pytest.mark.parametrize("asked", [MIXED, ["recompute", "device", "host", "device", "device"]], ids=["dict", "list"])
def test_each_stage_has_its_own(asked):
    pipe = pipeline(network(), "gpipe", activations=asked)
    found = [type(stage.keeping) for stage in pipe._engine.stages]
    assert found == [Recompute, type(None), HostActivations, type(None), type(None)]


@pytest.mark.parametrize("case", ["gpipe-4", "one_f_one_b-3", "pipedream", "pipedream_2bw", "spectrain-v2", "sgd"])
def test_methods_that_flush_or_stash_have_the_same_bits(case):
    _, wanted = trained(case, "device")
    for options in ({}, {"workers": 2}):
        _, found = trained(case, MIXED, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("case", ["pb", "cerebras", "pipemare", "spectrain"])
def test_flowing_methods_recompute_on_newer_weights_where_asked(case):
    _, device = trained(case, "device")
    _, last = trained(case, {STAGES - 1: "recompute"})
    _, host = trained(case, {1: "host"})
    assert torch.equal(host[1], device[1])
    if case in ("pb", "cerebras"):
        assert torch.equal(last[1], device[1]), "the last stage has no delay"
    _, first = trained(case, {0: "recompute"})
    _, threads = trained(case, {0: "recompute"}, workers=2)
    assert not torch.equal(first[1], device[1]) and torch.equal(first[1], threads[1])


def test_a_state_goes_on_under_other_kinds():
    pipe = pipeline(network(), "pipedream", activations=MIXED)
    other = pipeline(network(seed=3), "pipedream", activations=["host", "recompute", "device", "host", "recompute"])
    batches = data(15)
    for x, y in batches[:8]:
        pipe.push(x, y)
    other.load_state_dict(pipe.state_dict())
    for x, y in batches[8:]:
        pipe.push(x, y), other.push(x, y)
    pipe.drain(), other.drain()
    assert torch.equal(everything(pipe), everything(other))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("hsot", "must be one of device, recompute, host, but is 'hsot'$"),
        (["host"], "1 kind for 3 stages"),
        (["host", "device", "recomp"], r"but is 'recomp' for stage 2 \(c\)"),
        ({"d": "host"}, "there is no stage 'd'; there are a, b, c, numbered from 0 to 2"),
        ({3: "host"}, "there is no stage 3"),
        ({True: "host"}, "there is no stage True"),
        ({-1: "host"}, "there is no stage -1"),
        ({"b": "host", 1: "host"}, r"stage 1 \(b\) is named twice"),
        ({"b": "gone"}, r"but is 'gone' for stage 1 \(b\)"),
        (7, "a list or a dict of such, but is 7"),
    ],
)
def test_what_cannot_be_is_refused_by_name(asked, says):
    with pytest.raises(ValueError, match=says):
        kinds(asked, ["a", "b", "c"])


class Another(Recompute):
    """A further kind that recomputes."""


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"vectorize": True}, {"compile": {"backend": "eager"}}])
def test_a_further_kind_is_a_class_and_its_name(options, monkeypatch):
    """What the other rooms must know of a kind, its policy says."""
    monkeypatch.setitem(KINDS, "another", Another)
    _, wanted = trained("pb", "recompute", **options)
    pipe, found = trained("pb", "another", **options)
    assert all(type(stage.keeping) is Another for stage in pipe._engine.stages)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_no_other_file_asks_for_a_kind_by_its_name():
    package = Path(pipeback.__file__).parent
    naming = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path.parent.name != "planner"  # whose options are those of other libraries, too
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == "recompute"
    }
    assert naming == {"stages/activations.py"}
