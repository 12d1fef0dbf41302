"""Law: resume. A state saved in flight over some ranks goes on over any other number, bit for bit."""

import time

import pytest
import torch

from pipeback import checkpoint
from pipeback.checkpoint import save_and_load
from tests.helpers.choice import rare
from tests.laws.cases import CASES, STAGES, data, pipeline
from tests.processes.cases import differences, drawing, settled

BATCHES = 16, 7  # pushed in all, and before the state is saved
CASES_HERE = [
    "pb", "pipedream", "pipedream_2bw", "pipemare", "cerebras", "gpipe-4", "gap_aware", "pipeoptim-xpipe",
    "msnag-stash", "eigendelay",
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def begin(case):
    torch.manual_seed(7)
    return pipeline(drawing(), CASES[case](STAGES))


def first_part(case, folder=None):
    pipe = begin(case)
    for x, y in data(BATCHES[0], samples=8)[: BATCHES[1]]:
        pipe.push(x, y)
    state = pipe.state_dict()
    if folder is not None:
        checkpoint.save(pipe, folder)
    pipe.close()
    return state


def second_part(case, state):
    pipe = begin(case)
    if isinstance(state, dict):
        pipe.load_state_dict(state)
    else:
        checkpoint.load(pipe, state)
    losses = [pipe.push(x, y) for x, y in data(BATCHES[0], samples=8)[BATCHES[1] :]]
    result = {"losses": torch.stack([loss.clone() for loss in losses]), "state": settled(pipe.state_dict())}
    pipe.close()
    return result


def whole(case):
    return second_part(case, first_part(case))


WAYS = [(3, 2), (2, 1), (1, 3), (2, 4)]


@pytest.mark.parametrize(
    ("save", "load", "cases"),
    [
        *((*way, [case]) for way, case in zip(WAYS, ("pb", "gpipe-4", "cerebras", "pipedream"), strict=True)),
        *(rare(*way, CASES_HERE) for way in WAYS),
    ],
)
def test_on_another_number_of_ranks(crew, tmp_path, save, load, cases):
    for case in cases:
        wanted, folder = whole(case), tmp_path / case
        if save == 1:
            state = first_part(case, folder)
        else:
            state = crew.ranks(save).run(first_part, case, folder)[-1]
        assert sorted(p.name for p in folder.iterdir()) == ["step-00000007"]
        for source in (state, folder):
            found = [second_part(case, source)] if load == 1 else crew.ranks(load).run(second_part, case, source)
            for rank, result in enumerate(found):
                assert differences(result, wanted) == [], f"{case}, rank {rank}"


def read_by(folder):
    """The stages that a rank reads of a checkpoint, and those that it then holds."""
    pipe, read, keep = begin("pb"), [], save_and_load._tensors
    save_and_load._tensors = lambda file, facts: read.append(facts["stage"]) or keep(file, facts)
    try:
        checkpoint.load(pipe, folder)
    finally:
        save_and_load._tensors = keep
    held = [s for s, worker in enumerate(pipe.owner) if worker == pipe.ranks.index]
    pipe.close()
    return sorted(read), held


def test_a_rank_reads_its_own_stages(crew, tmp_path):
    first_part("pb", tmp_path)
    for read, held in crew.ranks(3).run(read_by, tmp_path):
        assert read == held != list(range(STAGES))


def loaded_twice(case, state):
    """A state whose stages are shared out otherwise comes into a pipeline that runs."""
    pipe = begin(case)
    batches = data(BATCHES[0], samples=8)
    for x, y in batches[:3]:
        pipe.push(x, y)
    before = pipe.owner
    seconds = [1.0] * STAGES
    seconds[0 if before[1] == 0 else -1] = 100.0
    pipe.load_state_dict({**state, "plain": {**state["plain"], "seconds": seconds}})
    assert pipe.owner != before
    losses = [pipe.push(x, y) for x, y in batches[BATCHES[1] :]]
    result = {"losses": torch.stack([loss.clone() for loss in losses]), "state": settled(pipe.state_dict())}
    pipe.close()
    return result


def test_into_a_pipeline_that_runs(crew):
    crew = crew.ranks(2)
    for case in ("pb", "pipedream", "cerebras"):
        for result in crew.run(loaded_twice, case, first_part(case)):
            assert differences(result, whole(case)) == []


class Slow(torch.nn.Linear):
    """A layer that takes as long as it is told."""

    seconds = 0.0

    def forward(self, x):
        time.sleep(type(self).seconds * self.slow)
        return super().forward(x)


def begins_again(slow):
    """The state of before the first push is loaded, when other stages are slow; losses, weights, and who had which."""
    torch.manual_seed(7)
    layers = [Slow(6, 6) for _ in range(4)]
    pipe = pipeline(torch.nn.Sequential(*layers), "pb")
    start, owners = pipe.state_dict(), []
    Slow.seconds = 0.05
    for first in slow:
        for n, layer in enumerate(layers):
            layer.slow = int(n in first)
        losses = [float(pipe.push(x, y)) for x, y in data(6)]
        found = {name: value.clone() for name, value in pipe.model.state_dict().items()}
        owners.append(list(pipe.owner))
        pipe.load_state_dict(start)
    pipe.close()
    return losses, found, owners


def test_a_state_of_before_the_first_push_leaves_stages_where_they_are(crew):
    """Which stages are slow is measured anew, but those of other ranks have no weights here."""
    losses, weights, _ = begins_again([(0,)])
    for found, values, (before, after) in crew.ranks(2).run(begins_again, [(0,), (2, 3)]):
        assert before == after
        assert found == losses
        assert all(torch.equal(value, values[name]) for name, value in weights.items())


def goes_back_on_disk(folder, late):
    """A state is loaded over a later version: the folder's pushes at once, after a push, and when it is resumed."""
    found = []
    for times in (range(4), ()):
        pipe = pipeline(drawing(), "gpipe", store=f"disk:{folder}")
        found.append(pipe.pushes)
        for n in times:
            if n == late:
                state = pipe.state_dict()
            pipe.push(*data(4, samples=8)[n])
        if times:
            pipe.load_state_dict(state)
            found.append(_committed(pipe))
            pipe.push(*data(1, samples=8, seed=9)[0])
            found.append(_committed(pipe))
        pipe.close()
    return found


def _committed(pipe):
    return pipe._engine.holding.store.versions.newest["state"]["plain"]["pushes"]


@pytest.mark.parametrize("late", [0, 2])
def test_the_folders_of_ranks_follow_a_state(crew, tmp_path, late):
    """Before the first push no rank has its stages, so that such a state is committed after the first push."""
    at_once = late or 4
    for found in crew.ranks(2).run(goes_back_on_disk, tmp_path, late):
        assert found == [0, at_once, late + 1, late + 1]
