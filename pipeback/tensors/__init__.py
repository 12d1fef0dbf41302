"""The tensors: lists of weights, the layout of tensors in memory, devices, and nested structures of tensors.

Floor 1. It knows no stage and no method, and imports only `private`.
"""

from pipeback.tensors.copies import replica
from pipeback.tensors.flat_buffer import FlatBuffer
from pipeback.tensors.layout import Layout
from pipeback.tensors.weight_list import WeightList, Weights

__all__ = ["FlatBuffer", "Layout", "WeightList", "Weights", "replica"]
