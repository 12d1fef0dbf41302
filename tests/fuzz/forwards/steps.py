"""Steps of a forward: what is done with the newest value, an earlier one and the input: (samples, length, width)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .layers import WIDTH, Attention, Named, Pair


def call(model: Any, h: Tensor, o: Tensor, x: Tensor, layer: int, option: bool) -> Tensor:
    """Call a layer, perhaps once more than another step. option: what else it is given, or added to."""
    module = model.layers[layer]
    if isinstance(module, Named):
        found = module(h, scale=0.7, extra=o if option else None)
        y = found["y"] + found["more"][0]
    elif isinstance(module, Pair):
        first, second = module(h)
        y = first * second if option else first + second
    elif isinstance(module, Attention):
        length = h.shape[1]
        y = module(h, mask=torch.triu(torch.full((length, length), float("-inf")), 1) if option else None)
    else:
        y = module(h.clone())  # which may be changed in place
    return y + o if option else y


def _set(model: Any, h: Tensor, o: Tensor, x: Tensor) -> Tensor:
    y = h.clone()
    y[:, 0] = o[:, -1]
    return y


def _added(model: Any, h: Tensor, o: Tensor, x: Tensor) -> Tensor:
    y = h * 1.5
    y += o
    return y


def _view_added(model: Any, h: Tensor, o: Tensor, x: Tensor) -> Tensor:
    y = h.clone(memory_format=torch.contiguous_format)
    y.view(len(h), -1)[:, :WIDTH].add_(o[:, 0])
    return y


def _without_gradient(model: Any, h: Tensor, o: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        weight = o.mean(-1, keepdim=True)
    return h + weight


def _autocast(model: Any, h: Tensor, o: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.mix(torch.cat([h, o], -1))
    return y.to(h.dtype)


def _gated(model: Any, h: Tensor, o: Tensor, x: Tensor) -> Tensor:
    first, second = model.mix(torch.cat([h, o], -1)).split([3, WIDTH - 3], -1)
    return torch.cat([second, first.sigmoid()], -1)


def _parts(model: Any, h: Tensor, o: Tensor, x: Tensor) -> Tensor:
    parts = [h[:, t : t + 1] for t in range(h.shape[1])]
    return h + sum(parts) / len(parts)


Step = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
STEPS: dict[str, Step] = {
    "relu": lambda m, h, o, x: F.relu(h),
    "add": lambda m, h, o, x: h + o,
    "multiply": lambda m, h, o, x: h * o.sigmoid(),
    "gated": _gated,
    "transposed": lambda m, h, o, x: h.transpose(1, 2).contiguous().transpose(1, 2),
    "rotated": lambda m, h, o, x: torch.cat([h[:, 1:], h[:, :1]], 1),
    "set": _set,
    "added": _added,
    "view added": _view_added,
    "attended": lambda m, h, o, x: torch.einsum("btc,bsc->bts", h, o).softmax(-1) @ h,
    "masked": lambda m, h, o, x: h.masked_fill(x > 1, 0.0),
    "where": lambda m, h, o, x: torch.where(o > 0, h, o * 0.1),
    "sized": lambda m, h, o, x: h / (h.shape[1] + h.size(-1)),
    "counted": lambda m, h, o, x: h + torch.arange(h.shape[1]).view(1, -1, 1).to(h.dtype) * 0.01,
    "scaled": lambda m, h, o, x: h * m.scale,
    "placed": lambda m, h, o, x: h + m.places(torch.arange(h.shape[1])),
    "buffer": lambda m, h, o, x: h + m.fixed,
    "no gradient": _without_gradient,
    "detached": lambda m, h, o, x: h + o.detach(),
    "checkpoint": lambda m, h, o, x: checkpoint(m.mix, torch.cat([h, o], -1), use_reentrant=False),
    "tied": lambda m, h, o, x: F.linear(h, m.last.weight),
    "twice": lambda m, h, o, x: m.first(m.first(h)).tanh(),
    "stacked": lambda m, h, o, x: torch.stack([h, o]).mean(0),
    "sorted": lambda m, h, o, x: h.gather(1, o.argsort(1)),
    "cumsum": lambda m, h, o, x: h.cumsum(1) * 0.3,
    "noise": lambda m, h, o, x: h + 0.1 * torch.randn_like(h) if m.training else h * 1.0,
    "dropped": lambda m, h, o, x: F.dropout(h, 0.1, m.training),
    "autocast": _autocast,
    "expanded": lambda m, h, o, x: h + o[:, :1].expand(-1, h.shape[1], -1),
    "parts": _parts,
    "input": lambda m, h, o, x: h + x,
    "double": lambda m, h, o, x: (h.double() + o.double()).to(h.dtype),
    "flipped": lambda m, h, o, x: h[torch.arange(len(h) - 1, -1, -1)].flip(1),
    "normed": lambda m, h, o, x: F.layer_norm(h / (h.norm(dim=-1, keepdim=True) + 1) + o, (WIDTH,)),
    "attention": lambda m, h, o, x: F.scaled_dot_product_attention(h, o, o, is_causal=True),
    "frequencies": lambda m, h, o, x: torch.fft.irfft(torch.fft.rfft(h, dim=-1) * 0.9, n=WIDTH, dim=-1) + o,
    "chosen": lambda m, h, o, x: h + m.places(o.argmax(-1)),
    "top": lambda m, h, o, x: h * (o >= o.topk(3, -1).values[..., -1:]),
    "buckets": lambda m, h, o, x: torch.zeros_like(h).scatter_add(1, o.argsort(1), h),
    "unbound": lambda m, h, o, x: torch.stack([a * 0.5 + b for a, b in zip(h.unbind(1), o.unbind(1))], 1),
    "padded": lambda m, h, o, x: F.pad(h, (0, 0, 1, 0))[:, :-1] + o,
    "folded": lambda m, h, o, x: h.reshape(-1, WIDTH // 2, 2).flip(-1).reshape(h.shape),
    "powers": lambda m, h, o, x: h * o.square().mean((1, 2), keepdim=True).add(1e-3).rsqrt(),
    "mapped": lambda m, h, o, x: torch.vmap(lambda a, b: a * b.mean())(h, o),
    "interpolated": lambda m, h, o, x: torch.lerp(h, o, 0.3),
    "mixed weights": lambda m, h, o, x: F.linear(h, m.first.weight * 0.5 + m.mix.weight[:, :WIDTH] * 0.5),
    "straight": lambda m, h, o, x: h + (o.round() - o).detach(),
    "convolved": lambda m, h, o, x: F.conv1d(h.mT, m.last.weight.unsqueeze(-1)).mT + o,
    "normalised": lambda m, h, o, x: F.group_norm(h.mT, 2, m.scale, m.fixed).mT,
    "asked": lambda m, h, o, x: h * 2 if h.shape[1] > 4 else h + o,
    "meshed": lambda m, h, o, x: h + torch.outer(torch.arange(h.shape[1], device=h.device), m.scale),
    "product": lambda m, h, o, x: torch.baddbmm(h, (h @ h.transpose(1, 2)).softmax(-1), o),
}  # fmt: skip
RANDOM = ("noise", "dropped")
TRANSPOSED = ("transposed", "convolved", "normalised")  # what they return
ROUNDED = ("autocast",)  # too roughly for two orders of a sum to be compared
