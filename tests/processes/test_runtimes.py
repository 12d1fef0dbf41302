"""Law: runtimes agree, bit for bit: the event loop and real processes, over every link."""

import gc
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import pipeback
from tests.helpers.choice import mostly_rare, rare
from tests.laws.cases import CASES, FEW, data, everything, flushes, network, pipeline, placeable
from tests.processes.cases import differences, drawing, flat, sets_modes, train

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def odd_cases(crew, model, cases, **options):
    """What differs from the event loop, by case and rank."""
    found = {}
    for case in cases:
        if not placeable(case, crew.size):
            continue
        wanted = train(model, case, **{k: v for k, v in options.items() if k not in ("workers", "store")})
        for rank, result in enumerate(crew.run(train, model, case, **options)):
            if odd := differences(result, wanted):
                found[f"{case}, rank {rank}"] = odd
    return found


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, FEW[::2]), (3, FEW[1::2]), rare(2, list(CASES), id="2-all"), rare(3, list(CASES), id="3-all")],
)
def test_ranks_equal_the_event_loop(crew, ranks, cases):
    """With dropout and batch statistics: a stage owns its random stream and its buffers."""
    crew = crew.ranks(ranks)
    assert odd_cases(crew, "drawing", cases) == {}


def test_four_ranks_over_every_link(crew):
    crew = crew.ranks(4)
    assert odd_cases(crew, "drawing", ["cerebras", "gpipe-4"], workers=pipeback.Processes(link="gloo")) == {}
    assert (
        odd_cases(crew, "plain", ["pb", "pipedream-vertical"], workers=pipeback.Processes(link="shared_memory")) == {}
    )


@pytest.mark.parametrize(
    ("activations", "cases"),
    [
        ("host", ["pb", "gpipe-4"]), ("recompute", ["cerebras", "pipedream"]),
        rare("host", ["cerebras", "pipedream"]), rare("recompute", ["pb", "gpipe-4"]),
    ],
)  # fmt: skip
def test_every_kind_of_activations(crew, activations, cases):
    crew = crew.ranks(2)
    assert odd_cases(crew, "drawing", cases, activations=activations) == {}


def test_weights_of_a_half_type_with_masters(crew):
    crew = crew.ranks(2)
    assert odd_cases(crew, "half", ["pb", "cerebras", "pipedream", "gpipe-4", "pipemare"], masters=True) == {}


def test_modules_that_are_set_between_pushes(crew):
    wanted = sets_modes()
    for result in crew.ranks(2).run(sets_modes):
        assert wanted.keys() == result.keys()
        assert [name for name in wanted if not torch.equal(wanted[name], result[name])] == []


@pytest.mark.soak
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a compiler")
def test_compiled_stages(crew):
    crew = crew.ranks(2)
    assert odd_cases(crew, "drawing", ["pb"], compile=True) == {}


@pytest.mark.soak
@pytest.mark.parametrize("link", ["gloo", "shared_memory"])
def test_four_ranks_with_every_method(crew, link):
    crew = crew.ranks(4)
    assert odd_cases(crew, "drawing", list(CASES), workers=pipeback.Processes(link=link)) == {}


def ragged(**options):
    """Micro-batches of three samples, the last now and then of two; weights by samples, clipping, a falling rate."""
    torch.manual_seed(5)
    pipe = pipeline(
        drawing(), "pb", micro_batch_size=pipeback.MicroBatches(3, weights="samples"), clip_norm=0.5, **options
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) for opt in pipe.optimizers]
    losses = []
    for n, (x, y) in enumerate(data(9, samples=12)):
        size = 12 - n % 2
        losses.append(pipe.push(x[:size], y[:size]))
        for scheduler in schedulers:
            scheduler.step()
    result = {"losses": torch.stack([loss.clone() for loss in losses]), "state": flat(pipe.state_dict())}
    pipe.close()
    return result


class Tuples(nn.Module):
    """Passes on a tuple with an integer part, and a view that does not lie densely."""

    def __init__(self, width=6):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, value):
        x, number = value if isinstance(value, tuple) else (value, torch.arange(value.shape[0]))
        y = torch.tanh(self.inner(x)) + number[:, None] / 100
        return y.t().contiguous().t(), number + 1


class First(nn.Module):
    def forward(self, value):
        return value[0]


def tuples(**options):
    torch.manual_seed(6)
    pipe = pipeline([*(Tuples() for _ in range(4)), nn.Sequential(First(), nn.Linear(6, 6))], "pipedream", **options)
    losses = torch.stack([pipe.push(x, y).clone() for x, y in data(12)])
    result = {"losses": losses, "state": flat(pipe.state_dict())}
    pipe.close()
    return result


def test_what_crosses_a_boundary(crew):
    crew = crew.ranks(2)
    for case in (ragged, tuples):
        for link in ("auto", "gloo"):
            for result in crew.run(case, workers=pipeback.Processes(link=link)):
                assert differences(result, case()) == []


def whole_or_not(link):
    return [tensor.clone() for tensor in flushes(workers=pipeback.Processes(link=link))]


def test_whole_flushes_and_parts_of_them(crew):
    crew, wanted = crew.ranks(2), flushes()
    for link in ("shared_memory", "gloo"):
        for found in crew.run(whole_or_not, link):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def kept(timeout=30.0):
    """What a rank holds, and what it says of it."""
    pipe = pipeline(
        nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)]), "pb", workers=pipeback.Processes(timeout=timeout)
    )
    assert not any(p.is_meta for p in pipe.model.parameters())
    for x, y in data(9):
        pipe.push(x, y)
    here = [not next(stage.parameters()).is_meta for stage in pipe._engine.model]
    result = here, pipe.memory().weights, sorted({record.stage for record in pipe.ledger}), pipe.owner
    pipe.close()
    return result


