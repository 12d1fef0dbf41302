"""What is refused of pushes, other calls and states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pipeback
from tests.laws.cases import network

from .rows import (
    BATCH,
    LABELLED,
    Row,
    Summed,
    adam,
    build,
    inferring,
    judged,
    loads,
    outside,
    pushed,
    sgd,
    trains,
)

PAIR = [BATCH, BATCH]


def loaded(**options: Any) -> list[torch.Tensor]:
    return list(torch.utils.data.DataLoader(torch.randn(7, 6), batch_size=4, **options))


def judged_apart(vectorize: bool) -> None:
    """The loss of the first of two micro-batches depends on nothing."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3))
    pipe = build(model=model, loss=None, method="pb", vectorize=vectorize)
    (output,) = pipe.forward_many([BATCH, BATCH], expected=2, judge=lambda n, output: None)
    pipe.backward(torch.ones_like(output))
    pipe.step()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.linear(x).tanh()


def given(gradient: Any, last: Any = None) -> None:
    """A loss outside, of whose gradient `gradient` makes what backward gets of an output."""
    pipe = build(model=nn.Sequential(*network(2), last or nn.Linear(6, 6)), loss=None)
    output = pipe.forward(BATCH)
    sum(part.sum() for part in (output if isinstance(output, tuple) else (output,))).backward()
    pipe.backward(gradient(output))
    pipe.step()


