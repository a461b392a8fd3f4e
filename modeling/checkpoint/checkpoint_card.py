# SPDX-License-Identifier: Apache-2.0
"""Cards of a checkpoint by its configuration alone, such as the first card of a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...configuration.configuration_compressor import RETRIEVAL_LOADER

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

    from ...configuration.configuration_compressor import CompressorConfig

_LOADING = """\
from transformers import {auto_class}, AutoTokenizer

name = "{place}"  # this repository, or a local copy of it
model = {auto_class}.from_pretrained(name, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)"""
_GENERATION = """\
memory = model.compress(**{document_tokenizer}(document, return_tensors="pt"), ratio={ratio})  # once
memory.save("document.safetensors")  # keep it
answer = model.generate(**{question}, memory=memory, max_new_tokens=32)"""
# Where a document is compressed together with its question.
_WITH_QUESTION = """\
context = {document_tokenizer}(document, return_tensors="pt").input_ids
asked = {question}  # the document is compressed together with its question
answer = model.generate(**asked, context_input_ids=context, ratio={ratio}, max_new_tokens=32)"""
# The template's tokens stand around the slots: the pipeline puts them there.
_IN_CHAT = """\
pipe = model.question_answering(tokenizer)
memory = pipe.compress(document, ratio={ratio})  # once
memory.save("document.safetensors")  # keep it
answer = pipe(question, memory=memory)["answer"]"""
_IN_CHAT_WITH_QUESTION = """\
pipe = model.question_answering(tokenizer)
answer = pipe(question, context=document, ratio={ratio})["answer"]  # the document is compressed with its question"""
_RETRIEVAL = """\
options = {{"padding": True, "truncation": True, "max_length": 512, "return_tensors": "pt"}}
of_documents = model.encode(**tokenizer(documents, **options), ratio={ratio})
of_queries = model.encode(**tokenizer(queries, **options), ratio={ratio})
scores = model.score(*of_queries.to_tuple(), *of_documents.to_tuple())  # (queries, documents): Chamfer similarity
best = scores.argmax(dim=1)  # the document that answers each query best"""
_QUESTION = 'tokenizer(question, return_tensors="pt")'
# The task token takes BOS's place.
_QUESTION_BEHIND_TASK_TOKEN = 'tokenizer("[LM]" + question, add_special_tokens=False, return_tensors="pt")'


def write_first_card(config: CompressorConfig, folder: str | os.PathLike) -> None:
    """Write a card without data, scores and limits into `folder`, unless there is one."""
    from huggingface_hub import ModelCardData

    path = Path(folder) / "README.md"
    if not path.exists():
        title = type(config).__name__.removesuffix("Config") + " compressor"
        metadata = ModelCardData(library_name="transformers", **hub_fields(config))
        text = card_text(metadata, title, summary_of(config), facts(config), usage(config, "."))
        path.write_text(text, encoding="utf-8")


def card_text(metadata: ModelCardData, title: str, summary: str, facts: Sequence[tuple[str, Any]], *rest: str) -> str:
    """A card: what the Hub reads at its top, a title, a summary, a table of facts, and further sections."""
    from huggingface_hub import ModelCard

    table = "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts)])
    text = "\n\n".join([f"# {title}", summary, f"**This checkpoint**\n\n{table}", *rest])
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n"))


def hub_fields(config: CompressorConfig) -> dict[str, Any]:
    """The fields of a compressor for the Hub: its base and its tags."""
    # On the Hub the base of a fine-tuned model is the model that it was fine-tuned from.
    names = (config.parent_model_name_or_path, config.base_model_name_or_path)
    kind = "late-interaction" if config.auto_class == RETRIEVAL_LOADER else "soft-prompt"
    base = next((name for name in names if is_hub_id(name)), None)
    # A light checkpoint has no weights of the base; of another one the Hub itself says that it was fine-tuned.
    relation = {"base_model_relation": "adapter"} if base and config.external_weights is not None else {}
    return {
        "base_model": base,
        **relation,
        "tags": ["context-compression", kind, config.method.replace("_", "-")],
    }


