"""Known forms: the forms of micro-batches for which a model was traced, and how a saved state writes them.

The form of a micro-batch is everything but the values of its tensors: their shapes and types, the structure that they
stand in, and the numbers and strings beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.splitting.branches import MOST, Branch
from pipeback.splitting.call_arguments import Arguments
from pipeback.splitting.call_trace import CallTrace
from pipeback.splitting.refusals import shortened
from pipeback.tensors import accelerators
from pipeback.tensors.copies import replica
from pipeback.tensors.structures import Form, opened
from pipeback.tensors.written_forms import read, written


class Known(NamedTuple):
    """A form of micro-batch for which the model was traced, in one variant."""

    inputs: Form
    output: Form
    answers: list[Any]  # the values by which Python decided
    decisions: list[Branch]  # by values of the input; other outcomes belong to other variants
    mark: Tensor | None = None  # of the variant; None where there is only one
    shapes: bool = False  # whether the model was traced by shapes alone, where its weights were not here

    def marked(self, x: Any) -> Any:
        """Return the tensors of a micro-batch with the mark, as the first stage takes them."""
        return x if self.mark is None else (*tensors_of(x), self.mark)

    def too_many(self, model: str) -> ValueError:
        """Return the error if a model has been traced in `MOST` variants for one form. model: its class."""
        if not self.decisions:
            shown = self.inputs.fill([f"tensor {n}" for n in range(len(self.inputs.constants))])
            return ValueError(
                f"{model}.forward was followed for {MOST} micro-batches that differ in what is pushed beside tensors, "
                f"and now for another one: {shown}; push tensors instead, and leave out what the forward does not use"
            )
        call = self.decisions[-1].calls[-1]
        return ValueError(
            f"{model}.forward has taken {MOST} branches for micro-batches of one form, and now another one: "
            f"{call.target.__name__} gave {shortened(call.check[0])}; keep decisions by values within one layer: give "
            "the path of the deciding module in stages=pipeback.Splitting(leaves=[...])"
        )

    def plain(
        self,
        training: bool,
        graph: bool,
        autocast: accelerators.Autocast,
        tensors: Sequence[tuple[Sequence[int], torch.dtype]],
    ) -> dict[str, Any]:
        """Return the form as plain values, for a saved state. graph: see `CallWay`. tensors: shape and type of each."""
        return {
            "training": training,
            **({} if graph else {"graph": False}),
            "autocast": accelerators.written(autocast),
            "tensors": [[list(shape), str(dtype).removeprefix("torch.")] for shape, dtype in tensors],
            **written(self.inputs),
            "answers": self.answers,
            "decisions": [decision.number for decision in self.decisions],
            "mark": None if self.mark is None else list(self.mark.shape),
            **({"shapes": True} if self.shapes else {}),
        }

    def as_saved(self, form: Mapping[str, Any]) -> Known:
        """Return this form with the decisions and the mark that a saved state has of it."""
        shape = form.get("mark")
        return self._replace(
            decisions=[decision for decision in self.decisions if decision.number in form.get("decisions", ())],
            mark=None if shape is None else torch.zeros(shape, dtype=torch.bool, device="cpu"),
            shapes=form.get("shapes", False),
        )


def with_own_tensors(arguments: Arguments, device: torch.device | None) -> Arguments:
    """Return the arguments with tensors of their own on this device, since a model may change them."""
    tensors, form = opened(tuple(arguments))
    return Arguments(*form.fill([replica(tensor, device) for tensor in tensors]))


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    return value if type(value) is tuple else (value,)


def example_of(form: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], Form]:
    """Return tensors of a form that a saved state has as plain values, and the structure that they stand in.

    They are full of ones, which are indices, lengths and masks that a forward can use.
    """
    x = tuple(torch.ones(shape, dtype=getattr(torch, kind)) for shape, kind in form["tensors"])
    return x, read(form)


def traced_as_saved(
    model: str,
    form: Mapping[str, Any],
    follow: Callable[[bool], tuple[CallTrace, Known]],
    complete: bool,
    flying: bool,
) -> tuple[CallTrace, Known] | None:
    """Trace a form as the pipeline has that saved it: on tensors with values, or by shapes alone where it had no more.

    A forward may tell the two apart: transformers leaves masks out that its values do not need, except where it is
    traced by shapes. follow: traces, with values or by shapes. complete: whether all weights are here. flying: whether
    the state has micro-batches in flight; if not, a form that cannot be traced is None, and the push that needs it
    traces it. Raises ValueError naming the model. model: its class.
    """
    if complete and not form.get("shapes"):
        with suppress(Exception):  # other values may not do, and shapes may
            record, known = follow(True)
            if known.answers == form["answers"]:
                return record, known
    try:
        return follow(False)
    except Exception as error:
        if not flying:
            return None
        if isinstance(error, ValueError):  # it has a cure of its own
            raise
        shown = ", ".join(f"{tuple(shape)} {kind}" for shape, kind in form["tensors"])
        raise ValueError(
            f"{model} cannot be traced for micro-batches of {shown} without their values: {error}; a state with "
            "micro-batches in flight needs it; call pipe.drain() before pipe.state_dict() there"
        ) from error
