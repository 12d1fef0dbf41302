"""A Lightning fit on the simulated accelerator, by an `Accelerator` for it."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor

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


def fit(
    where: list[str], method: str, resumed: str = "", draws: bool = True, precision: str = "32-true", **options: Any
) -> dict[str, Tensor]:
    """Losses and weights of a fit with a validation. resumed: the device on which a checkpoint in flight goes on."""

    def trained(where: list[str], folder: str, steps: int, checkpoint: str | None) -> dict[str, Tensor]:
        torch.manual_seed(3)
        module = Regression(dropout_network() if draws else None)
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
