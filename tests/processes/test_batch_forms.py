"""Law: batches of any form, over real processes, train what plain tensors train in the event loop, bit for bit."""

import pytest
import torch

from tests.laws.batch_forms import FORMS, Keywords, Whole, numbers
from tests.laws.test_batch_forms import FLUSH, build
from tests.processes.cases import differences, flat


def train(form, **options):
    make, every = FORMS[form][0], numbers(7)
    model = Keywords() if form == "tuple" else Whole(form)
    pipe = build(model, form, example=make(*every[0][:2]), **{"method": "pb", **options})
    losses = [pipe.push(make(a, b), make(label, weight)) for a, b, label, weight in every]
    state = pipe.state_dict()
    output = pipe.evaluate(make(*every[0][:2]))
    pipe.load_state_dict(state)
    assert pipe.pushes == 7
    losses += [pipe.push(make(a, b), make(label, weight)) for a, b, label, weight in numbers(2)]
    pipe.drain()
    last = flat(pipe.state_dict())
    weights = {name: value.clone() for name, value in pipe.model.state_dict().items()}
    losses = torch.stack([loss.clone() for loss in losses])
    pipe.close()
    return {"losses": losses, "output": output, "model": weights, "drained": last}


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 3}, {"method": FLUSH}])
@pytest.mark.parametrize("form", ["encoding", "nested", "dataclass"])
def test_ranks_take_batches_of_any_form(crew, form, options):
    wanted = train("tuple", **options)
    for found in crew.ranks(2).run(train, form, **options):
        assert differences(found, wanted) == []


def other():
    """A rank that is given another target than the rest hears of it."""
    import torch.distributed as dist

    make, every = FORMS["encoding"][0], numbers(1)
    a, b, label, weight = every[0]
    pipe = build(Whole("encoding"), "encoding", example=make(a, b), method="pb")
    pipe.push(make(a, b), make(label, weight))
    try:
        pipe.push(make(a, b), make(label, weight + dist.get_rank()))
        pipe.drain()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_that_are_given_other_targets_hear_of_it(crew):
    told = crew.ranks(2).run(other)
    assert all("micro-batch 1 is not the one that worker 0 was given; every rank must push" in text for text in told)
