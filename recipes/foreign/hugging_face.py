"""Models of transformers for `pipeback zoo --others`: their classes, and options beyond those of `small`."""

# ruff: noqa: SIM905 (two hundred names read better as words than as a list of strings)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeback.recipes.foreign.case import WORDS, Case, steady, tokens
from pipeback.recipes.foreign.small import POSITIONS, configured

Batch = Callable[[torch.Generator], tuple[Any, None]]


def _words(generator: torch.Generator) -> tuple[Any, None]:
    """Text with its labels, for models that compute the loss."""
    x, y = tokens(generator)
    return {**x, "labels": y}, None


def _unmasked(generator: torch.Generator) -> tuple[Any, None]:
    """The same for models that take no attention mask."""
    x, y = tokens(generator)
    return {"input_ids": x["input_ids"], "labels": y}, None


def _pair(generator: torch.Generator) -> tuple[Any, None]:
    """A text, and a shorter target text."""
    x, y = tokens(generator)
    return {**x, "labels": y[:, :8].contiguous()}, None


def _equal_pair(generator: torch.Generator) -> tuple[Any, None]:
    """The same, for decoders that are given the first text's words."""
    x, y = tokens(generator)
    return {**x, "decoder_input_ids": y, "labels": y}, None


def _spans(generator: torch.Generator) -> tuple[Any, None]:
    """Texts, and where the answers begin and end in them."""
    x, _ = tokens(generator)
    begin, end = torch.randint(8, (2, 2), generator=generator)
    return {**x, "start_positions": begin, "end_positions": begin + end}, None


def _pictures(size: int) -> Batch:
    """Images (2, 3, size, size), each of one of two classes."""
    return lambda generator: (
        {
            "pixel_values": torch.randn(2, 3, size, size, generator=generator),
            "labels": torch.randint(2, (2,), generator=generator),
        },
        None,
    )


def _sounds(generator: torch.Generator) -> tuple[Any, None]:
    """Waveforms (2, 4000), each of one of two classes."""
    waves = torch.randn(2, 4000, generator=generator)
    return {"input_values": waves, "labels": torch.randint(2, (2,), generator=generator)}, None


def _spectrum(generator: torch.Generator) -> tuple[Any, None]:
    """Spectrograms (2, 80, 64), and the tokens that are spoken."""
    words = torch.randint(3, WORDS, (2, 8), generator=generator)
    return {"input_features": torch.randn(2, 80, 64, generator=generator), "labels": words}, None


def _frames(generator: torch.Generator) -> tuple[Any, None]:
    """The same with time first: (2, 64, 80)."""
    x, _ = _spectrum(generator)
    return {**x, "input_features": x["input_features"].mT.contiguous()}, None


# options -> the classes that need no other options
CAUSAL = (
    "LlamaForCausalLM GemmaForCausalLM Gemma2ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM PhiForCausalLM "
    "Phi3ForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM OPTForCausalLM BloomForCausalLM FalconForCausalLM "
    "MptForCausalLM MambaForCausalLM BioGptForCausalLM CohereForCausalLM Cohere2ForCausalLM GraniteForCausalLM "
    "GraniteMoeForCausalLM GlmForCausalLM Glm4ForCausalLM HeliumForCausalLM OlmoForCausalLM Olmo2ForCausalLM "
    "Olmo3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM SmolLM3ForCausalLM NemotronForCausalLM "
    "PersimmonForCausalLM MixtralForCausalLM XGLMForCausalLM CTRLLMHeadModel GPTBigCodeForCausalLM Exaone4ForCausalLM "
    "Ernie4_5ForCausalLM ArceeForCausalLM ApertusForCausalLM Lfm2ForCausalLM MiniMaxForCausalLM "
    "ModernBertDecoderForCausalLM SeedOssForCausalLM HunYuanDenseV1ForCausalLM DogeForCausalLM BitNetForCausalLM "
    "FalconMambaForCausalLM NanoChatForCausalLM MinistralForCausalLM VaultGemmaForCausalLM JetMoeForCausalLM "
    "GptOssForCausalLM XLNetLMHeadModel"
).split()
MASKED = (
    "AlbertForMaskedLM BertForMaskedLM BigBirdForMaskedLM CamembertForMaskedLM DebertaForMaskedLM "
    "DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM ErnieForMaskedLM EsmForMaskedLM "
    "FlaubertWithLMHeadModel FNetForMaskedLM IBertForMaskedLM MegatronBertForMaskedLM MobileBertForMaskedLM "
    "ModernBertForMaskedLM MPNetForMaskedLM NystromformerForMaskedLM RemBertForMaskedLM RobertaForMaskedLM "
    "RobertaPreLayerNormForMaskedLM RoFormerForMaskedLM TapasForMaskedLM XLMWithLMHeadModel XLMRobertaForMaskedLM "
    "XLMRobertaXLForMaskedLM YosoForMaskedLM NomicBertForMaskedLM EuroBertForMaskedLM OpenAIGPTLMHeadModel"
).split()
PAIRS = (
    "BartForConditionalGeneration BlenderbotForConditionalGeneration BlenderbotSmallForConditionalGeneration "
    "M2M100ForConditionalGeneration MarianMTModel MBartForConditionalGeneration MvpForConditionalGeneration "
    "PegasusForConditionalGeneration PegasusXForConditionalGeneration PLBartForConditionalGeneration "
    "T5GemmaForConditionalGeneration BigBirdPegasusForConditionalGeneration NllbMoeForConditionalGeneration"
).split()
# classes without an attribute decoder_start_token_id unless it is set
STARTED = (
    "T5ForConditionalGeneration MT5ForConditionalGeneration UMT5ForConditionalGeneration "
    "LongT5ForConditionalGeneration SwitchTransformersForConditionalGeneration"
).split()
SOUNDS = (
    "HubertForSequenceClassification SEWForSequenceClassification UniSpeechForSequenceClassification "
    "Wav2Vec2ForSequenceClassification WavLMForSequenceClassification Data2VecAudioForSequenceClassification"
).split()
WAVES = {"conv_dim": [16, 16, 16], "conv_stride": [5, 4, 4], "conv_kernel": [10, 4, 4], "num_conv_pos_embeddings": 8,
         "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 3, "feat_extract_norm": "layer",
         "classifier_proj_size": 16}  # fmt: skip
