"""Marks: a number is marked where its inputs lie outside what was compared with measurements, and nowhere else."""

import pytest

from pipeback.planner import Loss, Model, devices
from pipeback.planner.estimates import Job, estimate
from pipeback.planner.options import Option
from pipeback.planner.precisions import precision
from pipeback.planner.techniques import technique

SMALL = Model.gpt(layers=16, width=2048, heads=16, context=2048)


def marks(on, model=SMALL, method="one_f_one_b", **options):
    job = Job(model, devices(on), precision(), 1e9, Loss(), "adamw")
    return estimate(job, Option(technique(method), **options)).marks


def test_what_was_compared_has_no_mark():
    assert not marks("8xA100", data=2, pipeline=2, tensor=2, micro_batches=4, recompute="full")
    assert not marks("8xA100-40", data=8, shard="all")
    assert not marks("512xH100", data=512, shard="all")


@pytest.mark.parametrize("on, options, says", [
    ("8xA100", dict(data=8), "constants default are compared with runs of recompute selective and full alone"),
    ("8xH100", dict(data=8, recompute="full"), "constants of A100, by the data sheet of H100"),
    ("8xH200", dict(data=8, shard="all"), "constants of H100, by the data sheet of H200"),
    ("1024xH100", dict(data=1024, shard="all"), "constants fsdp_h100 are compared with runs of devices 8 to 512 alone"),
    ("16xH100", dict(data=8, tensor=2, shard="all"),
     "constants fsdp_h100 are compared with runs of tensor 1 alone"),
    ("8xA100", dict(data=8, recompute="full", store="host", shard="optimizer"),
     "weight streaming is compared with runs on this machine alone"),
    ("4xA100", dict(method="zb_h1", pipeline=4, micro_batches=8, recompute="full"),
     "of zero-bubble schedules, bubbles are compared with published ones, and seconds are not"),
    ("4xA100", dict(method="pb", pipeline=4, recompute="full"),
     "the price of the delay is assumed: that of PipeDream with AdamW"),
])  # fmt: skip
def test_what_was_not_says_why(on, options, says):
    assert says in marks(on, **options)


def test_longer_contexts_and_other_widths():
    long = Model.gpt(layers=8, width=512, heads=8, context=8192)
    assert marks("2xA100", long, data=2, recompute="full") == [
        "constants default are compared with runs of width 1,024 to 20,480 alone",
        "constants default are compared with runs of context 1,024 to 2,048 alone",
    ]
