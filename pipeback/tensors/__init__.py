"""The tensors: lists of weights, how they lie in memory, devices, and nested structures of them.

Floor 1. It knows no stage and no method, and imports only `private`.
"""

from pipeback.tensors.copies import replica
from pipeback.tensors.flat_buffer import FlatBuffer
from pipeback.tensors.layout import Layout
from pipeback.tensors.weight_list import WeightList, Weights

__all__ = ["FlatBuffer", "Layout", "WeightList", "Weights", "replica"]
