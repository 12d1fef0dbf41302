"""Law: ranks that hold several parts of the stages equal the event loop, bit for bit, and states move between them."""

import pytest
import torch
from torch import nn

import pipeback
from pipeback import methods
from pipeback.schedules.placement import place
from tests.helpers.choice import diagonal, mostly_rare
from tests.laws.cases import CASES, STAGES, data, everything, flushes, network, pipeline
from tests.processes.cases import differences, train
from tests.processes.test_faults import Odd

LINKS = ("shared_memory", "gloo")
SHAPES = {  # (ranks, method): a rank may hold the first and the last stage, and neighbours of its own ones
    "loop": (2, "interleaved", {"micro_batches": 4}),
    "bfs": (2, "looped_bfs", {}),
    "v": (2, "pb", {"placement": "v"}),
}


@pytest.mark.parametrize(("case", "link"), diagonal(["interleaved-4", "looped_bfs", "zb_v-4", "pb-v"], LINKS))
@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_losses_states_and_evaluations(crew, case, link):
    """With dropout and batch statistics, one micro-batch per push."""
    wanted = train("drawing", case)
    for found in crew.ranks(2).run(train, "drawing", case, workers=pipeback.Processes(link=link)):
        assert differences(found, wanted) == []


def whole_or_not(name, link):
    return [tensor.clone() for tensor in flushes(name, workers=pipeback.Processes(link=link))]


@pytest.mark.parametrize(("name", "link"), diagonal(["interleaved", "looped_bfs", "zb_v"], LINKS))
def test_whole_flushes_and_parts_of_them(crew, name, link):
    wanted = flushes({"looped_bfs": "gpipe", "zb_v": "zb_h1"}.get(name, "one_f_one_b"))
    for found in crew.ranks(2).run(whole_or_not, name, link):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def long_flush(name, options, link, stages, samples):
    """A flush of many micro-batches, more of which wait between ranks than a wire holds; and where stages are."""
    method, (x, y) = methods.create(name, **options), data(1, samples=samples)[0]
    pipe = pipeline(
        network(stages), method, micro_batch_size=1, workers=None if link is None else pipeback.Processes(link=link)
    )
    losses = [pipe.push(x, y).clone() for _ in range(2)]
    state, owner = everything(pipe), pipe.owner
    held = [s for s, _ in pipe.held]
    pipe.close()
    return losses, state, owner, held


LOOPED, V = [0, 1, 2, 3] * 2, [0, 1, 2, 3, 3, 2, 1, 0]
LONG = [
    (*each, link)
    for each in (
        ("looped_bfs", {"chunks": 2}, LOOPED), ("interleaved", {"chunks": 2}, LOOPED),
        ("zb_v", {}, V), ("pb", {"placement": "v"}, V),
    )
    for link in LINKS
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "owner", "link"), mostly_rare(LONG, LONG[0], LONG[5]))
def test_many_messages_between_four_ranks(crew, name, options, owner, link):
    losses, state, _, _ = long_flush(name, options, None, 8, 150)
    for rank, found in enumerate(crew.ranks(4).run(long_flush, name, options, link, 8, 150)):
        assert found[0] == losses and torch.equal(found[1], state)
        assert found[2] == owner and found[3] == [s for s in range(8) if owner[s] == rank]


def go_on(state, name, options, **more):
    """Losses and the whole state after a state was loaded, and a state in the middle."""
    pipe = pipeline(network(), methods.create(name, **options), **more)
    if state is not None:
        pipe.load_state_dict(state)
    losses = [pipe.push(x, y).clone() for x, y in data(13)[pipe.arrived if state is not None else 0 :][:6]]
    found = torch.stack(losses), pipe.state_dict()
    pipe.close()
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_state_moves_between_placements(crew, shape):
    """From the event loop to two ranks in parts, to three ranks of neighbours, to threads in parts and back."""
    _, name, options = SHAPES[shape]
    apart = {"placement": "neighbours"} if name == "pb" else {"chunks": 1, **options}
    wanted, states = [], [None]
    for _ in range(2):
        losses, state = go_on(states[-1], name, options)
        wanted.append(losses)
        states.append(state)
    for ranks, some, more in ((2, options, {}), (3, apart, {}), (0, options, {"workers": 2})):
        first = go_on(None, name, some, **more) if not ranks else crew.ranks(ranks).run(go_on, None, name, some)[0]
        assert torch.equal(first[0], wanted[0])
        assert flat(first[1]) == flat(states[1])
        second = go_on(states[1], name, some, **more) if not ranks else crew.run(go_on, states[1], name, some)[0]
        assert torch.equal(second[0], wanted[1]) and flat(second[1]) == flat(states[2])
        assert torch.equal(go_on(first[1], name, options)[0], wanted[1])


def flat(state):
    return {
        (s, name): tensor.double().flatten().tolist()
        for s, tensors in enumerate(state["stages"])
        for name, tensor in tensors.items()
        if tensor.dtype != torch.uint8
    }


def too_many_parts():
    with pytest.raises(ValueError, match="interleaved|Interleaved") as found:
        pipeline(network(), methods.create("interleaved", chunks=2))
    return str(found.value)