def test_a_rank_holds_its_own_stages_only(crew):
    one = 4 * (6 * 6 + 6)
    crew = crew.ranks(3)
    found = crew.run(kept)
    owner = found[0][3]
    for rank, (here, weights, recorded, told) in enumerate(found):
        mine = [s for s, worker in enumerate(owner) if worker == rank]
        assert told == owner
        assert [s for s, there in enumerate(here) if there] == mine == recorded
        assert weights == one * len(mine)


def lazy_losses():
    """The last rank's losses reach the others when they are read, however late, and in any order."""
    pipe = pipeline(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), "pb")
    losses = [pipe.push(x, y) for x, y in data(200)]
    result = [float(loss) for loss in reversed(losses)]
    pipe.close()
    return result


def test_losses_reach_every_rank(crew):
    crew = crew.ranks(2)
    torch.manual_seed(0)
    first, last = crew.run(seeded, lazy_losses)
    assert first == last == seeded(lazy_losses)
    assert len(first) == 200


def seeded(function):
    torch.manual_seed(0)
    return function()


def unseeded():
    """Ranks that were seeded otherwise get the first one's weights and random streams."""
    torch.seed()
    pipe = pipeline(nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(4)]), "pb")
    start = {k: v.clone() for k, v in pipe.model.state_dict().items()}
    losses = [float(pipe.push(x, y)) for x, y in data(8)]
    pipe.close()
    return start, losses


def test_the_first_rank_gives_the_initial_weights(crew):
    crew = crew.ranks(2)
    (weights, losses), (others, same) = crew.run(unseeded)
    assert losses == same
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


def in_meta(build, **options):
    torch.manual_seed(9)
    with torch.device("meta"):
        model = build()
    torch.manual_seed(9)
    pipe = pipeline(model, "cerebras", **options)
    if pipe.ranks.several:
        assert all(p.is_meta for p in model.parameters())  # nobody has held the whole
    losses = torch.stack([pipe.push(x, y).clone() for x, y in data(10, samples=8)])
    result = {"losses": losses, "state": flat(pipe.state_dict())}
    pipe.close()
    return result


def attention():
    return nn.Sequential(
        *[nn.Sequential(nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, dropout=0.1)) for _ in range(3)],
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
    )


def test_a_model_on_the_meta_device_is_initialised_stage_by_stage(crew):
    wanted = in_meta(attention)
    crew = crew.ranks(2)
    for result in crew.run(in_meta, attention):
        assert differences(result, wanted) == []
    assert differences(in_meta(attention, workers=2), wanted) == []
    weight = wanted["state"]["0/weight/0.linear1.weight"]
    assert 0.05 < weight.std() < 0.5  # initialised, not whatever was in memory


def test_layers_that_cannot_be_initialised_are_named():
    class Position(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return x + self.table

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), Position()))
    with pytest.raises(ValueError, match=r"stage 1 \(1\): Position '1' .*no reset_parameters\(\).*'table'"):
        pipeline(model, "pb")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), Position()))

    def init(module):
        for p in module.parameters():
            nn.init.constant_(p, 0.25)

    pipe = pipeback.Pipeline(
        model,
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        method="pb",
        store=pipeback.Streaming(init=init),
    )
    assert torch.equal(pipe.model[1][1].table, torch.full((6,), 0.25))


def test_part_of_a_stage_on_the_meta_device():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, device="meta")))
    with pytest.raises(ValueError, match=r"stage 1 \(1\) is on the meta device in part"):
        pipeline(model, "pb")


THREE = ("gpipe", "pb", "pipedream"), ("one_f_one_b-3", "cerebras", "pipemare-t3")


@pytest.mark.parametrize(
    ("kind", "cases"),
    mostly_rare(product(["host", "disk"], THREE), ("disk", THREE[0]), ("host", THREE[1])),
)
def test_each_rank_streams_its_own_stages(crew, kind, cases, tmp_path):
    """With dropout and batch statistics; the event loop that it equals has its weights on the device."""
    crew = crew.ranks(2)
    for case in cases:
        store = "host" if kind == "host" else f"disk:{tmp_path / case}"
        assert odd_cases(crew, "drawing", [case], store=store) == {}


def threads_after(pipelines, replicas):
    """How many threads of process groups this process has after each of so many pipelines."""
    found = []
    for n in range(pipelines):
        pipe = pipeline(drawing(), "pb", replicas=replicas, store="host" if n % 2 else None)
        for x, y in data(2):
            pipe.push(x, y)
        pipe.close()
        del pipe
        gc.collect()
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        found.append(sum("gloo" in name for name in names))
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads of torch are counted in /proc")
@pytest.mark.parametrize("replicas", [1, 2])
def test_pipelines_one_after_the_other_keep_no_process_groups(crew, replicas):
    """A group has a thread that wakes all the time; hundreds of them took all of a processor's time."""
    crew = crew.ranks(2)
    for found in crew.run(threads_after, 8, replicas):
        if not max(found):
            pytest.skip("this version of torch does not name such threads")
        assert max(found[4:]) <= max(found[:4]), found


def cast(**options):
    """Pushes under autocast, from the first one on; losses and weights."""
    pipe = pipeline(network(), "pb", **options)
    losses = []
    for x, y in data(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(pipe.push(x, y).clone())
    pipe.drain()
    found = everything(pipe)
    pipe.close()
    return torch.cat([torch.stack(losses).double(), found])


def test_pushes_under_autocast(crew):
    wanted = cast()
    assert all(torch.equal(found, wanted) for found in crew.ranks(2).run(cast))
