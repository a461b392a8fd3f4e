# SPDX-License-Identifier: Apache-2.0
"""DeCAL ("DeCAL Tokenwise Compression"), and the T5 baseline, AttnPool and CCProxy that it is compared with."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import BaseStreamer, GenerationMixin, StoppingCriteriaList
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    ModelOutput,
    Seq2SeqLMOutput,
)
from transformers.models.t5.modeling_t5 import T5Attention, T5ForConditionalGeneration, T5LayerNorm, T5Stack
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_decal import DeCALConfig
from .compressor.backbone import Chunks, CompressorBackbone, CompressorHead
from .compressor.pretrained_compressor import CompressorPreTrainedModel
from .compressor.question_conditioning import (
    check_question,
    own_tokens,
    question_fingerprints,
    question_in_front,
    with_start,
)
from .compressor.validation import (
    cached_text_mask,
    check_keywords,
    check_source,
    fitted_memory,
    fitted_text_and_memory,
    measure_rows,
)
from .memory.compressed_context import CompressedContext
from .parts.base_pass import CACHE, head_logits, seeing_mask, with_sight
from .parts.packing import left_padded, pack
from .parts.pooling import mean_pool

# What a caller may ask of encoder and decoder beside their last states.
_OUTPUTS = ("output_hidden_states", "output_attentions")


def latent_position_ids(token_counts: Tensor, latent_mask: Tensor, ratio: int | Tensor) -> Tensor:
    """Return the position of each latent, the integer mean of the positions of its tokens (section 3)."""
    ratio = ratio[:, None] if isinstance(ratio, Tensor) else ratio
    first = torch.arange(latent_mask.shape[1], device=latent_mask.device) * ratio
    last = torch.minimum(first + ratio, token_counts[:, None]) - 1
    return torch.div(first + last, 2, rounding_mode="floor") * latent_mask


def relative_position_bias(
    bias_table: nn.Embedding, position_ids: Tensor, num_buckets: int, max_distance: int
) -> Tensor:
    """Return T5's bidirectional relative bias between tokens at any positions; T5 itself counts them 0, 1, ....

    It is `(batch_size, num_heads, length, length)`, with a batch size of 1 if all rows have the same positions.
    """
    if len(position_ids) > 1 and bool((position_ids == position_ids[:1]).all()):
        position_ids = position_ids[:1]
    relative_position = position_ids[:, None, :] - position_ids[:, :, None]
    buckets = T5Attention._relative_position_bucket(
        relative_position, bidirectional=True, num_buckets=num_buckets, max_distance=max_distance
    )
    return _look_up(bias_table, buckets).permute(0, 3, 1, 2)


def _look_up(table: nn.Embedding, ids: Tensor) -> Tensor:
    """`table(ids)`, also where FSDP2 shares the table out: it is T5's first block's, and read outside of that."""
    if not hasattr(table.weight, "full_tensor"):
        return table(ids)
    from torch.distributed.tensor import Partial

    # Every process reads other texts: as everywhere in FSDP, what trains is the mean of their gradients.
    weight: Any = table.weight
    mean = [Partial("avg")] * weight.device_mesh.ndim
    return functional.embedding(ids, weight.full_tensor(grad_placements=mean))


@capture_outputs
def _encode(
    stack: T5Stack, embeddings: Tensor, bias: Tensor, **kwargs: Any
) -> BaseModelOutputWithPastAndCrossAttentions:
    """T5's encoder with a position bias that is given; `kwargs` as it takes them, such as `output_hidden_states`."""
    hidden_states = stack.dropout(embeddings)
    for block in stack.block:
        hidden_states = block(hidden_states, None, bias, **kwargs)[0]
    states = stack.dropout(stack.final_layer_norm(hidden_states))
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)


def mask_bias(bias: Tensor, token_mask: Tensor, causal: bool = False) -> Tensor:
    """Return the bias with the lowest number where a token may not be seen.

    Args:
        bias: `(batch_size or 1, num_heads, length, length)`; overwritten if it has a row for each of the mask's.
        token_mask: `(batch_size, length)`, one for real tokens; a row without any sees its pads.
    """
    # Nothing is read of a row of pads alone; a softmax over nothing would still send NaN into the gradients.
    seen = (token_mask.bool() | ~token_mask.bool().any(dim=1, keepdim=True))[:, None, None, :]
    if causal:
        seen = seen & torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    elif bool(seen.all()):
        return bias
    lowest = torch.finfo(bias.dtype).min
    if bias.shape[0] == len(seen):
        # A bias for each row is the largest tensor of long contexts: there is no second one.
        return bias.masked_fill_(~seen, lowest)
    return torch.where(seen, bias, lowest)


