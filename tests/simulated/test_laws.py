"""Laws of tests/laws on the simulated accelerator: models are there, and what is pushed comes from the CPU.

Each runs in a process of its own, by `pytest --device sim`, since a process has one accelerator. Left out of the soak
test are tests that compare with what they compute on the CPU themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.choice import rare
from tests.simulated import device as sim

pytestmark = pytest.mark.skipif(sim.missing() is not None, reason=str(sim.missing()))
ROOT = Path(__file__).parents[2]

FEW = {
    "a method's own update, as rows": "test_vectorized.py::test_every_method_equals_the_event_loop[msnag-stash]",
    "the same of AdamW": "test_vectorized_ticks.py::test_updates_of_the_methods_own[pipeoptim-adamw]",
    "an example for a forward that is followed": "test_vectorized.py::test_a_model_whose_forward_is_followed",
    "a state with targets in flight": "test_vectorized.py::test_long_flushes[one_f_one_b-block-3]",
    "AdamW in captured ticks": "test_vectorized_compiled.py::test_ticks_as_graphs[pipedream-adamw-True]",
    "a first stage without weights": "test_vectorized_flushes.py::test_stages_of_all_kinds[gpipe-of_pictures]",
    "stages as one with a store": "test_vectorized_streaming.py::test_every_method_equals_the_event_loop[cerebras]",
    "the same from disk": "test_vectorized_on_disk.py::test_every_method_equals_host_memory[cerebras]",
    "a structure": "test_batch_forms.py::test_every_runtime_takes_an_x_as_it_takes_plain_tensors[encoding-flush]",
    "a commit in flight": "test_vectorized_on_disk.py::test_what_was_committed_goes_on[pb-{}]",
}
MANY = ("vectorized", "vectorized_ticks", "vectorized_turns", "vectorized_flushes", "vectorized_states",
        "vectorized_short_pushes", "vectorized_streaming", "vectorized_on_disk",
        "any_model", "batch_forms")  # fmt: skip
PLAIN = ("meta_device", "plain_training", "the_models_own", "ones_own", "by_hand", "evaluation_mode", "outside")


def passed(request: pytest.FixtureRequest, *words: str) -> str:
    """Nothing, or what failed."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or str(request.config.cache.mkdir("simulated"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *words], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, "TORCH_EXTENSIONS_DIR": folder},
    )  # fmt: skip
    return done.stdout[-6000:] + done.stderr[-2000:] if done.returncode else ""


@pytest.mark.parametrize("first", [0, rare(1), rare(2), rare(3), rare(4)])
def test_every_fifth_of_a_few(request, first):
    assert not passed(request, "--device", "sim", *(f"tests/laws/{name}" for name in [*FEW.values()][first::5]))


@pytest.mark.soak
@pytest.mark.parametrize("name", MANY)
def test_many(request, name):
    words = " and ".join(f"not {word}" for word in PLAIN)
    assert not passed(request, "--device", "sim", "-k", words, f"tests/laws/test_{name}.py")


@pytest.mark.soak
def test_as_the_default_device(request):
    """As under `torch.set_default_device`."""
    assert not passed(request, "--default-device", "sim", "tests/laws/test_no_delay.py")
