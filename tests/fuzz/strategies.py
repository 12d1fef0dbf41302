"""Programs, drawn by hypothesis, which also shrinks one that fails: simple things come first in every choice."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pipeback.vectorized.stacks.choose_stacks import streams_flushes

from .cases import METHODS, OPTIMIZERS, allows, most_workers, optimizers, stepping
from .models import ALIKE, FOLLOWED, MODELS, OWN_WEIGHTS, RANDOM
from .odd_options import ODD
from .pending import PENDING
from .program import Program

LOADING = ("reload", "move", "load", "drop", "interrupt", "reopen")
DECAY = [name for name, (_, _, options) in OPTIMIZERS.items() if "maximize" not in options]


def often(plain: Any, other: st.SearchStrategy[Any], times: int = 2) -> st.SearchStrategy[Any]:
    """`plain`, so many times as often as something of `other`."""
    return st.sampled_from([False] * times + [True]).flatmap(lambda use: other if use else st.just(plain))


@st.composite
def _options(draw: st.DrawFn) -> dict[str, Any]:
    """Options that change numbers, those that are as they are left out."""
    found = {
        "micro_batch_size": draw(st.sampled_from([None, None, 1, 2, 3])),
        "clip_norm": draw(often(None, st.sampled_from([0.3, 1.0]), 3)),
        "clip_value": draw(often(None, st.sampled_from([0.02, 0.2]), 5)),
        "weights": draw(often(None, st.just("samples"), 3)),
        "activations": draw(often(None, st.just("recompute"), 4)),
        "replicas": draw(often(None, st.just(2), 7)),
        "check_finite": draw(often(None, st.just(True), 7)),
    }
    return {name: value for name, value in found.items() if value is not None}


@st.composite
def _as_one(draw: st.DrawFn, model: str, stages: int, method: str, workers: int) -> dict[str, Any]:
    """Stages that run as one, and what goes with them."""
    library = METHODS[method].library(stages)
    found = draw(st.sampled_from([{}, {}, {"masters": True}, {"store": "host"}, {"store": "disk"}]))
    if "store" in found:
        found["ahead"] = draw(st.sampled_from([3, 5, 9]))  # stages: two at least have room
    if library.chunks == 1 and draw(st.booleans()):
        found["workers"] = draw(st.integers(1, workers))
    # a worker may have no two stages that are alike, as times decide, and then `True` is refused
    demands = model in ALIKE and "workers" not in found and not ("store" in found and streams_flushes(library))
    found["vectorize"] = draw(st.sampled_from([True, "auto"])) if demands else "auto"
    return found


@st.composite
def _runtime(
    draw: st.DrawFn, model: str, stages: int, method: str, options: dict[str, Any], workers: int
) -> dict[str, Any]:
    """Options that change no number."""
    if stages > 3 and draw(st.sampled_from([False] * 5 + [True])):
        return draw(_as_one(model, stages, method, workers))
    found: dict[str, Any] = {}
    if draw(st.booleans()):
        found["order"] = draw(st.sampled_from(["upstream", "sticky", "random", "skewed"]))
    if found.get("order") == "skewed":  # which is for stages that run as one, and goes with what they go with
        return found if not options.get("replicas") else {}
    if draw(st.booleans()):
        found["workers"] = draw(st.integers(1, workers))
    if draw(st.booleans()) and "activations" not in options:
        found["activations"] = "host"
    found |= draw(st.sampled_from([{}, {}, {"store": "host"}, {"masters": True}, {"store": "disk"}]))
    return found


@st.composite
def _calls(draw: st.DrawFn, program: dict[str, Any], wanted: str) -> tuple[tuple[Any, ...], ...]:
    even = program["options"].get("replicas", 1)
    samples = st.integers(1, 7).map(lambda n: n * even)
    if program["model"] == "batch":
        samples = st.integers(2, 5).map(lambda n: n * 2 * even)
    push = st.tuples(st.just("push"), samples)
    other = _neutral(program, samples) + _changing(program, samples)
    some = [call for name, call in ((str(call), call) for call in other) if wanted and f"'{wanted}'" in name]
    # drawn, and not `one_of`, which would take each of `other` for as likely as a push
    kinds = st.sampled_from([push, push, st.one_of(other), *some]).flatmap(lambda kind: kind)
    calls = draw(st.lists(kinds, min_size=8 if wanted else 1, max_size=18))
    if any(name == "eval" for name, *_ in calls):  # a state in flight is loaded in the mode that its forward was in
        calls = [call for call in calls if call[0] not in LOADING]
    if any(name == "cast" for name, *_ in calls):
        calls = [call for call in calls if call[0] != "move"]
    return tuple(calls)


def _call(name: str, *values: Any) -> st.SearchStrategy[Any]:
    """A call with its arguments; each a value, a list to draw from, or a strategy."""
    drawn = [
        v if isinstance(v, st.SearchStrategy) else st.sampled_from(v if isinstance(v, list) else [v]) for v in values
    ]
    return st.tuples(st.just(name), *drawn)


def _neutral(program: dict[str, Any], samples: st.SearchStrategy[int]) -> list[st.SearchStrategy[Any]]:
    """Calls that must not change a number."""
    runtime = program["runtime"]
    stage, inside = st.integers(0, program["stages"] - 1), not program["outside"]
    found = [_call(name) for name in ("wait", "look", "zero_grad", "reload", "save", "read", "fork", "drop")]
    found += [_call("evaluate", samples), _call("inspect", ["memory", "ledger", "traffic", "owner"])]
    found += [_call("damaged", ["bit", "short", "name", "place", "far"])]
    if inside:
        found += [_call("inspect", ["plan", "breakdown"]), _call("bad"), _call("replace", stage), _call("interrupt")]
        found += [_call("foreign")] if program["stages"] > 1 else []  # else none would be trained
    if inside and not {"vectorize", "order"} & set(runtime):
        found += [_call("move", st.integers(0, most_workers(program["method"], program["stages"])))]
    if not runtime.get("vectorize"):
        found += [_call("inspect", "record")]
    if "store" not in runtime:
        found += [_call("own_backward")]
    if runtime.get("store") == "disk":
        found += [_call("reopen", [False, True], [False, True])]
    if program["form"] not in FOLLOWED and program["model"] != "spare":
        found += [_call("export", [False, True])]
    return found


def _changing(program: dict[str, Any], samples: st.SearchStrategy[int]) -> list[st.SearchStrategy[Any]]:
    """Calls that change numbers, as the equations tell."""
    stage, inside = st.integers(0, program["stages"] - 1), not program["outside"]
    found = [_call(name) for name in ("drain", "load", "eval", "train")]
    found += [_call("rate", [0.5, 1.5, 0.0], st.none() | stage), _call("dropout", [0.0, 0.3])]
    if program["model"] != "sparse":  # torch has no decay for sparse gradients
        found += [_call("decay", [0.0, 0.02])]
    if program["model"] == "gated":
        found += [_call("gate", stage, [0.5, 1.25], ["drained", "replaced", "in flight"])] * 2
    batch = program["model"] == "batch"  # whose statistics need two samples for each replica
    if inside and not (batch and program["options"].get("replicas")):
        found += [_call("forms")]
    runtime = program["runtime"]
    kept = runtime.get("vectorize") or runtime.get("order") == "skewed"
    if inside and not batch and not kept:  # casts that cannot be made anew are refused
        found += [_call("cast", samples)]
    if inside and program["model"] not in RANDOM:
        found += [_call("listen", ["module", "weight", "step"], stage)]
    if inside and not program["options"].get("replicas") and "store" not in program["runtime"]:
        found += [_call("clear"), _call("fill")]
    return found


def _optimizers(method: str) -> list[str]:
    return [*optimizers(method), *(["halved"] if stepping(method) or allows(method, "halved") else [])]


def _methods(optimizer: str | None) -> list[str]:
    return [method for method in METHODS if optimizer is None or optimizer in optimizers(method)]


def _models(method: str) -> list[str]:
    """torch has sparse gradients for few optimizers, which not every method takes."""
    found = [name for name in MODELS if name != "sparse" or {"sgd", "momentum"} & set(optimizers(method))]
    return [name for name in found if name != "bounded" or method in OWN_WEIGHTS]


def programs(call: str = "", **fixed: Any) -> st.SearchStrategy[Program]:
    """Any program that the library claims to train, but those that meet a fault which is known and not yet mended.

    fixed: attributes that all of them have. call: one that is made often.
    """
    return _programs(fixed, call).filter(lambda program: not any(meets(program) for meets in PENDING.values()))


@st.composite
def _programs(draw: st.DrawFn, fixed: dict[str, Any], call: str) -> Program:
    if fixed.get("odd", draw(st.integers(0, 19)) == 19):
        return Program(odd=draw(st.sampled_from(ODD)))  # alone, so that nothing else is refused first
    method = fixed.get("method") or draw(st.sampled_from(_methods(fixed.get("optimizer"))))
    found: dict[str, Any] = {
        "model": fixed.get("model") or draw(st.sampled_from(_models(method))),
        "stages": draw(st.integers(4 if fixed.get("runtime") else 1, 6)),
        "seed": draw(st.integers(0, 99)),
        "form": fixed.get("form") or draw(st.sampled_from(["sequence", "list", "followed", "counted", "meta"])),
        "method": method,
        "optimizer": fixed.get("optimizer") or draw(st.sampled_from(_optimizers(method))),
        "decay": draw(st.sampled_from([0.0, 0.05])),
        "options": dict(fixed["options"]) if "options" in fixed else draw(_options()),
    }
    if found["model"] == "batch" and found["options"].get("micro_batch_size"):
        found["options"]["micro_batch_size"] = 2
    if found["model"] == "mixed" and found["form"] in FOLLOWED:
        found["form"] = "list"  # a followed model has no stage without weights: it would be cut elsewhere
    if found["model"] in ("spare", "tied") and found["form"] == "meta":
        found["form"] = "list"  # on the meta device torch expands and ties nothing
    if found["model"] == "sparse":  # torch has sparse gradients for few optimizers
        found |= {"optimizer": "sgd" if "sgd" in optimizers(method) else "momentum", "decay": 0.0}
    if fixed.get("runtime"):
        found["options"].pop("replicas", None)
    plain = not fixed.get("runtime") and set(found["options"]) <= {
        "micro_batch_size",
        "clip_norm",
        "clip_value",
        "activations",
    }
    found["outside"] = plain and draw(st.sampled_from([False] * 6 + [True]))
    workers = most_workers(method, found["stages"])
    if found["outside"]:
        as_one = found["stages"] > 3 and draw(st.booleans())
        others = draw(_as_one(found["model"], found["stages"], method, workers)) if as_one else {}
    else:
        others = draw(_runtime(found["model"], found["stages"], method, found["options"], workers))
    found["runtime"] = others
    found |= {name: value for name, value in fixed.items() if name == "runtime"}
    if not found["outside"] and not found["options"].get("replicas"):  # else it is no mean over the samples
        found["loss"] = fixed.get("loss") or draw(often("mse", st.just("sloping"), 5))
    if found["model"] == "bounded":  # what is written into copies of weights, or written twice, is refused
        found["options"] = {k: v for k, v in found["options"].items() if k != "activations"}
        found["runtime"] = {k: v for k, v in found["runtime"].items() if k not in ("store", "masters")}
    if found["model"] == "weighed":
        found["options"].pop("replicas", None)  # it computes by the number of samples, and each has a part of them
    found["calls"] = draw(_calls(found, call))
    return Program(**found)
