"""A model whose weights and optimizer state do not fit: trained from disk, in a memory that is a part of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")


def run(folder, stages, width, batches):
    command = [sys.executable, "-m", "tests.helpers.out_of_core", str(folder), str(stages), str(width), str(batches)]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["twins"][0] == result["twins"][1], "the resident twin has other losses"
    assert result["losses"][-1] < result["losses"][0]
    traffic, weights = result["traffic"], result["weights"] * 1e6
    assert traffic["peak_stages"] == 2
    assert traffic["weights_in"] <= 2 * weights * batches and traffic["gradients_out"] <= weights * batches
    return result


def test_400_mb_of_state_in_a_quarter_of_it(tmp_path):
    found = run(tmp_path, stages=32, width=1024, batches=2)
    state = 3 * found["weights"]  # AdamW keeps two numbers a weight
    assert 400 < state < 410
    assert found["peak"] - found["before"] < state / 4
    assert found["built"] - found["before"] < state / 12, "the model was in memory as a whole when it was built"


@pytest.mark.soak
def test_4_gb_of_state_in_less_than_1500_mb(tmp_path):
    found = run(tmp_path, stages=64, width=2304, batches=3)
    assert 3 * found["weights"] > 4000
    assert found["peak"] < 1500  # all of Python and torch included
