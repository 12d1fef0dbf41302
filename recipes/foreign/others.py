"""More models, each a line: `pipeback zoo --others` tells whether they train with a plain loop's bits, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeback.recipes.foreign.case import CLASSES, WORDS, Case, pictures, steady, tokens

SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 1}
ALBERT = {**SIZES, "embedding_size": 16}
DISTIL = {"vocab_size": WORDS, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
OPT = {
    "vocab_size": WORDS, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "word_embed_proj_dim": 32, "max_position_embeddings": 40,
}  # fmt: skip
BART = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 40,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
MAMBA = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
BLOOM = {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 2}

# name -> class of transformers, options of its configuration
LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", SIZES),
    "roberta": ("RobertaForMaskedLM", {**SIZES, "max_position_embeddings": 40}),
    "distilbert": ("DistilBertForMaskedLM", DISTIL),
    "albert": ("AlbertForMaskedLM", ALBERT),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 3}),
    "qwen2": ("Qwen2ForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 16}),
    "phi": ("PhiForCausalLM", SIZES),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
    "opt": ("OPTForCausalLM", OPT),
    "bloom": ("BloomForCausalLM", BLOOM),
    "bart": ("BartForConditionalGeneration", BART),
    "mamba": ("MambaForCausalLM", MAMBA),
}
VISION = (
    "alexnet", "densenet121", "googlenet", "mobilenet_v3_small", "efficientnet_b0", "shufflenet_v2_x0_5",
    "squeezenet1_1", "mnasnet0_5", "regnet_y_400mf", "resnext50_32x4d", "swin_t", "swin_v2_t",
)  # fmt: skip


def case(name: str) -> Case:
    """The model of that name. Raises ImportError naming the package that it needs."""
    if name in VISION:
        import torchvision

        more = {"init_weights": False} if name == "googlenet" else {}
        model: nn.Module = getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **more)
        return Case(steady(model), pictures(size=64), _classes)
    import transformers

    kind, options = LANGUAGE[name]
    found = getattr(transformers, kind)
    model = found(found.config_class(**options)).train()
    cuts = ("block",) if name == "albert" else ("block", "layer")  # albert's blocks are one, called several times
    return Case(steady(model), _labelled, lambda output, y: output.loss, cuts)


def _labelled(generator: torch.Generator) -> tuple[Any, Any]:
    """The loss is computed inside, from the labels."""
    x, y = tokens(generator)
    return {**x, "labels": y}, None


def _classes(output: Any, y: Tensor) -> Tensor:
    """Of all that a model gives, auxiliary classifiers included."""
    losses = [nn.functional.cross_entropy(part, y) for part in pytree.tree_leaves(output)]
    return torch.stack(losses).sum()
