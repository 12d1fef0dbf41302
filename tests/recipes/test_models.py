"""The models of the recipes: stages, skips, causality, and that every method of the core takes them."""

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, cross_entropy, group_norm, pad

pytest.importorskip("lightning")

import pipeback
from pipeback.recipes.models import MODELS
from pipeback.recipes.models.convolution import First, Second

IMAGES = {"channels": 3, "classes": 10, "size": 16}
CASES = {
    "residual_mlp": ({"inputs": 12, "classes": 5}, {"width": 8, "depth": 3}, 5),  # facts, options, stages
    "resnet20": (IMAGES, {"width": 4, "groups": 2}, 20),
    "vgg": (IMAGES, {"width": 4, "groups": 2}, 8),
    "transformer": ({"vocabulary": 11, "context": 9}, {"width": 8, "depth": 2, "heads": 2}, 4),
    "gpt": ({"vocabulary": 11, "context": 9}, {"width": 8, "layers": 2}, 4),
}


def build(name, **more):
    facts, options, _ = CASES[name]
    torch.manual_seed(0)
    return MODELS[name](**{**facts, **options, **more})


def samples(name, count=4):
    stream = torch.Generator().manual_seed(1)
    if name in ("transformer", "gpt"):
        return tuple(torch.randint(11, (count, 9), generator=stream) for _ in range(2))
    if name == "residual_mlp":
        return torch.randn(count, 12, generator=stream), torch.randint(5, (count,), generator=stream)
    return torch.randn(count, 3, 16, 16, generator=stream), torch.randint(10, (count,), generator=stream)


def loss(output, target):
    return cross_entropy(output.flatten(0, -2), target.flatten())


@pytest.mark.parametrize("name", MODELS)
def test_stages(name):
    model, stages = build(name), CASES[name][2]
    assert isinstance(model, nn.Sequential) and len(model) == stages
    assert all(any(p.requires_grad for p in stage.parameters()) for stage in model)
    owners = [id(p) for stage in model for p in stage.parameters()]
    assert len(owners) == len(set(owners)), "a weight belongs to two stages"
    value = samples(name)[0]
    for stage in model:
        value = stage(value)
        assert isinstance(value, torch.Tensor) or all(isinstance(v, torch.Tensor) for v in value)


@pytest.mark.parametrize("method", ["pb", "cerebras", "pipedream"])
@pytest.mark.parametrize("name", MODELS)
def test_the_pipeline_takes_it(name, method):
    """Nothing is refused: no stage saves a function of its weights; and every weight is trained."""
    model = build(name)
    before = [p.detach().clone() for p in model.parameters()]
    pipe = pipeback.Pipeline(
        model,
        loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        method=method,
        micro_batch_size=2,
    )
    assert pipe.delays[0] == (1 if method == "pipedream" else 2) * (CASES[name][2] - 1)
    x, y = samples(name, 8)
    assert all(torch.isfinite(pipe.push(x, y)) for _ in range(3))
    pipe.drain()
    unchanged = [n for (n, p), old in zip(model.named_parameters(), before, strict=True) if torch.equal(p, old)]
    assert not unchanged


@pytest.mark.parametrize(("inside", "outside", "stride"), [(4, 4, 1), (4, 8, 2), (3, 8, 2)])
def test_a_skip_in_a_pair_is_an_ordinary_block(inside, outside, stride):
    torch.manual_seed(0)
    first, second = First(inside, outside, 2, stride), Second(outside, 2)
    for norm in (first.body.norm, second.body.norm):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    x = torch.randn(5, inside, 8, 8)

    h = conv2d(x, first.body.conv.weight, stride=stride, padding=1)
    h = torch.relu(group_norm(h, 2, first.body.norm.weight, first.body.norm.bias))
    h = conv2d(h, second.body.conv.weight, padding=1)
    h = group_norm(h, 2, second.body.norm.weight, second.body.norm.bias)
    grown = outside - inside
    shortcut = pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, grown // 2, grown - grown // 2))
    assert torch.equal(second(first(x)), torch.relu(h + shortcut))


def test_resnet20_has_the_sizes_of_the_paper():
    model = MODELS["resnet20"](channels=3, classes=10, size=32)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 19
    assert sum(p.numel() for p in model.parameters()) == 269_722  # 0.27 million in the paper
    x, shapes = torch.zeros(1, 3, 32, 32), []
    for stage in model:
        x = stage(x)
        shapes.append(tuple((x[0] if isinstance(x, tuple) else x).shape[1:]))
    assert shapes == [(16, 32, 32)] * 7 + [(32, 16, 16)] * 6 + [(64, 8, 8)] * 6 + [(10,)]


@pytest.mark.parametrize("depth", [8, 11, 13, 16])
@pytest.mark.parametrize("size", [28, 32])
def test_vgg_depths(depth, size):
    model = MODELS["vgg"](channels=1, classes=10, size=size, depth=depth, width=4, groups=2)
    expected = {8: 8, 11: 9, 13: 11, 16: 14}[depth]  # without the paper's two hidden linear layers
    assert len(model) == expected
    assert model(torch.randn(2, 1, size, size)).shape == (2, 10)


def test_no_token_sees_a_later_one():
    model = build("transformer")
    tokens = samples("transformer")[0]
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(-1).any()


def test_a_prefix_gives_the_same_as_the_whole():
    model, tokens = build("transformer"), samples("transformer")[0]
    torch.testing.assert_close(model(tokens)[:, :4], model(tokens[:, :4]))


def test_outputs_may_be_fewer_than_tokens():
    assert build("transformer", outputs=4)(samples("transformer")[0]).shape == (4, 9, 4)


def test_dropout_is_drawn_by_the_stage():
    model = build("transformer", dropout=0.5)
    tokens = samples("transformer")[0]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    pipe = pipeback.Pipeline(model.train(), loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), method="pb")
    assert torch.isfinite(pipe.push(*samples("transformer")))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet20", {"inputs": 64, "classes": 10}, "model=resnet20 is for images .* but the data are vectors"),
        ("transformer", {**IMAGES}, "model=transformer is for sequences of tokens .* but the data are images"),
        ("residual_mlp", {**IMAGES}, "model=residual_mlp is for vectors .*data.flat=true.* but the data are images"),
        ("resnet20", {**IMAGES, "width": 6}, "model.groups=4 does not divide the 6 channels"),
        ("vgg", {**IMAGES, "depth": 12}, "model.depth=12: vgg has depths 8, 11, 13, 16"),
        ("transformer", {"vocabulary": 5, "context": 4, "width": 10, "heads": 4}, "model.heads=4 does not divide"),
    ],
)
def test_bad_input_reads_well(name, options, message):
    with pytest.raises(ValueError, match=message):
        MODELS[name](**options)
