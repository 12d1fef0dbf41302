"""Times two ranks, each a process of one thread, on two cores.

The ideal is two independent single-process copies that run at once: together they do twice the micro-batches of one
under the same contention. All contenders take turns within the same two processes. The peers, of
torch.distributed.pipelining, step once per flush of 4 or 8 micro-batches, as our gpipe and one_f_one_b beside them; pb
steps after every one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from pipeback.recipes.benches.contenders import FLUSHES, PEERS, Case, alone, together
from pipeback.recipes.benches.turns import Rates, everywhere, join, on_ranks, take_turns

CASES = (
    Case("large", width=256, length=64, samples=4, turn=48),
    Case("small", width=64, length=16, samples=2, turn=288),
)
IDEAL = "two copies of pb"


def main(repeats: int, cases: Iterable[Case] = CASES) -> None:
    for case in cases:
        rates, weights, whole = on_ranks(measured, case, repeats)
        print(f"two processes, two cores, one thread each: {case.layers} transformer layers of width {case.width}, "
              f"sequence {case.length}, micro-batch {case.samples}")  # fmt: skip
        table(rates)
        shares = ", ".join(f"{some / whole:.1%}" for some in weights)
        print(f"weights that a rank holds, of {whole / 1e6:.1f} MB: {shares}\n", flush=True)


def measured(rank: int, store: str, case: Case, repeats: int) -> tuple[Rates, list[int], int]:
    """Rates, and bytes of weights on every rank and of the whole model."""
    contenders = alone(case, rank)
    join(rank, store)
    contenders |= together(case, rank)
    rates = take_turns(contenders, repeats)
    pipe = contenders["pb, shared_memory"].pipe
    assert pipe is not None
    weights = everywhere(pipe.memory().weights)
    for contender in contenders.values():
        if contender.pipe is not None:
            contender.pipe.close()
    return rates, weights, sum(p.nbytes for p in case.model().parameters())


def table(rates: Rates) -> None:
    print(f"{'':<20}{'ms/micro-batch':>18}{'of two copies':>16}{'   spread':>16}")
    for name, some in rates.items():
        print(f"{name:<20}{1e3 / statistics.median(some):>18.2f}{ratio(some, rates[IDEAL])}")
    first = FLUSHES[0]
    peers = (rates[f"{peer.__name__} {first}"] for peer in PEERS.values())
    better = max(peers, key=statistics.median)  # of all rounds: the best of each round would be chosen by noise
    for link in ("threads", "gloo", "shared_memory"):
        over(f"pb, {link}", rates, better, f"the better peer at {first}")
    for flush in FLUSHES:
        for name, peer in PEERS.items():
            theirs = f"{peer.__name__} {flush}"
            over(f"{name} {flush}", rates, rates[theirs], theirs)


def over(name: str, rates: Rates, theirs: list[float], whose: str) -> None:
    print(f"{name:<20}{'over ' + whose:>26}{ratio(rates[name], theirs, 8)}")


def ratio(some: list[float], others: list[float], width: int = 16) -> str:
    """The median of the rounds' ratios, and their spread."""
    ratios = [a / b for a, b in zip(some, others, strict=True)]
    return f"{statistics.median(ratios):>{width}.2f}{min(ratios):>10.2f} … {max(ratios):.2f}"
