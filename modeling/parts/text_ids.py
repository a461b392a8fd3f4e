# SPDX-License-Identifier: Apache-2.0
"""Token ids of plain text, in which special tokens' names are words, and what a tokenizer puts around a text."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of most texts, more than there are; tokens behind those that are wanted, so that none of these is a cut word's.
_CHARACTERS_PER_TOKEN, _MORE_TOKENS = 16, 64
# Copies of tokenizers by whether they split special tokens.
_COPIES: dict[bool, weakref.WeakKeyDictionary[PreTrainedTokenizerBase, PreTrainedTokenizerBase]] = {
    splits: weakref.WeakKeyDictionary() for splits in (True, False)
}


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizers library's tokenizer inside a fast one; `None` inside another."""
    return getattr(tokenizer, "backend_tokenizer", None)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text, with no special tokens added."""
    # The wrapper's own overhead is ten times the encoding of a short string; it forgets what an earlier call cut at.
    fast = _backend(tokenizer)
    if fast is not None and fast.truncation is None and fast.padding is None:
        return fast.encode(text, add_special_tokens=False).ids
    return tokenizer(text, add_special_tokens=False).input_ids


def encode_all(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], most: int | None = None) -> list[list[int]]:
    """`encode` of several texts, on all cores where the tokenizer is a fast one."""
    if most is not None:
        size = _CHARACTERS_PER_TOKEN * (most + _MORE_TOKENS)
        starts = encode_all(tokenizer, [text[:size] for text in texts])
        # Where the start ends inside a word, its last tokens are not the text's.
        return [
            ids if len(text) <= size or len(ids) >= most + _MORE_TOKENS else encode(tokenizer, text)
            for text, ids in zip(texts, starts, strict=True)
        ]
    fast = _backend(tokenizer)
    if fast is not None and fast.truncation is None and fast.padding is None:
        return [encoding.ids for encoding in fast.encode_batch_fast(list(texts), add_special_tokens=False)]
    return [encode(tokenizer, text) for text in texts]


def start_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that text starts with: BOS, or EOS where the tokenizer has no BOS; `ValueError` when it has neither."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError("the tokenizer has neither a BOS nor an EOS token: set one before training")


def context_start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that `tokenizer(document)` puts in front of a document: BOS for most tokenizers.

    People compress what their tokenizer gives them, so training and evaluation put the same in front of a context.
    """
    return _around_text(tokenizer)[0]


def context_end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that `tokenizer(document)` puts behind a document: EOS for T5's tokenizers, none for most
    others."""
    return _around_text(tokenizer)[1]


def _around_text(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    full, plain = tokenizer("a").input_ids, encode(tokenizer, "a")
    for start in range(len(full) - len(plain) + 1):
        end = start + len(plain)
        if full[start:end] == plain:
            return full[:start], full[end:]
    return [], []


def leave_out_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer put nothing around a text any more, in place; saved and loaded again it does not either."""
    if (backend := _backend(tokenizer)) is not None:
        from tokenizers import processors

        backend.post_processor = processors.Sequence([])
    tokenizer.add_bos_token = False


def text_tokenizer(tokenizer: PreTrainedTokenizerBase, splits: bool = True) -> PreTrainedTokenizerBase:
    """A copy for data: where a document says "[AE]" or "</s>", these are characters and not the special token."""
    copied = copy.deepcopy(tokenizer)
    copied.split_special_tokens = splits
    backend = _backend(copied)
    if backend is not None:
        backend.encode_special_tokens = splits
        backend.no_truncation()
        backend.no_padding()
    return copied


def words_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """`encode` of somebody's words, in which special tokens' names are characters, whatever the tokenizer does."""
    return encode(kept_text_tokenizer(tokenizer, True), text)


def prefix_ids(tokenizer: PreTrainedTokenizerBase, prefix: str) -> list[int]:
    """Token ids of what stands in front of every context: special tokens are special in it, unlike in documents."""
    return encode(kept_text_tokenizer(tokenizer, False), prefix) if prefix else []


def kept_text_tokenizer(tokenizer: PreTrainedTokenizerBase, splits: bool = True) -> PreTrainedTokenizerBase:
    """`text_tokenizer`, made once: a copy takes a thousand times as long as the encoding of a question."""
    copied = _COPIES[splits].get(tokenizer)
    if copied is None or len(copied) != len(tokenizer):
        copied = _COPIES[splits][tokenizer] = text_tokenizer(tokenizer, splits)
    return copied


def check_texts(name: str, texts: Sequence[Any]) -> None:
    """Every text must be a `str` that can be written as UTF-8."""
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"`{name}` must be a text or a list of texts, got {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"`{name}` holds {text[error.start]!r} at character {error.start}, which is half of one (a lone "
                "surrogate): decode the text anew, with errors='replace'"
            ) from None
