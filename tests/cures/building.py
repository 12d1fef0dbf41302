"""What is refused of models, functions and options."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.laws.cases import network

from .rows import (
    BATCH,
    LABELLED,
    Branching,
    Row,
    adam,
    build,
    frozen,
    functions,
    judged,
    lazy,
    sgd,
    shared,
    trains,
)


def my_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    return mse_loss(output, target), {"mean": float(target.mean())}


ROWS: dict[str, Row] = {
    # the model
    "empty model": Row(
        lambda: build(nn.Sequential()), "the model is empty.*at least one module", lambda: trains(model=network(1))
    ),
    "function as stage": Row(
        lambda: build([nn.Linear(6, 6), torch.tanh]),
        "stage 1 must be a module.*wrap a function in a module",
        lambda: trains(model=[nn.Linear(6, 6), nn.Tanh()]),
    ),
    "lazy": Row(lambda: build(lazy(False)), r"stage 0 \(0\).*run a lazy module once", lambda: trains(model=lazy(True))),
    "frozen": Row(
        lambda: build(frozen(False)), "no trainable parameters; set requires_grad", lambda: trains(model=frozen(True))
    ),
    "shared weight": Row(
        lambda: build(shared(False)),
        "stages 0 and 1 share.*put both layers into one stage",
        lambda: trains(model=shared(True)),
    ),
    "a forward of its own": Row(
        lambda: build(Branching()),
        "Branching.*needs an input: give example=",
        lambda: trains(model=Branching(), example=BATCH),
    ),
    "a list, please": Row(
        lambda: build(Branching()),
        "or give its modules as a list",
        lambda: trains(model=[Branching().a, Branching().b]),
    ),
    "too many stages": Row(
        lambda: build(network(4), stages=5),
        r'stages=5, but the model has 4 modules to share out; use that or less, or "auto"',
        lambda: [trains(stages=4), trains(stages="auto")],
    ),
    "an unknown leaf": Row(
        lambda: build(Branching(), example=BATCH, stages=pipeback.Splitting(leaves=["c"])),
        r"leaves: Branching has no module 'c'; named_modules\(\)",
        lambda: trains(
            model=Branching(),
            example=BATCH,
            stages=pipeback.Splitting(leaves=[dict(Branching().named_modules()) and "a"]),
        ),
    ),
    "a function of the weights": Row(
        functions(),
        r'stage 1 \(1\).*function of the weights.*Use method="pipedream".*weight_functions="warn"',
        lambda: [functions(method="pipedream")(), functions(debug=pipeback.Debug(weight_functions="warn"))()],
    ),
    # functions
    "optimizer": Row(
        lambda: build(optimizer=sgd([nn.Parameter(torch.ones(1))])),
        r"optimizer must be a function, but is SGD; .*lambda params: torch.optim.SGD\(params, lr=0.01, momentum=0.9\)$",
        lambda: trains(optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9)),
    ),
    "an optimizer with options": Row(
        lambda: build(optimizer=torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.003, betas=(0.8, 0.99))),
        r"but is AdamW; .*=lambda params: torch.optim.AdamW\(params, lr=0.003, betas=\(0.8, 0.99\)\)$",
        lambda: trains(optimizer=lambda params: torch.optim.AdamW(params, lr=0.003, betas=(0.8, 0.99))),
    ),
    "loss": Row(
        lambda: build(loss=3),
        "loss must be a function, but is int; for example loss=torch.nn.functional.mse_loss",
        lambda: trains(loss=torch.nn.functional.mse_loss),
    ),
    "no loss": Row(
        lambda: pipeback.Pipeline(network(4), optimizer=sgd),
        "Pipeline needs loss=, .*loss=torch.nn.functional.cross_entropy, or loss=lambda output, _: output.loss where",
        lambda: [
            build(loss=torch.nn.functional.cross_entropy).push(BATCH, BATCH.argmax(1)),
            judged(LABELLED, loss=lambda output, _: output.loss)(),
        ],
    ),
    "no optimizer": Row(
        lambda: pipeback.Pipeline(network(4), loss=mse_loss),
        r"Pipeline needs optimizer=.*optimizer=lambda params: torch.optim.SGD\(params, lr=0.1\)",
        lambda: trains(optimizer=lambda params: torch.optim.SGD(params, lr=0.1)),
    ),
    "a loss of one": Row(
        lambda: build(loss=lambda output: output.square().mean()),
        r"with the model's output and the target.*but takes \(output\); for example loss=lambda output, _: output.",
        lambda: trains(loss=lambda output, _: output.square().mean()),
    ),
    "method": Row(
        lambda: build(method=3),
        r"method must be a name.*pipeback.methods.available\(\) lists",
        lambda: trains(method=pipeback.methods.available()[0]),
    ),
    "returned": Row(
        lambda: build(optimizer=list),
        "stage 0: optimizer must be.*returned list; for example optimizer=lambda",
        lambda: trains(optimizer=lambda params: torch.optim.SGD(params, lr=0.1)),
    ),
    "filtered": Row(
        lambda: build(optimizer=lambda ps: sgd(list(ps)[:1])),
        "stage 0: .*exactly the parameters it is given.*do not filter",
        trains,
    ),
    "LBFGS": Row(
        lambda: build(optimizer=torch.optim.LBFGS),
        r"stage 0 \(0\): LBFGS.*use SGD or Adam",
        lambda: [trains(), trains(optimizer=adam)],
    ),
    "loss with weights": Row(
        lambda: build(loss=nn.Bilinear(6, 6, 1)), "loss has weights of its own.*into the last stage", trains
    ),
    "loss of a batch": Row(
        lambda: trains(loss=nn.MSELoss(reduction="none")),
        'loss must return a 0-d.*reduction="mean"',
        lambda: trains(loss=nn.MSELoss(reduction="mean")),
    ),
    "loss with metrics": Row(
        lambda: trains(loss=my_loss),
        r"but returned tuple; give the loss alone: loss=lambda output, target: my_loss\(output, target\)\[0\]",
        lambda: trains(loss=lambda output, target: my_loss(output, target)[0]),
    ),
    "loss in a dictionary": Row(
        lambda: trains(loss=lambda o, y: {"seen": o, "error": o.norm(), "loss": mse_loss(o, y)}),
        r"but returned dict; give the loss alone: loss=lambda output, target: my_loss\(output, target\)\['loss'\]",
        lambda: trains(loss=lambda o, y: {"seen": o, "error": o.norm(), "loss": mse_loss(o, y)}["loss"]),
    ),
    "loss as a number": Row(
        lambda: trains(loss=lambda o, y: mse_loss(o, y).item()),
        r"but returned float; return the tensor itself, without .item\(\) or float\(\)",
        lambda: trains(loss=lambda o, y: mse_loss(o, y)),
    ),
    "loss as words": Row(
        lambda: trains(loss=lambda o, y: [str(mse_loss(o, y))]),
        "but returned list; return the loss alone, a tensor, and keep what else is computed",
        lambda: trains(loss=lambda o, y: mse_loss(o, y)),
    ),
    "loss that counts": Row(
        lambda: trains(loss=lambda o, y: (o > y).sum()),
        "but returned torch.int64; compute it with operations that have a gradient",
        trains,
    ),
    "detached loss": Row(
        lambda: trains(loss=lambda o, y: mse_loss(o.detach(), y)),
        r"stage 3 \(3\): the loss does not depend.*from the output",
        trains,
    ),
    # options
    "too many workers": Row(
        lambda: build(workers=5),
        "workers=5 but the model has 4 stages; use at most one worker per stage",
        lambda: trains(workers=4),
    ),
    "stages kept": Row(
        lambda: build(activations={"x": "host"}),
        r"activations: there is no stage 'x'; there are 0, 1, 2, 3, numbered from 0",
        lambda: [trains(activations={k: "host"}) for k in ("3", 0)],
    ),
    "a stage named twice": Row(
        lambda: build(activations={"1": "host", 1: "host"}),
        "activations: stage 1.*named twice.*leave one out",
        lambda: trains(activations={"1": "host"}),
    ),
    "kinds of too few": Row(
        lambda: build(activations=["host"]),
        "activations has 1 kind for 4 stages; give one per stage, one for all, or a dict",
        lambda: [trains(activations=a) for a in (["host"] * 4, "host", {0: "host"})],
    ),
    "masters of survivors": Row(
        lambda: build(masters=True, store=pipeback.Streaming(sparsity="magnitude")),
        "masters=True does not go with sparsity.*leave masters out",
        lambda: trains(store=pipeback.Streaming(sparsity="magnitude")),
    ),
    "an unknown store": Row(
        lambda: build(store="x"),
        "store='x' is unknown; give None, 'host'",
        lambda: [trains(store=s) for s in (None, "host")],
    ),
    "an unknown sparsity": Row(
        lambda: build(store=pipeback.Streaming(sparsity="magnitud")),
        "unknown .*'magnitud'; did you mean 'magnitude'",
        lambda: trains(store=pipeback.Streaming(sparsity="magnitude")),
    ),
    "compile": Row(lambda: build(compile=3), "compile must be True, False or a dict", lambda: trains(compile=False)),
    "watch with states that are kept": Row(
        lambda: build(debug=pipeback.Debug(take_back=3)).watch(),
        "take_back: watch would see micro-batches twice that are trained again; build the pipeline without take_back",
        lambda: build(debug=pipeback.Debug()).watch(),
    ),
    "states that are kept without a loss": Row(
        lambda: build(loss=None, debug=pipeback.Debug(take_back=3)),
        "take_back=3 does not go with loss=None; use a loss, and push, or leave take_back out",
        lambda: trains(debug=pipeback.Debug(take_back=3)),
    ),
    "watch with workers": Row(
        lambda: build(workers=2).watch(),
        "watch does not follow threads; use workers=None and no replicas",
        lambda: build(workers=None).watch(),
    ),
}
