"""Laws on a device that is not the CPU: a simulated one, whose work is done as late, or in as odd an order, as allowed.

Whatever does not wait for what it needs finds NaN or old numbers there, the same ones every time.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.simulated import device as sim
from tests.simulated.asking import Simulated
from tests.simulated.without import LIBRARY, waits

pytestmark = pytest.mark.skipif(sim.missing() is not None, reason=str(sim.missing()))

POLICIES = {"late": sim.LATE, "side streams first": sim.SIDE_FIRST}
METHODS = [
    ("pb", "momentum"), ("pipedream", "adam"), ("cerebras", "momentum"), ("gpipe-4", "adamw"),
    ("one_f_one_b-3", "momentum"),
]  # fmt: skip
LATER = {  # updates that are handed what F used, predictions by the optimizer, and bases
    "gap_aware": "momentum", "dc_asgd-adaptive": "adamw", "pipeoptim-xpipe": "adamw", "msnag-stash": "momentum",
    "dc_asgd+pipeoptim": "momentum", "eigendelay": "adamw",
}  # fmt: skip
BOTH = ["sim:0", "sim:1"]
WAYS = {
    "the event loop": {},
    "workers": {"workers": 2},
    "fetched for nobody": {"store": ["host", 0], "unused": True},
    "activations on the host": {"activations": "host"},
    "recomputation": {"activations": "recompute"},
    "masters": {"half": True, "masters": True},
    "a stream of the user's": {"beside": True},
    "a stream of the user's, activations on the host": {"beside": True, "activations": "host"},
    "a stream of the user's, host": {"beside": True, "store": ["host", 1]},
    "a stream of the user's, sparsity": {"beside": True, "sparsity": "rigl"},
    "no streams, activations on the host": {"streams": False, "activations": "host"},
    "no streams, host": {"streams": False, "store": ["host", 1]},
    "no streams, disk, two devices": {"streams": False, "store": ["disk", 1], "where": BOTH},
    "no streams, sparsity": {"streams": False, "sparsity": "rigl"},
    "two devices": {"where": BOTH},
    "two devices, activations on the host": {"where": BOTH, "activations": "host"},
    "two devices, workers": {"where": BOTH, "workers": 2},
    "host-0": {"store": ["host", 0]},
    "host-1": {"store": ["host", 1]},
    "host-2": {"store": ["host", 2]},
    "host-3": {"store": ["host", 3]},
    "disk-0": {"store": ["disk", 0]},
    "disk-2": {"store": ["disk", 2]},
    "host, the second device": {"store": ["host", 1], "where": ["sim:1"]},
    "host, two devices": {"store": ["host", 1], "where": BOTH},
    "disk, two devices": {"store": ["disk", 1], "where": BOTH},
    "host, workers": {"store": ["host", 1], "workers": 2},
    "host, adagrad": {"store": ["host", 1], "optimizer": "adagrad"},
    "sparsity, host, adagrad": {"sparsity": "rigl", "store": ["host", 1], "optimizer": "adagrad"},
    "host, activations on the host": {"store": ["host", 1], "activations": "host"},
    "host, recomputation": {"store": ["host", 1], "activations": "recompute"},
    "sparsity": {"sparsity": "magnitude"},
    "sparsity that changes": {"sparsity": "rigl"},
    "sparsity, two devices": {"sparsity": "rigl", "where": BOTH},
    "sparsity, host": {"sparsity": "magnitude", "store": ["host", 1]},
    "sparsity that changes, host": {"sparsity": "rigl", "store": ["host", 1]},
    "sparsity that changes, disk": {"sparsity": "rigl", "store": ["disk", 1]},
    "sparsity, a state goes to the CPU": {"sparsity": "rigl", "resumed": "cpu", "draws": False},
    "sparsity, a state comes from the CPU": {"sparsity": "rigl", "where": ["cpu"], "resumed": "sim:0", "draws": False},
    "a state goes to the CPU": {"resumed": "cpu", "draws": False},
    "a state comes from the CPU": {"where": ["cpu"], "resumed": "sim:1", "draws": False},
    "a state goes to the other device": {"resumed": "sim:1"},
    "a state goes to the CPU, drained": {"resumed": "cpu", "drained": True},
    "a state comes from the CPU, drained": {"where": ["cpu"], "resumed": "sim:0", "drained": True},
    "a state goes to the CPU, host": {"resumed": "cpu", "store": ["host", 1], "draws": False},
    "a state comes from the CPU, disk": {"where": ["cpu"], "resumed": "sim:0", "store": ["disk", 1], "draws": False},
}
# in `make test`: every way of moving bytes once, and the method that found a fault there
FEW = [
    ("the event loop", "pb"), ("workers", "cerebras"), ("activations on the host", "pb"), ("recomputation", "gpipe-4"),
    ("masters", "pb"), ("two devices", "pipedream"), ("host-0", "cerebras"), ("host-1", "pipedream"), ("host-3", "pb"),
    ("disk-2", "cerebras"), ("host, two devices", "pb"), ("host, workers", "gpipe-4"), ("sparsity", "pb"),
    ("sparsity that changes, host", "pipedream"), ("a state goes to the CPU", "pb"),
    ("a state comes from the CPU, disk", "cerebras"), ("a state goes to the CPU, drained", "pb"),
    ("host, adagrad", "pb"), ("no streams, host", "pb"), ("sparsity, a state comes from the CPU", "pb"),
    ("host-1", "gap_aware"), ("disk-2", "dc_asgd-adaptive"), ("host, two devices", "pipeoptim-xpipe"),
    ("host, workers", "msnag-stash"), ("two devices", "dc_asgd+pipeoptim"), ("the event loop", "eigendelay"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(request) -> Path:
    """Where the compiled device stays from run to run."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or request.config.cache.mkdir("simulated"))


