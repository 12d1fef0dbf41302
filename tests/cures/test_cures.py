"""Each refusal says what to do: its cure is taken out of the message, typed, and works.

A row is what goes wrong, what the message says (place or option, what was found, the cure, in that order), and the same
with the cure. Options that a message names as `name=value` are evaluated as they stand there.
"""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import pipeback
from pipeback.schedules.order import POLICIES
from tests.helpers.long_forms import grouped
from tests.laws.cases import data, network

from . import building, calls, of_later_methods, of_methods, of_models, of_options, of_own_methods, of_runs
from .rows import (
    BATCH,
    Branching,
    build,
    refused,
    train,
    trains,
)

TYPED = r"[Uu]se ([a-z_]+)=((?:\"[^\"]*\"|'[^']*'|[^,;\s])+)"
ROWS = {
    **building.ROWS, **of_methods.ROWS, **of_later_methods.ROWS, **of_models.ROWS, **of_options.ROWS, **of_runs.ROWS,
    **of_own_methods.ROWS, **calls.ROWS,
}  # fmt: skip


# -- options whose cure stands in the message as name=value ------------------------------------------------------------

OPTIONS: list[tuple[dict[str, Any], str]] = [
    *[({"vectorize": True, name: value}, f"vectorize=True does not go with {name}=") for name, value in (
        ("sparsity", "magnitude"), ("activations", "host"), ("order", "random"),
    )],
    ({"vectorize": "cuda_graph", "store": "host"}, "^a store does not go with vectorize='cuda_graph'"),
    ({"vectorize": True, "store": "host", "method": "gpipe"}, "vectorize=True: with a store, a method of flushes"),
    *[({"order": "skewed", name: value}, f'order="skewed" does not go with {name}=') for name, value in (
        ("workers", 2), ("replicas", 2), ("store", "host"),
    )],
    *[({"loss": None, name: value}, f"loss=None does not go with {name}=") for name, value in (
        ("micro_batch_size", 2), ("weights", "samples"), ("check_finite", True), ("replicas", 2),
    )],
    ({"take_back": 3, "vectorize": True}, "take_back=3 does not go with vectorize="),
    ({"masters": True, "store": "host"}, "masters=True does not go with store="),
    ({"vectorize": True, "method": "sgd", "model": nn.Sequential(nn.Linear(6, 6))},
     "vectorize=True: no stages are alike"),
    ({"stages": "block", "example": torch.randn(4, 6), "model": nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))},
     'stages="block": .* repeats no block'),
]  # fmt: skip


def typed(told: str) -> dict[str, Any]:
    return {name: eval(value) for name, value in re.findall(TYPED, told)[:1]}


@pytest.mark.parametrize(("options", "says"), OPTIONS, ids=lambda value: value if type(value) is str else "")
def test_an_option_in_the_message(options, says):
    options = {**grouped(options), "model": options.get("model") or network(4)}
    cure = typed(refused(lambda: build(**options), says))
    assert cure, "no option to type"
    trains(**{**options, **cure})


