"""Side effects: what a forward does beside computing. A graph would leave it out, or do it as at the one call that was
traced, so that stages with side effects run one by one.

While a forward is traced or tried, nobody notices: its buffers, attributes and random numbers are put back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeback.private import listened
from pipeback.splitting.module_restore import untouched
from pipeback.stages.module_settings import Settings
from pipeback.stages.own_autocast import around
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators
from pipeback.vectorized.tracing.capture import KEEPS, Traits, Unfit
from pipeback.vectorized.tracing.forms import leaves, packed

PYTHONS = "their forward draws random numbers of Python or numpy"


@contextmanager
def traced(module: nn.Module) -> Iterator[None]:
    """A context in which a module is traced, and after which it is as before.

    Raises `Unfit` where its forward has drawn from generators that no graph knows, or has set hooks on what autograd
    saves: in the event loop they may compute something again on the weights that are in force at the backward.
    """
    restore = untouched(module)
    with restore, _hooks_heard() as heard:
        try:
            yield
        except Exception as error:
            if heard:
                raise Unfit(KEEPS) from error
            raise
        if heard:
            raise Unfit(KEEPS)
        if restore.drew:
            raise Unfit(PYTHONS)


@contextmanager
def _hooks_heard() -> Iterator[list[bool]]:
    """A context in which it is noted whether this thread sets hooks on what autograd saves."""
    heard: list[bool] = []
    original, thread = saved_tensors_hooks.__enter__, threading.get_ident()

    def enter(hooks: saved_tensors_hooks) -> None:
        if threading.get_ident() == thread:
            heard.append(True)
        original(hooks)

    with ExitStack() as stack:
        stack.callback(setattr, saved_tensors_hooks, "__enter__", original)
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
        yield heard


def check_plain(stages: Sequence[Stage], x: Any) -> Traits:
    """Raise `Unfit` where a forward has side effects; return what else it does."""
    module = stages[0].module
    if any(listened(stage.module) for stage in stages):
        raise Unfit("there are hooks on their modules or weights")
    xs = leaves(x)
    draws = [accelerators.generator(device) for device in (None, xs[0].device)]
    states = [generator.get_state() for generator in draws]
    seen = [b._version for b in module.buffers()]
    given = [v.clone() for v in xs]
    restore = untouched(module)
    with restore, accelerators.forked([xs[0].device]), torch.no_grad(), around(stages[0]):
        ys = module(packed(given, type(x) is tuple))
        changed = seen != [b._version for b in module.buffers()]
        now, outside = [generator.get_state() for generator in draws], restore.drew
        settings = Settings(module.modules(), "all")  # a first call may have set what stays
        module(packed([v.clone() for v in xs], type(x) is tuple))
        counts = settings.changed()
    if changed:
        raise Unfit("their forward changes a buffer, as batch normalisation does")
    if not all(torch.equal(a, b) for a, b in zip(states, now, strict=True)):
        raise Unfit("their forward draws random numbers")
    if outside:
        raise Unfit(PYTHONS)
    if counts:
        raise Unfit("their forward changes attributes of its module, such as a number, at every call")
    if not all(isinstance(y, Tensor) for y in leaves(ys)):
        raise Unfit(f"the output is a {type(ys).__name__}, and not a tensor or a tuple of tensors")
    there = {t.untyped_storage().data_ptr() for t in (*given, *module.parameters(), *module.buffers())}
    aliases = []
    for y in leaves(ys):
        place = y.untyped_storage().data_ptr()
        aliases.append(place in there)
        there.add(place)
    dtypes = tuple(y.dtype for y in leaves(ys))
    return Traits(any(v._version for v in given), tuple(aliases), dtypes, type(ys) is tuple)
