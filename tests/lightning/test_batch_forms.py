"""Law: in whatever structure a data loader gives batches, what is trained is what plain Lightning trains."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from pipeback.lightning import monitor
from tests.helpers.choice import diagonal
from tests.laws.batch_forms import FORMS, Keywords, Whole, numbers, weighed
from tests.lightning import ranks
from tests.lightning.cases import strategy, trainer, weights
from tests.processes.cases import differences

GIVEN = [form for form in FORMS if form != "slots"]  # Lightning itself refuses frozen dataclasses


class Module(pl.LightningModule):
    """Calls its model with a batch in one of three ways."""

    def __init__(self, form, way):
        super().__init__()
        self.form, self.way, self.losses = form, way, []
        self.model = Whole(form) if way == "whole" else Keywords()

    def training_step(self, batch, batch_idx):
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        if self.way == "whole":
            output = self.model(x)
        elif self.way == "items":
            output = self.model(**x)
        else:
            a, b = FORMS[self.form][1](x)
            output = self.model(a, b=b)
        loss = weighed(self.form)(output, y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loaded(form, way, count=4):
    make = FORMS[form][0]
    every = [(make(a, b), make(label, weight)) for a, b, label, weight in numbers(count)]
    if way == "parts":
        every = [{"x": x, "y": y} for x, y in every]
    return DataLoader(every, batch_size=None, collate_fn=as_given)


def as_given(batch):
    return batch


def fitted(form, way, where=None, count=4):
    module = Module(form, way)
    trainer(where, max_epochs=1).fit(module, loaded(form, way, count))
    return module


def result(module):
    return {"losses": torch.stack(module.losses), "weights": weights(module)}


@pytest.mark.parametrize(
    ("form", "way"),
    [
        *((form, way) for form in GIVEN for way in ("whole", "parts")),
        *((form, "items") for form in ("dict", "ordered", "encoding", "user dict", "mapping")),
    ],
)
def test_a_batch_of_any_form_is_plain_lightning(form, way):
    wanted = result(fitted(form, way))
    assert differences(result(fitted(form, way, strategy("gpipe", stages="layer"))), wanted) == []


@pytest.mark.parametrize(("form", "way"), diagonal([form for form in GIVEN if form != "tuple"], ["whole", "parts"]))
def test_a_batch_of_any_form_is_cut(form, way):
    wanted = result(fitted("tuple", "parts", strategy("cerebras", stages="layer", micro_batch_size=3)))
    found = result(fitted(form, way, strategy("cerebras", stages="layer", micro_batch_size=3)))
    assert len(found["losses"]) == 12 and differences(found, wanted) == []


@pytest.mark.parametrize("form", FORMS)
def test_the_monitor_counts_the_samples_of_any_form(form):
    assert monitor._samples(FORMS[form][0](torch.randn(5, 2), torch.tensor(1.0))) == 5


@pytest.mark.parametrize("form", ["encoding", "dataclass"])
def test_a_batch_of_any_form_over_devices(crew, form):
    options = {
        "module": partial(Module, form, "whole"), "data": partial(loaded, form, "whole"), "max_epochs": 1,
        "given": {"stages": "layer", "micro_batch_size": 4},
    }  # fmt: skip
    wanted = ranks.result(devices=1, **options)
    first, _ = crew.ranks(2).run(ranks.result, devices=2, **options)
    assert ranks.differences(first, wanted) == []


@pytest.mark.parametrize("options", [{"stages": "layer"}, {"module": "self"}])
def test_tokens_of_many_texts_are_of_one_form(options):
    """What a tokenizer keeps of every text beside its tensors differs from batch to batch, and counts for nothing."""
    found = fitted("encoding", "whole", strategy("gpipe", **options), 70)
    wanted = fitted("encoding", "whole", count=70)
    assert torch.equal(weights(found), weights(wanted))
