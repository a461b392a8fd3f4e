# SPDX-License-Identifier: Apache-2.0
"""Compressors on a causal language model: slots and text go through its decoder as one sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

from ...configuration.configuration_compressor import CompressorConfig
from ..checkpoint.base_weights import share_weights
from ..memory.compressed_context import CompressedContext
from ..memory.key_value_memory import (
    check_has_key_values,
    check_sliding_window,
    filled_cache,
    note_cached_pairs,
    note_cached_slots,
    num_cached_slots,
)
from ..parts.base_pass import CACHE, in_base_precision, run_backbone
from ..parts.lora import DECODER, ENCODER, OWN_ADAPTERS, SHARED, Passes, activated, inject_lora, use_adapter
from ..parts.packing import PackedSequence, pack, reads_falling_ids_as_packed, text_positions, through_first
from ..parts.pooling import pooled_embeddings
from .backbone import Chunks, CompressorBackbone, Slots
from .validation import (
    TokenRows,
    cached_text_mask,
    check_keywords,
    check_source,
    fitted_memory,
    fitted_text_and_memory,
    measure_rows,
    warn_about_positions,
)

logger = logging.get_logger(__name__)

# What a compressor may learn beside a method's own parts.
_COMMON_PARTS = ("task_embeddings", "marker_embeddings", "residual_map")


class CompressorModel(CompressorBackbone):
    r"""
    Encoder, method parts and decoder backbone of a compressor; a method adds `encode` and its parts.

    `forward` returns `last_hidden_state` aligned with `input_ids` (batch_size, num_text_tokens, hidden_size): the
    slots' states are cut off, so any trainer that runs the backbone and then the LM head works without change.
    """

    # Whether training on a text without context or memory is worth a warning; trainers that mean it say so.
    warns_of_no_context = True
    # The method's own modules and parameters, by name: they train, and are float32.
    method_parts: tuple[str, ...] = ()
    # Types of language models that it is tested on.
    checked_architectures: tuple[str, ...] = (
        *("llama", "qwen2", "qwen3", "mistral", "gemma2"),
        *("qwen3_5_text", "qwen3_next", "gemma3_text", "smollm3"),
    )
    # The LM head of a full checkpoint is not part of the backbone.
    _keys_to_ignore_on_load_unexpected = [r"lm_head\.weight"]

    def __init__(self, config: CompressorConfig):
        super().__init__(config)
        self._keep_in_fp32_modules_strict = ["lora_A", "lora_B", *_COMMON_PARTS, *self.method_parts]
        dtype = torch.get_default_dtype()
        if config.carrier == "key_values":
            check_has_key_values(config.decoder_config)
        for part in (config.decoder_config, config.encoder_config):
            if part is not None and part.model_type not in self.checked_architectures:
                logger.warning_once(
                    f"{part.model_type!r} is not among the architectures that compressors are tested on, "
                    f"{list(self.checked_architectures)}: it may ignore a bidirectional mask, or place slots wrongly"
                )
        self.language_model = AutoModel.from_config(config.decoder_config, dtype=dtype)
        self.encoder_model = None
        if config.encoder_config is not None:
            self.encoder_model = AutoModel.from_config(config.encoder_config, dtype=dtype)
        if config.encoder_lora is not None and config.shared_adapter:
            inject_lora(self.language_model, SHARED, config.encoder_lora)
        elif config.encoder_lora is not None:
            inject_lora(self.encoder_backbone, ENCODER, config.encoder_lora, self.encoder_lora_exclusions())
        if config.decoder_adapter is not None:
            inject_lora(self.language_model, DECODER, config.decoder_adapter)
        self.task_embeddings = None
        if config.task_token_ids:
            self.task_embeddings = nn.Parameter(torch.zeros(len(config.task_token_ids), config.hidden_size))
        self.marker_embeddings = None
        if config.markers_per_chunk:
            self.marker_embeddings = nn.Parameter(torch.zeros(config.markers_per_chunk, config.hidden_size))
        self.residual_map = None
        if config.embedding_residual and not config.maps_slots:
            self.residual_map = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        # Its names are `True` where this thread wants the base without adapters.
        self._base_alone = Passes()

    @property
    def method_parameters(self) -> tuple[str, ...]:
        """Patterns of what trains: adapters, task tokens, markers, the residual's map and the method's parts."""
        parts = "|".join((*_COMMON_PARTS, *self.method_parts))
        return rf"\.lora_[AB]\.({'|'.join(OWN_ADAPTERS)})\.", rf"(^|\.)({parts})(\.|$)"

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.residual_map:
            init.zeros_(module.weight)
            return
        super()._init_weights(module)
        for own in (self.task_embeddings, self.marker_embeddings) if module is self else ():
            if own is not None:
                self._init_like_embeddings(own, self.language_model)

    def take_base(self, source: Any) -> None:
        """Put the weights of a base without its LM head into the language model."""
        share_weights(self.language_model, source)

    def start_from_base(self) -> None:
        """Give parts that start from the base's own weights their values; by default there are none."""

    @property
    def encoder_backbone(self) -> PreTrainedModel:
        """The language model that encodes: its own weights, or the decoder's."""
        return self.language_model if self.encoder_model is None else self.encoder_model

    # --- the encoder ---

    def encoder_lora_exclusions(self) -> list[str]:
        """Paths of the encoder's maps that get no adapter although the configuration's targets name them."""
        return []

    def encoder_outputs(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the encoder once with its adapter on `input_ids` `(num_chunks, num_tokens)` or `inputs_embeds`; the mask
        has their shape, or the backbone's own form."""
        inputs: dict[str, Any]
        inputs = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        if cache is not None:
            kwargs[CACHE] = cache
        inputs |= {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
        backbone = self.encoder_backbone
        with self._adapter(backbone, ENCODER):
            return run_backbone(backbone, **inputs, **kwargs)

    # --- slots ---

    def slots_of(self, chunks: Chunks, ratios: Sequence[Any], **extras: Any) -> Sequence[Slots]:
        slots = self.encode(chunks, ratios, **extras)
        if not self.config.embedding_residual or self.config.carrier != "embeddings":
            return slots
        embeddings = self._embed_text(chunks.input_ids).float()
        return [self._with_residual(*pair, embeddings, chunks) for pair in zip(slots, ratios, strict=True)]

    def _with_residual(self, slots: Any, ratio: Any, embeddings: Tensor, chunks: Chunks) -> Tensor:
        """z_k = |S_k|^(-1/2) sum_{i in S_k} E(x_i) + W s_k rms(E(x)) / rms(s_k), W = 0 at the start.

        What W maps is as large as an embedding: Adam moves each weight of W by the same step, so that larger inputs
        would move a slot by more than its own size.
        """
        own = slots.float()
        mask = chunks.attention_mask
        if self.residual_map is not None:
            squares = (embeddings.square().mean(dim=-1) * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            with torch.autocast(own.device.type, enabled=False):
                own = functional.rms_norm(own, own.shape[-1:], eps=1e-6) * squares.sqrt()[:, None, None]
                own = self.residual_map(own)
        # A fixed number of memory tokens may be more or fewer than windows.
        return (own + pooled_embeddings(embeddings, mask, ratio, chunks.lengths, own.shape[1])).to(slots.dtype)

    # --- adapters ---

    @contextmanager
    def _adapter(self, backbone: PreTrainedModel, name: str) -> Iterator[None]:
        with use_adapter(backbone, None if self._base_alone.names else name), in_base_precision(backbone):
            yield

    def base_language_model(self) -> AbstractContextManager[None]:
        """Inside this block the adapters are off: without a context, `forward` is the untouched base model's.

        Other threads that use the model meanwhile, also those that are started in the block, have their adapters on.
        """
        return activated(self._base_alone, True)

    def _replicate_for_data_parallel(self) -> CompressorModel:
        replica = super()._replicate_for_data_parallel()
        # Replicas work in threads of their own, and for the thread that makes them.
        replica._base_alone = SimpleNamespace(names=self._base_alone.names)
        return replica

    # --- the decoder ---

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        ratio: int | Tensor | None = None,
        use_cache: bool | None = None,
        text_position_offset: Tensor | None = None,
        context_chunk_lengths: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read slots and text.

        Args:
            input_ids: Text `(batch_size, num_text_tokens)`: task token or BOS, question, answer.
            attention_mask: `(batch_size, num_text_tokens)`; pads may stand on either side. With a cache it covers the
                text in the cache, too.
            position_ids: `(batch_size, num_text_tokens)`, counted within the text; pads do not count.
            cache: A cache. One that holds slots already goes with their memory or context, and with
                `text_position_offset`.
            context_input_ids: Contexts `(batch_size, num_context_tokens)` to compress first.
            context_attention_mask: Their mask.
            memory: Contexts that are already compressed; one row serves any number of texts.
            ratio: Ratio for `context_input_ids`, as in `compress`; beside a memory, its own or none.
            use_cache: Whether to return the cache; as the configuration says if not given.
            text_position_offset: `(batch_size,)`, position of the first text token; computed if not given.
            context_chunk_lengths: The `chunk_lengths` of the contexts, as in `compress`.
            past_key_values: An older name of `cache`.
            labels: Ignored; some trainers give them to the backbone, too.
            kwargs: Inputs of the method beside contexts; the rest is handed to the language model.

        Returns:
            `last_hidden_state` of shape `(batch_size, num_text_tokens, hidden_size)`, and the cache.

        Raises:
            TypeError: ids, a ratio, a memory or a cache that are none, or a misspelt argument.
            ValueError: context and memory together, a ratio or mask of contexts where there is none, a text row
                without tokens, unknown token ids, a mask of the wrong shape, a memory of another model or batch size,
                or a filled cache in training with gradient checkpointing.
        """
        check_source(context_input_ids, memory, ratio, context_attention_mask, context_chunk_lengths)
        check_keywords(kwargs)
        if input_ids is None or kwargs.pop("inputs_embeds", None) is not None:
            raise ValueError("`input_ids` are needed, the text behind the slots (`inputs_embeds` are not read)")
        is_training = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if memory is None and context_input_ids is None and is_training and self.warns_of_no_context:
            logger.warning_once(
                "training without a context: rows bring no `context_input_ids` and no `memory`, so that nothing is "
                "compressed and the language model reads the text alone; see `CompressionCollator`"
            )
        extras = self.extra_inputs(kwargs) if kwargs else {}
        if extras and context_input_ids is None:
            raise ValueError(f"`{'`, `'.join(extras)}` must come with `context_input_ids`, and there are none")
        cache = past_key_values if cache is None else cache
        is_cached = cache is not None and bool(cache.get_seq_length())
        # Checkpointed layers take no cache that is written to, and would silently do without the memory in it.
        if self.training and self.language_model.is_gradient_checkpointing:
            if is_cached:
                raise ValueError("in training with gradient checkpointing layers read no filled `cache`")
            cache, use_cache = None, False
        context, sequence = None, None
        if context_input_ids is not None:
            contexts = (context_input_ids, context_attention_mask, "context_input_ids", context_chunk_lengths)
            context = self.context_rows(*contexts)
        if is_cached:
            if context is not None:
                memory = self.context_memory(context, ratio, **extras)
            if memory is None and (number := num_cached_slots(cache)):
                raise ValueError(
                    f"`cache` holds the {number} slots of a memory: give the memory, too, and `text_position_offset`"
                )
            reading = (position_ids, memory, text_position_offset)
            inputs = self.next_inputs(input_ids, attention_mask, *reading, cache)
        else:
            # One that has been emptied may have held a memory.
            note_cached_pairs(cache, None)
            text = self.text_rows(input_ids, attention_mask)
            memory, is_full, longest = self._checked_memory(text, memory, context, ratio, extras)
            # A cache's places are counted by the memory's.
            width = longest if cache is None and use_cache is False else None
            inputs, sequence = self.first_inputs(text, position_ids, memory, text_position_offset, is_full, width)
            if memory is None and attention_mask is None:
                # Without a mask, positions that start anew separate the texts of a packed row.
                inputs["attention_mask"] = None
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if memory is not None and memory.carrier == "key_values" and not is_cached:
            cache = self.cache_of_slots(memory, is_full, cache, use_cache)
        return_dict = kwargs.pop("return_dict", None)
        for name in ("output_hidden_states", "output_attentions"):
            kwargs.setdefault(name, getattr(self.config, name))
        inputs |= {CACHE: cache, "use_cache": use_cache}
        with self._adapter(self.language_model, DECODER):
            outputs = run_backbone(self.language_model, **inputs, **kwargs)
        if not is_cached:
            note_cached_slots(outputs.get(CACHE), 0 if memory is None else memory.attention_mask.shape[1])
        if not use_cache:
            # Some backbones hand back the cache that they were given; a field that is set cannot be taken out again.
            outputs = type(outputs)(**{name: value for name, value in outputs.items() if name != CACHE})
        if sequence is not None:
            sequence.cut_to_text(outputs)
        return outputs if return_dict in (None, True) else outputs.to_tuple()

    def _checked_memory(
        self,
        text: TokenRows,
        memory: CompressedContext | None,
        context: TokenRows | None,
        ratio: Any,
        extras: dict[str, Any],
    ) -> tuple[CompressedContext | None, bool, int | None]:
        """Check a text and what stands in front of it by one wait for the device; compress a context. Returns as
        [`fitted_text_and_memory`]."""
        if memory is not None:
            return fitted_text_and_memory(text, memory, self)
        if context is None and torch.compiler.is_exporting():
            # A graph has no values to check.
            return None, True, None
        measure_rows(*[text] if context is None else [context, text])
        if context is None:
            return None, True, None
        memory = self.compress_rows(context, [ratio], **extras)[0]
        counts = memory.slot_counts
        memory = fitted_memory(memory, self, text.input_ids)
        of_rows = counts * (len(text.lengths) // len(counts))
        longest = max(num_slots + length for num_slots, length in zip(of_rows, text.lengths, strict=True))
        return memory, min(counts) == max(counts), longest

    # --- what the language model reads ---

    def first_inputs(
        self,
        text: TokenRows,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
        is_full: bool = False,
        longest: int | None = None,
    ) -> tuple[dict[str, Any], PackedSequence | None]:
        """Return slots and text as one sequence for the language model; text alone where the cache holds the slots."""
        config, input_ids, text_mask = self.config, text.input_ids, text.attention_mask
        positions = text_positions(text_mask) if position_ids is None else position_ids.expand_as(input_ids)
        embeddings = self._embed_text(input_ids)
        if memory is None:
            sequence = pack(text_mask[:, :0], text_mask, is_full=text.is_full)
            return sequence.inputs(embeddings, positions), sequence
        if offset is None:
            offset = self.text_position_offset(memory, input_ids, text_mask)
        warn_about_positions(config.decoder_config, memory.attention_mask.shape[1], max(text.lengths))
        if memory.embeddings is None:
            slot_mask = self.cached_slot_mask(memory)
            check_sliding_window(config.decoder_config, memory.attention_mask.shape[1], text_mask.shape[1])
            return {
                "inputs_embeds": embeddings,
                "attention_mask": torch.cat([slot_mask, text_mask], dim=1),
                "position_ids": (positions + offset[:, None]) * text_mask,
                "is_full": is_full and text.is_full,
            }, None
        moves_first = self._moves_first(input_ids, text_mask)
        memory_positions = memory.position_ids
        text_offset = offset[:, None].expand_as(positions)
        if moves_first is not None:
            text_offset = text_offset * ~moves_first
            shift = moves_first.sum(dim=1, keepdim=True)
            if config.position_layout == "enhanced":
                # Its context starts at position 1.
                shift = (shift - 1).clamp(min=0)
            memory_positions = memory_positions + shift
        pad_in_front = bool(self.num_pads_in_front(memory))
        is_full = is_full and text.is_full
        pads = (longest, longest is not None)
        sequence = pack(memory.attention_mask, text_mask, moves_first, pad_in_front, is_full, *pads)
        joined = torch.cat([memory.embeddings.to(embeddings.dtype), embeddings], dim=1)
        return sequence.inputs(joined, torch.cat([memory_positions, positions + text_offset], dim=1)), sequence

    def next_inputs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
        cache: Cache,
    ) -> dict[str, Any]:
        """Return text that follows what is in the cache, slots and the text so far; arguments as of `forward`."""
        if memory is not None and len(memory) != len(input_ids):
            raise ValueError(f"behind a cache `memory` has {len(memory)} rows, and `input_ids` has {len(input_ids)}")
        num_cached = int(cache.get_seq_length()) - self.num_places(memory)
        text_mask = cached_text_mask(attention_mask, input_ids, num_cached)
        if position_ids is None:
            position_ids = text_positions(text_mask)[:, -input_ids.shape[1] :]
        if memory is not None:
            if offset is None:
                raise ValueError("with a cache, `text_position_offset` must say where the text starts; see `generate`")
            position_ids = position_ids + offset[:, None]
        if memory is not None and memory.carrier == "key_values":
            # The slots came first, and then the text as it was given.
            slot_mask = self.cached_slot_mask(memory)
            check_sliding_window(self.config.decoder_config, memory.attention_mask.shape[1], text_mask.shape[1])
            mask = torch.cat([slot_mask, text_mask], dim=1)
        else:
            slots = [text_mask[:, :0]]
            if memory is not None:
                slots = [text_mask.new_zeros(len(text_mask), self.num_pads_in_front(memory)), memory.attention_mask]
            # The cache holds a row's pads in front, so only their number matters.
            mask = torch.cat([*slots, text_mask], dim=1).sort(dim=1).values
        if cache.is_compileable:
            # One compiled graph serves passes of one shape; the places behind the text are masked by causality.
            length = max(getattr(layer, "max_cache_len", 0) for layer in cache.layers)
            mask = functional.pad(mask, (0, max(0, length - mask.shape[1])))
        return {
            "inputs_embeds": self._embed_text(input_ids),
            "attention_mask": mask,
            "position_ids": position_ids,
            "is_full": input_ids.shape[1] == 1 or memory is None or memory.carrier != "key_values",
        }

    def cache_of_slots(self, memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
        """Return a cache that starts with a memory of key/values, the one given or a new one."""
        return filled_cache(memory, is_full, cache, use_cache)

    def cached_slot_mask(self, memory: CompressedContext) -> Tensor:
        """Mark the places of such a cache that hold slots, `(batch_size, num_places)`."""
        return memory.attention_mask.sort(dim=1).values

    def num_pads_in_front(self, memory: CompressedContext) -> int:
        """Return the pads, 0 or 1, that every row needs in front of its slots beside its own; see `pack`."""
        falls = memory.position_layout == "enhanced" and memory.carrier == "embeddings"
        return int(falls and reads_falling_ids_as_packed(self.config.decoder_config, memory.batch_size))

    def num_places(self, memory: CompressedContext | None) -> int:
        """Return the places that a memory takes in the cache in front of the text."""
        return 0 if memory is None else memory.attention_mask.shape[1] + self.num_pads_in_front(memory)

    def text_position_offset(self, memory: CompressedContext, input_ids: Tensor, text_mask: Tensor | None) -> Tensor:
        """Return the position of each row's first text token, `(batch_size,)` (EPL, Tables 2, 3 and 13 to 15).

        It is the number of slots; under the enhanced layout 0 for a reconstruction, which starts with its own token
        ([AE]), and the number of context tokens for everything else. A `text_mask` of `None` stands for all ones.
        """
        if memory.position_layout != "enhanced":
            return memory.num_slots
        autoencoding = self.config.reconstruction_token_id
        if autoencoding is None:
            return memory.num_context_tokens
        first = torch.zeros_like(memory.num_slots) if text_mask is None else text_mask.argmax(dim=1)
        starts_with_ae = input_ids.gather(1, first[:, None])[:, 0] == autoencoding
        return memory.num_context_tokens * ~starts_with_ae

    def num_in_front(self, input_ids: Tensor) -> int:
        """Return the most tokens that a text without pads has in front of the slots; one pass has to read them and the
        slots."""
        moved = self._moves_first(input_ids, torch.ones_like(input_ids))
        return 0 if moved is None else int(moved.sum(dim=1).max())

    def _moves_first(self, input_ids: Tensor, text_mask: Tensor) -> Tensor | None:
        """Mark the text tokens that stand in front of the slots, `(batch_size, num_text_tokens)` bool; `None` for
        none."""
        opening, bos = self.config.slots_after_ids, self.config.bos_token_id
        if opening:
            return through_first(input_ids, text_mask, opening)
        if not self.config.bos_before_slots or bos is None:
            return None
        is_first = (text_mask.cumsum(dim=1) == 1) & text_mask.bool()
        return is_first & (input_ids == bos)

    def _embed_text(self, input_ids: Tensor) -> Tensor:
        table = self.get_input_embeddings()
        if self.task_embeddings is None:
            return table(input_ids)
        embeddings = table(input_ids.clamp(max=self.config.vocab_size - 1))
        for row, task_id in enumerate(self.config.task_token_ids.values()):
            task = self.task_embeddings[row].to(embeddings.dtype)
            embeddings = torch.where((input_ids == task_id)[:, :, None], task, embeddings)
        return embeddings
