"""Update size: the samples of an update under Lightning, and the rates of the stages for it.

The optimizer of `configure_optimizers` keeps the rate and momentum that were chosen for `reference_batch` samples, as
schedulers and monitors see them; the stages step with scaled ones.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pipeback.counts import counted
from pipeback.methods.base import Method
from pipeback.pipeline.reference_batch import check_scalable, samples_per_update, scaled
from pipeback.tensors import batches as batch_form

FAR = 4  # times fewer samples per update than per batch, from which on a rate for the batch is worth a word


class UpdateSize:
    """The samples of an update, which the first batch shows, or a checkpoint. reference: `reference_batch`."""

    def __init__(self, reference: int | None, optimizer: torch.optim.Optimizer) -> None:
        self._reference, self._optimizer = reference, optimizer
        self.samples: int | None = None  # of an update; None: no batch has come

    def see(self, method: Method, batch: Any, size: int | None, batches: int) -> None:
        """See the first batch. size: samples of a micro-batch of it, or None; batches: those of an optimizer's step."""
        if self.samples is not None:
            return
        lengths = set(batch_form.samples(batch))
        found = lengths.pop() if len(lengths) == 1 else None
        if found is None and self._reference is not None:
            raise ValueError(
                f"reference_batch={self._reference} scales rate and momentum to the samples of an update, but the "
                "batch has no tensors of one length that would count them; leave reference_batch out"
            )
        if found is None:
            return
        step, samples = found * batches, samples_per_update(method, found * batches, size or found)
        assert samples is not None
        self.samples = samples
        if self._reference is not None:
            if samples != self._reference:
                check_scalable(self._optimizer, self._reference)
        elif samples * FAR <= step:
            rank_zero_warn(
                f"an update is of {counted(samples, 'sample')} here, and of {step} under a plain Trainer: a "
                f"learning rate that suits {step} is too large. {self._cure(samples, step)}"
            )

    def _cure(self, samples: int, step: int) -> str:
        same = f"if it was chosen for {samples}, say so by PipelineStrategy(reference_batch={samples}, ...)"
        if isinstance(self._optimizer, torch.optim.SGD):
            return f"PipelineStrategy(reference_batch={step}, ...) scales rate and momentum; {same}"
        return f"Lower it, or update less often by a larger micro_batch_size; {same}"

    def options(self, group: dict[str, Any]) -> dict[str, Any]:
        """The options of a group of the user's optimizer, as the stages step with them."""
        if self._reference is None or self.samples in (None, self._reference):
            return group
        return {**group, **scaled(group, self._reference, self.samples or 1)}
