"""On a GPU, the trainings that tests/simulated compares bit for bit with the CPU on a simulated accelerator.

A GPU sums in another order. So in float64 its numbers are those of the CPU to 1e-9, and in float32 every way to train
there has the bits of its event loop.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.simulated import runs
from tests.simulated.test_simulated import LATER, METHODS, WAYS

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
# with momentum, since Adam makes steps of its usual length out of gradients that are rounding alone
CASES = {case: "momentum" for case in dict(METHODS) | LATER if case != "eigendelay"}
VERSIONS = ("gap_aware", "dc_asgd-adaptive", "dc_asgd+pipeoptim")  # they compare two, which sparsity does not allow
AGAIN = ("pipedream", "gpipe-4", "one_f_one_b-3")  # whose forward is done again on the weights it had
OTHER = "cuda:1" if GPUS > 1 else "cpu"  # the second device
NAMES = {"sim:0": "cuda:0", "sim:1": OTHER}
# ways that change what is computed, where it is computed, or when it is drawn
CHANGED = ("where", "resumed", "drained", "half", "sparsity", "optimizer", "unused")
SAME = [way for way in WAYS if way and not any(word in WAYS[way] for word in CHANGED)]


def run(case: str, where: list[str] | None = None, **options: Any) -> dict[str, torch.Tensor]:
    options = {"optimizer": CASES[case]} | options
    for one in ("beside", "streams"):
        options.pop(one, None)
    if "resumed" in options:
        options["resumed"] = NAMES.get(options["resumed"], options["resumed"])
    return runs.train([NAMES.get(name, name) for name in where or ["sim:0"]], case, **options)


def chosen(way: str) -> list[str]:
    """One of the methods for each way, in turn, and `pb`, but none that the way excludes."""
    if "adagrad" in way:
        return ["pb"]
    some = list(CASES)
    if way == "fetched for nobody":
        some = ["pb", "one_f_one_b-3"]
    elif "sparsity" in way:
        some = [case for case in CASES if case not in VERSIONS]
    elif "recomputation" in way:
        return list(AGAIN)
    return list(dict.fromkeys([some[list(WAYS).index(way) % len(some)], "pb"]))


@pytest.mark.parametrize("way", [way for way in WAYS if "masters" not in way])
def test_the_numbers_of_the_cpu(way):
    for case in chosen(way):
        options: dict[str, Any] = WAYS[way] | {"draws": False, "double": True}
        wanted = runs.train(["cpu"], case, **{"optimizer": CASES[case]} | plainly(options))
        found = run(case, **options)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda m, n=name, c=case: f"{c}, {n}: {m}"
            )


def plainly(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("where", "resumed", "beside", "streams")}


@pytest.mark.parametrize("way", SAME)
def test_the_bits_of_the_event_loop(way):
    """Or of the smallest store: weights in a store are updated by the CPU, which rounds otherwise."""
    like = WAYS["host-0"] if "store" in WAYS[way] else {}
    for case in chosen(way):
        wanted, found = run(case, **like), run(case, **WAYS[way])
        odd = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert found.keys() == wanted.keys() and not odd, f"{case}: {odd}"


@pytest.mark.parametrize("options", [{"workers": 2}, {"activations": "host"}], ids=str)
def test_masters(options):
    wanted, found = (run("pb", half=True, masters=True, **some) for some in ({}, options))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
