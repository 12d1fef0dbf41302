"""Law: in whatever structure x and y are pushed, what is trained is what a plain loop trains, or plain tensors do."""

import io
import json

import pytest
import torch
from torch import nn

import pipeback
from pipeback.tensors import batches
from tests.helpers.choice import diagonal
from tests.laws.batch_forms import FORMS, KEYWORDS, Encoding, Keywords, Record, Whole, numbers, weighed


def build(model, form="tuple", **options):
    given = {"loss": weighed(form), "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "method": "sgd"}
    return pipeback.Pipeline(model, **{**given, **options})


def by_hand(model, every, size):
    """The mean losses of a plain loop, as `push` gives them."""
    optimizer, losses, loss = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), [], weighed("tuple")
    for push in every:
        found = []
        for a, b, *target in zip(*(part.split(size) for part in push), strict=True):
            found.append(loss(model.through(a, b), target))
            optimizer.zero_grad()
            found[-1].backward()
            optimizer.step()
        losses.append(torch.stack([one.detach() for one in found]).mean())
    return losses


def same(model, other):
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize(("form", "whole"), [*((form, False) for form in KEYWORDS), *((form, True) for form in FORMS)])
def test_any_x_equals_a_plain_loop(form, whole):
    x = FORMS[form][0]
    model, every = Whole(form) if whole else Keywords(), numbers(3)
    pipe = build(model, example=x(*every[0][:2]), micro_batch_size=4)
    losses = [pipe.push(x(a, b), (label, weight)) for a, b, label, weight in every]
    pipe.drain()
    plain = Keywords()
    assert torch.equal(torch.stack(losses), torch.stack(by_hand(plain, every, 4)))
    assert same(pipe.model, plain)
    a, b = every[0][:2]
    assert torch.equal(pipe.evaluate(x(a, b)), plain.eval()(a, b))
    resumed = build(Whole(form) if whole else Keywords(), example=x(a, b), micro_batch_size=4)
    resumed.load_state_dict(pipe.state_dict())
    assert resumed.pushes == 3
    assert torch.equal(resumed.push(x(a, b), every[0][2:]), pipe.push(x(a, b), every[0][2:]))


@pytest.mark.parametrize("form", FORMS)
def test_any_y_equals_a_plain_loop(form):
    every = numbers(3)
    pipe = build(Keywords(), form, example=every[0][:2], micro_batch_size=4)
    losses = [pipe.push((a, b), FORMS[form][0](label, weight)) for a, b, label, weight in every]
    pipe.drain()
    plain = Keywords()
    assert torch.equal(torch.stack(losses), torch.stack(by_hand(plain, every, 4)))
    assert same(pipe.model, plain)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 3)
    )


def trained(model, form, x, every, **options):
    """The losses and weights of a pipeline whose state, with micro-batches in flight, another has taken up."""
    options = {"method": "pb", **options}
    pipe = build(model(), form, **options)
    y = FORMS[form][0]
    losses = [pipe.push(x(a, b), y(label, weight)) for a, b, label, weight in every[:4]]
    file = io.BytesIO()
    torch.save(pipe.state_dict(), file)
    pipe.close()
    file.seek(0)
    pipe = build(model(), form, **options)
    pipe.load_state_dict(torch.load(file, weights_only=True))
    losses += [pipe.push(x(a, b), y(label, weight)) for a, b, label, weight in every[4:]]
    pipe.drain()
    found = torch.stack([loss.clone() for loss in losses]), {k: v.clone() for k, v in pipe.model.state_dict().items()}
    pipe.close()
    return found


FLUSH = pipeback.methods.create("gpipe", micro_batches=3)  # whose last stage has targets in flight
RUNTIMES = {
    "flush": {"method": FLUSH}, "flush, computed anew": {"method": FLUSH, "activations": "recompute"},
    "flush of workers": {"method": FLUSH, "workers": 2}, "flush of a store": {"method": FLUSH, "store": "host"},
    "loop": {}, "workers": {"workers": 2}, "replicas": {"replicas": 2}, "store": {"store": "host"},
    "recompute": {"activations": "recompute"}, "host": {"activations": "host"}, "cut": {"micro_batch_size": 3},
    "random order": {"debug": pipeback.Debug(order="random", seed=3)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "runtime"), diagonal(["encoding", "nested", "dataclass", "named tuple"], [*RUNTIMES, "as one"])
)
def test_every_runtime_takes_a_target_as_it_takes_plain_tensors(runtime, form):
    options = {"vectorize": True} if runtime == "as one" else RUNTIMES[runtime]
    every = numbers(7)
    wanted = trained(network, "tuple", lambda a, b: a, every, **options)
    found = trained(network, form, lambda a, b: a, every, **options)
    assert torch.equal(found[0], wanted[0])
    assert all(map(torch.equal, found[1].values(), wanted[1].values()))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("form", ["encoding", "dataclass"])
