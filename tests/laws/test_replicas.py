"""Law: replicas. Averaging gradients at each update is what one pipeline does on the micro-batches together."""

from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from tests.helpers.choice import mostly_rare, rare
from tests.laws.cases import CASES, FEW, STAGES, STEADY, data, everything, network, pipeline
from tests.processes.cases import differences, settled

SEPARATE = [
    case for case in CASES if case not in ("gpipe", "looped_bfs")
]  # whose flush a push would hold other micro-batches


def trained(case, batches, optimizer=None, dtype=torch.float64, **options):
    pipe = pipeline(network(dtype=dtype), CASES[case](STAGES), optimizer, **options)
    losses = [pipe.push(x, y).clone() for x, y in batches]
    pipe.wait()
    found = torch.cat([p.detach().flatten() for p in pipe.model.parameters()]), torch.stack(losses)
    pipe.close()
    return found


@pytest.mark.parametrize(
    ("case", "replicas"),
    mostly_rare(product(STEADY, (2, 3)), *((case, (2, 3)[n % 2]) for n, case in enumerate(FEW) if case in STEADY)),
)
def test_replicas_equal_one_pipeline_on_the_whole_micro_batch(case, replicas):
    """mean over replicas of mean over samples = mean over all samples, where the shares are equal; 1e-12."""
    batches = data(17, samples=6, dtype=torch.float64)
    for found, wanted in zip(trained(case, batches, replicas=replicas), trained(case, batches), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["pb", "pipedream", "cerebras", "gpipe"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_shares_of_unequal_length_equal_one_pipeline_where_samples_weigh_alike(case, replicas):
    """Σ over replicas of n_r · mean over its samples, by Σ n_r, is the mean over all samples; 1e-12."""
    lengths = [6, 5, 6, 3, 4, 7]
    batches = [data(1, samples=n, seed=n, dtype=torch.float64)[0] for n in lengths]
    weighted = pipeback.MicroBatches(weights="samples")
    found = trained(case, batches, replicas=replicas, micro_batch_size=weighted)
    for mine, wanted in zip(found, trained(case, batches), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", range(4, 14))
def test_a_short_batch_is_cut_into_as_many_micro_batches_for_each_replica(size, length):
    """With a flush at each push, micro-batches may be any; the mean over all samples is that of one; 1e-12."""
    batches = [data(1, samples=length, seed=n, dtype=torch.float64)[0] for n in range(2)]
    weighted = pipeback.MicroBatches(size, weights="samples")
    for mine, wanted in zip(
        trained("gpipe", batches, replicas=2, micro_batch_size=weighted), trained("gpipe", batches), strict=True
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def test_the_last_batch_of_a_loader_may_be_short():
    x, y = data(1, samples=11)[0]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4, drop_last=False)
    pipe = pipeline(network(), "pb", replicas=2, micro_batch_size=2)
    losses = [float(pipe.push(*batch)) for _ in range(2) for batch in loader]
    assert len(losses) == 6 and pipe.arrived == 6
    pipe.close()


@pytest.mark.parametrize("case", [rare("pb"), "gpipe-4", rare("pipedream"), "cerebras"])
def test_workers_and_stores_do_not_matter(case):
    batches = data(13, samples=6)

    def run(**options):
        torch.manual_seed(7)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()) for _ in range(STAGES)])
        pipe = pipeline(model, CASES[case](STAGES), replicas=3, **options)
        losses = torch.stack([pipe.push(x, y).clone() for x, y in batches])
        found = losses, everything(pipe)
        pipe.close()
        return found

    expected = run()
    for options in ({"workers": 2}, {"store": "host"}, {"store": "host", "workers": 2}):
        for found, wanted in zip(run(**options), expected, strict=True):
            assert torch.equal(found, wanted), options


def test_replicas_draw_their_own_masks():
    torch.manual_seed(0)
    masks = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)))
    pipe = pipeline(model, "sgd", replicas=2)
    for stages in pipe._engine.holding.everywhere:
        stages[1].module[0].register_forward_hook(lambda m, a, y: masks.append((y == 0).clone()))
    x = torch.randn(32, 4).repeat(2, 1)
    pipe.push(x, x)
    masks.clear()
    pipe.push(x, x)
    pipe.wait()
    assert not torch.equal(masks[0], masks[1])


def test_a_replica_that_has_no_gradient_for_a_weight():
    """An unused weight stays where it is; one that a single replica uses moves."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.ones(3)) for _ in range(3))

        def forward(self, x):
            return x * self.a * (self.b if x.sum() > 0 else 1.0)

    model = nn.Sequential(Sometimes(), nn.Linear(3, 3))
    pipe = pipeline(model, "sgd", "sgd", replicas=2)
    x = torch.cat([torch.ones(2, 3), -torch.ones(2, 3)])
    pipe.push(x, torch.zeros(4, 3))
    trained = pipe.model[0]
    assert not torch.equal(trained.b, torch.ones(3))
    assert torch.equal(trained.c, torch.ones(3))


def test_other_stages_work_while_a_sum_is_on_its_way():
    """The update of a stage is done when its next operation comes, not before forwards of the stages above it."""
    order = []
    pipe = pipeline(network(), "pb", replicas=2)
    batches = data(20, samples=4)
    for x, y in batches[:15]:
        pipe.push(x, y)
    pipe.wait()
    loop = pipe._engine.runtime.loops[0]
    forward, update = loop.worker.forward, loop.worker.update
    loop.worker.forward = lambda ops: (order.extend(("F", s, i) for s, i in ops), forward(ops))
    loop.worker.update = lambda ops, **more: (order.extend(("U", s, i) for s, i in ops), update(ops, **more))
    for x, y in batches[15:]:
        pipe.push(x, y)
    pipe.wait()
    last = STAGES - 1
    begin = order.index(("F", 0, 17))
    assert order.index(("U", last, 16)) > begin, "the last stage's sum had to arrive before anything went on"


def test_what_cannot_be_shared():
    pipe = pipeline(network(), "pb", replicas=2)
    with pytest.raises(ValueError, match=r"the 1 sample pushed cannot be shared by 2 replicas; push a multiple"):
        pipe.push(*data(1, samples=1)[0])
    with pytest.raises(ValueError, match=r"replicas must be a whole number of at least 1"):
        pipeline(network(), "pb", replicas=0)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("case", ["pb", "pipedream", "cerebras", "gpipe-4", "pipemare"])
def test_resume_in_flight(case):
    batches = data(16, samples=6)

    def begin():
        torch.manual_seed(7)
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)) for _ in range(STAGES)]
        )
        return pipeline(model, CASES[case](STAGES), replicas=2)

    pipe = begin()
    for x, y in batches[:9]:
        pipe.push(x, y)
    state = pipe.state_dict()
    for x, y in batches[9:]:
        pipe.push(x, y)
    again = begin()
    again.load_state_dict(state)
    for x, y in batches[9:]:
        again.push(x, y)
    assert differences({"state": settled(again.state_dict())}, {"state": settled(pipe.state_dict())}) == []
    with pytest.raises(ValueError, match=r"the state was trained with replicas=2, the pipeline has 1"):
        pipeline(begin()._engine.model, CASES[case](STAGES)).load_state_dict(state)
