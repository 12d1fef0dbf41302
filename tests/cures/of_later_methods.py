"""What is refused of the later methods, and of their combinations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import pipeback
from pipeback import methods

from .rows import Row, adam, build, momentum, sgd, trains, weight_form


class Asking(pipeback.Method):
    """A method of a user's own that compares weights, but keeps none."""

    schedule = pipeback.methods.create("pb").schedule
    needs_used = True


def asking() -> pipeback.Method:
    method = Asking()
    method.copies = "stash"
    return method


class Spectral(nn.Module):
    """Multiplies spectra by complex weights. pairs: whether these are kept as pairs of real ones."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        weight = torch.randn(4, dtype=torch.complex64)
        self.weight = nn.Parameter(torch.view_as_real(weight).clone() if pairs else weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return torch.fft.irfft(torch.fft.rfft(x) * weight, n=6)


class Signs(nn.Module):
    """Looks the signs of its input up, so that its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x > 0).long()).sum(-2)


def signs() -> nn.Sequential:
    return nn.Sequential(Signs(), nn.Linear(6, 6))


def lazily(kind: Any) -> Any:
    return lambda params: (kind if len(params) == 1 else torch.optim.Adam)(params, lr=0.01)


def spectral(pairs: bool) -> nn.Sequential:
    return nn.Sequential(Spectral(pairs), nn.Linear(6, 6))


def amsgrad(on: bool) -> Any:
    return lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=on)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.01)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def rotated(decay: float) -> Any:
    return lambda params: pipeback.optim.RotatedAdamW(params, weight_decay=decay)


def sparse(method: Any, **more: Any) -> Any:
    return lambda: trains(method=method, optimizer=adamw, store=pipeback.Streaming("host", **more))


