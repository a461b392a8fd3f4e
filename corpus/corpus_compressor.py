# SPDX-License-Identifier: Apache-2.0
"""Texts in, memories out, in the form in which engines for collections call a function: columns of a batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from ..configuration.nearest_names import check_choice
from ..modeling.memory.compressed_context import CompressedContext
from ..modeling.parts.packing import length_batches
from ..modeling.parts.text_ids import check_texts
from .memory_columns import STORE_DTYPES, MemoryForm, in_store_dtype, memory_table

if TYPE_CHECKING:
    from ..modeling.compressor.context_compression_qa import ContextCompressionQAPipeline

# Tokens that a model reads at once: a CPU is fastest while a layer's states stay in its cache.
BATCH_TOKENS = {"cpu": 512, "accelerator": 16_384}


class CorpusCompressor:
    """Compresses batches of texts, as Ray Data, `datasets.map` and Daft call it.

    ```python
    compressor = CorpusCompressor("me/compressor", ratio=4)
    rows = compressor({"id": ["a", "b"], "text": ["One text.", "Another one."]})
    dataset.map(compressor, batched=True, batch_size=1000)                                          # datasets
    dataset.map_batches(CorpusCompressor, fn_constructor_args=("me/compressor", 4), concurrency=8)  # Ray Data
    ```

    The model is loaded at the first batch. Pickling takes the arguments alone: each worker loads its own model.

    Args:
        model: Hub id or folder of a compressor, or a loaded pipeline.
        ratio: Context tokens per slot; the checkpoint's default if not given.
        memory_dtype: "int8", "int4", "int2" or "float16".
        keep_texts: Whether rows have the texts.
        batch_tokens: Tokens that the model reads at once, pads included; a chunk of a text is read whole.
        device, dtype: "auto" is an accelerator if there is one, and the saved type.
        base_model: Place of a light checkpoint's base, if not where the checkpoint says.
        revision: Branch, tag or commit on the Hub.
    """

    def __init__(
        self,
        model: str | os.PathLike | ContextCompressionQAPipeline,
        ratio: int | None = None,
        *,
        memory_dtype: str = "int8",
        keep_texts: bool = True,
        batch_tokens: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
        base_model: str | None = None,
        revision: str | None = None,
    ):
        check_choice("memory_dtype", memory_dtype, STORE_DTYPES)
        if batch_tokens is not None and batch_tokens < 1:
            raise ValueError(f"`batch_tokens` must be 1 or more, got {batch_tokens}")
        self.model = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
        self.ratio, self.memory_dtype, self.keep_texts = ratio, memory_dtype, keep_texts
        self.batch_tokens, self.device, self.dtype = batch_tokens, device, dtype
        self._base_model, self._revision = base_model, revision
        self._pipe: Any = None if self.model is not None else model
        self._form: MemoryForm | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self.model is None:
            raise TypeError("a loaded pipeline is not pickled: give the model's folder or Hub id")
        return {**self.__dict__, "_pipe": None, "_form": None}

    @property
    def pipe(self) -> ContextCompressionQAPipeline:
        """The pipeline, loaded when it is first asked for."""
        if self._pipe is None:
            self._pipe = self._load()
        return self._pipe

    @property
    def form(self) -> MemoryForm:
        """Return the properties that all memories have in common, which a store is made with."""
        if self._form is None:
            self.pipe.check_serves_memories("so that no text is compressed before its question is known")
            # What is wrong with the ratio is wrong with every row.
            self._form = MemoryForm.of(self._compress([[0]]), self.memory_dtype)
        return self._form

    def __call__(self, batch: Mapping[str, Sequence[Any] | np.ndarray]) -> pyarrow.Table:
        """Compress the columns `id`, `text` and, where there is some, `metadata` (JSON texts) of a batch.

        Returns:
            Rows of a [`MemoryStore`] in the batch's order, with the column `error`: null, or why a row has no slots.
        """
        ids, texts = list(map(str, batch["id"])), list(batch["text"])
        described = list(batch.get("metadata", [None] * len(ids)))
        tables, order = [], []
        errors: dict[int, str] = {}
        for rows, result in self.compress(texts):
            if isinstance(result, Exception):
                errors |= dict.fromkeys(rows, f"{type(result).__name__}: {result}")
                continue
            of_rows = [[values[row] for row in rows] for values in (ids, texts, described)]
            table = memory_table(self.form, of_rows[0], result, of_rows[1] if self.keep_texts else None, of_rows[2])
            tables.append(table.append_column("error", pyarrow.nulls(len(rows), pyarrow.string())))
            order += rows
        schema = self.form.schema.append(pyarrow.field("error", pyarrow.string()))
        columns = {name: pyarrow.nulls(len(errors), schema.field(name).type) for name in schema.names}
        columns |= {"id": [ids[row] for row in errors], "error": list(errors.values())}
        result_table = pyarrow.concat_tables([*tables, pyarrow.table(columns, schema=schema)])
        return result_table.take(np.argsort([*order, *errors]))

    def compress(self, texts: Sequence[Any]) -> Iterator[tuple[list[int], CompressedContext | Exception]]:
        """Compress texts in batches of similar length, the longest first.

        Yields:
            Indices of some texts, and their memory on the CPU in `memory_dtype`; or the error.
        """
        form, good = self.form, []
        for row, text in enumerate(texts):
            try:
                check_texts("text", [text])
                good.append(row)
            except (TypeError, ValueError) as error:
                yield [row], error
        ids = self.pipe.document_ids([texts[row] for row in good])
        waiting = length_batches([len(row) for row in ids], batch_tokens=self._tokens_at_once)[::-1]
        while waiting:
            batch = waiting.pop()
            result: CompressedContext | Exception
            try:
                # In the store's type it is moved as fewer bytes.
                result = in_store_dtype(self._compress([ids[place] for place in batch]), form.dtype).to("cpu")
            except Exception as error:  # whatever is wrong with a row, the others are not lost
                if len(batch) > 1:
                    waiting += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
                    continue
                result = error
            yield [good[place] for place in batch], result

    def _compress(self, ids: list[list[int]]) -> CompressedContext:
        backbone = self.pipe.model.base_model
        usual, backbone.tokens_at_once = backbone.tokens_at_once, self._tokens_at_once
        try:
            # One ratio gives one memory.
            return self.pipe.compress_ids(ids, self.ratio)  # type: ignore[return-value]
        finally:
            backbone.tokens_at_once = usual

    @property
    def _tokens_at_once(self) -> int:
        return self.batch_tokens or BATCH_TOKENS["cpu" if self.pipe.device.type == "cpu" else "accelerator"]

    def _load(self) -> ContextCompressionQAPipeline:
        import torch

        from ..modeling.checkpoint.pretrained_bases import load_from_place, tokenizer_from_place

        place: Any = self.model  # a pipeline that was given is there already
        options: Any = {"base_model": self._base_model, "revision": self._revision}
        model = load_from_place(place, dtype=self.dtype, **options)
        tokenizer = tokenizer_from_place(place, revision=self._revision)
        device = self.device
        if device == "auto":
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device = "cpu" if accelerator is None else accelerator.type
        return model.to(device).eval().question_answering(tokenizer)
