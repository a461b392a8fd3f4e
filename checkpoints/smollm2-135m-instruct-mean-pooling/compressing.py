# SPDX-License-Identifier: Apache-2.0
"""Contexts in, memories out: what every compressor's backbone does around its method."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from .fingerprints import fingerprint, settings_fingerprint, version, weights_fingerprint
from .compressed_context import CompressedContext
from .key_value_memory import inverse_frequencies, key_value_shape
from .chunking import Slots, cut, join, memory_position_ids
from .input_checks import check_context_length, check_mask, check_ratios, check_token_ids

logger = logging.get_logger(__name__)


class CompressingMixin:
    """`compress` of every compressor's backbone; a method adds `encode`."""

    # False where no language model encodes: the context may be longer than it has positions.
    _has_encoder = True
    # What the slots are: "embeddings", or "key_values" of every layer.
    carrier = "embeddings"
    memory_class = CompressedContext
    # Whether training on a text without context or memory is worth a warning; trainers that mean it say so.
    warns_of_no_context = True
    _fingerprint: tuple[tuple[tuple[Any, ...], ...], str] | None = None
    # That of the stored weights, by that of the same weights as they were loaded.
    _stored_fingerprints: Mapping[str, str] = MappingProxyType({})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Here, because a trainer that knows nothing of contexts calls the backbone, whatever its rows bring.
        trains = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        has_none = len(args) < 5 and kwargs.get("memory") is None and kwargs.get("context_input_ids") is None
        if trains and has_none and self.warns_of_no_context and not self.config.is_encoder_decoder:
            logger.warning_once(
                "training without a context: rows bring no `context_input_ids` and no `memory`, so that nothing is "
                "compressed and the language model reads the text alone; see `CompressionCollator`"
            )
        return super().__call__(*args, **kwargs)

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, ratios: Sequence[int | Tensor]
    ) -> list[tuple[Slots, Tensor]]:
        """The method itself: slots of every ratio from one pass over the context.

        Args:
            input_ids: `(num_chunks, num_tokens)`, right-padded.
            attention_mask: Same shape.
            position_ids: Same shape.
            ratios: For each memory wanted, an int or a LongTensor `(num_chunks,)`.

        Returns:
            For each ratio, slots `(num_chunks, num_slots, hidden_size)`, left-aligned, and their mask; where the
            carrier is key/values, for each layer keys and values `(num_chunks, num_heads, num_slots, head_dim)`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `encode`; use the model class of a method")

    def no_slots(self, input_ids: Tensor) -> tuple[Slots, Tensor]:
        """What `encode` returns for a ratio when there is no context token at all."""
        num_chunks, weight = len(input_ids), self.get_input_embeddings().weight
        if self.carrier == "embeddings":
            slots: Slots = weight.new_zeros(num_chunks, 0, self.config.hidden_size)
        else:
            layers, heads, head_dim = key_value_shape(self.config.decoder_config)
            empty = weight.new_zeros(num_chunks, heads, 0, head_dim)
            slots = tuple((empty, empty) for _ in range(layers))
        return slots, input_ids.new_zeros(num_chunks, 0)

    def compress(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        ratio: int | Tensor | Sequence[int] | None = None,
        allow_untrained_ratio: bool = False,
        **unused: Any,
    ) -> CompressedContext | list[CompressedContext]:
        """Compress contexts into slots.

        Gradients are followed in training mode only, so that compressing a long document keeps no activations.

        Args:
            input_ids: Token ids `(batch_size, num_tokens)`; no special tokens are added, every id counts.
            attention_mask: `(batch_size, num_tokens)`, one for real tokens; pads may stand anywhere. All ones if not
                given.
            ratio: Context tokens per slot: an int, a LongTensor `(batch_size,)` with one for each row, or a list of
                ints, which gives one memory each from a single pass of the encoder. The checkpoint's first if not
                given.
            allow_untrained_ratio: Go on with a ratio that the checkpoint was not trained for.
            unused: Only `token_type_ids`, which some tokenizers add, is accepted and ignored.

        Returns:
            The memory, or a list of memories if `ratio` is a list.

        Raises:
            ValueError: unknown token ids, a mask of the wrong shape, a ratio that the checkpoint does not have, or a
                context longer than the encoder's positions.
            TypeError: an argument that is not known.
        """
        unknown = set(unused) - {"token_type_ids"}
        if unknown:
            raise TypeError(f"compress() got unexpected arguments {sorted(unknown)}")
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.training):
            ratios = list(ratio) if isinstance(ratio, (list, tuple)) else [ratio]
            memories = self._compress(input_ids, attention_mask, ratios, allow_untrained_ratio)
        for memory in memories:
            memory.maker = weakref.ref(self)
        if not self.training:
            # While a model trains its weights change, and so would the name of its memories.
            for memory in memories:
                memory.model_id = self.model_id
        return memories if isinstance(ratio, (list, tuple)) else memories[0]

    def _compress(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        ratios: list,
        allow_untrained_ratio: bool = False,
        prefix: str = "",
    ) -> list[CompressedContext]:
        config = self.config
        attention_mask = check_mask(f"{prefix}attention_mask", attention_mask, f"{prefix}input_ids", input_ids)
        # Task tokens belong to the text: the encoder has no embeddings for them.
        vocab_size = config.get_encoder_config().vocab_size
        input_ids = check_token_ids(f"{prefix}input_ids", input_ids, attention_mask, vocab_size, {})
        ratios = check_ratios(ratios, config.compression_ratios, input_ids, allow_untrained_ratio)
        num_context_tokens = attention_mask.sum(dim=1)
        chunks = cut(input_ids, attention_mask, config.chunk_size, config.position_layout)
        if self._has_encoder and chunks.position_ids.numel():
            last = int((chunks.position_ids * chunks.attention_mask).max())
            check_context_length(config.get_encoder_config(), last + 1, config.chunk_size)
        chunk_ratios = [r.repeat_interleave(chunks.chunks_per_row) if isinstance(r, Tensor) else r for r in ratios]
        encoded = self.encode(chunks.input_ids, chunks.attention_mask, chunks.position_ids, chunk_ratios)
        memories = []
        for ratio, (slots, slot_mask) in zip(ratios, encoded, strict=True):
            slot_counts = slot_mask.sum(dim=1)
            slots, slot_mask = join(slots, slot_mask, chunks.chunks_per_row)
            is_key_values = self.carrier == "key_values"
            memories.append(
                CompressedContext(
                    embeddings=None if is_key_values else slots,
                    key_values=slots if is_key_values else None,
                    inverse_frequencies=inverse_frequencies(self.encoder_backbone) if is_key_values else None,
                    attention_mask=slot_mask,
                    position_ids=memory_position_ids(
                        slot_mask, chunks, slot_counts, config.position_layout, self.carrier
                    ),
                    num_context_tokens=num_context_tokens,
                    ratio=ratio,
                    position_layout=config.position_layout,
                )
            )
        return memories

    @property
    def model_id(self) -> str:
        """Method, a fingerprint of all weights, and one of all settings that change slots or how they are read.

        It is what a memory must match to be read by this model. A checkpoint gives one name in whatever floating-point
        type it is loaded; stored in float16 it has another. Weights are read when the name is first asked for, and
        again when they have changed. A change in place through `parameter.data` leaves no sign: the model keeps its
        old name until it is loaded anew.
        """
        versions = tuple(version(parameter) for parameter in self.parameters())
        if self._fingerprint is None or self._fingerprint[0] != versions:
            found = weights_fingerprint(self)
            self._fingerprint = (versions, self._stored_fingerprints.get(found, found))
        return f"{self.config.model_type}:{self._fingerprint[1]}-{settings_fingerprint(self.config)}"

    def made(self, memory: CompressedContext) -> bool:
        """Whether a memory is this model's, or nothing tells whose it is.

        Earlier versions named memories by a few values of each parameter: such a name is compared as it was given. A
        memory that was made in training mode has no name, but knows its model for as long as that exists.

        Args:
            memory: any memory.
        """
        name = memory.model_id
        if name and not self.training:
            is_old = "-" not in name.rpartition(":")[2]
            return name == (self._old_model_id() if is_old else self.model_id)
        maker = None if memory.maker is None else memory.maker()
        # Another thread's twin of a model shares its weights.
        return bool(name) or maker is None or next(maker.parameters()) is next(self.parameters())

    def _old_model_id(self) -> str:
        found = fingerprint(self)
        return f"{self.config.model_type}:{self._stored_fingerprints.get(found, found)}"
