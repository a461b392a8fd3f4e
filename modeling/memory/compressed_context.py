# SPDX-License-Identifier: Apache-2.0
"""The memory of a context: slots or key/values, with all that a decoder needs to read them."""

from __future__ import annotations

import base64
import io
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...configuration.nearest_names import check_choice
from .carriers import (
    PAIR_FIELDS,
    KeyValues,
    check_range,
    dequantized_fields,
    map_carrier,
    num_bytes,
    quantized_fields,
)
from .memory_concatenation import concatenate_memories, stack_memories
from .memory_file import fields_of_file, file_parts, read_memory_file, write_memory_file
from .memory_quantization import QUANTIZATIONS, quantization_of, width_of
from .memory_validation import check_memory_fields, check_served_form

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FLOATING_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False, repr=False)
class CompressedContext:
    """Contexts of a batch after compression: the memory that `forward` and `generate` read instead of the contexts.

    Every row's real slots come first; padding slots follow. Exactly one of `embeddings` and `key_values` is given.
    `len(memory)` is the number of rows, `memory[index]` the same as `memory.rows(index)`.

    Args:
        embeddings: Slots in the decoder's embedding space, `(batch_size, num_slots, hidden_size)`. Of a quantised
            memory these are integers, see [`quantize_tensor`].
        key_values: One pair of rotated keys and values for each layer, each `(batch_size, num_key_value_heads,
            num_slots, head_dim)`; integers likewise.
        attention_mask: `(batch_size, num_slots)`, one for real slots and zero for padding slots.
        position_ids: `(batch_size, num_slots)`, the slots' positions in the decoder.
        num_context_tokens: `(batch_size,)`, number of real context tokens behind each row.
        ratio: Context tokens per slot, one int or a LongTensor of shape `(batch_size,)`.
        model_id: Name of the compressor whose memory this is; another one cannot read it. Empty for one that was made
            in training mode: no other model of this process reads it, and it is not saved.
        position_layout: "default", "uniform" or "enhanced".
        inverse_frequencies: Rotation frequencies of the keys, `(head_dim / 2,)`, for key/values only; `concatenate`
            needs them where it moves keys to later positions.
        question_fingerprints: `(batch_size,)`, the question that each row's context was compressed with, as a number;
            `None` for memories that serve any question.
        scales: Factors of a quantised memory's integers, in float16: for embeddings `(batch_size, num_slots,
            num_blocks)`; for key/values a pair for each layer, each `(batch_size, num_key_value_heads, num_slots,
            num_blocks)`.
        head_ids: For key/values of heads that keep unlike numbers of them, `(batch_size, num_slots, num_layers *
            num_key_value_heads)`: the head of the base, `layer * num_key_value_heads + head`, of the pair in each
            place. A row with n slots has n pairs for each head on average. `None` where each head has its own place.
        coarsest_ratios: Beside `head_ids`, in uint8 and the same shape: the coarsest ratio at which the pair in each
            place would stay, 255 for that and all above (see `at_ratio`). Slots of one chunk have the same
            `position_ids`.
        source: Of a memory of one row, its text's place and hash, see [`text_source`]; "" where it is not known, and
            for joined and stacked memories.
        maker: The compressor in this process that made it, if it still exists; neither saved nor pickled.
        slot_counts: Slots of each row, where a compressor has just made it; neither saved nor handed on.
        check: Whether to check all fields, which waits for the device; a compressor knows what it has made.

    Raises:
        TypeError: A field has the wrong type or dtype.
        ValueError: The shapes do not fit together, or a value is out of range.
    """

    embeddings: Tensor | None = None
    key_values: KeyValues | None = None
    # These are required: they stand behind fields with defaults, and the check names the one that is missing.
    attention_mask: Tensor = None  # type: ignore[assignment]
    position_ids: Tensor = None  # type: ignore[assignment]
    num_context_tokens: Tensor = None  # type: ignore[assignment]
    ratio: int | Tensor = 1
    model_id: str = ""
    position_layout: str = "default"
    inverse_frequencies: Tensor | None = None
    question_fingerprints: Tensor | None = None
    scales: Tensor | KeyValues | None = None
    head_ids: Tensor | None = None
    coarsest_ratios: Tensor | None = None
    source: str = ""
    maker: weakref.ref | None = field(default=None, repr=False)
    slot_counts: list[int] = field(default_factory=list, init=False, repr=False)
    check: InitVar[bool] = True
    # Makes a memory with `coarsest_ratios` coarser; `headwise_pairs` sets it, for the methods that have such memories.
    coarser_pairs: ClassVar[Any]

    def __post_init__(self, check: bool) -> None:
        for name in ("key_values", "scales"):
            if isinstance(pairs := vars(self)[name], Sequence):
                setattr(self, name, tuple(tuple(pair) if isinstance(pair, list) else pair for pair in pairs))
        if check:
            self.validate()
        self.attention_mask = self.attention_mask.long()
        self.position_ids = self.position_ids.long()
        self.num_context_tokens = self.num_context_tokens.long()
        if isinstance(self.ratio, Tensor):
            self.ratio = self.ratio.long()

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference holds in its own process only.
        return {**self.__dict__, "maker": None}

    def __repr__(self) -> str:
        slots = "on the meta device"
        if not self.attention_mask.is_meta:
            counts = self.num_slots.tolist()
            slots = "none" if not counts else f"{min(counts)} to {max(counts)}" if len(set(counts)) > 1 else counts[0]
        ratios = self.ratio if isinstance(self.ratio, int) else "by row"
        size = "" if self.attention_mask.is_meta else f", {self.nbytes:,} bytes"
        size += f" in {self.quantization}" if self.quantization else ""
        return (
            f"CompressedContext({self.batch_size} row{'s' * (self.batch_size != 1)}, slots: {slots}{size}, "
            f"ratio: {ratios}, model: {self.model_id or 'unnamed'})"
        )

    def __len__(self) -> int:
        return self.batch_size

    def __bool__(self) -> bool:
        # One without rows is a memory all the same.
        return True

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> CompressedContext:
        return self.rows(index)

    def validate(self, finite: bool = False) -> None:
        """Check types, shapes and values of all fields; `TypeError` and `ValueError` name the wrong one.

        `finite` refuses NaN and infinite values, too.
        """
        check_memory_fields(self, finite)

    @property
    def carrier(self) -> str:
        """The memory's form, "embeddings" or "key_values"."""
        return "embeddings" if self.key_values is None else "key_values"

    @property
    def carrier_name(self) -> str:
        """The memory's form and width in words."""
        if self.embeddings is not None:
            return f"embeddings of width {width_of(self.embeddings)}"
        layers = self.key_values or ()
        heads, head_dim = layers[0][0].shape[1], width_of(layers[0][0])
        return f"key/values of {len(layers)} layers with {heads} heads of {head_dim}"

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.attention_mask.shape[0]

    @property
    def num_slots(self) -> Tensor:
        """Number of real slots of each row, a LongTensor of shape `(batch_size,)`."""
        return self.attention_mask.sum(dim=1)

    @property
    def device(self) -> torch.device:
        """The tensors' device."""
        return self.attention_mask.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the embeddings, or of the values: floating-point, or an integer type of a quantised memory."""
        return (self.key_values[-1][1] if self.embeddings is None else self.embeddings).dtype  # type: ignore[index]

    @property
    def quantization(self) -> str | None:
        """ "int8", "int4" or "int2"; `None` for a memory in a floating-point type."""
        return quantization_of(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that must be kept: the real slots of all rows, their scales, `head_ids` and
        `coarsest_ratios`, no pads, masks or positions."""
        return num_bytes(self)

    def quantize(self, quantization: str) -> CompressedContext:
        """Return the memory in 8, 4 or 2 bits for each value, for keeping: models read it as any other.

        Blocks of up to 128 neighbours in a slot have a float16 scale each, see [`quantize_tensor`]; the keys of "int2"
        have 4 bits. No gradient flows through it.

        Args:
            quantization: "int8", "int4" or "int2".

        Raises:
            ValueError: Another form, a memory in another form already, a width that does not fill the integers, or
                values that are not finite or too large for float16 scales.
        """
        check_choice("quantization", quantization, tuple(QUANTIZATIONS))
        if self.quantization == quantization:
            return self
        if self.quantization is not None:
            raise ValueError(f"the memory is in {self.quantization}: call `dequantize()` first")
        self.validate(finite=True)
        return replace(self, check=False, **quantized_fields(self, quantization))

    def dequantize(self, dtype: torch.dtype | str = torch.float32) -> CompressedContext:
        """Return the memory in a floating-point type; the same as `to(dtype=dtype)`."""
        return self.to(dtype=dtype)

    def save(self, path: str | os.PathLike) -> None:
        """Write the memory to a safetensors file with a checksum, at once or not at all.

        Missing folders are made, an existing file is replaced, a link by the file. `ValueError` without a `model_id`
        (made in training mode), for values that are not finite, or for a path that is no file.
        """
        if not self.model_id:
            raise ValueError(
                "a memory without `model_id` is not saved, since any model would read it: call `model.eval()` before "
                "`compress`, whose memories have none in training mode"
            )
        self.validate(finite=True)
        write_memory_file(path, *file_parts(self))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        model_id: str | None = None,
        hidden_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> CompressedContext:
        """Read a memory that `save` wrote, after checking every byte of it.

        Args:
            path: The file.
            model_id: Refuse a memory of any other model.
            hidden_size: Refuse anything but embeddings of this width.
            device: Where to put the tensors; host memory if not given.
            dtype: Floating-point type, or its name, of the memory, quantised or not; as saved if not given.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: No memory file, a truncated or altered one, one without a model's name or with values that are
                not finite, or one of another model or width.
        """
        tensors, metadata = read_memory_file(path)
        try:
            memory = cls(**fields_of_file(tensors, metadata))
            memory.validate(finite=True)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(f"{path} does not hold a valid memory: {error}") from error
        if not memory.model_id:
            raise ValueError(f"{path} names no model: it was compressed in training mode, and must be made anew")
        if model_id is not None and memory.model_id != model_id:
            raise ValueError(f"{path} is a memory of the model {memory.model_id!r}, not of {model_id!r}")
        if hidden_size is not None and memory.carrier_name != (wanted := f"embeddings of width {hidden_size}"):
            raise ValueError(f"{path} holds {memory.carrier_name}, the model reads {wanted}")
        return memory.to(device=device, dtype=dtype)

    def to(
        self, device: torch.device | str | int | torch.dtype | None = None, dtype: torch.dtype | str | None = None
    ) -> CompressedContext:
        """Return the memory on another device or in another floating-point type; tensors that need no change are
        shared.

        Args:
            device: Where to put the tensors, or the dtype alone.
            dtype: float16, bfloat16, float32 or float64, or its name; a quantised memory is dequantised.

        Raises:
            TypeError: `dtype` is none of these types.
            ValueError: A finite value does not fit in `dtype` (slots can be far larger than token embeddings, and
                float16 ends at 65504).
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
        if dtype is not None and dtype not in _FLOATING_TYPES:
            names = ", ".join(str(known).removeprefix("torch.") for known in _FLOATING_TYPES)
            raise TypeError(f"dtype must be a floating-point type or its name, one of {names}, got {dtype!r}")
        if self.quantization is not None and dtype is not None:
            # Moved first: integers are the smaller load.
            moved = self.to(device)
            return replace(moved, check=False, **dequantized_fields(moved)).to(dtype=dtype)
        if dtype is not None:
            check_range(self, dtype)
        fields = map_carrier(self, lambda tensor: tensor.to(device=device, dtype=dtype))
        if self.inverse_frequencies is not None:
            fields["inverse_frequencies"] = self.inverse_frequencies.to(device=device)
        return self._replace(fields, lambda tensor: tensor.to(device=device))

    def rows(self, index: int | slice | Sequence[int] | Tensor) -> CompressedContext:
        """Return some of the rows, without the padding slots that none of them needs; `IndexError` for one outside the
        batch.

        `index` is an int (one row, still a batch), a slice, a list of ints, or a tensor of ints or bools.
        """
        if isinstance(index, slice):
            index = range(self.batch_size)[index]
        index = torch.as_tensor(index).cpu()
        # An empty list has no integer type.
        index = torch.arange(self.batch_size)[index if index.numel() else index.long()].reshape(-1).to(self.device)
        length = int(self.num_slots[index].max()) if len(index) else 0
        fields = map_carrier(self, lambda tensor: tensor[index][..., :length, :])
        return self._replace(fields, lambda tensor: tensor[index] if tensor.dim() == 1 else tensor[index, :length])

    def repeat_interleave(self, repeats: int) -> CompressedContext:
        """Return a memory with each row `repeats` times in a row, as beams and several samples of one question need
        it."""
        fields = map_carrier(self, lambda tensor: tensor.repeat_interleave(repeats, dim=0))
        return self._replace(fields, lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def at_ratio(self, ratio: int) -> CompressedContext:
        """Return the memory of the same contexts at a coarser ratio, as `compress` would have made it, without a
        model.

        Ranked key/values, and KVzip's with shared budgets, are ranked by one reading, whatever the ratio is: a finer
        memory holds every coarser one, quantised or not. A part of a joined memory that is coarser already stays as it
        is, and where that makes a difference each row gets its common ratio, as in `concatenate`.

        Args:
            ratio: Context tokens per slot, from the memory's own, which gives back the memory itself, to 255.

        Raises:
            TypeError: `ratio` is no int.
            ValueError: A finer ratio than the memory's, one above 255, or another than its own for a memory without
                `coarsest_ratios`.
        """
        if isinstance(ratio, bool) or not isinstance(ratio, int):
            raise TypeError(f"`ratio` must be an int, got {ratio!r}")
        # Of a joined memory whose parts have ratios of their own, some may be finer than what they come to together.
        is_nested = self.coarsest_ratios is not None and not isinstance(self.ratio, int)
        if not is_nested and bool((torch.as_tensor(self.ratio) == ratio).all()):
            return self
        if self.coarsest_ratios is None:
            raise ValueError(
                f"`ratio` must be {torch.as_tensor(self.ratio).tolist()}, the memory's own, got {ratio}: what a "
                "coarser one keeps is known of memories of ranked key/values, and of KVzip with shared budgets; "
                "compress the context at that ratio"
            )
        return self.coarser_pairs(ratio)

    @staticmethod
    def concatenate(memories: Iterable[CompressedContext]) -> CompressedContext:
        """Join memories of several documents into one, in order, row beside row (EPL, sections 3.1.1 and 3.2.2).

        Slots of a row are packed without gaps. Embeddings of the default and uniform layouts are numbered from 0 on.
        Embeddings of the enhanced layout, and key/values of the uniform and enhanced layouts, move on by the number of
        context tokens before them, and keys are rotated on by as much; the ids of default key/values repeat. Documents
        of different ratios get their common ratio, `ceil(context tokens / slots)` of each row.

        Joining never re-quantises: embeddings in one form stay in it; mixed forms, and key/values, whose keys move,
        are dequantised, to the floating-point type of those that have one, or float32.

        Args:
            memories: Memories of one model with the same batch size, carrier, width, dtype, device and layout.

        Raises:
            TypeError: Something else than a `CompressedContext`.
            ValueError: No memory, memories that do not fit together, or keys to be rotated without frequencies.
        """
        return concatenate_memories(memories)

    @staticmethod
    def stack(memories: Iterable[CompressedContext]) -> CompressedContext:
        """Return the rows of several memories as one batch, in order, each with its own slots.

        They are memories of one model with the same carrier, width, dtype, device and layout. Quantised memories of
        one form stay as they are; mixed forms are dequantised. Errors are those of `concatenate`.
        """
        return stack_memories(memories)

    def to_prompt_embeds(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        messages: str | Sequence[Mapping[str, str]] | None = None,
        model: Any = None,
        encoding: str | None = None,
    ) -> Tensor | str:
        """Return memory and text as one prompt of embeddings, for a server of the decoder alone (vLLM's
        `prompt_embeds`).

        Args:
            tokenizer: The tokenizer saved with the checkpoint.
            messages: A question, or messages with `role` and `content`. `None`: the slots alone, a part of a chat
                message that the server puts into its chat template.
            model: The compressor, whose embeddings the text gets; the memory's maker if not given.
            encoding: "base64" for the text of a request: the tensor as `torch.save` writes it, in base64.

        Returns:
            `(num_slots + num_text_tokens, hidden_size)`, or that text.

        Raises:
            ValueError: A text and no model, more than one row, another model's memory, key/values, positions that are
                not contiguous (the enhanced layout), or a decoder that scales or cross-attends.
        """
        if encoding not in (None, "base64"):
            raise ValueError(f"encoding must be None or 'base64', got {encoding!r}")
        if messages is not None and tokenizer is None:
            raise ValueError("a text needs the tokenizer that was saved with the checkpoint, got None")
        if model is None:
            model = None if self.maker is None else self.maker()
        if model is None and messages is not None:
            name = f"; it is {self.model_id}" if self.model_id else ""
            raise ValueError(
                "a memory holds no embeddings for text, and the compressor that made this one is not known here: "
                f"name it, to_prompt_embeds(tokenizer, messages, model){name}"
            )
        embeds = self.served_slots() if model is None else model.prompt_embeds(self, tokenizer, messages)
        if encoding is None:
            return embeds
        file = io.BytesIO()
        # A copy: `torch.save` writes the whole storage that a slice is taken from.
        torch.save(embeds.detach().cpu().contiguous().clone(), file)
        return base64.b64encode(file.getvalue()).decode("ascii")

    def served_slots(self) -> Tensor:
        """Return the slots of a memory of one row, `(num_slots, hidden_size)`, for a server of the decoder alone."""
        if self.batch_size != 1:
            raise ValueError(f"a prompt has one memory, this one has {self.batch_size} rows: choose with `rows`")
        check_served_form(self.carrier, self.position_layout)
        memory: Any = self.dequantize() if self.quantization else self
        memory.validate(finite=True)
        return memory.embeddings[0, memory.attention_mask[0].bool()]

    def _replace(self, fields: dict, function: Callable[[Tensor], Tensor]) -> CompressedContext:
        """A copy with other `fields`, and with `function` applied to everything that has one entry for each row."""
        names = ["attention_mask", "position_ids", "num_context_tokens"]
        names += ["ratio"] if isinstance(self.ratio, Tensor) else []
        names += [n for n in ("question_fingerprints", *PAIR_FIELDS) if vars(self)[n] is not None]
        others: dict[str, Any] = {name: function(vars(self)[name]) for name in names}
        # What is taken from a memory is as right as that is.
        return replace(self, check=False, **fields, **others)
