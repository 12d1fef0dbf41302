"""Flights: what a state holds of micro-batches in flight at stages that several ranks compute together.

Their activations are alike on all ranks, or spread: then each rank has its own, which is kept under shard/R/…, and the
state goes on with as many ranks only. What is alike is kept once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeback.tensor_parallel.group import TensorGroup

IN_FLIGHT = ("flight/", "message/")
_NUMBER = re.compile(r"(_\w+Backward\.ctx\.number=)\d+")  # of the group, in the signature of a graph


def in_graphs(plain: Mapping[str, Any]) -> bool:
    """Whether a stage has micro-batches in flight whose graphs are saved."""
    return any(flight["again"] is None for flight in plain["flights"].values())


def apart(tensors: Mapping[str, Tensor], group: TensorGroup) -> dict[str, Tensor]:
    """The tensors in flight that differ between ranks, each rank's under its own name; all ranks call it alike."""
    found = {}
    for key, tensor in tensors.items():
        every = group.collect(tensor)
        if not all(torch.equal(_bits(tensor.cpu()), _bits(other)) for other in every):
            found.update({f"shard/{r}/{key}": other for r, other in enumerate(every)})
    return found


def numbered(plain: dict[str, Any], number: int) -> dict[str, Any]:
    """The plain values of a stage, in which the graphs in flight belong to the group of this number."""
    flights = {
        mb: {**flight, "saved": [_NUMBER.sub(rf"\g<1>{number}", line) for line in flight["saved"]]}
        for mb, flight in plain["flights"].items()
    }
    return {**plain, "flights": flights}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
