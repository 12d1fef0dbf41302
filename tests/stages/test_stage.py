"""A stage alone: forward, backward and update are those of plain torch, whatever stands around it."""

import torch
from torch import nn

from pipeback.methods import create
from pipeback.stages.stage import Stage


def test_two_stages_by_hand_are_plain_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    twin = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    twin.load_state_dict(model.state_dict())
    build = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)  # noqa: E731
    first = Stage(0, 2, model[0], "0", create("sgd"), build)
    second = Stage(1, 2, model[1], "1", create("sgd"), build, nn.functional.mse_loss)
    optimizer = build(twin.parameters())
    for i in range(5):
        x, y = torch.randn(2, 4), torch.randn(2, 3)
        loss = second.forward(i, first.forward(i, x), y)
        first.backward(i, second.backward(i))
        second.update(i)
        first.update(i)
        plain = nn.functional.mse_loss(twin(x), y)
        plain.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, plain.detach()) and not loss.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert (first.version, second.version, first.flights, second.flights) == (5, 5, {}, {})


class Turned(nn.Module):
    """Channels last, as a linear layer takes them; its input's gradient lies in memory so, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.permute(0, 2, 3, 1))


def test_gradients_go_upstream_as_they_lie_in_memory():
    torch.manual_seed(0)
    plain = torch.randn(2, 4, 6, 5)
    for module in (Turned(), nn.Conv2d(4, 4, 3)):
        stage = Stage(1, 3, module, "1", create("sgd"), lambda params: torch.optim.SGD(params, lr=0.1))
        for x in (plain, plain.to(memory_format=torch.channels_last), plain[:, :, ::2], plain[:, :1].expand_as(plain)):
            leaf = x.detach().requires_grad_()
            wanted = torch.autograd.grad(module(leaf).square().sum(), leaf)[0]
            y = stage.forward(0, x)
            found = stage.backward(0, 2 * y.detach())
            assert torch.equal(found, wanted) and found.stride() == wanted.stride()
