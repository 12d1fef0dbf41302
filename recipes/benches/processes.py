"""Times two ranks, each a process of one thread, on two cores.

The ideal is two independent single-process copies that run at once: together they do twice the micro-batches of one
under the same contention. All contenders take turns within the same two processes. The peers, of
torch.distributed.pipelining, step once per flush of 4 or 8 micro-batches, as our gpipe and one_f_one_b beside them; pb
steps after every one. With 8 there are also schedules whose ranks hold two parts each, or whose backward is split.

    pipeback bench processes cases=large repeats=9      # cases: large, small
    pipeback bench processes fused=true                 # all optimizers are torch's fused SGD, instead of by foreach
"""

from __future__ import annotations

import statistics
import sys

from pipeback.recipes.benches.contenders import FLUSHES, MORE_PEERS, PEERS, Case, alone, together
from pipeback.recipes.benches.turns import Rates, everywhere, join, on_ranks, spread, take_turns
from pipeback.recipes.markdown import table

CASES = (
    Case("large", width=256, length=64, samples=4, turn=48),
    Case("small", width=64, length=16, samples=2, turn=288),
)
IDEAL = "two copies of pb"


def main(repeats: int, cases: str = "", fused: str = "false") -> None:
    if fused not in ("true", "false"):
        sys.exit(f"pipeback bench: fused={fused}: true or false")
    for case in named(cases) if cases else CASES:
        case = case._replace(fused=fused == "true")
        rates, weights, whole = on_ranks(measured, case, repeats)
        print(f"\n{case.layers} transformer layers of width {case.width}, sequence {case.length}, "
              f"micro-batch {case.samples}:\n")  # fmt: skip
        print("\n\n".join(tables(rates)))
        shares = ", ".join(f"{some / whole:.1%}" for some in weights)
        print(f"\nWeights that a rank holds, of {whole / 1e6:.1f} MB: {shares}.", flush=True)


def named(words: str) -> list[Case]:
    """The cases of an option, as it is typed."""
    known = {case.name: case for case in CASES}
    if unknown := [word for word in words.split(",") if word not in known]:
        sys.exit(f"pipeback bench: there is no case {unknown[0]!r}; there are cases={','.join(known)}")
    return [known[word] for word in words.split(",")]


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


def tables(rates: Rates) -> tuple[str, str]:
    """All over two copies, and ours over their peers."""
    rows = [[name, f"{1e3 / statistics.median(some):.2f}", over(some, rates[IDEAL])] for name, some in rates.items()]
    first = FLUSHES[0]
    peers = (rates[f"{peer.__name__} {first}"] for peer in PEERS.values())
    better = max(peers, key=statistics.median)  # of all rounds: the best of each round would be chosen by noise
    links = (f"pb, {link}" for link in ("threads", "gloo", "shared_memory"))
    beside = [[name, f"the better peer at {first}", over(rates[name], better)] for name in links]
    for flush in FLUSHES:
        for name, peer in PEERS.items():
            ours, theirs = f"{name} {flush}", f"{peer.__name__} {flush}"
            beside.append([ours, theirs, over(rates[ours], rates[theirs])])
    flush = FLUSHES[-1]
    for name, (schedule, _) in MORE_PEERS.items():
        ours, theirs = f"{name} {flush}", f"{schedule.__name__} {flush}"
        if ours in rates and theirs in rates:
            beside.append([ours, theirs, over(rates[ours], rates[theirs])])
    flushing = {name: some for name, some in rates.items() if name.endswith(f" {flush}")}
    best = max(flushing, key=lambda name: statistics.median(flushing[name]))
    beside.append(["pb, shared_memory", f"the best at {flush}: {best}", over(rates["pb, shared_memory"], rates[best])])
    return (
        table(["", "ms/micro-batch", "of two copies"], rows),
        table(["", "over", "samples per second"], beside, left=(0, 1)),
    )


def over(some: list[float], others: list[float]) -> str:
    """The ratios of the rounds."""
    return spread([a / b for a, b in zip(some, others, strict=True)])
