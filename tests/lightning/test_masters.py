"""Float32 masters under precision="bf16-true": equal to push, resumed with the same bits, held by checkpoints."""

from itertools import product

import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import S, model
from tests.laws.cases import CASES, OPTIMIZERS, STAGES, network, pipeline
from tests.lightning.cases import Regression, loader, strategy, trainer, weights
from tests.lightning.test_resume import BATCHES, checkpoints, fit, saved


def bf16(where, module, data, *rest, **options):
    return fit(where, module, data, *rest, precision="bf16-true", validated=0, **options)


@pytest.mark.parametrize("case", ["sgd", "pb", "cerebras", "pipedream", "gpipe-4", "pipemare"])
def test_fit_is_push(case):
    module = Regression()
    trainer(strategy(CASES[case](STAGES), masters=True), precision="bf16-true").fit(module, loader())
    pipe = pipeback.Pipeline(
        network(dtype=torch.bfloat16), loss=mse_loss, optimizer=OPTIMIZERS["momentum"], method=CASES[case](STAGES),
        masters=True,
    )  # fmt: skip
    losses = [pipe.push(x.bfloat16(), y.bfloat16()) for _ in range(2) for x, y in loader()]
    pipe.drain()
    assert torch.equal(torch.stack(module.losses), torch.stack(losses))
    assert torch.equal(weights(module.model), weights(pipe.model))


@pytest.mark.parametrize("case", ["pb", rare("cerebras"), rare("pipedream")])
def test_a_fit_of_stages_as_one_is_push(case):
    module, some = Regression(model()), loader()
    where = strategy(CASES[case](S), micro_batch_size=1, masters=True, vectorize=True)
    trainer(where, precision="bf16-true").fit(module, some)
    assert "as one" in " ".join(where.vectorized.values())
    pipe = pipeline(model(torch.bfloat16), CASES[case](S), masters=True, vectorize=True)
    losses = [
        pipe.push(x, y) for _ in range(2) for batch in some for x, y in zip(*(t.bfloat16().split(1) for t in batch))
    ]
    pipe.drain()
    assert torch.equal(torch.stack(module.losses), torch.stack(losses))
    assert torch.equal(weights(module.model), weights(pipe.model))


ADAM = ["sgd", "pb", "pipedream", "pipedream_2bw", "gpipe-4", "pipemare"]


@pytest.mark.parametrize(("case", "optimizer"), mostly_rare(
    [*product([*ADAM, "cerebras"], ["momentum"]), *product(ADAM, ["adam"])],
    *((case, "momentum") for case in ADAM[1::2]), ("cerebras", "momentum"), ("pb", "adam"), ("gpipe-4", "adam"),
))  # fmt: skip
def test_resume_has_the_same_bits(case, optimizer, tmp_path):
    where = lambda: strategy(CASES[case](STAGES), masters=True)  # noqa: E731
    whole = Regression(optimizer=optimizer)
    bf16(where(), whole, loader(BATCHES), callbacks=[checkpoints(tmp_path)])
    for file in saved(tmp_path)[:2]:
        resumed = Regression(network(seed=99), optimizer)
        bf16(where(), resumed, loader(BATCHES), file, seed=8, callbacks=[])
        assert torch.equal(weights(whole), weights(resumed))
        assert torch.equal(torch.stack(whole.losses[-len(resumed.losses) :]), torch.stack(resumed.losses))


def test_what_a_checkpoint_holds_and_plain_lightning_opens(tmp_path):
    bf16(strategy("pb", masters=True), Regression(), loader(BATCHES), callbacks=[checkpoints(tmp_path)])
    file = saved(tmp_path)[0]
    found = torch.load(file, weights_only=True)
    assert all(value.dtype == torch.bfloat16 for value in found["state_dict"].values())
    velocities = [state["momentum_buffer"] for state in found["optimizer_states"][0]["state"].values()]
    assert velocities and all(v.dtype == torch.float32 for v in velocities)
    own = found["pipeback"]["state"]["stages"][0]["weight/0.weight"]
    assert own.dtype == torch.float32 and torch.equal(own.bfloat16(), found["state_dict"]["model.0.0.weight"])
    bf16("auto", Regression(network(seed=99)), loader(BATCHES), file, callbacks=[])


def test_a_checkpoint_of_plain_lightning_goes_on(tmp_path):
    bf16("auto", Regression(), loader(BATCHES), callbacks=[checkpoints(tmp_path)])
    file, module = saved(tmp_path)[0], Regression(network(seed=99))
    where = strategy("pb", masters=True)
    with pytest.warns(UserWarning, match="was not made by the pipeback strategy"):
        bf16(where, module, loader(BATCHES), file, callbacks=[])
    states = where.pipeline.optimizers[0].state
    assert states and all(state["momentum_buffer"].dtype == torch.float32 for state in states.values())


def test_it_is_refused_with_a_store():
    with pytest.raises(ValueError, match="masters=True does not go with store=HostStore"):
        strategy("gpipe", masters=True, store="host")
