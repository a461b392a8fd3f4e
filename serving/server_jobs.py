# SPDX-License-Identifier: Apache-2.0
"""Jobs of a server: texts become memories, and conversations about memories are answered."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from ..evaluation.slot_origins import slot_origins
from ..modeling.compressor.context_compression_qa import MAX_NEW_TOKENS, ContextCompressionQAPipeline, padded
from ..modeling.memory.compressed_context import CompressedContext
from ..modeling.memory.key_value_memory import position_bytes
from ..modeling.parts.text_ids import text_tokenizer
from .server_engine import Job, ServerError
from .server_memories import ProcessMemories, StoredMemories

if TYPE_CHECKING:
    from .server_requests import ChatRequest

# Tokens of a slot that the page shows.
_TOKENS_OF_A_SLOT = 48


class ServedModel:
    """A checkpoint under its name, and where its memories are."""

    def __init__(self, name: str, pipe: ContextCompressionQAPipeline, memories: ProcessMemories | StoredMemories):
        pipe.check_serves_memories("so that it has no memory that could be served")
        self.name, self.pipe, self.memories = name, pipe, memories
        self.model_id: str = pipe.model.model_id
        self.created = int(time.time())
        config, ends = pipe.model.config, pipe.model.generation_config.eos_token_id
        self.max_positions: int | None = config.decoder_config.to_dict().get("max_position_embeddings")
        self.end_ids = set(ends if isinstance(ends, (list, tuple)) else [ends])
        pad = pipe.tokenizer.pad_token_id
        self.pad_token_id = pipe.tokenizer.eos_token_id if pad is None else pad
        # Tokenizers are no place for several threads.
        self._lock = threading.Lock()

    def num_tokens(self, texts: Sequence[str]) -> int:
        """Return the number of tokens of documents, as they are compressed."""
        with self._lock:
            return sum(map(len, self.pipe.document_ids(texts)))

    def text_ids(
        self, messages: Sequence[Mapping[str, str]], has_memory: bool, documents: Sequence[str] = ()
    ) -> list[int]:
        """Return the token ids of a conversation behind a memory, or behind documents or nothing."""
        config = self.pipe.model.config
        if not has_memory and config.is_encoder_decoder:
            raise ValueError(f"{self.name!r} answers from memories alone: name one in the first message of the user")
        context = list(documents) or [""]
        inputs = {"question": None, "messages": messages, "context": context, "memory": None, "batch_size": 1}
        # The memory of some methods holds what opens the text.
        full_text = bool(documents) or (config.opens_context and not has_memory)
        with self._lock:
            return self.pipe.preprocess(inputs, join=True, full_text=full_text)["question_ids"][0]

    @property
    def card(self) -> dict[str, Any]:
        """Return the model's entry in the list of models."""
        config = self.pipe.model.config
        ratios = sorted(config.compression_ratios)
        own = {"ratios": ratios, "default_ratio": config.default_ratio, "model_id": self.model_id}
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "context-compressors", **own}

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the page shows of the model."""
        model, config = self.pipe.model, self.pipe.model.config
        words = [
            f"on {config.base_model_name_or_path}" if config.base_model_name_or_path else config.model_type,
            f"{model.num_parameters() / 1e6:,.0f}M parameters",
            f"{str(model.dtype).removeprefix('torch.')} on {self.pipe.device}",
        ]
        kept = 0 if config.is_encoder_decoder else position_bytes(config.decoder_config, model.dtype)
        ratios = sorted(config.compression_ratios)
        return {"name": self.name, "facts": words, "ratios": ratios, "bytes_per_token": kept}

    def describe(self, memory_id: str, memory: CompressedContext) -> dict[str, Any]:
        """Describe a memory of one row."""
        numbers = {"num_tokens": int(memory.num_context_tokens), "num_slots": int(memory.num_slots)}
        numbers |= {"ratio": int(torch.as_tensor(memory.ratio)), "bytes": memory.nbytes}
        return {"id": memory_id, "object": "memory", "model": self.name, **numbers}


class CompressionJob(Job):
    """Texts that become memories; its result are their descriptions."""

    def __init__(
        self, model: ServedModel, texts: list[str], num_tokens: int, ratio: int | None, seconds: float, batch_size: int
    ):
        super().__init__(("compression", ratio), seconds)
        self.model, self.texts, self.num_tokens = model, texts, num_tokens
        self.ratio, self.batch_size = ratio, batch_size

    @classmethod
    def run(cls, jobs: list[Any]) -> None:
        first, model = jobs[0], jobs[0].model
        texts = [text for job in jobs for text in job.texts]
        # Batches of like lengths, so that nobody waits long for what nobody waits for any more.
        order, size = sorted(range(len(texts)), key=lambda place: len(texts[place])), first.batch_size
        rows: dict[int, CompressedContext] = {}
        for start in range(0, len(order), size):
            if all(job.is_over for job in jobs):
                return
            places = order[start : start + size]
            memory = model.pipe.compress([texts[place] for place in places], ratio=first.ratio, batch_size=size)
            memory = memory.to("cpu")
            rows |= {place: _alone(memory.rows(row)) for row, place in enumerate(places)}
        ordered = (rows[place] for place in range(len(texts)))
        by_job = [(job, [next(ordered) for _ in job.texts]) for job in jobs]
        waiting = [(job, own) for job, own in by_job if not job.is_over]
        if not waiting:
            return
        texts = [text for job, _ in waiting for text in job.texts]
        ids = [f"mem-{uuid.uuid4().hex}" for _ in texts]
        kept = zip(ids, model.memories.add(ids, [row for _, own in waiting for row in own], texts), strict=True)
        for job, _ in waiting:
            job.finish([model.describe(*next(kept)) for _ in job.texts])


class OriginsJob(Job):
    """The page's look into a document: the text of each token, and each slot's strongest tokens with their weights."""

    def __init__(self, model: ServedModel, text: str, ratio: int, seconds: float):
        super().__init__(("origins", id(self)), seconds)
        self.model, self.text, self.ratio = model, text, ratio

    @classmethod
    def run(cls, jobs: list[Any]) -> None:
        (job,) = jobs
        pipe = job.model.pipe
        (ids,) = pipe.document_ids(job.text)
        origins = slot_origins(pipe.model, ids, job.ratio)
        slots = [] if origins is None else origins.strongest(_TOKENS_OF_A_SLOT)
        pieces = _pieces(text_tokenizer(pipe.model.encoder_tokenizer or pipe.tokenizer), ids, job.text)
        job.finish({"pieces": pieces, "kind": None if origins is None else origins.kind, "slots": slots})


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> list[str]:
    """The text of each token, in front those of `ids` that open it; a character of several tokens is that of one."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    ends = [0, *accumulate((end for _, end in offsets), max)]
    opening = ids[: max(0, len(ids) - len(offsets))]
    return [*(tokenizer.decode([token]) for token in opening), *(text[start:end] for start, end in pairwise(ends))]


