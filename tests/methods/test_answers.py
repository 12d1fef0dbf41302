"""What hooks of a method of a user's own return is checked in every runtime, before anything is computed with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.methods.base import Method, Shift
from pipeback.schedules.programs import flowing

RUNTIMES = {
    "event loop": {}, "as one": {"vectorize": True}, "threads": {"workers": 2}, "host": {"store": "host"},
}  # fmt: skip


class Scaled(Method):
    """F on `factor`·w, as `chosen` gives it; B on w."""

    schedule = flowing(2)
    copies = "scratch"

    def chosen(self, weights: Any, when: Any) -> Any:
        return [0.9 * w for w in weights]

    def forward_weights(self, weights: Any, state: Any, when: Any) -> Any:
        return self.chosen(weights, when)


def trained(method: Method, **options: Any) -> torch.Tensor:
    """The weights after some pushes."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]).double()
    pipe = pipeback.Pipeline(
        model, loss=mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), method=method,
        micro_batch_size=2, **options,
    )  # fmt: skip
    x = torch.randn(12, 4, dtype=torch.float64)
    try:
        for i in range(0, 12, 6):
            float(pipe.push(x[i : i + 6], x[i : i + 6]))
        pipe.drain()
    finally:
        pipe.close()
    return torch.cat([w.flatten() for w in model.state_dict().values()])


def giving(chosen: Any, **more: Any) -> Method:
    return type("Slip", (Scaled,), {"chosen": staticmethod(chosen), **more})()  # type: ignore[no-any-return]


def failing(weights: Any, when: Any) -> Any:
    if when.mb == 4 and when.stage == 1:
        raise ValueError("a slip")
    return weights


def writing(weights: Any, when: Any) -> Any:
    for w in weights:
        w.mul_(0.9)
    return weights


SLIPS: dict[str, tuple[Method, str]] = {
    "nothing": (giving(lambda weights, when: None), r"forward_weights of Slip\(\).*not as None"),
    "too few": (giving(lambda weights, when: [weights[0]]), "returned 1 weights for 2 weights; give as many"),
    "rows": (giving(lambda weights, when: [w[:1] for w in weights]), r"shape \(1, 4\) for weight 0, which.*\(4, 4\)"),
    "one number": (
        giving(lambda weights, when: Shift(weights, 0.1, weights)),
        "give coefficients as a list, not as fl",
    ),
    "few numbers": (giving(lambda weights, when: Shift(weights, [0.1], weights)), "1 coefficients for 2 weights"),
    "tensors": (
        giving(lambda weights, when: Shift(weights, [torch.tensor(0.1)] * len(weights), weights)),
        "tensors as coefficients; give plain numbers",
    ),
    "no room": (giving(lambda weights, when: [0.9 * w for w in weights], copies="live"), 'set copies = "scratch"'),
    "an error": (giving(failing), "the forward failed: forward_weights raised ValueError: a slip"),
    "a write": (giving(writing), "has written into the weights that it was given"),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_named_with_its_stage_and_micro_batch(slip, runtime):
    method, says = SLIPS[slip]
    with pytest.raises(pipeback.StageError, match=rf"(?s)stage \d \(\d\), micro-batch \d.*{says}") as found:
        trained(method, **RUNTIMES[runtime])
    assert found.value.operation == "forward"


class Kept(Scaled):
    """B on what is used, where nothing is kept."""

    def backward_weights(self, weights: Any, used: Any, state: Any, when: Any) -> Any:
        return used


class Stashed(Kept):
    copies = "stash"


class Listed(Scaled):
    def init(self, weights: Any) -> Any:
        return [torch.zeros_like(w) for w in weights]


class Short(Scaled):
    merges = True

    def init(self, weights: Any) -> Any:
        return {"some": [torch.zeros(1)]}


class Forgetful(Scaled):
    def update(self, weights: Any, optimizer: Any, state: Any, when: Any) -> Any:
        optimizer.step()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_other_hooks_are_checked_too(runtime):
    options = RUNTIMES[runtime]
    with pytest.raises(pipeback.StageError, match=r'the backward failed: .*copies = "stash", without which `used`'):
        trained(Kept(), **options)
    trained(Stashed(), **options)
    with pytest.raises(TypeError, match="init of Listed.*must return a state, which is a dict, but returned list"):
        trained(Listed(), **options)
    with pytest.raises(ValueError, match="init of Short.*returned a list 'some' of length 1 for 2 weights"):
        trained(Short(), **options)
    with pytest.raises(pipeback.StageError, match="update of Forgetful.*put `return state` at its end"):
        trained(Forgetful(), **options)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_shift_of_other_weights_than_the_newest_starts_there(runtime):
    def halved(weights: Any, when: Any) -> Shift:
        return Shift([0.5 * w for w in weights], [0.25] * len(weights), [w.clone() for w in weights])

    found = trained(giving(halved), **RUNTIMES[runtime])
    torch.testing.assert_close(
        found, trained(giving(lambda weights, when: [0.75 * w for w in weights])), rtol=0, atol=1e-12
    )


def test_a_hook_that_fails_leaves_the_newest_weights():
    """The hook of a later stage fails in a wave at whose earlier stages other weights lie already."""
    method, model = giving(lambda weights, when: [0.9 * w for w in weights]), nn.Linear(4, 4).double()
    method.chosen = lambda weights, when: failing(weights, when) and [0.9 * w for w in weights]  # type: ignore[method-assign]
    models = [nn.Linear(4, 4).double() for _ in range(3)] + [model]
    pipe = pipeback.Pipeline(
        models, loss=mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.0), method=method,
        micro_batch_size=1,
    )  # fmt: skip
    before = [w.clone() for m in models for w in m.parameters()]
    x = torch.randn(6, 4, dtype=torch.float64)
    with pytest.raises(pipeback.StageError, match=r"^stage 1 \(1\), micro-batch 4: .*a slip"):
        pipe.push(x, x)
    assert all(map(torch.equal, before, [w for m in models for w in m.parameters()]))
