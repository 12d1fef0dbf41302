"""The LightningModule of a fit, and the callback that sees what it does."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler
from torchmetrics import MeanSquaredError

from pipeback.lightning import PipelineStrategy
from pipeback.private import function_modes
from tests.fuzz.cases import OPTIMIZERS
from tests.fuzz.models import Followed, stages
from tests.fuzz.program import Seen

from .fit import Fit


def _warm(update: int) -> float:
    return min(1.0, update / 3)


SCHEDULERS: dict[str, Any] = {
    "step": (partial(lr_scheduler.StepLR, step_size=2, gamma=0.7), "step"),
    "epoch": (partial(lr_scheduler.StepLR, step_size=1, gamma=0.5), "epoch"),
    "warm": (partial(lr_scheduler.LambdaLR, lr_lambda=_warm), "step"),
    "cycle": (partial(lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=100, cycle_momentum=False), "step"),
}
# of training_step, but for those of the callbacks below, and "shuffle" and "monitor", which `train` sees to
QUIRKS = (
    "noise", "early log", "look", "late noise", "scaled", "slope", "size", "metric", "dict", "groups", "between",
    "forward", "rate", "weight decay", "dropout", "shuffle", "monitor", "ask", "modes",
)  # fmt: skip


def _settings() -> tuple[Any, ...]:
    """How torch computes in this thread."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), function_modes()


class Module(pl.LightningModule):
    """Knows nothing of pipelines.

    Quirks: `noise` on the input, `late noise` in the loss, `between` two modules; `early log` before the model is
    called; `look` at an output without gradients; a loss that is `scaled` by the epoch, or has its own `slope`;
    `size` of a batch as it is logged; a `metric`; a `dict` is returned; parameter `groups`; its `forward` is called
    by name, or the model is called in `modes` of torch that are not those around the step.
    """

    def __init__(self, fit: Fit, dtype: torch.dtype) -> None:
        super().__init__()
        self.of = fit
        made = stages(fit.model, fit.stages, fit.seed, dtype)
        if fit.kind == "model":
            self.model: nn.Module = nn.Sequential(*made)
        elif fit.kind == "body":
            self.model = Followed(list(made))
        elif fit.kind == "own":
            self.blocks = nn.ModuleList(made)
        elif fit.kind == "pair":
            cut = len(made) // 2
            self.first, self.second = nn.Sequential(*made[:cut]), nn.Sequential(*made[cut:])
        else:
            for n, layer in enumerate(made):
                setattr(self, f"layer{n}", layer)
        self.losses: list[Tensor] = []
        self.error = MeanSquaredError()

    def parts(self) -> list[Any]:
        """What is called, one after the other."""
        kind = self.of.kind
        if kind in ("model", "body"):
            return [self.model]
        if kind == "pair":
            return [self.first, self.second]
        return list(self.blocks) if kind == "own" else [getattr(self, f"layer{n}") for n in range(self.of.stages)]

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts():
            x = part(x)
        return x

    def output(self, x: Tensor) -> Tensor:
        """The model's output, as training_step gets it."""
        kind, quirks = self.of.kind, self.of.quirks
        if kind == "own":
            return self(x)  # type: ignore[no-any-return]
        if "forward" in quirks and kind in ("pair", "many"):
            return self.forward(x)
        for n, part in enumerate(self.parts()):
            if n == 1 and "between" in quirks and kind == "pair" and x.is_floating_point():
                x = x * (1.0 + 0.1 * torch.rand_like(x))
            x = part(x)
        return x

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        quirks, x, y, before = self.of.quirks, batch["x"], batch["y"], _settings()
        if batch_idx in self.of.skips:
            return None
        if "noise" in quirks and x.is_floating_point():
            x = x + 0.01 * torch.randn_like(x)
        if "early log" in quirks:
            self.log("early", float(batch_idx))
        if "look" in quirks:
            with torch.no_grad():
                self.log("looked", self.output(x).sum())
        if "modes" in quirks:
            with torch.device("cpu"), torch.autocast("cpu", enabled=False):
                output = self.output(x)
            assert _settings() == before
        else:
            output = self.output(x)
        loss = mse_loss(output, y)
        if "late noise" in quirks:
            loss = loss + 0.01 * (output * torch.randn_like(output)).mean()
        if "scaled" in quirks:
            loss = loss * (1 + 0.1 * self.current_epoch)
        if "slope" in quirks:
            (slope,) = torch.autograd.grad(loss, output, create_graph=True)
            loss = loss + slope.square().sum()
        self.losses.append(loss.detach())
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(y) if "size" in quirks else None)
        if "metric" in quirks:
            self.error(output.detach().float(), y.float())
            self.log("train/error", self.error, on_step=True, on_epoch=True)
        return {"loss": loss, "output": output.detach()} if "dict" in quirks else loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", mse_loss(self(batch["x"]), batch["y"]))

    def configure_optimizers(self) -> Any:
        kind, _, options = OPTIMIZERS[self.of.optimizer]
        options = {**options, "weight_decay": self.of.decay}
        groups: list[Any] = list(self.parameters())
        if "groups" in self.of.quirks and len(groups) > 1:
            half = len(groups) // 2
            groups = [{"params": groups[:half], "lr": options["lr"] * 0.5}, {"params": groups[half:]}]
        optimizer = kind(groups, **options)
        if self.of.scheduler is None:
            return optimizer
        made, interval = SCHEDULERS[self.of.scheduler]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made(optimizer), "interval": interval}}


