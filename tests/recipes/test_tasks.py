"""The tasks of the recipes: ordinary LightningModules. What they log, how they translate, and that they learn."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

pytest.importorskip("lightning")
pytest.importorskip("sklearn")
pytest.importorskip("torchvision")
pytest.importorskip("sacrebleu")

from lightning.pytorch import Trainer

from pipeback.recipes.bleu import score, translate
from pipeback.recipes.data import DATA
from pipeback.recipes.data.translation import END, IGNORED, SEPARATOR, UNKNOWN
from pipeback.recipes.models import MODELS
from pipeback.recipes.tasks import TASKS

CASES = {  # task -> data, model, what is logged at validation
    "classification": (
        "fashion_mnist", {"builtin": True, "flat": True},
        "residual_mlp", {"width": 16, "depth": 2}, {"loss", "accuracy"},
    ),
    "language_model": (
        "shakespeare", {"builtin": True, "context": 24, "samples": 384, "val_samples": 50},
        "transformer", {"width": 16, "depth": 1, "heads": 2}, {"loss", "accuracy", "perplexity"},
    ),
    "translation": (
        "translation", {"builtin": True, "held_out": 0.1},
        "transformer", {"width": 16, "depth": 1, "heads": 2}, {"loss", "accuracy", "perplexity", "bleu"},
    ),
}  # fmt: skip


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def trainer(folder, **options):
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **options,
    )  # fmt: skip


def build(name, **options):
    data_name, data_options, model_name, model_options, _ = CASES[name]
    data = DATA[data_name](**data_options, batch_size=16, seed=0)
    data.setup()
    torch.manual_seed(0)
    return TASKS[name](MODELS[model_name](**model_options, **data.facts), adam, **options), data


@pytest.mark.parametrize("name", TASKS)
def test_one_epoch(name, tmp_path):
    """With plain Lightning: everything is logged, and the loss falls."""
    task, data = build(name)
    loop = trainer(tmp_path, max_epochs=1)
    before = loop.validate(task, data, verbose=False)[0]
    loop.fit(task, data)
    after = loop.callback_metrics
    assert set(after) == {"train/loss", *(f"val/{measure}" for measure in CASES[name][4])}
    assert task.metric in after and task.mode in ("min", "max")
    assert after["val/loss"] < 0.9 * before["val/loss"]


@pytest.mark.parametrize("name", TASKS)
def test_measures_do_not_depend_on_the_batches(name, tmp_path):
    task, data = build(name)
    found = []
    for size in (7, 1000):
        data.validation_batch = size
        found.append(trainer(tmp_path).validate(task, data, verbose=False)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    x, y = data.validation.__getitems__(range(len(data.validation)))
    with torch.no_grad():
        output = task.model(x)
    right = output.argmax(-1)[y != IGNORED] == y[y != IGNORED]
    assert found[0]["val/accuracy"] == pytest.approx(right.float().mean().item(), rel=1e-4)
    assert found[0]["val/loss"] == pytest.approx(task.loss(output, y).item(), rel=1e-4)
    if "val/perplexity" in found[0]:
        assert found[0]["val/perplexity"] == pytest.approx(math.exp(found[0]["val/loss"]), rel=1e-4)


def test_only_the_target_counts():
    output, target = torch.randn(3, 4, 7), torch.randint(7, (3, 4))
    target[:, :2] = IGNORED
    expected = cross_entropy(output[:, 2:].reshape(-1, 7), target[:, 2:].reshape(-1))
    torch.testing.assert_close(TASKS["translation"].loss(output, target), expected)


def test_configure_optimizers_hands_over_what_it_is_given():
    def scheduled(parameters):
        optimizer = adam(parameters)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    task = TASKS["classification"](nn.Sequential(nn.Linear(2, 2)), scheduled)
    found = task.configure_optimizers()
    assert set(found) == {"optimizer", "lr_scheduler"}
    assert [p.shape for p in found["optimizer"].param_groups[0]["params"]] == [(2, 2), (2,)]


# -- translation -----------------------------------------------------------------------------------------------------


class Oracle(nn.Module):
    """Knows the next token of every prefix in `known` (N, T); elsewhere it hopes for unknown words."""

    def __init__(self, known, tokens):
        super().__init__()
        self.known, self.tokens, self.calls = known, tokens, 0

    def forward(self, x):
        self.calls += 1
        logits = torch.zeros(*x.shape, self.tokens)
        logits[..., UNKNOWN] = 1  # never chosen
        for row, known in enumerate(self.known):
            for at in range(min(x.shape[1], len(known) - 1)):
                if torch.equal(x[row, : at + 1], known[: at + 1]):
                    logits[row, at, known[at + 1]] = 2
        return logits


def test_a_perfect_translation_has_bleu_100():
    _, data = build("translation")
    some = data.sentences(40)
    known = torch.cat([data.validation.x[:40], torch.zeros(40, 1, dtype=torch.long)], 1)
    rows = [row[: row.tolist().index(END) + 1] for row in known]
    oracle = Oracle(rows, data.facts["vocabulary"])
    answers = translate(oracle, some.prompts, some.lengths, data.max_length + 1)
    translations = [data.text(answer) for answer in answers.tolist()]
    assert translations[0] == some.references[0].lower().replace(".", " .")
    assert score(translations, some.references) == pytest.approx(100)
    assert score(translations[1:] + translations[:1], some.references) < 60
    lengths = [len(row) - int(n) for row, n in zip(rows, some.lengths, strict=True)]
    assert oracle.calls == max(lengths)  # it ends when all have ended


def test_translating_a_batch_is_translating_each():
    """Prompts of several lengths: padding is not seen."""
    task, data = build("translation")
    some = data.sentences(12)
    assert len(set(some.lengths.tolist())) > 1
    together = translate(task.model, some.prompts, some.lengths, 9)
    for row, length in enumerate(some.lengths.tolist()):
        alone = translate(task.model, some.prompts[row : row + 1, :length], some.lengths[row : row + 1], 9)
        assert torch.equal(together[row], alone[0])


def test_sentences_are_those_held_out():
    _, data = build("translation")
    some = data.sentences(5)
    assert some.references == [pair.target for pair in data.pairs_held_out[:5]]
    for row, (prompt, length) in enumerate(zip(some.prompts, some.lengths, strict=True)):
        assert prompt[length - 1] == SEPARATOR
        assert torch.equal(prompt[:length], data.validation.x[row, :length])


def test_translation_needs_sentences(tmp_path):
    task, _ = build("translation")
    batch = torch.tensor([[5, 1, 4]]), torch.tensor([[IGNORED, 4, 2]])
    with pytest.raises(ValueError, match="data=translation"):
        trainer(tmp_path).validate(task, torch.utils.data.DataLoader([batch], batch_size=None), verbose=False)
