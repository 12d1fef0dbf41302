"""Capture: traces the forward and the backward of n equal modules, side by side, as two graphs.

The forward graph takes the weights (n, …) and the inputs X (n, …) of all modules, and returns their outputs Y (n, …)
and the tensors saved for the backward. `torch.func.vmap` batches the operations, AOTAutograd makes the two graphs. With
one module alone (n = 1) no tensor has the dimension of the rows.

Tensors that the backward needs and that depend on the weights alone are not saved by the forward: they are computed
from the weights that are in force when the backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeback.tensors import accelerators
from pipeback.vectorized.tracing.convolutions import AS_PRODUCTS
from pipeback.vectorized.tracing.forms import floating, leaves, packed
from pipeback.vectorized.tracing.graphs import Graph, Graphs, direct
from pipeback.vectorized.tracing.group_norms import GroupNormsAsOne
from pipeback.vectorized.tracing.simplified_graph import constant, simplified
from pipeback.vectorized.tracing.split_graph import split


class Unfit(ValueError):
    """These modules cannot run as one; the message says why, and is shown after "stages 2 … 5: "."""


class Unlike(Unfit):
    """These modules cannot run as one, since they compute different things."""


class Traits(NamedTuple):
    """What a forward does beside computing.

    clones: whether it changes its input in place, and so is given a copy. aliases: of each output, whether it is an
    input, or a view of something that is not its own. dtypes: of the outputs. packs: whether these are a tuple.
    """

    clones: bool
    aliases: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    packs: bool


def capture(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    xs: Sequence[Tensor],
    traits: Traits,
    rows: int,
    whole: bool = False,
    enters: bool = False,
    products: bool = False,
    shared: bool = False,
    casts: accelerators.Autocast = (),
) -> Graphs:
    """Return the graphs of n modules like this one.

    weights: (n, …) by name; trainable ones require a gradient. xs: (n, …), the inputs; whole: given to the module as a
    tuple. rows: n. enters: whether the inputs have no gradients, since no stage stands before. products: whether
    convolutions of one sample are written as products of matrices. shared: whether the n inputs are all of one
    module, whose weights have no dimension of rows. casts: the autocast around the modules. Raises `Unfit` where torch
    cannot trace n modules at once.
    """
    from functorch.compile import aot_function, default_partition, make_boxed_func  # takes a second to import

    found: dict[str, fx.GraphModule] = {}
    names, count = list(weights), len(xs)

    def one(values: Sequence[Tensor], *xs: Tensor) -> tuple[Tensor, ...]:
        given = [x.clone() for x in xs] if traits.clones else xs
        with accelerators.under(casts):
            ys = leaves(functional_call(module, dict(zip(names, values, strict=True)), (packed(given, whole),)))
        # what vmap makes of an operation under autocast may be of another type than the operation
        ys = tuple(y.to(dtype) for y, dtype in zip(ys, traits.dtypes, strict=True))
        # the backward is traced for gradients with these strides, and the gradients that come are contiguous; an
        # output that were an input would not be an output of the graph
        return tuple(y.clone() if alias else y.contiguous() for y, alias in zip(ys, traits.aliases, strict=True))

    def all_of_them(*given: Tensor) -> tuple[Tensor, ...]:
        values, inputs = given[:-count], given[-count:]
        alone = rows == 1 and not shared
        dims = (None if shared else 0, *(0 for _ in inputs))
        found: tuple[Tensor, ...] = one(values, *inputs) if alone else vmap(one, dims)(values, *inputs)
        return tuple(y.contiguous() for y in found)

    def keep(which: str) -> Callable[[fx.GraphModule, Any], Any]:
        def compiler(graph: fx.GraphModule, example: Any) -> Any:
            found[which] = graph
            return make_boxed_func(graph.forward)

        return compiler

    if enters and not any(w.requires_grad for w in weights.values()):
        return _forward_only(all_of_them, [*weights.values(), *xs], len(names), traits)
    function = aot_function(
        all_of_them, keep("forward"), keep("backward"), partition_fn=default_partition,
        decompositions=AS_PRODUCTS if products else {},
    )  # fmt: skip
    given = [_likewise(w).requires_grad_(w.requires_grad) for w in weights.values()]
    inputs = [x.detach().clone().requires_grad_(floating(x.dtype) and not enters) for x in xs]
    try:
        # vmap has no rule for the fused kernels of attention, but has rules for its plain operations
        with (
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
            GroupNormsAsOne() if rows > 1 and not shared else nullcontext(),
        ):
            ys = function(*given, *inputs)
            gives = tuple(n for n, y in enumerate(ys) if y.requires_grad)
            torch.autograd.backward([ys[n] for n in gives], [torch.ones_like(ys[n]) for n in gives])
    except Exception as error:  # the user's code or torch may raise any error
        raise _unfit(error, module) from error
    if found.keys() != {"forward", "backward"}:
        raise Unfit("there is nothing to train in them")
    return split(found["forward"], found["backward"], len(names), len(ys), gives)._replace(packs=traits.packs)


KEEPS = "their forward decides what is kept for the backward, as torch.utils.checkpoint does"
_SHAPE = "their forward makes a tensor whose shape depends on values, as `nonzero` and a boolean mask do"
_MEANT = {  # what torch says, in words of its own, which ask for a report of a bug, and what it means for a stage
    "calling .item()": "their forward reads a number out of a tensor, as `.item()`, `float` and `range` do",
    "data-dependent control flow": "their forward decides by the value of a tensor, as an `if` does",
    "data pointer": "their forward takes the values of a tensor out of torch, as `.tolist()` and `.numpy()` do",
    "dynamic shape": _SHAPE,
    "differently shaped": _SHAPE,
    "`repeats` tensor": _SHAPE,
    "NoopSaveInputs": KEEPS,  # in torch 2.11; later versions ask for hooks on saved tensors
    "setup_context": "their forward calls a torch.autograd.Function without `setup_context`, which torch cannot batch",
}


def _unfit(error: Exception, module: nn.Module) -> Unfit:
    """What torch says, or our words for tensors that the graphs would take as numbers."""
    said = str(error).strip().partition("\n")[0]
    for words, why in _MEANT.items():
        if words in said:
            return Unfit(why)
    if "FakeTensor" not in said:
        return Unfit(f"torch cannot run them as one: {said}")
    names = [name for name, _ in module.named_buffers()]
    which = f", such as the buffer {names[0]!r}" if names else ""
    return Unfit(f"their forward computes with tensors that are no weights{which}")


def _likewise(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, since graphs are traced for these: rows of weights may have gaps."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor.detach()
    )


def _forward_only(function: Callable[..., Any], given: Sequence[Tensor], weights: int, traits: Traits) -> Graphs:
    """Return the graphs of a stage that has nothing to differentiate."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, too

    try:
        forward = simplified(make_fx(function)(*(v.detach() for v in given)))
    except Exception as error:  # the user's code or torch may raise any error
        raise Unfit(f"torch cannot write it as one graph: {str(error).strip().partition(chr(10))[0]}") from error
    nothing, made = fx.Graph(), fx.Graph()
    nothing.output((None,) * len(given))
    for n in range(weights):
        made.placeholder(f"weight_{n}")
    made.output(())
    back, of_weights = (fx.GraphModule(forward, graph).forward for graph in (nothing, made))
    return Graphs(forward.forward, back, of_weights, len(traits.aliases), traits.packs, ())


