"""SaveWeights writes the trained weights to safetensors files per stage, for models larger than memory."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from pipeback import weights
from pipeback.lightning.strategy import PipelineStrategy


class SaveWeights(Callback):
    """Finish what is in flight at the end of fit, and write the weights into `folder`, as `pipeback.weights.save` does.

    `PipelineStrategy(store=pipeback.Streaming(..., init=folder))` starts from them. A checkpoint of Lightning holds
    more, but collects all of it in memory.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, PipelineStrategy):
            raise ValueError(
                f"SaveWeights writes the stages of a PipelineStrategy, but the strategy is "
                f"{type(trainer.strategy).__name__}; use ModelCheckpoint"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, PipelineStrategy)
        if trainer.strategy.built:
            trainer.strategy.pipeline.drain()
            weights.save(trainer.strategy.pipeline, self.folder)
