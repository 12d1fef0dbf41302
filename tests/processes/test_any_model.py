"""Law: a followed model on real processes is the event loop, bit for bit, forms that come later included."""

import time
import warnings

import pytest
import torch
import torch.distributed as dist

import pipeback
from tests.helpers.choice import rare
from tests.laws.branching import STAGES, Branching, batches, build, loss
from tests.laws.cases import CASES, OPTIMIZERS
from tests.processes.cases import differences, flat
from tests.splitting.test_branches import batches as masked
from tests.splitting.test_branches import piped as padded

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def train(case, **options):
    warnings.filterwarnings("ignore", ".*takes its statistics")
    pipe = build(CASES[case](STAGES), drop=0.3, **options)
    every = batches(13)
    losses = [pipe.push(x, y) for x, y in every]
    state = pipe.state_dict()
    output = pipe.evaluate(every[0][0])
    pipe.drain()
    last = flat(pipe.state_dict())
    model = {name: value.clone() for name, value in pipe.model.state_dict().items()}
    pipe.load_state_dict(state)
    losses += [pipe.push(x, y) for x, y in batches(4, seed=5)]
    pipe.drain()
    assert output["kind"] == "words" and output["hidden"][1] is None
    result = {
        "losses": torch.stack([loss.clone() for loss in losses]), "flying": flat(state), "drained": last,
        "output": output["scores"], "model": model, "loaded": flat(pipe.state_dict()),
    }  # fmt: skip
    pipe.close()
    return result


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, ["gpipe-4", "pipedream"]), (3, ["pb"]), rare(2, ["gpipe-4", "pb", "pipedream", "cerebras"])],
)
def test_ranks_equal_the_event_loop(crew, ranks, cases):
    crew = crew.ranks(ranks)
    for case in cases:
        wanted = train(case)
        for rank, result in enumerate(crew.run(train, case)):
            assert differences(result, wanted) == [], (case, rank)


def decide():
    """Micro-batches with and without padding, the latter being first met when ranks have their stages."""
    pipe = padded("pb", masked(12))
    losses = torch.stack([pipe.push(x, y).clone() for x, y in masked(12)])
    result = {"losses": losses, "model": {name: value.clone() for name, value in pipe.model.state_dict().items()}}
    pipe.close()
    return result


def test_ranks_go_every_way(crew):
    wanted = decide()
    for result in crew.ranks(2).run(decide):
        assert differences(result, wanted) == []


def cut(count):
    """A rank that is slower at some layers than another must not cut elsewhere."""
    warnings.filterwarnings("ignore", ".*takes its statistics")
    x, y = batches(1)[0]
    model = Branching()
    rank = dist.get_rank()
    layers = [model.first, model.second, model.third, model.head]
    layers[rank].register_forward_hook(lambda *_: time.sleep(0.05))
    pipe = pipeback.Pipeline(
        model,
        loss=loss,
        optimizer=OPTIMIZERS["sgd"],
        method="pb",
        example=x,
        stages=pipeback.Splitting(count, balance="time"),
    )
    pipe.push(x, y)
    pipe.drain()
    names = [part.name for part in pipe.split.parts]
    pipe.close()
    return names


def test_all_ranks_cut_alike(crew):
    one, two = crew.ranks(2).run(cut, 3)
    assert one == two and len(one) == 3
