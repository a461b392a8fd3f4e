# SPDX-License-Identifier: Apache-2.0
"""Texts in place of memories: a context's beginning, BM25's sentences, surprising tokens, or what a classifier
keeps."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.parts.text_ids import encode
from ..modeling.text_compressor import TextCompressor, split_sentences
from .settings import ALTERNATIVES, WRITTEN_TASKS

CUT, BM25, SELF_INFORMATION, KEEP_DROP, KEEP_DROP_AWARE = ALTERNATIVES
# Two need a question to pick by; a text is continued from its end, and repeated from all of it.
TASKS_OF_ALTERNATIVE = {
    CUT: WRITTEN_TASKS,
    BM25: ("question_answering",),
    SELF_INFORMATION: WRITTEN_TASKS,
    KEEP_DROP: WRITTEN_TASKS,
    KEEP_DROP_AWARE: ("question_answering",),
}
_LOGITS_AT_ONCE = 512
# Of Chinese and Japanese, which have no spaces, each character counts as a word.
_CHARACTERS = "\u3040-\u30ff\u3400-\u9fff"
_WORDS: dict[str, Any] = {
    "token_pattern": rf"[{_CHARACTERS}]|[^\W{_CHARACTERS}]{{2,}}",
    "stopwords": "en",
    "return_ids": False,
    "show_progress": False,
}


def informative_context(context_ids: Sequence[int], information: Sequence[float], budget: int) -> list[int]:
    """The `budget` tokens of a context with the most self-information, in the order of the text."""
    places = np.argsort(-np.asarray(information), kind="stable")[:budget]
    return [context_ids[place] for place in sorted(places)]


def kept_words(
    compressor: TextCompressor,
    tokenizer: PreTrainedTokenizerBase,
    context_ids: Sequence[int],
    question: str | None,
    budget: int,
) -> list[int]:
    """The words that a text compressor keeps, as at most `budget` tokens of the reader's tokenizer."""
    text = tokenizer.decode(list(context_ids), clean_up_tokenization_spaces=False)
    kept = compressor.compress_text(text, question=question, max_tokens=budget, tokenizer=tokenizer)
    return encode(tokenizer, kept)[:budget]


@torch.inference_mode()
def self_information(model: PreTrainedModel, start_token_id: int, context_ids: Sequence[int]) -> list[float]:
    """Return the surprise in nats of each token of a context to a compressor's base (Jiang et al., 2023)."""
    ids = torch.tensor([[start_token_id, *context_ids]], device=model.device)
    with model.base_language_model():
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    surprises = []
    # The logits of a long context would be the largest tensor of the evaluation.
    for part, labels in zip(states.split(_LOGITS_AT_ONCE, 1), ids[:, 1:].split(_LOGITS_AT_ONCE, 1), strict=True):
        surprises += cross_entropy(model.text_logits(part)[0].float(), labels[0], reduction="none").tolist()
    return surprises


def bm25_context(
    tokenizer: PreTrainedTokenizerBase, context_ids: Sequence[int], question: str, budget: int
) -> list[int]:
    """The sentences of a context that BM25 ranks highest for a question, in the order of the text."""
    if len(context_ids) <= budget:
        return list(context_ids)
    sentences, index = _index(tokenizer, tuple(context_ids))
    left, kept = budget, {}
    for place in np.argsort(-index.scores(question), kind="stable").tolist():
        ids = sentences[place][:left]
        if not ids:
            break
        kept[place] = ids
        left -= len(ids)
    return [token for place in sorted(kept) for token in kept[place]]


# A batch's contexts are asked about once for each ratio.
@lru_cache(maxsize=64)
def _index(tokenizer: PreTrainedTokenizerBase, context_ids: tuple[int, ...]) -> tuple[list[list[int]], "BM25Index"]:
    """Return the token ids of each sentence of a context, and BM25's index of them."""
    sentences = split_sentences(tokenizer.decode(list(context_ids), clean_up_tokenization_spaces=False))
    return [encode(tokenizer, sentence) for sentence in sentences], BM25Index(sentences)


class BM25Index:
    """BM25 of texts with bm25s' defaults and English stop words, held in memory."""

    def __init__(self, texts: Sequence[str]):
        import bm25s

        words = bm25s.tokenize(list(texts), **_WORDS)
        self.num_texts, self.has_words, self._index = len(texts), any(words), bm25s.BM25()
        if self.has_words:
            self._index.index(words, show_progress=False)

    def scores(self, question: str) -> np.ndarray:
        """Return the score of each text, 0 for those that share no word with a question."""
        import bm25s

        (words,) = bm25s.tokenize([question], **_WORDS)
        known = [word for word in words if self.has_words and word in self._index.vocab_dict]
        return self._index.get_scores(known) if known else np.zeros(self.num_texts, dtype=np.float32)
