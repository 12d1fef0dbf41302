"""Law: what must simply work does: each against plain training, bit for bit, or a recurrence by versions."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from tests.helpers.choice import mostly_rare
from tests.laws.by_versions import by_versions
from tests.laws.cases import data, everything
from tests.laws.plain import momentum, pipeline, same

STAGES = 4
FLOWING = ["pb", "cerebras", "pipedream", "pipedream_2bw", "pipemare", "lwp-weight"]
pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def linears(seed=0, stages=STAGES, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(stages)]).to(dtype)


# -- frozen weights ----------------------------------------------------------------------------------------------------


def frozen(which):
    def build(dtype=torch.float32):
        model = linears(dtype=dtype)
        for name, p in model.named_parameters():
            if name.startswith(which):
                p.requires_grad_(False)
        return model

    return build


PARTS = [("0.",), ("1.",), ("3.",), ("0.", "1."), ("1.0.weight", "2.0.bias"), ("0.", "2.0.weight")]


@pytest.mark.parametrize("which", PARTS, ids=str)
def test_frozen_stages_and_parts_of_them(which):
    same(frozen(which), data(13))


@pytest.mark.parametrize(
    ("case", "which"),
    mostly_rare(
        product(FLOWING, PARTS), *(("pipedream", which) for which in PARTS), *((case, PARTS[4]) for case in FLOWING)
    ),
    ids=str,
)
def test_frozen_weights_do_not_move_and_the_others_agree_between_runtimes(case, which):
    found = []
    for options in ({}, {"workers": 2}):
        model = frozen(which)()
        before = copy.deepcopy(model.state_dict())
        pipe = pipeline(model, case, **options)
        for x, y in data(12):
            pipe.push(x, y)
        pipe.drain()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]) == name.startswith(which), name
        found.append(everything(pipe))
        pipe.close()
    assert torch.equal(*found)


RECURRENCES = [("pb", 2, False), ("pb-slack1", 1, False), ("pipedream", 1, True)]


@pytest.mark.parametrize(
    ("case", "slack", "stash", "which"),
    mostly_rare(
        [(*row, which) for row in RECURRENCES for which in PARTS],
        *((*RECURRENCES[0], which) for which in PARTS), *((*row, PARTS[4]) for row in RECURRENCES),
    ),
    ids=str,
)  # fmt: skip
def test_frozen_weights_in_the_recurrence(case, slack, stash, which):
    some = data(12, dtype=torch.float64)
    model = frozen(which)(torch.float64)
    wanted = by_versions(frozen(which)(torch.float64), some, slack, stash=stash)
    pipe = pipeline(model, case)
    for x, y in some:
        pipe.push(x, y)
    pipe.drain()
    for a, b in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-12, atol=1e-12)


# -- groups of parameters ----------------------------------------------------------------------------------------------


def decayed(params):
    """Weight decay off, and another rate, for biases and norms: whatever has one dimension."""
    many, few = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    groups = [{"params": many, "weight_decay": 0.1}, {"params": few, "weight_decay": 0.0, "lr": 0.05}]
    return momentum([group for group in groups if group["params"]])


def normed():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6, bias=False)), nn.LayerNorm(6), nn.Linear(6, 6)
    )


def adamw(params):
    groups = decayed(params).param_groups
    return torch.optim.AdamW(
        [{"params": g["params"], "weight_decay": g["weight_decay"], "lr": 0.1 * g["lr"]} for g in groups]
    )


@pytest.mark.parametrize("optimizer", [decayed, adamw])
def test_groups_with_options_of_their_own(optimizer):
    same(normed, data(13), optimizer)


@pytest.mark.parametrize("order", ["grouped", "sticky"])
def test_groups_in_the_recurrence(order):
    some, model = data(12, dtype=torch.float64), linears(dtype=torch.float64)
    split = lambda params: momentum(  # noqa: E731
        [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
         {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}]
    )  # fmt: skip
    wanted = by_versions(linears(dtype=torch.float64), some, 2, decay=lambda name: 0.1 if "weight" in name else 0.0)
    pipe = pipeline(model, "pb", split, debug=pipeback.Debug(order=order))
    for x, y in some:
        pipe.push(x, y)
    pipe.drain()
    for a, b in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-12, atol=1e-12)


# -- batch normalisation -----------------------------------------------------------------------------------------------


def convolutional(*, freeze=False, channels_last=False):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=None), nn.ReLU()),
            nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 6)),
        )
        model[0][1].running_mean.uniform_(-0.5, 0.5)
        model[0][1].running_var.uniform_(0.5, 1.5)
        if freeze:
            model[0][1].eval()
            model[0][1].weight.requires_grad_(False)
        return model.to(memory_format=torch.channels_last) if channels_last else model

    return build


def images(count=13, samples=8, size=6, channels_last=False):
    generator = torch.Generator().manual_seed(4)
    form = torch.channels_last if channels_last else torch.contiguous_format
    return [
        (
            torch.randn(samples, 3, size, size, generator=generator).to(memory_format=form),
            torch.randn(samples, 6, generator=generator),
        )
        for _ in range(count)
    ]


def test_running_statistics_with_micro_batches():
    same(convolutional(), images())


@pytest.mark.parametrize("activations", ["recompute", "host"])
def test_running_statistics_change_once_a_micro_batch(activations):
    same(convolutional(), images(), activations=activations)


@pytest.mark.parametrize("case", FLOWING)
def test_running_statistics_of_flowing_methods_count_every_micro_batch_once(case):
    model = convolutional()()
    pipe = pipeline(model, case)
    for x, y in images(9):
        pipe.push(x, y)
    pipe.drain()
    assert model[0][1].num_batches_tracked == model[1][1].num_batches_tracked == 9


def test_frozen_batch_normalisation_inside_training():
    same(convolutional(freeze=True), images())
    for case in FLOWING:
        model = convolutional(freeze=True)()
        before = copy.deepcopy(model[0][1].state_dict())
        pipe = pipeline(model, case)
        for x, y in images(9):
            pipe.push(x, y)
        pipe.drain()
        after = model[0][1].state_dict()
        assert all(torch.equal(after[k], before[k]) for k in before if k != "bias")
        assert not torch.equal(after["bias"], before["bias"]) and not model[0][1].training
        pipe.evaluate(images(1)[0][0])
        assert not model[0][1].training and model[1][1].training


# -- inputs ------------------------------------------------------------------------------------------------------------


def sequences(lengths):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randint(9, (3, n), generator=generator), torch.randn(3, n, 8, generator=generator)) for n in lengths]


def attention():
    torch.manual_seed(0)
    block = lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)  # noqa: E731
    return nn.Sequential(nn.Embedding(9, 8), block(), block(), nn.Linear(8, 8))


LENGTHS = (5, 2, 7, 1, 5, 3, 9, 4, 4, 6, 2, 8)


def test_sequences_of_any_length():
    same(attention, sequences(LENGTHS))


@pytest.mark.parametrize("case", mostly_rare(FLOWING, "cerebras", "pipedream", "pipemare"))
def test_sequences_of_any_length_in_flight(case):
    found = []
    for options in ({}, {"workers": 2}, {"debug": pipeback.Debug(order="random")}):
        pipe = pipeline(attention(), case, **options)
        losses = torch.stack([pipe.push(x, y).clone() for x, y in sequences(LENGTHS)])
        found.append((losses, everything(pipe)))
        pipe.close()
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0]) and torch.equal(found[0][1], other[1])


@pytest.mark.parametrize("case", ["sgd", "gpipe-4", "one_f_one_b-3", *FLOWING])
def test_a_short_last_batch_is_what_its_micro_batches_are(case):
    """Pushes of eight samples, the last of five, in micro-batches of three: the same as pushing 3, 3, 2, …, 3, 2."""
    x, y = (torch.cat(parts) for parts in zip(*data(7), strict=True))
    whole = pipeline(linears(), case, micro_batch_size=3)
    single = pipeline(linears(), case)
    for begin in range(0, 21, 8):
        a, b = x[begin : begin + 8], y[begin : begin + 8]
        whole.push(a, b)
        for n in range(0, len(a), 3):
            single.push(a[n : n + 3], b[n : n + 3])
    assert torch.equal(everything(whole), everything(single))


def test_a_short_last_batch_is_plain_training():
    some = [*data(9), *data(1, samples=2, seed=5), *data(1, samples=1, seed=6)]
    same(linears, some)


@pytest.mark.parametrize("weights_too", [False, True])
def test_channels_last(weights_too):
    same(convolutional(channels_last=weights_too), images(channels_last=True))
    model = convolutional(channels_last=weights_too)()
    found = []
    for options in ({}, {"workers": 2}, {"store": "host"}):
        pipe = pipeline(copy.deepcopy(model), "cerebras", **options)
        for x, y in images(9, channels_last=True):
            pipe.push(x, y)
        kept = pipe.model[1][0].weight
        assert kept.is_contiguous(memory_format=torch.channels_last) == weights_too
        found.append(everything(pipe))
        pipe.close()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# -- random layers in threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", mostly_rare(["sgd", "gpipe-4", *FLOWING], "gpipe-4", "pb", "cerebras", "pipedream"))
def test_dropout_under_threads(case):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(
            *[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh(), nn.AlphaDropout(0.2)) for _ in range(STAGES)]
        )

    found = []
    for options in ({}, {"workers": 2}, {"workers": 4}):
        torch.manual_seed(9)
        pipe = pipeline(build(), case, **options)
        losses = []
        for x, y in data(13):
            losses.append(pipe.push(x, y))
            torch.randn(5)  # the caller draws meanwhile
        found.append((torch.stack([loss.clone() for loss in losses]), everything(pipe)))
        pipe.close()
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0]) and torch.equal(found[0][1], other[1])
