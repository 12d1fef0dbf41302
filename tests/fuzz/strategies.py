"""Programs, drawn by hypothesis, which also shrinks one that fails: simple things come first in every choice."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .cases import METHODS, OPTIMIZERS, optimizers
from .models import ALIKE, MODELS, RANDOM
from .pending import PENDING
from .program import Program

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
def _runtime(draw: st.DrawFn, model: str, stages: int, options: dict[str, Any]) -> dict[str, Any]:
    """Options that change no number."""
    if stages > 3 and model in ALIKE and not options.get("replicas") and draw(st.sampled_from([False] * 8 + [True])):
        return {"vectorize": True}
    found: dict[str, Any] = {}
    if draw(st.booleans()):
        found["order"] = draw(st.sampled_from(["upstream", "sticky", "random", "skewed"]))
    if found.get("order") == "skewed":  # which is for stages that run as one, and goes with what they go with
        return found if not options.get("replicas") else {}
    if draw(st.booleans()):
        found["workers"] = draw(st.integers(1, min(3, stages)))
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
    rate = st.tuples(
        st.just("rate"), st.sampled_from([0.5, 1.5, 0.0]), st.none() | st.integers(0, program["stages"] - 1)
    )
    other = [
        st.tuples(st.just(name)) for name in ("wait", "look", "drain", "zero_grad", "reload", "save", "load", "read")
    ]
    other += [st.tuples(st.just("evaluate"), samples), rate, st.tuples(st.sampled_from(["eval", "train"]))]
    other.append(st.tuples(st.just("decay"), st.sampled_from([0.0, 0.02])))
    views = ["memory", "ledger", "traffic", "owner"]
    if not program["outside"]:
        views += ["plan", "breakdown"]
        other.append(st.tuples(st.just("bad")))
    if not program["runtime"].get("vectorize"):
        views.append("record")
    other.append(st.tuples(st.just("inspect"), st.sampled_from(views)))
    stage = st.integers(0, program["stages"] - 1)
    alone = not program["options"].get("replicas") and not program["outside"]
    other.append(st.tuples(st.just("dropout"), st.sampled_from([0.0, 0.3])))
    other.append(st.tuples(st.just("damaged"), st.sampled_from(["bit", "short", "name", "place"])))
    if not program["outside"]:
        other.append(st.tuples(st.just("replace"), stage))
        other += [st.tuples(st.just("foreign"))] if program["stages"] > 1 else []  # else none would be trained
        if program["model"] not in RANDOM:
            other.append(st.tuples(st.just("listen"), st.sampled_from(["module", "weight"]), stage))
    if "store" not in program["runtime"]:
        other.append(st.tuples(st.just("own_backward")))
        other += [st.tuples(st.just("clear")), st.tuples(st.just("fill"))] if alone else []
    some = [call for name, call in ((str(call), call) for call in other) if wanted and f"'{wanted}'" in name]
    # drawn, and not `one_of`, which would take each of `other` for as likely as a push
    kinds = st.sampled_from([push, push, st.one_of(other), *some]).flatmap(lambda kind: kind)
    calls = draw(st.lists(kinds, min_size=8 if wanted else 1, max_size=18))
    if any(name == "eval" for name, *_ in calls):  # a state in flight is loaded in the mode that its forward was in
        calls = [call for call in calls if call[0] not in ("reload", "load")]
    return tuple(calls)


def _methods(optimizer: str | None) -> list[str]:
    return [method for method in METHODS if optimizer is None or optimizer in optimizers(method)]


def programs(call: str = "", **fixed: Any) -> st.SearchStrategy[Program]:
    """Any program that the library claims to train, but those that meet a fault which is known and not yet mended.

    fixed: attributes that all of them have. call: one that is made often.
    """
    return _programs(fixed, call).filter(lambda program: not any(meets(program) for meets in PENDING.values()))


@st.composite
def _programs(draw: st.DrawFn, fixed: dict[str, Any], call: str) -> Program:
    method = fixed.get("method") or draw(st.sampled_from(_methods(fixed.get("optimizer"))))
    found: dict[str, Any] = {
        "model": fixed.get("model") or draw(st.sampled_from(list(MODELS))),
        "stages": draw(st.integers(4 if fixed.get("runtime") else 1, 6)),
        "seed": draw(st.integers(0, 99)),
        "form": draw(st.sampled_from(["sequence", "list", "followed"])),
        "method": method,
        "optimizer": fixed.get("optimizer") or draw(st.sampled_from(optimizers(method))),
        "decay": draw(st.sampled_from([0.0, 0.05])),
        "options": draw(_options()),
    }
    if found["model"] == "batch" and found["options"].get("micro_batch_size"):
        found["options"]["micro_batch_size"] = 2
    if found["model"] == "mixed" and found["form"] == "followed":
        found["form"] = "list"  # a followed model has no stage without weights: it would be cut elsewhere
    if fixed.get("runtime"):
        found["options"].pop("replicas", None)
    plain = not fixed.get("runtime") and set(found["options"]) <= {
        "micro_batch_size",
        "clip_norm",
        "clip_value",
        "activations",
    }
    found["outside"] = plain and draw(st.sampled_from([False] * 6 + [True]))
    found["runtime"] = {} if found["outside"] else draw(_runtime(found["model"], found["stages"], found["options"]))
    found |= {name: value for name, value in fixed.items() if name == "runtime"}
    if not found["outside"] and not found["options"].get("replicas"):  # else it is no mean over the samples
        found["loss"] = fixed.get("loss") or draw(often("mse", st.just("sloping"), 5))
    if found["model"] == "weighed":
        found["options"].pop("replicas", None)  # it computes by the number of samples, and each has a part of them
        # what is in host memory is not made anew
        for options in (found["options"], found["runtime"]):
            options.pop("activations", None)
    found["calls"] = draw(_calls(found, call))
    return Program(**found)
