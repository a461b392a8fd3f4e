# SPDX-License-Identifier: Apache-2.0
"""Memories as columns of an Arrow table, one row each: what a store keeps and what processes hand on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow
import torch
import xxhash
from torch import Tensor

from ..configuration.nearest_names import check_choice
from ..modeling.memory.carriers import PAIR_FIELDS, carrier_tensors, scale_tensors
from ..modeling.memory.compressed_context import CompressedContext
from ..modeling.memory.memory_quantization import QUANTIZATIONS, item_dtype, num_blocks, width_of

# 2: blocks of quantised memories are rotated. 3: rows have checksums.
FORMAT_VERSION = 3
STORE_DTYPES = (*QUANTIZATIONS, "float16")
# Slots as they lie in a column: the quantised as bytes.
_ARROW_TYPES = {name: pyarrow.uint8() for name in QUANTIZATIONS} | {"float16": pyarrow.float16()}
_PAIR_TYPES = {"head_ids": pyarrow.int16(), "coarsest_ratios": pyarrow.uint8()}


@dataclass(frozen=True)
class MemoryForm:
    """Properties that all memories of one store have in common.

    Args:
        shape: of one slot: `(hidden_size,)` for embeddings, `(num_layers, 2, num_heads, head_dim)` for key/values.
        inverse_frequencies: rotation frequencies of the keys, `(head_dim / 2,)`, or nothing.
        has_head_ids, has_coarsest_ratios: fields with an entry for each pair of key and value.
    """

    model_id: str
    dtype: str
    shape: tuple[int, ...]
    position_layout: str
    inverse_frequencies: tuple[float, ...] = ()
    has_head_ids: bool = False
    has_coarsest_ratios: bool = False

    @classmethod
    def of(cls, memory: CompressedContext, dtype: str) -> MemoryForm:
        """The form of memories like this one, kept in `dtype`."""
        check_choice("dtype of a store:", dtype, STORE_DTYPES)
        if not memory.model_id:
            raise ValueError("a memory without `model_id` is not kept: call `model.eval()` before it is compressed")
        layers = memory.key_values or ()
        if memory.embeddings is not None:
            shape: tuple[int, ...] = (width_of(memory.embeddings),)
        else:
            keys = layers[0][0]
            shape = (len(layers), 2, keys.shape[1], width_of(keys))
        frequencies = memory.inverse_frequencies
        numbers = () if frequencies is None else tuple(frequencies.double().tolist())
        has = {f"has_{name}": vars(memory)[name] is not None for name in PAIR_FIELDS}
        return cls(memory.model_id, dtype, shape, memory.position_layout, numbers, **has)

    @classmethod
    def from_json(cls, text: str | bytes) -> MemoryForm:
        """The form that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        version = fields.pop("format_version", 1)
        if version != FORMAT_VERSION:
            raise ValueError(f"the store has format version {version}, this code reads version {FORMAT_VERSION}")
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**fields)

    def to_json(self) -> str:
        """The form as text, for a schema's metadata."""
        return json.dumps({**asdict(self), "format_version": FORMAT_VERSION})

    def check(self, other: MemoryForm) -> None:
        """Refuse memories of another form."""
        ours, theirs = vars(self), vars(other)
        words = {"model_id": "the model", "dtype": "dtype", "shape": "slots of shape", "position_layout": "the layout"}
        for name, what in words.items():
            if ours[name] != theirs[name]:
                raise ValueError(f"the store holds memories of {what} {ours[name]!r}, not of {theirs[name]!r}")
        if missing := [name for name in self.pair_fields if name not in other.pair_fields]:
            raise ValueError(f"the store holds memories with {missing}, these have none: compress them anew")

    @property
    def pair_fields(self) -> list[str]:
        """Fields of its memories with an entry for each pair of key and value."""
        return [name for name in PAIR_FIELDS if vars(self)[f"has_{name}"]]

    @property
    def is_key_values(self) -> bool:
        """Return whether keys and values carry the memories."""
        return len(self.shape) > 1

    @property
    def widths(self) -> list[int]:
        """Entries of a slot's embedding, or of a head's key and its value: numbers of "float16", bytes of others."""
        all_bits = QUANTIZATIONS.get(self.dtype, (8, 8))
        return [self.shape[-1] * bits // 8 for bits in all_bits[0 if self.is_key_values else 1 :]]

    @property
    def schema(self) -> pyarrow.Schema:
        """Types of the columns."""
        layers, _, heads, width = self.shape if self.is_key_values else (1, 1, 1, self.shape[0])

        def column(kind: pyarrow.DataType, width: int) -> pyarrow.DataType:
            return pyarrow.list_(pyarrow.list_(kind, width))

        # Lance compares the keys of rows that are written at the same time.
        key = {"lance-schema:unenforced-primary-key": "true"}
        fields = [
            pyarrow.field("id", pyarrow.string(), nullable=False, metadata=key),
            pyarrow.field("slots", column(_ARROW_TYPES[self.dtype], layers * heads * sum(self.widths))),
        ]
        if self.dtype in QUANTIZATIONS:
            scales = layers * heads * len(self.widths) * num_blocks(width)
            fields.append(pyarrow.field("scales", column(pyarrow.float16(), scales)))
        fields += [pyarrow.field(name, column(_PAIR_TYPES[name], layers * heads)) for name in self.pair_fields]
        fields += [
            # Nothing where they are 0, 1, 2, ...
            pyarrow.field("position_ids", pyarrow.list_(pyarrow.int32())),
            pyarrow.field("num_tokens", pyarrow.int32()),
            pyarrow.field("ratio", pyarrow.int32()),
            pyarrow.field("question_fingerprint", pyarrow.int64()),
            pyarrow.field("model_id", pyarrow.string()),
            pyarrow.field("text", pyarrow.string()),
            pyarrow.field("metadata", pyarrow.string()),
            pyarrow.field("checksum", pyarrow.uint64()),
        ]
        return pyarrow.schema(fields, metadata={"context_compressors": self.to_json()})


def in_store_dtype(memory: CompressedContext, dtype: str) -> CompressedContext:
    """Return a memory in one of `STORE_DTYPES`; `ValueError` for values that are not finite in it."""
    if dtype in QUANTIZATIONS:
        return memory.quantize(dtype)
    memory = memory.to(dtype=dtype)
    memory.validate(finite=True)
    return memory


def memory_table(
    form: MemoryForm,
    ids: Sequence[str],
    memory: CompressedContext,
    texts: Sequence[str | None] | None = None,
    metadata: Sequence[str | None] | None = None,
) -> pyarrow.Table:
    """Rows of a store of some form, see `MemoryStore.table_of`; metadata is JSON already."""
    nothing = [None] * len(memory)
    columns = {
        "id": pyarrow.array(ids, pyarrow.string()),
        **_memory_columns(memory, form),
        "text": pyarrow.array(texts or nothing, pyarrow.string()),
        "metadata": pyarrow.array(metadata or nothing, pyarrow.string()),
    }
    columns["checksum"] = checksums(pyarrow.table(columns))
    return pyarrow.table(columns, schema=form.schema)


def _memory_columns(memory: CompressedContext, form: MemoryForm) -> dict[str, pyarrow.Array]:
    """A memory's columns, but for id, text and metadata."""
    form.check(MemoryForm.of(memory, form.dtype))
    memory = in_store_dtype(memory.to("cpu"), form.dtype)
    schema, counts = form.schema, memory.num_slots.numpy()
    slots = carrier_tensors(memory)
    if memory.scales is not None:
        slots = [tensor.contiguous().view(torch.uint8) for tensor in slots]
    columns = {"slots": _lists(_by_slot(slots), counts, schema.field("slots").type)}
    if memory.scales is not None:
        columns["scales"] = _lists(_by_slot(scale_tensors(memory)), counts, schema.field("scales").type)
    columns |= {name: _lists(vars(memory)[name], counts, schema.field(name).type) for name in form.pair_fields}
    places, mask = memory.position_ids.numpy(), memory.attention_mask.bool().numpy()
    rows = [row[real] for row, real in zip(places, mask, strict=True)]
    positions = [None if np.array_equal(row, np.arange(len(row))) else row for row in rows]
    ratios = np.broadcast_to(np.asarray(memory.ratio), (len(memory),))
    asked = memory.question_fingerprints
    fingerprints = [None] * len(memory) if asked is None else asked.tolist()
    return columns | {
        "position_ids": pyarrow.array(positions, pyarrow.list_(pyarrow.int32())),
        "num_tokens": pyarrow.array(memory.num_context_tokens.numpy(), pyarrow.int32()),
        "ratio": pyarrow.array(ratios, pyarrow.int32()),
        "question_fingerprint": pyarrow.array(fingerprints, pyarrow.int64()),
        "model_id": pyarrow.array([memory.model_id] * len(memory), pyarrow.string()),
    }


def memory_of_columns(table: pyarrow.Table, form: MemoryForm) -> CompressedContext:
    """The memory that `memory_columns` made columns of, rows in the table's order, in the form's type."""
    slots, counts = _padded(table["slots"])
    mask = torch.arange(slots.shape[1]) < counts[:, None]
    positions = torch.arange(slots.shape[1]).where(mask, 0)
    for row, places in enumerate(table["position_ids"].to_pylist()):
        if places is not None:
            positions[row, : len(places)] = torch.tensor(places)
    name = "key_values" if form.is_key_values else "embeddings"
    carrier: dict[str, Any] = {name: _of_slots(slots, form, form.widths)}
    if form.dtype in QUANTIZATIONS:
        widths = [num_blocks(form.shape[-1])] * len(form.widths)
        carrier["scales"] = _of_slots(_padded(table["scales"])[0], form, widths)
    carrier |= {name: _padded(table[name])[0] for name in form.pair_fields}
    asked, ratios = table["question_fingerprint"], _integers(table["ratio"])
    ratio: Any = int(ratios[0]) if len(ratios.unique()) == 1 else ratios
    return CompressedContext(
        **carrier,
        attention_mask=mask.long(),
        position_ids=positions,
        num_context_tokens=_integers(table["num_tokens"]),
        ratio=ratio,
        model_id=form.model_id,
        position_layout=form.position_layout,
        inverse_frequencies=torch.tensor(form.inverse_frequencies) if form.inverse_frequencies else None,
        question_fingerprints=None if asked.null_count else _integers(asked),
    )


def checksums(table: pyarrow.Table) -> pyarrow.Array:
    """A number for each row, of its values in all columns but `checksum`, in the order of their names."""
    columns = [table[name].combine_chunks() for name in sorted(set(table.column_names) - {"checksum"})]
    plain = [column.to_pylist() for column in columns if not pyarrow.types.is_list(column.type)]
    hashes = [xxhash.xxh3_64(repr(values).encode()) for values in zip(*plain, strict=True)]
    for lists in (column for column in columns if pyarrow.types.is_list(column.type)):
        flat, lengths, start = lists.flatten(), np.diff(lists.offsets.to_numpy()), 0
        if pyarrow.types.is_fixed_size_list(flat.type):
            flat, lengths = flat.flatten(), lengths * flat.type.list_size
        values = flat.to_numpy(zero_copy_only=False)
        for row, length in zip(hashes, lengths.tolist(), strict=True):
            row.update(b"%d" % length)
            row.update(values[start : start + length])
            start += length
    return pyarrow.array([row.intdigest() for row in hashes], pyarrow.uint64())


def _by_slot(tensors: Sequence[Tensor]) -> Tensor:
    """Embeddings, keys and values, or their scales, as `(batch_size, num_slots, entries of a slot)`."""
    return torch.cat([t if t.dim() == 3 else t.transpose(1, 2).flatten(2) for t in tensors], dim=2)


def _of_slots(slots: Tensor, form: MemoryForm, widths: Sequence[int]) -> Any:
    """Split `(batch_size, num_slots, entries of a slot)` of `_by_slot` into embeddings, or pairs of each layer."""
    if slots.dtype != torch.uint8:
        dtypes: list[torch.dtype] = [slots.dtype] * len(widths)
    else:
        dtypes = [item_dtype(bits) for bits in QUANTIZATIONS[form.dtype][-len(widths) :]]
    if not form.is_key_values:
        return slots.contiguous().view(dtypes[0])
    layers, _, heads, _ = form.shape
    parts = slots.split([heads * width for width in widths] * layers, dim=2)
    of_heads = [part.unflatten(2, (heads, -1)).transpose(1, 2).contiguous() for part in parts]
    tensors = [tensor.view(dtypes[place % 2]) for place, tensor in enumerate(of_heads)]
    return tuple(zip(tensors[::2], tensors[1::2], strict=True))


def _lists(states: Tensor, counts: np.ndarray, kind: pyarrow.DataType) -> pyarrow.Array:
    """The first `counts[i]` vectors of each row, as lists of vectors."""
    real = torch.arange(states.shape[1]) < torch.from_numpy(counts)[:, None]
    values = pyarrow.array(states[real].numpy().ravel(), kind.value_type.value_type)
    vectors = pyarrow.FixedSizeListArray.from_arrays(values, type=kind.value_type)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), vectors, type=kind)


def _padded(column: pyarrow.ChunkedArray) -> tuple[Tensor, Tensor]:
    """Lists of vectors as `(rows, longest, vector_size)` with zeros behind the shorter ones, and their lengths."""
    lists = column.combine_chunks()
    lengths = torch.from_numpy(np.diff(lists.offsets.to_numpy()).astype(np.int64))
    vectors = lists.flatten()
    size = column.type.value_type.list_size
    flat = torch.from_numpy(vectors.flatten().to_numpy(zero_copy_only=False).copy()).view(len(vectors), size)
    rows = flat.new_zeros(len(lists), int(lengths.max()) if len(lengths) else 0, size)
    rows[torch.arange(rows.shape[1]) < lengths[:, None]] = flat
    return rows, lengths


def _integers(column: pyarrow.ChunkedArray) -> Tensor:
    return torch.from_numpy(column.to_numpy().astype(np.int64))