PATCHES = {"image_size": 32, "patch_size": 8}
CONVNEXT = {"patch_size": 4, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SWIN = {**PATCHES, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
PLAIN_PICTURES = (
    "ViTForImageClassification DeiTForImageClassification Dinov2ForImageClassification ViTMSNForImageClassification "
    "Dinov2WithRegistersForImageClassification IJepaForImageClassification BeitForImageClassification "
    "Data2VecVisionForImageClassification"
).split()
LARGE_PICTURES = (
    "ResNetForImageClassification RegNetForImageClassification MobileNetV1ForImageClassification "
    "MobileNetV2ForImageClassification PoolFormerForImageClassification PvtV2ForImageClassification "
    "SegformerForImageClassification SwiftFormerForImageClassification FocalNetForImageClassification "
    "MobileViTForImageClassification"
).split()

LED = {"attention_window": 8, "max_encoder_position_embeddings": POSITIONS,
       "max_decoder_position_embeddings": POSITIONS}  # fmt: skip

# class -> its batches, and more options of its configuration
MODELS: dict[str, tuple[Batch, dict[str, Any]]] = {
    **{name: (_words, {}) for name in [*CAUSAL, *MASKED]},
    **{name: (_pair, {}) for name in PAIRS},
    **{name: (_pair, {"decoder_start_token_id": 1}) for name in STARTED},
    **dict.fromkeys(SOUNDS, (_sounds, WAVES)),
    **{name: (_pictures(32), PATCHES) for name in PLAIN_PICTURES},
    **{name: (_pictures(64), {}) for name in LARGE_PICTURES},
    "MistralForCausalLM": (_words, {"sliding_window": 4}),
    "GPTNeoForCausalLM": (_words, {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "GPTJForCausalLM": (_words, {"rotary_dim": 8}),
    "CodeGenForCausalLM": (_words, {"n_head": 4, "rotary_dim": 4}),
    "OlmoeForCausalLM": (_words, {"num_experts_per_tok": 2}),
    "Qwen2MoeForCausalLM": (_words, {"num_experts_per_tok": 2}),
    "Qwen3MoeForCausalLM": (_words, {"num_experts_per_tok": 2}),
    "DiffLlamaForCausalLM": (_words, {"num_key_value_heads": 2}),
    "Mamba2ForCausalLM": (_words, {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8}),
    "JambaForCausalLM": (_words, {"num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2,
                                  "expert_layer_period": 2, "num_experts": 2}),
    "RwkvForCausalLM": (_unmasked, {}),
    "ProphetNetForConditionalGeneration": (_pair, {"num_encoder_layers": 2, "num_decoder_layers": 2}),
    "FSMTForConditionalGeneration": (_equal_pair, {"src_vocab_size": WORDS, "tgt_vocab_size": WORDS,
                                                   "langs": ["en", "de"]}),
    "LEDForConditionalGeneration": (_pair, LED),
    "LEDForQuestionAnswering": (_spans, LED),
    "WhisperForConditionalGeneration": (_spectrum, {"max_source_positions": 32, "max_target_positions": 32,
                                                    "num_mel_bins": 80, "suppress_tokens": None}),
    "Speech2TextForConditionalGeneration": (_frames, {"max_source_positions": 64, "max_target_positions": 32,
                                                      "input_feat_per_channel": 80, "conv_channels": 32}),
    "SwinForImageClassification": (_pictures(32), SWIN),
    "Swinv2ForImageClassification": (_pictures(32), SWIN),
    "ConvNextForImageClassification": (_pictures(64), CONVNEXT),
    "ConvNextV2ForImageClassification": (_pictures(64), CONVNEXT),
    "SiglipForImageClassification": (_pictures(32), {"vision_config": {**TOWER, **PATCHES}}),
    "CLIPForImageClassification": (_pictures(32), {"vision_config": {**TOWER, **PATCHES}}),
    "LevitForImageClassification": (_pictures(96), {"image_size": 96, "patch_size": 16}),
}  # fmt: skip


def case(name: str) -> Case:
    """Return a model of that class with small sizes. Raises ImportError if transformers is not installed."""
    import transformers

    batch, options = MODELS[name]
    kind = getattr(transformers, name)
    model = kind(configured(kind.config_class, **options)).train()
    return Case(steady(model), batch, _own_loss)


def _own_loss(output: Any, y: None) -> Tensor:
    return output.loss
