"""The streaming: weights that live outside the device, in host memory, on disk, sparse, or split over replicas.

Floor 5. It may import runtime, stages, methods, sparsities, schedules and tensors.
"""

from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore, Store
from pipeback.streaming.streamed_weights import StreamedWeights
from pipeback.streaming.traffic import Traffic

__all__ = ["DiskStore", "HostStore", "Store", "StreamedWeights", "Traffic"]
