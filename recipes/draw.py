"""Draws the schedule of a method, a measured run of it, or the stages of a model, as text, pictures and traces.

    pipeback draw method=pb stages=4 micro_batches=8                         # a text grid
    pipeback draw method=gpipe,one_f_one_b,pb stages=5 micro_batches=40 until=52 out=schedules.png
    pipeback draw method=gpipe,pb stages=8 ranks=2 micro_batches=64 window=16 --run run.json out=run.png
    pipeback draw method=gpipe stages=8 micro_batches=4 store=host --run run.json out=streaming.png
    pipeback draw trace=run.json out=run.png                                 # a recorded run, once more
    pipeback draw model=resnet50 stages=block method=cerebras out=stages.png # layers, FLOPs, seconds, delays

--run trains linear layers of one size on that many processes of this machine, from an empty pipeline until it is empty
again, and prints how much the ranks idled beside what the schedule predicts. It writes one trace per method
(run-gpipe.json and run-pb.json; run.json if there is one method), and the timelines as a picture to `out`, of
window= micro-batches in the middle of the run, where it is steady, or of all. With store=, weights are streamed, all
micro-batches are pushed at once, and the picture shows what overlaps. For your own script: pipe.record() before the
pushes, and pipeback.draw.trace(pipe, "run.json") on every rank after them.

model= is a model of `pipeback zoo` or of conf/model; stages= is then auto, block, layer, sublayer or a number. One
micro-batch is rehearsed to measure activations and FLOPs (of products, convolutions and attention); its seconds are a
median of repeats, with quartiles. out= may also end in .txt, .md or .csv, or name several files. For your own pipeline,
pipe.breakdown(x, y) gives a row per stage.

Traces are for ui.perfetto.dev. Options of a method go after its name: method=pipedream:slack=2. flush= is the number of
micro-batches per flush of methods that flush.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import pipeback
from pipeback import draw
from pipeback.draw import perfetto as traces
from pipeback.draw.streaming_lanes import lanes
from pipeback.draw.worker_bands import beside
from pipeback.recipes import full_disk
from pipeback.recipes.measure import run
from pipeback.recipes.output_files import writable
from pipeback.schedules.placement import Placed, place
from pipeback.schedules.recording import Recording
from pipeback.schedules.timeline import bubble, timeline

OPTIONS = {
    "method": "pb",
    "stages": 4,
    "micro_batches": 8,
    "flush": 8,
    "until": None,
    "width": 32,
    "out": None,
    "run": None,
    "ranks": None,
    "store": None,
    "trace": None,
    "window": None,
    "model": None,
}
TEXTS = {"method", "out", "run", "store", "trace", "model"}
CUTS = ("auto", "block", "layer", "sublayer")


def main() -> None:
    try:
        with full_disk.writing():
            show(parsed(sys.argv[1:]))
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        sys.exit(f"pipeback draw: {full_disk.told(error)}")


def parsed(arguments: list[str]) -> dict[str, Any]:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        sys.exit()
    options, given_ones = dict[str, Any](OPTIONS), set[str]()
    for argument in plain(arguments):
        name, given, value = argument.partition("=")
        if not given or name not in OPTIONS:
            names = ", ".join(f"{n}=" for n in OPTIONS)
            near = get_close_matches(name, OPTIONS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{argument!r} is not an option{hint}; write one of {names}")
        words = name in TEXTS or (name == "stages" and value in CUTS)
        options[name] = value if words else whole(name, value)
        given_ones.add(name)
    if options["model"] is not None:
        return of_model(options, given_ones)
    if options["stages"] in CUTS:
        raise ValueError(f"stages={options['stages']} is for a model; add model=, or give a number")
    if options["store"] is not None and options["run"] is None:
        raise ValueError("store= is for a real run; add --run")
    if options["window"] is not None and options["run"] is None and options["trace"] is None:
        raise ValueError("window= is for a measured run; add --run or trace=")
    if options["window"] is not None and options["store"] is not None:
        raise ValueError("window= does not go with store=, which pushes all micro-batches at once; leave it out")
    if options["window"] is not None and options["run"] and options["window"] > options["micro_batches"] // 2:
        raise ValueError(
            f"window={options['window']} is more than the middle half of micro_batches={options['micro_batches']}, "
            f"where a run is steady; add micro_batches={4 * options['window']}"
        )
    if options["ranks"] is None:
        options["ranks"] = 1 if options["store"] else min(2, options["stages"])
    elif options["run"] is None:
        raise ValueError("ranks= is for a real run; add --run")
    if options["ranks"] > options["stages"]:
        raise ValueError(f"ranks={options['ranks']} is more than stages={options['stages']}; every rank needs a stage")
    return options


def of_model(options: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Return the options that go with model=. Raises ValueError for options that do not."""
    for name in ("micro_batches", "until", "width", "run", "ranks", "store", "trace", "window"):
        if name in given:
            raise ValueError(
                f"{name}= does not go with model=, which shows the stages of one micro-batch; leave it out"
            )
    if "," in options["method"]:
        raise ValueError(f"method={options['method']}: model= shows the delays of one method; name one")
    return options if "stages" in given else {**options, "stages": "auto"}


def plain(arguments: list[str]) -> list[str]:
    """Return all options as name=value, from --name=value and --name value, too; a bare --run is run=run.json."""
    found, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            if not given and rest and not begins(rest[0]):
                value = rest.pop(0)
            elif not given and name == "run":
                value = "run.json"
            elif not given:
                raise ValueError(f"{word} needs a value, {word}=…")
            word = f"{name.replace('-', '_')}={value}"
        elif "=" not in word and begins(word):
            word = f"method={word}"
        found.append(word)
    return found


