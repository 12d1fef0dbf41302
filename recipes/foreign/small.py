"""Small: configurations of transformers with small sizes, by all names of sizes, which train in milliseconds."""

from __future__ import annotations

from typing import Any

from pipeback.recipes.foreign.case import WORDS

WIDTH, HIDDEN, LAYERS, HEADS, POSITIONS = 32, 64, 2, 2, 64

# sizes, and the names of each in configurations
SIZES: tuple[tuple[float, str], ...] = (
    (WORDS, "vocab_size"),
    (WIDTH, "hidden_size d_model dim n_embd d_embed emb_dim word_embed_proj_dim embed_dim moe_intermediate_size "
            "projection_dim shared_expert_intermediate_size encoder_hidden_size"),
    (HIDDEN, "intermediate_size hidden_dim ffn_dim d_ff n_inner d_inner dff ffn_hidden_size encoder_ffn_dim "
             "decoder_ffn_dim"),
    (LAYERS, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers "
             "num_encoder_layers"),
    (HEADS, "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
            "num_encoder_attention_heads num_decoder_attention_heads eos_token_id"),
    (16, "head_dim d_kv embedding_size"),
    (POSITIONS, "max_position_embeddings n_positions max_seq_len"),
    (4, "state_size num_experts num_local_experts n_routed_experts"),
    (1, "num_key_value_heads bos_token_id decoder_start_token_id"),
    (0, "pad_token_id"),
    (0.0, "mask_time_prob mask_feature_prob router_jitter_noise"),
)  # fmt: skip
SMALL: dict[str, float] = {name: size for size, names in SIZES for name in names.split()}


def configured(kind: Any, **more: Any) -> Any:
    """Return a small configuration of the class `kind`, with small ones inside it. more: options that are not changed.

    All dropout is 0, since a plain loop has one random stream and a pipeline one per stage.
    """
    options: dict[str, Any] = {}
    for name, value in kind().to_dict().items():
        if name in SMALL and (value is None or isinstance(value, (int, float))):
            options[name] = SMALL[name]
        elif "drop" in name and isinstance(value, float):
            options[name] = 0.0
        elif isinstance(value, dict) and "model_type" in value:
            options[name] = configured(_inner(kind, name, value)).to_dict()
    return kind(**{**options, **more})


def _inner(kind: Any, name: str, value: dict[str, Any]) -> Any:
    """Return the class of a configuration inside another one."""
    import transformers

    found = getattr(kind, "sub_configs", {}).get(name)
    return (
        type(transformers.AutoConfig.for_model(value["model_type"]))
        if found in (None, transformers.AutoConfig)
        else found
    )
