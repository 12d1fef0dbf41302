"""Whatever becomes of one rank, every other ends with an error that names it, and nothing hangs."""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import pipeback
from pipeback.distributed import join
from tests.helpers.choice import mostly_rare, rare
from tests.helpers.processes import forked, launched
from tests.laws.cases import data, pipeline
from tests.processes.crew import Failed, free_port

TIMEOUT = 5.0  # of the pipelines: on a busy machine a rank may not be heard of for many seconds
WITHIN = TIMEOUT + 12  # generous: the machine may be busy


def model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])


class Odd(nn.Module):
    """The identity, until the time comes."""

    def __init__(self, what, mb):
        super().__init__()
        self.what, self.left = what, mb

    def forward(self, x):
        if torch.is_grad_enabled():
            self.left -= 1
            if self.left == 0:
                if self.what == "raise":
                    raise ArithmeticError("the flux is too high")
                if self.what == "hang":
                    time.sleep(100)
                os.kill(os.getpid(), signal.SIGKILL if self.what == "kill" else signal.SIGSTOP)
        return x


def trained(rank, victim, what, link):
    """Train until it ends; what ended it, how long that took, and what other threads have died of."""
    stages, died = model(), []
    threading.excepthook = lambda hooked: died.append(repr(hooked.exc_value))
    stages[2 * victim] = nn.Sequential(stages[2 * victim], Odd(what, 40 if rank == victim else 10**9))
    pipe = pipeline(stages, "pb", workers=pipeback.Processes(timeout=TIMEOUT, link=link))
    pipe._engine.holding.balance = lambda: [0, 0, 1, 1, 2, 2]
    told, may_push = pipe.ranks.told, threading.Event()
    may_push.set()

    def told_late(error):
        """All know it, first the threads that wait, then who pushes, before the thread that it came in raises it."""
        may_push.clear()
        cause = told(error)
        time.sleep(0.3)
        may_push.set()
        time.sleep(0.3)
        return cause

    pipe.ranks.told = told_late
    begin = time.monotonic()
    try:
        for x, y in data(1) * 1000:
            pipe.push(x, y)
            time.sleep(0.01)
            may_push.wait()
            if time.monotonic() - begin > 60:
                return None
        pipe.wait()
    except Exception as error:
        again = None
        try:
            pipe.push(*data(1)[0])
        except RuntimeError as closed:
            again = str(closed)
        return type(error).__name__, str(error), time.monotonic() - begin, again, died
    return None


@pytest.mark.parametrize(("what", "link"), mostly_rare(
    product(("kill", "stop", "raise", "hang"), ("shared_memory", "gloo")),
    ("kill", "shared_memory"), ("stop", "gloo"), ("raise", "gloo"),
    ("hang", "shared_memory"),
))  # fmt: skip
def test_one_rank_ends_all(crew, what, link):
    # the store's, a middle and the last rank, which sends the losses
    victim = {"kill": 0, "stop": 1, "raise": 2 if link == "gloo" else 0, "hang": 1}[what]
    crew = crew.ranks(3)
    others = [rank for rank in range(3) if rank != victim]
    crew.start(trained, victim, what, link, each=range(3))
    try:
        found = crew.results(others if what in ("kill", "stop", "hang") else None, seconds=WITHIN + 20)
    finally:
        if what != "raise":
            crew.members[victim].kill()
            crew.members[victim].join()
        crew.again()
    for rank, result in zip(others if len(found) == 2 else range(3), found, strict=True):
        assert not isinstance(result, BaseException), "".join(getattr(result, "__notes__", [repr(result)]))
        assert result is not None, f"rank {rank} has noticed nothing"
        kind, message, seconds, again, died = result
        assert seconds < WITHIN and not died
        assert "the pipeline is closed" in again
        where = f"stage {2 * victim} ({2 * victim}), micro-batch"
        if rank == victim:
            assert kind == "StageError", message
            assert where in message
        else:
            assert kind == "RankError", message
            assert message.startswith(f"rank {victim} ("), message
            if what == "raise":
                assert where in message
                assert "the flux is too high" in message
            if what == "hang":
                assert "the forward of stage 2, micro-batch" in message, message


def goes_on_after_a_fault(rank, reads=False):
    """A stage fails on one rank; all take up the last state and go on, in the same processes."""
    stages = model()
    stages[4] = nn.Sequential(stages[4], Odd("raise", 40 if rank == 1 else 10**9))
    pipe = pipeline(stages, "pb", workers=pipeback.Processes(timeout=TIMEOUT))
    pipe._engine.holding.balance = lambda: [0, 0, 0, 1, 1, 1]
    batches = data(12)
    for x, y in batches[:4]:
        pipe.push(x, y)
    state = pipe.state_dict()
    with pytest.raises((pipeback.RankError, pipeback.StageError)):
        for x, y in batches[4:] * 10:
            (float if reads else id)(pipe.push(x, y))
        pipe.wait()
    pipe.load_state_dict(state)
    losses = [float(pipe.push(x, y)) for x, y in batches[4:]]
    pipe.close()
    return losses