def test_every_runtime_takes_an_x_as_it_takes_plain_tensors(runtime, form):
    every = numbers(7)
    wanted = trained(Keywords, "tuple", lambda a, b: (a, b), every, example=every[0][:2], **RUNTIMES[runtime])
    x = FORMS[form][0]
    found = trained(lambda: Whole(form), "tuple", x, every, example=x(*every[0][:2]), **RUNTIMES[runtime])
    assert torch.equal(found[0], wanted[0])
    assert all(map(torch.equal, found[1].values(), wanted[1].values()))


def test_a_loss_of_ones_own_takes_an_x_of_any_form():
    (a, b, label, weight), *_ = numbers(1)
    pipe = build(Keywords(), loss=None, example=Encoding({"a": a, "b": b}))
    output = pipe.forward(Encoding({"a": a, "b": b}))
    loss = weighed("dict")(output, {"a": label, "b": weight})
    pipe.backward(torch.autograd.grad(loss, output)[0])
    pipe.step()
    plain = Keywords()
    by_hand(plain, [(a, b, label, weight)], 8)
    assert same(pipe.model, plain)


def test_what_is_one_per_sample_is_cut_and_the_rest_is_whole():
    seen = []

    def loss(output, target):
        seen.append((target["names"], target["word"], target["scale"], len(target["weights"])))
        return output.square().mean()

    pipe = build(network(), loss=loss, micro_batch_size=2)
    y = {"names": ["a", "b", "c", "d"], "word": "all", "scale": torch.tensor(2.0), "weights": [1.0, 2.0, 3.0]}
    pipe.push(torch.randn(4, 4), y)
    assert seen[-2:] == [(["a", "b"], "all", 2.0, 3), (["c", "d"], "all", 2.0, 3)]
    assert y["names"] == ["a", "b", "c", "d"]  # the user's own is as it was


def test_a_target_is_the_users_no_more_than_it_was():
    """Its tensors are cut off their graphs, and a loss that writes into it changes nothing of the user's."""

    def loss(output, target):
        assert not target["a"].requires_grad
        target["b"] = None
        return (output - target["a"]).square().mean()

    pipe = build(network(), loss=loss)
    y = {"a": torch.randn(4, 3, requires_grad=True) * 2, "b": 1}
    pipe.push(torch.randn(4, 4), y)
    assert y["b"] == 1 and y["a"].requires_grad