class Sloping(nn.Module):
    """Returns its input, too, so that the loss can ask how steep it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.requires_grad_()
        return self.head(self.first(x).tanh()), x


def steepness(output: Any, _: Any) -> torch.Tensor:
    value, x = output
    return torch.autograd.grad(value.sum(), x, create_graph=True)[0].square().mean()


def sloping(stages: Any) -> Any:
    return lambda: build(Sloping(), loss=steepness, stages=stages, example=BATCH.clone()).push(BATCH.clone(), BATCH)


ROWS: dict[str, Row] = {
    # pushes
    "a loss that differentiates by the model's input": Row(
        sloping("layer"),
        r"the loss failed on.*not have been used in the graph.*by the input of an earlier stage.*give stages=1$",
        sloping(1),
    ),
    "a list": Row(
        pushed([BATCH], BATCH),
        "push takes a tensor or a tuple of tensors, but got list",
        lambda: [pushed(BATCH, BATCH)(), pushed((BATCH, BATCH), BATCH, model=[Summed()])()],
    ),
    "no batch": Row(
        pushed(torch.tensor(1.0), BATCH),
        r"a 0-d tensor was given; give x\[None\]",
        pushed(torch.randn(6)[None], torch.randn(1, 6)),
    ),
    "an empty batch": Row(pushed(torch.randn(0, 6), torch.randn(0, 6)), "is empty; leave such batches out", trains),
    "other lengths": Row(
        pushed(BATCH, torch.randn(3, 6), micro_batch_size=2),
        r"micro-batches of 2, but have \[4, 3\]; push as many targets as samples, or use micro_batch_size=None",
        lambda: [
            pushed(BATCH, BATCH, micro_batch_size=2)(),
            pushed(BATCH, torch.randn(3, 6), micro_batch_size=None, loss=lambda o, y: o[:3].sub(y).square().mean())(),
        ],
    ),
    "an array as target": Row(
        pushed(BATCH, BATCH.numpy()),
        "y must be tensors, numbers, strings and Nones.*but is something of type ndarray; give torch.as_tensor of it",
        pushed(BATCH, torch.as_tensor(BATCH.numpy())),
    ),
    "an object in a target": Row(
        pushed(BATCH, {"y": BATCH, "more": object()}),
        "alone or in tuples, lists, dict.*but has something of type object; leave it out, or put what the loss needs",
        lambda: [
            pushed(BATCH, y, loss=lambda o, y: o.square().mean())()
            for y in (BATCH, 1, "a", None, (BATCH, 1), [BATCH], {"y": BATCH, "more": (BATCH, "a")})
        ],
    ),
    "replicas without a share": Row(
        pushed(torch.randn(3, 6), torch.randn(3, 6), replicas=2, micro_batch_size=1),
        r"3 samples pushed cannot be shared by 2 replicas; push a multiple of 2 \(DataLoader\(drop_last=True\)",
        lambda: [pushed(x, x, replicas=2, micro_batch_size=1)() for x in loaded(drop_last=True)],
    ),
    "pushed in inference mode": Row(inferring(None), "call it outside torch.inference_mode", pushed(BATCH, BATCH)),
    "built in inference mode": Row(
        inferring(pushed(BATCH, BATCH)),
        r"stage 0 \(0\): 0.weight was made in inference mode.*outside torch.inference_mode",
        pushed(BATCH, BATCH),
    ),
    "no loss to push": Row(
        pushed(BATCH, BATCH, loss=None),
        "loss=None; call forward and backward, or.*: with loss=lambda output, _: output.loss where the model",
        lambda: [outside("backward", "forward")(), judged(LABELLED, loss=lambda output, _: output.loss)()],
    ),
    "a loss of the model's own": Row(
        judged(LABELLED, loss=cross_entropy),
        r"head\): the loss failed on the first.*must be Tensor, not Answer; the model's output, of type "
        r"Answer, has a loss of its own: give loss=lambda output, _: output.loss$",
        judged(LABELLED, loss=lambda output, _: output.loss),
    ),
    "an output with a loss": Row(
        judged(LABELLED, loss=lambda output, _: output),
        "returned Answer; .*, of type Answer, has a loss of its own: give loss=lambda output, _: output.loss$",
        judged(LABELLED, loss=lambda output, _: output.loss),
    ),
    "a dictionary with a loss": Row(
        judged(LABELLED, loss=lambda output, _: output, kind=dict),
        r"the model's output, of type dict, has a loss of its own: give loss=lambda output, _: output\['loss'\]$",
        judged(LABELLED, loss=lambda output, _: output["loss"], kind=dict),
    ),
    "an output of several": Row(
        judged({"x": BATCH}, BATCH.argmax(1), loss=cross_entropy),
        r"tensors of which the loss must take one, for example loss=lambda output, target: torch.nn.functional.cross_"
        r"entropy\(output.logits, target\); or push the labels with x, as the model's forward calls them, and give lo",
        lambda: [
            judged(
                {"x": BATCH},
                BATCH.argmax(1),
                loss=lambda output, target: torch.nn.functional.cross_entropy(output.logits, target),
            )(),
            judged(LABELLED, loss=lambda output, _: output.loss)(),
        ],
    ),
    "an output in a tuple": Row(
        judged({"x": BATCH}, BATCH.argmax(1), loss=cross_entropy, kind=lambda loss, logits: (logits, loss)),
        r"of type tuple, has tensors of which.*cross_entropy\(output\[0\], target\)$",
        judged(
            {"x": BATCH},
            BATCH.argmax(1),
            loss=lambda output, target: torch.nn.functional.cross_entropy(output[0], target),
            kind=lambda loss, logits: (logits, loss),
        ),
    ),
    "numbers as target": Row(
        pushed(BATCH, BATCH.argmax(1).tolist(), loss=cross_entropy),
        r"the loss failed on.*must be Tensor, not list; y is a list of numbers: push torch.tensor\(y\)$",
        pushed(BATCH, torch.tensor(BATCH.argmax(1).tolist()), loss=cross_entropy),
    ),
    "a dictionary for a sequence": Row(
        pushed({"x": BATCH}, BATCH),
        r"but got dict: the modules.*; give x\['x'\], or a model",
        lambda: [
            pushed({"x": BATCH}["x"], BATCH)(),
            judged({"x": BATCH}, loss=lambda output, _: output.logits.mean())(),
        ],
    ),
    "a list of one": Row(pushed([BATCH], BATCH), r"but got list.*; give x\[0\], or a model", pushed([BATCH][0], BATCH)),
    "a list of two": Row(
        pushed(PAIR, BATCH, model=[Summed()]),
        r"but got list.*; give tuple\(x\), or a model",
        pushed(tuple(PAIR), BATCH, model=[Summed()]),
    ),
    "lists of a tokenizer": Row(
        judged({"x": BATCH.tolist()}, loss=lambda output, _: output.loss),
        'but got dict without a tensor; make tensors by torch.as_tensor, or.*: return_tensors="pt"$',
        judged({"x": torch.as_tensor(BATCH.tolist()), "labels": BATCH.argmax(1)}, loss=lambda output, _: output.loss),
    ),
    "arrays of a tokenizer": Row(
        judged({"x": BATCH, "labels": BATCH.argmax(1).numpy()}, loss=lambda output, _: output.loss),
        "but got dict with an array in it; make tensors by torch.as_tensor",
        judged({"x": BATCH, "labels": torch.as_tensor(BATCH.argmax(1).numpy())}, loss=lambda output, _: output.loss),
    ),
    "no labels": Row(
        judged({"x": BATCH}, loss=lambda output, _: output.loss),
        "returned NoneType; return it; a model that computes output.loss itself needs its labels in x for that",
        judged(LABELLED, loss=lambda output, _: output.loss),
    ),
    "forward with a loss": Row(lambda: build().forward(BATCH), "this one has a loss: call push", pushed(BATCH, BATCH)),
    "forward twice": Row(
        outside("forward", "forward"),
        "forward was called twice; call backward or forget between",
        lambda: [outside("forward", "forward", "backward")(), outside("forward", "forward", "forget")()],
    ),
    "gradients divided too early": Row(
        outside("forward", "forward", "backward", "average"),
        "average has divided the gradients of an update; call step before the next forward",
        outside("forward", "forward", "backward", "average", "step"),
    ),
    "a loss of nothing behind others": Row(
        lambda: judged_apart(True),
        "micro-batch 0: the loss depends on no output, but where stages run as one.*build the pipeline with "
        "vectorize=False",
        lambda: judged_apart(False),
    ),
    "backward first": Row(outside("backward"), "backward comes after forward", outside("backward", "forward")),
    "a gradient of another shape": Row(
        lambda: given(lambda output: torch.ones(2, 2)),
        r"given a tensor of shape \(2, 2\) and torch.float32, but the output of forward is one of shape \(4, 6\) and "
        "torch.float32; call backward on the loss, and give what it leaves there: output.grad",
        lambda: given(lambda output: output.grad),
    ),
    "a number for a gradient": Row(
        lambda: given(lambda output: 1.0),
        "given a float, but the output of forward is a tensor of shape .*call backward on the loss.*output.grad",
        lambda: given(lambda output: output.grad),
    ),
    "a gradient of one part": Row(
        lambda: given(lambda output: output[0].grad, Twice()),
        r"the output of forward has 2 tensors; .*tuple\(part.grad for part in output\), a gradient or None for each",
        lambda: given(lambda output: tuple(part.grad for part in output), Twice()),
    ),
    "no gradient": Row(
        lambda: given(lambda output: None),
        "backward was given no gradient, with which nothing would be trained; .*output.grad; or drop the micro-batch: "
        "call forget",
        lambda: [given(lambda output: output.grad), outside("forget", "forward")()],
    ),
    "other gradients": Row(
        outside("backward_many", "forward", give=2),
        "given 2 gradients, forward 1 inputs; give as many",
        outside("backward_many", "forward", give=1),
    ),
    "a state between": Row(
        outside("state_dict", "forward"),
        "gone forward; call backward or forget before",
        lambda: [outside("state_dict", "forward", c)() for c in ("backward", "forget")],
    ),
    "a plan of nothing": Row(
        lambda: build().plan(),
        r"plan: nothing was pushed yet; give it a push: pipe.plan\(x, y\)",
        lambda: build().plan(BATCH, BATCH),
    ),
    "commit in memory": Row(
        lambda: build().commit(), 'commit: weights are not on disk; use store="disk:FOLDER"', lambda: None
    ),
    "a workless timeline": Row(
        lambda: pipeback.timeline.timeline(pipeback.schedules.flowing(2), 2, 4, workers=[0]),
        "workers needs one entry per stage: 2, not 1",
        lambda: pipeback.timeline.timeline(pipeback.schedules.flowing(2), 2, 4, workers=[0, 1]),
    ),
    # states
    "another number of stages": Row(
        loads({"model": network(3)}),
        "4 stages, the pipeline has 3; build the model of the state",
        loads({"model": network(4)}),
    ),
    "another method": Row(
        loads({"method": "sgd"}),
        "belongs to method PipelinedBackpropagation.*build the pipeline with the method of the state",
        loads({"method": "pb"}),
    ),
    "another optimizer": Row(
        loads({"optimizer": adam}),
        r"belongs to optimizers \['SGD'\], the pipeline has \['Adam'\]; build the pipeline with those of the state",
        loads({"optimizer": sgd}),
    ),
    "other groups": Row(
        loads({"optimizer": lambda ps: sgd([{"params": [p]} for p in ps])}),
        "other parameter groups.*optimizer function that was given then",
        loads({}),
    ),
    "another weighing": Row(
        loads({"micro_batch_size": pipeback.MicroBatches(weights="samples")}),
        "weights='equal', the pipeline has 'samples'; build the pipeline with micro_batch_size=.*weights='equal'",
        loads({"micro_batch_size": pipeback.MicroBatches(weights="equal")}),
    ),
    "other replicas": Row(
        loads({"replicas": 2}), "replicas=1, the pipeline has 2.*resume with as many", loads({"replicas": 1})
    ),
    "another sparsity": Row(
        loads({"store": pipeback.Streaming(sparsity="magnitude")}),
        "sparsity=None, the pipeline has .*; build the pipeline with that of the state",
        loads({"store": pipeback.Streaming(sparsity=None)}),
    ),
    "another width": Row(
        loads({"model": network(4, 6).append(nn.Linear(6, 6))[1:]}), r"another model; build that one", loads({})
    ),
    "no state": Row(
        lambda: build().load_state_dict(network(4).state_dict()),
        "not a state of Pipeline.state_dict.*load a model's own state into pipe.model",
        lambda: build().model.load_state_dict(network(4).state_dict()),
    ),
}
