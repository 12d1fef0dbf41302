"""A budget that is too small is refused before anything is trained, and what is recommended fits."""

import re

import pytest
import torch

from pipeback import byte_sizes
from pipeback.plan.budget import check
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore
from tests.laws.cases import network, pipeline, weights
from tests.plan.planned import SAMPLES, pushed


def wide(**options):
    """Stages of 64 × 64: 16,640 bytes of weights, and as many of gradients."""
    store = HostStore(**{k: options.pop(k) for k in ("prefetch", "device_memory", "host_memory") if k in options})
    return pipeline(
        network(width=64), options.pop("method", "gpipe"), store=store, **{"micro_batch_size": SAMPLES} | options
    )


def refusal(pipe, count):
    before = weights(pipe)
    with pytest.raises(ValueError) as refused:
        pipe.push(*pushed(count, width=64))
    assert torch.equal(weights(pipe), before) and not pipe.closed and not pipe.arrived
    return str(refused.value)


def test_a_budget_below_the_largest_stage_is_refused_at_once():
    with pytest.raises(ValueError, match=r"device_memory=20 kB: stage 0 \(0\) alone takes 32.5 KiB, 16.2 KiB for its"):
        wide(device_memory="20 kB")
    with pytest.raises(ValueError, match=r"at most 9.77 KiB of weights, or give .* at least 32.5 KiB \(33280\)"):
        wide(device_memory="20 kB")
    with pytest.raises(
        ValueError, match=r"host_memory=48.8 KiB: .* all 5 stages take 81.2 KiB; .*store=\"disk:FOLDER\""
    ):
        wide(host_memory=50_000)


def test_what_does_not_fit_is_refused_before_anything_is_trained():
    said = refusal(wide(device_memory="60 KiB"), 8)
    assert said.startswith("device_memory=60 KiB is too little by ")
    assert "weights 32.5 KiB (2 of 5 stages, the largest stage 0 (0) of 16.2 KiB), gradients 16.2 KiB and activ" in said
    assert "(pushes of 8 × 3 samples)" in said


def test_what_is_recommended_fits():
    for budget in (55_000, 70_000, 90_000):
        said = refusal(wide(device_memory=budget), 8)
        cures = said.partition("What fits: ")[2]
        found = dict(re.findall(r"(prefetch|micro_batch_size|device_memory of at least .*?)[= ]\(?(\d+)\)?", cures))
        least = int(re.search(r"at least .* \((\d+)\)", cures)[1])
        wide(device_memory=least).push(*pushed(8, width=64))
        assert "too little by 1 B" in refusal(wide(device_memory=least - 1), 8)
        if "prefetch" in found:
            wide(device_memory=budget, prefetch=int(found["prefetch"])).push(*pushed(8, width=64))
        if "micro_batch_size" in found:
            size = int(found["micro_batch_size"])
            wide(device_memory=budget, micro_batch_size=size).push(*pushed(8, width=64))
        fewer = re.search(r"at most (\d+) micro-batches", cures)
        if fewer:
            pipe = wide(device_memory=budget)
            pipe.push(*pushed(int(fewer[1]), width=64))
            with pytest.raises(ValueError, match="device_memory"):
                pipe.push(*pushed(int(fewer[1]) + 1, width=64))
        assert found or fewer


def test_a_larger_push_is_checked_too_and_a_smaller_one_goes_on():
    pipe = wide(device_memory="64 KiB", method="gpipe")
    pipe.push(*pushed(1, width=64))
    with pytest.raises(ValueError, match="device_memory"):
        pipe.push(*pushed(50, width=64))
    pipe.push(*pushed(1, width=64))
    assert pipe.arrived == 2


def test_the_upper_end_of_the_window_is_the_last_push_that_fits():
    for method in ("gpipe", "pb"):
        pipe = wide(device_memory="200 KiB", method=method)
        found = pipe.plan(*pushed(2, width=64))
        if method == "pb":
            assert found.fits is None  # what is in flight does not grow
            continue
        check(found.facts, found.fits)
        with pytest.raises(ValueError, match="device_memory"):
            check(found.facts, found.fits + 1)
        assert "more do not fit into 200 KiB" in str(found)


def test_memory_of_the_host():
    said = refusal(wide(host_memory="100 KiB"), 2)
    assert said.startswith("host_memory=100 KiB is too little by ") and "optimizer state 81.2 KiB" in said
    least = int(re.search(r"at least .* \((\d+)\)", said)[1])
    wide(host_memory=least).push(*pushed(2, width=64))
    assert 'store="disk:FOLDER"' in said
    assert "a method that keeps no older weights" in refusal(wide(host_memory="300 KiB", method="pipedream"), 2)


@pytest.mark.parametrize("text, size", [
    (5, 5), ("5", 5), ("1.5 GB", 1_500_000_000), ("1GiB", 2**30), (" 512 MiB ", 2**29), ("2k", 2048), ("1e3", 1000),
    ("10 B", 10), ("0.5 TB", 500_000_000_000), (2.5e9, 2_500_000_000),
])  # fmt: skip
def test_budgets_as_people_write_them(text, size):
    assert byte_sizes.parsed("host_memory", text) == size
    assert HostStore(host_memory=text).budgets == (None, size)


@pytest.mark.parametrize("text", ["", "much", "1 XB", "1,5 GB", "-1 GB", "0", 0, -3, "GB", "inf", float("nan")])
def test_budgets_that_are_none(text, tmp_path):
    for store in (HostStore, lambda **options: DiskStore(tmp_path, **options)):
        with pytest.raises(ValueError, match=r"device_memory.*(write bytes|at least 1 byte)"):
            store(device_memory=text)


def test_budgets_of_another_type():
    with pytest.raises(TypeError, match='host_memory must be bytes or a text such as "1.5 GB", not list'):
        HostStore(host_memory=[1])