CHOICES = {
    "weights": "some", "weight_functions": "x", "link": "x", "order": "x", "activations": "x", "vectorize": "x",
    "balance": "x", "masters": "x",
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_every_word_that_is_named(name):
    more = {"model": Branching(), "example": torch.randn(4, 6), "stages": 2} if name == "balance" else {}
    told = refused(lambda: build(**grouped({**more, name: CHOICES[name]})), name)
    listed = re.search(r"(?:must be (?:one of )?|choose one of )(.*?)(?:,? but is|$)", told)
    assert listed, told
    words = [word.strip().strip('"') for word in re.split(r",| or ", listed[1]) if word.strip()]
    values = [{"True": True, "False": False}.get(word, word) for word in words]
    values = [value for value in values if value not in ("a list", "a list or a dict of such", "a dict of such")]
    assert len(values) > 1
    for value in values:
        if value != "cuda_graph":  # which needs all stages on a GPU
            trains(**grouped({"model": network(4), **more, name: value}))


@pytest.mark.parametrize(
    "name", ["micro_batch_size", "workers", "replicas", "clip_norm", "clip_value", "timeout", "take_back"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_the_least_number(name, value):
    told = refused(lambda: build(**grouped({name: value})), f"{name.removeprefix('clip_')} must be .* but is {value}")
    found = re.search(r"at least (\d+)|above (\d+)", told)
    assert found
    least = int(found[1]) if found[1] else int(found[2]) + 1
    trains(**grouped({name: least}))
    if name != "timeout":
        assert "None" in told
        trains(**grouped({name: None}))


# -- everything else: what goes wrong, what is said, and the cure -----


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ROWS)
def test_the_cure_works(name):
    row = ROWS[name]
    refused(row.broken, row.says)
    row.cured()


def test_a_closed_pipeline_is_reopened():
    pipe = build()
    saved = pipe.state_dict()
    pipe.close()
    refused(lambda: pipe.push(*data(1)[0]), r"closed.*load_state_dict\(\) reopens it")
    pipe.load_state_dict(saved)
    train(pipe)


def out_of_range(**options):
    """A pipeline that has seen a label which its loss does not know, and the state of before."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4))
    pipe = build(model, loss=nn.functional.cross_entropy, **options)
    for x, _ in data(5, 4):
        pipe.push(x, torch.tensor([0, 1, 2, 3]))
    state = pipe.state_dict()

    def push(label):
        pipe.push(data(1, 4)[0][0], torch.tensor([0, 1, 2, label]))
        pipe.wait()

    return pipe, state, push


def test_what_cannot_be_trained_on_is_taken_back():
    pipe, _, push = out_of_range()
    says = r"stage 2 \(2\), micro-batch 5: .* 9 is out of bounds.*; nothing was trained on it, and others may be pushed"
    refused(lambda: push(9), says)
    push(3)
    assert pipe.arrived == 6


def test_what_could_not_be_taken_back():
    pipe, state, push = out_of_range(workers=2)
    refused(lambda: push(9), r"stage 2 \(2\), micro-batch 5: .* 9 is out of bounds")
    says = (
        r"closed: stage 2 .*load_state_dict\(\) reopens it with a state of pipe.state_dict\(\) from before.*shown\(\)"
        r".*built with debug=pipeback.Debug\(take_back=100\), which keeps a state every 100 pushes"
    )
    refused(lambda: push(3), says)
    with pipe.shown():
        assert all(torch.isfinite(p).all() for p in pipe._engine.model.parameters())
    pipe.load_state_dict(state)
    push(3)
    assert pipe.arrived == 6
    pipe.close()
    pipe, _, push = out_of_range(workers=2, debug=pipeback.Debug(take_back=100))
    refused(lambda: push(9), "stage 2 .* 9 is out of bounds.*; push 5 was left out, as if it had not come")
    push(3)
    assert pipe.arrived == 6
    pipe.close()


class Armed(torch.autograd.Function):
    """Its backward fails for negative micro-batches."""

    @staticmethod
    def forward(ctx, x):
        ctx.bad = bool((x < -100).all())
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.bad:
            raise ValueError("bad values")
        return gradient


class Last(nn.Module):
    def forward(self, x):
        return Armed.apply(x)


def test_what_came_before_weights_were_written_is_not_taken_back():
    def fails(drains):
        model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), Last()), nn.Linear(6, 6), nn.Linear(6, 6))
        nn.init.constant_(model[0][0].weight, 1.0)
        pipe = build(model, method="pb", workers=2, debug=pipeback.Debug(take_back=100))
        pipe.push(BATCH, BATCH)
        pipe.push(torch.full((4, 6), -1e4), BATCH)
        with suppress(pipeback.PushLeftOut):
            (pipe.drain if drains else pipe.wait)()
        with torch.no_grad():
            pipe.model[2].weight.mul_(0.5)
        try:
            for _ in range(2):
                with suppress(pipeback.StageError):
                    for _ in range(8):
                        pipe.push(BATCH, BATCH)
                    pipe.wait()  # the worker may be behind
        finally:
            closed = pipe.closed
            pipe.close()
        return closed

    says = r"take_back did not help, since the micro-batch came before the first state.*call drain\(\) before you do so"
    refused(lambda: fails(drains=False), says)
    assert not fails(drains=True)


def test_states_that_are_kept_beside_a_disk_store(tmp_path):
    kept = {"debug": pipeback.Debug(take_back=3)}
    told = refused(
        lambda: build(store=f"disk:{tmp_path}", **kept),
        f"take_back=3 does not go with store='disk:{tmp_path}'; use store=\"host\", or leave take_back out",
    )
    trains(**typed(told), **kept)
    trains(store=f"disk:{tmp_path}")


def test_commit_with_a_folder(tmp_path):
    pipe = build(store=f"disk:{tmp_path}")
    pipe.push(BATCH, BATCH)
    pipe.commit()
    refused(lambda: build(store=f"disk:{tmp_path}"), "uses this store; wait for it, or give another folder")
    pipe.close()
    train(build(store=f"disk:{tmp_path}"))


def test_a_store_of_another_pipeline(tmp_path):
    store = pipeback.DiskStore(tmp_path / "a")
    pipe = build(store=store)
    says = "this store serves a pipeline already; close that one, or give the other a store of its own, in another"
    refused(lambda: build(store=store), says)
    trains(store=pipeback.DiskStore(tmp_path / "b"))
    pipe.close()
    trains(store=store)


def test_what_is_written_where_weights_are_in_files(tmp_path):
    pipe = build(store=f"disk:{tmp_path}")
    pipe.push(BATCH, BATCH)
    pipe.wait()
    bias = next(m.bias for m in pipe._engine.model.modules() if isinstance(m, nn.Linear))
    nn.init.zeros_(bias)
    says = "what was written into the module's is lost; write it once more within `with pipe.shown\\(changes=True\\):`"
    refused(lambda: pipe.push(BATCH, BATCH), says)
    with pipe.shown(changes=True):
        nn.init.zeros_(bias)
    train(pipe)


def test_every_order_is_named():
    assert all(order in refused(lambda: build(debug=pipeback.Debug(order="x")), "order") for order in POLICIES)


def test_a_closed_store_is_opened_by_a_new_pipeline(tmp_path):
    pipe = build(store=f"disk:{tmp_path}")
    pipe.push(BATCH, BATCH)
    pipe.commit()
    state = pipe.state_dict()
    pipe.close()
    says = "the store was closed with the pipeline; build a new Pipeline, which goes on from it"
    refused(lambda: pipe.load_state_dict(state), says)
    with pytest.warns(
        UserWarning, match="holds a version of an earlier training, and this one goes on, .* another folder"
    ):
        train(build(store=f"disk:{tmp_path}"))
    train(build(store=f"disk:{tmp_path / 'another'}"))


def test_a_loop_that_begins_at_0_again():
    state = (pipe := build()).push(BATCH, BATCH) and pipe.state_dict()
    again = build()
    again.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"begin it at pipe.pushes, for example for step in range\(pipe.pushes, steps"):
        again.push(BATCH, BATCH)
    cured = build()
    cured.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(cured.pushes, 3):
            cured.push(BATCH + step, BATCH)


def test_threads_that_share_the_cores():
    threads = torch.get_num_threads()
    torch.set_num_threads(2 * (os.cpu_count() or 1))
    try:
        with pytest.warns(UserWarning, match=r"share \d+ cores; call torch.set_num_threads\(1\) before training"):
            train(build(workers=2))
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(build(workers=2))
    finally:
        torch.set_num_threads(threads)


def test_how_many_checkpoints_remain(tmp_path):
    pipe = build()
    refused(
        lambda: pipeback.checkpoint.save(pipe, tmp_path, keep=0), "at least the new checkpoint remains; give 1 or more"
    )
    pipeback.checkpoint.save(pipe, tmp_path, keep=1)
