"""Fits, drawn by hypothesis, which also shrinks one that fails: simple things come first in every choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pipeback.vectorized.stacks.eligible import flushes
from tests.fuzz.cases import EACH_PUSH, METHODS, most_workers, optimizers
from tests.fuzz.models import ALIKE, DRAWING, MODELS
from tests.fuzz.strategies import often

from .fit import Fit
from .module import QUIRKS, SCHEDULERS

# no stages of one function of weights, no weights written or shared, none without gradients: Lightning's own rules
MODELS_OF_FITS = [n for n in MODELS if n not in ("bounded", "spare", "weighed", "tied", "unused", "sparse")]


def _devices(method: str, stages: int) -> int:
    """The most that a fit may have: two, or as many as have their parts of the stages, which are neighbours."""
    library = METHODS[method].library(stages)
    return 2 if stages >= 2 * library.chunks and library.placement != "v" else 1


@st.composite
def _runtime(draw: st.DrawFn, method: str, stages: int) -> dict[str, Any]:
    """Options that change no number, but for the rounding of stages as one."""
    found: dict[str, Any] = {}
    library = METHODS[method].library(stages)
    vectorize = draw(st.sampled_from([None, "auto", True]))
    if draw(st.sampled_from([False, False, True])):
        found["devices"] = _devices(method, stages)
    elif library.chunks == 1 and draw(st.sampled_from([False, False, True])):
        found["workers"] = draw(st.integers(1, most_workers(method, stages)))
    if vectorize:  # a worker or device may have no two stages that are alike
        found["vectorize"] = "auto" if {"workers", "devices"} & set(found) else vectorize
    store = draw(st.sampled_from([None, None, "host", "disk"]))
    if store:
        found |= {"store": store, "ahead": draw(st.sampled_from([1, 1, 2, 3, 5]))}
    if not vectorize and draw(st.sampled_from([False] * 4 + [True])):
        found["activations"] = "host"
    return found


@st.composite
def _other(draw: st.DrawFn, method: str, stages: int, fit: Fit) -> dict[str, Any]:
    """Options with which it goes on. Stages that were as one go on as one, on as many devices."""
    if fit.as_one:
        # for all stages that were as one; flushes run stage by stage with a store
        room = {"ahead": 8, "vectorize": "auto"} if flushes(METHODS[method].library(stages)) else {"ahead": 8}
        return {**fit.runtime, **draw(st.sampled_from([{}, {"store": "host"} | room, {"store": "disk"} | room]))}
    one = [{}, {"store": "host"}, {"store": "disk"}]
    one += [] if "look" in fit.quirks else [{"vectorize": "auto"}]
    one += [{"workers": 2}] if METHODS[method].library(stages).chunks == 1 and most_workers(method, stages) > 1 else []
    one += [{"devices": 2}] * (_devices(method, stages) - 1)
    return draw(st.sampled_from(one))


@st.composite
def fits(draw: st.DrawFn) -> Fit:
    """Any fit that the strategy claims to train."""
    method = draw(st.sampled_from(list(METHODS)))
    optimizer = draw(st.sampled_from(optimizers(method)))
    model, stages = draw(st.sampled_from(MODELS_OF_FITS + list(ALIKE))), draw(st.integers(2, 6))
    whole = model == "batch"  # whose statistics need two samples
    batch = draw(st.sampled_from([4, 6, 8]) if whole else st.integers(1, 9))
    samples = draw(st.integers(2, 5)) * batch - (0 if whole else draw(st.integers(0, batch - 1)))
    runtime = draw(_runtime(method, stages))
    fit = Fit(
        kind=draw(st.sampled_from(["model", "model", "body", "own", "pair", "many"])), model=model, stages=stages,
        seed=draw(st.integers(0, 99)), method=method, optimizer=optimizer, decay=draw(st.sampled_from([0.0, 0.05])),
        samples=samples, batch=batch, size=draw(st.sampled_from([None, 2] if whole else [None, 1, 1, 2, 3])),
        epochs=draw(st.integers(1, 3)), accumulate=draw(st.sampled_from([1, 1, 2, 3])) if method in EACH_PUSH else 1,
        clip=draw(st.sampled_from([None, None, ("norm", 0.3), ("value", 0.05)])),
        scheduler=draw(st.sampled_from([None, None, *SCHEDULERS])),
        skips=tuple(sorted(draw(often((), st.sets(st.integers(0, 3), max_size=2), 3)))),
        validate=draw(st.sampled_from([None, None, 1, 2])), drain=draw(st.sampled_from(["end", "end", "validation"])),
        quirks=tuple(sorted(draw(st.sets(st.sampled_from(QUIRKS), max_size=4)))), runtime=runtime,
        precision=draw(st.sampled_from(["32-true"] * 5 + ["bf16-mixed", "bf16-true"])),
        resume=draw(st.sampled_from([None, None, 0, 1, 4])), ema=draw(often(False, st.just(True), 7)),
        twice=draw(often(False, st.just(True), 5)),
        reference=draw(often(None, st.just(4 * batch), 5)) if optimizer in ("sgd", "momentum", "nesterov") else None,
    )  # fmt: skip
    if fit.resume is not None and draw(st.booleans()):
        fit = replace(fit, other=draw(_other(method, stages, fit)))
    if fit.precision == "bf16-true" and not optimizer.startswith("fused") and draw(st.booleans()):
        fit = replace(fit, runtime={**fit.runtime, "masters": True}, other=None)
    return _allowed(fit)


def _allowed(fit: Fit) -> Fit:
    """Without what does not go together, as the documentation says."""
    quirks, runtime = set(fit.quirks), dict(fit.runtime)
    options = (runtime, fit.goes_on_with)
    several = any(some.get("devices", 1) > 1 for some in options)
    away = several or any("store" in some for some in options)
    if several or fit.as_one or (away and fit.kind in ("own", "pair", "many")):
        quirks -= {"look"}  # stages as one, and those of a store, have other weights
    if {"late noise", "between"} & quirks:
        quirks -= {"noise"}  # one generator, and two places that draw from it in another order
    if fit.model in DRAWING:
        quirks -= {"late noise"}
    if "masters" in runtime:
        runtime = {name: v for name, v in runtime.items() if name not in ("vectorize", "store", "ahead")}
    return replace(
        fit, quirks=tuple(sorted(quirks)), runtime=runtime, ema=fit.ema and not away,
        twice=fit.twice and fit.resume is None and not away,
    )  # fmt: skip
