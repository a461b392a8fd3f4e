# SPDX-License-Identifier: Apache-2.0
"""A compressor as a model of lm-evaluation-harness: documents are compressed, and prompts are read behind their slots.

    python -m context_compressors.evaluation.lm_eval_model run --model context-compressor \\
        --model_args pretrained=MODEL,ratio=4,document_field=passage --tasks boolq

is the harness' own command, which knows the model by this name once this module is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.models.utils_hf import stop_sequences_criteria
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError("lm-evaluation-harness is not installed: pip install -e '.[lm-eval]' in the clone") from error

from .. import modeling  # noqa: F401  (makes the Auto classes know this package's methods)
from ..configuration.nearest_names import nearest
from ..modeling.checkpoint.fingerprints import fingerprint
from ..modeling.checkpoint.pretrained_bases import load_from_place, tokenizer_from_place
from ..modeling.parts.chat_template import opening_ids
from ..modeling.parts.prompting import context_opening, start_ids
from ..modeling.parts.text_ids import encode, prefix_ids, start_token_id, text_tokenizer
from .scoring import end_ids

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class _Reading:
    """What one request has the model read: a document to compress, if any, the text behind it, and what is scored.

    The text's first `num_kept` tokens, such as BOS or a chat's opening, stay where the rest is cut.
    """

    document: str | None
    text_ids: list[int]
    target_ids: list[int]
    num_kept: int = 0


@register_model("context-compressor")
class CompressorLM(TemplateLM):
    """A compressor that lm-evaluation-harness takes: `simple_evaluate(model=CompressorLM(...), tasks=[...])`.

    The document of a request is a field of the task's own row, `document_field`. It is compressed, once for all
    requests of a batch that share it, and taken out of the prompt; the rest of the prompt, few-shot examples included,
    is the text behind the slots. In a chat template (`apply_chat_template=True`) the slots stand in the first turn of
    the user. Without `document_field`, and in requests without a prompt (mutual information), nothing is compressed:
    the checkpoint's decoder reads the whole prompt, which is the bound beside which a score stands. Prompts that the
    decoder has no positions for are cut on the left, as those of the harness' own models are.

    Args:
        pretrained: a compressor with its LM head, or its Hub id or folder.
        tokenizer: the one saved with it; read from `pretrained` where that is a name.
        ratio: tokens per slot, or "auto" for a checkpoint with a ratio selector; its default if not given.
        document_field: the column of the task's rows that is compressed, such as "context", "passage" or "article";
            `None` to have prompts read whole.
        document_in_prompt: whether the task's prompts hold the document word for word, as most tasks' do. `False` for
            tasks whose prompts leave it out.
        max_document_tokens: keep only so many tokens of a document; the number of those that were cut is logged.
        allow_untrained_ratio: go on with a ratio that the checkpoint was not trained for.
        batch_size: requests at once.
        max_gen_toks: most tokens of an answer, where the task does not say.
        device: such as "cuda:0", of a checkpoint that is loaded by name; an accelerator if there is one.
        dtype: of such a checkpoint: "auto" (as saved), "float32", "bfloat16" or "float16".
        base_model: of such a light checkpoint: Hub id or folder of its base, if not where the checkpoint says.
        trust_remote_code: run the code that such a checkpoint brings.

    Raises:
        TypeError: a model that is no compressor.
        ValueError: a model without its tokenizer, a value that is not allowed, or a checkpoint that compresses a
            document together with its question.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        ratio: int | str | None = None,
        document_field: str | None = "context",
        document_in_prompt: bool = True,
        max_document_tokens: int | None = None,
        allow_untrained_ratio: bool = False,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        device: str | None = None,
        dtype: str = "auto",
        base_model: str | None = None,
        trust_remote_code: bool = False,
    ):
        super().__init__()
        if isinstance(pretrained, (str, os.PathLike)):
            name = os.fspath(pretrained)
            tokenizer = tokenizer or tokenizer_from_place(name, trust_remote_code=trust_remote_code)
            pretrained = load_from_place(name, base_model=base_model, dtype=dtype, trust_remote_code=trust_remote_code)
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            pretrained = pretrained.to(device or accelerator or "cpu")
        if tokenizer is None:
            raise ValueError("a model that is loaded already needs its tokenizer")
        if not hasattr(pretrained, "question_answering"):
            raise TypeError(
                f"pretrained must be a compressor with its LM head, got {type(pretrained).__name__}; the harness' own "
                "model 'hf' reads plain language models"
            )
        self.model, self.tokenizer = pretrained.eval(), tokenizer
        self._compressor = pretrained.question_answering(tokenizer)
        self._compressor.check_serves_memories("so that no prompt is read behind its slots")
        self._device = pretrained.device
        self._plain_tokenizer = text_tokenizer(tokenizer)
        # Of the user's turn, in a chat.
        self._opening = (tokenizer.decode(opening_ids(tokenizer)) if tokenizer.chat_template else "") or None
        self.ratio, self.document_field = ratio, document_field
        self.document_in_prompt = document_in_prompt
        self.max_document_tokens, self.allow_untrained_ratio = max_document_tokens, allow_untrained_ratio
        self.batch_size, self.max_gen_toks = int(batch_size), max_gen_toks
        # By a document's hash, whether it was cut.
        self._is_cut: dict[int, bool] = {}
        self._num_prompts_cut = 0
        self._last: tuple[Sequence[str], Any] = ([], None)

    # --- what the harness calls ---

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation behind the document's slots and the prompt, in nats."""
        readings = []
        for request in requests:
            document, prompt = self._document_and_prompt(request)
            # Tokenized together and cut, as the harness does it.
            context_ids, target_ids = self._encode_pair(prompt, request.args[1]) if prompt else ([], None)
            if target_ids is None:
                target_ids = self.tok_encode(request.args[1])
            readings.append(self._reading(document, prompt, context_ids, target_ids))
        return self._scored("loglikelihood", requests, readings, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text behind its document's slots, in nats.

        A text that does not fit behind them is scored in windows, each behind the slots and a token of the text, the
        last one behind as much of the text as fits: the harness' own windows.
        """
        totals = []
        for request in tqdm(requests, desc="loglikelihood_rolling", disable=disable_tqdm):
            document, _ = self._document_and_prompt(request, scores_prompt=True)
            first = self._reading(document, "", [], []).text_ids
            ids = self.tok_encode(request.args[0])
            memory = None if document is None else self._compress([document])
            (taken,) = self._taken(memory, [torch.tensor(first)])
            limit = self._max_positions or taken + len(first) + len(ids)
            room = limit - taken - len(first)
            if room < 1:
                raise ValueError(f"slots in {taken} places leave none for a text behind them: take a higher ratio")
            windows = get_rolling_token_windows(ids, None, room, 1)
            readings = [
                _Reading(document, [*first, *(token for token in before if token is not None)], target)
                for before, target in map(make_disjoint_window, windows)
            ]
            totals.append(sum(score for score, _ in self._scores(readings)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes behind the document's slots and the prompt, up to the first of the stop sequences."""
        groups: dict[str, list[int]] = {}
        readings = []
        for row, request in enumerate(requests):
            document, prompt = self._document_and_prompt(request)
            readings.append(self._reading(document, prompt, self.tok_encode(prompt), []))
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(row)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            for rows in groups.values():
                how = requests[rows[0]].args[1]
                for places in self._batches([readings[row] for row in rows]):
                    batch = [rows[place] for place in places]
                    written = self._written([readings[row] for row in batch], how)
                    for row, text in zip(batch, written, strict=True):
                        texts[row] = text
                        self.cache_hook.add_partial("generate_until", requests[row].args, text)
                    bar.update(len(batch))
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation in the tokenizer's chat template, as text."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, in the harness' form for file names."""
        return self.tokenizer.name_or_path.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.tokenizer.eos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text, without a start token; special tokens are such in chats alone."""
        if not self._is_chat(string):
            return encode(self._plain_tokenizer, string)
        # Tokenized apart, as in training: no token reaches from the opening, which the slots follow, into the words.
        words = string.partition(str(self._opening))[2]
        return [*self._opening_ids(string), *prefix_ids(self._plain_tokenizer, words)]

    def _opening_ids(self, string: str) -> list[int]:
        """Token ids of a chat through its first opening of the user's turn."""
        return prefix_ids(self._plain_tokenizer, "".join(string.partition(str(self._opening))[:2]))

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Raise `ValueError` where the harness' cache, which knows requests by their prompts, would mix documents."""
        if self.document_field is not None and not self.document_in_prompt:
            raise ValueError(
                "use_cache keeps answers by their prompts, which leave the documents out (document_in_prompt=False): "
                "run without it"
            )
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside the results: the checkpoint's weights, and how documents were read."""
        names = ("document_field", "document_in_prompt", "max_document_tokens")
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "model_fingerprint": fingerprint(self.model, of_answers=True),
            "ratio": None if self.document_field is None else (self.ratio or self.model.config.default_ratio),
            **{name: getattr(self, name) for name in names},
            "documents": len(self._is_cut),
            "documents_cut": sum(self._is_cut.values()),
            "prompts_cut": self._num_prompts_cut,
        }

    # --- documents and prompts ---

    def _document_and_prompt(self, request: Instance, scores_prompt: bool = False) -> tuple[str | None, str]:
        """A request's document, and its prompt without it; where the prompt is what is scored, it stays as it is."""
        prompt = request.args[0]
        if self.document_field is None or (not prompt and self.document_in_prompt):
            return None, prompt
        place = f"document {request.doc_id} of task {request.task_name!r}"
        value = request.doc.get(self.document_field)
        document = (value or "").strip()
        if not document:
            there = nearest(self.document_field, request.doc) if value is None else ""
            raise ValueError(
                f"{place} has no text in {self.document_field!r}{there}: name its field by document_field"
            )
        if scores_prompt or not self.document_in_prompt:
            return document, prompt
        if prompt.count(document) == 0:
            raise ValueError(
                f"{place}: the prompt does not hold the document word for word, so that it cannot be taken out: pass "
                "document_in_prompt=False if the task's prompts leave it out"
            )
        return document, prompt.replace(document, "")

    def _is_chat(self, prompt: str) -> bool:
        return self._opening is not None and self._opening in prompt

    def _reading(self, document: str | None, prompt: str, ids: list[int], target_ids: list[int]) -> _Reading:
        """A prompt's ids with what the checkpoint's texts start with in front, one token at least."""
        config, is_chat = self.model.config, self._is_chat(prompt)
        num_words = max(0, len(ids) - (len(self._opening_ids(prompt)) if is_chat else 0))
        if config.prompt_format == "chat" and not is_chat:
            logger.warning_once("the checkpoint was trained in its chat template: pass apply_chat_template=True")
        if document is None:
            start = [] if is_chat else [start_token_id(self.tokenizer)]
        else:
            start = start_ids(config, self.tokenizer, [])
            if config.opens_context and is_chat:
                head = context_opening(config, self.tokenizer)
                if ids[: len(head)] != head:
                    raise ValueError(
                        "the memory holds the opening of the chat, which is the template's own: run without a system "
                        "instruction"
                    )
                start, ids = [], ids[len(head) :]
            elif config.continuation_token_id is None and is_chat:
                start = []
            elif is_chat and config.prompt_format != "chat" and ids[:1] == [self.tokenizer.bos_token_id]:
                # A task token takes the place of BOS.
                ids = ids[1:]
        text_ids = [*start, *ids] or [start_token_id(self.tokenizer)]
        return _Reading(document, text_ids, target_ids, len(text_ids) - num_words)

    # --- batches ---

    def _batches(self, readings: Sequence[_Reading]) -> Iterator[list[int]]:
        """Rows of readings, the longest first; those of one document follow one another."""

        def key(row: int) -> tuple[Any, ...]:
            document, length = readings[row].document, len(readings[row].text_ids) + len(readings[row].target_ids)
            return document is None, -len(document or ""), document or "", -length

        order = sorted(range(len(readings)), key=key)
        num_with = sum(reading.document is not None for reading in readings)
        for part in (order[:num_with], order[num_with:]):
            for start in range(0, len(part), self.batch_size):
                yield part[start : start + self.batch_size]

    def _compress(self, documents: Sequence[str]) -> Any:
        if self._last[0] != documents:
            longest = self.max_document_tokens
            for document, ids in zip(documents, self._compressor.document_ids(documents), strict=True):
                is_cut = longest is not None and len(ids) > longest
                if is_cut:
                    logger.warning_once(f"documents are cut to {longest} tokens; documents_cut says how many")
                self._is_cut[hash(document)] = is_cut
            memory = self._compressor.compress(documents, self.ratio, longest, self.allow_untrained_ratio)
            self._last = documents, memory
        return self._last[1]

    @property
    def _max_positions(self) -> int | None:
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def _taken(self, memory: Any, texts: Sequence[Tensor]) -> list[int]:
        """Of each row the decoder's positions in front of its text."""
        if memory is None or self.model.config.is_encoder_decoder:
            return [0] * len(texts)
        return self.model.model.text_position_offset(memory, *self._padded(texts)).tolist()

    def _padded(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Ids and their mask."""
        mask = _left_padded([torch.ones_like(row) for row in rows])
        return _left_padded(rows).to(self._device), mask.to(self._device)

    def _inputs(self, batch: Sequence[_Reading], num_new: int = 0) -> dict[str, Any]:
        """Arguments of the model: memory and text, padded on the left so that all rows end in one column."""
        memory = None
        if texts := [reading.document for reading in batch if reading.document is not None]:
            documents = list(dict.fromkeys(texts))
            memory = self._compress(documents).rows([documents.index(text) for text in texts])
        taken = self._taken(memory, [torch.tensor(reading.text_ids) for reading in batch])
        fitted = [self._fitted(reading, places, num_new) for reading, places in zip(batch, taken, strict=True)]
        # What comes after a target's last token is not asked for.
        rows = [torch.tensor([*reading.text_ids, *reading.target_ids[:-1]]) for reading in fitted]
        ids, mask = self._padded(rows)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        return inputs if memory is None else {**inputs, "memory": memory}

    def _fitted(self, reading: _Reading, taken: int, num_new: int) -> _Reading:
        """A reading whose text, cut on the left if need be, has places behind `taken` others and before `num_new`."""
        num_behind, limit = len(reading.target_ids[:-1]) + num_new, self._max_positions
        surplus = 0 if limit is None else taken + len(reading.text_ids) + num_behind - limit
        if surplus <= 0:
            return reading
        needed = f"{taken} for slots, {len(reading.text_ids)} for a prompt and {num_behind} for what follows it"
        if surplus > len(reading.text_ids) - max(1, reading.num_kept):
            raise ValueError(f"the decoder has {limit} positions, too few however short the prompt is: {needed}")
        logger.warning_once(
            f"the decoder has {limit} positions: prompts are cut on the left; prompts_cut says how many"
        )
        self._num_prompts_cut += 1
        first = reading.num_kept
        return replace(reading, text_ids=reading.text_ids[:first] + reading.text_ids[first + surplus :])

    def _scored(
        self, kind: str, requests: Sequence[Instance], readings: Sequence[_Reading], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        with tqdm(total=len(readings), desc=kind, disable=disable_tqdm) as bar:
            scores = self._scores(readings, bar)
        for request, score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial(kind, request.args, score)
        return scores

    @torch.inference_mode()
    def _scores(self, readings: Sequence[_Reading], bar: Any = None) -> list[tuple[float, bool]]:
        """Log-probability of each target, and whether every token of it was the likeliest."""
        scores = [(0.0, True)] * len(readings)
        for rows in self._batches(readings):
            batch = [readings[row] for row in rows]
            longest = max(len(reading.target_ids) for reading in batch)
            # All other logits would only be thrown away, and they are the largest tensor of the pass.
            logits = self.model(**self._inputs(batch), logits_to_keep=max(1, longest), use_cache=False).logits
            for row, reading, own in zip(rows, batch, logits, strict=True):
                target = torch.tensor(reading.target_ids, dtype=torch.long, device=own.device)
                found = own[len(own) - len(target) :].float()
                log_probabilities = found.log_softmax(-1).gather(1, target[:, None])
                scores[row] = float(log_probabilities.sum()), bool((found.argmax(-1) == target).all())
            if bar is not None:
                bar.update(len(batch))
        return scores

    @torch.inference_mode()
    def _written(self, batch: Sequence[_Reading], how: Mapping[str, Any]) -> list[str]:
        """What the model writes, greedily if `how` does not say otherwise, cut at the stop sequences."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(how), self.max_gen_toks))
        until = [stop for stop in handle_stop_sequences(options.pop("until"), eos=None) if stop]
        if not options["do_sample"]:
            options.pop("temperature", None)
        num_new, tokenizer = options.pop("max_gen_toks"), self.tokenizer
        inputs = self._inputs(batch, num_new)
        length, eos = inputs["input_ids"].shape[1], tokenizer.eos_token_id
        output = self.model.generate(
            **inputs,
            max_new_tokens=num_new,
            pad_token_id=eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            eos_token_id=end_ids(self.model, tokenizer),
            stopping_criteria=stop_sequences_criteria(tokenizer, until, length, len(batch)),
            **options,
        )
        texts = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
        return [postprocess_generated_text(text, until, None) for text in texts]

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Scores of token ids that are read without a document."""
        return self._scores([_Reading(None, context_ids, target_ids) for _, context_ids, target_ids in requests])


def _left_padded(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_side="left")


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
