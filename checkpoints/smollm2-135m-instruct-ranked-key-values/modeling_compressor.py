# SPDX-License-Identifier: Apache-2.0
"""Compressors on a causal language model: slots and text go through its decoder as one sequence."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

from .configuration_compressor import CompressorConfig
from .base_weights import own_modules, remember_base, share_weights
from .compressed_context import CompressedContext
from .key_value_memory import aligned_right, check_sliding_window, filled_cache, note_cached_slots
from .memory_validation import refuse_values, value_flags
from .base_precision import in_base_precision, note_trained_weights
from .call_views import for_one_call
from .lora import DECODER, ENCODER, OWN_ADAPTERS, SHARED, initialize_lora, inject_lora, merge_lora, use_adapter
from .packing import PackedSequence, pack, reads_falling_ids_as_packed, text_positions, through_first
from .backbone import CompressorBackbone
from .input_checks import (
    TokenRows,
    check_cache,
    check_cached_mask,
    check_ids,
    check_integers,
    check_keywords,
    check_memory,
    check_memory_ratio,
    check_together,
    token_rows,
    warn_about_positions,
)
from .pretrained_compressor import CompressorPreTrainedModel

logger = logging.get_logger(__name__)

# Learned vectors that a method may have beside parts of its own.
_OWN_EMBEDDINGS = ("task_embeddings", "marker_embeddings")


class DecoderOnlyPreTrainedModel(CompressorPreTrainedModel):
    """A compressor whose base, a causal language model, stays as it is: what trains beside it is float32."""

    _supports_flash_attn = True
    _supports_flex_attn = True
    trains_base = False

    def post_init(self) -> None:
        super().post_init()
        # What trains is loaded in float32 whatever type the rest is loaded in; the backbone names most of its parts.
        names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        names = [name for name in names if not self._keep_in_fp32_modules_strict & set(name.split("."))]
        self._keep_in_fp32_modules_strict |= {f"^{re.escape(name)}$" for name in names}
        if getattr(self.config, "quantization_config", None) is not None:
            # The library's quantizers leave these as they are.
            self._keep_in_fp32_modules |= {re.escape(path) for path in own_modules(self)}

    def apply_trainable_set(self) -> None:
        super().apply_trainable_set()
        for module in self.modules():
            if isinstance(module, PreTrainedModel) and not isinstance(module, CompressorPreTrainedModel):
                note_trained_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=getattr(self.config.decoder_config, "initializer_range", 0.02))
            if module.bias is not None:
                init.zeros_(module.bias)

    @torch.no_grad()
    def load_base_weights(self, base: PreTrainedModel, encoder: PreTrainedModel | None = None) -> None:
        """See [`CompressorPreTrainedModel.load_base_weights`]; without `encoder`, one of its own copies the base."""
        backbone = self.base_model
        source = base.base_model
        device, dtype = base.device, base.dtype
        backbone.take_base(source)
        if backbone.encoder_model is not None:
            share_weights(backbone.encoder_model, encoder or source, copied=encoder is None)
        if self.get_output_embeddings() is not None:
            self.get_output_embeddings().weight = base.get_output_embeddings().weight
        # In the order of the modules: a seed must give the same start values in every process.
        fresh: dict[str, None] = {}
        for path, module in list(self.named_modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.is_meta:
                    setattr(
                        module, name, nn.Parameter(torch.empty_like(parameter, device=device, dtype=torch.float32))
                    )
                    fresh[path] = None
        for path in fresh:
            if ".lora_" not in path:
                # The backbone knows its own parts' start values.
                backbone._init_weights(self.get_submodule(path))
        initialize_lora(self)
        self.tie_weights()
        self.apply_trainable_set()
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        backbone.start_from_base()
        self.config.dtype = dtype
        self.generation_config = copy.deepcopy(getattr(base, "generation_config", None) or GenerationConfig())

    def merge_adapters(self) -> None:
        """Add the adapters to the weights they sit on, so that inference needs no `peft`.

        A shared base becomes two models, one for the encoder and one for the decoder, which takes twice the memory; a
        warning says so. With a `shared_adapter` alone it stays one. What else trains goes on training.
        """
        backbone, config = self.base_model, self.config
        if config.encoder_lora is not None or config.decoder_lora is not None:
            if getattr(config, "quantization_config", None) is not None:
                raise ValueError(
                    "adapters cannot be merged into quantized weights: load the checkpoint unquantized first"
                )
            # Most weights are the base's no more.
            remember_base(self, None)
            is_one_model = config.shared_adapter and config.decoder_adapter is None
            if config.has_encoder and backbone.encoder_model is None and not is_one_model:
                logger.warning("merge_adapters: encoder and decoder become two copies of the base, twice the memory")
                backbone.encoder_model = copy.deepcopy(backbone.language_model)
                config.encoder_config = copy.deepcopy(config.decoder_config)
            if backbone.encoder_model is not None:
                merge_lora(backbone.encoder_model, ENCODER)
            merge_lora(backbone.language_model, DECODER)
            config.encoder_lora = config.decoder_lora = None
            config.shared_adapter = False
            if config.trainable_parameters is not None:
                names = [f"model.{name}" if self is backbone else name for name, _ in self.named_parameters()]
                # None left is an empty list: `None` would be the method's own set.
                config.trainable_parameters = [
                    pattern
                    for pattern in config.trainable_parameters
                    if any(re.search(pattern, name) for name in names)
                ]
        self.apply_trainable_set()


class _BaseAlone(threading.local):
    """Whether this thread wants the base without adapters."""

    wanted = False

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), ()


class CompressorModel(CompressorBackbone, DecoderOnlyPreTrainedModel):
    r"""
    Encoder, method parts and decoder backbone of a compressor; a method adds `encode` and its parts.

    `forward` returns `last_hidden_state` aligned with `input_ids` (batch_size, num_text_tokens, hidden_size): the
    slots' states are cut off, so any trainer that runs the backbone and then the LM head works without change.

    Args:
        config ([`CompressorConfig`]): the configuration.
    """

    # The method's own modules and parameters, by name: they train, and are float32.
    method_parts: tuple[str, ...] = ()
    # Types of language models that it is tested on.
    checked_architectures: tuple[str, ...] = ("llama", "qwen2", "qwen3", "mistral", "gemma2")
    # The LM head of a full checkpoint is not part of the backbone.
    _keys_to_ignore_on_load_unexpected = [r"lm_head\.weight"]

    def __init__(self, config: CompressorConfig):
        super().__init__(config)
        self._keep_in_fp32_modules_strict = ["lora_A", "lora_B", *_OWN_EMBEDDINGS, *self.method_parts]
        dtype = torch.get_default_dtype()
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
        self._base_alone = _BaseAlone()

    @property
    def method_parameters(self) -> tuple[str, ...]:
        """Patterns of what trains: adapters, task tokens, markers and the method's parts."""
        parts = "|".join((*_OWN_EMBEDDINGS, *self.method_parts))
        return rf"\.lora_[AB]\.({'|'.join(OWN_ADAPTERS)})\.", rf"(^|\.)({parts})(\.|$)"

    def _init_weights(self, module: nn.Module) -> None:
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

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    # --- the encoder ---

    def encoder_lora_exclusions(self) -> list[str]:
        """Paths of the encoder's maps that get no adapter although the configuration's targets name them."""
        return []

    def encoder_states(self, *args: Any, **kwargs: Any) -> Tensor:
        """Last hidden states `(num_chunks, num_tokens, hidden_size)`; arguments as `encoder_outputs`."""
        return self.encoder_outputs(*args, **kwargs).last_hidden_state

    def encoder_outputs(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """One pass of the encoder with its adapter.

        Args:
            input_ids: `(num_chunks, num_tokens)`, or else `inputs_embeds`.
            attention_mask: same shape, or a mask in the backbone's own form.
            position_ids: same shape.
            inputs_embeds: `(num_chunks, num_tokens, hidden_size)`.
            kwargs: handed to the backbone.
        """
        inputs = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        backbone = for_one_call(self.encoder_backbone, kwargs.get("is_causal"))
        with self._adapter(self.encoder_backbone, ENCODER):
            return backbone(
                **inputs, attention_mask=attention_mask, position_ids=position_ids, use_cache=False, **kwargs
            )

    # --- adapters ---

    def _adapter(self, backbone: PreTrainedModel, name: str) -> AbstractContextManager[None]:
        return in_base_precision(backbone, use_adapter(backbone, None if self._base_alone.wanted else name))

    @contextmanager
    def base_language_model(self) -> Iterator[None]:
        """Inside this block the adapters are off: without a context, `forward` is the untouched base model's.

        Other threads that use the model meanwhile, also those that are started in the block, have their adapters on.
        """
        before, self._base_alone.wanted = self._base_alone.wanted, True
        try:
            yield
        finally:
            self._base_alone.wanted = before

    def _replicate_for_data_parallel(self) -> CompressorModel:
        replica = super()._replicate_for_data_parallel()
        # Replicas work in threads of their own, and for the thread that makes them.
        replica._base_alone = SimpleNamespace(wanted=self._base_alone.wanted)
        return replica

    # --- the decoder ---

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        ratio: int | str | Tensor | None = None,
        use_cache: bool | None = None,
        text_position_offset: Tensor | None = None,
        context_chunk_lengths: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        r"""
        Read slots and text.

        Args:
            input_ids: Text `(batch_size, num_text_tokens)`: task token or BOS, question, answer.
            attention_mask: `(batch_size, num_text_tokens)`; pads may stand on either side. With a cache it covers the
                text in the cache, too.
            position_ids: `(batch_size, num_text_tokens)`, counted within the text; pads do not count.
            past_key_values: A cache; a non-empty one already holds the slots.
            context_input_ids: Contexts `(batch_size, num_context_tokens)` to compress first.
            context_attention_mask: Their mask.
            memory: Contexts that are already compressed; one row serves any number of texts.
            ratio: Ratio for `context_input_ids`, as in `compress`; beside a memory, its own or none.
            use_cache: Whether to return the cache; as the configuration says if not given.
            text_position_offset: `(batch_size,)`, position of the first text token; computed from the memory and the
                text's task token if not given.
            context_chunk_lengths: `(batch_size, num_passages)`, the `chunk_lengths` of the contexts, as in `compress`.
            kwargs: What the method reads beside contexts, and else handed to the language model.

        Returns:
            `last_hidden_state` of shape `(batch_size, num_text_tokens, hidden_size)`, and the cache.

        Raises:
            TypeError: ids, positions, a ratio, a memory or a cache that are none, or a misspelt argument.
            ValueError: context and memory together, a ratio or mask of contexts where there is none to compress, a
                text row without tokens, unknown token ids, a mask of the wrong shape, a memory of another model,
                width or batch size, or a filled cache in training with gradient checkpointing.
        """
        if context_input_ids is not None and memory is not None:
            raise ValueError("give either `context_input_ids` or `memory`, not both")
        if input_ids is None:
            raise ValueError(
                "`input_ids` are needed, the text that follows the slots (`inputs_embeds` is not supported)"
            )
        check_keywords(kwargs)
        if kwargs.pop("inputs_embeds", None) is not None:
            raise ValueError("`inputs_embeds` is not supported: give `input_ids`")
        beside = self.beside_contexts(kwargs)
        if beside and context_input_ids is None:
            raise ValueError(f"`{'`, `'.join(beside)}` must come with `context_input_ids`, and there are none")
        check_ids("input_ids", input_ids)
        check_integers("position_ids", position_ids, tuple(input_ids.shape), (1, input_ids.shape[1]))
        check_integers("text_position_offset", text_position_offset, (len(input_ids),), (1,))
        check_cache(past_key_values)
        if context_input_ids is None:
            check_memory_ratio(memory, ratio, context_attention_mask, context_chunk_lengths)
        cached = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        if self._drops_caches:
            if cached:
                raise ValueError("in training with gradient checkpointing layers read no filled `past_key_values`")
            past_key_values = None
        context = None
        if context_input_ids is not None:
            given = (context_input_ids, context_attention_mask, "context_input_ids", context_chunk_lengths)
            context = self.context_rows(*given)
        if cached:
            if context is not None:
                check_together(context)
                memory = self.compress_rows(context, [ratio], **beside)[0]
            inputs = self._next_inputs(input_ids, attention_mask, position_ids, memory, text_position_offset, cached)
            inputs["attention_mask"] = _as_long_as(past_key_values, inputs["attention_mask"])
            sequence = None
        else:
            text, joined = self.text_rows(input_ids, attention_mask), None
            if context is not None and past_key_values is None and use_cache is not True:
                joined = self.joint_inputs(text, context, ratio, position_ids, text_position_offset, beside)
            if joined is not None:
                inputs, sequence = joined
                use_cache = False
            else:
                memory, is_full = self._read_checks(text, memory, context, ratio, beside)
                inputs, sequence = self.first_inputs(text, position_ids, memory, text_position_offset, is_full)
        use_cache = self._wants_cache(use_cache)
        return_dict = kwargs.pop("return_dict", None)
        if memory is not None and memory.carrier == "key_values" and not cached:
            past_key_values = self.cache_of_slots(memory, is_full, past_key_values, use_cache)
        with self._adapter(self.language_model, DECODER):
            outputs = for_one_call(self.language_model)(
                **inputs, past_key_values=past_key_values, use_cache=use_cache, **kwargs
            )
        if not cached:
            note_cached_slots(outputs.past_key_values, self.num_places(memory))
        if not use_cache:
            # Some backbones hand back the cache that they were given.
            outputs.past_key_values = None
        if sequence is not None:
            outputs.last_hidden_state = sequence.text_states(outputs.last_hidden_state)
            if outputs.hidden_states is not None:
                outputs.hidden_states = tuple(sequence.text_states(states) for states in outputs.hidden_states)
        return outputs if return_dict in (None, True) else outputs.to_tuple()

    def _wants_cache(self, use_cache: bool | None) -> bool:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return use_cache and not self._drops_caches

    @property
    def _drops_caches(self) -> bool:
        # Checkpointed layers take no cache that is written to, and would silently do without the memory in it.
        return self.training and self.language_model.is_gradient_checkpointing

    def text_rows(self, input_ids: Tensor, attention_mask: Tensor | None) -> TokenRows:
        """A text for [`check_together`]."""
        config = self.config
        known = {"vocab_size": config.vocab_size, "task_token_ids": config.task_token_ids}
        return token_rows(input_ids, attention_mask, **known, needs_tokens=True)

    def joint_inputs(
        self,
        text: TokenRows,
        context: TokenRows,
        ratio: int | str | Tensor | None,
        position_ids: Tensor | None,
        offset: Tensor | None,
        beside: dict[str, Any],
    ) -> tuple[dict[str, Any], PackedSequence] | None:
        """Contexts and texts as one sequence for the language model, in the form of `first_inputs`; `None`, as by
        default, where a context is compressed first.

        Args:
            text: one row for each context, see `text_rows`.
            context: see `context_rows`.
            ratio: as in `forward`.
            position_ids: the text's, counted within it.
            offset: `text_position_offset`, computed if not given.
            beside: see `beside_contexts`.
        """
        return None

    def _read_checks(
        self,
        text: TokenRows,
        memory: CompressedContext | None,
        context: TokenRows | None,
        ratio: Any,
        beside: dict[str, Any],
    ) -> tuple[CompressedContext | None, bool]:
        """Check a text and what stands in front of it by one wait for the device; compress a context.

        Returns:
            The memory, one row for each text, and whether all of its slots are known to be real.
        """
        if memory is None:
            check_together(*[text] if context is None else [context, text])
            if context is None:
                return None, True
            memory = self.compress_rows(context, [ratio], **beside)[0]
            is_full = len(set(context.lengths)) == 1 and isinstance(memory.ratio, int)
            return check_memory(memory, self, text.input_ids), is_full
        memory = check_memory(memory, self, text.input_ids)
        # A run of training stops at its loss, and names the batch.
        flags = [] if self.training else value_flags(memory, finite=True)
        *found, all_real = check_together(text, also=[*flags, memory.attention_mask.all()])
        if flags:
            refuse_values(memory, found)
        return memory, bool(all_real)

    def first_inputs(
        self,
        text: TokenRows,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
        is_full: bool = False,
    ) -> tuple[dict[str, Tensor], PackedSequence | None]:
        """Slots and text as one sequence for the language model; text alone where the cache holds the slots.

        Args:
            text: checked, see `text_rows`.
            position_ids: the text's, counted within it.
            memory: one row for each text.
            offset: `text_position_offset`, computed if not given.
            is_full: whether all slots are known to be real.
        """
        config, input_ids, text_mask = self.config, text.input_ids, text.attention_mask
        positions = text_positions(text_mask) if position_ids is None else position_ids.expand_as(input_ids)
        embeddings = self._embed_text(input_ids)
        if memory is None:
            sequence = pack(text_mask[:, :0], text_mask, is_full=text.is_full)
            return self._arranged(sequence, embeddings, positions), sequence
        if offset is None:
            offset = self.text_position_offset(memory, input_ids, text_mask)
        warn_about_positions(config.decoder_config, memory, offset, max(text.lengths))
        if memory.embeddings is None:
            slot_mask = self.cached_slot_mask(memory)
            check_sliding_window(config.decoder_config, slot_mask.shape[1], text_mask.shape[1])
            return {
                "inputs_embeds": embeddings,
                "attention_mask": torch.cat([slot_mask, text_mask], dim=1),
                "position_ids": (positions + offset[:, None]) * text_mask,
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
        sequence = pack(memory.attention_mask, text_mask, moves_first, pad_in_front, is_full and text.is_full)
        joined = torch.cat([memory.embeddings.to(embeddings.dtype), embeddings], dim=1)
        return self._arranged(
            sequence, joined, torch.cat([memory_positions, positions + text_offset], dim=1)
        ), sequence

    @staticmethod
    def _arranged(sequence: PackedSequence, embeddings: Tensor, positions: Tensor) -> dict[str, Tensor]:
        return {
            "inputs_embeds": sequence.arrange(embeddings),
            "attention_mask": sequence.attention_mask,
            "position_ids": sequence.arrange(positions) * sequence.attention_mask,
        }

    def _next_inputs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
        cached: int,
    ) -> dict[str, Tensor]:
        """Text that follows what is in the cache: slots, then the text so far."""
        text_mask = check_cached_mask(attention_mask, input_ids, cached - self.num_places(memory))
        if position_ids is None:
            position_ids = text_positions(text_mask)[:, -input_ids.shape[1] :]
        if memory is not None:
            if offset is None:
                raise ValueError("with a cache, `text_position_offset` must say where the text starts; see `generate`")
            position_ids = position_ids + offset[:, None]
        return {
            "inputs_embeds": self._embed_text(input_ids),
            "attention_mask": self._cached_mask(memory, text_mask),
            "position_ids": position_ids,
        }

    def _cached_mask(self, memory: CompressedContext | None, text_mask: Tensor) -> Tensor:
        """The mask `(batch_size, num_slots + num_text_tokens)` of what is in the cache and of the new text."""
        if memory is not None and memory.carrier == "key_values":
            # The slots came first, and then the text as it was given.
            slot_mask = self.cached_slot_mask(memory)
            check_sliding_window(self.config.decoder_config, slot_mask.shape[1], text_mask.shape[1])
            return torch.cat([slot_mask, text_mask], dim=1)
        if memory is not None:
            pads = text_mask.new_zeros(len(text_mask), self.num_pads_in_front(memory))
            text_mask = torch.cat([pads, memory.attention_mask, text_mask], dim=1)
        # The cache holds a row's pads in front, so only their number matters.
        return text_mask.sort(dim=1).values

    def cache_of_slots(self, memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
        """A cache that starts with a memory of key/values, the one given or a new one."""
        return filled_cache(aligned_right(memory, is_full), cache, use_cache)

    def cached_slot_mask(self, memory: CompressedContext) -> Tensor:
        """Which places of such a cache hold slots, `(batch_size, num_places)`."""
        return memory.attention_mask.sort(dim=1).values

    def num_pads_in_front(self, memory: CompressedContext) -> int:
        """Pads, 0 or 1, that every row needs in front of its slots beside its own; see `pack`."""
        falls = memory.position_layout == "enhanced" and memory.carrier == "embeddings"
        return int(falls and reads_falling_ids_as_packed(self.config.decoder_config, memory.batch_size))

    def num_places(self, memory: CompressedContext | None) -> int:
        """Places that a memory takes in the cache in front of the text."""
        return 0 if memory is None else memory.attention_mask.shape[1] + self.num_pads_in_front(memory)

    def text_position_offset(self, memory: CompressedContext, input_ids: Tensor, text_mask: Tensor | None) -> Tensor:
        """Position of each row's first text token (EPL, Tables 2, 3 and 13 to 15).

        Args:
            memory: the slots in front of the text.
            input_ids: `(batch_size, num_text_tokens)`; under the enhanced layout its first token tells the task.
            text_mask: `(batch_size, num_text_tokens)`, or `None` for all ones.

        Returns:
            `(batch_size,)`: the number of slots; under the enhanced layout 0 for a reconstruction, which starts with
            its own token ([AE]), and the number of context tokens for everything else.
        """
        if memory.position_layout != "enhanced":
            return memory.num_slots
        autoencoding = self.config.reconstruction_token_id
        if autoencoding is None:
            return memory.num_context_tokens
        first = torch.zeros_like(memory.num_slots) if text_mask is None else text_mask.argmax(dim=1)
        starts_with_ae = input_ids.gather(1, first[:, None])[:, 0] == autoencoding
        return memory.num_context_tokens * ~starts_with_ae

    def _moves_first(self, input_ids: Tensor, text_mask: Tensor) -> Tensor | None:
        """Which text tokens stand in front of the slots, `(batch_size, num_text_tokens)` bool; `None` for none."""
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


def _as_long_as(cache: Cache, attention_mask: Tensor) -> Tensor:
    """A mask with zeros behind it up to the length of a fixed cache, so that every pass over a token has one shape.

    One compiled graph then serves all of them; the places behind the text are masked by causality already.
    """
    if not cache.is_compileable:
        return attention_mask
    length = max(layer.max_cache_len for layer in cache.layers)
    return functional.pad(attention_mask, (0, max(0, length - attention_mask.shape[1])))
