"""Small models of transformers, which the laws of tensor- and expert-parallel stages train in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def _seeded(kind: Any, config: Any) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = kind(config).double()
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 4, "use_cache": False}
    calm = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False}
    return _seeded(GPT2LMHeadModel, GPT2Config(**sizes, **calm))


SIZES = {
    "vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8, "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _seeded(LlamaForCausalLM, LlamaConfig(**SIZES))


def mixtral(experts: int = 4) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_local_experts=experts, num_experts_per_tok=2)
    config._experts_implementation = "eager"  # the grouped products have no float64
    return _seeded(MixtralForCausalLM, config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _seeded(ViTForImageClassification, ViTConfig(**sizes, **calm, image_size=8, patch_size=4, num_labels=11))


def images(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(), torch.randint(0, 11, (2,), generator=generator)) for _ in range(count)]


def dropping(capacity: float) -> nn.Module:
    """Mixtral whose experts take so many tokens; written down anew, choice by choice, as a reference."""
    model = mixtral()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        _, weights, chosen = self.gate(rows)
        most = -int(-capacity * chosen.numel() // self.experts.num_experts)
        taken = [0] * self.experts.num_experts
        keep = torch.zeros_like(weights)
        for t, choices in enumerate(chosen.tolist()):
            for n, expert in enumerate(choices):
                keep[t, n] = taken[expert] < most
                taken[expert] += 1
        y: torch.Tensor = self.experts(rows, chosen, weights * keep)
        return y.view(x.shape)

    for module in model.modules():
        if type(module).__name__ == "MixtralSparseMoeBlock":
            module.__class__ = type("MixtralSparseMoeBlock", (type(module),), {"forward": forward})
    return model