@pytest.fixture(scope="module")
def simulated(folder):
    process = Simulated(folder)
    yield process
    process.close()


def test_equal_bits(simulated):
    found = {"sgd": simulated.ask(case="sgd", policy=sim.LATE)}
    for n, (way, case) in enumerate(FEW):
        policy = list(POLICIES)[n % 2]
        run = dict(case=case, optimizer=(dict(METHODS) | LATER)[case], policy=POLICIES[policy]) | WAYS[way]
        answer = simulated.ask(**run)
        found[f"{way}, {case}, {policy}"] = answer
    assert not {run: answer for run, answer in found.items() if answer}


@pytest.mark.soak
@pytest.mark.parametrize("policy", [*POLICIES, "random", "side streams last"])
@pytest.mark.parametrize("way", WAYS)
def test_equal_bits_in_every_way(simulated, way, policy):
    number = {**POLICIES, "random": sim.RANDOM, "side streams last": sim.SIDE_LAST}[policy]
    methods = METHODS
    if "adagrad" in way:
        methods = [("pb", "adagrad")]
    elif way == "fetched for nobody":  # by methods that need not be asked what
        methods = [("pb", "momentum"), ("one_f_one_b-3", "momentum")]
    for case, optimizer in methods:
        for pushed in (1, 3):
            run = dict(case=case, optimizer=optimizer, policy=number, pushed=pushed) | WAYS[way]
            assert not simulated.ask(**run), f"{case}, pushes of {pushed}"


def test_what_has_drawn_in_flight_stays_where_it_was(simulated):
    """The cure, to drain before, is among the ways above."""
    for here, there in (("sim:0", "cpu"), ("cpu", "sim:1")):
        answer = simulated.ask(case="pb", policy=sim.LATE, where=[here], resumed=there)
        assert "stage 1 (1): it draws random numbers" in answer
        assert answer.strip().endswith("drain() before state_dict() there, or load where it was saved")


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"activations": "recompute"}, {"store": ["host", 1]}], ids=str)
def test_targets_on_the_cpu(simulated, options):
    """They come to the last stage, wherever it is, as inputs come to the first."""
    for where in (["sim:0"], ["sim:0", "sim:1"]) if "store" not in options else (["sim:0"],):
        run = dict(case="pb", policy=sim.LATE, where=where, **options)
        assert not simulated.ask(astray=True, **run)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"streams": False}], ids=str)
def test_losses_that_are_nan(simulated, options):
    """They are copied beside the work, and nothing waits for them."""
    for policy in POLICIES.values():
        assert not simulated.ask(kind="broken", policy=policy, **options)


