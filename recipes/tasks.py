"""Tasks: what a model learns, as ordinary LightningModules, which do not depend on pipelines.

`TASKS` maps the name in a conf/task entry to a class. `Task(model, optimizer, **options)`: `optimizer` gets the
parameters and returns what `configure_optimizers` may return. Validation measures are means over all validation
samples, however these are cut into batches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeback.recipes.bleu import score, translate
from pipeback.recipes.data.loading import Batch
from pipeback.recipes.data.translation import IGNORED, Sentences

Optimizers = Callable[[Iterable[nn.Parameter]], Any]


class Task(LightningModule):
    """A base class; a subclass defines `loss` and, for further measures, `measures`.

    metric, mode: the measure by which methods are compared, and whether "max" or "min" is better
    """

    metric = "val/loss"
    mode = "min"

    def __init__(self, model: nn.Sequential, optimizer: Optimizers) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.sums: defaultdict[str, float] = defaultdict(float)

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())

    def training_step(self, batch: Batch, index: int) -> Tensor:
        x, y = batch
        loss = self.loss(self.model(x), y)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(x))
        return loss

    def on_validation_epoch_start(self) -> None:
        self.sums.clear()

    def validation_step(self, batch: Batch, index: int) -> None:
        x, y = batch
        output = self.model(x)
        guessed = y != IGNORED
        count = int(guessed.sum())
        self.sums["count"] += count
        self.sums["loss"] += self.loss(output, y).item() * count
        self.sums["right"] += int((output.argmax(-1) == y)[guessed].sum())

    def on_validation_epoch_end(self) -> None:
        for name, value in self.measures().items():
            self.log(f"val/{name}", value, prog_bar=f"val/{name}" == self.metric)

    def measures(self) -> dict[str, float]:
        """Return what is logged under val/ at the end of a validation."""
        count = max(self.sums["count"], 1)
        return {"loss": self.sums["loss"] / count, "accuracy": self.sums["right"] / count}

    test_step = validation_step
    on_test_epoch_start = on_validation_epoch_start

    def on_test_epoch_end(self) -> None:
        for name, value in self.measures().items():
            self.log(f"test/{name}", value)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.model(batch[0] if isinstance(batch, tuple | list) else batch)


class Classification(Task):
    """Logits (B, classes), targets (B,). Logs val/loss and val/accuracy."""

    metric = "val/accuracy"
    mode = "max"

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target)


class LanguageModel(Task):
    """Logits (B, T, tokens), targets (B, T), -100 if not predicted. Logs val/loss, val/perplexity, val/accuracy."""

    metric = "val/perplexity"

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)

    def measures(self) -> dict[str, float]:
        found = super().measures()
        return {**found, "perplexity": math.exp(min(found["loss"], 700))}  # finite for a diverged run, too


class Translation(LanguageModel):
    """A language model of pairs, source first. Logs val/bleu too: sacrebleu's, of greedy translations.

    sentences: how many of the data module's validation sentences are translated.
    """

    metric = "val/bleu"
    mode = "max"

    def __init__(self, model: nn.Sequential, optimizer: Optimizers, sentences: int = 256) -> None:
        super().__init__(model, optimizer)
        self.sentences = sentences

    def measures(self) -> dict[str, float]:
        found = super().measures()
        if not self.trainer.sanity_checking:
            found["bleu"] = self.bleu()
        return found

    def bleu(self) -> float:
        data: Any = getattr(self.trainer, "datamodule", None)
        if not hasattr(data, "sentences"):
            raise ValueError("the task translation needs data with sentences to translate: data=translation")
        some: Sentences = data.sentences(self.sentences)
        answers = translate(self.model, some.prompts.to(self.device), some.lengths.to(self.device), data.max_length + 1)
        return score([data.text(answer) for answer in answers.tolist()], some.references)


TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "language_model": LanguageModel,
    "translation": Translation,
}
