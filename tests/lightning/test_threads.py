"""PipelineStrategy(workers=N): threads share the stages, and every hook finds what it finds with the event loop."""

import threading
from functools import partial
from itertools import product

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from pipeback import StageError
from pipeback.lightning import PipelineMonitor, PipelineStrategy
from tests.helpers.choice import mostly_rare, rare
from tests.laws.cases import CASES, FEW, STAGES, usual
from tests.lightning.cases import Regression, dropout_network, loader, strategy, trainer, weights
from tests.lightning.test_resume import Drawing, checkpoints, fit, saved, shuffled

SAME = ("delay", "gap", "update_norm", "clip_share")  # the others are times and sizes


class Looks(pl.Callback):
    """Looks at all gradients and weights in the hooks around a step."""

    def __init__(self):
        self.seen = []

    def _look(self, module):
        values = [v for p in module.parameters() for v in (p, p.grad) if v is not None]
        self.seen.append(torch.cat([v.detach().flatten().clone() for v in values]))

    def on_after_backward(self, trainer, module):
        self._look(module)

    def on_before_zero_grad(self, trainer, module, optimizer):
        self._look(module)

    def on_train_batch_end(self, trainer, module, *rest):
        self._look(module)


def trained(method, model=dropout_network, **options):
    """The losses, the weights and what callbacks have seen; and the strategy."""
    torch.manual_seed(0)
    module, looks, where = Regression(model(), usual(method)), Looks(), strategy(method, **options)
    trainer(where, callbacks=[looks]).fit(module, loader(), loader(2))
    return [torch.stack(module.losses), weights(module), *looks.seen], where


@pytest.mark.parametrize(
    ("size", "case"),
    mostly_rare(product([None, 2], CASES), *((2 if n % 2 else None, case) for n, case in enumerate(FEW[1::2]))),
)
def test_every_method_is_the_event_loop(case, size):
    method = partial(CASES[case], STAGES)
    model = partial(dropout_network, 2 * method().chunks)  # a stage at least for every part of each worker
    (wanted, _), (found, where) = (trained(method(), model, micro_batch_size=size, workers=n) for n in (None, 2))
    assert set(where.pipeline.owner) == {0, 1}
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    "options",
    [
        {"store": "host", "micro_batch_size": 2, "plan": True},
        rare({"activations": "recompute"}),
        {"drain": "validation"},
        rare({"compile": {"backend": "eager"}}),
    ],
)
def test_other_options(options):
    (wanted, _), (found, _) = (trained("cerebras", workers=n, **options) for n in (None, 3))
    assert all(map(torch.equal, found[:2], wanted[:2]))


@pytest.mark.parametrize(("first", "second"), [(2, None), (None, 2), (2, 3)])
def test_a_checkpoint_goes_on_with_another_number(first, second, tmp_path):
    whole, saving = Drawing(), checkpoints(tmp_path, every_n_train_steps=5)
    fit(strategy("cerebras", workers=first), whole, shuffled(StatefulDataLoader), callbacks=[saving])
    for file in saved(tmp_path)[:-1:2]:
        resumed = Drawing()
        fit(strategy("cerebras", workers=second), resumed, shuffled(StatefulDataLoader), file, seed=8, callbacks=[])
        assert torch.equal(weights(whole), weights(resumed)), file


def test_the_monitor_sees_the_same_numbers(tmp_path):
    found = []
    for options in ({}, {"workers": 2}, {"workers": 2, "store": "host"}):
        logger, monitor = CSVLogger(tmp_path, version=len(found)), PipelineMonitor(every_n_steps=3)
        run = trainer(
            strategy("cerebras", **options), callbacks=[monitor], logger=logger, max_epochs=1, log_every_n_steps=3
        )
        run.fit(Regression(), loader())
        logger.save()
        rows = (tmp_path / "lightning_logs" / f"version_{len(found)}" / "metrics.csv").read_text().splitlines()
        kept = [n for n, name in enumerate(rows[0].split(",")) if name.split("/")[1:2] and name.split("/")[1] in SAME]
        found.append([[row.split(",")[n] for n in kept] for row in rows])
    assert found[0] == found[1] == found[2] and len(found[0]) > 3 and len(found[0][0]) == 20


def test_a_stage_that_fails_ends_the_fit():
    class Fails(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += self.training and threading.current_thread() is not threading.main_thread()
            assert self.calls < 5
            return super().forward(x)

    torch.manual_seed(0)
    module = Regression(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Fails(6, 6)))
    with pytest.raises(StageError, match="stage 2"):
        trainer(strategy("pb", workers=2)).fit(module, loader())
    assert module.model[2].calls == 5  # in a thread of its own


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"workers must be a number of threads, .* but is 'two'; for example workers=2"):
        PipelineStrategy(workers="two")
    with pytest.raises(TypeError, match="but is 0; for example workers=2"):
        PipelineStrategy(workers=0)
    with pytest.raises(ValueError, match="workers=9 but the model has 3 stages; use at most one worker per stage"):
        trained("pb", workers=9)
    with pytest.raises(ValueError, match=r"workers=2: with several devices .* leave workers out, or use .*devices=1"):
        trainer(strategy("pb", workers=2), devices=2).fit(Regression(), loader())
    trained("pb", workers=2)