FITS = {
    "plain": {"method": "pb"},
    "slices": {"method": "gpipe", "micro_batch_size": 2},
    "host": {"method": "pb", "store": "host"},
    "slices, host": {"method": "gpipe", "micro_batch_size": 2, "store": "host"},
    "activations": {"method": "cerebras", "activations": "host"},
    "sparsity": {"method": "pb", "sparsity": "magnitude"},
    "followed, host": {"method": "pb", "store": "host", "module": "whole"},
    "followed, slices, host": {"method": "gpipe", "micro_batch_size": 2, "store": "host", "module": "several"},
    "followed, several, host": {"method": "cerebras", "store": "host", "module": "several", "draws": False},
    "a checkpoint goes to the CPU": {"method": "pb", "resumed": "cpu", "draws": False},
    "a checkpoint comes from the CPU": {"method": "pb", "where": ["cpu"], "resumed": "sim", "draws": False},
}


USUAL = ("slices, host", "sparsity", "followed, host", "followed, slices, host")


def test_lightning(simulated):
    found = {name: simulated.ask(kind="fit", policy=sim.LATE, **FITS[name]) for name in USUAL}
    assert not {run: answer for run, answer in found.items() if answer}


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FITS)
def test_lightning_in_every_way(simulated, name, policy):
    assert not simulated.ask(kind="fit", policy=POLICIES[policy], **FITS[name])


# what notices each line that waits; the first that does is enough
NOTICED = [
    ("host-1", "pipedream"), ("a stream of the user's, host", "pb"), ("a stream of the user's, sparsity", "pb"),
    ("host-0", "one_f_one_b-3"), ("fetched for nobody", "one_f_one_b-3"), ("activations on the host", "pb"),
    ("two devices, activations on the host", "pb"), ("host, two devices", "cerebras"),
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("line", waits(), ids=lambda line: f"{line[0]}-{line[1] + 1}")
def test_a_line_that_waits_is_missed(folder, line):
    process = Simulated(folder, line)
    try:
        for policy in (sim.LATE, sim.SIDE_FIRST, sim.SIDE_LAST):
            if process.ask(kind="exchange", beside=True, policy=policy):
                return
            for way, case in NOTICED:
                if process.ask(**dict(case=case, optimizer=dict(METHODS)[case], policy=policy) | WAYS[way]):
                    return
    finally:
        process.close()
    file, number = line
    text = (LIBRARY / f"{file}.py").read_text(encoding="utf-8").splitlines()[number].strip()
    pytest.fail(f"{file}.py without line {number + 1}, {text!r}, trains as with it")


@pytest.fixture(scope="module")
def ranks(folder):
    """Two processes that make up a pipeline."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    there = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    processes = [Simulated(folder, RANK=str(rank), **there) for rank in range(2)]
    yield processes
    for process in processes:
        process.close()


def both(ranks, **run):
    """What each of them finds, on a device of its own."""
    for rank, process in enumerate(ranks):
        process.send(where=[f"sim:{rank}"], **run)
    return "".join(process.receive() for process in ranks)


def test_two_ranks(ranks):
    assert not both(ranks, case="cerebras", policy=sim.LATE)
    assert not both(ranks, case="pb", policy=sim.SIDE_FIRST, replicas=2, store=["host", 1])
    assert not both(ranks, case="pb", policy=sim.LATE, replicas=2)


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [
    {}, {"store": ["host", 1]}, {"store": ["disk", 0]}, {"activations": "host"}, {"replicas": 2},
    {"replicas": 2, "store": ["host", 1]}, {"replicas": 2, "store": ["disk", 1]},
], ids=str)  # fmt: skip
def test_two_ranks_in_every_way(ranks, options, policy):
    for case, optimizer in METHODS:
        assert not both(ranks, case=case, optimizer=optimizer, policy=POLICIES[policy], **options), case


def test_one_module_knows_accelerators():
    """CUDA graphs are CUDA's; for the rest there is `accelerators`."""
    named = {
        path.relative_to(LIBRARY).as_posix()
        for path in LIBRARY.rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in ("torch.cuda", ".is_cuda"))
    }
    assert named - {"vectorized/making/cuda_graph.py", "vectorized/ticks/tick.py"} == {"tensors/accelerators.py"}
