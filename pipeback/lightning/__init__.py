"""Pipelined backpropagation under Lightning. Floor 9: it may import every room, and no room imports it.

    import pipeback.lightning
    trainer = lightning.pytorch.Trainer(strategy="pipeback")

or `Trainer(strategy=pipeback.lightning.PipelineStrategy(method="cerebras", micro_batch_size=1))`.
"""

try:
    import lightning.pytorch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"pipeback.lightning needs {error.name}: pip install 'pipeback[lightning]'", name=error.name
    ) from error

from pipeback.lightning.monitor import PipelineMonitor
from pipeback.lightning.registry import register
from pipeback.lightning.save_weights import SaveWeights
from pipeback.lightning.strategy import PipelineStrategy

__all__ = ["PipelineMonitor", "PipelineStrategy", "SaveWeights"]

register(PipelineStrategy)
