"""A stage alone: forward, backward and update are those of plain torch, whatever stands around it."""

import torch
from torch import nn

from pipeback.methods import create
from pipeback.stage import Stage


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
