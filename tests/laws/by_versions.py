"""Flowing methods by versions of the weights, on a sequence of tanh(linear): F(j) reads version max(0, j − D), B(j) j.

Stage s has D = slack · (S − 1 − s). It knows nothing of events, stages or stores: lists of tensors, and aten.
"""

import torch
from torch import nn


def by_versions(
    model, some, slack, *, rate=0.02, m=0.9, decay=lambda name: 1e-3, stash=False, ahead=False, keep=None, half=None
):
    """The weights after the last micro-batch, in their order; frozen ones have one version.

    decay: name of a weight -> its weight decay. stash: B(j) reads what F(j) did. ahead: F reads
    w + D (w − the version before). keep: the dtype of versions; half: what is computed with is rounded to.
    """
    S, aten = len(model), torch.ops.aten
    names = [[n for n, _ in stage.named_parameters()] for stage in model]
    trains = [[p.requires_grad for p in stage.parameters()] for stage in model]
    history = [[[p.detach().to(keep or p.dtype, copy=True) for p in stage.parameters()]] for stage in model]
    velocity = [[torch.zeros_like(w) for w in versions[0]] for versions in history]
    for j, (x, y) in enumerate(some):
        inputs, outputs, used = [], [], []
        for s in range(S):
            D = slack * (S - 1 - s)
            v = max(0, j - D)
            w = history[s][v]
            if ahead and v:
                w = [a + D * (a - b) for a, b in zip(w, history[s][v - 1], strict=True)]
            w = [a.to(half or a.dtype) for a in w]
            inputs.append(x)
            used.append(w)
            x = torch.tanh(nn.functional.linear(x, *w))
            outputs.append(x)
        out = x.detach().requires_grad_()
        nn.functional.mse_loss(out, y).backward()
        g = out.grad
        for s in reversed(range(S)):
            w = used[s] if stash else [a.to(half or a.dtype) for a in history[s][j]]
            dz = aten.tanh_backward(g, outputs[s])
            grads = [dz.t() @ inputs[s], dz.sum(0)]
            g = dz @ w[0]
            new = []
            for n, (a, b) in enumerate(zip(history[s][j], grads, strict=True)):
                velocity[s][n] = m * velocity[s][n] + (b.to(a.dtype) + decay(names[s][n]) * a)
                new.append(a - rate * velocity[s][n] if trains[s][n] else a)
            history[s].append(new)
    return [w for versions in history for w in versions[-1]]
