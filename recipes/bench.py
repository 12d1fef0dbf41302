"""Measures speed and memory as ratios within one run: contenders take turns, and medians are printed.

    make bench                                 # all sections but stability and gpu
    pipeback bench processes repeats=9         # some sections; each is a file of benches/
    pipeback bench table networks=resnet20,narrow repeats=3 out=some.json

table       everything side by side: plain loops, our runtimes, torch.distributed.pipelining (the docs show it)
            options: networks= contenders= fused=true out=FILE read=FILE page=true; benches/table.py explains them
kernels     what that time is made of, on one device: products, update, other kernels, the rest (benches/kernels.py)
            options: networks= contenders=
scaling     cost per micro-batch and stage, by number of stages, delay and method; memory, measured and predicted; the
            same by length of a push; seconds of building, beginning, saving and loading up to 1,024 stages
            options: stages= methods= slack= micro_batches=
event_loop  one process, one thread, micro-batch 1: 20 blocks of width 64 and ResNet-20 over the plain PyTorch loop
vectorized  stages that are alike run as one, with and without torch.compile, over the plain loop
auto        vectorize=True and "auto" over the event loop, by method; and the speed-up by which "auto" decides
pushes      pushes of 256 micro-batches whose losses are read each time over one long push, as one and in the event
            loop; and of 1, 2 and 8 as one over the event loop
threads     two threads on two cores against two independent single-process copies that run at once
processes   two ranks against two such copies and against torch.distributed.pipelining; memory per rank
            options: cases= fused=true
streaming   stores in host memory and on disk against resident weights; bytes of sparse weights; fetches of PB
streamed_as_one
            stages that are alike and come from host memory, one by one and as one; pushed, and under Lightning
            options: store=disk, for those that come from disk, beside host memory
autocast    under autocast to bfloat16: a plain loop, stages one by one and as one; pushed, and under Lightning
splitting   seconds of cutting resnet50 into stages; the cost of passing dictionaries and long skips along
lightning_devices
            the strategy over two devices, in two threads and on one device, with stages one by one and as one
streamed_devices
            the same with weights in host memory
research    CPU milliseconds per update of 32 stages of width 48 under AdamW, by method, as sweeps train them
memory      weight copies and method state, measured and declared; memory after 100 and after 10,000 micro-batches
stability   largest stable ηλ on a quadratic, observed beside theory; only if it is named (benches/stability.py)
            options: methods= momenta= delays= out=FILE
lightning   the strategy, batches of 64 cut into 64 micro-batches: samples per second over Pipeline.push's
gpu         on one GPU: plain loops, one of them as a CUDA graph, pipelines with and without one, weights in host
            memory; only if it is named (benches/gpu.py)
            options: networks=
imports     `import pipeback` beyond `import torch`

    pipeback bench event_loop vectorized lightning against=../before repeats=30

against=PATH compares the sections event_loop, vectorized, lightning, research and imports with another source tree,
whose top folder is PATH: two processes, one per tree, train the same networks in turns (benches/against.py)
"""

from __future__ import annotations

import importlib
import sys

from pipeback.recipes import extras, full_disk
from pipeback.recipes.benches.network import settle
from pipeback.recipes.provenance import command, heading, load, provenance
from pipeback.streaming.sealed_file import FULL

SECTIONS = {
    name: name for name in (
        "table", "kernels", "scaling", "event_loop", "vectorized", "auto", "pushes", "threads", "processes",
        "streaming", "streamed_as_one", "autocast", "splitting", "research", "memory", "imports", "stability", "gpu",
        "lightning_devices", "streamed_devices",
    )
} | {"lightning": "under_lightning"}  # fmt: skip
NAMED = {"stability", "gpu"}  # sections that run only if they are named
OPTIONS = {
    "table": ("networks", "contenders", "out", "read", "page", "fused"),
    "kernels": ("networks", "contenders"),
    "gpu": ("networks",),
    "scaling": ("stages", "methods", "slack", "micro_batches"),
    "processes": ("cases", "fused"),
    "streamed_as_one": ("store",),
    "stability": ("methods", "momenta", "delays", "out"),
    **dict.fromkeys(("event_loop", "vectorized", "lightning", "research", "imports"), ("against",)),
}  # fmt: skip


def main() -> None:
    repeats, chosen, options = parsed(sys.argv[1:])
    settle()
    if "table" not in chosen:  # which tells its own, of now or of the file that it reads
        print(heading(command(), provenance() | {"threads": 1, "load": load()}))
        print(f"Medians of {repeats}; in brackets the smallest and the largest. No subnormal numbers.")
    compared = {name: options[name]["against"] for name in chosen if "against" in options.get(name, {})}
    if compared:
        from pipeback.recipes.benches import against

        print(flush=True)
        against.main(repeats, {name: SECTIONS[name] for name in compared}, next(iter(compared.values())))
    for name in (name for name in chosen if name not in compared):
        print(flush=True)
        try:
            with full_disk.writing():
                section = importlib.import_module(f"pipeback.recipes.benches.{SECTIONS[name]}")
                section.main(repeats, **options.get(name, {}))
        except OSError as error:
            if error.errno not in FULL:
                raise
            sys.exit(f"pipeback bench: {full_disk.told(error)}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("pipeback"):
                raise
            sys.exit(extras.needs(f"pipeback bench {name}", error))


def parsed(arguments: list[str]) -> tuple[int, list[str], dict[str, dict[str, str]]]:
    """Return repeats, sections and the options of each section; all sections if none is named."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        sys.exit()
    repeats, chosen, values = 9, [], {}
    for argument in arguments:
        name, given, value = argument.partition("=")
        if name == "repeats" and value.isdecimal() and int(value):
            repeats = int(value)
        elif name in SECTIONS and not given:
            chosen.append(name)
        elif given and value and any(name in some for some in OPTIONS.values()):
            values[name] = value
        else:
            sys.exit(f"pipeback bench: {argument!r} is not an option; there are {', '.join(SECTIONS)} and repeats=9, "
                     + ", ".join(f"and of {whose} {'= '.join(some)}=" for whose, some in OPTIONS.items()))  # fmt: skip
    options = {section: {n: v for n, v in values.items() if n in OPTIONS.get(section, ())} for section in chosen}
    for name in values:
        if not any(name in some for some in options.values()):
            whose = next(section for section, some in OPTIONS.items() if name in some)
            sys.exit(f"pipeback bench: {name}= is an option of {whose}; name that too: pipeback bench {whose} ...")
    return repeats, chosen or [name for name in SECTIONS if name not in NAMED], options


if __name__ == "__main__":
    main()
