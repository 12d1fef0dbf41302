"""What ranks do, are told and hold while they go back together (`Debug(take_back=N)`). The law over all methods and
links is tests/processes/test_take_back.py."""

import os
import random
import re
import signal
import time
import warnings
from multiprocessing.util import Finalize

import pytest
import torch
import torch.distributed as dist

import pipeback
from pipeback.distributed.held_stages import HeldStages
from tests.helpers.choice import rare
from tests.helpers.processes import forked
from tests.laws.cases import data, everything
from tests.laws.test_take_back import bad, made
from tests.processes.crew import Failed

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
COUNT, GONE = 24, (5, 11)


def built(at, backward, case="pb", timeout=20.0, **options):
    return made(case, at, backward, workers=pipeback.Processes(timeout=timeout), **options)


def without(bad, pushes, at, backward):
    """All that a pipeline of two threads holds in the end to which one of the pushes never came."""
    plain = made("pb", at, backward, every=None, workers=2)
    for n, push in enumerate(pushes):
        if n != bad:
            plain.push(*push)
    found = everything(plain)
    plain.close()
    return found


def behind(rank, slow):
    """One rank stands still before push 3, while the other has a bad push 5; what each was told, in which call."""
    pipe = built(0 if slow else 4, False, every=8)
    told, losses = [], []
    for n, push in enumerate(data(COUNT, 8)):
        if n == 3 and rank == slow:
            time.sleep(1.0)
        try:
            losses.append(pipe.push(*(bad(0 if slow else 4) if n == 5 else push)))
        except pipeback.PushLeftOut as error:
            told.append((n, error.pushes, error.loss is None))
            if error.loss is not None:
                losses.append(error.loss)
    pipe.wait()
    state, counted = everything(pipe), (pipe.arrived, pipe.pushes)
    pipe.close()
    return told, state, counted


def test_a_rank_that_is_behind_is_told_when_it_pushes_what_was_left_out(crew):
    wanted = without(5, data(COUNT, 8), 0, False)
    (ahead, one, counted), (late, other, again) = crew.ranks(2).run(behind, 1, each=range(2))
    assert late == [(5, (5,), True)]
    assert [pushes for _, pushes, _ in ahead] == [(5,)] and ahead[0][0] >= 5
    assert torch.equal(one, wanted) and torch.equal(other, wanted)
    assert counted == again == (COUNT - 1, COUNT - 1)


def patient(call, told):
    """Call it again if it has found a push that failed."""
    while True:
        try:
            return call()
        except pipeback.PushLeftOut as error:
            told += error.pushes


def in_between(pipe, n, seed, told):
    """A call that is no push, now and then; what it gives."""
    chance = random.Random(1000 * seed + n)
    x, y = data(1, 4)[0]
    calls = {
        "wait": pipe.wait,
        "evaluate": lambda: pipe.evaluate(x),
        "loader": lambda: pipe.evaluate([(x, y)] * 2),
        "state_dict": pipe.state_dict,
        "model": lambda: pipe.model,
        "memory": pipe.memory,
        "clip": lambda: pipe.clip(norm=0.1),
        "eval": lambda: pipe._engine.model[2][0].train(not pipe._engine.model[2][0].training),
        "drain": pipe.drain,
        "rates": lambda: [opt.param_groups[0].update(lr=0.01 + n / 1000) for opt in pipe.optimizers],
        "load": lambda: (pipe.drain(), pipe.load_state_dict(pipe.state_dict())),
    }
    if chance.random() < 0.5:
        patient(calls[chance.choice(list(calls))], told)


def calls(rank, seed, at, backward, case, ranks, **options):
    """Other calls between the pushes, each rank in its own time; the state at the end, and what was told."""
    hurt = rank is not None
    pipe = built(at, backward, case, **options) if hurt else made(case, at, backward, workers=ranks, **options)
    pause, told = random.Random(100 * seed + (rank or 0)), []
    for n, push in enumerate(data(COUNT, 8)):
        if n in GONE:
            if not hurt:
                continue
            push = bad(at)
        else:
            in_between(pipe, n, seed, told)
        if hurt and pause.random() < 0.3:
            time.sleep(0.03 * pause.random())
        try:
            pipe.push(*push)
        except pipeback.PushLeftOut as error:
            told += error.pushes
    patient(pipe.drain, told)
    state = everything(pipe)
    pipe.close()
    return told, state


