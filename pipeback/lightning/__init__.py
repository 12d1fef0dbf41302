"""The Lightning strategy: `Trainer(strategy="pipeback")`, or `PipelineStrategy` with options of your own.

Floor 9. It may import every room, and no room imports it.
"""

try:
    import greenlet  # noqa: F401
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
