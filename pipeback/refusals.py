"""What a forward does that nobody can follow, in words, with what helps."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def unmade(who: str, where: str, what: str, value: Tensor) -> ValueError:
    """A tensor that came from nowhere. who: names the module of the path `where`; what: is given the tensor."""
    return ValueError(
        f"{who}.forward gives {what} a tensor {tuple(value.shape)} that no torch function or module has made from its "
        f"input, as numpy does: {_whole(where)}"
    )


def shared(who: str, where: str, what: str, value: Any) -> ValueError:
    """An object that cannot be made anew."""
    return ValueError(
        f"{who}.forward gives {what} an object of {type(value).__name__}, which every micro-batch would share; leave "
        f"it out, or give tensors, numbers and strings, or {_whole(where)}"
    )


def away(who: str, where: str, name: str) -> ValueError:
    """A tensor leaves torch."""
    return ValueError(
        f"{who}.forward calls Tensor.{name}, where nobody can follow; keep to torch functions, or {_whole(where)}; a "
        "loss that does so is computed outside: push without labels, and give loss= to Pipeline"
    )


def set_anew(who: str, name: str) -> ValueError:
    """A weight that trains gets other memory."""
    return ValueError(
        f"{who}.forward sets the data of {name!r}, which trains, and whose optimizer would go on with the old data; "
        "write into it under torch.no_grad(), with copy_(), or freeze it with requires_grad_(False)"
    )


def _whole(where: str) -> str:
    if where:
        return f"keep it whole: leaves=[{where!r}]"
    return "put that into a module of its own, which is not looked into, and whose path you give in leaves="
