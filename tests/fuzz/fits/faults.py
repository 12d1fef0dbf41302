"""Fits that showed a fault once, each under what went wrong."""

from .fit import Fit

AS_ONE = {"devices": 2, "vectorize": "auto"}
FAULTS = {
    "over devices, stages that run as one were validated without the fit's autocast": Fit(
        kind="own", samples=13, batch=3, size=3, validate=1, runtime=AS_ONE, precision="bf16-mixed"
    ),
    "over devices, a traced model that runs as one did not go on from a checkpoint": Fit(
        kind="body", stages=5, size=3, epochs=3, resume=0, runtime=AS_ONE
    ),
    "gradients of what was in flight were of old weights where stages were divided again": Fit(
        kind="pair", stages=8, samples=24, size=2, resume=0, other={"vectorize": True}
    ),
    "a store gave no memory to what was in flight where stages were divided again": Fit(
        kind="pair", stages=8, samples=24, size=2, resume=0, other={"vectorize": True, "store": "host", "ahead": 8}
    ),
    "a call without gradients lacked the update of the slice before, but not where a store has the weights": Fit(
        stages=2, method="sgd", batch=5, size=1, quirks=("look",), runtime={"store": "host"}
    ),
    "over devices, stages did not hear of a rate of dropout that a callback sets": Fit(
        model="dropping", stages=2, quirks=("dropout",), runtime={"devices": 2}
    ),
    "over devices, PipelineMonitor waited for stages that waited for the default dtype": Fit(
        kind="body",
        model="dropping",
        seed=67,
        method="zb_h1-3",
        samples=11,
        batch=6,
        size=2,
        epochs=3,
        validate=2,
        quirks=("dropout", "monitor"),
        runtime={"devices": 2, "vectorize": "auto", "store": "host", "ahead": 1},
        precision="bf16-true",
    ),
    "a resumed fit drained before a validation that has no batch, which Lightning leaves out": Fit(
        model="batch", stages=2, method="gpipe-3", batch=6, validate=1, drain="validation", resume=0
    ),
}
