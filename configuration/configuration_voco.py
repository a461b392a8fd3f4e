# SPDX-License-Identifier: Apache-2.0
"""Configuration of VoCo."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from .configuration_compressor import CompressorConfig
from .field_checks import check_left_out, language_model_config, lora_or, positive_int_or_none


class VoCoConfig(CompressorConfig):
    """VoCo-LLaMA: copies of one learned token behind a context, whose keys and values of every layer are all that the
    same weights read of it. The context is text, or the image tokens of a vision-language model.

    Args:
        decoder_config: Configuration of the base. That of a vision-language model whose image tokens stand in its
            text, such as LLaVA or SmolVLM, is kept in `vision_language_config`, and its language model's here.
        compression_ratios: Context tokens per VoCo token.
        num_voco_tokens: VoCo tokens of every context (of each of its chunks), however long it is, as in the paper,
            which has 1 to 128 for an image of 576 tokens; the ratio is then but a name. `None`: ceil(n / r).
        encoder_lora: Adapters of the one model that compresses and reads. `None` where the whole model trains, as in
            the paper; `trainable_parameters` then says so. Defaults to rank 16, alpha 16 on all linear maps.
        bos_before_text: BOS and a system prompt belong to the context.
        vision_language_config: Configuration of the vision-language model. `None`: contexts are text.
        kwargs: fields of [`CompressorConfig`], without an encoder of its own.
    """

    model_type = "voco_compressor"
    sub_configs = {**CompressorConfig.sub_configs, "vision_language_config": AutoConfig}
    carrier = "key_values"
    card_fields = {**CompressorConfig.card_fields, "num_voco_tokens": "VoCo tokens of a context, if always as many"}

    def __init__(
        self,
        decoder_config: PreTrainedConfig | dict[str, Any] | None = None,
        num_voco_tokens: int | None = None,
        encoder_lora: dict[str, Any] | str | None = "default",
        bos_before_text: bool = False,
        vision_language_config: PreTrainedConfig | dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.num_voco_tokens = positive_int_or_none("num_voco_tokens", num_voco_tokens)
        if decoder_config is not None:
            base = language_model_config("decoder_config", decoder_config)
            decoder_config = base
            if hasattr(base, "vision_config"):
                vision_language_config, decoder_config = base, base.get_text_config()
        self.vision_language_config: Any = None
        if vision_language_config is not None:
            self.vision_language_config = language_model_config("vision_language_config", vision_language_config)
            _check_image_tokens(self.vision_language_config)
            kwargs.setdefault("tie_word_embeddings", bool(self.vision_language_config.tie_word_embeddings))
        has_adapter = encoder_lora is not None
        super().__init__(
            decoder_config=decoder_config,
            encoder_lora=lora_or(encoder_lora, {}),
            bos_before_text=bos_before_text,
            **{**kwargs, "shared_adapter": has_adapter},
        )
        left_out = ["encoder_config", "bos_before_slots", "slots_after_ids"]
        check_left_out(
            self,
            left_out if has_adapter else [*left_out, "decoder_lora"],
            "the same weights read a context with VoCo tokens behind it, and then the text",
        )

    def chunk_slots(self, num_tokens: int, ratio: int) -> int:
        """`num_voco_tokens`, or else ceil(n / r)."""
        return self.num_voco_tokens or super().chunk_slots(num_tokens, ratio)

    def chunk_memory_tokens(self, num_tokens: int, ratio: int) -> int:
        """A VoCo token for every slot."""
        return self.chunk_slots(num_tokens, ratio)


def _check_image_tokens(config: PreTrainedConfig) -> None:
    """Refuse a vision-language model whose images are no tokens in a text that is numbered 0, 1, 2, ..."""
    if getattr(config, "vision_config", None) is None or getattr(config, "image_token_id", None) is None:
        raise ValueError(
            "`vision_language_config` must be that of a model with image tokens in its text (`vision_config` and "
            f"`image_token_id`), such as LLaVA or SmolVLM, got {type(config).__name__}"
        )
    if "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {}):
        raise ValueError(
            f"`vision_language_config` must be that of a model with one position for each token, and a "
            f"{type(config).__name__} has three for each image token"
        )