WEIGHT_FORM = r'pipeback.methods.create\("lwp", form="weight"\)'
ROWS: dict[str, Row] = {
    "weights that nobody keeps": Row(
        lambda: build(method=Asking()),
        'Asking needs the weights that F used, but its copies are "live", which keep none; set copies = "stash"',
        lambda: trains(method=asking()),
    ),
    "braking without a velocity": Row(
        lambda: build(method="braking", optimizer=momentum(momentum=0)),
        'braking compares gradients with a velocity, and SGD keeps none; set momentum, take Adam, or use '
        'method="staleness_lr"',
        lambda: [
            trains(method="braking"), trains(method="braking", optimizer=adam),
            trains(method="staleness_lr", optimizer=momentum(momentum=0)),
        ],
    ),
    "gaps of a decay that nobody knows": Row(
        lambda: build(method="gap_aware", optimizer=rotated(0.1)),
        'gap_aware divides the weight decay, too, but how RotatedAdamW decays weights is not known; set '
        'weight_decay=0, or use method="dc_asgd"',
        lambda: [trains(method="gap_aware", optimizer=rotated(0)), trains(method="dc_asgd", optimizer=rotated(0.1))],
    ),
    "steps without gradients of Adagrad": Row(
        lambda: build(method="msnag", optimizer=adagrad),
        "msnag makes steps of SGD, Adam or AdamW without a gradient, but the optimizer is Adagrad; use "
        f"method={WEIGHT_FORM}",
        lambda: trains(method=weight_form(), optimizer=adagrad),
    ),
    "a prediction by Nesterov": Row(
        lambda: build(method="pipeoptim", optimizer=momentum(nesterov=True)),
        f"pipeoptim predicts along the velocity, but nesterov=True; set it to False or use method={WEIGHT_FORM}",
        lambda: [
            trains(method="pipeoptim", optimizer=momentum(nesterov=False)),
            trains(method=weight_form(), optimizer=momentum(nesterov=True)),
        ],
    ),
    "a prediction by Adagrad": Row(
        lambda: build(method="pipeoptim", optimizer=adagrad),
        "pipeoptim predicts by the step of SGD, Adam, AdamW or RMSprop, but the optimizer is Adagrad; use "
        f"method={WEIGHT_FORM}",
        lambda: trains(method=weight_form(), optimizer=adagrad),
    ),
    "EigenDelay of SGD": Row(
        lambda: build(method="eigendelay"),
        'eigendelay is written for Adam and AdamW, but the optimizer is SGD; use method="staleness_lr"',
        lambda: [trains(method="eigendelay", optimizer=adamw), trains(method="staleness_lr")],
    ),
    "amsgrad": Row(
        lambda: build(method="sc", optimizer=amsgrad(True)),
        f"sc needs Adam's own second moment, but amsgrad=True; set it to False or use method={WEIGHT_FORM}",
        lambda: [
            trains(method="sc", optimizer=amsgrad(False)), trains(method=weight_form(), optimizer=amsgrad(True)),
        ],
    ),
    "survivors of a matrix": Row(
        sparse("eigendelay", sparsity="magnitude"),
        'EigenDelay.* looks at whole weights, but sparsity keeps some of their entries; leave sparsity out, or use '
        'method="pb"',
        lambda: [sparse("eigendelay")(), sparse("pb", sparsity="magnitude")()],
    ),
    "survivors of two versions": Row(
        sparse("dc_asgd", sparsity="magnitude"),
        "DelayCompensation.* compares two versions of the weights, but under sparsity other entries may survive in "
        'each; leave sparsity out, or use method="pipedream"',
        lambda: [sparse("dc_asgd")(), sparse("pipedream", sparsity="magnitude")()],
    ),
    "moments in two coordinates": Row(
        lambda: pipeback.chain(methods.create("msnag"), methods.create("eigendelay")),
        "DecayedPrediction.* predicts by the second moment of Adam, which EigenDelay.* keeps in bases of its own; "
        "leave one of them out",
        lambda: [
            trains(method=pipeback.chain(methods.create("msnag")), optimizer=adamw),
            trains(
                method=pipeback.chain(methods.create("staleness_lr"), methods.create("eigendelay")), optimizer=adamw
            ),
        ],
    ),
    "stash": Row(
        lambda: methods.create("msnag", stash=1),
        "msnag: stash must be True or False, but is 1",
        lambda: trains(method=methods.create("msnag", stash=True)),
    ),
    **{
        f"complex weights under {name}": Row(
            lambda name=name, optimizer=optimizer: trains(method=name, optimizer=optimizer, model=spectral(False)),
            rf"stage 0 \(0\): {name} squares real numbers, but .* has complex weights; keep "
            r'torch.view_as_real\(weight\) as the parameter, and compute with torch.view_as_complex of it, or use '
            r'method="pb", or one of those that allow it: .*method="pipedream"',
            lambda name=name, optimizer=optimizer: [
                trains(method=name, optimizer=optimizer, model=spectral(True)),
                trains(method="pb", optimizer=optimizer, model=spectral(False)),
            ],
        )
        for name, optimizer in [
            ("sc", adamw), ("msnag", adamw), ("eigendelay", adamw), ("pipeoptim", adamw),
            *((name, sgd) for name in ("gap_aware", "dc_asgd", "braking")),
        ]
    },
    **{
        f"sparse gradients under {name}": Row(
            lambda name=name: trains(method=name, optimizer=lazily(torch.optim.SparseAdam), model=signs()),
            rf"stage 0 \(0\): {name} hands dense gradients to the optimizer, but SparseAdam steps sparse ones only; "
            r'take torch.optim.Adam, or use method="staleness_lr", or one of those that allow it: .*',
            lambda name=name: [
                trains(method=name, optimizer=lazily(torch.optim.Adam), model=signs()),
                trains(method="staleness_lr", optimizer=lazily(torch.optim.SparseAdam), model=signs()),
            ],
        )
        for name in ("dc_asgd", "gap_aware")
    },
}  # fmt: skip
