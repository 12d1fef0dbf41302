"""Step checks: how a `training_step` may call the model, and what it must return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipeback.lightning import micro_batches
from pipeback.lightning.find_stages import TrainedModule
from pipeback.stages.saved_graph import nodes
from pipeback.tensors.structures import opened

_LEAVE_OUT = "to leave a batch out, return -1 from on_train_batch_start or take it out of the data"


def check_call(body: TrainedModule, inputs: tuple[Any, ...], named: dict[str, Any], again: bool) -> None:
    """Raise if the pipeline cannot take the arguments that the model was called with."""
    if again:
        raise ValueError(
            f"training_step called {body.shown} twice; a micro-batch goes through the stages once: concatenate the "
            "inputs and call it once, wrap a call that needs no gradient in torch.no_grad(), or have all calls of "
            'training_step followed: PipelineStrategy(module="self")'
        )
    if not body.followed and (len(inputs) != 1 or named):
        raise TypeError(
            f"training_step called {body.shown} with {len(inputs)} positional and {len(named)} named arguments; the "
            "first stage takes one tensor or a tuple of tensors: put them into one tuple"
        )
    plain = not named and all(type(part) is Tensor for part in inputs)  # to open a structure takes as long as a layer
    if any(part.requires_grad for part in (inputs if plain else opened((inputs, named))[0])):
        raise ValueError(
            f"the input of {body.shown} requires a gradient, but what comes before it would get none; move the "
            f"layers before it into the first stage of {body.name!r}, or detach the input"
        )


def check_output(body: TrainedModule, output: Any, given: Any) -> None:
    """Raise unless `training_step` called the model and returned a loss.

    given: the output of the model; None: it was not called.
    """
    loss = loss_of(output)
    if given is None:
        skips = f"; {_LEAVE_OUT}" if output is None else ""
        around = "training_step, or a module around it," if "." in body.name else "training_step"
        raise ValueError(
            f"training_step did not call {body.shown}, so there is nothing for the stages to learn from; call it "
            f"once and compute the loss from its output (if {around} does not call it as a whole, but its parts, have "
            f'that followed: PipelineStrategy(module="self")){skips}'
        )
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"training_step returned {'no loss' if loss is None else f'a {type(loss).__name__}'}, but the "
            "micro-batch has gone forward; return the loss, a 0-d tensor or a dictionary with it under 'loss' "
            f"({_LEAVE_OUT})"
        )


def check_loss(body: TrainedModule, loss: Tensor, output: Any) -> None:
    """Raise unless the loss comes from the output of the pipeline, and from no weight that stages train besides."""
    leaves = {id(part) for part in (output if isinstance(output, tuple) else (output,))}
    used = [variable for node in nodes([loss]) if (variable := getattr(node, "variable", None)) is not None]
    if id(loss) not in leaves and not any(id(variable) in leaves for variable in used):
        raise ValueError(
            f"the loss that training_step returned does not depend on the output of {body.shown}; compute it from "
            "the output with differentiable operations"
        )
    others = [variable for variable in used if id(variable) not in leaves]
    if others and (name := body.name_of(others)) is not None:
        raise ValueError(
            f"the loss of training_step depends on {body.shown}.{name} beside the output of {body.shown}, as a penalty "
            "on weights does, and no stage would learn that; have all of training_step followed: "
            'PipelineStrategy(module="self"), or use the weight_decay of the optimizer'
        )


def loss_of(output: Any) -> Any:
    """The loss that `training_step` returned, alone or in a dictionary."""
    return output.get("loss") if isinstance(output, Mapping) else output


def passed(output: Any, losses: list[Tensor], sizes: list[int]) -> Any:
    """Return the output of `training_step` for the last slice, with the mean of all losses in place of its loss."""
    loss = micro_batches.Passed.apply(loss_of(output), micro_batches.mean(losses, sizes))
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss


def gradients(held: Any) -> Any:
    """The gradients of what `held` returns."""
    return tuple(part.grad for part in held) if isinstance(held, tuple) else held.grad


def held(output: Any) -> Any:
    """The tensors in the output of the model, which get its gradients, without the structure around them."""
    if type(output) is Tensor:
        return output
    tensors, _ = opened(output)
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
