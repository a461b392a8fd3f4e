# SPDX-License-Identifier: Apache-2.0
"""Configuration of DeCAL, of the baselines that its paper compares with, and of its ablations."""

import copy
from typing import Any

from transformers import PreTrainedConfig

from .configuration_compressor import RETRIEVAL_LOADER, CompressorConfig
from .field_checks import check_left_out, one_of
from .layer_shape import LayerShape

# Section 4.1: four times T5's own 32 buckets and maximum distance of 128; the rest is T5 v1.1.
FROM_SCRATCH = {
    "model_type": "t5",
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "relative_attention_num_buckets": 128,
    "relative_attention_max_distance": 512,
}
_LEFT_OUT = ("encoder_config", "encoder_lora", "decoder_lora", "bos_before_slots", "slots_after_ids", "task_token_ids")


class DeCALConfig(CompressorConfig):
    """DeCAL: a T5 encoder whose input starts with a shorter sequence of latents, which alone come out ("DeCAL
    Tokenwise Compression").

    The paper's comparisons are values of this configuration: the T5 baseline: `compression="none"`; AttnPool:
    `compression="attention_pooling"`; CCProxy (section 4.2.3): `latent_placement="appended"`,
    `encoder_attention="causal"` and `latent_pooling=False`; no pooling (Table 5): `latent_pooling=False`. The other
    ablations are training recipes.

    Args:
        decoder_config: The whole encoder-decoder, T5, T5 v1.1 or Flan-T5. A `dict` is completed by T5 v1.1's values,
            with four times its relative position buckets and maximum distance (section 4.1).
        compression_ratios: C, the context tokens per slot. The paper has a model for each of 2, 4 and 8. Defaults to
            `2`; `1` with `compression="none"`.
        compression: The source of slots: `"latents"` in the encoder's input, `"attention_pooling"` over the encoder's
            output, or `"none"`, the encoder's output itself, at ratio 1.
        latent_placement: Whether the latents stand in front of the tokens or are `"appended"` behind them.
        latent_pooling: Whether a latent starts from the mean of its tokens' embeddings beside the learned vector v.
        encoder_attention: `"bidirectional"`, or `"causal"`, which needs appended latents.
        question_placement: `"decoder"`: one memory serves any question. `"encoder"`: a question stands in front of the
            context, as in the paper, and the memory answers that one alone.
        kwargs: other fields of [`CompressorConfig`], without adapters, task tokens and position layouts: all of T5
            trains, and its decoder looks at slots without positions.
    """

    model_type = "decal_compressor"
    objectives = ("denoising", "compression")
    card_fields = {
        **CompressorConfig.card_fields,
        "compression": "Slots are made by",
        "question_placement": "A question is read by",
    }
    is_encoder_decoder = True

    def __init__(
        self,
        decoder_config: PreTrainedConfig | dict[str, Any] | None = None,
        compression_ratios: int | list[int] | tuple[int, ...] | None = None,
        compression: str = "latents",
        latent_placement: str = "prepended",
        latent_pooling: bool = True,
        encoder_attention: str = "bidirectional",
        question_placement: str = "decoder",
        **kwargs: Any,
    ):
        self.compression = one_of("compression", compression, ("latents", "attention_pooling", "none"))
        self.latent_placement = one_of("latent_placement", latent_placement, ("prepended", "appended"))
        self.latent_pooling = latent_pooling
        self.encoder_attention = one_of("encoder_attention", encoder_attention, ("bidirectional", "causal"))
        self.question_placement = one_of("question_placement", question_placement, ("decoder", "encoder"))
        if isinstance(decoder_config, DeCALConfig):
            # The base is a checkpoint of this method: what matters is the T5 inside, and what its texts start with.
            if kwargs.get("decoder_start_token_id") is None:
                kwargs["decoder_start_token_id"] = decoder_config.decoder_start_token_id
            decoder_config = decoder_config.decoder_config
        if decoder_config is None or isinstance(decoder_config, dict):
            decoder_config = {**FROM_SCRATCH, **(decoder_config or {})}
        if compression_ratios is None:
            compression_ratios = 1 if compression == "none" else 2
        is_retrieval = RETRIEVAL_LOADER in (kwargs.get("auto_map") or {})
        start = kwargs.pop("decoder_start_token_id", None)
        super().__init__(
            decoder_config=decoder_config,
            compression_ratios=compression_ratios,
            is_encoder_decoder=kwargs.pop("is_encoder_decoder", True),
            # T5 v1.1 has an output table of its own; transformers' configuration of it says the opposite.
            tie_word_embeddings=kwargs.pop("tie_word_embeddings", None),
            decoder_start_token_id=start,
            **kwargs,
        )
        if is_retrieval:
            # Such a checkpoint has no decoder: it answers no questions, and another class loads it.
            self.auto_map, self.custom_pipelines = self.retrieval_auto_map(), {}
        self._check_fields()
        if self.tie_word_embeddings is None:
            self.tie_word_embeddings = bool(self.decoder_config.scale_decoder_outputs)
        if start is None:
            start = getattr(self.decoder_config, "decoder_start_token_id", None)
        self.decoder_start_token_id: int = self.pad_token_id if start is None else start

    def _check_fields(self) -> None:
        check_left_out(self, _LEFT_OUT, "all of T5 trains, and its decoder looks at slots without positions")
        one_of("position_layout", self.position_layout, ("default",))
        one_of("prompt_format", self.prompt_format, ("plain",))
        if self.compression == "none" and self.compression_ratios != (1,):
            raise ValueError(f"`compression='none'` needs the ratio 1, got {self.compression_ratios!r}")
        if self.encoder_attention == "causal" and self.latent_placement != "appended":
            raise ValueError(f"causal attention needs `latent_placement='appended'`, got {self.latent_placement!r}")

    @classmethod
    def default_auto_map(cls) -> dict[str, str]:
        """As for every method, with `AutoModelForSeq2SeqLM` in the place of `AutoModelForCausalLM`."""
        names = super().default_auto_map()
        head = names.pop("AutoModelForCausalLM").removesuffix("ForCausalLM")
        return {**names, "AutoModelForSeq2SeqLM": f"{head}ForConditionalGeneration"}

    @classmethod
    def auto_classes(cls) -> dict[str, str]:
        """Those of checkpoints that generate and of those that retrieve."""
        return {**cls.default_auto_map(), **cls.retrieval_auto_map()}

    @classmethod
    def retrieval_auto_map(cls) -> dict[str, str]:
        """The entries of a retrieval checkpoint, whose decoder was discarded (section 4.3)."""
        names = cls.default_auto_map()
        del names["AutoModelForSeq2SeqLM"]
        return {**names, RETRIEVAL_LOADER: "modeling_decal_retrieval.DeCALForRetrieval"}

    def card_rows(self) -> list[tuple[str, Any]]:
        """As for every method; without a decoder no question is placed anywhere."""
        rows = super().card_rows()
        return rows[:-1] if self.auto_class == RETRIEVAL_LOADER else rows

    @property
    def reconstruction_token_id(self) -> int:
        """The decoder's start token, with which every text begins."""
        return self.decoder_start_token_id

    @property
    def continuation_token_id(self) -> int:
        """The decoder's start token, with which every text begins."""
        return self.decoder_start_token_id

    @property
    def compresses_questions(self) -> bool:  # type: ignore[override]
        """Return whether questions are placed in the encoder."""
        return self.question_placement == "encoder"

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """T5's configuration; with `decoder=True` as the decoder has it, whose layers a cache counts."""
        config = self.decoder_config
        if not decoder or config.num_decoder_layers == config.num_layers:
            return config
        config = copy.deepcopy(config)
        config.num_layers = config.num_decoder_layers
        return config

    def chunk_memory_tokens(self, num_tokens: int, ratio: int) -> int:
        """A latent for every slot."""
        return self.chunk_slots(num_tokens, ratio) if self.compression == "latents" else 0

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of the encoder over latents and tokens, and of attention pooling."""
        encoding = super().chunk_flops(num_tokens, ratio)
        if self.compression != "attention_pooling":
            return encoding
        slots = self.chunk_slots(num_tokens, ratio)
        return encoding + LayerShape.from_config(self.decoder_config).cross_attention_flops(slots, num_tokens, True)
