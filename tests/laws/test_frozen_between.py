"""Law: a weight that is frozen between pushes gets no gradient from then on, also where stages run as one; and methods
that predict weights run on it as it is.
"""

import pytest
import torch

from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, EACH, LATE, data, network, pipeline, weights

WHICH = [(2, "weight"), (4, "bias")]  # in a stack, and in the stage with the loss
OPTIONS = [{}, {"workers": 2}, {"replicas": 2}, {"clip_norm": 0.1}]
METHODS = ["pb", "gpipe", "pipedream", "zb_h1", "cerebras", "pipeoptim"]
SHIFTING = [
    "cerebras", "lwp", "lwp-weight", "lwp-weight+sc", "spectrain", "spectrain-v2", "pipemare-t2", "pipeoptim",
    "pipeoptim-xpipe", "msnag", "gap_aware+msnag", "eigendelay", "eigendelay-stash",
]  # fmt: skip


def trained(method, which, first, **options):
    """Losses, weights, and what is told of stages that run as one. first: whether to drain as soon as it is frozen."""
    model, losses = network(5, dtype=torch.float64), []
    pipe = pipeline(model, method, **options)
    s, name = which
    for needs in (True, False, True):
        pipe.wait()
        getattr(model[s][0], name).requires_grad_(needs)
        before = getattr(model[s][0], name).detach().clone()
        if first and not needs:
            pipe.drain()
        for x, y in data(8, dtype=torch.float64):
            losses.append(pipe.push(x, y))
        if not needs:
            pipe.wait()
            assert torch.equal(getattr(model[s][0], name), before)
    pipe.drain()
    losses = [float(loss) for loss in losses]
    found, told = weights(pipe), " ".join(pipe.vectorized.values())
    pipe.close()
    return losses, found, told


@pytest.mark.parametrize(
    ("method", "options", "which", "first"),
    mostly_rare(
        [(m, o, w, f) for m in METHODS for o in OPTIONS for w in WHICH for f in (False, True)],
        *((m, {}, WHICH[n % 2], n > 1) for n, m in enumerate(METHODS)),
        *(("pb", o, WHICH[0], True) for o in OPTIONS),
        ("pb", {}, WHICH[1], False),
    ),
    ids=str,
)
def test_a_weight_that_is_frozen_for_some_pushes(method, options, which, first):
    losses, found, _ = trained(method, which, first, **options)
    as_one, same, told = trained(method, which, first, vectorize=True, **options)
    torch.testing.assert_close(as_one, losses, rtol=0, atol=1e-12)
    torch.testing.assert_close(same, found, rtol=0, atol=1e-12)
    assert which != WHICH[0] or "weight of stage 2 is frozen" in told


@pytest.mark.parametrize("which", WHICH, ids=str)
@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
def test_a_weight_that_is_frozen_between_the_parts_of_a_backward(options, which):
    trained(LATE["pb-late"](5), which, False, **options)


@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize(
    ("case", "options"),
    [*((case, {}) for case in SHIFTING), ("cerebras", {"workers": 2}), ("spectrain", {"workers": 2})],
    ids=str,
)
def test_a_frozen_weight_is_not_shifted(case, options, drains):
    """Where the weight is frozen with micro-batches in flight, B of these may still run on what their F has used."""
    model, seen = network(5, dtype=torch.float64), {"F": [], "B": []}
    layer = model[1][0]

    def note(kind):
        seen[kind].append(layer.weight.detach().clone())

    def forward(module, args, output):
        note("F")
        if output.requires_grad:
            output.register_hook(lambda g: note("B"))

    layer.register_forward_hook(forward)
    pipe = pipeline(model, CASES[case](5), **options)
    batches = data(40, samples=4, dtype=torch.float64)
    for x, y in batches[:12]:
        pipe.push(x, y)
    pipe.wait()
    if drains:
        pipe.drain()
    before = layer.weight.detach().clone()
    layer.weight.requires_grad_(False)
    seen["F"].clear()
    for x, y in batches[12:]:
        pipe.push(x, y)
    pipe.wait()
    assert len(seen["F"]) >= 12
    for used in (*seen["F"], *seen["B"][-8:]):
        assert torch.equal(used, before)
    pipe.close()


@pytest.mark.parametrize("case", EACH)
def test_a_whole_stage_that_is_frozen(case):
    """The others go on; its own updates have no gradient at all."""
    model = network(5, dtype=torch.float64)
    pipe, before = pipeline(model, CASES[case](5)), {}
    for n, (x, y) in enumerate(data(24, samples=4, dtype=torch.float64)):
        if n % 8 == 0:
            pipe.drain()
            model[1].requires_grad_(n != 8)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
        pipe.push(x, y)
        if n == 15:
            pipe.wait()
            for s in (1, 4):
                assert torch.equal(model[s][0].weight, before[f"{s}.0.weight"]) == (s == 1)
    pipe.close()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("method", ["pb", "pipedream", "spectrain", "one_f_one_b-3"])
def test_weights_frozen_without_waiting(method, reads):
    """What stages that run as one have left of earlier pushes is done as it would have been in the event loop."""

    def run(**options):
        model, losses = network(5, dtype=torch.float64), []
        pipe = pipeline(model, CASES[method](5), **options)
        for n, (x, y) in enumerate(data(20, samples=4, dtype=torch.float64)):
            if n % 3 == 2:
                for s in (1, 4):
                    model[s].requires_grad_(n % 2 == 1)
                if reads and losses:
                    float(losses[-1])
            losses.append(pipe.push(x, y))
        model[2][0].bias.requires_grad_(False)
        pipe.drain()
        found = weights(pipe), [float(loss) for loss in losses]
        pipe.close()
        return found

    torch.testing.assert_close(run(vectorize=True), run(), rtol=0, atol=1e-12)
