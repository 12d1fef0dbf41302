"""Dataflow: what each stage of a traced model computes, receives and sends, for one form of micro-batch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from torch import Tensor

from pipeback.splitting.call_trace import Call, CallTrace
from pipeback.splitting.input_forms import loosened
from pipeback.splitting.ownership import Ownership
from pipeback.splitting.segment import SegmentWork


def hand_along(
    record: CallTrace,
    staged: Iterable[tuple[int, Call]],
    ownership: Ownership,
    labels: Sequence[str],
    mark: Tensor | None,
    checked: Container[int],
) -> list[tuple[SegmentWork, list[tuple[Any, Any]]]]:
    """Return for every stage its work, and (shape, dtype) of each tensor that it receives, see `input_forms`.

    staged: every call of the record with its stage. labels: the names of the stages. mark: a tensor that travels with
    every micro-batch, if there are variants. checked: numbers of decisions that are evaluated at the push, so that no
    stage checks them. Raises ValueError naming a stage that gives nothing to a later one.
    """
    n, forms = len(labels), list(record.forms)
    calls: list[list[Call]] = [[] for _ in range(n)]
    made = dict.fromkeys(range(record.inputs), -1)  # the stage that makes a value
    until = dict.fromkeys(record.out, n)  # the last stage that needs it
    lends: list[dict[str, int]] = [{} for _ in range(n)]
    borrows: list[dict[str, int]] = [{} for _ in range(n)]
    numbers: dict[int, int] = {}  # numbers of the weights that travel, by identity
    asked = 0
    for s, call in staged:
        if call.check is None or asked not in checked:
            calls[s].append(call)
        asked += call.check is not None
        for ref in call.refs():
            until[ref.number] = max(until.get(ref.number, 0), s)
        for number in call.out:
            made[number] = s
        for local, p in ownership.borrowed(s, call):
            if id(p) not in numbers:
                owner = ownership.owner[id(p)]
                numbers[id(p)] = number = len(forms)
                forms.append((p.shape, p.dtype))
                made[number], lends[owner][ownership.names[id(p)]] = owner, number
            borrows[s][local] = numbers[id(p)]
            until[numbers[id(p)]] = max(until.get(numbers[id(p)], 0), s)
    marks = [] if mark is None else [len(forms)]
    forms += [] if mark is None else [(mark.shape, mark.dtype)]
    takes, found = [*range(record.inputs), *marks], []
    for s, label in enumerate(labels):
        last = s == n - 1
        gives = record.out if last else sorted(v for v, end in until.items() if made[v] <= s < end)
        if not gives:
            raise ValueError(f"{label} gives nothing that a later stage would take; cut elsewhere")
        gives = gives if last else gives + marks
        fixed = {v for v in takes if v < len(record.grads) and not record.grads[v]}
        still = frozenset() if last else frozenset(v for v in gives if v < len(record.grads) and not record.grads[v])
        portion = SegmentWork(
            calls[s], takes, gives, fixed, lends[s], borrows[s], record.constants, record.form if last else None,
            record.device, still,
        )  # fmt: skip
        found.append((portion, [loosened(forms[v]) if v in record.loose else forms[v] for v in takes]))
        takes = gives
    return found
