"""Compiled: the forward of a stage through torch.compile; module, names, hooks and state stay the user's.

The tensors that a compiled graph saves from the forward (F) for the backward (B) decide on which weights B runs, and
compilers choose them by memory and speed. We found with torch 2.15 on the CPU (tests/laws/test_compiled.py) that the
graphs of Linear, LayerNorm and attention save the weights' own memory (transposes are views of it), so that B reads
the weights in force at B, as it does without the compiler. There are two exceptions:

* Convolutions save a copy of the weight in another layout, so that B silently runs on old weights.
* Tensors that are cheap to compute (a product with a weight, say) are not saved but recomputed in B, so that B's
  activations belong to newer weights, which those of the uncompiled stage do not.

Where B may run on other weights than F (`faithful`), we therefore tell inductor to leave layouts alone
(`layout_optimization`) and to save exactly what autograd would (`custom_partitioner_fn`). Every new graph, in the
rehearsal or later for another shape, is compared with the uncompiled stage (`compile_check`). Random layers draw the
same numbers as without the compiler (`fallback_random`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipeback import private
from pipeback.methods.base import Method, overrides
from pipeback.private import as_autograd_cuts, hooks_of, inductor
from pipeback.stages.saved_graph import nodes
from pipeback.tensors.copies import tensors_in

Options = dict[str, Any]  # of torch.compile


class Compiled:
    """What a stage calls instead of its module.

    check: called with the input whenever the graph of an output is of a kind that has not been seen before.
    """

    def __init__(self, module: nn.Module, index: int, options: Options) -> None:
        self.module, self.index, self.options = module, index, options
        self.check: Callable[[Any], None] | None = None
        self._known: set[type] = set()  # every graph that is compiled has classes of its own for its nodes
        self._hooks: Sequence[Any] = ()
        self._modules = list(module.modules())
        self._call = self._compile()

    def __call__(self, given: Any) -> Any:
        hooks = [handle for module in self._modules for handle in hooks_of(module)]
        if hooks != self._hooks:  # torch keeps the code that was compiled with others
            self._hooks, self._call = hooks, self._compile()
        output = self._call(given)
        if self.check is not None and torch.is_grad_enabled():
            kinds = {type(node) for node in nodes([y for y in tensors_in(output) if y.requires_grad])}
            if not kinds <= self._known:
                check, self.check = self.check, None
                try:
                    check(given)
                finally:
                    self.check = check
                self._known |= kinds
        return output

    def _compile(self) -> Callable[[Any], Any]:
        module = self.module

        def forward(given: Any) -> Any:
            return module(given)

        # code of its own: torch counts what it compiles by code, and gives up after a few modules that share it
        forward.__code__ = forward.__code__.replace(co_name=f"stage_{self.index}")
        compiled: Callable[[Any], Any] = torch.compile(forward, **self.options)
        return compiled


def faithful(method: Method, delay: int) -> bool:
    """Whether B may run on other weights than F did, so that what a graph keeps matters."""
    if method.copies == "stash":
        return False
    return bool(delay) or overrides(method, "forward_weights") or overrides(method, "backward_weights")


def options(asked: bool | Options, keep: bool) -> Options:
    """Return torch.compile's options: the user's, and those that a pipeline needs. keep: the graph must be `faithful`.

    Raises TypeError or ValueError, naming the option `compile`.
    """
    if not isinstance(asked, (bool, dict)):
        raise TypeError(f"compile must be True, False or a dict of options of torch.compile, but is {asked!r}")
    given = dict(asked) if isinstance(asked, dict) else {}
    allowed = set(inspect.signature(torch.compile).parameters) - {"model", "disable"}
    if unknown := sorted(set(given) - allowed):
        raise TypeError(f"compile has no option {unknown[0]!r}; torch.compile takes {', '.join(sorted(allowed))}")
    if given.get("backend", "inductor") != "inductor":
        return given
    mode, mine = given.pop("mode", None), dict(given.pop("options", None) or {})
    if mode not in (None, "default"):
        mine = {**inductor().list_mode_options(mode), **mine}
    if mine.get("triton.cudagraphs"):
        raise ValueError(
            f"compile: {f'mode={mode!r}' if mode else 'triton.cudagraphs'} replays CUDA graphs, which have memory for "
            'one micro-batch in flight; use mode="max-autotune-no-cudagraphs", or compile=True'
        )
    needed: Options = {"fallback_random": True}
    if keep:
        needed |= {"layout_optimization": False, "custom_partitioner_fn": as_autograd_cuts()}
    known = set(inductor().list_options())
    return {**given, "options": {**{k: v for k, v in needed.items() if k in known}, **mine}}


def of_ticks(options: Options) -> Options:
    """Return the same options for functions that do whole ticks.

    These functions always get tensors of the same shapes and types, so torch's guards, which cost as much as small
    kernels, are left out; where torch has no such option, they stay.
    """
    if options.get("mode") is not None:
        return options
    skip = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return {**options, "options": {**(options.get("options") or {}), **skip}}  # torch takes it out of the inner one


def writes_in_order(options: Options) -> bool:
    """Whether a function compiled with these options may write in place to a tensor that it has read before.

    Whole ticks do so. The inductor of torch 2.11 moves such reads behind the write, both when it reorders operations to
    lower peak memory and when it fuses them: weights are then off by 1e-3 and more
    (tests/laws/test_vectorized_compiled.py). The inductor of torch 2.12 does not. Below 2.12 we compile only F and B,
    each on its own.
    """
    return options.get("backend", "inductor") != "inductor" or private.version() >= (2, 12)