def capture_loss_stage(
    module: nn.Module, loss: Callable[[Any, Any], Tensor], x: Any, target: Any, *, clones: bool = False,
    casts: accelerators.Autocast = (),
) -> Graph:  # fmt: skip
    """Return the forward and backward of the stage with the loss as one graph.

    x: its input, a tensor or a tuple. The graph maps (*weights, *X, target) to (loss, *gradients of the inputs,
    *gradients of the weights that train); an input without a gradient has None. clones, casts: as for `capture`.
    Raises `Unfit` where torch cannot trace it so.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, too

    weights = dict(module.named_parameters())
    trained = [name for name, p in weights.items() if p.requires_grad]
    xs, whole = leaves(x), type(x) is tuple
    moving = [n for n, v in enumerate(xs) if floating(v.dtype)]

    def both(*given: Any) -> Any:
        values, inputs, target = dict(zip(weights, given, strict=False)), given[len(weights) : -1], given[-1]

        def of(some_inputs: Mapping[int, Tensor], some: Mapping[str, Tensor]) -> Tensor:
            mine = [some_inputs.get(n, v) for n, v in enumerate(inputs)]
            mine = [v.clone() for v in mine] if clones else mine
            with accelerators.under(casts):
                return loss(functional_call(module, {**values, **some}, (packed(mine, whole),)), target)

        (gxs, grads), found = grad_and_value(of, argnums=(0, 1))(
            {n: inputs[n] for n in moving}, {name: values[name] for name in trained}
        )
        return found, *(gxs.get(n) for n in range(len(inputs))), *(grads[name] for name in trained)

    try:
        graph = constant(simplified(make_fx(both)(*(p.detach() for p in weights.values()), *xs, target)))
    except Exception as error:  # the user's code or torch may raise any error
        raise Unfit(f"torch cannot write it as one graph: {str(error).strip().partition(chr(10))[0]}") from error
    return direct(graph.forward)


def capture_losses(
    module: nn.Module, loss: Callable[[Any, Any], Tensor], xs: Sequence[Tensor], target: Tensor, *, whole: bool,
    clones: bool = False, casts: accelerators.Autocast = (),
) -> Graph:  # fmt: skip
    """Return the forward and backward of the stage with the loss, of n micro-batches at once, as one graph.

    xs, target: (n, …). The graph maps (*weights, *X, target, seeds) to (losses (n), *gradients of the inputs (n, …),
    *gradients of the weights that train, each summed with the n `seeds` as factors). whole, clones, casts: as for
    `capture`. Raises `Unfit` where torch cannot trace it so.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, too

    weights = dict(module.named_parameters())
    trained = [name for name, p in weights.items() if p.requires_grad]
    moving = [n for n, v in enumerate(xs) if floating(v.dtype)]

    def all_of_them(*given: Any) -> Any:
        values, inputs, (target, seeds) = (
            dict(zip(weights, given, strict=False)), given[len(weights) : -2], given[-2:],
        )  # fmt: skip

        def of(some_inputs: Mapping[int, Tensor], some: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            def one(target: Tensor, *mine: Tensor) -> Tensor:
                mine = tuple(v.clone() for v in mine) if clones else mine
                with accelerators.under(casts):
                    return loss(functional_call(module, {**values, **some}, (packed(mine, whole),)), target)

            found = vmap(one)(target, *(some_inputs.get(n, v) for n, v in enumerate(inputs)))
            return (found * seeds).sum(), found

        (gxs, grads), found = grad(of, argnums=(0, 1), has_aux=True)(
            {n: inputs[n] for n in moving}, {name: values[name] for name in trained}
        )
        return found, *(gxs.get(n) for n in range(len(inputs))), *(grads[name] for name in trained)

    try:
        with torch.no_grad():
            seeds = torch.ones(len(target), dtype=xs[moving[0]].dtype, device=target.device)
        given = *(p.detach() for p in weights.values()), *xs, target, seeds
        with sdpa_kernel(SDPBackend.MATH):
            graph = simplified(make_fx(all_of_them)(*given))
    except Exception as error:  # the user's code or torch may raise any error
        raise Unfit(f"torch cannot write it as one graph: {str(error).strip().partition(chr(10))[0]}") from error
    found: Graph = graph.forward
    return found


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Return the visible properties in which modules must agree to run as one."""
    parts = [(type(m).__qualname__, m.extra_repr(), m.training) for m in module.modules()]
    weights = [(tuple(p.shape), p.dtype, p.device, p.requires_grad) for p in module.parameters()]
    return (*parts, *weights)
