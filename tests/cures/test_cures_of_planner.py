"""What the planner refuses, and the cures in its messages, typed."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import pipeback
from pipeback.planner import Loss, Model, catalogue, devices, search
from pipeback.planner.candidates import Fixed
from pipeback.planner.constants import NUMBERS, constants
from pipeback.planner.estimates import estimate
from pipeback.planner.hardware import device
from pipeback.planner.options import Option
from pipeback.planner.quantities import cost, count, duration, speed
from pipeback.planner.refusals import NothingFits
from pipeback.planner.routines import read, routine
from pipeback.planner.search import question, within
from pipeback.planner.simulation import simulate
from pipeback.planner.sweeps import StageTimes
from pipeback.planner.techniques import technique
from pipeback.schedules.ops import Op
from pipeback.schedules.timeline import timeline

from .rows import BATCH, Row, build, refused

SMALL = Model.gpt(8, 256, 8, context=128)


def odd(stage, stages):
    yield from (Op("F", 0), Op("F", 1), Op("B", 0), Op("B", 1), Op("F", 2), Op("B", 2), Op("U", 2))


@contextmanager
def own(folder, content):
    """A file of the user's own in the catalogue."""
    file = folder / "own.toml"
    file.write_text(content)
    with patch.dict(os.environ, {catalogue.OWN: str(file)}):
        yield


def found(**fixed):
    return search(SMALL, "8xA100", tokens=1e9, fixed=Fixed(**fixed))


def one(on="4xA100", **more):
    job = question(SMALL, tokens=1e9).job(devices(on))
    return estimate(job, replace(Option(technique("one_f_one_b"), pipeline=4), **more))