@pytest.mark.parametrize(
    ("seed", "ranks", "case", "at", "backward"),
    [
        (0, 2, "pb", 0, True), (1, 2, "cerebras", 3, False), (2, 3, "one_f_one_b-3", None, False),
        *(rare(seed, 2 + seed % 3, case, *((0, True), (2, False), (None, False), (4, True))[seed % 4])
          for seed in range(3, 40) for case in ("pb", "cerebras", "gpipe-4", "pipedream")),
    ],
)  # fmt: skip
def test_other_calls_in_between(crew, seed, ranks, case, at, backward):
    _, wanted = calls(None, seed, at, backward, case, ranks, every=None)
    found = crew.ranks(ranks).run(calls, seed, at, backward, case, ranks, each=range(ranks), every=4)
    for told, state in found:
        assert told == found[0][0] and len(told) == len(GONE)
        assert torch.equal(state, wanted)


def of_another_form(rank):
    """A push with fewer samples fails when it is rehearsed, on one rank."""
    pipe, told = built(3, False, every=4), []
    for n, push in enumerate(data(12, 8)):
        try:
            pipe.push(*(bad(3, 5) if n == 6 else push))
        except pipeback.PushLeftOut as error:
            told.append((n, error.pushes, error.micro_batch))
    patient(pipe.wait, told)
    state = everything(pipe)
    pipe.close()
    return told, state


def test_a_push_that_fails_in_its_rehearsal(crew):
    wanted = without(6, data(12, 8), 3, False)
    for told, state in crew.ranks(2).run(of_another_form, each=range(2)):
        assert [(pushes, mb) for _, pushes, mb in told] == [((6,), 6)]
        assert torch.equal(state, wanted)


def reads(rank):
    """Every loss is read at once; what was read, and the numbers that were told."""
    pipe, read, told = built(4, False, every=4), [], []
    for n, push in enumerate(data(12, 8)):
        try:
            loss = pipe.push(*(bad(4) if n == 6 else push))
            read.append(patient(loss.item, []) if n != 6 else loss.item())
        except pipeback.PushLeftOut as error:
            told += error.pushes
    pipe.close()
    return read, told


def test_reading_losses(crew):
    plain = made("pb", 4, False, every=None, workers=2)
    wanted = [float(plain.push(*push)) for n, push in enumerate(data(12, 8)) if n != 6]
    plain.close()
    for read, told in crew.ranks(2).run(reads, each=range(2)):
        assert read == wanted and told == [6]


def closes(rank):
    """The last push fails when all is said; what close() warns of."""
    pipe = built(0, False, every=4)
    for n, push in enumerate(data(6, 8)):
        pipe.push(*(bad(0) if n == 5 and rank < 2 else push))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipe.close()
    return [str(w.message) for w in told if "left out" in str(w.message)]


def test_closing_warns_of_what_is_left_out(crew):
    for told in crew.ranks(2).run(closes, each=range(2)):
        assert len(told) == 1 and "push 5 was left out" in told[0]