def test_parts_that_do_not_fit_are_refused_on_every_rank(crew):
    told = crew.ranks(3).run(too_many_parts)
    crew.again()
    shown = repr(methods.create("interleaved"))
    wanted = f"{shown} puts 2 parts of the stages on each worker, but 3 workers share 5 stages; use at most 2 workers"
    assert told == [f"{wanted}, or chunks=1"] * 3
    assert CASES["interleaved"](STAGES).chunks == 2


def other_data(link):
    """Rank 1 pushes another micro-batch 4."""
    pipe = pipeline(network(), methods.create("pb", placement="v"), workers=pipeback.Processes(link=link))
    with pytest.raises((RuntimeError, pipeback.RankError)) as found:
        for n, (x, y) in enumerate(data(9)):
            pipe.push(x + (pipe.ranks.index if n == 4 else 0), y)
        pipe.wait()
    return str(found.value)


@pytest.mark.parametrize("link", LINKS)
def test_ranks_that_push_other_data_are_named(crew, link):
    told = crew.ranks(2).run(other_data, link)
    crew.again()
    assert all("micro-batch 4 is not the one that worker" in text for text in told), told


def replicated(case, replicas):
    replica = torch.distributed.get_rank() // 2 if replicas > 1 else None
    return {
        key: value
        for key, value in train("plain", case, samples=12, replica=replica, replicas=replicas).items()
        if key in ("flying", "end", "model")
    }


@pytest.mark.parametrize("case", ["interleaved-4", "pb-v"])
def test_replicas_each_have_the_same_parts(crew, case):
    """Two pipelines of two ranks each, beside two replicas in one process."""
    wanted = train("plain", case, samples=12, replicas=2)
    wanted = {key: wanted[key] for key in ("flying", "end", "model")}
    for found in crew.ranks(4).run(replicated, case, 2):
        assert differences(found, wanted) == []


def streams(case, store):
    return train("drawing", case, store=store)


@pytest.mark.parametrize(("case", "kind"), [("interleaved-4", "disk"), ("zb_v-4", "host"), ("pb-v", "disk")])
@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_each_rank_streams_its_parts(crew, case, kind, tmp_path):
    wanted = train("drawing", case)
    for found in crew.ranks(2).run(streams, case, kind if kind == "host" else f"disk:{tmp_path}"):
        assert differences(found, wanted) == []


def checkpointed(folder, name, options, saves):
    """Train, and save in the middle of a flush; or go on from there. The losses that follow, and the whole state."""
    pipe = pipeline(network(), methods.create(name, **options))
    batches = data(14)
    if saves:
        for x, y in batches[:7]:
            pipe.push(x, y)
        pipeback.checkpoint.save(pipe, folder)
    else:
        pipeback.checkpoint.load(pipe, folder)
    losses = torch.stack([pipe.push(x, y).clone() for x, y in batches[7:]])
    found = losses, flat(pipe.state_dict())
    pipe.close()
    return found


@pytest.mark.parametrize("shape", ["loop", "v"])
def test_a_checkpoint_loads_on_any_number_of_ranks(crew, shape, tmp_path):
    ranks, name, options = SHAPES[shape]
    apart = {"placement": "neighbours"} if name == "pb" else {**options, "chunks": 1}
    wanted = checkpointed(tmp_path / "alone", name, options, True)
    for found in crew.ranks(ranks).run(checkpointed, tmp_path / "parts", name, options, True):
        assert torch.equal(found[0], wanted[0]) and found[1] == wanted[1]
    assert checkpointed(tmp_path / "parts", name, options, False)[1] == wanted[1]
    assert crew.ranks(3).run(checkpointed, tmp_path / "parts", name, apart, False)[2][1] == wanted[1]
    assert crew.ranks(2).run(checkpointed, tmp_path / "alone", name, options, False)[1][1] == wanted[1]


def faulty(rank, what, case):
    """Until rank 1 fails, in a part that lies between parts of rank 0."""
    model = network()
    model[2] = nn.Sequential(model[2], Odd(what, 30 if rank == 1 else 10**9))
    pipe = pipeline(model, CASES[case](STAGES), workers=pipeback.Processes(timeout=5.0))
    parts = [0, 1, 2, 3, 3] if pipe.method.placement == "v" else [0, 0, 1, 2, 3]
    pipe._engine.holding.placement = lambda seconds=None: place(pipe.method.placement, 2, parts)
    try:
        for x, y in data(1) * 200:
            pipe.push(x, y)
        pipe.wait()
    except (pipeback.RankError, pipeback.StageError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", ["interleaved-4", "pb-v"])
def test_a_rank_that_fails_is_named(crew, case):
    told = crew.ranks(2).run(faulty, "raise", case, each=range(2))
    crew.again()
    assert "stage 2 (2), micro-batch" in told[1] and "the flux is too high" in told[1]
    assert "rank 1" in told[0] and "the flux is too high" in told[0]


@pytest.mark.parametrize("case", ["interleaved-4", "pb-v"])
def test_a_rank_that_is_killed_is_named(crew, case):
    crew.ranks(2).start(faulty, "kill", case, each=range(2))
    (told,) = crew.results(ranks=[0])
    crew.members[1].join(30)  # its end is seen by others before it has ended
    crew.again()
    assert "rank 1" in told