def planned(*push):
    pipe = build(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    pipe.push(BATCH, BATCH)
    return pipe.plan(*push, device="H100")


ROWS = {
    "no workers": Row(
        lambda: routine("flowing", 0, 8),
        "workers must be at least 1, but is 0; give for example workers=4",
        lambda: routine("flowing", 4, 8),
    ),
    "groups": Row(
        lambda: routine("interleaved", 4, 6),
        "6 micro-batches are no multiple of 4 workers, which its groups need; give micro_batches=8",
        lambda: routine("interleaved", 4, 8),
    ),
    "times": Row(
        lambda: simulate(routine("flowing", 3, 4), [StageTimes()] * 2),
        "times needs one entry per stage: 3, not 2; give those of each stage",
        lambda: simulate(routine("flowing", 3, 4), [StageTimes()] * 3),
    ),
    "no rounds": Row(
        lambda: read(odd, 2, 3),
        "does not consist of rounds of one forward and one backward; use pipeback.timeline.timeline",
        lambda: list(timeline(odd, 2, 3)),
    ),
    "devices": Row(
        lambda: devices("64 A100"), "cannot be read; write for example devices=64xA100", lambda: devices("64xA100")
    ),
    "speed": Row(
        lambda: speed("link", "fast"),
        'is no speed above 0; write bytes a second, such as "50 GB/s", or bits: "400 Gb/s"',
        lambda: (speed("link", "50 GB/s"), speed("link", "400 Gb/s")),
    ),
    "count": Row(
        lambda: count("tokens", "many"),
        "is no number above 0; write for example tokens=300B, 2M or 1536",
        lambda: (count("tokens", "300B"), count("tokens", "2M"), count("tokens", "1536")),
    ),
    "cost": Row(
        lambda: cost("price", -2),
        "price=-2 is no cost; write a number of at least 0, for example price=2",
        lambda: (cost("price", 0), cost("price", 2)),
    ),
    "duration": Row(
        lambda: duration("in", "soon"),
        "is no time; write for example in=30d, 12h or 2w",
        lambda: (duration("in", "30d"), duration("in", "12h"), duration("in", "2w")),
    ),
    "heads": Row(
        lambda: Model.gpt(4, 10, 3),
        "heads=3 do not divide width=10; give heads=2 or another width",
        lambda: (Model.gpt(4, 10, 2), Model.gpt(4, 12, 3)),
    ),
    "kv_heads": Row(
        lambda: Model.gpt(4, 64, 8, kv_heads=3),
        "do not divide heads=8; give kv_heads=8, or a divisor",
        lambda: (Model.gpt(4, 64, 8, kv_heads=8), Model.gpt(4, 64, 8, kv_heads=2)),
    ),
    "a model without a size": Row(
        lambda: Model.named("gpt:layers=4,width=64"),
        "heads is missing; give heads=..., or one of gpt:125m",
        lambda: (Model.named("gpt:layers=4,width=64,heads=8"), Model.named("gpt:125m")),
    ),
    "stages over layers": Row(
        lambda: found(stages=(9,)),
        "stages=9 are more than the 8 layers of .*; give stages=8 or fewer",
        lambda: found(stages=(8,)),
    ),
    "heads not divided": Row(
        lambda: found(tensor=(3,)), "tensor=3 does not divide heads=8 of .*; give tensor=2", lambda: found(tensor=(2,))
    ),
    "fixed devices": Row(
        lambda: found(stages=(8,), tensor=(2,)),
        "stages=8 tensor=2 are 16 devices, but there are 8; give devices=16xA100",
        lambda: search(SMALL, "16xA100", tokens=1e9, fixed=Fixed(stages=(8,), tensor=(2,))),
    ),
    "a batch that does not divide": Row(
        lambda: found(batch=7, stages=(1,), tensor=(1,)),
        "agrees with what is fixed .*; leave batch=, stages=, replicas= or micro_batch= open",
        lambda: (found(stages=(1,), tensor=(1,)), found(batch=7)),
    ),
    "an option's devices": Row(
        lambda: one(data=2),
        "are 8 devices, more than the 4 there are; give devices=8xA100",
        lambda: one("8xA100", data=2),
    ),
    "an option's words": Row(
        lambda: one(recompute="some"),
        "recompute='some' is unknown to an option, which has none, selective, full; give recompute=none",
        lambda: one(recompute="none"),
    ),
    "stages of a V": Row(
        lambda: one(technique=technique("zb_v")),
        "zb_v has two stages per worker, not 1; give chunks=2",
        lambda: one(technique=technique("zb_v"), chunks=2),
    ),
    "streaming through stages": Row(
        lambda: one(store="host"),
        "the planner streams through whole replicas; give stages=1",
        lambda: one(store="host", pipeline=1),
    ),
    "optimizers": Row(
        lambda: search(SMALL, "8xA100", methods="cerebras"),
        "method=cerebras is written for sgd; give optimizer=sgd",
        lambda: search(SMALL, "8xA100", methods="cerebras", optimizer="sgd"),
    ),
    "batches": Row(
        lambda: Loss(critical_batch=0),
        "critical_batch must be above 0, but is 0; write for example 2e6",
        lambda: Loss(critical_batch=2e6),
    ),
    "too short": Row(
        lambda: within(question(SMALL, tokens=1e12, methods="gpipe"), device("A100"), 60),
        "takes .* at least, on .*; with more devices, the .* binds; give in=",
        lambda: within(question(SMALL, tokens=1e12, methods="gpipe"), device("A100"), 30 * 86_400),
    ),
    "a device that is not here": Row(
        lambda: planned(),
        r'plan: give it a push, whose FLOP are counted: pipe.plan\(x, y, device="H100"\)',
        lambda: planned(torch.randn(4, 6), torch.randn(4, 6)),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_message_says_what_helps(name):
    row = ROWS[name]
    refused(row.broken, row.says)
    row.cured()


MINE = "[devices.mine]\ntflops = 1\nmemory = 1\nmemory_speed = 1\nhost = 1\nscale_up = 1"
NEW = "[constants.mine]\n" + "\n".join(f"{name} = 1.0" for name in NUMBERS)
FILES = {  # what a file says wrongly, who reads it, the message, what it should say
    "tables": ("devices = 3", device, "devices needs one table per name; write for example \\[devices.mine\\]", MINE),
    "devices": (
        "[devices.mine]\ntflops = 1", device, "has no memory; give it in the unit that devices.toml names", MINE,
    ),
    "methods": (
        "[methods.mine]\nslack = 1", technique, "has no routine; give one of those that methods.toml names",
        '[methods.mine]\nroutine = "flowing"',
    ),
    "constants": (
        "[constants.mine]\nstep = 1.0", constants,
        "has no efficiency; write the entry as `pipeback plan fit` prints it",
        NEW,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_ones_own_is_mended(name, tmp_path):
    wrong, reader, says, right = FILES[name]
    with own(tmp_path, wrong):
        refused(lambda: reader("mine"), says)
    with own(tmp_path, right):
        reader("mine")


def test_what_fits_nowhere_says_what_does():
    """Every cure of the message is typed."""
    with pytest.raises(NothingFits) as error:
        search("gpt:175b", "8xA100", methods="gpipe,one_f_one_b")
    for cure in str(error.value).partition("What fits: ")[2].split(", "):
        kind, _, value = cure.partition("=")
        on, stores = (value, ("device",)) if kind == "devices" else ("8xA100", (value,))
        assert search("gpt:175b", on, methods="gpipe,one_f_one_b", fixed=Fixed(stores=stores)).best.fits
    with pytest.raises(NothingFits, match="no number of RTX4090; give devices= with more memory than 24 GB each"):
        within(question("gpt:175b", fixed=Fixed(stages=(1,), tensor=(1,))), device("RTX4090"), 1e9)
    assert within(question("gpt:125m", fixed=Fixed(stages=(1,), tensor=(1,))), device("RTX4090"), 1e9).best.fits


def test_host_memory_that_lacks():
    """And both of its cures."""
    says = r"needs 3.02 GB of host memory, and there are 1e-06 GB. What fits: host=3.1GB, store=device$"
    asked = dict(methods="gpipe", fixed=Fixed(stores=("host",)))
    with pytest.raises(NothingFits, match=says):
        search("gpt:125m", "8xA100", host="1kB", **asked)
    assert search("gpt:125m", "8xA100", host="3.1GB", **asked).best.fits
    assert search("gpt:125m", "8xA100", host="1kB", methods="gpipe").best.fits


def test_more_devices_than_there_is_work_for():
    says = r"more devices than updates .*; give devices=(\d+xA100), or a larger critical_batch="
    with pytest.raises(NothingFits, match=says) as error:
        search("gpt:125m", "1000000xA100", methods="gpipe")
    assert search("gpt:125m", re.search(says, str(error.value))[1], methods="gpipe").best.fits
    assert search("gpt:125m", "1000000xA100", methods="gpipe", target=Loss(1e9)).best.fits


def test_a_plan_of_the_model_at_hand_streams_through_stages():
    """The other cure of streaming through stages."""
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    pipe = pipeback.Pipeline(model, loss=nn.functional.mse_loss, optimizer=sgd, method="pb", store="host")
    assert pipe.plan(torch.randn(4, 6), torch.randn(4, 6), device="H100").push.weights_in > 0
