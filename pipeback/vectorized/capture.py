"""Capture: traces the forward and the backward of n equal modules, side by side, as two graphs.

The forward graph takes the weights (n, …) and inputs X (n, …) of all modules, and returns the outputs Y (n, …) and the
tensors saved for the backward. `torch.func.vmap` batches the operations, AOTAutograd makes the two graphs. Tensors that
the backward needs and that depend on the weights alone are not saved by the forward: they are computed from the weights
that are in force when the backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeback.vectorized.graph_rewrites import Graph, Graphs, constant, direct, simplified, split


class Unfit(ValueError):
    """These modules cannot run as one; the message says why, and is shown after "stages 2 … 5: "."""


def capture(module: nn.Module, weights: Mapping[str, Tensor], x: Tensor, *, clones: bool = False) -> Graphs:
    """Return the graphs of n modules like this one.

    weights: (n, …) by name; trainable ones require a gradient. x: (n, …). clones: whether the module changes its
    input in place and so is given a copy. Raises `Unfit` where torch cannot trace n modules at once.
    """
    from functorch.compile import aot_function, default_partition, make_boxed_func  # takes a second to import

    found: dict[str, fx.GraphModule] = {}
    names = list(weights)

    def one(values: Sequence[Tensor], x: Tensor) -> Any:
        return functional_call(module, dict(zip(names, values, strict=True)), (x.clone() if clones else x,))

    def all_of_them(*given: Tensor) -> Any:
        y = vmap(one)(given[:-1], given[-1])
        # the backward is traced for a gradient with these strides, and the gradients that come are contiguous
        return y.contiguous() if isinstance(y, Tensor) else y

    def keep(which: str) -> Callable[[fx.GraphModule, Any], Any]:
        def compiler(graph: fx.GraphModule, example: Any) -> Any:
            found[which] = graph
            return make_boxed_func(graph.forward)

        return compiler

    function = aot_function(all_of_them, keep("forward"), keep("backward"), partition_fn=default_partition)
    given = [w.detach().clone().requires_grad_(w.requires_grad) for w in weights.values()]
    try:
        # vmap has no rule for the fused kernels of attention, but has rules for its plain operations
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            y = function(*given, x.detach().clone().requires_grad_())
            if not isinstance(y, Tensor):
                raise Unfit(f"the output is a {type(y).__name__}, and not a tensor")
            if y.shape != x.shape or y.dtype != x.dtype:
                raise Unfit(f"the output {tuple(y.shape[1:])} has another shape than the input {tuple(x.shape[1:])}")
            y.backward(torch.ones_like(y))
    except Unfit:
        raise
    except Exception as error:  # the user's code or torch may raise any error
        raise Unfit(f"torch cannot run them as one: {str(error).strip().partition(chr(10))[0]}") from error
    if found.keys() != {"forward", "backward"}:
        raise Unfit("there is nothing to train in them")
    return split(found["forward"], found["backward"], len(names))


def capture_loss_stage(
    module: nn.Module, loss: Callable[[Any, Any], Tensor], x: Tensor, target: Any, *, clones: bool = False
) -> Graph:
    """Return the forward and backward of the stage with the loss as one graph.

    It maps (*weights, X, target) to (loss, gradient of X, *gradients of the weights that train). clones: as for
    `capture`. Raises `Unfit` where torch cannot trace it so.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, too

    weights = dict(module.named_parameters())
    trained = [name for name, p in weights.items() if p.requires_grad]

    def both(*given: Any) -> Any:
        values, x, target = dict(zip(weights, given, strict=False)), given[-2], given[-1]

        def of(x: Tensor, some: Mapping[str, Tensor]) -> Tensor:
            return loss(functional_call(module, {**values, **some}, (x.clone() if clones else x,)), target)

        (gx, grads), found = grad_and_value(of, argnums=(0, 1))(x, {name: values[name] for name in trained})
        return found, gx, *(grads[name] for name in trained)

    try:
        graph = constant(simplified(make_fx(both)(*(p.detach() for p in weights.values()), x, target)))
    except Exception as error:  # the user's code or torch may raise any error
        raise Unfit(f"torch cannot write it as one graph: {str(error).strip().partition(chr(10))[0]}") from error
    return direct(graph.forward)


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Return the visible properties in which modules must agree to run as one."""
    parts = [(type(m).__qualname__, m.extra_repr(), m.training) for m in module.modules()]
    weights = [(tuple(p.shape), p.dtype, p.device, p.requires_grad) for p in module.parameters()]
    return (*parts, *weights)