@pytest.mark.parametrize("reads", [False, True])
def test_load_state_dict_reopens_all_ranks(crew, reads):
    crew = crew.ranks(2)
    pipe = pipeline(model(), "pb")
    wanted = [float(pipe.push(x, y)) for x, y in data(12)][4:]
    assert crew.run(goes_on_after_a_fault, reads, each=range(2)) == [wanted, wanted]


# -- what differs between ranks ----------------------------------------------------------------------------------------


def pushed(pipe, rank, what):
    """Training in which the ranks do not do the same."""
    for n, (x, y) in enumerate(data(40)):
        if what == "batch" and rank == 1 and n == 11:
            y = y + 1
        if what == "count" and rank == 0 and n == 20:
            break
        if what == "drain" and rank == 1 and n == 20:
            pipe.drain()
        if what in ("rate", "momentum") and rank == 0 and n == 20:
            for optimizer in pipe.optimizers:
                optimizer.param_groups[0]["lr" if what == "rate" else "momentum"] *= 0.5
        pipe.push(x, y)
    if what == "drain at the end":
        if rank == 1:
            pipe.drain()
        pipe.state_dict()
    if what == "calls" and rank == 0:
        pipe.model.eval()
    else:
        pipe.evaluate(data(1)[0][0])


def different(rank, what):
    version = torch.__version__
    width = 7 if what == "width" and rank == 1 else 6
    stages = nn.Sequential(*[nn.Linear(width, width) for _ in range(5 if what == "stages" and rank == 1 else 4)])
    options = {"workers": pipeback.Processes(timeout=TIMEOUT)}
    if what == "clip" and rank == 1:
        options["clip_norm"] = 1.0
    if what == "activations" and rank == 1:
        options["activations"] = "host"
    if what == "version" and rank == 1:
        torch.__version__ = "2.11.0"
    method = "pb"
    if what == "method" and rank == 1:
        method = pipeback.methods.create("pb", slack=1)
    if what == "own error" and rank == 1:
        options["clip_norm"] = -1.0
    if what == "absent" and rank == 1:
        time.sleep(TIMEOUT + 2)
        return "was elsewhere"
    try:
        pipe = pipeline(stages, method, "adam" if what == "optimizer" and rank == 1 else "momentum", **options)
        return pushed(pipe, rank, what)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.__version__ = version


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("width", r"rank 1 has model .*\(7, 7\).*, rank 0 has .*\(6, 6\).*; start the same script"),
        rare("stages", r"rank 1 has stages 5, rank 0 has 4"),
        rare("method", r"rank 1 has method .*slack=1.*, rank 0 has .*slack=2"),
        ("optimizer", r"rank 1 has optimizer .*Adam"),
        ("clip", r"rank 1 has clip_norm 1.0, rank 0 has None"),
        rare("activations", r"rank 1 has activations host, rank 0 has device"),
        ("version", r"rank 1 has torch 2\.11\.0, rank 0 has"),
        ("own error", r"clip_norm must be above 0 or None, but is -1.0"),
        ("batch", r"micro-batch 11 is not the one that .*every rank must push the same data"),
        (
            "drain",
            r"drained before micro-batch 20 by one of worker 1 and worker 0.*call drain\(\) at the same micro-batch",
        ),
        (
            "drain at the end",
            r"drained on worker 0 or on worker 1.*call drain\(\) at the same micro-batch",
        ),
        ("rate", r"micro-batch 20 was pushed when .* of worker 1 and worker 0 had different rates \(lr\); set them in"),
        rare("momentum", r"micro-batch 20 was .* worker 1 and worker 0 had different options, such as momentum"),
        ("count", r"worker 0 evaluates when worker 1 is at micro-batch 20; every rank must make the same calls"),
        ("calls", r"the same calls in the same order"),
        ("absent", rf"rank 1 did not come to build the pipeline within {TIMEOUT:g} s|was elsewhere"),
    ],
)
def test_ranks_that_differ_are_told_on_every_rank(crew, what, message):
    import re

    crew = crew.ranks(2)
    try:
        for rank, found in enumerate(crew.run(different, what, each=range(2))):
            assert found is not None, f"rank {rank} has noticed nothing"
            assert re.search(message, found, re.DOTALL), f"rank {rank}: {found}"
    finally:
        crew.again()


BAD = {
    "order": lambda: pipeline(
        model(), "pb", workers=pipeback.Processes(timeout=20.0), debug=pipeback.Debug(order="backwards")
    ),
    "check_finite": lambda: pipeline(
        model(), "pb", workers=pipeback.Processes(timeout=20.0), debug=pipeback.Debug(check_finite="x")
    ),
    "store": lambda: pipeline(model(), "pb", workers=pipeback.Processes(timeout=20.0), store=5),
    "sparsity": lambda: pipeline(
        model(), "pb", workers=pipeback.Processes(timeout=20.0), store=pipeback.Streaming(sparsity="none such")
    ),
    "clip_norm": lambda: pipeline(model(), "pb", workers=pipeback.Processes(timeout=20.0), clip_norm=-1.0),
    # before the ranks have met
    "replicas": lambda: pipeline(model(), "pb", workers=pipeback.Processes(timeout=20.0), replicas=3),
    "mesh": lambda: pipeline(model(), "pb", workers=pipeback.Processes(timeout=20.0, mesh="cpu")),
    "timeout": lambda: pipeline(model(), "pb", workers=pipeback.Processes(timeout=-1.0)),
}