def _alone(memory: CompressedContext) -> CompressedContext:
    """A row of a batch in tensors of its own: it would hold the padding of the whole batch's longest row."""
    if memory.embeddings is not None:
        return replace(memory, check=False, embeddings=memory.embeddings.clone())
    pairs = tuple((keys.clone(), values.clone()) for keys, values in memory.key_values or ())
    return replace(memory, check=False, key_values=pairs)


@dataclass(frozen=True)
class Answer:
    """The end of an answer: all of its text, why it ended ("stop" or "length"), and its tokens."""

    text: str
    finish_reason: str
    num_tokens: int


class AnswerJob(Job):
    """A conversation; its events are texts, if it is streamed, and an `Answer` at the end."""

    def __init__(
        self,
        model: ServedModel,
        text_ids: list[int],
        memories: list[CompressedContext],
        request: ChatRequest,
        seconds: float,
        on_first_token: Callable[[float], None],
        on_end: Callable[[int, int], None],
    ):
        # Below this temperature scores overflow, and the likeliest token is drawn anyhow. No `top_k` as OpenAI has it;
        # the library's own default draws from the 50 likeliest.
        is_drawn = request.temperature >= 0.01
        drawn = {"temperature": request.temperature, "top_p": request.top_p, "top_k": 0} if is_drawn else {}
        self.sampling = {"num_beams": 1, "do_sample": is_drawn, **drawn}
        self.seed = request.seed if is_drawn else None
        # What else is in a batch changes what is drawn: with a seed, nothing is.
        alone = id(self) if self.seed is not None else None
        super().__init__(("answer", bool(memories), *self.sampling.values(), alone), seconds)
        self.model, self.text_ids, self.memories = model, text_ids, memories
        self.on_first_token, self.on_end = on_first_token, on_end
        self.max_tokens = request.max_completion_tokens or request.max_tokens or MAX_NEW_TOKENS
        self.stops, self.is_streamed = request.stop, request.stream
        self.includes_usage = request.stream_options.include_usage
        self.num_slots = sum(int(memory.num_slots) for memory in memories)
        self._tokens: list[int] = []
        self._sent = ""

    @classmethod
    def run(cls, jobs: list[Any]) -> None:
        model, seed, pipe = jobs[0].model, jobs[0].seed, jobs[0].model.pipe
        joined = [job.memories[0].concatenate(job.memories) for job in jobs if job.memories]
        rows = [memory.to(pipe.device, pipe.model.dtype) for memory in joined]
        texts = [job.text_ids for job in jobs]
        # Further questions about a memory find its slots read; of a batch all are, or none.
        read = [pipe.read_slots.read(row, [text]) for row, text in zip(rows, texts, strict=False)]
        if read and len({row.carrier for row, _ in read}) == 1:
            rows, texts = [row for row, _ in read], [text for _, (text,) in read]
        for job in jobs:
            job._tokens = []
        with torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            pipe.model.generate(
                **padded(texts, pipe.device),
                memory=rows[0].stack(rows) if rows else None,
                max_new_tokens=max(job.max_tokens for job in jobs),
                stopping_criteria=StoppingCriteriaList([_HandingOver(jobs)]),
                pad_token_id=model.pad_token_id,
                **jobs[0].sampling,
            )
        for job in jobs:
            if not job.is_done and not job.is_over:
                # The checkpoint's own settings may end an answer, too.
                job._end(job._text(), "stop")

    def take(self, token: int) -> None:
        """Take the next token, unless the last one was taken or nobody waits any more."""
        if self.is_done or self.is_over:
            return
        if not self._tokens:
            self.on_first_token(time.monotonic() - self.arrived)
        is_end = token in self.model.end_ids
        self._tokens += [] if is_end else [token]
        text = self._text()
        stops = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if is_end or stops or len(self._tokens) == self.max_tokens:
            self._end(text[: min(stops, default=None)], "stop" if is_end or stops else "length")
        elif self.is_streamed:
            self._send_up_to(self._settled(text))

    def _text(self) -> str:
        return self.model.pipe.tokenizer.decode(self._tokens, skip_special_tokens=True)

    def _end(self, text: str, reason: str) -> None:
        self._send_up_to(text.strip())
        self.on_end(self.num_slots + len(self.text_ids), len(self._tokens))
        self.finish(Answer(text.strip(), reason, len(self._tokens)))

    def _settled(self, text: str) -> str:
        """Return the text without what the next tokens may change: half a character, space, or the start of a stop."""
        text = text.rstrip("\ufffd")
        for size in range(min(max(map(len, self.stops), default=1) - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                text = text[:-size]
                break
        return text.strip()

    def _send_up_to(self, text: str) -> None:
        if self.is_streamed and len(text) > len(self._sent):
            self.send(text[len(self._sent) :])
            self._sent = text

    def response(self, answer: Answer) -> dict[str, Any]:
        """Return the answer as one object of OpenAI's API."""
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        return {**self._head(), "object": "chat.completion", "choices": [choice], "usage": self._usage(answer)}

    async def stream(self, event: str | Answer) -> AsyncIterator[str]:
        """Yield the answer as server-sent events of OpenAI's API, from its first event on."""
        head = {**self._head(), "object": "chat.completion.chunk", "usage": None}

        def chunk(delta: dict[str, str], finish_reason: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
            return stream_event({**head, "choices": [choice]})

        try:
            yield chunk({"role": "assistant", "content": ""})
            while isinstance(event, str):
                yield chunk({"content": event})
                event = await self.next_event()
            yield chunk({}, event.finish_reason)
            if self.includes_usage:
                yield stream_event({**head, "choices": [], "usage": self._usage(event)})
            yield "data: [DONE]\n\n"
        except ServerError as error:
            yield stream_event(error.body)
        finally:
            # A client that went away is not computed for.
            self.is_cancelled = True

    def _head(self) -> dict[str, Any]:
        return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model.name}

    def _usage(self, answer: Answer) -> dict[str, Any]:
        """Return the numbers of tokens that the decoder read and wrote; a slot counts as one."""
        num_read, num_written = self.num_slots + len(self.text_ids), answer.num_tokens
        numbers = {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}
        return {**numbers, "prompt_tokens_details": {"memory_slots": self.num_slots}}


def stream_event(value: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


class _HandingOver(StoppingCriteria):
    """Hands each new token to its row's job; a row is done when its job is."""

    def __init__(self, jobs: Sequence[AnswerJob]):
        self.jobs = jobs

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        for job, token in zip(self.jobs, input_ids[:, -1].tolist(), strict=True):
            try:
                job.take(token)
            except Exception as error:
                # The other rows go on.
                job.finish(error)
        return torch.tensor([job.is_done or job.is_over for job in self.jobs], device=input_ids.device)
