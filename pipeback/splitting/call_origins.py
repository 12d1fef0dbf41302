"""Call origins: the calls of a trace that lead to a value by which Python decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeback.splitting.branches import alters
from pipeback.splitting.call_trace import Call, CallTrace

Makers = dict[int, list[Call]]  # the calls that have made or changed a tensor, by its number


class Decision(NamedTuple):
    """A call whose value decides, and where that value comes from."""

    call: Call
    makers: Makers  # those of all tensors so far
    leading: set[int]  # the numbers of all tensors that lead to the value
    inputs: int  # tensors with smaller numbers are given to the model, and made by no call

    @property
    def given(self) -> bool:
        """Whether the value depends on what is given to the model."""
        return any(number < self.inputs for number in self.leading)

    def calls(self) -> Iterator[Call]:
        """Yield the calls that lead to the value, and the deciding call itself; some of them twice."""
        yield self.call
        for number in self.leading:
            yield from self.makers.get(number, ())


def decided(record: CallTrace) -> Iterator[Decision]:
    """Yield the decisions of a forward in their order."""
    makers: Makers = {}
    for call in record.calls:
        refs = [ref.number for ref in call.refs()]
        if call.check is not None:
            yield Decision(call, makers, _leading(refs, makers), record.inputs)
        for number in call.out:
            makers[number] = [call]
        for number in refs if alters(call) else ():
            makers.setdefault(number, []).append(call)


def _leading(wanted: list[int], makers: Makers) -> set[int]:
    found: set[int] = set()
    left = list(wanted)
    while left:
        number = left.pop()
        if number not in found:
            found.add(number)
            left += [ref.number for call in makers.get(number, ()) for ref in call.refs()]
    return found