def test_a_dictionary_with_names_of_parameters_is_never_one_argument():
    class Model(Keywords):
        def forward(self, a, b=0):
            return self.through(a, b)

    a = torch.randn(4, 4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'labels'"):
        build(Model(), example={"a": a, "labels": a})
    with pytest.raises(TypeError, match="takes from 2 to 3 positional arguments but 4 were given"):
        build(Model(), example=(a, a, a))


@pytest.mark.parametrize("kept", [True, False])
def test_a_state_names_the_classes_of_what_is_pushed(kept):
    """Those that cannot be named are refused when a state is asked for, and never when it is read."""
    if kept:
        kind = Record
    else:

        class kind(Record):
            pass

    (a, b, label, weight), *_ = numbers(1)
    pipe = build(Whole("dataclass"), example=kind(a, b))
    pipe.push(kind(a, b), (label, weight))
    if kept:
        build(Whole("dataclass"), example=kind(a, b)).load_state_dict(pipe.state_dict())
    else:
        with pytest.raises(ValueError, match=r"has a kind in it.*define it at the top of a module"):
            pipe.state_dict()


def test_a_state_makes_only_what_a_micro_batch_may_have():
    (a, b, label, weight), *_ = numbers(1)
    pipe = build(Whole("dataclass"), example=Record(a, b))
    pipe.push(Record(a, b), (label, weight))
    state = pipe.state_dict()
    for other in ("no.such.module", "torch.nn"):
        plain = json.dumps(state["plain"]).replace("tests.laws.batch_forms", other).replace("Record", "Linear")
        with pytest.raises(ValueError, match=f"no such class was imported from {other}; import {other} before"):
            build(Whole("dataclass"), example=Record(a, b)).load_state_dict({**state, "plain": json.loads(plain)})


def test_what_a_data_loader_makes_of_dictionaries_goes_in_as_it_is():
    """The labels are in x, y is None, and the model computes its loss itself."""
    rows = [{"a": a, "b": b, "labels": label} for a, b, label, _ in zip(*numbers(1)[0], strict=True)]

    class Model(Keywords):
        def forward(self, a, b, labels=None):
            logits = super().forward(a, b)
            return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}

    every = list(torch.utils.data.DataLoader(rows, batch_size=4))
    pipe = build(Model(), loss=lambda output, _: output["loss"], example=every[0], micro_batch_size=2)
    losses = [pipe.push(batch) for batch in every]
    plain = Model()
    optimizer, wanted = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), []
    for batch in every:
        for n in (0, 2):
            loss = plain(**{key: value[n : n + 2] for key, value in batch.items()})["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            wanted.append(loss.detach())
    assert torch.equal(torch.stack(losses), torch.stack(wanted).view(2, 2).mean(1))
    assert same(pipe.model, plain)


def test_what_transformers_gives_goes_in_as_it_is():
    transformers = pytest.importorskip("transformers")
    (a, b, label, weight), *_ = every = numbers(3)
    encoding = lambda a, b: transformers.BatchEncoding({"a": a, "b": b}, [object()], n_sequences=1)  # noqa: E731
    output = lambda a, b: transformers.modeling_outputs.SequenceClassifierOutput(loss=a, logits=b)  # noqa: E731

    def loss(out, target):
        return (nn.functional.cross_entropy(out, target.loss, reduction="none") * target["logits"]).mean()

    method = pipeback.methods.create("gpipe", micro_batches=5)
    pipes = [
        build(Keywords(), loss=loss, method=method, example=encoding(a, b), micro_batch_size=4),
        build(Whole("encoding"), loss=loss, method=method, example=encoding(a, b), micro_batch_size=4),
        build(Keywords(), method=method, example=(a, b), micro_batch_size=4),
    ]
    for a, b, label, weight in every:
        pushed = [pipe.push(encoding(a, b), output(label, weight)) for pipe in pipes[:2]]
        assert torch.equal(*pushed) and torch.equal(pushed[0], pipes[2].push((a, b), (label, weight)))
    other = build(Whole("encoding"), loss=loss, method=method, example=encoding(a, b), micro_batch_size=4)
    other.load_state_dict(pipes[1].state_dict())  # with a micro-batch in flight
    pipes.append(other)
    for pipe in pipes:
        pipe.drain()
    assert all(same(pipe.model, pipes[2].model) for pipe in pipes)


@pytest.mark.parametrize("form", ["encoding", "nested", "dataclass"])
def test_a_plan_and_a_breakdown_take_it_too(form):
    (a, b, label, weight), *_ = numbers(1)
    make = FORMS[form][0]
    pipe = build(Whole(form), form, example=make(a, b), micro_batch_size=4)
    assert len(pipe.breakdown(make(a, b), make(label, weight))) == pipe.stages
    assert pipe.plan(make(a, b), make(label, weight)).micro_batches == 2


class Meta:
    """An object that is nobody's structure."""

    def __init__(self):
        self.table, self.me = torch.zeros(100), self


def test_other_objects_are_not_looked_into():
    given, record = Meta(), Record(torch.arange(4), "word")
    batch = {"x": torch.arange(4), "meta": given, "again": [record, record]}
    assert batches.samples(batch) == [4, 4, 4]
    first, second = batches.cut(batch, [2, 2])
    assert first["meta"] is given and second["meta"] is given
    assert second["again"][1].a.tolist() == [2, 3] and second["again"][0] is not second["again"][1]
    with pytest.raises(TypeError, match=r"y must be.*has something of type Meta; .*what the loss needs into"):
        build(network(), loss=lambda o, y: o.sum()).push(torch.randn(4, 4), {"meta": given})


def test_texts_that_differ_from_push_to_push_are_left_out():
    (a, b, label, weight), *_ = numbers(1)
    batch = {"a": a, "b": b, "texts": ["0"] * 8}
    pipe = build(Whole("dict"), example=batch)
    told = "followed for 64 micro-batches that differ in what is pushed beside tensors.*leave out what the forward"
    with pytest.raises(ValueError, match=told):
        for n in range(70):
            pipe.push({**batch, "texts": [str(n)] * 8}, (label, weight))
    del batch["texts"]  # as it says
    pipe = build(Whole("dict"), example=batch)
    for _ in range(70):
        pipe.push(batch, (label, weight))
