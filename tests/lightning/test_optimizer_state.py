"""What hooks do to the state of the optimizer within fit reaches the optimizers of the stages, as in a plain fit."""

import copy
from collections import defaultdict
from functools import partial

import lightning.pytorch as pl
import pytest
import torch

from tests.laws.cases import network
from tests.lightning import ranks
from tests.lightning.cases import Regression, loader, strategy, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore")


class Changes(pl.Callback):
    """Changes the state of the optimizer in one way, twice."""

    def __init__(self, how):
        self.how, self.entries = how, []

    def on_train_epoch_start(self, trainer, module):
        (optimizer,) = trainer.optimizers
        if trainer.current_epoch:
            self.how(optimizer, self.kept)
        self.kept = copy.deepcopy(optimizer.state_dict())

    def on_train_batch_end(self, trainer, module, *rest):
        (optimizer,) = trainer.optimizers
        self.entries.append([sorted(optimizer.state[p]) for p in module.parameters()])


def clear(optimizer, kept):
    optimizer.state.clear()


def anew(optimizer, kept):
    optimizer.state = defaultdict(dict)


def load(optimizer, kept):
    optimizer.load_state_dict(kept)


def pop(optimizer, kept):
    for state in optimizer.state.values():
        state.pop("momentum_buffer", None)


def clear_each(optimizer, kept):
    for state in optimizer.state.values():
        state.clear()


def put(optimizer, kept):
    for group in optimizer.param_groups:
        optimizer.state.update({p: {} for p in group["params"]})


def found(how, where, optimizer="momentum"):
    torch.manual_seed(0)
    module, changes = Regression(network().double(), optimizer), Changes(how)
    trainer(where, callbacks=[changes], max_epochs=4, precision="64-true").fit(module, loader(4))
    return weights(module), changes.entries


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("how", [clear, anew, load, pop, clear_each, put])
def test_one_device(how, optimizer):
    wanted, entries = found(how, "auto", optimizer)
    values, seen = found(how, strategy("gpipe"), optimizer)
    assert torch.equal(values, wanted) and seen == entries
    assert torch.equal(found(how, strategy("gpipe", workers=2), optimizer)[0], wanted)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("how", [clear, load, pop, clear_each, put])
def test_in_a_store(how, optimizer, small, tmp_path):
    wanted = found(how, "auto", optimizer)[0]
    for store in ("host", f"disk:{tmp_path}"):
        assert torch.equal(found(how, strategy("gpipe", store=store), optimizer)[0], wanted)


@pytest.mark.parametrize("how", [clear, anew, put])
def test_over_devices(how, crew):
    options = dict(method="pb", max_epochs=3, data=partial(loader, 4))
    wanted = ranks.result(devices=1, callbacks=[Changes(how)], **options)
    for rank in crew.ranks(2).run(ranks.result, devices=2, callbacks=[Changes(how)], **options):
        assert ranks.differences(rank, wanted) == []
