"""Tensors that leave a block by another way than what it returns: by a hook, or in a list that the model holds."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.splitting.plain_training import equals_plain_training

X = [torch.randn(5, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, h):
        weights = torch.softmax(self.inner(h), -1)
        return h * weights, weights


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = Attention(), nn.Linear(4, 4)

    def forward(self, h, found=None):
        h, weights = self.attention(h)
        if found is not None:
            found[0].append(weights)  # a list in a tuple of the caller
        return torch.tanh(self.out(h))


class Hooked(nn.Module):
    """As models of transformers collect attention weights: by hooks on modules within their blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, h):
        found = []
        hooks = [b.attention.register_forward_hook(lambda m, x, out: found.append(out[1])) for b in self.blocks]
        for block in self.blocks:
            h = block(h)
        for hook in hooks:
            hook.remove()
        return self.head(h) + sum(found)


class Router(nn.Module):
    """A layer by itself, whose inner value is let out, too."""

    def __init__(self, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.out = out

    def forward(self, h):
        logits = h @ self.weight
        self.out.append(logits)
        return logits.softmax(-1) * h


class Routed(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.inner, self.router = nn.Linear(4, 4), Router(out)

    def forward(self, h):
        return self.router(self.inner(h))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        logits = []
        self.take = lambda: [logits.pop() for _ in list(logits)]
        self.blocks = nn.ModuleList(Routed(logits) for _ in range(3))

    def forward(self, h):
        self.take()
        for block in self.blocks:
            h = block(h)
        return h + sum(x.mean() for x in self.take())


@pytest.mark.parametrize("model", [Hooked, Listed])
@pytest.mark.parametrize("stages", ["block", "layer", 2])
def test_a_block_that_lets_a_tensor_out_is_looked_into(model, stages):
    pipe = equals_plain_training(model(), X, plain=model(), stages=stages)
    assert pipe.stages == {(Hooked, "block"): 4, (Hooked, "layer"): 7, (Listed, "block"): 3, (Listed, "layer"): 3}.get(
        (model, stages), 2
    )


def test_what_is_to_stay_whole_is_not_looked_into():
    with pytest.raises(ValueError, match=r"Hooked.forward gives .* made within Block 'blocks.1'.* out of the leaves"):
        pipeback.Pipeline(
            copy.deepcopy(Hooked()), loss=mse_loss, optimizer=torch.optim.SGD, example=X[0],
            stages=pipeback.Splitting("block", leaves=["blocks.1"]), method="sgd",
        )  # fmt: skip
