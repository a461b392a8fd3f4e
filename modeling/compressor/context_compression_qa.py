# SPDX-License-Identifier: Apache-2.0
"""The pipeline "context-compression-qa": documents are compressed once, and asked any number of questions."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Pipeline, PreTrainedTokenizerBase
from transformers.utils import logging

from ..memory.compressed_context import CompressedContext
from ..memory.memory_file import text_source
from ..memory.memory_validation import is_memory
from ..parts.packing import length_batches
from ..parts.text_ids import (
    check_texts,
    cut_passages,
    decoder_document_ids,
    document_start,
    message_ids,
    passages_ids,
    question_ids,
    text_tokenizer,
)
from .pretrained_compressor import CompressorPreTrainedModel
from .read_slots import ReadSlots

logger = logging.get_logger(__name__)

MAX_NEW_TOKENS = 64
BATCH_SIZE = 8
LIKELIEST = "likeliest"
# Pads for each token: documents of very unlike lengths are not read in one batch.
_MOST_PADDING = 0.5


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Return rows of token ids as right-padded `input_ids` and `attention_mask`, each `(batch_size, num_tokens)`."""
    # Moved at once: each move waits for the device.
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True).to(device),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True).to(device),
    }


class ContextCompressionQAPipeline(Pipeline):
    """Asks a compressor about documents that it reads once.

    ```python
    pipe = pipeline("context-compression-qa", model=folder, trust_remote_code=True)
    pipe("Who wrote it?", context=document)                      # {"answer": "..."}
    pipe(["Who wrote it?", "When?"], context=document)           # one reading, a list of answers
    pipe("Who wrote it?", context=documents)                     # each document is asked: a list, one for each
    pipe("Who wrote it?", context=documents, join=True)          # all documents are read together
    pipe("Who wrote it?", context=documents, join="likeliest")   # each by itself, and the likeliest answer is given
    pipe("Who wrote it?", context=document, full_text=True)      # from the document's own tokens, uncompressed
    pipe("Who wrote it?", context=[passages])                    # one document of passages, compressed apart
    pipe("Who wrote it?", memory="report.safetensors")           # a memory that is kept
    pipe("Who wrote it?", store=store, ids=["a", "b"])           # the likeliest answer of two of a store's
    pipe(messages=[{"role": "user", "content": "Who wrote it?"}, ...], context=document)      # a conversation
    ```

    A checkpoint that compresses a document together with its question (DeCAL's `question_placement="encoder"`) takes
    `context` alone, and reads each document anew for each question.

    Args:
        model: a compressor with its LM head.
        tokenizer: the tokenizer saved with it.
        kwargs: arguments of `transformers.Pipeline`, and those of a call, which then hold for every call.
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, **kwargs: Any):
        if not model.can_generate():
            raise ValueError(f"{type(model).__name__} writes no text: load the checkpoint with its LM head")
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)
        # As in training: where a text says "[LM]", or names a sentinel, these are characters.
        has_own_tokens = bool(model.config.task_token_ids) or model.config.is_encoder_decoder
        has_own_tokens |= model.config.prompt_format == "chat"
        # A copy in any case: a fast tokenizer keeps the truncation of its last call, which others may make meanwhile.
        plain = text_tokenizer(tokenizer, splits=has_own_tokens or tokenizer.split_special_tokens)
        self._question_tokenizer = plain
        self._document_tokenizer = plain if model.encoder_tokenizer is None else model.encoder_tokenizer
        self._pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.read_slots = ReadSlots(model)

    def __call__(
        self,
        question: str | Sequence[str] | None = None,
        context: str | Sequence[str | Sequence[str]] | None = None,
        memory: CompressedContext | str | os.PathLike | Sequence[Any] | None = None,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]] | None = None,
        store: Any = None,
        ids: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Answer questions about documents or their memories.

        Args:
            question: a question, or several.
            context: a document, or several, which are compressed in batches; each is asked every question. A document
                in a list may be a list of passages, which are compressed apart from each other and read together.
            memory: in place of `context`: a memory of `compress`, its file, or a list of these. Each row counts as a
                document.
            messages: in place of `question`: a conversation about the document, messages with `role` and `content`
                whose last one is the user's; or a list of conversations. The document stands in front of the user's
                first message.
            store: in place of `memory`: a `MemoryStore`, whose memories of `ids` are read.
            ids: names in the store, whose likeliest answer is returned unless `join` says otherwise.
            kwargs: `join=True` reads all documents together, in order; `join="likeliest"` asks each and gives the
                answer with the highest mean log-likelihood of a token; `full_text=True` compresses nothing: the
                decoder reads each document's own tokens; `ratio`, a single one, and `allow_untrained_ratio` as in
                `compress`, and beside memories a `ratio` that these hold (`at_ratio`); `prompt`, a text with
                `{question}` in it, in place of the checkpoint's own; `max_tokens`, keep only so many tokens of each
                document; `batch_size`, documents or questions at once; everything else is for `generate` (greedily,
                and at most 64 new tokens if not said otherwise).

        Returns:
            `{"answer": text}` for one question about one document; a list of these for several questions; for several
            documents a list with one such entry for each.

        Raises:
            TypeError: a question, document or message that is no text, or a `memory` that is none.
            ValueError: arguments that do not go together or are missing, a store of another model, `max_tokens` that
                leave nothing of a document, a memory where a document is compressed with its question, and whatever
                `compress`, `at_ratio` and `generate` refuse.
        """
        if (context is not None) + (memory is not None) + (store is not None) != 1:
            raise ValueError("give either `context`, `memory` or `store`")
        if (store is None) != (not ids):
            raise ValueError("give `store` and `ids` together")
        if store is not None:
            memory = store.get(ids).to(self.device, self.model.dtype)
            kwargs.setdefault("join", self._preprocess_params.get("join", LIKELIEST))
        if context is None and kwargs.get("max_tokens") is not None:
            raise ValueError(
                f"`max_tokens`, {kwargs['max_tokens']!r}, cuts a document that is compressed, and a memory is read "
                "whole: leave it out; the length of an answer is `max_new_tokens`"
            )
        if (question is None) == (messages is None):
            raise ValueError("give either `question` or `messages`")
        inputs = {"question": question, "messages": messages, "context": context, "memory": memory}
        return super().__call__(inputs | {"batch_size": self._size(kwargs.pop("batch_size", None))}, **kwargs)

    def compress(
        self,
        documents: str | Sequence[str | Sequence[str]],
        ratio: int | Sequence[int] | None = None,
        max_tokens: int | None = None,
        allow_untrained_ratio: bool = False,
        batch_size: int | None = None,
        show_progress_bar: bool = False,
        source: str | None = None,
    ) -> CompressedContext | list[CompressedContext]:
        """Compress texts as the checkpoint was trained to read them, in batches of similar length.

        Args:
            documents: the texts, or a single one; one of several may be a list of passages.
            ratio, allow_untrained_ratio: as in the model's `compress`; a LongTensor has a ratio for each document.
            max_tokens: keep only so many tokens of each, with those that stand in front of it; all if not given.
            batch_size: documents at once; the pipeline's, or 8, if not given.
            show_progress_bar: whether to show one.
            source: of a single text, its place: the memory keeps that and the text's hash.

        Returns:
            A memory with one row for each document, in their order, or one such memory for each ratio of a list. Rows
            have room for the longest: give documents of very unlike lengths in several calls.

        Raises:
            ValueError: no document, `max_tokens` that leave nothing of one, a checkpoint that compresses a document
                together with its question, and whatever the model's `compress` refuses.
        """
        batch_size = self._size(batch_size)
        self.check_max_tokens(max_tokens)
        self.check_serves_memories("a memory without one answers nothing: ask about the document itself")
        rows = self._passages(documents, max_tokens)
        if not rows:
            raise ValueError("`documents` is an empty list")
        by_row = isinstance(ratio, Tensor) and ratio.dim() > 0
        order, parts = [], []
        with logging.tqdm(total=len(rows), unit="text", disable=not show_progress_bar) as progress:
            lengths = [sum(map(len, row)) for row in rows]
            for batch in length_batches(lengths, batch_size, most_padding=_MOST_PADDING):
                own: Any = ratio[batch] if by_row else ratio  # type: ignore[index,call-overload]
                part = self.compress_ids([rows[i] for i in batch], own, allow_untrained_ratio)
                parts.append(part if isinstance(part, list) else [part])
                order += batch
                progress.update(len(batch))
        memories = [self._memory_class.stack(of_ratio) for of_ratio in zip(*parts, strict=True)]
        if len(parts) > 1:
            memories = [memory.rows(torch.tensor(order).argsort()) for memory in memories]
        if source is not None:
            if not isinstance(documents, str):
                raise TypeError("`source` is the place of a single text: compress each document by itself")
            memories = [replace(memory, check=False, source=text_source(source, documents)) for memory in memories]
        return memories if isinstance(ratio, (list, tuple)) else memories[0]

    def compress_ids(
        self,
        rows: Sequence[Sequence[Any]],
        ratio: int | Sequence[int] | None = None,
        allow_untrained_ratio: bool = False,
        question: dict[str, Tensor] | None = None,
    ) -> CompressedContext | list[CompressedContext]:
        """Compress token ids of documents, or of each one's passages, as `document_ids` gives them, in one batch.

        Args:
            rows: of each document, or of each of its passages.
            ratio, allow_untrained_ratio: as in the model's `compress`.
            question: `input_ids` and `attention_mask`, one row for each document, for a checkpoint that compresses
                both.
        """
        asked: dict[str, Any] = {}
        if question is not None:
            asked = {f"question_{name}": tensor for name, tensor in question.items()}
        passages = [[row] if not row or isinstance(row[0], int) else row for row in rows]
        size, measured = self.model.config.chunk_size, self.model.config.measured_chunks
        most = max(sum(math.ceil(len(passage) / (size or math.inf)) for passage in row) for row in passages)
        if measured is not None and most > measured:
            logger.warning_once(
                f"a document has {most} chunks of {size} tokens, and this checkpoint was measured on {measured} at "
                "most: answers may be worse; find the passages that matter first, and give only those"
            )
        if any(len(row) > 1 for row in passages):
            asked["chunk_lengths"] = [[len(passage) for passage in row] for row in passages]
        ids = padded([[token for passage in row for token in passage] for row in passages], self.device)
        with torch.no_grad():
            return self.model.compress(**ids, ratio=ratio, allow_untrained_ratio=allow_untrained_ratio, **asked)

    def check_serves_memories(self, otherwise: str) -> None:
        """Raise `ValueError`, and say what to do otherwise, if a document is compressed with its question."""
        if self.model.config.compresses_questions:
            raise ValueError(
                "this checkpoint compresses a document together with its question (`question_placement='encoder'`), "
                + otherwise
            )

    def check_max_tokens(self, max_tokens: int | None) -> None:
        """Raise `ValueError` if a limit leaves nothing of a document behind what opens it, such as BOS."""
        if max_tokens is None:
            return
        least = len(document_start(self.model.config, self._document_tokenizer))
        if max_tokens <= least:
            raise ValueError(f"`max_tokens` must be above {least}, the tokens that open a document, got {max_tokens}")

    def document_ids(self, documents: str | Sequence[str | Sequence[str]], most: int | None = None) -> list[list[int]]:
        """Return token ids of documents, or a single one, as `compress` reads them, with what stands in front of
        each."""
        return [[token for passage in row for token in passage] for row in self._passages(documents, most)]

    def _passages(self, documents: Any, most: int | None = None) -> list[list[list[int]]]:
        """Return token ids of each document's passages, of each document so many tokens at most."""
        is_one = isinstance(documents, (str, Mapping)) or not isinstance(documents, Iterable)
        texts: list[Any] = [documents] if is_one else list(documents)
        _check_documents(texts)
        rows = passages_ids(self.model.config, self._document_tokenizer, texts, most)
        return [cut_passages(row, most) for row in rows]

    def load_memory(self, source: CompressedContext | str | os.PathLike) -> CompressedContext:
        """Return a memory from its file, on the model's device; one that is loaded already comes back as it is."""
        if isinstance(source, (str, os.PathLike)):
            return self._memory_class.load(source, device=self.device, dtype=self.model.dtype)
        if not is_memory(source):
            raise TypeError(f"`memory` must be a CompressedContext, its file, or a list of these, got {source!r}")
        return source

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save model and tokenizer, with the code of both the model and this pipeline; arguments as the model's."""
        self.model.save_pretrained(save_directory, **kwargs)
        self.tokenizer.save_pretrained(save_directory)

    # --- the steps of a pipeline ---

    def _sanitize_parameters(
        self,
        prompt: str | None = None,
        max_tokens: int | None = None,
        join: bool | str | None = None,
        full_text: bool | None = None,
        ratio: int | None = None,
        allow_untrained_ratio: bool | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        own = generate_kwargs.get("generation_config")
        settings = {**({} if own is None else own.to_dict()), **generate_kwargs}
        if (number := settings.get("num_return_sequences") or 1) != 1:
            raise ValueError(f"`num_return_sequences` must be 1, got {number}: a question has one answer")
        if settings.get("return_dict_in_generate"):
            raise ValueError("`return_dict_in_generate` must be False: an answer is text; call the model's `generate`")
        if isinstance(ratio, (list, tuple)) or (isinstance(ratio, Tensor) and ratio.dim()):
            raise ValueError(f"`ratio` must be a single one, got {ratio}: a question is asked at one ratio at a time")
        if not isinstance(join, bool) and join not in (None, LIKELIEST):
            raise ValueError(f"`join` must be True, False or {LIKELIEST!r}, got {join!r}")
        if full_text and ratio is not None:
            raise ValueError(f"`full_text` compresses nothing: leave out the `ratio`, {ratio!r}")
        read: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "join": join, "full_text": full_text}
        asked = {"join": join, "ratio": ratio, "allow_untrained_ratio": allow_untrained_ratio}
        read = {name: value for name, value in read.items() if value is not None}
        return read, {name: value for name, value in asked.items() if value is not None} | generate_kwargs, {}

    def preprocess(
        self,
        inputs: dict[str, Any],
        prompt: str | None = None,
        max_tokens: int | None = None,
        join: bool | str = False,
        full_text: bool = False,
    ) -> dict[str, Any]:
        """Turn texts into token ids and files into memories."""
        self.check_max_tokens(max_tokens)
        name = "context" if inputs["memory"] is None else "memory"
        sources, reads_one = _as_list(name, inputs[name])
        if name == "memory":
            self.check_serves_memories("so that no memory is asked here: give the document, `context`")
        rows: list[Any] = [None]
        if full_text:
            if name == "memory":
                raise ValueError("`full_text` reads a document's own tokens: give `context` in place of a memory")
            if self.model.config.is_encoder_decoder:
                raise ValueError(f"the decoder of a {type(self.model).__name__} reads no documents, only memories")
            _check_documents(sources)
            rows = [
                decoder_document_ids(self.model.config, self._question_tokenizer, text, max_tokens) for text in sources
            ]
            rows = [[token for row in rows for token in row]] if join is True else rows
        texts = [self._texts(inputs["question"], inputs["messages"], prompt, row) for row in rows]
        compresses, (question_ids, asks_one) = name == "context" and not full_text, texts[0]
        return {
            "question_ids": question_ids,
            # Behind the tokens of each document that is not compressed.
            "full_text_ids": [ids for ids, _ in texts] if full_text else None,
            "document_ids": self._passages(sources, max_tokens) if compresses else None,
            "memories": [self.load_memory(source) for source in sources] if name == "memory" else None,
            "batch_size": inputs["batch_size"],
            "asks_one": asks_one,
            "reads_one": reads_one,
        }

    def _texts(
        self, question: Any, messages: Any, prompt: str | None, document: Sequence[int] | None = None
    ) -> tuple[list[list[int]], bool]:
        """Return token ids of questions or conversations, behind a document's if these are given; and whether it was
        one."""
        config, tokenizer = self.model.config, self._question_tokenizer
        if messages is None:
            questions, asks_one = _as_list("question", question)
            check_texts("question", questions)
            return [question_ids(config, tokenizer, text, prompt, document) for text in questions], asks_one
        if prompt is not None:
            raise ValueError("`prompt` is what a `question` stands in: leave it out beside `messages`")
        conversations, _ = _as_list("messages", messages)
        asks_one = isinstance(conversations[0], Mapping)
        if asks_one:
            conversations = [conversations]
        check_texts("messages", [message.get("content") for messages in conversations for message in messages])
        return [message_ids(config, tokenizer, messages, document) for messages in conversations], asks_one

    def _forward(
        self,
        inputs: dict[str, Any],
        join: bool | str = False,
        ratio: int | None = None,
        allow_untrained_ratio: bool = False,
        **generate_kwargs: Any,
    ) -> dict[str, Any]:
        batch_size, questions, documents = (inputs[name] for name in ("batch_size", "question_ids", "document_ids"))
        generate_kwargs = _with_defaults(generate_kwargs, self._pad_token_id)
        if join == LIKELIEST:
            generate_kwargs |= {"return_dict_in_generate": True, "output_logits": True}
        answers: list[list[tuple[Tensor, float]]] = []
        if inputs["full_text_ids"] is not None:
            for texts in inputs["full_text_ids"]:
                answers += self._answers([None], texts, batch_size, lambda *_: None, generate_kwargs)
        elif documents is not None and self.model.config.compresses_questions:
            if join is True and len(documents) > 1:
                self.check_serves_memories("so that several are not joined: ask about each of them")
            compress: Any = partial(self.compress_ids, ratio=ratio, allow_untrained_ratio=allow_untrained_ratio)
            answers = self._answers(
                documents, questions, batch_size, lambda rows, text: compress(rows, question=text), generate_kwargs
            )
        else:
            may_be_asked_again = inputs["memories"] is not None or len(questions) > 1
            for memory in self._memories(inputs, join, ratio, allow_untrained_ratio):
                asked: Any = questions
                if may_be_asked_again:
                    memory, asked = self.read_slots.read(memory, questions)
                own = partial(
                    lambda memory, rows, _: memory if len(memory) == 1 == len(rows) else memory.rows(rows), memory
                )
                answers += self._answers(range(len(memory)), asked, batch_size, own, generate_kwargs)
        if join == LIKELIEST:
            answers = [[max(of_question, key=lambda answer: answer[1]) for of_question in zip(*answers, strict=True)]]
        reads_one = bool(join) or (inputs["reads_one"] and len(answers) == 1)
        new_tokens = [[ids for ids, _ in document] for document in answers]
        return {"answers": new_tokens, "asks_one": inputs["asks_one"], "reads_one": reads_one}

    def postprocess(self, outputs: dict[str, Any]) -> Any:
        """Decode the answers, and take them out of the lists that a single question or document needs not."""
        answers: list[Any] = [
            [{"answer": self.tokenizer.decode(ids, skip_special_tokens=True).strip()} for ids in document]
            for document in outputs["answers"]
        ]
        if outputs["asks_one"]:
            answers = [document[0] for document in answers]
        return answers[0] if outputs["reads_one"] else answers

    @property
    def _memory_class(self) -> type[CompressedContext]:
        # The one beside the model: a checkpoint with code of its own has its own.
        return self.model.base_model.memory_class

    def _memories(
        self, inputs: dict[str, Any], join: bool | str, ratio: int | None, allow_untrained_ratio: bool
    ) -> Iterable[CompressedContext]:
        """Return the memories that are asked: those given, or of the documents in batches; a single one if all are
        joined."""
        memories, documents, batch_size = (inputs[name] for name in ("memories", "document_ids", "batch_size"))
        if memories is None:
            lengths = [sum(map(len, row)) for row in documents]
            batches = length_batches(lengths, batch_size, most_padding=_MOST_PADDING, in_order=True)
            memories = (
                self.compress_ids([documents[row] for row in batch], ratio, allow_untrained_ratio) for batch in batches
            )
        else:
            if ratio is not None:
                memories = [memory.at_ratio(ratio) for memory in memories]
            # Once, and not again for each batch of questions.
            memories = [memory.to(self.device, self.model.dtype) for memory in memories]
        if join is True:
            rows = [memory.rows(row) for memory in memories for row in range(memory.batch_size)]
            memories = [self._memory_class.concatenate(rows) if len(rows) > 1 else rows[0]]
        return memories

    def _size(self, batch_size: int | None) -> int:
        return (self._batch_size or BATCH_SIZE) if batch_size is None else batch_size

    def _answers(
        self,
        sources: Sequence[Any],
        questions: list[list[int]],
        batch_size: int,
        memory_of: Callable[[list[Any], dict[str, Tensor]], CompressedContext | None],
        generate_kwargs: dict[str, Any],
    ) -> list[list[tuple[Tensor, float]]]:
        """Return each source's new tokens for every question, with their mean log-likelihood if logits are asked
        for."""
        pairs = [(source, question) for source in sources for question in questions]
        answers: list[tuple[Tensor, float]] = []
        for start in range(0, len(pairs), batch_size):
            batch = pairs[start : start + batch_size]
            text = padded([question for _, question in batch], self.device)
            memory = memory_of([source for source, _ in batch], text)
            output = self.model.generate(**text, memory=memory, **generate_kwargs)
            if isinstance(output, Tensor):
                answers += [(ids, 0.0) for ids in output[:, text["input_ids"].shape[1] :]]
            else:
                answers += self._with_likelihoods(output)
        return [answers[start : start + len(questions)] for start in range(0, len(answers), len(questions))]

    def _with_likelihoods(self, output: Any) -> list[tuple[Tensor, float]]:
        """Return the new tokens of each row of what `generate` gave with its logits, and their mean log-likelihood."""
        beams = output.get("beam_indices")
        scores = self.model.compute_transition_scores(output.sequences, output.logits, beams, normalize_logits=True)
        new_tokens = output.sequences[:, -scores.shape[1] :]
        is_pad = new_tokens == self._pad_token_id
        means = scores.masked_fill(is_pad, 0).sum(dim=1) / (~is_pad).sum(dim=1)
        # An answer without a token is the least likely one.
        return list(zip(new_tokens, means.nan_to_num(nan=-math.inf).tolist(), strict=True))