def ends_its_script(rank, store, folder):
    """The last push fails after the script has made its last call."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    pipe = built(0, True, every=4)
    for n, push in enumerate(data(12, 8)):
        pipe.push(*(bad(0) if n == 3 else push))
        if n == 11 and rank == 0:
            time.sleep(0.5)

    def write():
        torch.save([pipe.pushes, *(p.detach() for stage in pipe._engine.holding.mine for p in stage.weights)], path)

    path = f"{folder}/{rank}.pt"
    Finalize(None, write, exitpriority=15)  # after all was done, and before the rank leaves


def test_the_end_of_a_script_waits_until_all_is_trained(tmp_path):
    plain = made("pb", 0, True, every=None, workers=2)
    for n, push in enumerate(data(12, 8)):
        if n != 3:
            plain.push(*push)
    plain.wait()
    wanted = [p.detach() for stage in plain._engine.stages for p in stage.weights]
    ranks = [forked().Process(target=ends_its_script, args=(r, f"{tmp_path}/store", str(tmp_path))) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    (pushes, *first), (again, *last) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert pushes == again == 11
    assert all(torch.equal(p, q) for p, q in zip([*first, *last], wanted, strict=True))
    plain.close()


# -- what ends all ranks ----------------------------------------------------------------------------------------------


def ends(rank, what):
    """Something else goes wrong while the ranks go back; how each rank ends."""
    pipe = built(0, False, timeout=4.0, every=4)
    met = HeldStages.meet_again

    def meet_again(held, **how):
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "absent":
            time.sleep(6)
        if what == "interrupt":
            raise KeyboardInterrupt
        met(held, **how)

    if rank == 1:
        HeldStages.meet_again = meet_again
    begin = time.monotonic()
    try:
        for n, push in enumerate(data(40, 8)):
            pipe.push(*(bad(0) if n == 5 else push))
        pipe.wait()
    except BaseException as error:
        seconds = time.monotonic() - begin
        again = ""
        try:
            pipe.push(*data(1, 8)[0])
        except RuntimeError as closed:
            again = str(closed)
        return type(error).__name__, str(error), seconds, again
    finally:
        HeldStages.meet_again = met
    return None


@pytest.mark.parametrize("what", ["kill", rare("absent"), rare("interrupt")])
def test_a_rank_that_does_not_come_to_go_back(crew, what):
    crew = crew.ranks(3)
    crew.start(ends, what, each=range(3))
    others = [0, 2]
    try:
        found = crew.results(others, seconds=60)
        if what != "kill":
            late = crew.results([1], seconds=60)[0]
    finally:
        if what == "kill":
            crew.members[1].join()
        crew.again()
    for kind, told, seconds, again in found:
        assert kind == "RankError" and told.startswith("rank 1 did not come to go back to the last state"), told
        assert ("its process has ended" if what == "kill" else "has made no call of the pipeline") in told
        assert seconds < 12 and "the pipeline is closed" in again
    if what == "absent":
        assert late[1] == found[0][1]  # at once, and with the same words
    if what == "interrupt":
        assert late[0] == "KeyboardInterrupt"


def written(rank):
    """Weights are written with micro-batches in flight, one of which fails; a state reopens all ranks."""
    pipe, told, good = built(0, True, every=50), [], data(16, 8)
    start = pipe.state_dict()
    for n, push in enumerate(good[:8]):
        pipe.push(*(bad(0) if n == 7 else push))
    pipe.wait()
    with torch.no_grad():
        for stage in pipe._engine.model:
            stage[0].inner[0].weight.mul_(0.5)
    with pytest.raises((pipeback.StageError, pipeback.RankError)):
        for push in good[8:] * 2:
            pipe.push(*push)
        pipe.wait()
    with pytest.raises(RuntimeError) as closed:
        pipe.push(*good[0])
    pipe.load_state_dict(start)
    for n, push in enumerate(good):
        try:
            pipe.push(*(bad(0) if n == 7 else push))
        except pipeback.PushLeftOut as error:
            told += error.pushes
    patient(pipe.wait, told)
    found = everything(pipe)
    pipe.close()
    return str(closed.value), told, found


def test_what_cannot_be_taken_back_closes_all_ranks(crew):
    wanted = without(7, data(16, 8), 0, True)
    for closed, told, found in crew.ranks(2).run(written, each=range(2)):
        assert re.search(r"load_state_dict\(\) reopens it.*take_back did not help.*call drain\(\) before", closed), (
            closed
        )
        assert told == [7] and torch.equal(found, wanted)


def other_options(rank):
    made("pb", 0, True, every=3 + rank, workers=pipeback.Processes(timeout=10.0))


def test_ranks_keep_states_alike(crew):
    crew = crew.ranks(2)
    with pytest.raises(Failed, match="rank 1 has take_back 4, rank 0 has 3; start the same script"):
        crew.run(other_options, each=range(2))
    crew.again()


def stopped(rank):
    """Ctrl-C on one rank; how each ends, and what it then says."""
    pipe = built(0, False, timeout=4.0, every=4)
    try:
        for n, push in enumerate(data(40, 8)):
            if n == 7 and rank == 0:
                pipe._engine.runtime.tell = stop
            pipe.push(*push)
        pipe.wait()
    except BaseException as error:
        with pytest.raises(RuntimeError) as closed:
            pipe.push(*data(1, 8)[0])
        return type(error).__name__, str(error), str(closed.value)
    return None


def stop(command):
    raise KeyboardInterrupt


@pytest.mark.soak
def test_ctrl_c_on_a_rank_ends_all(crew):
    crew = crew.ranks(2)
    (kind, _, closed), (other, told, _) = crew.run(stopped, each=range(2))
    crew.again()
    assert kind == "KeyboardInterrupt" and "KeyboardInterrupt came in the middle of its work" in closed
    assert "take_back" not in closed
    assert other == "RankError" and told.startswith("rank 0")
