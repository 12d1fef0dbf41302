"""Batch normalisation replaced by group normalisation: against the formula, and what cannot be replaced."""

import pytest
import torch
from torch import nn

import pipeback
from pipeback.norms import to_group_norm


def reference(x, size, weight, bias, eps):
    """The formula, group by group."""
    y = torch.empty_like(x)
    for n in range(x.shape[0]):
        for begin in range(0, x.shape[1], size):
            group = x[n, begin : begin + size]
            variance = ((group - group.mean()) ** 2).mean()
            y[n, begin : begin + size] = (group - group.mean()) / (variance + eps) ** 0.5
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return y if weight is None else y * weight.view(shape) + bias.view(shape)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(nn.BatchNorm1d, ()), (nn.BatchNorm1d, (5,)), (nn.BatchNorm2d, (3, 4)), (nn.BatchNorm3d, (2, 3, 2)),
     (nn.SyncBatchNorm, (3, 4))],
)  # fmt: skip
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("channels", "asked", "size"), [(8, 2, 2), (6, 4, 3), (15, 2, 3), (7, 2, 7), (8, 100, 8)])
def test_it_is_the_formula(kind, shape, affine, channels, asked, size):
    torch.manual_seed(0)
    norm = kind(channels, eps=1e-3, affine=affine).double()
    if affine:
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    if (channels, asked) == (7, 2) and shape:
        size = 1  # 1 is as near as can be, and each channel has several places
    elif (channels, asked) == (7, 2):
        with pytest.raises(ValueError, match="one channel, where .* has one value"):
            to_group_norm(nn.Sequential(norm), asked)
        return
    if size == 1 and kind is nn.BatchNorm1d:
        with pytest.raises(ValueError, match="larger group_size"):
            to_group_norm(nn.Sequential(norm), asked)
        return
    model = to_group_norm(nn.Sequential(norm), asked)
    x = torch.randn(4, channels, *shape, dtype=torch.float64)
    assert type(model[0]) is nn.GroupNorm and model[0].num_groups == channels // size
    assert model[0].weight is norm.weight and model[0].bias is norm.bias
    torch.testing.assert_close(model(x), reference(x, size, norm.weight, norm.bias, 1e-3), rtol=1e-12, atol=1e-12)


def test_everything_about_the_weights_is_kept():
    norm = nn.BatchNorm2d(4).to(torch.bfloat16).eval()
    norm.bias.requires_grad_(False)
    names = set(norm.state_dict())
    model = to_group_norm(nn.Sequential(nn.Conv2d(3, 4, 1), norm))
    made = model[1]
    assert made.weight.dtype == torch.bfloat16 and made.weight.requires_grad and not made.bias.requires_grad
    assert not made.training and model.training
    assert set(made.state_dict()) == names - {"running_mean", "running_var", "num_batches_tracked"}
    assert to_group_norm(nn.Sequential(nn.BatchNorm2d(4, device="meta")))[0].weight.is_meta


def test_a_module_at_several_places_stays_one():
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Sequential(nn.Conv2d(4, 4, 1), norm))
    model.again = norm
    assert to_group_norm(model) is model
    assert type(model[1]) is nn.GroupNorm and model[1] is model[2][1] is model.again
    alone = nn.BatchNorm3d(4)
    assert to_group_norm(alone).weight is alone.weight


class Mine(nn.BatchNorm2d):
    pass


def test_what_cannot_be_replaced_is_refused_by_name_and_nothing_changes():
    hooked = nn.BatchNorm2d(4)
    hooked.register_forward_hook(lambda *_: None)
    parametrized = nn.BatchNorm2d(4)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    for bad, says in (
        (Mine(4), "no plain batch normalisation"),
        (nn.LazyBatchNorm2d(), "run the model once"),
        (hooked, "has hooks"),
        (parametrized, "is no plain|has parametrizations"),
        (nn.BatchNorm1d(1), "1 channel in groups of 2"),
    ):
        model = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.Identity(), bad))
        with pytest.raises(ValueError, match=rf"1\.1.*({says})"):
            to_group_norm(model)
        assert type(model[0]) is nn.BatchNorm2d and model[1][1] is bad
    for size in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="group_size must be"):
            to_group_norm(nn.Sequential(), size)


def test_it_trains_at_update_size_one():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    )
    pipe = pipeback.Pipeline(
        to_group_norm(model), loss=nn.functional.cross_entropy, micro_batch_size=1,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    )  # fmt: skip
    before = model[0][1].weight.detach().clone()
    assert pipe.push(torch.randn(6, 1, 4, 4), torch.randint(2, (6,))).isfinite()
    pipe.drain()
    assert not torch.equal(model[0][1].weight, before)
