# SPDX-License-Identifier: Apache-2.0
"""A compressor as a model of lm-evaluation-harness: documents are compressed, and prompts follow their slots.

    python -m context_compressors.evaluation.lm_eval_model run --model context-compressor \\
        --model_args pretrained=MODEL,ratio=4,document_field=passage --tasks boolq

is the harness' own command, which knows the model by this name once this module is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.models.utils_hf import stop_sequences_criteria
except ImportError as error:
    raise ImportError("lm-evaluation-harness is not installed: pip install -e '.[lm-eval]' in the clone") from error

from .. import modeling  # noqa: F401  (makes the Auto classes know this package's methods)
from ..configuration.nearest_names import nearest
from ..modeling.checkpoint.fingerprints import weights_fingerprint
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
    """A document to compress, if any, the text that follows it, and the target that is scored."""

    document: str | None
    text_ids: list[int]
    target_ids: list[int]


@register_model("context-compressor")
class CompressorLM(TemplateLM):
    """A compressor for lm-evaluation-harness: `simple_evaluate(model=CompressorLM(...), tasks=[...])`.

    The document of a request is a field of the task's own row, `document_field`. It is compressed, once for all
    requests of a batch that share it, and taken out of the prompt; the rest of the prompt, few-shot examples included,
    follows the slots. In a chat template (`apply_chat_template=True`) the slots stand in the user's first turn.
    Without `document_field`, and in requests without a prompt (mutual information), nothing is compressed: the
    checkpoint's decoder reads the whole prompt, the bound of a score.

    Args:
        pretrained: a compressor with its LM head, or its Hub id or folder.
        tokenizer: the one saved with it; read from `pretrained` where that is a name.
        ratio: tokens per slot; the checkpoint's default if not given.
        document_field: the column of the task's rows that is compressed, such as "context", "passage" or "article",
            whose text prompts hold word for word; `None` to have prompts read whole.
        allow_untrained_ratio: go on with a ratio that the checkpoint was not trained for.
        batch_size: requests at once.
        max_gen_toks: most tokens of an answer, where the task does not say.
        device: such as "cuda:0", of a checkpoint that is loaded by name; an accelerator if there is one.
        dtype: of such a checkpoint: "auto" (as saved), "float32", "bfloat16" or "float16".
        base_model: of such a light checkpoint: Hub id or folder of its base, if not where the checkpoint says.

    Raises:
        TypeError: a model that is no compressor.
        ValueError: a checkpoint that compresses a document together with its question.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        ratio: int | None = None,
        document_field: str | None = "context",
        allow_untrained_ratio: bool = False,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        device: str | None = None,
        dtype: str = "auto",
        base_model: str | None = None,
    ):
        super().__init__()
        if isinstance(pretrained, (str, os.PathLike)):
            name = os.fspath(pretrained)
            tokenizer = tokenizer or tokenizer_from_place(name)
            pretrained = load_from_place(name, base_model=base_model, dtype=dtype)
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            pretrained = pretrained.to(device or accelerator or "cpu")
        if not hasattr(pretrained, "question_answering"):
            raise TypeError(
                f"pretrained must be a compressor with its LM head, got {type(pretrained).__name__}; the harness' own "
                "model 'hf' reads plain language models"
            )
        self.model = pretrained.eval()
        self.tokenizer = cast(Any, tokenizer)
        self._compressor = pretrained.question_answering(tokenizer)
        self._compressor.check_serves_memories("so that no prompt is read behind its slots")
        self._device = pretrained.device
        self._plain_tokenizer = text_tokenizer(tokenizer)
        # Of the user's turn, in a chat.
        self._opening = (self.tokenizer.decode(opening_ids(tokenizer)) if self.tokenizer.chat_template else "") or None
        self.ratio, self.document_field = ratio, document_field
        self.allow_untrained_ratio = allow_untrained_ratio
        self.batch_size, self.max_gen_toks = int(batch_size), max_gen_toks
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
        with tqdm(total=len(readings), desc="loglikelihood", disable=disable_tqdm) as bar:
            scores = self._scores(readings, bar)
        for request, score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, score)
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Perplexity of whole texts is a task of `context-compressors evaluate`."""
        raise NotImplementedError("texts are scored by `context-compressors evaluate --tasks continuation`")

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate answers behind the document's slots and the prompt, up to the first of the stop sequences."""
        groups: dict[str, list[int]] = {}
        readings = []
        for row, request in enumerate(requests):
            document, prompt = self._document_and_prompt(request)
            readings.append(self._reading(document, prompt, self.tok_encode(prompt), []))
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(row)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            for rows in groups.values():
                options = requests[rows[0]].args[1]
                for places in self._batches([readings[row] for row in rows]):
                    batch = [rows[place] for place in places]
                    written = self._written([readings[row] for row in batch], options)
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
        before, opening, words = string.partition(str(self._opening))
        head = prefix_ids(self._plain_tokenizer, before + opening)
        return [*head, *prefix_ids(self._plain_tokenizer, words)]

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside the results: the checkpoint's weights, and how documents were read."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "model_fingerprint": weights_fingerprint(self.model, of_answers=True),
            "ratio": None if self.document_field is None else (self.ratio or self.model.config.default_ratio),
            "document_field": self.document_field,
        }

    # --- documents and prompts ---

    def _document_and_prompt(self, request: Instance) -> tuple[str | None, str]:
        """A request's document, and its prompt without it."""
        prompt = request.args[0]
        if self.document_field is None or not prompt:
            return None, prompt
        place = f"document {request.doc_id} of task {request.task_name!r}"
        value = request.doc.get(self.document_field)
        document = (value or "").strip()
        if not document:
            there = nearest(self.document_field, request.doc) if value is None else ""
            raise ValueError(
                f"{place} has no text in {self.document_field!r}{there}: name its field by document_field"
            )
        if document not in prompt:
            raise ValueError(f"{place}: the prompt does not hold the document word for word")
        return document, prompt.replace(document, "")

    def _is_chat(self, prompt: str) -> bool:
        return self._opening is not None and self._opening in prompt

    def _reading(self, document: str | None, prompt: str, ids: list[int], target_ids: list[int]) -> _Reading:
        """A prompt's ids behind what the checkpoint's texts start with, one token at least."""
        config, is_chat = self.model.config, self._is_chat(prompt)
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
        return _Reading(document, [*start, *ids] or [start_token_id(self.tokenizer)], target_ids)

    # --- batches ---

    def _batches(self, readings: Sequence[_Reading]) -> Iterator[list[int]]:
        """Rows of readings, the longest first; those of one document follow one another."""

        def key(row: int) -> tuple[Any, ...]:
            document, length = readings[row].document or "", len(readings[row].text_ids + readings[row].target_ids)
            return -len(document), document, -length

        for has_document in (True, False):
            rows = [row for row, reading in enumerate(readings) if (reading.document is not None) == has_document]
            rows.sort(key=key)
            for start in range(0, len(rows), self.batch_size):
                yield rows[start : start + self.batch_size]

    def _inputs(self, batch: Sequence[_Reading]) -> dict[str, Any]:
        """Arguments of the model: memory and text, padded on the left so that all rows end in one column."""
        # What comes after a target's last token is not asked for.
        rows = [torch.tensor([*reading.text_ids, *reading.target_ids[:-1]]) for reading in batch]
        inputs: dict[str, Any] = {
            "input_ids": _left_padded(rows).to(self._device),
            "attention_mask": _left_padded([torch.ones_like(row) for row in rows]).to(self._device),
        }
        if texts := [reading.document for reading in batch if reading.document is not None]:
            documents = list(dict.fromkeys(texts))
            if self._last[0] != documents:
                memory = self._compressor.compress(documents, self.ratio, None, self.allow_untrained_ratio)
                self._last = documents, memory
            inputs["memory"] = self._last[1].rows([documents.index(text) for text in texts])
        return inputs

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
                predicted = own[len(own) - len(target) :].float()
                log_probabilities = predicted.log_softmax(-1).gather(1, target[:, None])
                scores[row] = float(log_probabilities.sum()), bool((predicted.argmax(-1) == target).all())
            if bar is not None:
                bar.update(len(batch))
        return scores

    @torch.inference_mode()
    def _written(self, batch: Sequence[_Reading], generation: Mapping[str, Any]) -> list[str]:
        """Generate answers, greedily if `generation` does not say otherwise, and cut them at the stop sequences."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(generation), self.max_gen_toks))
        until = [stop for stop in handle_stop_sequences(options.pop("until"), eos=None) if stop]
        if not options["do_sample"]:
            options.pop("temperature", None)
        inputs, tokenizer = self._inputs(batch), self.tokenizer
        length, eos = inputs["input_ids"].shape[1], tokenizer.eos_token_id
        output = self.model.generate(
            **inputs,
            max_new_tokens=options.pop("max_gen_toks"),
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
    return pad_sequence(list(rows), batch_first=True, padding_side="left")


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
