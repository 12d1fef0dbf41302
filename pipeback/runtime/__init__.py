"""The runtime decides which worker runs which operation, and when: workers, loops, links, event loop and threads.

The operations are F (the forward of a micro-batch at a stage), B (its backward) and U (the update of the weights).

Floor 4. It may import stages, methods, schedules and tensors.
"""

from pipeback.runtime.link import StageLink
from pipeback.runtime.loop import Loop
from pipeback.runtime.runners import Runner
from pipeback.runtime.setting import Setting
from pipeback.runtime.weight_provider import WeightProvider
from pipeback.runtime.worker import Worker

__all__ = ["Loop", "Runner", "Setting", "StageLink", "WeightProvider", "Worker"]