def summary_of(config: CompressorConfig) -> str:
    """Describe a compressor in a sentence."""
    method, every = config.method.replace("_", " "), _every(sorted(config.compression_ratios))
    if config.auto_class == RETRIEVAL_LOADER:
        return (
            f"A retrieval model ({method}): queries and documents become one vector for {every}, compared by Chamfer "
            "similarity (MaxSim)."
        )
    base = f" on {public_name(config.base_model_name_or_path)}" if config.base_model_name_or_path else ""
    of_what = "memory token" if config.num_memory_tokens else "place"
    kept = f"the keys and values of one {of_what}" if config.carrier == "key_values" else "one vector"
    return (
        f"A soft context compressor ({method}){base}: it reads a long context once, keeps {kept} for {every}, and "
        "answers from those."
    )


def facts(config: CompressorConfig) -> list[tuple[str, Any]]:
    """Return facts of a compressor by name; the method's own fields are those of its `card_fields`."""
    has_decoder = config.auto_class != RETRIEVAL_LOADER
    decoder = _adapters(config.decoder_adapter)
    if config.shared_adapter:
        decoder = "the encoder's adapter" + (f", and {decoder}" if config.decoder_adapter else "")
    rows = [
        ("Base model", _base(config)),
        ("Fine-tuned from", config.parent_model_name_or_path),
        ("Method", config.method.replace("_", " ")),
        ("Compression ratios", ", ".join(map(str, sorted(config.compression_ratios)))),
        ("Default ratio", config.default_ratio if len(config.compression_ratios) > 1 else None),
        ("Chunk size", f"{config.chunk_size} tokens" if config.chunk_size else "none: the context is read whole"),
        ("Position layout", config.position_layout),
        ("Encoder", _adapters(config.encoder_lora)),
        ("Decoder", decoder if has_decoder else None),
        ("Learned vectors around each chunk's slots", config.markers_per_chunk or None),
        *config.card_rows(),
    ]
    return [(name, value) for name, value in rows if value is not None]


def usage(config: CompressorConfig, place: str) -> str:
    """The section on a compressor's use, with code that runs."""
    if config.auto_class == RETRIEVAL_LOADER:
        code = _RETRIEVAL
    elif config.prompt_format == "chat":
        code = _IN_CHAT_WITH_QUESTION if config.compresses_questions else _IN_CHAT
    else:
        code = _WITH_QUESTION if config.compresses_questions else _GENERATION
    code = code.format(
        document_tokenizer="tokenizer" if config.encoder_tokenizer is None else "model.encoder_tokenizer",
        question=_QUESTION_BEHIND_TASK_TOKEN if config.task_token_ids else _QUESTION,
        ratio=config.default_ratio,
    )
    needed = " and `peft`" if config.encoder_lora or config.decoder_lora else ""
    keeps_memories = config.auto_class != RETRIEVAL_LOADER and not config.compresses_questions
    size = " A memory is far larger than its text: it saves reading, not disk space." if keeps_memories else ""
    return (
        f"## Use\n\n```python\n{_LOADING.format(auto_class=config.auto_class, place=place)}\n\n{code}\n```\n\n"
        f"It needs `transformers`{needed}. The code of the model is in this repository.{size}"
    )


def is_hub_id(name: str | None) -> bool:
    """Return whether a model's name is a repository on the Hub; a folder on somebody's machine means nothing to a
    reader."""
    return name is not None and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not os.path.isdir(name)


def public_name(name: str) -> str:
    """A name without where it is on this machine: a Hub id, a path inside the checkout, or a path's last part."""
    if Path(name).is_absolute() or name.startswith((".", "~")) or ".." in Path(name).parts:
        return Path(name).expanduser().resolve().name
    return name.rstrip("/")


def _base(config: CompressorConfig) -> str:
    name = config.base_model_name_or_path
    if not name:
        return "none: trained from the start"
    shown = public_name(name) + (f", revision {config.base_model_revision}" if config.base_model_revision else "")
    if config.external_weights is None:
        return shown
    if is_hub_id(name):
        return f"{shown}, whose weights are fetched from there"
    return f"{shown}, whose weights are not in this folder; pass its own as `base_model` when loading"


def _every(ratios: Sequence[int]) -> str:
    """Return the tokens that there is one vector for, in words: "every 2, 4 or 8 tokens", "each token"."""
    *first, last = map(str, ratios)
    if not first and last == "1":
        return "each token"
    return "every " + (f"{', '.join(first)} or {last}" if first else last) + " tokens"


def _adapters(lora: dict[str, Any] | None) -> str:
    return "no adapters" if lora is None else f"LoRA, rank {lora['rank']}, alpha {lora['alpha']:g}"
