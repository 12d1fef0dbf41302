"""How many pushes a pipeline has seen, and the warning of a loop that begins at 0 again after a state was loaded."""

import os
import runpy
import signal
import warnings
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import pipeback
from tests.helpers import pages
from tests.helpers.processes import in_a_new_process, launched

PAGE = "docs/tutorials/two_processes.md"
KILLING = """
import os, runpy, signal
import pipeback

push = pipeback.Pipeline.push

def killed(pipe, x, y):
    if pipe.ranks.index == pipe.ranks.count - 1 and pipe._engine.progress.pushes == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return push(pipe, x, y)

pipeback.Pipeline.push = killed
runpy.run_path("train.py", run_name="__main__")
"""


def made(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    sgd = lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)  # noqa: E731
    given = {"loss": nn.functional.mse_loss, "method": "pb", "micro_batch_size": 2, **options}
    return pipeback.Pipeline(model, optimizer=sgd, **given)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)


def saved(steps, choose=lambda step: step, **options):
    pipe = made(**options)
    for step in range(steps):
        pipe.push(*batch(choose(step)))
    return pipe.state_dict()


@pytest.mark.parametrize(
    "options", [{}, {"workers": 2}, {"replicas": 2, "micro_batch_size": 3}, {"debug": pipeback.Debug(order="skewed")}]
)
def test_a_state_knows_its_pushes(options):
    pipe = made(**options)
    pipe.load_state_dict(saved(3, **options))
    assert pipe.pushes == 3
    pipe.push(*batch(3))
    assert pipe.pushes == 4
    pipe.close()


def test_a_loss_computed_outside_counts_micro_batches():
    pipe = made(loss=None, micro_batch_size=None)
    for step in range(3):
        output = pipe.forward(batch(step)[0])
        output.sum().backward()
        pipe.backward(output.grad)
        pipe.step()
    assert pipe.pushes == pipe.arrived == 3


def test_a_push_that_was_dropped_is_not_counted():
    class Fails(nn.Linear):
        fail = False

        def forward(self, x):
            assert not self.fail
            return super().forward(x)

    model = nn.Sequential(Fails(4, 4), nn.Linear(4, 4))
    sgd = lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)  # noqa: E731
    pipe = pipeback.Pipeline(model, loss=nn.functional.mse_loss, optimizer=sgd, method="pb")
    pipe.push(*batch(0))
    model[0].fail = True
    with pytest.raises(pipeback.StageError, match="nothing was trained on it"):
        pipe.push(*batch(1))
    assert pipe.pushes == 1


def test_a_loop_that_begins_at_0_again_is_told_once():
    pipe = made()
    pipe.load_state_dict(saved(3))
    with pytest.warns(UserWarning, match=r"has seen 3 pushes.*range\(pipe.pushes, steps\)"):
        pipe.push(*batch(0))
    with warnings.catch_warnings(action="error"):
        pipe.push(*batch(0))


@pytest.mark.parametrize(
    ("choose", "then", "ask"),
    [
        (lambda step: step, 3, False),  # goes on
        (lambda step: step, 0, True),  # the user knows where training stands, and data come round again
        (lambda step: 0, 0, False),  # always the same x
    ],
)
def test_nothing_is_said(choose, then, ask):
    pipe = made()
    with warnings.catch_warnings(action="error"):
        pipe.load_state_dict(saved(3, choose))
        assert not ask or pipe.pushes == 3
        pipe.push(*batch(then))


def runs(folder, script):
    """A script in its folder; what it prints is added to a file there."""
    os.chdir(folder)
    with open("told.txt", "a") as told, redirect_stdout(told):
        runpy.run_path(script, run_name="__main__")


@pytest.mark.soak
def test_the_script_of_the_page_goes_on_with_the_same_bits(tmp_path):
    """It is killed in the middle, run once more over two processes, and compared with one that nothing has stopped.

    Under torchrun itself it runs in `tests/test_pages.py`.
    """
    pytest.importorskip("safetensors")
    (script,) = [b.text for b in pages.blocks(PAGE, "python") if b.text.startswith("# train.py\n")]
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for folder in (stopped, whole):
        folder.mkdir()
        (folder / "train.py").write_text(script, "utf-8")
        (folder / "killing.py").write_text(KILLING, "utf-8")
    with pytest.raises(ChildFailedError, match=f"exitcode *: {-signal.SIGKILL}"):
        launched(runs, str(stopped), "killing.py")
    assert pipeback.checkpoint.latest(stopped / "checkpoints").name == "step-00000080"
    launched(runs, str(stopped), "train.py")
    in_a_new_process(runs, str(whole), "train.py")
    for folder in (stopped, whole):
        assert "40 pushes, 640 micro-batches" in (folder / "told.txt").read_text()
    found, wanted = (torch.load(folder / "weights.pt") for folder in (stopped, whole))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