class Watch(pl.Callback):
    """What a fit shows, in its order. Quirks: the `rate` or `weight decay` is set in batch 1, and the rate of `dropout`
    in every batch, since what a module is set to is not in a checkpoint.
    """

    def __init__(self, fit: Fit, weights: bool) -> None:
        """weights: those after every batch, too, which one device has without bringing them from elsewhere."""
        self.of, self.weights = fit, weights
        self.seen: Seen = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        for layer in module.modules() if "dropout" in self.of.quirks else ():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.3 if batch_idx % 2 else 0.1
        if batch_idx != 1:
            return
        for group in trainer.optimizers[0].param_groups:
            if "rate" in self.of.quirks:
                group["lr"] *= 0.5
            if "weight decay" in self.of.quirks:
                group["weight_decay"] = 0.03

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        at = f"epoch {trainer.current_epoch}, batch {batch_idx}"
        if self.weights:
            self.seen += [(f"{at}: weight {name}", value) for name, value in _state(module)]
        if trainer.is_global_zero:  # the other devices are told at the end of an epoch
            self.metrics(f"{at}:", trainer)
        self.seen.append((f"{at}: updates", torch.tensor(float(trainer.global_step))))
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.seen.append((f"{at}: rates", torch.tensor(rates)))

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.metrics("validation:", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.metrics(f"epoch {trainer.current_epoch}:", trainer)

    def metrics(self, at: str, trainer: pl.Trainer) -> None:
        self.seen += [(f"{at} metric {name}", v.clone()) for name, v in sorted(trainer.callback_metrics.items())]

    def end(self, trainer: pl.Trainer, module: Module) -> None:
        self.seen += [(f"end: weight {name}", value) for name, value in _state(module)]
        self.seen += [(f"end: loss {n}", value) for n, value in enumerate(module.losses)]
        self.seen.append(("end: updates", torch.tensor(float(trainer.global_step))))


class Asks(pl.Callback):
    """Asks the pipeline, and so waits for its stages, before and after every batch."""

    def on_train_batch_start(self, trainer: pl.Trainer, *given: Any) -> None:
        assert isinstance(trainer.strategy, PipelineStrategy)
        if trainer.strategy.built:
            trainer.strategy.pipeline.wait()

    def on_train_batch_end(self, trainer: pl.Trainer, *given: Any) -> None:
        assert isinstance(trainer.strategy, PipelineStrategy)
        trainer.strategy.pipeline.memory()
        trainer.strategy.pipeline.traffic()


def _state(module: nn.Module) -> Seen:
    """Weights and statistics, without those of metrics."""
    return [(name, v.detach().clone()) for name, v in module.state_dict().items() if not name.startswith("error")]