def one_is_wrong(rank, name):
    begin = time.monotonic()
    try:
        BAD[name]() if rank == 1 else pipeline(model(), "pb", workers=pipeback.Processes(timeout=20.0))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return None


def test_an_option_that_is_wrong_on_one_rank_is_told_to_the_others(crew):
    """At once: nobody waits until the timeout."""
    for name in BAD:
        try:
            (kind, told, seconds), (_, own, _) = crew.ranks(2).run(one_is_wrong, name, each=range(2))
        finally:
            crew.again()
        assert kind == "RankError" and "rank 1" in told and own in told and name in own, (name, kind, told, own)
        assert seconds < 10, (name, seconds)


def few():
    pipeline(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), "pb")


def threads():
    pipeline(model(), "pb", workers=2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (few, r"3 ranks share a pipeline but the model has 2 stages; start at most one rank per stage"),
        (threads, r"workers=2: over processes each rank is a worker; leave workers out"),
    ],
)
def test_what_no_rank_can_do(crew, function, message):
    with pytest.raises(Failed, match=message):
        crew.ranks(3).run(function)


# -- under torchrun ----------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).with_name("script.py")


def command(restarts, told, *arguments):
    """`torchrun`, as it is typed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*words, f"--max-restarts={restarts}", str(SCRIPT), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    told.write_text(run.stdout)


def forks(restarts, told, *arguments):
    """What it does, with ranks that have imported torch."""
    launched(writes, str(told), *arguments, restarts=restarts)


def writes(told, *arguments):
    """The script as a rank runs it; what it prints is added to a file."""
    sys.argv = ["", *arguments]
    with open(told, "a") as file, redirect_stdout(file):
        runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize(
    ("start", "kills", "resumed"), [(forks, "1:9", [8]), rare(command, "1:9", [8]), rare(command, "1:9,0:17", [8, 16])]
)
def test_torchrun_restarts_from_the_last_whole_checkpoint(start, kills, resumed, tmp_path, monkeypatch):
    """Killed at moments of its own choosing; the weights are those of a run in one process."""
    told = tmp_path / "told.txt"
    start(len(resumed), told, str(tmp_path / "checkpoints"), str(tmp_path / "end.pt"), kills)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / "others"), str(tmp_path / "plain.pt"), ""])
    runpy.run_path(str(SCRIPT))
    found, wanted = torch.load(tmp_path / "end.pt"), torch.load(tmp_path / "plain.pt")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for step in resumed:
        assert f"resumed from step-{step:08d}" in told.read_text()


def on_ranks(function, environments, *arguments):
    """What a function returns on ranks that are new processes with these variables of the environment."""
    with ProcessPoolExecutor(len(environments), forked()) as pool:
        return [each.result(60) for each in [pool.submit(function, more, *arguments) for more in environments]]


def runs(environment, *arguments):
    os.environ.update(environment)
    pipeback.join()
    sys.argv = ["", *arguments]
    runpy.run_path(str(SCRIPT))


def test_under_srun(tmp_path):
    """What srun sets is enough; the script calls `pipeback.join()` first."""
    environment = {
        "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    ranks = [{**environment, "SLURM_PROCID": str(rank)} for rank in (0, 1)]
    on_ranks(runs, ranks, str(tmp_path), f"{tmp_path}/end.pt", "")
    assert torch.load(tmp_path / "end.pt").keys()


def test_the_first_host_of_a_job():
    for listed, first in [("lab3", "lab3"), ("a[01-04,7],b2", "a01"), ("n[3,5]-x", "n3-x"), ("h1,h2", "h1")]:
        found = join._slurm({"SLURM_PROCID": "1", "SLURM_STEP_NODELIST": listed, "SLURM_JOB_ID": "123456"})
        assert found["MASTER_ADDR"] == first
        assert found["MASTER_PORT"] == "23456"


def joins(environment, timeout):
    os.environ.update(environment)
    with pytest.raises(Exception) as error:
        pipeback.join(timeout=timeout)
    return str(error.value)


def test_a_wrong_master_address():
    """Nobody listens there: both ranks say so within the timeout."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    begin = time.monotonic()
    for told in on_ranks(joins, [{**environment, "RANK": str(rank)} for rank in (1, 2)], 1):
        assert "the ranks did not find each other within 1 s (MASTER_ADDR=127.0.0.1" in told
        assert "check that MASTER_ADDR and MASTER_PORT reach rank 0" in told
    assert time.monotonic() - begin < 60