def _check_documents(texts: Sequence[Any]) -> None:
    check_texts("context", [p for text in texts for p in (text if isinstance(text, (list, tuple)) else [text])])


def _as_list(name: str, value: Any) -> tuple[list[Any], bool]:
    """Return one thing or several as a list, and whether it was one."""
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError(f"`{name}` is an empty list")
        return list(value), False
    return [value], True


def _with_defaults(arguments: Mapping[str, Any], pad_token_id: int | None) -> dict[str, Any]:
    """Complete arguments of `generate`, and a `generation_config` among them: a single greedy, short answer, whatever
    the model's own `generation_config` says."""
    arguments = dict(arguments)
    own = copy.deepcopy(arguments.pop("generation_config", None))
    defaults: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "pad_token_id": pad_token_id}
    defaults |= {"num_beams": 1, "repetition_penalty": 1.0}
    defaults |= {"num_return_sequences": 1, "return_dict_in_generate": False}
    if own is None:
        if arguments.get("max_length") is not None:
            del defaults["max_new_tokens"]
        return defaults | arguments
    arguments = own.update(**arguments)
    if own.max_length is not None:
        del defaults["max_new_tokens"]
    own.update(**{name: value for name, value in defaults.items() if getattr(own, name) is None})
    return {**arguments, "generation_config": own}


CompressorPreTrainedModel.pipeline_class = ContextCompressionQAPipeline
