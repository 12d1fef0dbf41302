"""Grad modes: calls do the same in whatever mode of autograd the caller is, inference mode among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def recording() -> Iterator[None]:
    """A context within which autograd records, as backwards and what is made to be trained with need it."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def unrecorded() -> Iterator[None]:
    """A context within which autograd does not record, and tensors are such as may be trained with."""
    with torch.inference_mode(False), torch.no_grad():
        yield
