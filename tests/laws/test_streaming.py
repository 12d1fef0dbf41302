"""Law: streamed from a store equals resident, bit for bit: every method, any number of stages fetched ahead."""

from itertools import product

import pytest
import torch

import pipeback
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore, Store
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, EACH, FEW, OPTIMIZERS, STAGES, allowed, data, everything, network, pipeline
from tests.laws.test_runtimes import drawing

STORES = {
    "host": lambda folder: "host",
    "host-0": lambda folder: HostStore(prefetch=0),
    "host-3": lambda folder: HostStore(prefetch=3),
    "disk": lambda folder: f"disk:{folder / 'a'}",
    "disk-3": lambda folder: DiskStore(folder / "b", prefetch=3, commit_every=5),
}


def run(model, case, batches, pushed=1, **options):
    """Losses, what is in flight after these micro-batches, and what a drain and four more leave."""
    pipe = pipeline(model, CASES[case](STAGES), micro_batch_size=len(batches[0][0]), **options)

    def push(some):
        for begin in range(0, len(some), pushed):
            x, y = (torch.cat(part) for part in zip(*some[begin : begin + pushed], strict=True))
            yield pipe.push(x, y).clone()

    losses = list(push(batches))
    flying = everything(pipe)
    pipe.drain()
    losses += push(batches[:4])
    result = torch.stack(losses), flying, everything(pipe)
    store = options.get("store")
    if store is not None:
        most = store.prefetch + 1 if isinstance(store, Store) else 2
        assert 1 <= pipe.traffic().peak_stages <= most
    pipe.close()
    return result


def same(found, expected, what):
    for part, wanted in zip(found, expected, strict=True):
        assert torch.equal(part, wanted), f"{what} differs from the resident run"


def compare(case, optimizer, pushed, stores, folder):
    expected = run(network(), case, data(19), pushed, optimizer=optimizer)
    for name in stores:
        found = run(network(), case, data(19), pushed, optimizer=optimizer, store=STORES[name](folder))
        same(found, expected, f"{name}, {optimizer}, pushes of {pushed}")


@pytest.mark.parametrize("case", mostly_rare(CASES, *EACH))
def test_streamed_equals_resident(case, tmp_path, monkeypatch):
    """Optimizers, pushes and stores in turn; a few methods from disk, too."""
    monkeypatch.setattr(disk_store, "SMALL", 1)  # these networks are small
    n = list(CASES).index(case)
    optimizers = [name for name in OPTIMIZERS if allowed(case, name)]
    disks = ("disk", "disk-3")[n % 2 : n % 2 + 1] if case in FEW else ()
    stores = ("host", "host-0", "host-3")[n % 3], *disks
    compare(case, optimizers[n % len(optimizers)], (1, 7)[n // 2 % 2], stores, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("pushed", [1, 7])
@pytest.mark.parametrize(("case", "optimizer"), [pair for pair in product(CASES, OPTIMIZERS) if allowed(*pair)])
def test_streamed_equals_resident_in_every_way(case, optimizer, pushed, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "SMALL", 1)
    compare(case, optimizer, pushed, STORES, tmp_path)


@pytest.mark.parametrize(
    "case",
    mostly_rare(
        ["pb", "cerebras", "pipedream", "gpipe-4", "pipemare-t3", "lwp-weight+sc"],
        "cerebras",
        "pipedream",
        "pipemare-t3",
    ),
)
def test_in_threads_and_other_orders(case):
    expected = run(network(), case, data(19), 5)
    for options in (
        {"workers": 2},
        {"workers": 3},
        {"debug": pipeback.Debug(order="random")},
        {"debug": pipeback.Debug(order="upstream")},
    ):
        same(run(network(), case, data(19), 5, store="host", **options), expected, options)


ELSEWHERE = list(product(["gpipe-4", "pb", "pipedream", "cerebras"], ["recompute", "host"]))


@pytest.mark.parametrize(
    ("case", "activations", "kind"),
    mostly_rare(
        [(*pair, kind) for pair in ELSEWHERE for kind in ("host", "disk")],
        *((*pair, "host") for pair in ELSEWHERE), ("gpipe-4", "host", "disk"), ("pipedream", "recompute", "disk"),
    ),
)  # fmt: skip
def test_with_activations_elsewhere(case, activations, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "SMALL", 1)
    expected = run(network(), case, data(19), 5, activations=activations)
    store = "host" if kind == "host" else DiskStore(tmp_path, commit_every=5)
    same(run(network(), case, data(19), 5, store=store, activations=activations), expected, store)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("case", ["pb", "cerebras", "pipedream", "gpipe-4"])
def test_random_layers_and_buffers_too(case):
    def one(**options):
        torch.manual_seed(7)
        return run(drawing(), case, data(17, samples=8), 4, **options)

    expected = one()
    for options in ({}, {"workers": 2}):
        same(one(store="host", **options), expected, options)
