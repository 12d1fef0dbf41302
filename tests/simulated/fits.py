"""A Lightning fit on the simulated accelerator, by an `Accelerator` for it."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.helpers.long_forms import grouped
from tests.lightning.cases import Regression, dropout_network, loader, strategy, trainer


class Simulated(Accelerator):
    """What Lightning's documentation asks of one, for a single device."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [1]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("sim", n) for n in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"


def accelerator(device: str) -> str | Accelerator:
    kind = torch.device(device).type
    return {"cpu": "cpu", "cuda": "gpu"}.get(kind) or Simulated()


class Whole(Regression):
    """Has layers of its own, calls itself, and uses a buffer and a frozen layer beside that."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model)
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("middle", torch.full((), 0.25))
        self.first, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.model(self.first(x - self.middle))

    def outputs(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            known = self.teacher(x - self.middle)
        found: Tensor = self(x) + 0.1 * known
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.outputs(x), y)
        self.losses.append(loss.detach())
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", mse_loss(self.outputs(x), y))


class Several(Whole):
    """Makes several calls, and uses a weight itself."""

    def outputs(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            known = self.teacher(x)
        found: Tensor = self.scale * self.model(self.first(x - self.middle).tanh()) + 0.1 * known
        return found


KINDS = {"one module": Regression, "whole": Whole, "several": Several}


def fit(
    where: list[str], method: str, resumed: str = "", draws: bool = True, precision: str = "32-true",
    module: str = "one module", **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Losses and weights of a fit with a validation. resumed: the device on which a checkpoint in flight goes on."""
    make = KINDS[module]

    def trained(where: list[str], folder: str, steps: int, checkpoint: str | None) -> dict[str, Tensor]:
        torch.manual_seed(3)
        module = make(dropout_network() if draws else None)
        runs = trainer(
            strategy(method, **grouped(options)), folder, max_steps=steps, limit_val_batches=2,
            accelerator=accelerator(where[0]), precision=precision,
        )  # fmt: skip
        runs.fit(module, loader(samples=4), loader(4, seed=2), ckpt_path=checkpoint)
        found = {f"{name} at {steps}": value.detach().cpu() for name, value in module.state_dict().items()}
        found |= {f"loss {n} at {steps}": loss.cpu() for n, loss in enumerate(module.losses)}
        if steps == 8:
            runs.save_checkpoint(f"{folder}/flying.ckpt")
        return found | {name: torch.as_tensor(value).cpu() for name, value in runs.logged_metrics.items()}

    with tempfile.TemporaryDirectory() as folder:
        found = trained(where, folder, 8, None)
        return found | trained([resumed] if resumed else where, folder, 20, f"{folder}/flying.ckpt")
