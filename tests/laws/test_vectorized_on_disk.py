"""Law: stages that run as one while their weights come from disk have the bits and the traffic of those whose weights
come from host memory, which are the event loop to rounding (`test_vectorized_streaming`). What was committed goes on.
"""

import pytest
import torch

import pipeback
from pipeback.errors import StoreError
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import S, doubles, model, planned_and_counted, same, share_equally, through
from tests.laws.cases import CASES, OPTIMIZERS, allowed, everything, pipeline, weights
from tests.laws.test_vectorized_streaming import AHEAD, STREAMED
from tests.laws.test_vectorized_streaming_in_workers import APART, momentum

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*takes its statistics"),
    pytest.mark.usefixtures("all_on_disk", "deterministic"),  # so that times do not decide which ticks are whole
]
USUAL = ("pb", "pipedream", "msnag-stash", "cerebras")


@pytest.fixture
def all_on_disk(monkeypatch):
    monkeypatch.setattr(disk_store, "SMALL", 1)  # these networks are small


def stores(folder, ahead=5):
    return HostStore(prefetch=ahead), DiskStore(folder, prefetch=ahead)


def agree(case, folder, ahead=5, **options):
    """Both kinds of stores have the same bits, and move as much."""
    found = []
    for store in stores(folder, ahead):
        pipe = pipeline(model(), CASES[case](S), micro_batch_size=3, store=store, vectorize=True, **options)
        losses = [pipe.push(x, y) for x, y in zip(*(part.split(9) for part in batches(81)), strict=True)]
        found.append([torch.stack(losses), weights(pipe)])
        pipe.drain()
        found[-1] += [everything(pipe)]
        assert any(told.startswith("as one") for told in pipe.vectorized.values()) == (ahead > 2)
        assert pipe.traffic().peak_stages <= ahead + 1
        found[-1].append(torch.tensor([getattr(pipe.traffic(), name) for name in ("fetches", "gradients_out")]))
        pipe.close()
    assert all(map(torch.equal, *found))


