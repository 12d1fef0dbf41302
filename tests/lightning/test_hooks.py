"""Hooks on the modules that training_step calls are run once, as in a plain fit, whatever the stages are."""

from itertools import product

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from pipeback.lightning import PipelineStrategy
from tests.helpers.choice import mostly_rare
from tests.splitting.test_hooks import FORWARD, GRADIENTS, Blocks, sequence


class Single(LightningModule):
    def __init__(self, body):
        super().__init__()
        self.model, self.losses = body, []

    def through(self, x):
        return self.model(x)

    def training_step(self, batch, number):
        loss = mse_loss(self.through(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Several(Single):
    def __init__(self, body):
        super().__init__(body)
        self.head = nn.Linear(4, 4)

    def through(self, x):
        return self.head(self.model(x))


def losses(made, body, change, strategy):
    torch.manual_seed(0)
    body = body()
    change(body)
    torch.manual_seed(1)
    module = made(body)
    x, y = torch.randn(2, 24, 4, generator=torch.Generator().manual_seed(2))
    Trainer(
        max_epochs=1, accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, DataLoader(TensorDataset(x, y), batch_size=4))  # fmt: skip
    return torch.stack(module.losses[-6:])


CHANGES = {**{f"forward {k}": v for k, v in FORWARD.items()}, **{f"gradient {k}": v for k, v in GRADIENTS.items()}}
PLACES = {
    "model": lambda body: body,
    "block": lambda body: body[1] if isinstance(body, nn.Sequential) else body.blocks[1],
}
MODELS = {"a sequence": (Single, sequence), "blocks": (Single, Blocks), "several": (Several, Blocks)}


@pytest.mark.filterwarnings("ignore:.*has hooks on its gradients")
@pytest.mark.parametrize(
    ("model", "change", "place"),
    mostly_rare(
        product(MODELS, CHANGES, PLACES),
        *((name, change, [*PLACES][(n + m) % 2]) for n, name in enumerate(MODELS) for m, change in enumerate(CHANGES)),
    ),
)
def test_they_run_once(model, change, place):
    made, body = MODELS[model]
    dressed = lambda body: CHANGES[change](PLACES[place](body))  # noqa: E731
    options = {} if body is sequence else {"stages": "layer"}
    found = losses(made, body, dressed, PipelineStrategy(method="sgd", **options))
    assert torch.equal(found, losses(made, body, dressed, "auto"))


class Watched(Single):
    """What it computes without a graph goes into its loss, as a teacher's output does."""

    def __init__(self, body):
        super().__init__(body)
        self.second = nn.Linear(4, 4) if type(self) is WatchedSeveral else nn.Identity()

    def through(self, x):
        with torch.no_grad():
            before = self.model(x)
        found = self.second(self.model(x))
        with torch.no_grad():
            after = self.model(x + 1)
        return found - 0.1 * before - 0.2 * after


class WatchedSeveral(Watched):
    pass


@pytest.mark.parametrize("made", [Watched, WatchedSeveral])
@pytest.mark.parametrize("change", FORWARD)
def test_they_run_where_a_module_is_called_without_a_graph(made, change):
    found = losses(made, Blocks, FORWARD[change], PipelineStrategy(method="sgd", stages="layer", module="self"))
    assert torch.equal(found, losses(made, Blocks, FORWARD[change], "auto"))
