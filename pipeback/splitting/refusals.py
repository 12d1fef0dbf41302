"""Refusals: the errors for forwards that cannot be traced; each says what the forward does, and what helps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from pipeback.splitting.module_walk import walked

LONGEST = 60  # characters of a value in a message


class Unmade(ValueError):
    """A tensor of unknown origin."""


def unmade(who: str, where: str, what: str, value: Tensor) -> Unmade:
    """The error for a tensor of unknown origin. who: names the module at `where`, a path. what: gets the tensor."""
    return Unmade(
        f"{who}.forward gives {what} a tensor {tuple(value.shape)} that no torch function or module has made from its "
        f"input (what numpy computes, for example, is not traced); {cure_whole(where)}"
    )


def shared(who: str, where: str, what: str, value: Any) -> ValueError:
    """The error for an object that a stage cannot create anew for every micro-batch."""
    return ValueError(
        f"{who}.forward gives {what} an object of {type(value).__name__}, which every micro-batch would share; leave "
        f"it out, or give tensors, numbers and strings, or {cure_whole(where)}"
    )


def away(who: str, where: str, name: str) -> ValueError:
    """The error for a tensor that leaves torch."""
    return ValueError(
        f"{who}.forward calls Tensor.{name}, which cannot be traced; keep to torch functions, or {cure_whole(where)}; "
        "a loss that does so is computed outside: push without labels, and give loss= to Pipeline"
    )


def compiles(who: str, where: str, name: str) -> ValueError:
    """The error for a call of torch.cond or torch.while_loop, whose functions may hold any weights."""
    return ValueError(f"{who}.forward calls {name}, which cannot be traced; {cure_whole(where)}")


def set_elsewhere(who: str) -> str:
    """The message for a forward that sets an attribute of a module which is not traced into."""
    return (
        f"{who}, which stages would not do again for each micro-batch; give it as an argument, or leave its path out "
        "of the leaves"
    )


def escaped(who: str, what: str, value: Tensor, maker: str) -> str:
    """The message for a tensor that leaves the module `maker`, which is not traced into. what: gets it."""
    return (
        f"{who}.forward gives {what} a tensor {tuple(value.shape)} that was made within {maker}, which does not return "
        "it; return it there, or leave that path out of the leaves"
    )


def given_module(who: str) -> str:
    """The message for a module that is given to another one."""
    return f"{who} a module, whose weights it would compute with; leave its path out of the leaves"


def replaces(who: str) -> ValueError:
    """The error for a forward that replaces a tensor which it has used, in a list or dictionary of its modules."""
    return ValueError(
        f"{who}.forward replaces a tensor in a list or dictionary that a module holds, which stages would not do again "
        f"for each micro-batch; make it a buffer that is changed in place, or {cure_whole('')}"
    )


def set_anew(who: str, name: str) -> ValueError:
    """The error for a forward that gives a trained weight other memory."""
    return ValueError(
        f"{who}.forward sets the data of {name!r}, which trains, and whose optimizer would go on with the old data; "
        "write into it under torch.no_grad(), with copy_(), or freeze it with requires_grad_(False)"
    )


def shortened(value: Any) -> str:
    """A value as a message shows it: what tolist() gives, for example, may have thousands of numbers."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def decided_anew(who: str, whole: str, name: str, found: Any, expected: Any) -> ValueError:
    """The error for a forward that takes another branch than the trace. whole: the cure, see `kept_whole`."""
    found, expected = shortened(found), shortened(expected)
    return ValueError(
        f"{who}.forward takes another branch for this micro-batch: {name} gave {found}, but {expected} when the model "
        f"was traced; keep decisions by values within one layer: {whole}"
    )


def reads_changing(model: nn.Module, where: str, what: str) -> ValueError:
    """The error for a forward that gives Python a number which is another one for each micro-batch. where: its path."""
    caller = model.get_submodule(where)
    who = f"{type(caller).__name__} {where!r}" if where else type(caller).__name__
    return ValueError(
        f"{who}.forward gives Python the value of {what} so that it is another one for each micro-batch, and stages "
        f"would repeat that of the first; compute with tensors, or keep it whole: {kept_whole(model, where)}"
    )


def kept_whole(model: nn.Module, path: str) -> str:
    """Return the option that keeps a module, and all of its class (which decide alike), as one call each."""
    kind = type(model.get_submodule(path))
    paths = [name for name, module in walked(model).items() if type(module) is kind]
    return f"stages=pipeback.Splitting(leaves={paths!r})" + (" (the whole model is one stage then)" if not path else "")


def one_call(model: nn.Module, callers: Iterable[str]) -> str:
    """Return the option that keeps consecutive calls within one module that is not traced into.

    callers: the paths of the modules that make these calls.
    """
    steps = zip(*(path.split(".") for path in callers), strict=False)
    path = ".".join(step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps))
    while path and isinstance(model.get_submodule(path), (nn.ModuleList, nn.ModuleDict)):  # these are never called
        path = path.rpartition(".")[0]
    return "keep all between whole: " + (
        f"stages=pipeback.Splitting(leaves={[path]!r})" + ("" if path else " (the whole model is one stage then)")
    )


def left_out(model: nn.Module, where: str, target: str) -> ValueError:
    """The error for a call of a module that the example did not call."""
    kind, caller = type(model.get_submodule(target)).__name__, model.get_submodule(where)
    who = f"{type(caller).__name__} {where!r}" if where else type(caller).__name__
    return ValueError(
        f"{who}.forward calls {kind} {target!r} for this micro-batch, but did not for the example, so that no "
        f"stage has it; give an example= for which it does, or keep what calls it whole: "
        f"{kept_whole(model, where)}"
    )


def drops_layers(model: nn.Module, where: str) -> ValueError:
    """The error for a module that draws a random number and decides by it which layers run. where: its path."""
    caller, config = model.get_submodule(where), getattr(model, "config", None)
    names = [key for key, value in vars(config or nn.Module()).items() if "layerdrop" in key and value]
    off = "model.config.layerdrop = 0.0" if names == ["layerdrop"] else " and ".join(f"{name}=0.0" for name in names)
    off = off if not names or names == ["layerdrop"] else f"build the model from a config with {off}"
    who = f"{type(caller).__name__} {where!r}" if where else type(caller).__name__
    return ValueError(
        f"{who}.forward draws a random number and decides by it which layers run, as layer drop does, so that the same "
        f"layers do not run for every micro-batch and it cannot be cut; {f'switch that off: {off}, or ' if off else ''}"
        f"keep it whole: {kept_whole(model, where)}"
    )


def draws_outside(model: nn.Module, where: str) -> ValueError:
    """The error for a module that computes by random numbers of Python or numpy. where: its path."""
    caller = model.get_submodule(where)
    who = f"{type(caller).__name__} {where!r}" if where else type(caller).__name__
    return ValueError(
        f"{who}.forward computes by random numbers of Python or numpy, as layer drop may do, and its stages would "
        f"repeat those of one micro-batch for all; switch that off, or keep it whole: {kept_whole(model, where)}"
    )


def cure_whole(where: str) -> str:
    """Return the cure that keeps the module of this path whole."""
    if where:
        return f"keep it whole: stages=pipeback.Splitting(leaves=[{where!r}])"
    return (
        "put that into a module of its own, which is not looked into, and whose path you give in "
        "stages=pipeback.Splitting(leaves=[...]), or keep the "
        "whole model one stage: stages=pipeback.Splitting(leaves=[''])"
    )