@dataclass
class EncodedSlots(ModelOutput):
    """The slots of [`DeCALModel`] `(batch_size, num_slots, hidden_size)`, left-aligned, and their mask; padding slots
    are zero."""

    last_hidden_state: Tensor | None = None
    attention_mask: Tensor | None = None


class T5Base:
    """Loads what `from_base` starts from: a T5, or the T5 in a DeCAL checkpoint, such as the T5 baseline's."""

    @staticmethod
    def from_pretrained(base: str | os.PathLike, **loading: Any) -> T5ForConditionalGeneration:
        """Load it; arguments as `transformers.PreTrainedModel.from_pretrained`."""
        model = AutoModelForSeq2SeqLM.from_pretrained(base, **loading)
        return model.as_t5() if isinstance(model, DeCALForConditionalGeneration) else model


class DeCALPreTrainedModel(CompressorPreTrainedModel):
    """Gives the parts of DeCAL their start values, and takes the weights of a T5."""

    config_class = DeCALConfig
    base_auto_class = T5Base
    trains_base = True
    trains_in_float32 = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _no_split_modules = ["T5Block"]
    _keep_in_fp32_modules = ["wo"]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, DeCALModel):
            # T5's own start values; its stacks know all but the table that they share.
            init.normal_(module.encoder.embed_tokens.weight, std=self.config.decoder_config.initializer_factor)
            module.initialize_parts()
        elif module is self.get_output_embeddings():
            # T5 v1.1's own start value of its output table; transformers' makes the first logits sqrt(d_model) larger.
            init.normal_(module.weight, std=module.in_features**-0.5)

    @torch.no_grad()
    def load_base_weights(self, base: PreTrainedModel, encoder: PreTrainedModel | None = None) -> None:
        backbone = self.base_model
        backbone.encoder.load_state_dict(base.encoder.state_dict(), assign=True)
        if self.get_output_embeddings() is not None:
            weights = base.decoder.state_dict()
            weights.pop("embed_tokens.weight")
            self.decoder.load_state_dict(weights, assign=True)
            self.lm_head.weight = base.lm_head.weight
            self.config.tie_word_embeddings = base.lm_head.weight is base.shared.weight
        for path, parameter in list(self.named_parameters()):
            if parameter.is_meta:
                module, _, name = path.rpartition(".")
                empty = torch.empty_like(parameter, device=base.device, dtype=base.dtype)
                setattr(self.get_submodule(module), name, nn.Parameter(empty))
        backbone.initialize_parts()
        self.tie_weights()
        self.apply_trainable_set()
        self.config.dtype = base.dtype
        self.generation_config = copy.deepcopy(base.generation_config)


class AttentionPooling(nn.Module):
    r"""
    AttnPool's layer on the encoder's output (section 4.2.3): h = P(x) + Attention(Q = P(x), K = V = x), normalised.

    The paper names the query, a strided mean pool; residual and norm are the Funnel Transformer's, that it refers to.

    Args:
        config: T5's configuration.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.attention = T5Attention(config)
        self.layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, hidden_states: Tensor, chunks: Chunks, ratio: int | Tensor) -> Tensor:
        """Return slots `(num_chunks, num_slots, hidden_size)` of the encoder's states."""
        query, _ = mean_pool(hidden_states, chunks.attention_mask, ratio, chunks.lengths)
        bias = hidden_states.new_zeros(1, 1, 1, hidden_states.shape[1])
        if not chunks.is_full:
            bias = mask_bias(bias, chunks.attention_mask)
        pooled = self.attention(query, bias, key_value_states=hidden_states)[0]
        return self.layer_norm(query + self.dropout(pooled))


