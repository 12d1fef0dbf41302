"""Loose sizes: the tensors of a trace whose size depends on values, and the checks of those sizes that Python reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeback.splitting.call_trace import Call
from pipeback.splitting.data_sizes import makes, sizes
from pipeback.tensors.structures import Ref


class LooseSizes:
    """Marks what depends on a call that makes a size out of values. numbers: those of the marked tensors."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self._checked: set[int] = set()
        self._makes = False  # whether the running call has made such a tensor

    def look(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A torch function is called, alone or within a leaf."""
        self._makes = self._makes or makes(name, args, kwargs)

    def made(self, call: Call) -> None:
        """Mark the output of a call that has ended."""
        if self._makes or (self.numbers and any(ref.number in self.numbers for ref in call.refs())):
            self.numbers.update(call.out)
        self._makes = False

    def checks(self, tensor: Any, known: Mapping[int, int], where: str) -> Call | None:
        """Return a check of a size that Python reads, if it depends on values and is not checked yet.

        known: the numbers of tensors by identity. where: the path of the module that reads it.
        """
        number = known.get(id(tensor))
        if number is None or number not in self.numbers or number in self._checked:
            return None
        self._checked.add(number)
        return Call(sizes, (Ref(number),), {}, where, False, check=(sizes(tensor),))

    def unchecks(self, tensor: Tensor, known: Mapping[int, int], calls: Sequence[Call]) -> bool:
        """Whether the last call is a check of the size of this tensor; it can then be checked again."""
        ref = Ref(known.get(id(tensor), -1))
        if not calls or calls[-1].target is not sizes or calls[-1].args != (ref,):
            return False
        self._checked.discard(ref.number)
        return True
