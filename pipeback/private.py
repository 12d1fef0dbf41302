"""What torch does not offer in public, in one place; tests/test_private.py fails when torch changes it.

* `pytree`: structures of tensors as users nest them. torch's own functions take them apart by it, so it knows the same.
* `TorchDispatchMode`: to see each operator. `FakeTensor`, `FakeTensorMode`, `unset_fake_temporarily`: to run a model
  without values.
* `function_modes`, `pop_function_mode`, `push_function_mode`, `functions_unheard`: who changes torch functions.
  `dispatch_modes`: who sees each operator. `maps_heard`: calls under torch.vmap.
* `identity`: which memory a tensor lies in, also while that memory is away and has no address.
* `shown`: what a node of a graph has saved, with the handles that put something else in its place.
* `numbers_of`: the numbers that a node has saved.
* `newness`, `holds`: when the node of a graph was made, and whether it still has what it had saved; autograd goes from
  the newest to the oldest, and what it has passed lets go.
* `casts_anywhere`: whether this thread is inside `torch.autocast` for any type of device, in one call.
* `parametrized_once`: whether `parametrize.cached` keeps what parametrizations compute.
* `in_backward`: whether autograd asks for a saved tensor, and not somebody who looks in.
* `run_backward`: what torch.autograd.backward calls, without its checks in Python, which the engine makes, too.
* `keep_versions`: writes in place of which autograd is not told.
* `wrapper`: a tensor without memory of its own, for a loss that is not there yet.
* `catch`: a hook on a leaf without a handle to remove it by, which costs as much as a small kernel.
* `hooks_of`, `hook_tables`, `handles`, `registered`, `listened`, `hooked`, `hooks_on`, `without_step_hooks`,
  `heard_again`: who listens to a module, an optimizer, a weight, or all of them.
* `styles_heard`: what `parallelize_module` does to each module. `is_distributed`: whether it has cut a weight.
* `fused_adam`, `fused_sgd`: torch's kernels for one step of Adam or momentum SGD over lists of weights.
* `uncompiled`: the module inside of one that torch.compile has made, or one whose own `compile` was called.
* `group_named`: the name of a process group. torch 2.11 gives one twice, and a new group then waits at an address of
  the old one; later versions count the groups of a process, which may differ between ranks.
* `inductor`, `as_autograd_cuts`: what torch.compile can be told about the graphs that it makes.

Two families are used by their names all over the library, and only checked here: `torch._foreach_*`, arithmetic over
lists of tensors, and the `_modules`, `_parameters` and `_buffers` of a module.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.optim.optimizer as every_optimizer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

TESTED = "2.11", "2.15"  # the oldest and the newest torch that the tests have run on


def version() -> tuple[int, int]:
    """Of torch."""
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


class Moved(ImportError):
    """This torch has no such private name."""

    def __init__(self, name: str) -> None:
        oldest, newest = TESTED
        after = int(newest.split(".")[1]) + 1
        super().__init__(
            f"torch {torch.__version__} has no {name}, which pipeback needs; pipeback is tested on torch {oldest} to "
            f'{newest}: pip install "torch>={oldest},<2.{after}"'
        )


@contextmanager
def needing(name: str) -> Iterator[None]:
    """Names the version where this torch has no such name."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise Moved(name) from error


with needing("torch.utils._pytree"):
    from torch.utils import _pytree as pytree
with needing("torch.utils._python_dispatch.TorchDispatchMode"):
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
with needing("torch.overrides._get_current_function_mode_stack"):
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.overrides import _pop_mode as pop_function_mode
    from torch.overrides import _push_mode as push_function_mode
with needing("torch._subclasses.fake_tensor.FakeTensorMode"):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
with needing("torch.autograd.graph._engine_run_backward"):
    from torch.autograd.graph import _engine_run_backward as run_backward
with needing("torch.Tensor._make_wrapper_subclass"):
    wrapper = torch.Tensor._make_wrapper_subclass
for _name in ("add", "add_", "addcmul_", "copy_", "div", "mul_", "neg", "neg_", "sub"):
    if not hasattr(torch, f"_foreach_{_name}"):
        raise Moved(f"torch._foreach_{_name}")

__all__ = [
    "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "dispatch_modes", "function_modes", "pop_function_mode",
    "push_function_mode", "pytree", "run_backward", "unset_fake_temporarily", "wrapper",
]  # fmt: skip


def functions_unheard() -> Any:
    """A context within which no mode hears of torch functions."""
    with needing("torch._C.DisableTorchFunction"):
        return torch._C.DisableTorchFunction()


