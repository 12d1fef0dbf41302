"""Law: with a store, too, training goes on as if a micro-batch that fails had not come, where no weights have moved
since: it is the first stage that fails, or a flush is the whole push. An update that fails is never taken back.
"""

import pytest
import torch

import pipeback
from pipeback import methods
from tests.laws.cases import CASES, FEW, STAGES, allowed, data, everything
from tests.pipeline.test_dropped import ARMED, bad, batches, flush, made


def store(name, folder):
    return "host" if name == "host" else f"disk:{folder}"


def pair(tmp_path, kind, *given, **options):
    return [made(*given, store=store(kind, tmp_path / which), **options) for which in ("plain", "hurt")]


def same(hurt, plain):
    assert not hurt.closed and hurt.arrived == plain.arrived
    assert torch.equal(everything(hurt), everything(plain))
    assert hurt.state_dict()["plain"]["loops"] == plain.state_dict()["plain"]["loops"]
    assert list(hurt.ledger) == list(plain.ledger)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize(("case", "kind"), [*((case, "host") for case in FEW), ("pipedream-vertical", "disk")])
def test_the_first_stage_fails(case, kind, tmp_path):
    optimizer = "momentum" if allowed(case, "momentum") else "sgd"
    plain, hurt = pair(tmp_path, kind, CASES[case](STAGES), optimizer, 0)
    for n, (x, y) in enumerate(batches(8)):
        if n in (1, 7):
            with pytest.raises(pipeback.StageError, match=f"micro-batch {n}: the forward failed: bad values; nothing"):
                hurt.push(*bad(0))
        assert torch.equal(hurt.push(x, y), plain.push(x, y))
    same(hurt, plain)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize(
    ("method", "at", "kind"),
    [("gpipe", 0, "host"), ("gpipe", None, "disk"), ("one_f_one_b", 0, "disk"), ("one_f_one_b", None, "host")],
)
def test_a_flush_that_is_a_push(method, at, kind, tmp_path):
    plain, hurt = pair(tmp_path, kind, method, at=at, micro_batch_size=4)
    for n in range(3):
        some = data(4, 4, seed=n)
        with pytest.raises(pipeback.StageError, match="nothing was trained on it, nor on the others of this push, and"):
            flush(hurt, [*some[:2], bad(at), some[3]]) if n else (flush(hurt, some), flush(hurt, [*some[:3], bad(at)]))
        if not n:
            flush(plain, some)
        assert torch.equal(flush(hurt, some), flush(plain, some))
    same(hurt, plain)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_of_several_the_first_fails_at_the_first_stage(tmp_path):
    plain, hurt = pair(tmp_path, "host", "pb", at=0, micro_batch_size=4)
    some = data(4, 4, seed=1)
    flush(plain, some), flush(hurt, some)
    with pytest.raises(pipeback.StageError, match="micro-batch 4: .*nor on the others of this push, and"):
        flush(hurt, [bad(0), *some[1:]])
    assert torch.equal(flush(hurt, some), flush(plain, some))
    same(hurt, plain)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_where_weights_have_moved_the_pipeline_closes(tmp_path):
    for at, n in ((2, 0), (0, 2)):
        (_, hurt), some = pair(tmp_path / f"{at}", "host", "pb", at=at, micro_batch_size=4), data(4, 4)
        for _ in range(4):
            flush(hurt, some)
        if at:
            ARMED.append(at)
        with pytest.raises(pipeback.StageError, match=f"stage {at} .*the forward failed: bad values$"):
            flush(hurt, [*some[:n], bad(0), *some[n:]])
        ARMED.clear()
        with pytest.raises(RuntimeError, match="closed: .*other stages had gone on meanwhile"):
            hurt.push(*some[0])


class FailsLater(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        FailsLater.steps -= 1
        if not FailsLater.steps:
            raise ValueError("no step")
        super().step(closure)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("options", [{}, {"store": "host"}], ids=str)
@pytest.mark.parametrize("method", ["sgd", methods.create("gpipe", micro_batches=1)], ids=str)
def test_an_update_that_fails_is_not_taken_back(method, options):
    """Nothing is in flight, and no stage has counted its update; but weights have moved."""
    FailsLater.steps = 0
    layers = [torch.nn.Linear(6, 6) for _ in range(STAGES)]
    pipe = pipeback.Pipeline(
        layers, loss=torch.nn.functional.mse_loss, optimizer=lambda p: FailsLater(p, lr=0.1), method=method, **options
    )
    x, y = data(1)[0]
    pipe.push(x, y)
    pipe.wait()
    FailsLater.steps = 3
    with pytest.raises(pipeback.StageError, match="the update failed: no step$"):
        pipe.push(x, y)
        pipe.wait()
    with pytest.raises(RuntimeError, match="closed: .*load_state_dict"):
        pipe.push(x, y)
