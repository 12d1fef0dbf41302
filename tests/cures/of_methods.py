"""What is refused of methods."""

from __future__ import annotations

import pipeback
from pipeback import methods
from pipeback.schedules import flowing

from .rows import (
    Row,
    adam,
    build,
    momentum,
    trains,
    weight_form,
)


class Timeless(pipeback.Method):
    """A method of a user's own, without its schedule."""


def timed() -> pipeback.Method:
    method = Timeless()
    method.schedule = flowing(2)
    return method


ROWS: dict[str, Row] = {
    "no schedule": Row(
        lambda: build(method=Timeless()),
        r"method Timeless has no schedule; set one, for example flowing\(2\)",
        lambda: trains(method=timed()),
    ),
    # methods
    "an unknown name": Row(
        lambda: methods.create("cerebas"),
        "unknown method 'cerebas'; did you mean 'cerebras'",
        lambda: trains(method="cerebras"),
    ),
    "an unknown option": Row(
        lambda: methods.create("lwp", horizont=1),
        "did you mean 'horizon'",
        lambda: trains(method=methods.create("lwp", horizon=1)),
    ),
    "a missing option": Row(
        lambda: methods.create("pipedream_2bw"),
        "needs the option micro_batches=",
        lambda: trains(method=methods.create("pipedream_2bw", micro_batches=4)),
    ),
    "too few for 2BW": Row(
        lambda: build(method=methods.create("pipedream_2bw", micro_batches=2)),
        "micro_batches=2 is too few for 4 stages.*from 4; use that or more, or pipedream",
        lambda: [trains(method=methods.create("pipedream_2bw", micro_batches=4)), trains(method="pipedream")],
    ),
    "no anneal": Row(
        lambda: methods.create("pipemare"),
        "anneal= is the number of updates until.*say anneal=1000, and t1=False trains",
        lambda: [
            trains(method=methods.create("pipemare", anneal=1000)),
            trains(method=methods.create("pipemare", t1=False)),
        ],
    ),
    "decay": Row(
        lambda: methods.create("pipemare", t1=False, decay=2),
        "decay must lie between 0 and 1, but is 2",
        lambda: trains(method=methods.create("pipemare", t1=False, decay=0.5)),
    ),
    "warmup": Row(
        lambda: methods.create("pipemare", t1=False, warmup=-1),
        "warmup counts micro-batches, at least 0, but is -1",
        lambda: trains(method=methods.create("pipemare", t1=False, warmup=0)),
    ),
    "spectrain's version": Row(
        lambda: methods.create("spectrain", version=3),
        "version must be 1 or 2, but is 3",
        lambda: [trains(method=methods.create("spectrain", version=v)) for v in (1, 2)],
    ),
    "a form": Row(
        lambda: methods.create("lwp", form="x"),
        'form must be "velocity" or "weight", but is \'x\'',
        lambda: [trains(method=methods.create("lwp", form=f)) for f in ("velocity", "weight")],
    ),
    "a horizon": Row(
        lambda: methods.create("sc", horizon=-1),
        "horizon is a number of updates, 0 or more, or None",
        lambda: [trains(method=methods.create("sc", horizon=h)) for h in (0, None)],
    ),
    "a slack": Row(
        lambda: methods.create("pb", slack=-1),
        "slack must be a whole number of at least 0",
        lambda: trains(method=methods.create("pb", slack=0)),
    ),
    "chunks": Row(
        lambda: methods.create("interleaved", chunks=0),
        "chunks must be a whole number of at least 1",
        lambda: trains(method=methods.create("interleaved", chunks=1)),
    ),
    "more parts than stages": Row(
        lambda: build(method=methods.create("looped_bfs", chunks=3), workers=2),
        r"LoopedBFS\(.*chunks=3\) puts 3 parts of the stages on each worker, but 2 workers share 4 stages; use at most "
        "1 worker, or chunks=2",
        lambda: [
            trains(method=methods.create("looped_bfs", chunks=3), workers=1),
            trains(method=methods.create("looped_bfs", chunks=2), workers=2),
        ],
    ),
    "more halves of a V than stages": Row(
        lambda: build(method=methods.create("pb", placement="v"), workers=3),
        r"placement='v'.*\) puts 2 parts of the stages on each worker, but 3 workers share 4 stages; use at most "
        "2 workers$",
        lambda: trains(method=methods.create("pb", placement="v"), workers=2),
    ),
    "another placement": Row(
        lambda: methods.create("pb", placement="loop"),
        "pb: placement must be 'neighbours' or 'v', not 'loop'",
        lambda: [trains(method=methods.create("pb", placement=p), workers=2) for p in ("neighbours", "v")],
    ),
    "parts that run as one": Row(
        lambda: build(method="interleaved", workers=2, vectorize="auto"),
        "placement='loop' on several workers does not go with vectorize='auto'; use vectorize=False$",
        lambda: trains(method="interleaved", workers=2, vectorize=False),
    ),
    "two schedules": Row(
        lambda: pipeback.chain(methods.create("lwp", form="weight", slack=1), methods.create("sc")),
        "different schedules; give both the same slack=",
        lambda: trains(
            method=pipeback.chain(methods.create("lwp", form="weight", slack=1), methods.create("sc", slack=1))
        ),
    ),
    "a step with nothing inside": Row(
        lambda: pipeback.chain(methods.create("sc"), weight_form()),
        "makes the step itself.*put it last",
        lambda: trains(method=pipeback.chain(weight_form(), methods.create("sc"))),
    ),
    "an empty chain": Row(
        pipeback.chain,
        r'chain needs at least one method, such as pipeback.methods.create\("pb"\)',
        lambda: trains(method=pipeback.chain(pipeback.methods.create("pb"))),
    ),
    "older versions in a chain": Row(
        lambda: trains(method=pipeback.chain(methods.create("pipedream_2bw", micro_batches=4), weight_form())),
        "older versions.*use it alone|different schedules",
        lambda: trains(method=methods.create("pipedream_2bw", micro_batches=4)),
    ),
    "Adam with cerebras": Row(
        lambda: build(method="cerebras", optimizer=adam),
        r'stage 0 \(0\): cerebras.*Adam; use method=pipeback.methods.create\("lwp", form="weight"\)',
        lambda: trains(method=weight_form(), optimizer=adam),
    ),
    "Nesterov with sc": Row(
        lambda: build(method="sc", optimizer=momentum(nesterov=True)),
        r'stage 0 \(0\): sc.*nesterov=True; set it to 0 or use method=pipeback.methods.create\("lwp", form="weight"\)',
        lambda: [
            trains(method="sc", optimizer=momentum(nesterov=0)),
            trains(method=weight_form(), optimizer=momentum(nesterov=True)),
        ],
    ),
    "no momentum": Row(
        lambda: build(method="lwp", optimizer=momentum(momentum=0)),
        r'stage 0 \(0\).*momentum=0; set momentum or use method=pipeback.methods.create\("lwp", form="weight"\)',
        lambda: [trains(method="lwp"), trains(method=weight_form(), optimizer=momentum(momentum=0))],
    ),
}
