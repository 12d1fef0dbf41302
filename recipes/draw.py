"""Draw the schedule of a method: a text grid, and a picture if `out` names one.

    pipeback draw method=pb stages=4 micro_batches=8
    pipeback draw method=gpipe,one_f_one_b,pb stages=5 micro_batches=40 until=52 out=schedules.png
    pipeback draw method=pb stages=4 run=trace.json     # a real run on this machine, for ui.perfetto.dev

Options of a method go behind its name: method=pipedream:slack=2. For gpipe and one_f_one_b, flush= is the flush.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pipeback
from pipeback import draw
from pipeback.timeline import bubble, timeline

OPTIONS = {
    "method": "pb",
    "stages": 4,
    "micro_batches": 8,
    "flush": 8,
    "until": None,
    "width": 32,
    "out": None,
    "run": None,
}


def main() -> None:
    try:
        show(parsed(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"pipeback draw: {error}")


def parsed(arguments: list[str]) -> dict[str, Any]:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        sys.exit()
    options: dict[str, Any] = dict(OPTIONS)
    for argument in arguments:
        name, given, value = argument.partition("=")
        if not given or name not in OPTIONS:
            raise ValueError(f"{argument!r} is not an option; write one of {', '.join(f'{n}=' for n in OPTIONS)}")
        options[name] = value if name in ("method", "out", "run") else whole(name, value)
    return options


def whole(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, but is {value!r}")
    return int(value)


def show(options: dict[str, Any]) -> None:
    stages, count = options["stages"], options["micro_batches"]
    schedules = {}
    for entry in options["method"].split(","):
        method = build(entry, options["flush"])
        schedules[entry] = method.schedule
        print(f"{entry}: delays {method.delays(stages)}, idle "
              f"{bubble(timeline(method.schedule, stages, count)):.1%} over {count} micro-batches")  # fmt: skip
        print(draw.grid(method.schedule, stages, count, width=options["width"]), end="\n\n")
    if options["out"]:
        import matplotlib

        matplotlib.use("Agg")
        figure = draw.compare(schedules, stages, count, until=options["until"])
        figure.savefig(options["out"], dpi=130)
        print(f"written: {options['out']}")
    if options["run"]:
        record(build(options["method"].split(",")[0], options["flush"]), stages, count, Path(options["run"]))


def build(entry: str, flush: int) -> pipeback.Method:
    name, _, rest = entry.partition(":")
    given: dict[str, Any] = {}
    for pair in filter(None, rest.split(":")):
        key, _, value = pair.partition("=")
        given[key] = int(value) if value.lstrip("-").isdecimal() else value
    if name in ("gpipe", "one_f_one_b", "pipedream_2bw"):
        given.setdefault("micro_batches", flush)
    if name == "pipemare":
        given.setdefault("anneal", 100)
    return pipeback.methods.create(name, **given)


def record(method: pipeback.Method, stages: int, count: int, path: Path) -> None:
    """A real run of linear layers on two worker threads (one, if there is one stage), measured."""
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(stages)])
    pipe = pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        method=method, workers=min(2, stages),
    )  # fmt: skip
    x, y = torch.randn(64, 512), torch.randn(64, 512)
    for _ in range(5):
        pipe.push(x, y)
    pipe.record()
    for _ in range(count):
        pipe.push(x, y)
    written = draw.trace(pipe, path)
    print(f"written: {path}, {len(written['traceEvents'])} events; the workers were idle "
          f"{written['otherData']['bubble']:.1%} of the time")  # fmt: skip
    pipe.close()


if __name__ == "__main__":
    main()