@contextmanager
def maps_heard(hear: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile a call of `torch.vmap(function)` goes to `hear`. Its arguments are torch's own implementation, the
    function, (in_dims, out_dims, randomness, chunk_size), and the arguments of the call.
    """
    with needing("torch._functorch.apis.vmap_impl"):
        from torch._functorch import apis

        original = apis.vmap_impl

    def heard(function: Any, in_dims: Any, out_dims: Any, randomness: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        return hear(original, function, (in_dims, out_dims, randomness, size), args, kwargs)

    with ExitStack() as stack:
        stack.callback(setattr, apis, "vmap_impl", original)
        apis.vmap_impl = heard  # type: ignore[assignment]
        yield


def identity(of: Tensor | torch.UntypedStorage) -> int:
    """The same number for all that lies in one storage, as long as that lives."""
    storage = of.untyped_storage() if isinstance(of, Tensor) else of
    try:  # not with `needing`, which costs ten times as much: this is asked for every saved tensor
        return int(storage._cdata)
    except AttributeError as error:
        raise Moved("UntypedStorage._cdata") from error


Raw = Any  # torch._C._autograd.SavedTensor
_saving: WeakKeyDictionary[type, dict[str, list[str]]] = WeakKeyDictionary()


def _names(kind: type, prefix: str) -> list[str]:
    """The attributes of a class of nodes whose names begin with `prefix`; every compiled graph has such a class."""
    known = _saving.get(kind)
    if known is None:
        known = _saving[kind] = {}
    if prefix not in known:
        known[prefix] = [name for name in dir(kind) if name.startswith(prefix)]
    return known[prefix]


def shown(node: Any) -> Iterator[tuple[str, Tensor, Raw]]:
    """(name, saved tensor, its handle) for the tensors that a node of a graph shows."""
    for name in _names(type(node), "_raw_saved_"):
        raw, plain = getattr(node, name), name.removeprefix("_raw")
        value = getattr(node, plain if hasattr(type(node), plain) else "saved_tensors")  # each read makes new tensors
        raws = raw if isinstance(raw, (list, tuple)) else [raw]
        values = value if isinstance(value, (list, tuple)) else [value]
        for each, tensor in zip(raws, values, strict=True):
            if isinstance(tensor, Tensor):
                yield name.removeprefix("_raw_saved_"), tensor, each


def numbers_of(node: Any) -> list[str]:
    """The numbers that a node of torch's own has saved, with their names."""
    found = [(name, getattr(node, name)) for name in _names(type(node), "_saved_")]
    return [f"{name}={value!r}" for name, value in found if isinstance(value, (bool, int, float))]


def newness(node: Any) -> int:
    """A number that is greater for nodes that this thread has made later."""
    with needing("torch.autograd.graph.Node._sequence_nr"):
        return int(node._sequence_nr())


def holds(node: Any) -> bool:
    """Whether a node still has tensors that it has saved. Those of a node that autograd has passed cannot be read."""
    names = [*_names(type(node), "_saved_"), *(["saved_tensors"] if hasattr(type(node), "saved_tensors") else [])]
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError as error:
            if "second time" not in str(error):
                return True  # what it has saved was changed in place
            continue
        if isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value)):
            return True
    return False


def in_backward() -> bool:
    with needing("torch._C._current_graph_task_id"):
        return torch._C._current_graph_task_id() >= 0


def parametrized_once() -> bool:
    with needing("torch.nn.utils.parametrize._cache_enabled"):
        return bool(nn.utils.parametrize._cache_enabled)


def casts_anywhere() -> bool:
    try:  # not `needing`: this is asked per forward
        return torch._C._is_any_autocast_enabled()
    except AttributeError as error:
        raise Moved("torch._C._is_any_autocast_enabled") from error


def keep_versions(tensors: Sequence[Tensor]) -> Any:
    """A context at whose end autograd counts as many changes in place of these as now."""
    with needing("torch.autograd.grad_mode._unsafe_preserve_version_counter"):
        from torch.autograd.grad_mode import _unsafe_preserve_version_counter
    return _unsafe_preserve_version_counter(tuple(tensors))