def begins(word: str) -> bool:
    """Whether a word begins an option, and is not the value of the one before."""
    name, given, _ = word.partition("=")
    return word.startswith("--") or (bool(given) and name in OPTIONS) or word in pipeback.methods.available()


def whole(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        words = f", or one of {', '.join(CUTS)} beside model=" if name == "stages" else ""
        raise ValueError(f"{name} must be a whole number of at least 1{words}, but is {value!r}")
    return int(value)


def show(options: dict[str, Any]) -> None:
    stages, count = options["stages"], options["micro_batches"]
    out = options["out"].split(",") if options["out"] else []
    if options["model"]:
        from pipeback.recipes import stages as table

        for file in out:
            picturable(file, table.TEXTS)
        table.show(options["model"], stages, build(options["method"], options["flush"]), out)
        return
    for file in out:
        picturable(file)
    if options["trace"]:
        tell([traces.read(path) for path in options["trace"].split(",")], out, options["window"])
        return
    methods = {entry: build(entry, options["flush"]) for entry in options["method"].split(",")}
    schedules = {entry: scheduled(entry, method, stages) for entry, method in methods.items()}
    for entry, method in methods.items():
        check_flush(entry, method, stages, options["flush"])
    paths = files(options["run"], list(methods)) if options["run"] else {}
    for entry, method in methods.items():
        schedule = schedules[entry]
        owner = schedule.placement.owner if isinstance(schedule, Placed) else None
        print(f"{entry}: delays {method.delays(stages)}, idle "
              f"{bubble(timeline(schedule, stages, count), owner):.1%} over {count} micro-batches"
              f"{'' if owner is None else f', workers of stages {owner}'}")  # fmt: skip
        print(draw.grid(schedule, stages, count, width=options["width"]), end="\n\n")
    if paths:
        run(
            {entry: (methods[entry], str(path)) for entry, path in paths.items()},
            options["ranks"],
            stages,
            count,
            options["store"],
        )
        tell([traces.read(path) for path in paths.values()], out, options["window"])
        print(f"written: {', '.join(map(str, paths.values()))}, for ui.perfetto.dev")
    elif out:
        pictures(partial(draw.compare, schedules, stages, count, until=options["until"]), out)


def check_flush(entry: str, method: pipeback.Method, stages: int, flush: int) -> None:
    """Raise ValueError if a method cannot run on so many stages, with the flush that it can, where there is one."""
    try:
        method.check_stages(stages)
    except ValueError as error:
        for more in range(flush + 1, flush + 8 * stages):
            try:
                build(entry, more).check_stages(stages)
            except ValueError:
                continue
            found = f"method={entry}: flush={flush} is too few for {stages} stages"
            raise ValueError(f"{found}; add flush={more}") from error
        raise


def scheduled(entry: str, method: pipeback.Method, stages: int) -> pipeback.Schedule:
    """The schedule of a method, one stage per worker, or one per part where its workers hold several."""
    if method.chunks == 1 or not method.by_worker:
        return method.schedule
    if stages % method.chunks:
        raise ValueError(
            f"method={entry}: stages={stages} are no multiple of the {method.chunks} that each worker holds; write "
            f"stages={stages + method.chunks - stages % method.chunks}"
        )
    return method.placed(method.schedule, place(method.placement, stages // method.chunks, range(stages)))


def tell(recordings: list[Recording], out: list[str], window: int | None) -> None:
    """Show the measured run beside the prediction, as text and, if `out` names files, as a picture.

    window: the micro-batches of the steady state that the picture shows; None: all of the run.
    """
    for recording in recordings:
        print(draw.summary(recording), end="\n\n")
    if out:
        streamed = [recording for recording in recordings if any(track.moves for track in recording.tracks)]
        pictures(partial(lanes, streamed[0]) if streamed else partial(beside, recordings, window), out)


def pictures(figure: Callable[[], Any], files: list[str]) -> None:
    """Draw a figure without a display, and write it into each file."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = figure()
    for file in files:
        drawn.savefig(file, dpi=130)
        print(f"written: {file}")


def picturable(out: str, more: Sequence[str] = ()) -> None:
    """Raise ValueError if a picture cannot be written there, since it is drawn last."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = [*more, *(f".{ending}" for ending in FigureCanvasBase.get_supported_filetypes())]
    if Path(out).suffix.lower() not in known:
        raise ValueError(f"out={out} must end in one of {', '.join(known)}")
    writable("out", Path(out))


def files(path: str, entries: list[str]) -> dict[str, Path]:
    """Return the file of each method's trace. Raises ValueError if one cannot be written."""
    first = Path(path)
    found = {
        entry: first if len(entries) == 1 else first.with_stem(f"{first.stem}-{re.sub('[^0-9a-z_]+', '-', entry)}")
        for entry in entries
    }
    for file in found.values():
        writable("run", file)
    return found


def build(entry: str, flush: int) -> pipeback.Method:
    name, _, rest = entry.partition(":")
    given: dict[str, Any] = {}
    for pair in filter(None, rest.split(":")):
        key, _, value = pair.partition("=")
        given[key] = int(value) if value.lstrip("-").isdecimal() else value
    asked = pipeback.methods.options(name).get("micro_batches")
    if asked is not None and asked.default in (None, asked.empty):  # else each push would be a flush, of one
        given.setdefault("micro_batches", flush)
    if name == "pipemare":
        given.setdefault("anneal", 100)
    return pipeback.methods.create(name, **given)


if __name__ == "__main__":
    main()