def batches(samples):
    return [torch.cat(part) for part in zip(*doubles(samples // 3), strict=True)]


@pytest.mark.parametrize("case", mostly_rare(STREAMED, *USUAL))
def test_every_method_equals_host_memory(case, tmp_path):
    agree(case, tmp_path, AHEAD[(STREAMED.index(case) + 1) % len(AHEAD)])


@pytest.mark.parametrize(
    ("case", "optimizer"),
    mostly_rare(
        [(case, one) for case in ("pb", "pipedream", "ef") for one in OPTIMIZERS if allowed(case, one)], ("pb", "adam")
    ),
)  # fmt: skip
def test_every_optimizer(case, optimizer, tmp_path):
    agree(case, tmp_path, optimizer=optimizer)


def test_with_clipped_gradients(tmp_path):
    agree("cerebras", tmp_path, clip_norm=0.1)


@pytest.mark.parametrize(
    ("case", "options"),
    mostly_rare(
        [(c, o) for c in ("pb", "cerebras", "pipedream") for o in ({"workers": 2}, {"replicas": 2})],
        ("cerebras", {"workers": 2}), ("pipedream", {"replicas": 2}),
    ),
    ids=str,
)  # fmt: skip
def test_workers_and_replicas(case, options, tmp_path):
    agree(case, tmp_path, **options)


@pytest.mark.parametrize("case", mostly_rare(APART, "spectrain"))
def test_the_loss_is_computed_outside(case, tmp_path):
    found = []
    for store in stores(tmp_path):
        pipe = pipeback.Pipeline(
            model(), loss=None, optimizer=OPTIMIZERS[momentum(case)], method=CASES[case](S), store=store, vectorize=True
        )
        losses = through(pipe, doubles(27))
        assert any(told.startswith("as one") for told in pipe.vectorized.values())
        pipe.drain()
        found.append([losses, weights(pipe)])
        pipe.close()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("case", "count"), mostly_rare([(c, n) for c in ("pb", "cerebras", "pipedream") for n in (1, 4)], ("cerebras", 4))
)
def test_bytes_predicted_are_bytes_counted(case, count, tmp_path):
    pipe = pipeline(model(), CASES[case](S), micro_batch_size=3, store=stores(tmp_path)[1], vectorize=True)
    planned, found, whole = planned_and_counted(pipe, count)
    for name in ("weights_in", "fetches", "gradients_out", "sums_in"):
        assert round(5 * getattr(planned, name)) == getattr(found, name), name
    assert (planned.peak_weights, planned.peak_stages) == (whole.peak_bytes, whole.peak_stages)
    pipe.close()


def test_memory_is_free_between_pushes(tmp_path):
    pipe = pipeline(model(), "pipedream", micro_batch_size=3, store=stores(tmp_path)[1], vectorize=True)
    pipe.push(*batches(60))
    pipe.wait()
    for stage in pipe._engine.stages:
        behind = pipe._engine.holding.store._placeholders[stage.index, 0].behind
        some = [stage.home.flat.memory, *(v for kept in stage.versions.kept.values() for v in kept)]
        some += [behind(v) for state in stage.optimizer.state.values() for v in state.values() if v.dim()]
        assert not any(each.untyped_storage().nbytes() for each in [*some, stage.home.slot.flat.memory])
    pipe.close()


# -- commits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "options"),
    mostly_rare(
        [*((case, {}) for case in STREAMED), *((case, {"workers": 2}) for case in APART)],
        *((case, {}) for case in USUAL), ("pb", {"workers": 2}),
    ),
    ids=str,
)  # fmt: skip
def test_what_was_committed_goes_on(case, options, tmp_path, monkeypatch):
    """In flight, to the bits of a run that was not interrupted."""
    share_equally(monkeypatch)
    x, y = batches(90)
    found = []
    for name, parts in (("whole", (9, 9, 12)), ("ended", (9, 9)), ("ended", (12,))):
        pipe = pipeline(
            model(), CASES[case](S), micro_batch_size=3, store=DiskStore(tmp_path / name, prefetch=5), vectorize=True,
            **options,
        )  # fmt: skip
        for part in parts:
            at = 3 * pipe.arrived
            pipe.push(x[at : at + 3 * part], y[at : at + 3 * part])
            if name == "ended" or pipe.arrived == 18:
                pipe.commit()
        found.append(everything(pipe))
        pipe.close()
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("case", ["pb", rare("pipedream"), rare("cerebras")])
def test_a_checkpoint_goes_on_from_another_store(case, tmp_path):
    """From disk to host memory and to none, and back, in flight."""
    some = doubles(30)
    kinds = [{"store": store} for store in stores(tmp_path)] + [{}]
    pipes = [pipeline(model(), CASES[case](S), vectorize=True, **kind) for kind in kinds]
    for x, y in some[:11]:
        pipes[1].push(x, y)
    for pipe in (pipes[0], pipes[2]):
        pipe.load_state_dict(pipes[1].state_dict())
    pipes[1].load_state_dict(pipes[0].state_dict())
    for pipe in pipes:
        for x, y in some[11:]:
            pipe.push(x, y)
    same([weights(pipe) for pipe in pipes[:2]], [weights(pipes[2])] * 2)
    assert torch.equal(weights(pipes[0]), weights(pipes[1]))
    for pipe in pipes:
        pipe.close()


def test_a_flipped_bit(tmp_path):
    """Also of a stage whose weights come with those of others, and the folder is found as it was committed."""
    pipe = pipeline(model(), "pb", micro_batch_size=3, store=stores(tmp_path)[1], vectorize=True)
    pipe.push(*batches(60))
    pipe.commit()
    path = tmp_path / "stage-002.pages"
    whole = path.read_bytes()
    path.write_bytes(bytes(255 - byte for byte in whole))
    with pytest.raises(StoreError, match=r"stage-002.pages: .* has other content than was written"):
        pipe.push(*batches(60))
    pipe.close()
    path.write_bytes(whole)
    again = pipeline(model(), "pb", micro_batch_size=3, store=stores(tmp_path)[1], vectorize=True)
    assert again.arrived == 20
    again.push(*batches(60))
    again.close()