class DeCALModel(CompressorBackbone, DeCALPreTrainedModel):
    """A T5 encoder that reads l + x, latents and tokens, and lets nothing but the latents' states out."""

    config_class = DeCALConfig
    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"^lm_head\."]

    def __init__(self, config: DeCALConfig):
        super().__init__(config)
        # As the Auto classes do: a configuration names the type of its model's weights.
        config.decoder_config.dtype = config.decoder_config.dtype or torch.get_default_dtype()
        encoder_config = copy.deepcopy(config.decoder_config)
        encoder_config.is_decoder = encoder_config.use_cache = False
        self.encoder = T5Stack(encoder_config)
        self.latent_vector: Any = None
        self.latent_norm: Any = None
        self.attention_pooling: Any = None
        if config.compression == "latents":
            self.latent_vector = nn.Parameter(torch.zeros(encoder_config.d_model))
            self.latent_norm = T5LayerNorm(encoder_config.d_model, eps=encoder_config.layer_norm_epsilon)
        elif config.compression == "attention_pooling":
            self.attention_pooling = AttentionPooling(encoder_config)
        self.post_init()
        if self.attention_pooling is not None:
            # transformers passes over a module of another package that has no parameters but its children's.
            self.initialize_parts()

    def initialize_parts(self) -> None:
        """Give v and what else T5 does not have its start values."""
        if self.latent_norm is not None:
            self._init_like_embeddings(self.latent_vector, self.encoder)
            self.encoder._init_weights(self.latent_norm)
        if self.attention_pooling is not None:
            # Not their children: T5 gives a map without its attention another start value.
            self.encoder._init_weights(self.attention_pooling.attention)
            self.encoder._init_weights(self.attention_pooling.layer_norm)

    @property
    def encoder_backbone(self) -> nn.Module:
        """Return the language model that encodes: T5's encoder."""
        return self.encoder

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value

    # --- section 3 ---

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor], **asked: Any) -> list[Tensor]:
        """See [`CompressorBackbone.encode`]; `asked` as of `_encoder_states`."""
        # x = [x_1, ..., x_n]
        embeddings = self.encoder.embed_tokens(chunks.input_ids)
        if self.config.compression == "latents":
            return [self._latent_states(embeddings, chunks, ratio, **asked) for ratio in ratios]
        inputs = (embeddings, chunks.attention_mask, chunks.position_ids, chunks.is_full)
        states = self._encoder_states(*inputs, **asked)
        if self.attention_pooling is None:
            return [states for _ in ratios]
        return [self.attention_pooling(states, chunks, ratio) for ratio in ratios]

    def _latent_states(self, embeddings: Tensor, chunks: Chunks, ratio: int | Tensor, **asked: Any) -> Tensor:
        latents, latent_mask = self.latents(embeddings, chunks.attention_mask, ratio, chunks.lengths)
        latent_ids = latent_position_ids(chunks.attention_mask.sum(dim=1), latent_mask, ratio)
        parts = [(latents, latent_mask, latent_ids), (embeddings, chunks.attention_mask, chunks.position_ids)]
        # l + x; CCProxy: x + l, so that a causal mask lets latents see the tokens.
        appended = self.config.latent_placement == "appended"
        sequence = [torch.cat(part, dim=1) for part in zip(*(reversed(parts) if appended else parts), strict=True)]
        is_full = chunks.is_full and isinstance(ratio, int)
        states = self._encoder_states(sequence[0], sequence[1], sequence[2], is_full, **asked)
        # "The encoder output is exclusively the m output embeddings corresponding to l."
        first = embeddings.shape[1] if appended else 0
        return states[:, first : first + latent_mask.shape[1]]

    def latents(
        self,
        embeddings: Tensor,
        attention_mask: Tensor,
        ratio: int | Tensor,
        lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the latents at the encoder's input, l = LayerNorm(v + P(x)) (section 3), and their mask.

        Args:
            embeddings: x, `(batch_size, num_tokens, hidden_size)`.
        """
        pooled, latent_mask = mean_pool(embeddings, attention_mask, ratio, lengths)
        if not self.config.latent_pooling:
            pooled = torch.zeros_like(pooled)
        return self.latent_norm(self.latent_vector + pooled), latent_mask

    def _encoder_states(
        self,
        embeddings: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        is_full: bool = False,
        passes: list[Any] | None = None,
        **asked: Any,
    ) -> Tensor:
        """Run T5's encoder at any positions: `(batch_size, length, hidden_size)`; full rows have the same ones.

        `passes` takes the encoder's outputs, and `asked` says which: `output_hidden_states`, `output_attentions`.
        """
        stack, config = self.encoder, self.encoder.config
        bias = relative_position_bias(
            stack.block[0].layer[0].SelfAttention.relative_attention_bias,
            position_ids[:1] if is_full else position_ids,
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
        )
        is_causal = self.config.encoder_attention == "causal"
        if is_causal or not is_full:
            bias = mask_bias(bias, attention_mask, is_causal)
        outputs = _encode(stack, embeddings, bias, **asked)
        if passes is not None:
            passes.append(outputs)
        return outputs.last_hidden_state

    # --- contexts in, memories out ---

    def compress(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        ratio: int | Tensor | Sequence[int] | None = None,
        allow_untrained_ratio: bool = False,
        question_input_ids: Tensor | None = None,
        question_attention_mask: Tensor | None = None,
        **unused: Any,
    ) -> CompressedContext | list[CompressedContext]:
        """Compress contexts into slots; see [`CompressorBackbone.compress`], and:

        Args:
            question_input_ids: `(batch_size or 1, num_question_tokens)`, for `question_placement="encoder"`: the
                question stands in front of the context and counts in its length, and the memory answers no other one.
                The decoder's start token and EOS around it are no part of it.
            question_attention_mask: its mask.
        """
        fingerprints = None
        if question_input_ids is not None:
            asked = (question_input_ids, question_attention_mask, self.config, unused.get("chunk_lengths"))
            input_ids, attention_mask, question = question_in_front(input_ids, attention_mask, *asked)
            fingerprints = question_fingerprints(*question)
        memories = super().compress(input_ids, attention_mask, ratio, allow_untrained_ratio, **unused)
        for memory in memories if isinstance(memories, list) else [memories]:
            memory.question_fingerprints = fingerprints
        return memories

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        ratio: int | Tensor | None = None,
        return_dict: bool | None = None,
        **unknown: Any,
    ) -> EncodedSlots | tuple[Tensor, Tensor]:
        """Compress contexts into an [`EncodedSlots`], or a tuple; arguments and errors as of `compress`."""
        if unknown:
            raise TypeError(
                f"DeCALModel is an encoder and does not take {', '.join(sorted(unknown))}; DeCAL, an encoder-decoder, "
                "trains with transformers' Seq2SeqTrainer or this package's trainers, not with TRL's SFTTrainer"
            )
        memory = self.context_memory(self.context_rows(input_ids, attention_mask), ratio)
        outputs = EncodedSlots(last_hidden_state=memory.embeddings, attention_mask=memory.attention_mask)
        return outputs if return_dict in (None, True) else outputs.to_tuple()


def readable_slots(memory: CompressedContext) -> tuple[Tensor, Tensor]:
    """Return slots `(batch_size, num_slots, hidden_size)` and their mask for cross-attention, at least one a row.

    A row without slots gets one of zeros. T5's key and value maps have no bias, so nothing comes of it: the row reads
    as if there were no cross-attention, alone as in a batch.
    """
    slots: Tensor = memory.embeddings  # type: ignore[assignment]  # `fitted_memory` has looked at the carrier
    mask = memory.attention_mask
    if mask.shape[1] == 0:
        slots, mask = (torch.nn.functional.pad(x, (0,) * 2 * (x.dim() - 2) + (0, 1)) for x in (slots, mask))
    mask = mask.clone()
    mask[:, 0] = 1
    return slots, mask


class DeCALForConditionalGeneration(CompressorHead, GenerationMixin, DeCALPreTrainedModel):
    """[`DeCALModel`] and T5's decoder, whose cross-attention reads the slots; "the decoder is unchanged"."""

    model_class = DeCALModel
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}

    def __init__(self, config: DeCALConfig):
        super().__init__(config)
        decoder_config = copy.deepcopy(config.decoder_config)
        decoder_config.is_decoder = True
        decoder_config.num_layers = decoder_config.num_decoder_layers
        self.decoder = T5Stack(decoder_config)
        # Encoder and decoder share a table of token embeddings, which is the encoder's.
        self.decoder.embed_tokens = None
        self.lm_head = nn.Linear(decoder_config.d_model, decoder_config.vocab_size, bias=False)
        self.post_init()

    def as_t5(self) -> T5ForConditionalGeneration:
        """Return the T5 inside, of this model's own tensors, without the latents."""
        with torch.device("meta"):
            t5 = T5ForConditionalGeneration(copy.deepcopy(self.config.decoder_config))
        table = self.get_input_embeddings().weight
        t5.shared.weight = t5.encoder.embed_tokens.weight = t5.decoder.embed_tokens.weight = table
        t5.encoder.load_state_dict(self.model.encoder.state_dict(), assign=True)
        t5.decoder.load_state_dict({**self.decoder.state_dict(), "embed_tokens.weight": table}, assign=True)
        t5.lm_head.weight = self.lm_head.weight
        for name in ("decoder_start_token_id", "pad_token_id", "eos_token_id", "bos_token_id"):
            setattr(t5.config, name, getattr(self.config, name))
        t5.generation_config = copy.deepcopy(self.generation_config)
        return t5.train(self.training)

    def get_encoder(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the encoder alone, which is what `AutoModel` loads."""
        return self.model

    def get_decoder(self) -> nn.Module:
        """Return the decoder stack."""
        return self.decoder

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels one place to the right, behind the start token; what has no label becomes a pad."""
        shifted = labels.roll(1, dims=-1)
        shifted[:, 0] = self.config.decoder_start_token_id
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def text_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the decoder over a text behind a memory: states `(batch_size, num_text_tokens, hidden_size)`.

        Args:
            input_ids: Text `(batch_size, num_text_tokens)`, the decoder's start token first.
        """
        cached = 0 if cache is None else int(cache.get_seq_length())
        sequence = None
        if cached:
            # The cache holds a row's pads in front.
            mask = cached_text_mask(attention_mask, input_ids, cached).sort(dim=1).values
            memory = fitted_memory(memory, self.model, input_ids)
        else:
            text = self.model.text_rows(input_ids, attention_mask)
            memory, *_ = fitted_text_and_memory(text, memory, self.model)
            # Relative positions count places: no pad may stand between two tokens.
            sequence = pack(text.attention_mask[:, :0], text.attention_mask, is_full=text.is_full)
            input_ids, mask = sequence.arrange(text.input_ids), sequence.attention_mask
        is_full = sequence is None or sequence.is_full
        outputs = self._decode(input_ids, mask, *readable_slots(memory), cache, is_full, **kwargs)
        if sequence is not None:
            sequence.cut_to_text(outputs)
        return outputs

    def _decode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        slots: Tensor,
        slot_mask: Tensor,
        cache: Cache | None,
        is_full: bool = False,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        if kwargs.get("use_cache") is None:
            kwargs["use_cache"] = self.config.use_cache and not self.training
        embeddings = self.get_input_embeddings()(input_ids)
        if not is_full:
            own = {CACHE: cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache}
            # With a static cache the library gives a mask of four dimensions.
            attention_mask = with_sight(seeing_mask(self.decoder, attention_mask, inputs_embeds=embeddings, **own))
        outputs = self.decoder(
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            encoder_hidden_states=slots,
            encoder_attention_mask=slot_mask,
            **{CACHE: cache},
            **kwargs,
        )
        if self.config.decoder_config.scale_decoder_outputs:
            # T5 before v1.1, whose output table is the input's.
            outputs.last_hidden_state = outputs.last_hidden_state * self.config.hidden_size**-0.5
        return outputs

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Sequence[Tensor] | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        ratio: int | Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        context_chunk_lengths: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        r"""
        Predict a text from a context, in one of two forms.

        As any encoder-decoder: `input_ids` are the context `(batch_size, num_tokens)`, and `labels` the decoder's next
        tokens. Or, as every compressor here, with `memory` or `context_input_ids`: `input_ids` are the decoder's text,
        its start token first, and `labels` are aligned with it and shifted inside.

        Args:
            decoder_input_ids, decoder_attention_mask: first form, `(batch_size, num_text_tokens)`; the labels,
                shifted, if not given.
            encoder_outputs: first form, in place of `input_ids`: slots `(batch_size, num_slots, hidden_size)` first,
                whose mask `attention_mask` then is.
            context_input_ids, context_attention_mask, memory, ratio, context_chunk_lengths: second form, as of
                [`CompressorModel.forward`].
            cache, labels, use_cache, logits_to_keep, past_key_values: as of [`CompressorForCausalLM.forward`].

        Returns:
            `logits` of shape `(batch_size, num_text_tokens, vocab_size)`, `loss` if there are labels, the cache, and
            the slots as `encoder_last_hidden_state`. `encoder_hidden_states` and `encoder_attentions` are those of
            what the encoder reads, latents and tokens, with a row for each chunk of a context.
        """
        check_keywords(kwargs)
        cache = past_key_values if cache is None else cache
        has_text = memory is not None or context_input_ids is not None
        return_dict = kwargs.pop("return_dict", None)
        loss_arguments = {name: kwargs.pop(name) for name in ("num_items_in_batch",) if name in kwargs}
        decoding = {"use_cache": use_cache, **kwargs}
        asked = {name: kwargs.get(name, getattr(self.config, name)) for name in _OUTPUTS}
        encoder: Any = BaseModelOutput()
        if has_text:
            if decoder_input_ids is not None or input_ids is None:
                raise ValueError("with `memory` or `context_input_ids` the decoder's text is `input_ids`")
            check_source(context_input_ids, memory, ratio, context_attention_mask, context_chunk_lengths)
            if context_input_ids is not None:
                context = (context_input_ids, context_attention_mask, "context_input_ids", context_chunk_lengths)
                memory, encoder = self._encoded(asked, ratio, *context)
            outputs = self.text_states(input_ids, attention_mask, memory, cache, **decoding)
            slots = None if memory is None else memory.embeddings
        else:
            others = (None if encoder_outputs is None else ratio, context_attention_mask, context_chunk_lengths)
            check_source(None, None, *others)
            if encoder_outputs is None:
                if input_ids is None:
                    raise ValueError("give a context: `input_ids`, `context_input_ids`, `memory` or `encoder_outputs`")
                memory, encoder = self._encoded(asked, ratio, input_ids, attention_mask)
                slots, slot_mask = readable_slots(memory)
            else:
                slots = encoder_outputs[0]
                encoder = encoder_outputs if isinstance(encoder_outputs, BaseModelOutput) else BaseModelOutput()
                slot_mask = slots.new_ones(slots.shape[:2]) if attention_mask is None else attention_mask
            if decoder_input_ids is None:
                if labels is None:
                    raise ValueError("give `decoder_input_ids` or `labels`: the decoder has nothing to read")
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            loss_arguments["shift_labels"] = None if labels is None else labels.contiguous()
            outputs = self._decode(decoder_input_ids, decoder_attention_mask, slots, slot_mask, cache, **decoding)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = head_logits(self.lm_head, outputs.last_hidden_state[:, keep, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **loss_arguments)
        result = Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            **{CACHE: outputs.get(CACHE)},
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=slots,
            encoder_hidden_states=encoder.hidden_states,
            encoder_attentions=encoder.attentions,
        )
        return result if return_dict in (None, True) else result.to_tuple()

    def _encoded(self, asked: dict[str, Any], ratio: Any, *context: Any) -> tuple[CompressedContext, Any]:
        """Compress contexts, given as to `context_rows`; return the encoder's outputs, too, if any of `_OUTPUTS` is
        asked for."""
        passes: list[Any] = []
        extras = {"passes": passes, **asked} if any(asked.values()) else {}
        memory = self.model.context_memory(self.model.context_rows(*context), ratio, **extras)
        return memory, passes[0] if passes else BaseModelOutput()

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        ratio: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate from a context: either as any encoder-decoder does, or a question's answer behind slots.

        With `memory` or `context_input_ids`, `input_ids` are the question; the decoder reads it behind its start
        token, unless the configuration places questions in the encoder. A start token in front of a question and an
        EOS behind it, as T5's tokenizers add it, are not read. Without them `input_ids` are the context.

        Args:
            inputs, input_ids: The question, or the context, `(batch_size, num_tokens)`. With a memory or context it
                may be left out, if there is nothing to ask.
            attention_mask, memory, context_input_ids, context_attention_mask, ratio, kwargs: as of
                [`CompressorForCausalLM.generate`].

        Returns:
            As `GenerationMixin.generate`: the question and new tokens; or, of a context alone, as for any
            encoder-decoder, the start token and new tokens.
        """
        input_ids = inputs if input_ids is None else input_ids
        # Some tokenizers add it; T5 has no use for it.
        kwargs.pop("token_type_ids", None)
        cache, older = (kwargs.pop(name, None) for name in ("cache", "past_key_values"))
        cache = older if cache is None else cache
        if cache is not None:
            kwargs[CACHE] = cache
        # An assistant drafts without the memory, and chunks would be cut from the slots' mask.
        for name in ("assistant_model", "prefill_chunk_size"):
            if self._setting(name, kwargs) is not None:
                raise ValueError(f"`{name}` does not go with an encoder-decoder: leave it out")
        if memory is not None or context_input_ids is not None:
            context = (context_input_ids, context_attention_mask)
            return self._answer(input_ids, attention_mask, memory, context, ratio, kwargs)
        check_source(None, None, None, context_attention_mask)
        if input_ids is None:
            if "encoder_outputs" in kwargs:
                check_source(None, None, ratio, None)
                return super().generate(attention_mask=attention_mask, **kwargs)
            raise ValueError("give a context, as `input_ids` or `context_input_ids`, or a `memory`")
        return self._generate_from(*self._encoded(self._asked(kwargs), ratio, input_ids, attention_mask), kwargs)

    def _asked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the names of `_OUTPUTS` that generation shall return."""
        returns = self._setting("return_dict_in_generate", kwargs)
        return {name: returns and self._setting(name, kwargs) for name in _OUTPUTS}

    def _generate_from(self, memory: CompressedContext, encoder: Any, kwargs: dict[str, Any]) -> Any:
        slots, slot_mask = readable_slots(memory)
        encoder_outputs = BaseModelOutput(slots, encoder.hidden_states, encoder.attentions)
        return super().generate(encoder_outputs=encoder_outputs, attention_mask=slot_mask, **kwargs)

    def _answer(
        self,
        question: Tensor | None,
        question_mask: Tensor | None,
        memory: CompressedContext | None,
        context: tuple[Any, Any],
        ratio: int | Tensor | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """Answer questions behind a memory: questions and new tokens."""
        chunk_lengths = kwargs.pop("context_chunk_lengths", None)
        check_source(context[0], memory, ratio, context[1], chunk_lengths)
        start, in_encoder = self.config.decoder_start_token_id, self.config.compresses_questions
        has_question = question is not None
        if question is None:
            num_rows = memory.batch_size if memory is not None else len(context[0])
            question, question_mask = torch.full((num_rows, 1), start, device=self.device), None
        rows = self.model.text_rows(question, question_mask)
        measure_rows(rows)
        question, question_mask = rows.input_ids, rows.attention_mask
        encoder: Any = BaseModelOutput()
        if memory is None:
            if in_encoder:
                context = question_in_front(*context, question, question_mask, self.config, chunk_lengths)[:2]
            source = (*context, "context_input_ids", chunk_lengths)
            memory, encoder = self._encoded(self._asked(kwargs), ratio, *source)
        elif in_encoder:
            memory = fitted_memory(memory, self.model, question)
            check_question(memory, question, own_tokens(question, question_mask, self.config))
        memory, *_ = fitted_text_and_memory(rows, memory, self.model)
        ids, mask = with_start(question, question_mask, self.config)
        if in_encoder:
            ids, mask = question.new_full((len(question), 1), start), question_mask.new_ones(len(question), 1)
        shown = left_padded(question, question_mask)[:, : question.shape[1] if has_question else 0]

        def as_shown(sequences: Tensor) -> Tensor:
            """Sequences with the question in the place of what the decoder starts from."""
            own = shown.repeat_interleave(len(sequences) // len(shown), dim=0)
            return torch.cat([own, sequences[:, ids.shape[1] :]], dim=1)

        if kwargs.get("streamer") is not None:
            kwargs["streamer"] = _QuestionStreamer(kwargs["streamer"], as_shown)
        if kwargs.get("stopping_criteria") is not None:
            kwargs["stopping_criteria"] = StoppingCriteriaList(
                lambda sequences, *args, criterion=criterion, **more: criterion(as_shown(sequences), *args, **more)
                for criterion in kwargs["stopping_criteria"]
            )
        kwargs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        output = self._generate_from(memory, encoder, kwargs)
        if isinstance(output, Tensor):
            return as_shown(output)
        output.sequences = as_shown(output.sequences)
        return output


class _QuestionStreamer(BaseStreamer):
    """A streamer whose first tokens are those that `as_shown` makes of what the decoder starts from."""

    def __init__(self, streamer: BaseStreamer, as_shown: Callable[[Tensor], Tensor]):
        self.streamer = streamer
        self.as_shown: Callable[[Tensor], Tensor] | None = as_shown

    def put(self, value: Tensor) -> None:
        if self.as_shown is not None:
            value, self.as_shown = self.as_shown(value), None
        self.streamer.put(value)

    def end(self) -> None:
        self.streamer.end()
