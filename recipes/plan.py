"""Plan a training before it begins: what it takes and holds, on devices that are here or not, and what to choose.

    pipeback plan gpt:13b devices=64xA100 tokens=300B                # options ranked; no model is built
    pipeback plan llama:70b devices=H100 in=30d                      # how many devices for so many days
    pipeback plan gpt:layers=48,width=8192,heads=64,context=2048 devices=8xH100 link=50GB/s host=1TB store=host,disk
    pipeback plan gpt:13b devices=64xA100 method=pb,zb_h1 stages=8,16 out=plan.html json=plan.json --explain 3
    pipeback plan stages=12 width=1024 store=host micro_batches=32   # linear layers of one size, built and rehearsed
    pipeback plan experiment=streaming_gpt device=H200               # a config of conf/, on a device that is not here
    pipeback plan window gpt:13b devices=H100                        # the batches with which streaming hides
    pipeback plan calibrate model.depth=8 out=slow.json              # what delays cost a small model, for calibrate=
    pipeback plan validate                                           # published measurements beside predictions
    pipeback plan fit                                                # the constants of the cost model, fitted anew

A model by name or by numbers
devices=        such as 64xA100, of the catalogue or a file of your own (PIPEBACK_CATALOGUE=FILE)
link=, host=    the network of a device, one way, 50GB/s or 400Gb/s; the host memory of all devices, 1TB
tokens=         to train on, 300B; 20 per parameter if it is left out. in=30d finds the fewest devices for so many days
method=, stages=, replicas=, tensor=, micro_batch=, recompute=, store=   one or several, or open if they are left out
batch=          samples per update; open if it is left out. critical_batch=2M, in tokens: beyond, batches gain little
optimizer=      adamw or sgd. precision= mixed or float. price= of a device per hour
calibrate=      a file of `pipeback plan calibrate`, whose price of delays is taken. constants= of the catalogue
out=, json=     plan.html is the whole page, plan.png its pictures; both: out=plan.html,plan.png. json= is all as data
explain=, top=  an option with every number's formula and inputs; how many options are listed

The model at hand
store=          device, host, disk (a temporary folder) or disk:FOLDER (a folder of its own, empty at first)
prefetch=       stages fetched ahead of the one at work
device_memory=, host_memory=    budgets, such as "1.5 GB"; a plan beyond them is refused, with the nearest that fits
device=         one of the catalogue that is not here: seconds are by its FLOP and bytes per second
run=            pushes to train; the bytes and the waiting that were measured are printed beside the prediction
method=, stages=, width=, samples= (of a micro-batch), micro_batches= (of a push), optimizer= (of torch.optim)

Options of a method at hand go after its name: method=pipedream:slack=2. With experiment=, everything but store,
prefetch, budgets, device and run goes to Hydra, as in `pipeback train`, and a push is a batch. In a script:
print(pipe.plan(x, y)), and pipeback.planner.search("gpt:13b", "64xA100").
"""

from __future__ import annotations

import sys
from importlib import import_module

from rich.console import Console

from pipeback.recipes import full_disk

PARTS = ("window", "calibrate", "validate", "fit")  # files of planning/ that a first word names


def main() -> None:
    words = sys.argv[1:]
    if any(word in ("-h", "--help") for word in words):
        print(__doc__)
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 170
    try:
        plain = [word for word in words if not word.startswith("-") and "=" not in word.partition(":")[0]]
        if words[:1] and words[0] in PARTS:
            part, rest = words[0], words[1:]
        else:
            part, rest = ("asking" if plain and not plain[0].isdecimal() else "hand"), words
        with full_disk.writing():
            import_module(f"pipeback.recipes.planning.{part}").main(rest, console)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        sys.exit(f"pipeback plan: {full_disk.told(error)}")


if __name__ == "__main__":
    main()