def catch(leaf: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """What `leaf.register_hook` does, without a handle."""
    leaf._backward_hooks = OrderedDict({0: hook})


WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# hooks on the steps of every optimizer
_for_all = [getattr(every_optimizer, f"_global_optimizer_{when}_hooks", {}) for when in ("pre", "post")]
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_all_tables = attrgetter(*MODULE_HOOKS)  # far cheaper than one getattr each; cutting asks every module
_both_hooks = attrgetter(*STEP_HOOKS)


def hooks_of(module: nn.Module) -> list[Any]:
    """The handles of a module's hooks, which are numbered as they come."""
    return [handle for table in hook_tables(module) for handle in table]


def hook_tables(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """The dictionaries of a module's hooks: two of those around its forward, then two of those on its gradients."""
    try:
        return _all_tables(module)
    except AttributeError as error:
        raise Moved(f"nn.Module.{MODULE_HOOKS[0]}") from error


def handles() -> Any:
    """A value that changes when a hook is registered on anything; where torch does not count hooks, at every call."""
    return getattr(RemovableHandle, "next_id", None) or object()


def registered() -> int:
    """How many hooks have been registered on anything; where torch does not count them, a negative number."""
    return int(getattr(RemovableHandle, "next_id", -1))


def listened(module: nn.Module) -> str | None:
    """What has hooks that are called only if the module is: all modules, a module in it, or a weight; None: nothing."""
    if getattr(nn.modules.module, "_has_any_global_hook", bool)():
        return "all modules"
    for name, m in module.named_modules():
        if hooks_of(m):
            return f"module {name!r}"
    for name, p in module.named_parameters():
        if gradient_hooks(p) or p._backward_hooks:
            return f"parameter {name!r}"
    return None


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """What hears of this optimizer's steps before and after them, in torch's order."""
    with needing(f"torch.optim.Optimizer.{STEP_HOOKS[0]}"):
        before, after = (getattr(optimizer, name).values() for name in STEP_HOOKS)
        return [*_for_all[0].values(), *before], [*after, *_for_all[1].values()]


def hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether someone listens to this optimizer's steps."""
    try:  # not `needing`: this is asked per stage and update
        return any(_both_hooks(optimizer)) or any(_for_all)
    except AttributeError as error:
        raise Moved(f"torch.optim.Optimizer.{STEP_HOOKS[0]}") from error


def uncompiled(module: nn.Module) -> nn.Module | None:
    """The module without torch.compile, which is the module itself after `compile()`; None if it is not compiled."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        module._compiled_call_impl = None
        return module
    return getattr(module, "_orig_mod", None) if type(module).__name__ == "OptimizedModule" else None


def gradient_hooks(weight: Tensor) -> bool:
    """Whether someone waits for `.grad` of this weight."""
    return bool(getattr(weight, "_post_accumulate_grad_hooks", None))


def hooks_on(weight: Tensor) -> tuple[list[Any], list[Any]]:
    """Who hears of a weight's gradient before it is added to `.grad`, and who after that."""
    before, after = (getattr(weight, name, None) or {} for name in WEIGHT_HOOKS)
    return [*before.values()], [*after.values()]


def heard_again(weight: Tensor) -> None:
    """After `swap_tensors`, which leaves a weight its dictionaries of hooks, and autograd without them."""
    for name in WEIGHT_HOOKS:
        setattr(weight, name, getattr(weight, name, None))


def without_step_hooks(optimizer: Any) -> None:
    """Nobody listens to this copy of an optimizer."""
    for name in list(vars(optimizer)):
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(optimizer, name, OrderedDict())


def fused_adam(*, decoupled: bool) -> Callable[..., None]:
    """One step over lists of weights, gradients and moments. decoupled: decay as AdamW has it."""
    name = "_fused_adamw_" if decoupled else "_fused_adam_"
    with needing(f"torch.{name}"):
        kernel: Callable[..., None] = getattr(torch, name)
    return kernel


def fused_sgd() -> Callable[..., None]:
    """One step over lists of weights, gradients and momentum buffers."""
    with needing("torch._fused_sgd_"):
        kernel: Callable[..., None] = torch._fused_sgd_
    return kernel


def inductor() -> Any:
    """The module that knows its options. It takes a second to import."""
    with needing("torch._inductor.list_options"):
        import torch._inductor as found

        found.list_options, found.list_mode_options  # noqa: B018
        return found


def as_autograd_cuts() -> Any:
    """For inductor: cuts a joint graph as autograd would. What the backward uses of the forward is kept, and nothing is
    computed again.
    """
    with needing("torch._inductor.custom_graph_pass.CustomPartitionerFn"):
        from torch._functorch.partitioners import default_partition
        from torch._inductor.custom_graph_pass import CustomPartitionerFn
    takes = set(inspect.signature(default_partition).parameters)

    class AsWritten(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **more: Any) -> Any:
            return default_partition(gm, joint_inputs, **{k: v for k, v in more.items() if k in takes})

        def uuid(self) -> str:
            return "pipeback: as written"

        def __reduce__(self) -> Any:
            return as_autograd_cuts, ()  # a class of its own here, since its base is slow to import

    return AsWritten()


@contextmanager
def styles_heard(hear: Callable[[nn.Module, Any], nn.Module]) -> Iterator[None]:
    """A context in which `parallelize_module` gives each module and its style to `hear`, and does nothing to it."""
    with needing("torch.distributed.tensor.parallel.ParallelStyle._apply"):
        from torch.distributed.tensor.parallel import ParallelStyle

        ParallelStyle._apply  # noqa: B018
    kinds, every = [ParallelStyle], list[Any]()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        every += [kind] * ("_apply" in vars(kind))

    with ExitStack() as stack:
        for kind in every:
            stack.callback(setattr, kind, "_apply", vars(kind)["_apply"])
            kind._apply = lambda style, module, device_mesh: hear(module, style)
        yield


def is_distributed(p: Tensor) -> bool:
    """Whether a weight is a DTensor, of which this process has a part."""
    from torch.distributed.tensor import DTensor

    return isinstance(p, DTensor)


@contextmanager
def group_named(name: str) -> Iterator[None]:
    """A context in which this thread's `torch.distributed.new_group` gives a group this name."""
    with needing("torch.distributed.distributed_c10d._process_group_name"):
        from torch.distributed import distributed_c10d as groups

        original, thread = groups._process_group_name, threading.get_ident()

    def named(*args: Any, **options: Any) -> Any:
        return name if threading.get_ident() == thread else original(*args, **options)

    with ExitStack() as stack:
        stack.callback(setattr, groups, "_process_group_name", original)
        groups._process_group_name = named
        yield
