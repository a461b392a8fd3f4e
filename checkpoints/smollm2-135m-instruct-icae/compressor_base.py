# SPDX-License-Identifier: Apache-2.0
# Written by context-compressors from its modules, whose names stand above their parts.

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import inspect
import itertools
import json
import math
import os
import re
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import InitVar, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, BinaryIO, ClassVar, Self

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Pipeline, PreTrainedConfig, PreTrainedModel,
    PreTrainedTokenizerBase, initialization as init
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.generation import GenerationMixin, LogitsProcessorList
from transformers.integrations.peft import maybe_load_adapters
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file, get_checkpoint_shard_files
from transformers.utils.loading_report import LoadStateDictInfo
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from .configuration_icae import (
    CODE_VERSION, CONFIG_SCHEMA, CompressorConfig, POSITION_LAYOUTS, check_choice, key_value_shape, layer_kinds,
    max_positions, nearest_name
)


# checkpoint/gguf_files.py

def gguf_arguments(gguf_file: str | None) -> dict[str, Any]:
    """Return arguments of a model's `from_pretrained` that dequantise a GGUF file's weights; none for `None`."""
    if gguf_file is None:
        return {}
    # Libraries without this class know no other way than to dequantise.
    settings = getattr(transformers, "GgufConfig", None)
    return {"gguf_file": gguf_file} | ({} if settings is None else {"quantization_config": settings(dequantize=True)})


# checkpoint/pretrained_bases.py

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")


def cache_folder() -> Path:
    """`$CONTEXT_COMPRESSORS_CACHE`, else `context_compressors` in `$XDG_CACHE_HOME` or else in `~/.cache`."""
    named = os.environ.get("CONTEXT_COMPRESSORS_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "context_compressors"


def cache_place(name: str) -> Path:
    """Return the folder in the cache for the base of a Hub id, whether or not it is there."""
    return cache_folder() / "bases" / name.replace("/", "--")


def cached_base(name: str | os.PathLike | None) -> Path | None:
    """Folder in the cache with the base of a Hub id; `None` if there is none, or `name` is itself a folder."""
    if name is None or os.path.isdir(name):
        return None
    place = cache_place(os.fspath(name))
    return place if is_complete_base(place) else None


def is_complete_base(folder: Path) -> bool:
    """Return whether a base's folder has weights and tokenizer; a load fetches only the files that it needs itself."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    names |= {"config.json", "tokenizer_config.json"}
    return all((folder / name).is_file() for name in names) and any(
        (folder / name).is_file() for name in _VOCABULARIES
    )


# checkpoint/copied_code.py

def write_code(model_class: type, config_class: type, folder: str | os.PathLike) -> None:
    """Copy the files of two classes, and of what they import from their folder, into another folder."""
    sources = [inspect.getfile(cls) for cls in (model_class, config_class)]
    for file in {file for source in sources for file in (source, *get_relative_import_files(source))}:
        text = Path(file).read_text(encoding="utf-8")
        target = Path(folder) / Path(file).name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


def write_code_and_card(model_class: type, config: Any, folder: str | os.PathLike) -> None:
    """Write what stands beside the weights: the code. Only the package writes a card."""
    write_code(model_class, type(config), folder)


# parts/lora.py

ENCODER, DECODER = "encoder", "decoder"
# One that is active whatever the backbone is at the moment.
SHARED = "shared"
OWN_ADAPTERS = (ENCODER, DECODER, SHARED)
# In the names of the decoder's adapter; a base may have a module `decoder` of its own.
OF_THE_DECODER = re.compile(rf"\.lora_[AB]\.{DECODER}\.")
PASSES = "_context_compressor_passes"


class Passes(threading.local):
    """The adapters, or maps in place of the base's, of this thread's pass; `None` where it makes none."""

    def __init__(self) -> None:
        # In each thread that looks.
        self.names: Any = None

    def __reduce__(self) -> tuple[type, tuple]:
        # A copied model has its own.
        return type(self), ()


class AdaptedByPass:
    """A LoRA layer whose active adapters are those of the thread's own pass, and outside of one those of PEFT."""

    passes: Passes
    adapted_class: type
    _active_adapter: str | list[str]
    _disable_adapters: bool
    # PEFT's own.
    merged_adapters: list[str]
    active_adapters: list[str]
    lora_A: Any  # noqa: N815
    lora_B: Any  # noqa: N815
    lora_dropout: Any
    lora_variant: Any
    lora_bias: dict[str, bool]
    scaling: dict[str, float]
    base_layer: Any
    unmerge: Any
    delete_adapter: Any

    @property
    def active_adapter(self) -> str | list[str]:
        names = self.passes.names
        return self._active_adapter if names is None else [name for name in names if name not in self.merged_adapters]

    @property
    def disable_adapters(self) -> bool:
        return self.passes.names is None and self._disable_adapters

    @property
    def merged(self) -> bool:
        # Of a pass's adapters this project's own are never merged.
        return self.passes.names is None and bool(self.merged_adapters)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return W x + s B A x, with the scale and the sum inside the last product."""
        names = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
        if args or kwargs or self.merged or not all(self._is_plain(name, x) for name in names):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        result = self.base_layer(x)
        rows = result.flatten(0, -2)
        for name in names:
            low = self.lora_A[name](self.lora_dropout[name](x)).flatten(0, -2)
            rows = torch.addmm(rows, low, self.lora_B[name].weight.t(), alpha=self.scaling[name])
        return rows.view_as(result)

    def _is_plain(self, name: str, x: torch.Tensor) -> bool:
        is_cast = torch.is_autocast_enabled(x.device.type) or x.dtype == self.lora_A[name].weight.dtype
        is_variant = name in self.lora_variant or self.lora_bias[name]
        up = self.lora_B[name]
        is_there = type(up) is nn.Linear and not up._forward_pre_hooks and not hasattr(up, "_hf_hook")
        return is_cast and is_there and self.adapted_class.__name__ == "Linear" and not is_variant

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        names = self.active_adapters if adapter_names is None else adapter_names
        super().merge(safe_merge, [name for name in names if name not in OWN_ADAPTERS])  # type: ignore[misc]

    def enable_adapters(self, enabled: bool) -> None:
        if not enabled and self.merged:
            self.unmerge()
        super().enable_adapters(enabled)  # type: ignore[misc]

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: Any) -> Any:
        """Return the layer with this project's own adapters, in whose place PEFT would put the bare map."""
        if merge:
            self.merge(safe_merge, adapter_names)
        foreign = [name for name in self.lora_A if name not in OWN_ADAPTERS]
        self._active_adapter = _of_the_decoder(self)
        for name in foreign:
            self.delete_adapter(name)
        self.merged_adapters.clear()
        return self

    def __reduce__(self) -> tuple:
        return _new_layer, (self.adapted_class,), self.__dict__


@functools.cache
def _adapted_by_pass(layer_class: Any) -> Any:
    members = {"__module__": layer_class.__module__, "adapted_class": layer_class}
    return type(layer_class.__name__, (AdaptedByPass, layer_class), members)


def _new_layer(layer_class: Any) -> Any:
    layer_class = _adapted_by_pass(layer_class)
    return layer_class.__new__(layer_class)


def _of_the_decoder(layer: Any) -> list[str]:
    return [own for own in (DECODER, SHARED) if own in layer.lora_A]


def lora_layers(model: nn.Module, names: Sequence[str] = OWN_ADAPTERS) -> list[tuple[str, Any]]:
    """Return path and module of each LoRA layer below `model` that holds one of some adapters."""
    layers: list[tuple[str, Any]] = [(path, m) for path, m in model.named_modules() if hasattr(m, "lora_A")]
    return [(path, layer) for path, layer in layers if not layer.lora_A.keys().isdisjoint(names)]


def check_adapters(model: nn.Module) -> None:
    """Refuse a model with adapters that are not its own."""
    names = [name.partition(".lora_A.")[2].partition(".")[0] for name, _ in model.named_parameters()]
    if foreign := sorted({name for name in names if name} - set(OWN_ADAPTERS)):
        raise ValueError(
            f"the model holds the adapters {foreign}, which are not its own: save them with the PEFT model's "
            "`save_pretrained`, or take them out with its `merge_and_unload` or `unload` first"
        )


def linear_maps(model: nn.Module) -> list[tuple[str, str]]:
    """Return path and name, its last part, of each linear map inside `model`, adapted or not."""
    adapted = {path for path, _ in lora_layers(model)}
    maps = [(path, path.rpartition(".")[2], module) for path, module in model.named_modules()]
    inside_lora = ("base_layer", *OWN_ADAPTERS)
    return [
        (path, name)
        for path, name, module in maps
        if path in adapted or (isinstance(module, nn.Linear) and name not in inside_lora)
    ]


def inject_lora(model: nn.Module, name: str, settings: dict[str, Any], exclude: Sequence[str] = ()) -> None:
    """Put a LoRA adapter called `name` into the linear maps of `model`, in float32."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError("This checkpoint has LoRA adapters: install `peft` (pip install peft) to use it.") from error
    maps = linear_maps(model)
    known = sorted({map_name for _, map_name in maps})
    targets = known if settings["target_modules"] == "all-linear" else settings["target_modules"]
    if missing := [target for target in targets if target not in known]:
        raise ValueError(f"`target_modules` {missing} are not linear maps of {type(model).__name__}; it has {known}")
    config = LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=settings["dropout"],
        target_modules=[f"base.{path}" for path, map_name in maps if map_name in targets and path not in exclude],
    )
    # In a module without a configuration, by which PEFT would look for maps of experts under the same names.
    inject_adapter_in_model(config, nn.ModuleDict({"base": model}), adapter_name=name)
    for parameter_name, parameter in model.named_parameters():
        if f".{name}." in parameter_name and "lora_" in parameter_name:
            parameter.data = parameter.data.float()
            # Without the mark, the backbone's own initialisation would overwrite the zeros of B.
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own mark
    layers = [layer for _, layer in lora_layers(model)]
    passes = Passes()
    setattr(model, PASSES, (passes, layers[0]))
    for layer in layers:
        if not isinstance(layer, AdaptedByPass):
            kind: Any = type(layer)
            layer.__class__ = _adapted_by_pass(kind)
        layer.passes = passes
        layer._active_adapter = _of_the_decoder(layer)
        for module in (*layer.lora_A.values(), *layer.lora_B.values()):
            module._is_hf_initialized = True


def initialize_lora(model: nn.Module, names: tuple[str, ...] = OWN_ADAPTERS) -> None:
    """Give the adapters their start values: A Kaiming-uniform, B zero."""
    for _, layer in lora_layers(model):
        for name in names:
            if name in layer.lora_A:
                layer.reset_lora_parameters(name, init_lora_weights=True)


@contextmanager
def activated(passes: Passes, names: Any) -> Iterator[None]:
    """Inside this block the thread's pass has these."""
    before, passes.names = passes.names, names
    try:
        yield
    finally:
        passes.names = before


def use_adapter(model: nn.Module, name: str | None) -> AbstractContextManager[None]:
    """Activate `name`, and a shared adapter, alone of this project's in `model`, in this thread and a `with` block."""
    noted: Any = vars(model).get(PASSES)
    if noted is None:
        return nullcontext()
    passes, layer = noted
    foreign: list[str] = []
    if not layer._disable_adapters:
        # PEFT switches all layers together, also those that have no adapter of the name.
        active = layer._active_adapter
        foreign = [other for other in ([active] if isinstance(active, str) else active) if other not in OWN_ADAPTERS]
    # Some of PEFT's adapters scale what the base's map gives, and this project's own are none of that.
    return activated(passes, foreign if name is None else [*foreign, name, SHARED])


class CheckpointWithAdapters:
    """A gradient-checkpointing function that recomputes with the adapters that were active in the forward pass."""

    def __init__(self, model: nn.Module, checkpoint: Callable[..., Any]):
        self.checkpoint = checkpoint
        # An attribute, not a closure: a deep copy of the model must switch its own layers, not the original's.
        marks = (getattr(module, PASSES, None) for module in model.modules())
        self.passes = [mark[0] for mark in marks if mark is not None]

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if torch.compiler.is_compiling():
            # What is recomputed is the traced pass, whose adapters are fixed.
            return self.checkpoint(function, *args, use_reentrant=False)
        active = [(passes, passes.names) for passes in self.passes]
        return self.checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _all_activated(active))
        )


@contextmanager
def _all_activated(active: Sequence[tuple[Passes, list[str] | None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for passes, names in active:
            stack.enter_context(activated(passes, names))
        yield


@torch.no_grad()
def merge_lora(model: nn.Module, name: str) -> None:
    """Add the adapter `name`, and one that is shared, to the weights it sits on, and take all LoRA layers out."""
    for path, layer in lora_layers(model):
        if names := [own for own in (name, SHARED) if own in layer.lora_A]:
            layer.adapted_class.merge(layer, safe_merge=True, adapter_names=names)
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer.get_base_layer())
    vars(model).pop(PASSES, None)


# parts/text_ids.py

# In a chat the document's words and the prompt are one message of the user; this stands between them.
DOCUMENT_END = "\n\n"
# Stands for a text while a chat template is filled; private characters, which no template changes.
_MARK = "\ue000{}\ue001"
# Of most texts, more than there are; tokens behind those that are wanted, so that none of these is a cut word's.
_CHARACTERS_PER_TOKEN, _MORE_TOKENS = 16, 64
# Copies of tokenizers by whether they split special tokens.
_COPIES: dict[bool, weakref.WeakKeyDictionary[PreTrainedTokenizerBase, PreTrainedTokenizerBase]] = {
    splits: weakref.WeakKeyDictionary() for splits in (True, False)
}


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any:
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
    """Return the tokens that `tokenizer(document)` puts in front of a document: BOS for most tokenizers."""
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


def context_opening(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what a compressor reads in front of a document: `context_start_ids`, or what opens the text."""
    if not config.opens_context:
        return context_start_ids(tokenizer)
    return prompt_ids(tokenizer, [""], config.prompt_format).head or [start_token_id(tokenizer)]


def document_ids(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
    """Return the token ids of a document as the checkpoint was trained to compress it."""
    return passages_ids(config, tokenizer, [document])[0][0]


def decoder_document_ids(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    document: str | Sequence[str],
    max_tokens: int | None = None,
) -> list[int]:
    """Return a document's ids for `question_ids`: what opens a text is the prompt's, or a task token follows."""
    passages = cut_passages(passages_ids(config, tokenizer, [document])[0], max_tokens)
    opening = 0 if config.task_token_ids else len(context_opening(config, tokenizer))
    return [token for passage in passages for token in passage[opening:]]


def passages_ids(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str | Sequence[str]],
    most: int | None = None,
) -> list[list[list[int]]]:
    """Return the token ids of each document's passages, each as a document of its own; a text is one passage."""
    passages = [[document] if isinstance(document, str) else list(document) for document in documents]
    # Tokenized apart, as in training.
    start = document_start(config, tokenizer)
    end = context_end_ids(tokenizer) if config.is_encoder_decoder else []
    rows = iter(encode_all(tokenizer, [passage for document in passages for passage in document], most))
    return [[[*start, *next(rows), *end] for _ in document] for document in passages]


def document_start(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that open every document: BOS or the like, and the configuration's `context_prefix`."""
    return context_opening(config, tokenizer) + prefix_ids(tokenizer, config.context_prefix)


def cut_passages(
    passages: Sequence[Sequence[int]], num_tokens: int | None, keeps_end: bool = False
) -> list[list[int]]:
    """Return the first or last tokens of a document's passages, without passages of which none is left."""
    left, kept = num_tokens, []
    for passage in reversed(passages) if keeps_end else passages:
        if left is not None:
            passage = passage[max(0, len(passage) - left) :] if keeps_end else passage[:left]
            left -= len(passage)
        kept += [list(passage)] if passage else []
    return kept[::-1] if keeps_end else kept


def question_ids(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    prompt: str | None = None,
    document_ids: Sequence[int] | None = None,
) -> list[int]:
    """Return the token ids that stand between a memory and the answer, or those of a question behind a whole document."""
    prompt = config.question_prompt if prompt is None else prompt
    if prompt.count("{question}") != 1:
        raise ValueError(f"`prompt` must hold {{question}} exactly once, got {prompt!r}")
    # str.format would trip over braces inside the question.
    ids = prompt_ids(tokenizer, [prompt.replace("{question}", question)], config.prompt_format)
    head, tail = start_ids(config, tokenizer, ids.head), ids.turns[0]
    if document_ids is not None:
        return _with_document(config, tokenizer, head, document_ids, tail)
    return tail if config.opens_context else [*head, *tail]


def _with_document(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    head: Sequence[int],
    document_ids: Sequence[int],
    tail: Sequence[int],
) -> list[int]:
    if config.continuation_token_id is not None:
        return [*document_ids, *head, *tail]
    return [*(head or [start_token_id(tokenizer)]), *document_ids, *tail]


def start_ids(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, head: Sequence[int], task: str = "continuation"
) -> list[int]:
    """Return what a text behind slots starts with: the method's task token, or else the template's opening in a chat
    and elsewhere BOS, or nothing where `config.bos_before_text` is false."""
    token = config.reconstruction_token_id if task == "reconstruction" else config.continuation_token_id
    if token is not None:
        has_bos = config.bos_before_task_token and not head
        return [*[start_token_id(tokenizer)][:has_bos], token, *head]
    return list(head) or [start_token_id(tokenizer)][: config.bos_before_text]


def message_ids(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    messages: str | Sequence[Mapping[str, str]],
    document_ids: Sequence[int] | None = None,
) -> list[int]:
    """Return the token ids of a conversation behind a memory, or behind a whole document."""
    if not isinstance(messages, str):
        messages = list(messages)
        for message in messages:
            texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"a message must be a mapping with the texts `role` and `content`, got {message!r}")
        if len(messages) == 1 and messages[0]["role"] == "user":
            messages = messages[0]["content"]
    if isinstance(messages, str):
        plain = kept_text_tokenizer(tokenizer) if config.task_token_ids else tokenizer
        return question_ids(config, plain, messages, document_ids=document_ids)
    if not messages:
        raise ValueError("`messages` is empty: give a question, or messages with `role` and `content`")
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last of `messages` must be the user's, who asks, got {messages[-1]!r}")
    if config.prompt_format == "chat":
        chat = chat_ids(tokenizer, messages)
        if document_ids is not None:
            head = start_ids(config, tokenizer, chat.head)
            return _with_document(config, tokenizer, head, document_ids, chat.turns[0])
        if not config.opens_context:
            return [*start_ids(config, tokenizer, chat.head), *chat.turns[0]]
        if chat.head != prompt_ids(tokenizer, [""], "chat").head:
            raise ValueError("the memory holds the opening of the chat: leave out what `messages` say before the user")
        return chat.turns[0]
    contents = [message["content"] for message in messages]
    # Nobody's words are special tokens.
    if any(name in content for content in contents for name in tokenizer.all_special_tokens):
        messages = [{**message, "content": _MARK.format(place)} for place, message in enumerate(messages)]
    ids = _filled(tokenizer, _templated(tokenizer, messages), contents)
    start = [] if config.continuation_token_id is None else [config.continuation_token_id]
    if document_ids is None and not start:
        return ids
    # A task token takes the place of BOS, and a document stands behind it.
    ids = ids[1:] if ids[0] == tokenizer.bos_token_id else ids
    return [*start, *ids] if document_ids is None else _with_document(config, tokenizer, start, document_ids, ids)


# --- prompts and chat templates ---


@dataclass(frozen=True)
class PromptIds:
    """Token ids around a document and between the answers about it."""

    head: list[int]
    turns: list[list[int]]
    end: int


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], prompt_format: str = "plain") -> PromptIds:
    """Token ids of prompts that are asked one after the other about one document."""
    if prompt_format == "plain":
        return PromptIds([], [encode(tokenizer, prompt) for prompt in prompts], tokenizer.eos_token_id)
    messages: list[dict[str, str | None]] = []
    for prompt in prompts:
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": None}]
    return chat_ids(tokenizer, messages)


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str | None]]) -> PromptIds:
    """A conversation in the chat template, cut where the document and the answers that are `None` stand."""
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template, and the prompt format is 'chat': ask an instruct model")
    document, answer = _MARK.format("document"), _MARK.format("answer")
    contents: list[str] = []
    filled: list[dict[str, Any]] = []
    for message in messages:
        content, mark = message["content"] or "", _MARK.format(len(contents))
        if message["role"] == "user" and not any(document in other["content"] for other in filled):
            mark, content = document + mark, DOCUMENT_END + content
        elif message["content"] is None:
            mark = answer
        contents.append(content)
        filled.append({**message, "content": mark})
    text = _templated(tokenizer, filled, add_generation_prompt=False)
    opening = _templated(tokenizer, filled)
    if messages[-1]["role"] != "assistant":
        text = opening + answer
    asked = [_MARK.format(place) for place, message in enumerate(messages) if message["role"] == "user"]
    if text.count(document) != 1 or any(mark not in text for mark in asked):
        raise ValueError("the tokenizer's chat template leaves out what the user says, so no document can stand in it")
    head, _, rest = text.partition(document)
    parts = [_filled(tokenizer, part, contents) for part in rest.split(answer)]
    end = parts[-1][0] if parts[-1] and parts[-1][0] in tokenizer.all_special_ids else tokenizer.eos_token_id
    turns = [part[1:] if index and part[:1] == [end] else part for index, part in enumerate(parts[:-1])]
    return PromptIds(_filled(tokenizer, head, contents), turns, end)


def _templated(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:
        raise ValueError(f"the tokenizer's chat template refuses these messages: {error}") from error


def _filled(tokenizer: PreTrainedTokenizerBase, text: str, contents: Sequence[str]) -> list[int]:
    here = [(mark, content) for place, content in enumerate(contents) if (mark := _MARK.format(place)) in text]
    names = tokenizer.all_special_tokens
    if not any(name in content for _, content in here for name in names):
        for mark, content in here:
            text = text.replace(mark, content)
        return prefix_ids(tokenizer, text)
    ids: list[int] = []
    for mark, content in here:
        before, _, text = text.partition(mark)
        ids += prefix_ids(tokenizer, before) + words_ids(tokenizer, content)
    return ids + prefix_ids(tokenizer, text)


# parts/packing.py

# So few that they are not worth another pass.
_FREE_PADS = 512


@dataclass
class PackedSequence:
    """A batch of `[pads, slots, text]` rows, or of `[slots, text, pads]`."""

    attention_mask: Tensor
    order: Tensor | None
    text_places: Tensor
    pad_in_front: bool = False
    is_full: bool = False
    pads_behind: bool = False

    def arrange(self, joined: Tensor) -> Tensor:
        """Bring `(batch_size, num_slots + num_text_tokens, ...)` from `[slots, text]` order into the rows' order."""
        if self.pad_in_front:
            joined = torch.nn.functional.pad(joined, (0,) * 2 * (joined.dim() - 2) + (1, 0))
        if self.order is None:
            return joined
        return take_places(joined, self.order)

    def text_states(self, states: Tensor) -> Tensor:
        """The states `(batch_size, num_text_tokens, hidden_size)` that belong to the text tokens."""
        if self.order is None:
            return states[:, states.shape[1] - self.text_places.shape[1] :]
        return take_places(states, self.text_places)

    def inputs(self, embeddings: Tensor, position_ids: Tensor) -> dict[str, Any]:
        """Arguments of [`run_backbone`] for `[slots, text]`, `(batch_size, num_slots + num_text_tokens, ...)` each."""
        return {
            "inputs_embeds": self.arrange(embeddings),
            "attention_mask": self.attention_mask,
            "position_ids": self.arrange(position_ids) * self.attention_mask,
            "is_full": self.is_full,
            "is_right_padded": self.pads_behind,
        }

    def cut_to_text(self, outputs: Any) -> None:
        """Leave of a backbone's outputs the states that belong to the text tokens."""
        outputs.last_hidden_state = self.text_states(outputs.last_hidden_state)
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(
                # Of a selection of layers the others are `None`.
                None if states is None else self.text_states(states)
                for states in outputs.hidden_states
            )


def take_places(states: Tensor, places: Tensor, dim: int = 1) -> Tensor:
    """Return whole vectors of some places `(batch_size, num_taken)` in dimension `dim`, faster than
    `take_along_dim`."""
    shape, sizes = [1] * states.dim(), list(states.shape)
    shape[0], shape[dim] = places.shape
    sizes[dim] = places.shape[1]
    return states.gather(dim, places.reshape(shape).expand(sizes))


def pack(
    slot_mask: Tensor,
    text_mask: Tensor,
    moves_first: Tensor | None = None,
    pad_in_front: bool = False,
    is_full: bool = False,
    longest: int | None = None,
    pads_behind: bool = False,
) -> PackedSequence:
    """Order slots and text into rows, without a wait for the device."""
    if pad_in_front:
        slot_mask = torch.nn.functional.pad(slot_mask, (1, 0))
    joined_mask = torch.cat([slot_mask, text_mask], dim=1)
    num_slots = slot_mask.shape[1]
    if is_full and moves_first is None and not pad_in_front:
        places = torch.arange(joined_mask.shape[1], device=joined_mask.device)[num_slots:]
        return PackedSequence(joined_mask, None, places.expand(joined_mask.shape[0], -1), is_full=True)
    text_rank = torch.full_like(text_mask, 3)
    if moves_first is not None:
        text_rank = text_rank.masked_fill(moves_first, 1)
    rank = torch.cat([torch.full_like(slot_mask, 2), text_rank], dim=1)
    order = torch.where(joined_mask == 1, rank, 4 if pads_behind else 0).argsort(dim=1, stable=True)
    places = order.argsort(dim=1)
    text_places = places[:, num_slots:]
    if moves_first is not None:
        last_moved = moves_first & (moves_first.flip(1).cumsum(dim=1).flip(1) == 1)
        text_places = text_places + last_moved * slot_mask.sum(dim=1, keepdim=True)
    is_full = is_full and not pad_in_front
    if longest is not None:
        width = longest + pad_in_front
        spare = 0 if pads_behind else joined_mask.shape[1] - width
        order, text_places = order[:, spare : spare + width], (text_places - spare).clamp(0, width - 1)
    return PackedSequence(joined_mask.gather(1, order), order, text_places, pad_in_front, is_full, pads_behind)


def reads_falling_ids_as_packed(config: Any, batch_size: int) -> bool:
    """Return whether the attention would take one row whose position ids fall somewhere for several packed rows."""
    return batch_size == 1 and "flash" in (config._attn_implementation or "")


def through_first(input_ids: Tensor, text_mask: Tensor, pattern: Sequence[int]) -> Tensor:
    """Mark the text tokens up to the end of the first occurrence of the ids `pattern`, `(batch_size, num_text_tokens)`
    bool; none in a row that does not hold them."""
    if input_ids.shape[1] < len(pattern):
        return torch.zeros_like(input_ids, dtype=torch.bool)
    # A pad may have the id of a token that is looked for.
    ids = right_padded(input_ids.masked_fill(text_mask == 0, -1), text_mask)
    starts = (ids.unfold(1, len(pattern), 1) == torch.tensor(pattern, device=ids.device)).all(dim=2)
    num_tokens = (starts.int().argmax(dim=1, keepdim=True) + len(pattern)) * starts.any(dim=1, keepdim=True)
    return (text_mask.cumsum(dim=1) <= num_tokens) & text_mask.bool()


def text_positions(text_mask: Tensor) -> Tensor:
    """Positions of text tokens among themselves, `(batch_size, num_text_tokens)`: pads do not count."""
    return (text_mask.cumsum(dim=1) - 1).clamp(min=0)


def left_padded(tensor: Tensor, mask: Tensor) -> Tensor:
    """Move the pads of `(batch_size, length)` rows to the left."""
    return tensor.gather(1, mask.argsort(dim=1, stable=True))


def right_padded(tensor: Tensor, mask: Tensor) -> Tensor:
    """Move the pads of `(batch_size, length)` rows to the right."""
    return tensor.gather(1, mask.argsort(dim=1, stable=True, descending=True))


def length_batches(
    lengths: Sequence[int],
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    most_padding: float = math.inf,
    counts: Sequence[int] | None = None,
    in_order: bool = False,
) -> list[list[int]]:
    """Cut rows into batches by length, the longest first, and return the rows of each: what does not fit is found at
    once."""
    order = range(len(lengths)) if in_order else sorted(range(len(lengths)), key=lambda row: -lengths[row])
    batches: list[list[int]] = []
    size = longest = total = 0
    for row in order:
        count = 1 if counts is None else counts[row]
        if batches:
            size, longest, total = size + count, max(longest, lengths[row]), total + count * lengths[row]
            padded = size * longest
            is_full = size > (batch_size or size) or padded > (batch_tokens or padded)
            if not is_full and padded - total <= max(_FREE_PADS, most_padding * total):
                batches[-1].append(row)
                continue
        batches.append([row])
        size, longest, total = count, lengths[row], count * lengths[row]
    return [sorted(batch) for batch in batches]


# memory/memory_quantization.py

# Bits of keys, and of values and embeddings.
QUANTIZATIONS = {"int8": (8, 8), "int4": (4, 4), "int2": (4, 2)}
_DTYPES = {8: torch.int8, 4: torch.uint8, 2: torch.int16}
_BITS = {dtype: bits for bits, dtype in _DTYPES.items()}
_NAMES = {bits: name for name, (_, bits) in QUANTIZATIONS.items()}
# In standard deviations.
_STEPS = {4: 0.3352, 2: 0.9957}
_LARGEST_BLOCK = 128
# The first 128 binary digits of pi's fraction.
_SIGNS = 0x243F6A8885A308D313198A2E03707344


def quantization_of(dtype: torch.dtype) -> str | None:
    """The form that values or embeddings of this type are in, `None` for floating-point ones."""
    return _NAMES.get(_BITS.get(dtype, 0))


def dtype_of_keys(dtype: torch.dtype) -> torch.dtype:
    """The type of the keys beside values of this type."""
    name = quantization_of(dtype)
    return dtype if name is None else _DTYPES[QUANTIZATIONS[name][0]]


def values_per_item(bits: int) -> int:
    """Values that stand in one integer."""
    return _DTYPES[bits].itemsize * 8 // bits


def width_of(tensor: Tensor) -> int:
    """Values in the last dimension."""
    bits = _BITS.get(tensor.dtype)
    return tensor.shape[-1] * (1 if bits is None else values_per_item(bits))


def num_blocks(width: int) -> int:
    """Blocks of so many values: of 128 if that divides it, or else of the next smaller power of two that does."""
    return width // math.gcd(width, _LARGEST_BLOCK)


def quantize_tensor(tensor: Tensor, mask: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return a carrier tensor as integers and scales, without gradients; zeros at padding slots."""
    per_item, half, width = values_per_item(bits), 1 << (bits - 1), tensor.shape[-1]
    if width % per_item:
        raise ValueError(f"{bits} bits keep {per_item} values in each integer, which {width} values do not fill")
    real = mask.reshape(len(mask), *[1] * (tensor.dim() - 3), -1, 1).bool()
    states = tensor.detach().float().where(real, 0)
    blocks = _rotated(states.unflatten(-1, (num_blocks(width), -1)))
    if bits == 8:
        steps = blocks.abs().amax(dim=-1, keepdim=True) / (half - 0.5)
    else:
        steps = blocks.square().mean(dim=-1, keepdim=True).sqrt() * _STEPS[bits]
    integers = (blocks / steps.where(steps > 0, 1)).floor().clamp(-half, half - 1)
    products = ((integers + 0.5) * blocks).sum(dim=-1)
    scales = (blocks.square().sum(dim=-1) / products.where(products > 0, 1)).half()
    if scales.isinf().any():
        raise ValueError(f"the memory holds {states.abs().max().item():.4g}, too large for float16 scales")
    codes = (integers + half).to(torch.int32).flatten(-2).unflatten(-1, (-1, per_item))
    items = (codes << _shifts(bits, codes.device)).sum(dim=-1, dtype=torch.int32)
    return items.where(real, 0).to(_DTYPES[bits]), scales


def dequantize_tensor(items: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values that the items and scales of `quantize_tensor` stand for."""
    bits = _BITS[items.dtype]
    codes = items.to(torch.int32)[..., None] >> _shifts(bits, items.device) & (1 << bits) - 1
    levels = codes.flatten(-2).float() - ((1 << (bits - 1)) - 0.5)
    blocks = levels.unflatten(-1, (scales.shape[-1], -1)) * scales.float()[..., None]
    return _rotated(blocks, is_back=True).flatten(-2)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(values_per_item(bits), device=device, dtype=torch.int32) * bits


def _rotated(blocks: Tensor, is_back: bool = False) -> Tensor:
    size = blocks.shape[-1]
    signs = blocks.new_tensor([1 - 2 * (_SIGNS >> (127 - place) & 1) for place in range(size)])
    hadamard = blocks.new_ones(1, 1)
    while len(hadamard) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    hadamard = hadamard * size**-0.5
    return (blocks @ hadamard) * signs if is_back else (blocks * signs) @ hadamard


# parts/base_pass.py

# "cache" from version 5.24 on: the argument of its models and of `generate`, and the field of their outputs.
CACHE = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in ("cache", "past_key_values"))
# Where a backbone keeps one weight that trains and one that stays frozen.
_WEIGHTS = "_context_compressor_trained_and_frozen"
# Implementations that take a mask with a value for every pair of places.
PAIRWISE_MASKS = ("eager", "sdpa")
# Implementations that compute pads, too.
_WITH_PADS = (*PAIRWISE_MASKS, "flex_attention")
# Their positions are biases, which they compute from a mask of two dimensions.
_ALIBI = ("bloom", "falcon", "mpt")
# The library remembers on the model that its layers have hooks for further outputs.
_HOOKED = "_output_capturing_hooks_installed"


def run_backbone(
    backbone: PreTrainedModel, is_full: bool = False, is_right_padded: bool = False, **inputs: Any
) -> Any:
    """One pass of a language model in which every query sees at least one key."""
    is_causal, mask = inputs.get("is_causal"), inputs.get("attention_mask")
    view = for_one_call(backbone, is_causal)
    config, has_mask = view.config, isinstance(mask, Tensor) and mask.dim() == 2
    # FlashAttention removes pads by their mask.
    needs_no_mask = config.model_type not in _ALIBI and config._attn_implementation in _WITH_PADS
    if not is_full and is_right_padded and has_mask and is_causal is not False and needs_no_mask:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    elif not is_full:
        inputs["attention_mask"] = seeing_mask(view, **inputs)
    return view(**inputs)


def for_one_call(backbone: PreTrainedModel, is_causal: bool | None = None) -> PreTrainedModel:
    """The backbone itself, or a view for one call where that call would change the backbone's settings."""
    rotary: Any = getattr(backbone, "rotary_emb", None)
    kinds = getattr(rotary, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    follows = any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds)
    if not (follows or is_causal is not None) or torch.compiler.is_compiling():
        return backbone
    if not isinstance(backbone, PreTrainedModel):
        return backbone
    if follows:
        maybe_install_capturing_hooks(backbone)
    view = object.__new__(type(backbone))
    members = dict(vars(backbone))
    for name, value in members.items():
        # What an instance has in place of its class's methods, as when weights are spread over devices.
        if isinstance(value, types.MethodType) and value.__self__ is backbone:
            members[name] = types.MethodType(value.__func__, view)
        elif isinstance(value, functools.partial) and value.args and value.args[0] is backbone:
            members[name] = functools.partial(value.func, view, *value.args[1:], **value.keywords)
    # Compiled for the shared model; and nobody asks a view for more than its states where no hooks are.
    view.__dict__.update(members, config=copy.copy(backbone.config), _compiled_call_impl=None, **{_HOOKED: True})
    if is_causal is not None:
        view.config.is_causal = is_causal
    if follows:
        rotary = copy.copy(rotary)
        rotary._buffers = {name: buffer.clone() for name, buffer in rotary._buffers.items()}
        view._modules = {**backbone._modules, "rotary_emb": rotary}
    return view


def seeing_mask(
    backbone: PreTrainedModel,
    attention_mask: Any = None,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    **inputs: Any,
) -> Any:
    """Return the mask of a pass as the backbone would make it, with queries that see nothing seeing something."""
    config, cache = backbone.config, inputs.get(CACHE)
    states: Any = input_ids if inputs_embeds is None else inputs_embeds
    implementation = config._attn_implementation
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or config.model_type in _ALIBI:
        return attention_mask
    if implementation not in _WITH_PADS:
        return attention_mask
    notes_causality = torch.compiler.is_compiling() and inputs.get("is_causal") is not None
    earlier = getattr(config, "is_causal", None)
    if notes_causality:
        config.is_causal = inputs["is_causal"]
    if inputs_embeds is None:
        # Only shape, type and device are read.
        weight = backbone.get_input_embeddings().weight
        inputs_embeds = weight.new_empty((), device=states.device).expand(*states.shape, weight.shape[1])
    offset = 0 if cache is None else cache.get_seq_length()
    masks = create_masks_for_generate(config, inputs_embeds, attention_mask, cache)
    if notes_causality and earlier is None:
        # It would hold for the passes that follow, too.
        del config.is_causal
    elif notes_causality:
        config.is_causal = earlier
    if isinstance(masks, dict):
        return {kind: with_sight(mask, offset) for kind, mask in masks.items()}
    return attention_mask if masks is None else with_sight(masks, offset)


def with_sight(mask: Any, offset: int | Tensor = 0) -> Any:
    """A mask whose queries that see nothing see all keys, or with flex attention themselves."""
    if isinstance(mask, Tensor) and mask.dim() == 4:
        if mask.is_floating_point():
            return mask.masked_fill((mask < 0).all(dim=-1, keepdim=True), 0)
        return mask | ~mask.any(dim=-1, keepdim=True)
    if mask is None or isinstance(mask, Tensor):
        return mask
    from torch.nn.attention.flex_attention import create_block_mask, or_masks

    def itself(batch_index: Tensor, head_index: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key == query + offset

    num_rows, _, num_queries, num_keys = mask.shape
    device = mask.kv_num_blocks.device
    return create_block_mask(or_masks(mask.mask_mod, itself), num_rows, None, num_queries, num_keys, device)


def mask_for(config: Any, visible: Tensor, near: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Return a mask `(num_rows, num_places, num_places)` of visible places in the form that a backbone takes."""
    full, near = (_attention_bias(mask, config, dtype) for mask in (visible, near))
    return {"full_attention": full, "sliding_attention": near} if layer_kinds(config) else near


def _attention_bias(visible: Tensor, config: Any, dtype: torch.dtype) -> Tensor:
    visible = with_sight(visible[:, None])
    if config._attn_implementation == "sdpa":
        return visible
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)


def note_trained_weights(backbone: nn.Module) -> None:
    """Keep in mind one map with a weight of the base's own that trains, and one that stays frozen."""
    examples: dict[bool, tuple[nn.Module, str]] = {}
    for path, module in backbone.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and ".lora_" not in path:
                examples.setdefault(parameter.requires_grad, (module, name))
    # Where they are, not the weights themselves: loading puts others in their place.
    backbone.__dict__[_WEIGHTS] = (examples[True], examples[False]) if len(examples) == 2 else None


def in_base_precision(backbone: nn.Module) -> AbstractContextManager[Any]:
    """Autocast to the type of the backbone's frozen weights inside this block, if those that train have another."""
    weights = backbone.__dict__.get(_WEIGHTS)
    if weights is None:
        return nullcontext()
    trained, frozen = (getattr(module, name) for module, name in weights)
    if trained.dtype == frozen.dtype or torch.is_autocast_enabled(frozen.device.type):
        return nullcontext()
    # Autocast's cache of cast weights is one for all threads: one made without gradients would serve a training step.
    return torch.autocast(frozen.device.type, dtype=frozen.dtype, cache_enabled=False)


def embedding_scale(table: nn.Module) -> float:
    """Return the number that a table of token embeddings multiplies its rows with, as Gemma's does."""
    return getattr(table, "scalar_embed_scale", 1.0)


def as_head_takes(head: nn.Module, states: Tensor) -> Tensor:
    """Return hidden states in the type of an LM head's weight, which may train or be frozen apart from the
    backbone."""
    weight: Any = getattr(head, "weight", None)
    # A quantized map sees to it by itself.
    is_plain = weight is not None and weight.is_floating_point() and weight.dtype.itemsize > 1
    return states if not is_plain or torch.is_autocast_enabled(states.device.type) else states.to(weight.dtype)


def head_logits(head: nn.Module, states: Tensor) -> Tensor:
    """Return logits `(..., vocab_size)` of hidden states `(..., hidden_size)`."""
    logits = head(as_head_takes(head, states.reshape(-1, states.shape[-1])))
    return logits.view(*states.shape[:-1], logits.shape[-1])


# checkpoint/fingerprints.py

_PARAMETERS, _RUNS, _RUN = 16, 2, 16
# Relative error of the coarsest rounding that is taken for one. Mean over the matrices of SmolLM2-135M and two small
# Llamas: 8 bits 0.005 to 0.009, 5 bits 0.038 to 0.046, 4 bits 0.078 to 0.16, 3 bits 0.16 to 0.24.
_MOST_ROUNDED = 0.2
# What a rounding leaves lies on a grid of so many steps at most, in each run of neighbours:
# 8 bits as far as float32 tells, 5 bits as far as bfloat16 does.
_FINE, _COARSE, _OFF, _OFF_A_STEP = 255, 31, 0.02, 3 * 2.0**-9
# Root mean square of what a rounding takes away, in steps: 0.29 where all of a step is alike. A fine-tuned model is
# moved off the grid by less than that, or by more.
_TAKEN = (0.12, 0.5)
# Values that are summed at once: few enough for a processor's cache.
_CHUNK = 1 << 20
# Fields that change neither slots nor how they are read: where weights come from, what trains, how texts are worded,
# how fast and in what type it computes, when a text ends.
_IGNORED_FOR_MEMORIES = {
    *("base_model_name_or_path", "base_model_revision", "encoder_name_or_path", "encoder_revision"),
    *("encoder_tokenizer", "compression_ratios", "trainable_parameters", "training_stage"),
    *("prompts", "prompt_format", "context_prefix", "bos_before_text"),
    *("eos_token_id", "pad_token_id"),
    *("external_weights", "parent_model_name_or_path", "measured_chunks", "code_version", "config_schema"),
    *("auto_map", "custom_pipelines", "architectures", "model_type", "transformers_version"),
    "segment_windows",
    # Stored by earlier versions.
    "restores_context_start",
    *("use_cache", "dtype", "torch_dtype", "quantization_config"),
    *("output_hidden_states", "output_attentions", "return_dict"),
}
# Of these, what changes answers.
_IGNORED_FOR_ANSWERS = _IGNORED_FOR_MEMORIES - {
    *("prompts", "prompt_format", "context_prefix", "bos_before_text", "eos_token_id"),
}


def weights_fingerprint(model: Any, of_answers: bool = False, stored: Mapping[str, Tensor] | None = None) -> str:
    """Sixteen hexadecimal digits from every value of every parameter, the same in float32 and bfloat16."""
    digest = hashlib.sha256()
    is_reader = not of_answers and model.config.has_frozen_memories
    weights: dict[torch.device, Tensor] = {}
    for name, parameter in sorted(model.named_parameters()):
        if is_reader and OF_THE_DECODER.search(name):
            continue
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        with at_hand(module):
            values = full_tensor(module.get_parameter(own).detach())
        source = (stored or {}).get(name)
        if source is not None and source.shape == values.shape and source.to(values).equal(values):
            values = source.to(values.device)
        if values.device not in weights:
            weights[values.device] = _weights(values.device)
        sums = [_weighted_sum(chunk, weights[values.device]) for chunk in values.reshape(-1).split(_CHUNK)]
        digest.update(f"{name}{tuple(parameter.shape)}{torch.stack(sums).tolist() if sums else []}".encode())
    return digest.hexdigest()[:16]


def at_hand(module: nn.Module) -> AbstractContextManager[Any]:
    """Inside this block a module's own parameters have their values, also those that accelerate has offloaded."""
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def _weights(device: torch.device) -> Tensor:
    return torch.arange(1, _CHUNK // 2, 2, device=device)


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    values = values.to(torch.bfloat16)
    if len(values) % 4:
        values = nn.functional.pad(values, (0, -len(values) % 4))
    elif values.storage_offset() % 4:
        values = values.clone()
    words = values.view(torch.int64)
    return (words * weights[: len(words)]).sum()


def settings_fingerprint(config: PreTrainedConfig, of_answers: bool = False) -> str:
    """Eight hexadecimal digits from every field of a configuration that changes slots or how they are read."""
    settings = _settings(config, _IGNORED_FOR_ANSWERS if of_answers else _IGNORED_FOR_MEMORIES)
    if not of_answers and (config.has_frozen_memories or config.shared_adapter):
        settings.pop("decoder_lora", None)
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _settings(config: PreTrainedConfig, ignored: set[str]) -> dict[str, Any]:
    kind: Any = type(config)
    usual = _usual_settings(kind)
    settings = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            settings[name] = {"model_type": value.model_type, **_settings(value, ignored)}
        elif not name.startswith("_") and name not in ignored and (name not in usual or value != usual[name]):
            settings[name] = value
    return settings


@functools.cache
def _usual_settings(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    return vars(kind())


def sample(model: nn.Module, dtype: torch.dtype) -> Tensor:
    """Runs of neighbouring values of some 16 parameters, spread over the model: (num_parameters, 2, 16) in float32."""
    kinds: dict[str, list[nn.Parameter]] = {}
    for name, parameter in sorted(model.named_parameters()):
        if parameter.shape[-1] >= _RUN:
            kinds.setdefault(re.sub(r"\d+", "", name), []).append(parameter)
    count = min(max(_PARAMETERS, len(kinds)), sum(map(len, kinds.values())))
    runs = []
    # Kinds take turns, from the first layers to the last.
    for index, kind in zip(range(count), itertools.cycle(kinds.values()), strict=False):
        parameter = kind[index * len(kind) // count]
        rows = full_tensor(parameter.detach()).reshape(-1, parameter.shape[-1])
        for run in range(_RUNS):
            # Quantised matrices have one scale for 16 neighbours of a row or for more, from such a place on.
            start = run * (rows.shape[1] // (2 * _RUN)) * _RUN
            runs.append(rows[(run + 1) * len(rows) // (_RUNS + 1), start : start + _RUN].to(dtype).float().cpu())
    return torch.stack(runs).view(count, _RUNS, _RUN) if runs else torch.empty(0, _RUNS, _RUN)


def _sample_type(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def rounding(model: nn.Module, recorded: str, dtype: torch.dtype) -> tuple[float, bool]:
    """Measure the distance from the model that [`sample_text`] recorded, and tell whether a rounding explains it."""
    stored_as = _sample_type(dtype)
    expected = torch.frombuffer(bytearray(base64.b64decode(recorded)), dtype=stored_as).float().view(-1, _RUNS, _RUN)
    own = sample(model, torch.float32)
    if own.shape != expected.shape:
        return float("inf"), False
    values = own.to(stored_as).float()
    if values.equal(expected):
        return 0.0, False
    size = expected.flatten(1).norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    errors = (values - expected).flatten(1).norm(dim=1) / size
    # Norms are left as they are where matrices are rounded.
    error = float(errors.sum() / errors.count_nonzero().clamp(min=1))
    if any(expected.to(kind).to(stored_as).float().equal(values) for kind in (torch.float16, torch.bfloat16)):
        return error, False
    runs = own.flatten(0, 1), expected.flatten(0, 1)
    differ = (values != expected).any(dim=2).flatten()
    explained = []
    # Either model may be the rounded one.
    for rounded, other in (runs, runs[::-1]):
        taken = (rounded - other)[differ].square().mean(dim=1).sqrt() / _steps(rounded[differ])
        explained.append(float(((taken > _TAKEN[0]) & (taken < _TAKEN[1])).float().mean()))
    return error, error <= _MOST_ROUNDED and max(explained) > 0.4


def _steps(runs: Tensor) -> Tensor:
    low, high = runs.aminmax(dim=1, keepdim=True)
    counts = torch.arange(1, _FINE + 1)
    places = ((runs - low) / (high - low))[:, :, None] * counts
    off = (places - places.round()).abs().amax(dim=1)
    allowed = torch.where(counts <= _COARSE, _OFF + counts * _OFF_A_STEP, _OFF)
    fits = off <= allowed
    steps = (high - low)[:, 0] / counts[fits.int().argmax(dim=1)]
    return steps.where(fits.any(dim=1), torch.nan)


def weight_versions(model: nn.Module) -> tuple[Any, ...]:
    """Return place, shape and count of changes in place of each parameter: another key once a value changes."""
    versions, modules = [], [model]
    # Every call of `compress` asks, and `model.parameters()`, which names each one, takes three times as long.
    while modules:
        module = modules.pop()
        modules += [child for child in module._modules.values() if child is not None]
        for weight in filter(torch.is_tensor, module._parameters.values()):
            # A quantized or shared-out weight may be a class of its own, without a place in memory.
            place = weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else id(weight)
            # Tensors made in inference mode count no versions.
            versions.append((place, weight.shape, -1 if weight.is_inference() else weight._version))
    return tuple(versions)


def all_weights(model: nn.Module, dtype: torch.dtype) -> str:
    """Sixteen hexadecimal digits from every bit of every parameter in a type."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = full_tensor(parameter.detach()).to(dtype)
        digest.update(f"{name}{tuple(values.shape)}{checksum(values)}".encode())
    return digest.hexdigest()[:16]


def checksum(tensor: Tensor) -> str | None:
    """Digits from all of a tensor's bits and their order; `None` for one without floating-point values at hand."""
    # A quantized weight may be a class of its own.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.is_floating_point():
        return None
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    in_words = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()
    # Words of eight bytes are summed many times faster than single values.
    weights = _weights(flat.device)
    words = flat[:in_words].view(torch.int64).split(len(weights))
    sums = torch.stack([(chunk * weights[: len(chunk)]).sum() for chunk in words])
    return hashlib.sha256(f"{sums.tolist()}{flat[in_words:].view(torch.uint8).tolist()}".encode()).hexdigest()[:16]


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered where FSDP has shared it out among processes."""
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return tensor.full_tensor()
    return tensor


# checkpoint/peft_adapters.py

_SOURCE = {"cache_dir", "token", "local_files_only", "subfolder", "revision"}


def adapter_and_model(name: str | os.PathLike, keywords: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the place of an adapter, if `name` is one, its compressor, and arguments for fetching the adapter."""
    fetching = keywords.pop("adapter_kwargs", None) or {field: keywords[field] for field in _SOURCE & set(keywords)}
    adapter, model, fetching = maybe_load_adapters(name, keywords, **fetching)
    if adapter is not None and fetching.get("revision") == keywords.get("revision"):
        keywords.pop("revision", None)
    return adapter, model, fetching


def put_adapter_on(model: Any, adapter: str | os.PathLike, name: str, trains: bool, fetching: dict[str, Any]) -> Any:
    """Put one of PEFT's adapters on a compressor, beside its own; the library would take these for missing ones."""
    from peft import PeftConfig, inject_adapter_in_model, load_peft_weights, set_peft_model_state_dict

    config = PeftConfig.from_pretrained(adapter, **fetching)
    config.inference_mode = not trains
    inject_adapter_in_model(config, model, name)
    keys = set_peft_model_state_dict(model, load_peft_weights(adapter, str(model.device), **fetching), name)
    if unlike := [*keys.unexpected_keys, *(key for key in keys.missing_keys if f".{name}." in key)]:
        raise ValueError(f"the adapter {adapter} sits on other maps than it says, the first is {unlike[0]!r}")
    model._hf_peft_config_loaded = True
    model.train(model.training)
    return LoadStateDictInfo(set(), set(), set(), [], {}, set())


# checkpoint/encoder_tokenizer.py

def load_encoder_tokenizer(
    checkpoint: str | os.PathLike, subfolder: str, loading: dict[str, Any]
) -> PreTrainedTokenizerBase:
    """The tokenizer of contexts that a checkpoint carries."""
    inside = "/".join(filter(None, (loading.get("subfolder"), subfolder)))
    tokenizer = _tokenizer(checkpoint, {**loading, "subfolder": inside})
    if tokenizer is None:
        raise ValueError(f"{checkpoint} has no tokenizer in {inside!r}, where its configuration says it is")
    return tokenizer


def _tokenizer(name: str | os.PathLike, loading: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(name, **loading)
    except (OSError, ValueError):
        return None


# parts/pooling.py

def mean_pool(
    hidden_states: Tensor, attention_mask: Tensor, ratio: int | Tensor, lengths: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Average each window of `ratio` neighbouring real tokens into one slot (mean pooling, equations 3 and 4)."""
    mask = attention_mask != 0
    if lengths is None:
        order = mask.long().argsort(dim=1, stable=True, descending=True)
        hidden_states, mask = take_places(hidden_states, order), mask.gather(1, order)
        lengths = mask.sum(dim=1).tolist()
    # Columns of pads alone are cut off.
    width, counts = max(lengths, default=0), mask.sum(dim=1)
    hidden_states, mask = hidden_states[:, :width], mask[:, :width]
    if isinstance(ratio, Tensor) and len(set(of_rows := ratio.tolist())) == 1:
        ratio = int(of_rows[0])
    if isinstance(ratio, int):
        # One window of all tokens is the same for every ratio above their number, and needs no longer padding.
        ratio = min(ratio, max(1, width))
        of_rows = [ratio] * len(lengths)
    num_slots = max((-(-length // own) for length, own in zip(lengths, of_rows, strict=True)), default=0)
    if min(lengths, default=width) < width:
        # Filled rather than multiplied: what stands at a pad may be infinite or NaN.
        hidden_states = hidden_states.masked_fill(~mask[:, :, None], 0)
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    if isinstance(ratio, int):
        tokens = functional.pad(hidden_states, (0, 0, 0, num_slots * ratio - width))
        sums = tokens.unflatten(1, (num_slots, ratio)).sum(dim=2, dtype=dtype)
    else:
        ratio = ratio.to(mask.device)
        slot_of_token = torch.arange(width, device=mask.device) // ratio[:, None]
        sums = hidden_states.new_zeros((len(mask), num_slots, hidden_states.shape[2]), dtype=dtype)
        places = slot_of_token.clamp(max=num_slots - 1)[:, :, None].expand(hidden_states.shape)
        sums = sums.scatter_add(1, places, hidden_states.to(dtype))
    sizes = window_sizes(counts, ratio, num_slots)
    slot_mask = torch.arange(num_slots, device=mask.device) < (-(-counts // ratio))[:, None]
    return (sums / sizes[:, :, None]).to(hidden_states.dtype), slot_mask.long()


def pooled_embeddings(
    embeddings: Tensor, attention_mask: Tensor, ratio: int | Tensor, lengths: Sequence[int], width: int
) -> Tensor:
    """Return |S_k|^(-1/2) sum_{i in S_k} E(x_i) of right-padded rows, `(batch_size, width, hidden_size)`, with zeros
    where there are fewer windows than `width`. Such a sum is about as large as one embedding."""
    pooled = mean_pool(embeddings, attention_mask, ratio, lengths)[0]
    pooled = pooled * window_sizes(attention_mask.sum(dim=1), ratio, pooled.shape[1]).sqrt()[:, :, None]
    return functional.pad(pooled, (0, 0, 0, max(0, width - pooled.shape[1])))[:, :width]


def window_sizes(num_tokens: Tensor, ratio: int | Tensor, num_slots: int) -> Tensor:
    """Return the tokens in each slot's window, |S_k| of equation 3, `(batch_size, num_slots)`; 1 for padding slots."""
    ratio = ratio if isinstance(ratio, int) else ratio[:, None]
    slot_index = torch.arange(num_slots, device=num_tokens.device)
    return (num_tokens[:, None] - slot_index * ratio).clamp(min=1).clamp(max=ratio)


# memory/carriers.py

KeyValues = tuple[tuple[Tensor, Tensor], ...]
# Fields of memories whose heads keep unlike numbers of pairs, with an entry for each.
PAIR_FIELDS = ("head_ids", "coarsest_ratios")


def carrier_tensors(memory: Any) -> list[Tensor]:
    """The embeddings alone, or keys and values of the first layer, the second and so on."""
    return _tensors(memory.embeddings if memory.key_values is None else memory.key_values)


def scale_tensors(memory: Any) -> list[Tensor]:
    """One for each of [`carrier_tensors`]; none of a memory that is not quantised."""
    return _tensors(memory.scales)


def _tensors(value: Tensor | KeyValues | None) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for pair in value or () for tensor in pair]


def map_carrier(memory: Any, function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The carrier's field and `scales` after a function of each tensor, whose last dimension but one is the slots."""
    fields: dict[str, Any] = {}
    for name in (memory.carrier, "scales"):
        value = vars(memory)[name]
        if isinstance(value, tuple):
            fields[name] = tuple((function(keys), function(values)) for keys, values in value)
        elif value is not None:
            fields[name] = function(value)
    return fields


def num_bytes(memory: Any) -> int:
    """Bytes of a memory's real slots, with their scales and what is said of each pair."""
    of_pairs = (vars(memory)[name] for name in PAIR_FIELDS)
    tensors = [
        *carrier_tensors(memory),
        *scale_tensors(memory),
        *(tensor for tensor in of_pairs if tensor is not None),
    ]
    of_slot = sum(tensor.shape[1:-2].numel() * tensor.shape[-1] * tensor.element_size() for tensor in tensors)
    return int(memory.num_slots.sum()) * of_slot


def quantized_fields(memory: Any, quantization: str) -> dict[str, Any]:
    """The carrier of a `CompressedContext` and its `scales` in a form of `QUANTIZATIONS`; see [`quantize_tensor`]."""
    mask, (of_keys, of_others) = memory.attention_mask, QUANTIZATIONS[quantization]
    if memory.embeddings is not None:
        return dict(zip(("embeddings", "scales"), quantize_tensor(memory.embeddings, mask, of_others), strict=True))
    layers = [
        (quantize_tensor(keys, mask, of_keys), quantize_tensor(values, mask, of_others))
        for keys, values in memory.key_values
    ]
    return {
        name: tuple((keys[part], values[part]) for keys, values in layers)
        for part, name in enumerate(("key_values", "scales"))
    }


def dequantized_fields(memory: Any) -> dict[str, Any]:
    """The carrier of a quantised `CompressedContext` in float32, without `scales`."""
    if memory.embeddings is not None:
        return {"embeddings": dequantize_tensor(memory.embeddings, memory.scales), "scales": None}
    layers = zip(memory.key_values, memory.scales, strict=True)
    key_values = tuple(tuple(map(dequantize_tensor, pair, scales)) for pair, scales in layers)
    return {"key_values": key_values, "scales": None}


def check_range(memory: Any, dtype: torch.dtype) -> None:
    """Raise a `ValueError` if a finite value of what carries a memory does not fit in a floating-point type."""
    largest = torch.finfo(dtype).max
    for tensor in carrier_tensors(memory) if largest < torch.finfo(memory.dtype).max else ():
        magnitudes = tensor.detach().abs()
        largest_value = magnitudes.where(magnitudes.isfinite(), 0).max().item() if tensor.numel() else 0.0
        if largest_value > largest:
            raise ValueError(f"the memory holds values up to {largest_value:.4g}, {dtype} ends at {largest:.4g}")


# checkpoint/base_weights.py

logger = logging.get_logger(__name__)
DECODER_BASE, ENCODER_BASE = "decoder", "encoder"
# Where a repository's files come from; the same for a checkpoint and for its base.
DOWNLOAD_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token")
# Of what `from_pretrained` takes, what says which files of a repository are the model.
_PLACE_FIELDS = ("subfolder", "gguf_file")
_RECORD = "_context_compressor_base"
_HEAD = "lm_head.weight"


def shown_name(name: str | os.PathLike) -> str:
    """A model's name as a checkpoint records it: a Hub id as it is, of a folder the last part of its path."""
    return Path(name).resolve().name if os.path.isdir(name) else str(name)


def own_name(name: str) -> str:
    """A weight's name without the prefix that the backbone has inside the model with a head."""
    return name.removeprefix("model.")


def base_name(name: str) -> tuple[str, str] | None:
    """Return a weight's base and its name there; `None` for the method's own."""
    name = own_name(name)
    if name == _HEAD:
        return DECODER_BASE, name
    for prefix, base in (("language_model.", DECODER_BASE), ("encoder_model.", ENCODER_BASE)):
        if name.startswith(prefix) and ".lora_" not in name:
            return base, name.removeprefix(prefix).replace(".base_layer.", ".")
    return None


def own_modules(model: nn.Module) -> set[str]:
    """Paths of the modules that are the method's own or train, which are not quantized with the base."""
    own, frozen = set(), set()
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        if parameter.requires_grad or base_name(name) is None:
            own.add(path)
        else:
            frozen |= {path[:end] for end in (0, *(i for i, letter in enumerate(path) if letter == "."))}
    # A module with the base inside may hold a parameter of the method beside it.
    return own - frozen


def base_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """A base model's weights by their names in its backbone, and its LM head's."""
    head = model.get_output_embeddings()
    tensors = dict(model.base_model.state_dict())
    return tensors if head is None else {**tensors, _HEAD: head.weight}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _narrower(dtype: torch.dtype) -> set[torch.dtype]:
    return {torch.bfloat16, torch.float16} - {dtype}


def _checksums(tensor: Tensor) -> dict[torch.dtype, str]:
    own = checksum(tensor)
    if own is None:
        return {}
    rounded = {kind: checksum(tensor.detach().to(kind)) for kind in _narrower(tensor.dtype)}
    return {tensor.dtype: own, **{kind: digits for kind, digits in rounded.items() if digits is not None}}


class BaseRecord:
    """A record of a model's bases in memory: for each the entry of a light checkpoint, see [`base_entry`], and sums of
    the weights that are the bases' own."""

    def __init__(self, entries: Mapping[str, dict[str, str | None]], tensors: Iterable[tuple[str, Tensor]]):
        self.entries = {base: dict(entry) for base, entry in entries.items()}
        self.sums = {own_name(name): (tensor.dtype, _checksums(tensor)) for name, tensor in tensors}
        self._modules = {name.rpartition(".")[0] for name in self.sums}

    def without_base(self, state: Mapping[str, Tensor], trained: set[str]) -> dict[str, Tensor]:
        """The part of a state that differs from the bases: other parts, and base weights that train or changed."""
        return {name: tensor for name, tensor in state.items() if name in trained or not self._is_base(name, tensor)}

    def _is_base(self, name: str, tensor: Tensor) -> bool:
        name = own_name(name)
        if name not in self.sums:
            return any(name.startswith(f"{module}.weight.") for module in self._modules) or (
                name.endswith((".SCB", ".weight_format")) and name.rpartition(".")[0] in self._modules
            )
        dtype, totals = self.sums[name]
        if not totals or checksum(tensor) is None or tensor.dtype.itemsize == 1:
            return True
        if tensor.dtype in totals:
            return checksum(tensor) == totals[tensor.dtype]
        narrowed = tensor.to(dtype)
        return checksum(narrowed) == totals[dtype] and checksum(narrowed.to(tensor.dtype)) == checksum(tensor)


def remember_base(model: PreTrainedModel, record: BaseRecord | None) -> None:
    """Keep a record with a model, or forget the one that it has."""
    model.base_model.__dict__[_RECORD] = record


def base_record(model: PreTrainedModel) -> BaseRecord | None:
    """The record that is kept with a model, or with the model that it is the backbone of."""
    return model.base_model.__dict__.get(_RECORD)


def stored_weights(name: str | os.PathLike, **download: Any) -> dict[str, Tensor]:
    """Return the weights in a checkpoint's own files, in one file or several."""
    file = cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False, **download)
    if file is not None:
        return load_file(file)
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **download)
    files, _ = get_checkpoint_shard_files(name, index, **download)
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def load_bases(
    config: PreTrainedConfig,
    entries: Mapping[str, dict[str, str | None]],
    places: Mapping[str, str | os.PathLike | None],
    checkpoint: str | os.PathLike,
    download: dict[str, Any],
) -> dict[str, dict[str, Tensor]]:
    """Fetch the bases that a light checkpoint names, check that they are the ones, and return the weights of each, see
    [`base_tensors`]."""
    weights = {}
    for base, entry in entries.items():
        argument = "base_model" if base == DECODER_BASE else "encoder_base_model"
        place = places.get(base) or entry["repo_id"]
        shown = f"{entry['repo_id']}, revision {entry['revision']}" if entry["repo_id"] else "a folder without a name"
        advice = f"point to a copy of it with from_pretrained(..., {argument}=FOLDER)"
        fetching = f"context_compressors.pretrained_base({str(place)!r})"
        if place is None:
            raise OSError(f"{checkpoint} leaves out the weights of its {base}'s base model, {shown}: {advice}")
        kept = None if entry.get("subfolder") else cached_base(place)
        inside = {}
        if kept is not None:
            place = kept
        elif not places.get(base):
            fields = {field: entry[field] for field in _PLACE_FIELDS if entry.get(field)}
            inside = {"revision": entry["revision"] or "main", **fields}
        wanted = config.decoder_config if base == DECODER_BASE else config.encoder_config
        try:
            loading = {**download, **inside, **gguf_arguments(inside.get("gguf_file"))}
            # In the type that it is stored in: fingerprints are taken from those values.
            if base == DECODER_BASE:
                model = AutoModelForCausalLM.from_pretrained(place, dtype="auto", **loading)
            else:
                # An encoder may be a base's first layers, which its configuration says.
                model = AutoModel.from_pretrained(place, config=wanted, dtype="auto", **loading)
        except OSError as error:
            raise OSError(
                f"{checkpoint} leaves out the weights of its {base}'s base model, {shown}, and {place} could not be "
                f"loaded: download it, where a network is, with {fetching}, which keeps it on this machine, let the "
                f"Hub be reached, or {advice} ({error})"
            ) from error
        _check_same_base(model, place, wanted, entry, shown)
        weights[base] = base_tensors(model)
    return weights


def _check_same_base(
    model: PreTrainedModel,
    place: str | os.PathLike,
    wanted: PreTrainedConfig,
    entry: dict[str, Any],
    shown: str,
) -> None:
    sizes = [(c.model_type, c.hidden_size, c.num_hidden_layers) for c in (model.config, wanted)]
    for field, own, expected in zip(("model_type", "hidden_size", "num_hidden_layers"), *sizes, strict=True):
        if own != expected:
            raise ValueError(f"{place} has {field} {own}, and the base model ({shown}) has {expected}")
    dtype, sums = getattr(torch, entry["dtype"]), entry["weights"]
    own, expected = all_weights(model, dtype), sums[entry["dtype"]]
    if own == expected:
        return
    casts = [kind for kind in _narrower(dtype) if all_weights(model, kind) == sums[_name(kind)]]
    cast = next((kind for kind in casts if all(p.to(kind).to(p.dtype).equal(p) for p in model.parameters())), None)
    error, is_rounding = rounding(model, entry["samples"], dtype)
    if cast is None and not is_rounding:
        raise ValueError(
            f"{place} is not the base model ({shown}): it has other weights, sum {own}, expected {expected}. Some "
            f"were compared: they are {error:.2%} off, which neither a cast nor a rounding explains; a fine-tuned "
            "base is another model"
        )
    logger.warning(
        f"{place} is nearly the base model ({shown}): its weights are {error:.2%} off, as after "
        f"{'a rounding' if cast is None else f'a cast to {_name(cast)}'}. The compressor works on them, perhaps "
        "slightly worse than on those that it was trained on"
    )


def merge(
    skeleton: PreTrainedModel,
    bases: Mapping[str, Mapping[str, Tensor]],
    stored: Mapping[str, Tensor],
    checkpoint: str | os.PathLike,
) -> tuple[dict[str, Tensor], set[str]]:
    """Return all weights of a compressor by the skeleton's names, those that its checkpoint stores and for the rest
    the bases' own, and the names of the bases'."""
    own = {own_name(name): tensor for name, tensor in stored.items()}
    merged, of_the_base = {}, set()
    # A tied head is the embedding table, whichever of the two places that comes from.
    tied = skeleton.all_tied_weights_keys
    for name, wanted in skeleton.state_dict().items():
        source = base_name(name)
        if own_name(name) in own:
            merged[name] = own.pop(own_name(name))
        elif name not in tied and source is not None:
            # An encoder that is no other model is the decoder's base once more.
            tensor = bases.get(source[0], bases[DECODER_BASE]).get(source[1])
            if tensor is None or tensor.shape != wanted.shape:
                shape = None if tensor is None else tuple(tensor.shape)
                raise ValueError(
                    f"{checkpoint} takes {source[1]} of shape {tuple(wanted.shape)} from its base, which has {shape}"
                )
            # Loading puts these very tensors into the model: encoder and decoder must not share one.
            merged[name] = tensor if source[0] in bases else tensor.clone()
            of_the_base.add(name)
    of_the_base |= {name for name, other in tied.items() if other in of_the_base}
    return {**merged, **own}, of_the_base


# memory/memory_file.py

FORMAT = "context-compressors memory"
# 2: blocks of quantised memories are rotated.
FORMAT_VERSION = "2"
# A hundred times what a memory of the deepest models needs.
_MAX_HEADER_BYTES = 4 << 20
_ZERO_DIGEST = "0" * 64
_DIGEST_FIELD = re.compile(rb'"sha256":"([0-9a-f]{64})"')
# Fields that are tensors, those of every memory and those of some.
_ALWAYS = ("attention_mask", "position_ids", "num_context_tokens")
_SOMETIMES = ("embeddings", "scales", "inverse_frequencies", "question_fingerprints", *PAIR_FIELDS)


def text_source(place: str, text: str) -> str:
    """Return a text's place and the hash of its UTF-8, the form of a memory's `source`: "PLACE sha256:HEX"."""
    return f"{place} sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def file_parts(memory: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a `CompressedContext`, as [`write_memory_file`] takes them."""
    metadata = {"model_id": memory.model_id, "position_layout": memory.position_layout, "carrier": memory.carrier}
    if memory.source:
        metadata["source"] = memory.source
    if not isinstance(memory.ratio, Tensor):
        metadata["ratio"] = str(memory.ratio)
    tensors = {name: vars(memory)[name] for name in (*_ALWAYS, *_SOMETIMES, "ratio")}
    if memory.key_values is not None:
        metadata["num_layers"] = str(len(memory.key_values))
        for name, pairs in (("", memory.key_values), ("scales.", memory.scales or ())):
            for layer, (keys, values) in enumerate(pairs):
                tensors[f"{name}layers.{layer}.keys"], tensors[f"{name}layers.{layer}.values"] = keys, values
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}, metadata


def fields_of_file(tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Any]:
    """The fields of the `CompressedContext` that [`file_parts`] took apart."""
    fields: dict[str, Any] = {name: tensors.get(name) for name in _SOMETIMES}
    fields |= {name: tensors[name] for name in _ALWAYS}
    if metadata["carrier"] == "key_values":
        layers = range(int(metadata["num_layers"]))
        for name, prefix in (("key_values", ""), ("scales", "scales.")):
            if name == "key_values" or "scales.layers.0.keys" in tensors:
                names = ((f"{prefix}layers.{i}.keys", f"{prefix}layers.{i}.values") for i in layers)
                # The first missing layer ends this, however many a header names.
                fields[name] = tuple((tensors[keys], tensors[values]) for keys, values in names)
    fields["ratio"] = tensors["ratio"] if "ratio" in tensors else int(metadata["ratio"])
    texts = {name: metadata[name] for name in ("model_id", "position_layout")}
    return {**fields, **texts, "source": metadata.get("source", "")}


def write_memory_file(path: str | os.PathLike, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors and metadata to a safetensors file at once or not at all; `ValueError` for a path that is no
    file."""
    from safetensors.torch import save_file

    path = Path(path)
    _check_is_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Copies: safetensors refuses tensors that share storage, as keys and values cut from one tensor do.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    header = {**metadata, "format": FORMAT, "format_version": FORMAT_VERSION, "sha256": _ZERO_DIGEST}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        # safetensors makes a file that its owner alone can read; this one follows the process's own rule (umask).
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(tensors, temporary, metadata=header)
        temporary.chmod(mode)
        with open(temporary, "r+b") as file:
            written = _read_header(file, path)
            header = json.loads(written)
            # safetensors leaves the metadata's order to chance: equal memories are equal files.
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            header_bytes = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(len(written))
            file.seek(8)
            file.write(header_bytes)
            match = next(_DIGEST_FIELD.finditer(header_bytes))
            digest = _file_digest(file, header_bytes, match)
            file.seek(8 + match.start(1))
            file.write(digest.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_memory_file(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata of a file of `write_memory_file` after checking every byte of it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    _check_is_file(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no memory file {path}")
    with open(path, "rb") as file:
        header_bytes = _read_header(file, path)
        metadata = _checked_header(header_bytes, path)
        matches = list(_DIGEST_FIELD.finditer(header_bytes))
        if len(matches) != 1 or _file_digest(file, header_bytes, matches[0]) != matches[0][1].decode():
            raise ValueError(f"{path} was altered: its bytes do not fit the checksum in it")
    if metadata["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {metadata['format_version']}, this code reads {FORMAT_VERSION}")
    try:
        return load_file(path), metadata
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        # Whoever alters a file may put the right checksum in it.
        raise ValueError(f"{path} is not a memory file: {error}") from error


def _check_is_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a folder, a pipe or the like, not a memory file")


def _read_header(file: BinaryIO, path: Path) -> bytes:
    file_size = os.fstat(file.fileno()).st_size
    file.seek(0)
    header_size = int.from_bytes(file.read(8), "little")
    if file_size < 8 or header_size > file_size - 8:
        raise ValueError(f"{path} is truncated or not a memory file: its header does not fit in {file_size} bytes")
    if header_size > _MAX_HEADER_BYTES:
        raise ValueError(f"{path} is not a memory file: its header has {header_size} bytes, over {_MAX_HEADER_BYTES}")
    return file.read(header_size)


def _checked_header(header_bytes: bytes, path: Path) -> dict[str, str]:
    try:
        header = json.loads(header_bytes)
        metadata = header.pop("__metadata__")
        is_ours = metadata["format"] == FORMAT and {"format_version", "sha256"} <= metadata.keys()
        data_size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is not a memory file, or its header was altered") from error
    if not is_ours:
        raise ValueError(f"{path} is not a memory file: its format is {metadata['format']!r}, expected {FORMAT!r}")
    file_size, expected_size = path.stat().st_size, 8 + len(header_bytes) + data_size
    if file_size < expected_size:
        raise ValueError(f"{path} is truncated: it has {file_size} of {expected_size} bytes")
    return metadata


def _file_digest(file: BinaryIO, header_bytes: bytes, match: re.Match) -> str:
    file.seek(0)
    digest = hashlib.sha256(file.read(8))
    digest.update(header_bytes[: match.start(1)] + _ZERO_DIGEST.encode() + header_bytes[match.end(1) :])
    file.seek(8 + len(header_bytes))
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


# memory/memory_validation.py

_ID_DTYPES = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_memory(value: Any) -> bool:
    """Return whether it is a `CompressedContext`: this package's, or that of a model which brings its own code."""
    return any(kind.__name__ == "CompressedContext" for kind in type(value).__mro__)


def check_memory_fields(memory: Any, finite: bool = False) -> None:
    """Check types, shapes and values of the fields of a `CompressedContext`; see its `validate`."""
    if (memory.embeddings is None) == (memory.key_values is None):
        raise ValueError("a CompressedContext holds either embeddings or key_values, exactly one of them")
    tensors, scales = _checked_carrier(memory), scale_tensors(memory)
    rows, slots = tensors[0].shape[0], tensors[0].shape[-2]
    shapes: dict[str, tuple[int, ...]] = {"attention_mask": (rows, slots), "position_ids": (rows, slots)}
    optional: dict[str, tuple[int, ...]] = {"question_fingerprints": (rows,)}
    if memory.key_values is not None:
        optional |= {name: (rows, slots, _num_heads(memory)) for name in PAIR_FIELDS}
    shapes |= {"num_context_tokens": (rows,)} | ({"ratio": (rows,)} if isinstance(memory.ratio, Tensor) else {})
    shapes |= {name: shape for name, shape in optional.items() if vars(memory)[name] is not None}
    for name, shape in shapes.items():
        tensor = vars(memory)[name]
        if not isinstance(tensor, Tensor) or tensor.dtype not in _ID_DTYPES:
            kind = tensor.dtype if isinstance(tensor, Tensor) else repr(tensor)
            raise TypeError(f"{name} must be an integer tensor, got {kind}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} to fit the {memory.carrier}, got {tuple(tensor.shape)}")
    if memory.position_layout not in POSITION_LAYOUTS:
        raise ValueError(f"position_layout must be one of {list(POSITION_LAYOUTS)}, got {memory.position_layout!r}")
    devices = {tensor.device for tensor in [*tensors, *scales, *(vars(memory)[name] for name in shapes)]}
    if len(devices) > 1:
        raise ValueError(f"all tensors of a memory must be on one device, got {sorted(map(str, devices))}")
    if not memory.attention_mask.is_meta:
        _refuse_values(memory, finite)


def _checked_carrier(memory: Any) -> list[Tensor]:
    name, dims = memory.carrier, 3 if memory.key_values is None else 4
    pairs, tensors = memory.key_values or (), carrier_tensors(memory)
    for tensor in tensors:
        dtype = tensor.dtype
        if not dtype.is_floating_point and (quantization_of(dtype) is None or memory.scales is None):
            raise TypeError(f"{name} must be floating-point tensors, or integers with `scales`, got {dtype}")
        if tensor.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
    shapes = {(*tensor.shape[:-1], width_of(tensor)) for tensor in tensors}
    dtypes = {(keys.dtype, values.dtype) for keys, values in pairs}
    if len(shapes) > 1 or len(dtypes) > 1 or any(keys != dtype_of_keys(values) for keys, values in dtypes):
        kinds = ", ".join(sorted(map(str, shapes | dtypes)))
        raise ValueError(f"key_values must have one shape and dtype in all layers, got {kinds}")
    if memory.scales is not None:
        wanted = [((*tensor.shape[:-1], num_blocks(width_of(tensor))), torch.float16) for tensor in tensors]
        if [(tuple(scales.shape), scales.dtype) for scales in scale_tensors(memory)] != wanted:
            raise ValueError(f"scales must be float16, of shapes {[shape for shape, _ in wanted]} to fit the {name}")
    frequencies, width = memory.inverse_frequencies, width_of(tensors[0])
    if frequencies is not None and (not pairs or frequencies.shape != (width / 2,)):
        raise ValueError(
            f"inverse_frequencies of key_values have shape ({width // 2},), got {tuple(frequencies.shape)}"
        )
    if memory.coarsest_ratios is not None and (memory.head_ids is None or memory.coarsest_ratios.dtype != torch.uint8):
        raise ValueError("coarsest_ratios must be uint8, beside head_ids")
    return tensors


def _num_heads(memory: Any) -> int:
    return len(memory.key_values) * memory.key_values[0][0].shape[1]


def _refuse_values(memory: Any, finite: bool) -> None:
    mask, heads, frequencies = memory.attention_mask.long(), memory.head_ids, memory.inverse_frequencies
    flags = {
        "attention_mask must hold ones and zeros": (mask != 0) & (mask != 1),
        "attention_mask must have the real slots of each row first, the padding slots after them": (
            mask[:, 1:] > mask[:, :-1]
        ),
        "num_context_tokens must be zero or more": memory.num_context_tokens < 0,
        "position_ids must be zero or more in every real slot": (memory.position_ids < 0) & (mask == 1),
        "ratio must be 1 or more in every row": torch.as_tensor(memory.ratio, device=mask.device) < 1,
    }
    if frequencies is not None:
        flags["inverse_frequencies must be finite"] = ~frequencies.isfinite()
    if heads is not None:
        flags["head_ids must be those of the heads of all layers"] = (heads < 0) | (heads >= _num_heads(memory))
    if finite:
        carrier = scale_tensors(memory) if quantization_of(memory.dtype) else carrier_tensors(memory)
        flags[
            f"{memory.carrier} must be finite, and hold NaN or infinite values: the model that made them has "
            "overflowed, or its weights are not finite"
        ] = ~torch.stack([tensor.isfinite().all() for tensor in carrier])
    is_wrong = torch.stack([flag.any().to(mask.device) for flag in flags.values()]).tolist()
    for reason, flag in zip(flags, is_wrong, strict=True):
        if flag:
            raise ValueError(reason)


# parts/position_layout.py

def _uniform_ids(
    start_id: int | Tensor, num_tokens: int | Tensor, num_memory_tokens: int | Tensor, steps: Tensor
) -> Tensor:
    numerator = num_tokens - num_memory_tokens + 2 * num_tokens * steps + 2 * num_memory_tokens * start_id
    floor = numerator // (2 * num_memory_tokens)
    remainder = numerator - floor * (2 * num_memory_tokens)
    is_tie = remainder == num_memory_tokens
    round_up = (remainder > num_memory_tokens) | (is_tie & (floor % 2 == 1))
    return floor + round_up.long()


def encoder_memory_ids(lengths: Tensor, counts: Tensor, starts: Tensor, layout: str, width: int) -> Tensor:
    """Return the position ids of many chunks' memory tokens in the encoder, `(num_chunks, width)` (EPL, Tables 1 and
    12)."""
    steps = torch.arange(width, device=counts.device)
    lengths, counts, starts = lengths[:, None], counts[:, None], starts[:, None]
    uniform_ids = _uniform_ids(starts + 1, lengths, counts.clamp(min=1), steps)
    return (lengths + steps if layout == "default" else uniform_ids) * (steps < counts)


def moved_pairs(
    pairs: Sequence[tuple[Tensor, Tensor]], offsets: Tensor, inverse_frequencies: Tensor | None
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Move keys with rotary positions to other positions: rotations add up, so `R(p + d) k = R(d) R(p) k`."""
    if inverse_frequencies is None or not pairs:
        return tuple(pairs)
    offsets = offsets if offsets.dim() == 3 else offsets.reshape(len(offsets), 1, -1)
    # A float32 angle of a far position is off by more than float32 keys are; the host has float64 everywhere.
    angles = (offsets[..., None].cpu().double() * inverse_frequencies.cpu().double()).repeat(1, 1, 1, 2)
    keys = pairs[0][0]
    dtype = torch.promote_types(keys.dtype, torch.float32)
    cosine, sine = angles.cos().to(keys.device, dtype), angles.sin().to(keys.device, dtype)

    def rotated(keys: Tensor) -> Tensor:
        precise = keys.to(dtype)
        first, second = precise.chunk(2, dim=-1)
        return (precise * cosine + torch.cat([-second, first], dim=-1) * sine).to(keys.dtype)

    return tuple((rotated(keys), values) for keys, values in pairs)


# checkpoint/checkpoints.py

# What `from_pretrained` fetches a checkpoint's files with.
_FETCHING = (*DOWNLOAD_ARGUMENTS, "proxies", "revision", "subfolder")
# Arguments of `from_pretrained` that are also fields of every configuration.
_NOT_FIELDS = {"dtype", "quantization_config"}


def load_checkpoint(
    model_class: Any, load: Callable[..., Any], path: Any, places: dict[str, Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Load a checkpoint by `load`, the library's `from_pretrained`; `places` are those of its bases."""
    if (plan := kwargs.get("tp_plan")) is not None:
        raise ValueError(f"compressors do not support tensor parallelism, got tp_plan={plan!r}: use `device_map`")
    if path is None:
        return load(None, *args, **kwargs)
    wants_info = kwargs.pop("output_loading_info", False)
    adapter_name = kwargs.pop("adapter_name", "default")
    adapter, name, adapter_source = adapter_and_model(path, kwargs)
    config = _stored_config(model_class, name, kwargs)
    if config.external_weights:
        model, info = load_light(model_class, load, name, config, places, kwargs)
    else:
        if any(place is not None for place in places.values()):
            logger.warning(f"{name} holds all its weights: the base model that was given is not used")
        model, info = load(name, *args, output_loading_info=True, **kwargs)
        # Other files than safetensors are not looked at.
        with suppress(OSError):
            name_as_stored(model, lambda: stored_weights(name, **fetching_arguments(kwargs)))
    # The library names no adapters among the missing keys; those that it offloads have no place either.
    may_offload = getattr(model, "hf_device_map", None) is not None
    missing = {key for key, parameter in model.named_parameters() if not may_offload and parameter.is_meta}
    missing |= set(info["missing_keys"])
    if isinstance(kwargs.get("config"), PreTrainedConfig):
        missing -= _started_adapter(model, missing)
    if missing:
        raise ValueError(
            f"{name} lacks {len(missing)} weights of {model_class.__name__}, the first is {min(missing)!r}; it was "
            "saved from another class or is incomplete"
        )
    model.apply_trainable_set()
    if model.config.encoder_tokenizer is not None:
        source = fetching_arguments(kwargs)
        model.encoder_tokenizer = load_encoder_tokenizer(name, model.config.encoder_tokenizer, source)
        model.base_model.take_from_tokenizer(model.encoder_tokenizer)
    # The folder may be gone when the model is saved.
    sums = {key: checksum(parameter) for key, parameter in model.named_parameters() if parameter.requires_grad}
    model.__dict__["_loaded_from"] = (shown_name(name), sums)
    if adapter is not None and not model._hf_peft_config_loaded:
        model.load_adapter(adapter, adapter_name, adapter_kwargs=adapter_source)
    return (model, info) if wants_info else model


def save_checkpoint(
    model: Any,
    save: Callable[..., Any],
    folder: str | os.PathLike,
    state_dict: dict[str, torch.Tensor] | None,
    save_dtype: torch.dtype | str | None,
    include_base: bool | None,
    kwargs: dict[str, Any],
) -> None:
    """Save a checkpoint by `save`, the library's `save_pretrained`."""
    dtype = getattr(torch, save_dtype, None) if isinstance(save_dtype, str) else save_dtype
    if save_dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise ValueError(f"`save_dtype` must be a floating-point dtype or its name, got {save_dtype!r}")
    check_adapters(model)
    # A dictionary of its own: the library takes out what it has written.
    state = dict(model.state_dict() if state_dict is None else state_dict)
    parent, sums = model.__dict__.get("_loaded_from", (None, {}))
    if any(key in state and checksum(state[key]) != known for key, known in sums.items()):
        model.config.parent_model_name_or_path = parent
    model.config.auto_map = model.auto_map()
    model.config.code_version, model.config.config_schema = CODE_VERSION, CONFIG_SCHEMA
    record = base_to_leave_out(model, include_base)
    model.config.external_weights = None if record is None else record.entries
    if record is not None:
        state = record.without_base(state, {key for key, p in model.named_parameters() if p.requires_grad})
    if dtype is not None:
        state = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in state.items()}
        # A tied weight stays one: two copies would both be stored.
        tied = model.all_tied_weights_keys.items()
        state |= {key: state[source] for key, source in tied if key in state and source in state}
    is_changed = state_dict is not None or record is not None or dtype is not None
    with nullcontext() if record is None else without_quantizer(model):
        save(folder, state_dict=state if is_changed else None, **kwargs)
    if kwargs.get("is_main_process", True):
        write_code_and_card(_written_class(model), model.config, folder)
        if model.encoder_tokenizer is not None:
            model.encoder_tokenizer.save_pretrained(Path(folder) / model.config.encoder_tokenizer)


def _started_adapter(model: Any, missing: set[str]) -> set[str]:
    names = {key for key in missing if OF_THE_DECODER.search(key)}
    for key in names:
        path, _, own = key.rpartition(".")
        empty = torch.empty_like(model.get_parameter(key), device=model.device, dtype=torch.float32)
        setattr(model.get_submodule(path), own, nn.Parameter(empty))
    if names:
        initialize_lora(model, (DECODER,))
    return names


def _stored_config(model_class: Any, name: str | os.PathLike, keywords: dict[str, Any]) -> PreTrainedConfig:
    config, rest = keywords.get("config"), {}
    if not isinstance(config, PreTrainedConfig):
        source = name if config is None else config
        config, rest = model_class.config_class.get_config_dict(source, **fetching_arguments(keywords))
    model_type = config.get("model_type") if isinstance(config, dict) else config.model_type
    own = model_class.config_class.model_type
    if model_type not in (None, own):
        raise ValueError(
            f"{name} is of the model type {model_type!r}, {model_class.__name__} loads {own!r}: a checkpoint loads "
            "with its own class or an Auto class, a base model with `from_base`"
        )
    return model_class.config_class.from_dict(config, **rest) if isinstance(config, dict) else config


def _written_class(model: nn.Module) -> type:
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule

        return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return type(model)


# --- light checkpoints ---


def fetching_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that say where files come from."""
    return {name: arguments[name] for name in _FETCHING if arguments.get(name) is not None}


def load_light(
    model_class: type[PreTrainedModel],
    load: Any,
    name: str | os.PathLike,
    config: PreTrainedConfig,
    places: dict[str, str | os.PathLike | None],
    arguments: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Fetch bases and difference, and hand both to the library's `from_pretrained` as one checkpoint; return the model
    and what the library tells of its loading."""
    fetching = fetching_arguments(arguments)
    arguments = {key: value for key, value in arguments.items() if key not in ("config", "commit_hash", *_FETCHING)}
    config = copy.deepcopy(config)
    for field in set(arguments) & set(config.to_dict()) - _NOT_FIELDS:
        setattr(config, field, arguments.pop(field))
    devices = arguments.get("device_map")
    if isinstance(devices, dict) and "disk" in devices.values():
        raise ValueError(f"{name} is light, and only whole checkpoints stay on disk: save it with its base first")
    entries = config.external_weights
    bases = load_bases(
        config, entries, places, name, {key: fetching[key] for key in DOWNLOAD_ARGUMENTS if key in fetching}
    )
    with torch.device("meta"):
        skeleton = model_class(copy.deepcopy(config))
    # Where nothing trains, all weights are the bases'.
    stored = stored_weights(name, **fetching) if config.is_trained else {}
    state, of_the_base = merge(skeleton, bases, stored, name)
    # A state's own type would be that of its first weight, which may be one that trains.
    dtype = arguments.pop("torch_dtype", None) or arguments.pop("dtype", None)
    arguments["dtype"] = config.dtype if dtype in (None, "auto") else dtype
    model, info = load(None, config=config, state_dict=state, output_loading_info=True, **arguments)
    model.config.name_or_path = model.name_or_path = str(name)
    if model.can_generate():
        # A backbone's checkpoint has none.
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(name, **fetching)
    own = [(key, tensor) for key, tensor in model.state_dict().items() if key in of_the_base]
    remember_base(model, BaseRecord(entries, own))
    name_as_stored(model, lambda: state)
    return model, info


def name_as_stored(model: PreTrainedModel, load_stored: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    """Keep the fingerprint of the weights as they are stored: a float16 copy has another."""
    parameters = list(model.parameters())
    if not any(p.dtype == torch.float16 for p in parameters) or any(p.is_meta for p in parameters):
        return
    stored = {own_name(key): tensor for key, tensor in load_stored().items()}
    backbone = model.base_model
    backbone._stored_fingerprints = {weights_fingerprint(backbone): weights_fingerprint(backbone, stored=stored)}


def _check_base_stays(model: PreTrainedModel) -> None:
    if model.trains_base:
        raise ValueError(f"{type(model).__name__} trains all of its base: its checkpoints are always whole")


def base_to_leave_out(model: PreTrainedModel, include_base: bool | None) -> BaseRecord | None:
    """Return the base that a light checkpoint leaves out; `None` for a full one."""
    record = base_record(model)
    is_on_the_hub = record is not None and all(entry["repo_id"] is not None for entry in record.entries.values())
    if include_base or (include_base is None and not is_on_the_hub):
        return None
    _check_base_stays(model)
    if record is None:
        raise ValueError(
            "nothing tells which weights are the base's: this model was loaded whole, or its adapters are merged; "
            "name the base with `link_base`, or save it whole"
        )
    return record


@contextmanager
def without_quantizer(model: Any) -> Iterator[None]:
    """Save what is not quantized as if nothing were: the library would ask the quantizer for the weights instead."""
    quantizer, settings = vars(model).pop("hf_quantizer", None), vars(model.config).pop("quantization_config", None)
    try:
        yield
    finally:
        if quantizer is not None:
            model.hf_quantizer = quantizer
        if settings is not None:
            model.config.quantization_config = settings


# memory/memory_concatenation.py

# A CompressedContext. Its file imports this one, so this one cannot name the class.
Memory = Any


def concatenate_memories(values: Iterable[Memory]) -> Memory:
    """See `CompressedContext.concatenate`."""
    memories = _checked("concatenate", values)
    first = memories[0]
    if len(memories) == 1:
        return first
    joined = torch.cat([memory.attention_mask for memory in memories], dim=1)
    num_slots = int(joined.sum(dim=1).max()) if joined.numel() else 0
    order = joined.argsort(dim=1, descending=True, stable=True)[:, :num_slots]
    mask = joined.gather(1, order)
    context_counts = torch.stack([memory.num_context_tokens for memory in memories])
    offsets = context_counts.cumsum(dim=0) - context_counts
    is_moved = first.position_layout == "enhanced" or (
        first.position_layout == "uniform" and first.carrier == "key_values"
    )
    if first.carrier == "embeddings" and not is_moved:
        position_ids = (mask.cumsum(dim=1) - 1) * mask
    else:
        ids = [
            memory.position_ids + offset[:, None] * is_moved for memory, offset in zip(memories, offsets, strict=True)
        ]
        position_ids = torch.cat(ids, dim=1).gather(1, order) * mask
    if first.carrier == "key_values" and is_moved:
        memories = _moved(memories, offsets)
    columns = zip(*(carrier_tensors(memory) + scale_tensors(memory) for memory in memories), strict=True)
    is_pad = (mask == 0)[:, :, None]

    def packed(column: Sequence[Tensor]) -> Tensor:
        """Return slots `(batch_size, num_slots, ...)` or `(batch_size, num_heads, num_slots, ...)` in their order."""
        tensor = torch.cat(list(column), dim=-2)
        index, pads = (order[:, :, None], is_pad) if tensor.dim() == 3 else (order[:, None, :, None], is_pad[:, None])
        return tensor.take_along_dim(index, dim=-2).masked_fill(pads, 0)

    carrier = map_carrier(first, lambda tensor: packed(next(columns))) | _of_pairs(memories, packed)
    total_tokens = context_counts.sum(dim=0)
    return replace(
        first,
        **carrier,
        attention_mask=mask,
        position_ids=position_ids,
        num_context_tokens=total_tokens,
        ratio=_common_ratio(memories, total_tokens, mask.sum(dim=1)),
        source="",
        maker=_maker(memories),
    )


def stack_memories(values: Iterable[Memory]) -> Memory:
    """See `CompressedContext.stack`."""
    memories = _checked("stack", values, keeps_keys=True)
    first = memories[0]
    if len(memories) == 1:
        return first
    length = max(memory.attention_mask.shape[1] for memory in memories)
    columns = zip(*(carrier_tensors(memory) + scale_tensors(memory) for memory in memories), strict=True)
    joined = (torch.cat([pad(t, (0, 0, 0, length - t.shape[-2])) for t in column]) for column in columns)
    fields = map_carrier(first, lambda tensor: next(joined))
    for name in ("attention_mask", "position_ids"):
        rows = [vars(memory)[name] for memory in memories]
        fields[name] = torch.cat([pad(tensor, (0, length - tensor.shape[1])) for tensor in rows])
    fields |= _of_pairs(memories, lambda each: torch.cat([pad(t, (0, 0, 0, length - t.shape[1])) for t in each]))
    for name in ("num_context_tokens", "question_fingerprints"):
        if vars(first)[name] is not None:
            fields[name] = torch.cat([vars(memory)[name] for memory in memories])
    ratios = [memory.ratio for memory in memories]
    if not all(isinstance(ratio, int) and ratio == ratios[0] for ratio in ratios):
        each = [torch.as_tensor(memory.ratio, device=first.device).expand(len(memory)) for memory in memories]
        fields["ratio"] = torch.cat(each)
    return replace(first, **fields, source="", maker=_maker(memories))


def _of_pairs(memories: Sequence[Memory], joined: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor | None]:
    fields = {name: [vars(memory)[name] for memory in memories] for name in PAIR_FIELDS}
    return {name: None if any(t is None for t in each) else joined(each) for name, each in fields.items()}


def _maker(memories: Sequence[Memory]) -> Any:
    return next((memory.maker for memory in memories if memory.maker is not None), None)


def _in_one_form(memories: Sequence[Memory], keeps_keys: bool) -> Sequence[Memory]:
    dtypes = dict.fromkeys(memory.dtype for memory in memories)
    quantized = [dtype for dtype in dtypes if quantization_of(dtype)]
    if (
        not quantized
        or len(memories) == 1
        or (len(dtypes) == 1 and (keeps_keys or memories[0].carrier == "embeddings"))
    ):
        return memories
    dtype = next((dtype for dtype in dtypes if dtype not in quantized), torch.float32)
    return [memory.to(dtype=dtype) if memory.dtype in quantized else memory for memory in memories]


def _checked(how: str, values: Any, keeps_keys: bool = False) -> Sequence[Memory]:
    memories: Sequence[Memory] = list(values) if isinstance(values, Iterable) else [None]
    if not all(map(is_memory, memories)):
        raise TypeError(f"{how} takes CompressedContext objects, got {values!r}")
    if not memories:
        raise ValueError(f"{how} needs at least one memory")
    makers = [memory.maker() for memory in memories if memory.maker is not None and not memory.model_id]
    if len({id(next(maker.parameters())) for maker in makers if maker is not None}) > 1:
        raise ValueError(f"cannot {how} memories of different models, made in training mode")
    memories = _in_one_form(memories, keeps_keys)
    first, *others = (_kind(memory, how) for memory in memories)
    for other in others:
        for name, value in first.items():
            if value != other[name]:
                raise ValueError(f"cannot {how} memories of different {name}: {value} and {other[name]}")
    return memories


def _kind(memory: Memory, how: str) -> dict[str, Any]:
    questions, by_row = memory.question_fingerprints, {}
    if how == "stack":
        questions = "none" if questions is None else "one for each row"
    else:
        questions, by_row = None if questions is None else questions.tolist(), {"batch sizes": memory.batch_size}
    return {
        "models": memory.model_id,
        "carriers": memory.carrier_name,
        "position layouts": memory.position_layout,
        "dtypes": memory.dtype,
        "kinds of heads": "shared places" if memory.head_ids is None else "places of their own",
        "devices": memory.device,
        **by_row,
        "questions": questions,
    }


def _moved(memories: Sequence[Memory], offsets: Tensor) -> list[Memory]:
    frequencies = memories[0].inverse_frequencies
    if any(memory.inverse_frequencies is None for memory in memories):
        raise ValueError("key/values move to later positions here, which needs inverse_frequencies in each memory")
    if not all(torch.equal(frequencies.cpu(), memory.inverse_frequencies.cpu()) for memory in memories):
        raise ValueError("memories of different inverse_frequencies cannot be concatenated")
    pairs = [moved_pairs(m.key_values, by, frequencies) for m, by in zip(memories[1:], offsets[1:], strict=True)]
    later = [replace(m, check=False, key_values=own) for m, own in zip(memories[1:], pairs, strict=True)]
    return [memories[0], *later]


def _common_ratio(memories: Sequence[Memory], num_tokens: Tensor, num_slots: Tensor) -> int | Tensor:
    ratios = [memory.ratio for memory in memories]
    if all(isinstance(ratio, int) for ratio in ratios) and len(set(ratios)) == 1:
        return ratios[0]
    rows = [torch.as_tensor(ratio, device=num_tokens.device).expand_as(num_tokens) for ratio in ratios]
    if all(torch.equal(rows[0], other) for other in rows[1:]):
        return rows[0]
    num_slots = num_slots.clamp(min=1)
    return ((num_tokens + num_slots - 1) // num_slots).clamp(min=1)


# memory/compressed_context.py

_FLOATING_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False, repr=False)
class CompressedContext:
    """Contexts of a batch after compression: the memory that `forward` and `generate` read instead of the contexts."""

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
        """Check types, shapes and values of all fields; `TypeError` and `ValueError` name the wrong one."""
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
        """Return the memory in 8, 4 or 2 bits for each value, for keeping: models read it as any other."""
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
        """Write the memory to a safetensors file with a checksum, at once or not at all."""
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
        """Read a memory that `save` wrote, after checking every byte of it."""
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
        shared."""
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
        batch."""
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
        model."""
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
        """Join memories of several documents into one, in order, row beside row (EPL, sections 3.1.1 and 3.2.2)."""
        return concatenate_memories(memories)

    @staticmethod
    def stack(memories: Iterable[CompressedContext]) -> CompressedContext:
        """Return the rows of several memories as one batch, in order, each with its own slots."""
        return stack_memories(memories)

    def _replace(self, fields: dict, function: Callable[[Tensor], Tensor]) -> CompressedContext:
        names = ["attention_mask", "position_ids", "num_context_tokens"]
        names += ["ratio"] if isinstance(self.ratio, Tensor) else []
        names += [n for n in ("question_fingerprints", *PAIR_FIELDS) if vars(self)[n] is not None]
        others: dict[str, Any] = {name: function(vars(self)[name]) for name in names}
        return replace(self, check=False, **fields, **others)


# compressor/validation.py

_KEYWORDS = (
    *("input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "labels"),
    *("context_input_ids", "context_attention_mask", "context_chunk_lengths", "memory", "ratio"),
    *("text_position_offset", "logits_to_keep"),
)


@dataclass
class TokenRows:
    """Token ids with their mask."""

    name: str
    input_ids: Tensor
    attention_mask: Tensor
    vocab_size: int | None = None
    task_token_ids: Mapping[str, int] = field(default_factory=dict)
    needs_tokens: bool = False
    passages: list[list[int]] | None = None
    lengths: list[int] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """True where the rows are known to have no pads."""
        return bool(self.lengths) and all(length == self.input_ids.shape[1] for length in self.lengths)


def token_rows(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    name: str = "input_ids",
    *,
    vocab_size: int | None = None,
    task_token_ids: Mapping[str, int] | None = None,
    needs_tokens: bool = False,
    chunk_lengths: Any = None,
) -> TokenRows:
    """Check the shapes of ids, mask and passages; a mask that is not given is one of ones."""
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or not shape[0]:
        raise ValueError(f"`{name}` must have shape (batch_size, num_tokens) with at least one row, got {shape}")
    mask = input_ids.new_ones(shape, dtype=torch.long)
    if attention_mask is not None:
        if tuple(attention_mask.shape) != shape:
            name = name.replace("input_ids", "attention_mask")
            raise ValueError(f"`{name}` must have the shape of the ids, {shape}, got {tuple(attention_mask.shape)}")
        mask = (attention_mask != 0).long().to(input_ids.device)
    passages = None
    if chunk_lengths is not None:
        rows = chunk_lengths.tolist() if isinstance(chunk_lengths, Tensor) else chunk_lengths
        passages = [[length for length in row if length] for row in rows]
        if len(passages) != shape[0]:
            name = name.replace("input_ids", "chunk_lengths")
            raise ValueError(f"`{name}` must have {shape[0]} rows, as many as the ids, got {len(passages)}")
    return TokenRows(name, input_ids, mask, vocab_size, task_token_ids or {}, needs_tokens, passages)


def measure_rows(*inputs: TokenRows, also: Sequence[Tensor] = ()) -> list[int]:
    """Check the values of all inputs by one wait for the device, and note the lengths of their rows."""
    facts, unknown = [], []
    for rows in inputs:
        ids, real = rows.input_ids, rows.attention_mask.bool()
        is_unknown = real & ((ids < 0) | (ids >= (rows.vocab_size or torch.iinfo(ids.dtype).max)))
        for task_id in rows.task_token_ids.values():
            is_unknown = is_unknown & (ids != task_id)
        unknown.append(is_unknown)
        facts += [rows.attention_mask.sum(dim=1), is_unknown.any()[None]]
        rows.input_ids = ids.masked_fill(~real, 0)
    facts += [tensor[None] for tensor in also]
    values = torch.cat([tensor.to(device=facts[0].device, dtype=torch.long) for tensor in facts]).tolist()
    for rows, is_unknown in zip(inputs, unknown, strict=True):
        num_rows = len(rows.input_ids)
        rows.lengths, has_unknown, values = values[:num_rows], values[num_rows], values[num_rows + 1 :]
        if rows.needs_tokens and 0 in rows.lengths:
            raise ValueError(f"`{rows.name}` has no token in row {rows.lengths.index(0)}: give one, such as BOS")
        if has_unknown:
            first = int(rows.input_ids[is_unknown][0])
            own = f" or one of the task tokens {dict(rows.task_token_ids)}" if rows.task_token_ids else ""
            raise ValueError(
                f"`{rows.name}` has the token id {first}, which is outside the vocabulary of {rows.vocab_size} tokens"
                f"{own}; is the tokenizer the one of this checkpoint?"
            )
        for row, lengths in enumerate(rows.passages or ()):
            if sum(lengths) != rows.lengths[row] or min(lengths, default=0) < 0:
                name = rows.name.replace("input_ids", "chunk_lengths")
                raise ValueError(f"`{name}` must add up to the {rows.lengths[row]} tokens of row {row}, got {lengths}")
    return values


def cached_text_mask(mask: Tensor | None, input_ids: Tensor, num_cached: int) -> Tensor:
    """Return the caller's mask of a text, `(batch_size, num_cached + num_new_tokens)`, whose first tokens are in a
    cache; `generate` drops a mask of ones."""
    shape = (len(input_ids), num_cached + input_ids.shape[1])
    if mask is None:
        return input_ids.new_ones(shape, dtype=torch.long)
    if tuple(mask.shape) != shape:
        raise ValueError(
            "with a cache, `attention_mask` must cover the text in the cache and the new text, "
            f"(batch_size, num_text_tokens) = {shape}, got {tuple(mask.shape)}"
        )
    return (mask != 0).long()


def resolve_ratios(
    ratios: Sequence[Any], trained: Sequence[int], input_ids: Tensor, allow_untrained: bool
) -> list[Any]:
    """Return ratios as ints or LongTensors `(batch_size,)`; `None` becomes the first trained one."""
    checked: list[Any] = []
    for ratio in ratios:
        ratio = trained[0] if ratio is None else ratio
        if isinstance(ratio, Tensor) and ratio.dim():
            if tuple(ratio.shape) != (len(input_ids),):
                raise ValueError(
                    f"`ratio` must be an int or have {len(input_ids)} rows, got shape {tuple(ratio.shape)}"
                )
            ratio = ratio.to(device=input_ids.device, dtype=torch.long)
            values = set(ratio.tolist())
        else:
            ratio = ratio.item() if isinstance(ratio, Tensor) else ratio
            values = {ratio}
        for value in values:
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`ratio` must be an int of at least 1, got {value!r}")
            if value not in trained and not allow_untrained:
                raise ValueError(
                    f"this checkpoint was not trained for the ratio {value}; it has {sorted(trained)} "
                    "(compress(..., allow_untrained_ratio=True) goes on nevertheless)"
                )
        checked.append(ratio)
    return checked


def check_context_length(config: Any, num_positions: int) -> None:
    """Raise `ValueError`, with both lengths, unless a context or chunk fits the encoder's positions."""
    limit, chunk_size = max_positions(config.get_encoder_config()), config.chunk_size
    if limit is None or num_positions <= limit or config.encoder_limit is None:
        return
    hint = "cut the context"
    if config.has_chunks and chunk_size is None:
        hint = "set `chunk_size` in the configuration, or cut the context"
    elif config.has_chunks and num_positions < 2 * chunk_size:
        # A single chunk is too long.
        hint = f"set a `chunk_size` below {chunk_size} in the configuration, or cut the context"
    raise ValueError(
        f"the context needs {num_positions} positions, the encoder has {limit} (max_position_embeddings): {hint}"
    )


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise `TypeError` for misspelt keywords of `forward`, which the language model would swallow."""
    if torch.compiler.is_compiling():
        # Dynamo would trace the search for near names line by line.
        return
    for name in keywords:
        nearest = None if name in _KEYWORDS else nearest_name(name.lower(), _KEYWORDS, similarity=0.8)
        if nearest is not None:
            raise TypeError(f"unexpected argument {name!r}; did you mean {nearest!r}?")


def check_source(
    context_input_ids: Tensor | None,
    memory: CompressedContext | None,
    ratio: Any,
    mask: Any,
    chunk_lengths: Any = None,
) -> None:
    """Check that there is a context or a memory and not both, and that a context's arguments come with one."""
    if context_input_ids is not None:
        if memory is not None:
            raise ValueError("give either `context_input_ids` or `memory`, not both")
        return
    for name, value in (("context_attention_mask", mask), ("context_chunk_lengths", chunk_lengths), ("ratio", ratio)):
        if value is not None:
            advice = "; `memory.at_ratio(ratio)` makes some memories coarser" if name == "ratio" and memory else ""
            raise ValueError(f"`{name}` belongs to `context_input_ids`, which are not given: leave it out{advice}")


def fitted_memory(memory: Any, model: Any, input_ids: Tensor) -> CompressedContext:
    """Return the memory with a row for each row of `input_ids`, on the model's device and of its dtype."""
    if not is_memory(memory):
        raise TypeError(f"`memory` must be a CompressedContext, as `compress` returns it, got {type(memory).__name__}")
    if not model.is_own_memory(memory):
        maker = f"the model {memory.model_id}" if memory.model_id else "another model, in training mode"
        raise ValueError(f"`memory` was made by {maker}, not by this one, {model.model_id}")
    num_texts = len(input_ids)
    if memory.batch_size not in (1, num_texts):
        raise ValueError(f"`memory` has {memory.batch_size} rows, `input_ids` has {num_texts}")
    if (memory.device, memory.dtype) != (input_ids.device, model.dtype):
        # Checks that no value is beyond what the model's type can hold.
        memory = memory.to(device=input_ids.device, dtype=model.dtype)
    return memory if memory.batch_size == num_texts else memory.repeat_interleave(num_texts)


def fitted_text_and_memory(text: TokenRows, memory: Any, model: Any) -> tuple[CompressedContext, bool, int]:
    """Check a text and the memory in front of it by one wait for the device, and return the memory, whether all of its
    slots are real, and the slots and text tokens of the longest row."""
    memory = fitted_memory(memory, model, text.input_ids)
    longest = (memory.num_slots + text.attention_mask.sum(dim=1)).max()
    all_real, longest = measure_rows(text, also=[memory.attention_mask.all(), longest])
    return memory, bool(all_real), longest


def warn_about_positions(decoder_config: Any, num_slots: int, num_text_tokens: int) -> None:
    """Warn once of slots and text that need more positions than the decoder has."""
    limit = max_positions(decoder_config)
    if limit is not None and num_slots + num_text_tokens > limit:
        logger.warning_once(
            f"slots and text need more positions than the {limit} of the decoder (max_position_embeddings), and it "
            "may not read what lies behind them: take a higher ratio, or join fewer memories"
        )


# memory/key_value_memory.py

# Kinds of layers that keep keys and values.
_KEY_VALUE_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
# Frequencies that do not depend on the length of the sequence, so that keys can be rotated on.
_FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", None)
# Families that rotate neighbouring channels, and not the halves of a key, against each other.
_INTERLEAVED = ("cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium", "llama4_text")
# Families that turn a half's channels the other way, or norm keys behind the rotation.
_TURNED_OTHERWISE = ("nanochat", "hunyuan_v1_dense", "hunyuan_v1_moe")
# Families whose layers that see everything turn no keys; of the second, only beside others with a sliding window.
_TURN_IN_WINDOWS = ("afmoe", "exaone4", "exaone_moe", "flint", "kolibri1", "lara_mini")
_OR_WITHOUT_WINDOW = ("exaone4", "exaone_moe", "kolibri1")
_NUM_SLOTS, _PAIRS = "_context_compressor_num_slots", "_context_compressor_pairs"


def note_cached_slots(cache: Cache | None, num_slots: int) -> None:
    """Keep with a cache how many slots it holds in front of the text."""
    if cache is not None:
        vars(cache)[_NUM_SLOTS] = num_slots


def note_cached_pairs(cache: Cache | None, pairs: Any) -> None:
    """Keep with a cache the pairs that heads read in front of what it holds; `None` for none."""
    if cache is not None:
        vars(cache)[_PAIRS] = pairs


def num_cached_slots(cache: Cache | None) -> int:
    """Slots that a cache holds; 0 in an empty one, and where it was filled by another model."""
    return vars(cache).get(_NUM_SLOTS, 0) if cache is not None and cache.get_seq_length() else 0


class KeyValueRecorder(DynamicCache):
    """A cache that keeps nothing but the keys and values of some places, for one forward pass."""

    def __init__(self, places: Tensor, take: Callable[[int, Tensor], Tensor] | None = None):
        super().__init__()
        self._places, self._take = places, take
        self.inputs: list[Tensor] = []
        self._recorded: dict[int, tuple[Tensor, Tensor]] = {}
        self._is_open = True

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Note a layer's rotated keys and values, `(batch_size, num_heads, num_places, head_dim)`."""
        # Gradient checkpointing runs this a second time and has to find the same operations.
        chosen = take_places(key_states, self._places, dim=2), take_places(value_states, self._places, dim=2)
        if self._is_open:
            self._recorded[layer_idx] = chosen
        return key_states, value_states

    def note_input(self, layer: int, states: Tensor) -> None:
        """Note the states `(batch_size, num_places, hidden_size)` that a layer's attention reads."""
        if self._take is not None and self._is_open:
            self.inputs.append(self._take(layer, states.detach()))

    def close(self, dtype: torch.dtype) -> KeyValues:
        """Return keys and values of all layers in order, each `(batch_size, num_heads, num_memory_tokens,
        head_dim)`."""
        self._is_open = False
        recorded, self._recorded = self._recorded, {}
        # Under autocast rotated keys are float32 and values are not.
        return tuple((keys.to(dtype), values.to(dtype)) for _, (keys, values) in sorted(recorded.items()))


class ReadOnlyCache(DynamicCache):
    """Keys and values that every layer reads in front of its own, and to which nothing is added."""

    def __init__(self, key_values: KeyValues):
        super().__init__()
        self._key_values = key_values

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """The layer's memory with the new keys and values behind it."""
        keys, values = self._key_values[layer_idx]
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of slots, padding slots included."""
        return self._key_values[layer_idx][0].shape[2]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The place of the first text token."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of places that are attended to, and the first of them."""
        return self.get_seq_length() + query_length, 0


def keep_caches_under_checkpointing(model: nn.Module, enable: bool) -> None:
    """Let checkpointed layers keep the cache that they are given, or again drop it as the library has it."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer._can_checkpoint_with_cache = enable


def filled_cache(memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
    """Return a cache that starts with a memory of key/values, its padding slots in front; `is_full` if it has none."""
    pairs = memory.key_values or ()
    if not is_full:
        order = memory.attention_mask.argsort(dim=1, stable=True)
        pairs = tuple((take_places(keys, order, dim=2), take_places(values, order, dim=2)) for keys, values in pairs)
    if cache is None and not use_cache:
        return ReadOnlyCache(pairs)
    cache = DynamicCache() if cache is None else cache
    for layer, (keys, values) in enumerate(pairs if memory.attention_mask.shape[1] else ()):
        cache.update(keys, values, layer)
    return cache


def inverse_frequencies(backbone: PreTrainedModel) -> Tensor | None:
    """Angles per position of the backbone's rotary embedding, `(head_dim / 2,)`; `None` where they are not fixed, or
    do not turn one half of a whole key against the other, or not those of every layer alike."""
    config, rotary = backbone.config, getattr(backbone, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) not in _FIXED_ROPE_TYPES or config.model_type in _INTERLEAVED:
        return None
    # 0 for a layer without rotary positions; of their bases 0 or `None`.
    bases = set(getattr(config, "layer_rope_theta", None) or (1.0,))
    turns_all_layers = 0 not in (getattr(config, "no_rope_layers", None) or ()) and len(bases) == 1 and all(bases)
    if config.model_type in _TURN_IN_WINDOWS and "full_attention" in config.layer_types:
        turns_all_layers &= config.model_type in _OR_WITHOUT_WINDOW and config.sliding_window is None
    if config.model_type in _TURNED_OTHERWISE or not turns_all_layers:
        return None
    frequencies = getattr(rotary, "inv_freq", None)
    if frequencies is None or 2 * len(frequencies) != key_value_shape(config)[2]:
        return None
    return frequencies.float().clone()


def position_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one position's keys and values in a language model's cache, over all layers and heads."""
    layers, heads, head_dim = key_value_shape(config)
    layers = sum(kind in _KEY_VALUE_LAYERS for kind in layer_kinds(config)) or layers
    return 2 * layers * heads * head_dim * dtype.itemsize


def check_has_key_values(config: Any) -> None:
    """Refuse a language model some of whose layers have a state of fixed size in place of keys and values."""
    kinds = set(layer_kinds(config)) - set(_KEY_VALUE_LAYERS)
    if kinds:
        raise ValueError(
            f"layers of the kind {sorted(kinds)[0]!r} have no keys and values: a base of type {config.model_type!r} "
            "goes with methods whose slots are embeddings"
        )


def sliding_window(config: Any) -> int | None:
    """Tokens that a layer of the model sees at most, or `None` where all layers see everything."""
    window = getattr(config, "sliding_window", None)
    kinds = layer_kinds(config)
    return window if not kinds or "sliding_attention" in kinds else None


def check_sliding_window(config: Any, num_slots: int, num_text_tokens: int) -> None:
    """Raise `ValueError` unless slots of keys and values and the text behind them fit into a sliding window."""
    window = sliding_window(config)
    if window is not None and num_slots + num_text_tokens > window:
        raise ValueError(
            f"{num_slots} slots and {num_text_tokens} text tokens do not fit into the base's sliding window of "
            f"{window} tokens: a memory of key/values needs them all inside; take a higher ratio or a shorter text"
        )


# compressor/read_slots.py

_MAX_BYTES = 2**29


class ReadSlots:
    """Memories of embeddings as the decoder's keys and values, the least recently used of which go first."""

    def __init__(self, model: Any, max_bytes: int = _MAX_BYTES):
        self.backbone, self.max_bytes, self.nbytes = model.base_model, max_bytes, 0
        self._rows: dict[bytes, CompressedContext] = {}
        self._versions: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def read(
        self, memory: CompressedContext, texts: Sequence[list[int]]
    ) -> tuple[CompressedContext, Sequence[list[int]]]:
        """Return a memory of keys and values, and the texts without the tokens in front of the slots, which it holds."""
        config = self.backbone.config
        if memory.embeddings is None or config.is_encoder_decoder or not memory.model_id:
            return memory, texts
        # What stands in front of the slots must be the same in all texts.
        openings = {tuple(text[: self.backbone.num_in_front(torch.tensor([text]))]) for text in texts}
        first = openings.pop()
        size = memory.batch_size * (len(first) + memory.attention_mask.shape[1])
        if (
            size * position_bytes(config.decoder_config, memory.dtype) > self.max_bytes
            or sliding_window(config.decoder_config) is not None
            or "linear_attention" in layer_kinds(config.decoder_config)
            or self.backbone.num_pads_in_front(memory)
            or openings
            or any(len(text) == len(first) for text in texts)
        ):
            return memory, texts
        names = [_row_digest(memory.rows(row), first) for row in range(memory.batch_size)]
        with self._lock:
            versions = weight_versions(self.backbone)
            if versions != self._versions:
                self._rows, self._versions, self.nbytes = {}, versions, 0
            # Those in use become the last to go.
            rows = {name: self._rows[name] for name in names if name in self._rows}
            self._rows = {name: row for name, row in self._rows.items() if name not in rows} | rows
        if missing := [row for row, name in enumerate(names) if name not in rows]:
            read = slots_as_key_values(self.backbone, memory.rows(missing), first)
            alone = map(read.rows, range(len(missing)))
            # Copies: what is cut out of a batch would keep all of it.
            copies = [replace(row, check=False, **map_carrier(row, torch.clone)) for row in alone]
            new = dict(zip((names[row] for row in missing), copies, strict=True))
            self._keep(new, versions)
            rows |= new
        return memory.stack([rows[name] for name in names]), [text[len(first) :] for text in texts]

    def _keep(self, rows: dict[bytes, CompressedContext], versions: tuple[Any, ...]) -> None:
        with self._lock:
            rows = {name: row for name, row in rows.items() if name not in self._rows}
            if versions != self._versions:
                return
            self._rows |= rows
            self.nbytes += sum(row.nbytes for row in rows.values())
            while self.nbytes > self.max_bytes:
                self.nbytes -= self._rows.pop(next(iter(self._rows))).nbytes


@torch.no_grad()
def slots_as_key_values(backbone: Any, memory: CompressedContext, first: Sequence[int]) -> CompressedContext:
    """Return a memory of embeddings as the decoder's keys and values, behind the token ids `first`; no gradient
    flows."""
    ids = torch.tensor([list(first)] * memory.batch_size, dtype=torch.long, device=memory.device)
    text = TokenRows("input_ids", ids, torch.ones_like(ids), lengths=[len(first)] * len(ids))
    width, cache = len(first) + memory.attention_mask.shape[1], DynamicCache()
    # All of this text stands in front of the slots, whatever its offset behind them.
    inputs, _ = backbone.first_inputs(text, None, memory, memory.num_slots, False, width)
    with backbone._adapter(backbone.language_model, DECODER):
        run_backbone(backbone.language_model, use_cache=True, **{CACHE: cache}, **inputs)
    return replace(
        memory,
        check=False,
        embeddings=None,
        key_values=tuple((layer.keys, layer.values) for layer in cache.layers),
        attention_mask=inputs["attention_mask"],
        position_ids=inputs["position_ids"],
        num_context_tokens=memory.num_context_tokens + len(first),
    )


def _row_digest(row: CompressedContext, first: Sequence[int]) -> bytes:
    digest = hashlib.sha256(f"{row.model_id}{row.position_layout}{list(first)}".encode())
    tensors: list[Any] = [row.embeddings, row.position_ids, row.num_context_tokens]
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.digest()


# compressor/pretrained_compressor.py

class CompressorPreTrainedModel(PreTrainedModel):
    """A compressor's backbone, or a model that has one as `model`: start from a base, and what trains."""

    config_class: type[CompressorConfig] = CompressorConfig
    # Tokens of contexts that are read in one pass, so that long ones take no more memory; in training all are. `None`:
    # 8,192, and 16,384 on an accelerator.
    tokens_at_once: int | None = None
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # Whether all of the base trains: checkpoints are then always whole.
    trains_base = False
    # Makes the tokens of contexts, where the encoder reads others than the decoder; else `None`.
    encoder_tokenizer: PreTrainedTokenizerBase | None = None
    # Loads what `from_base` starts from.
    base_auto_class: Any = AutoModelForCausalLM
    # Answers questions; its module sets it, here as in a checkpoint's own code.
    pipeline_class: Any
    # Whether what trains is float32 whatever type the rest has.
    trains_in_float32 = True

    @property
    def method_parameters(self) -> Sequence[str]:
        """Patterns of the parameters that train unless the configuration says otherwise."""
        return (r".",)

    # --- from a base ---

    # Whether `take_from_tokenizer` takes anything.
    needs_encoder_tokenizer = False

    def take_from_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take what the method needs to know of the tokenizer of an encoder of its own; by default nothing."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=self.config.decoder_config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)

    @staticmethod
    def _init_like_embeddings(parameter: nn.Parameter, backbone: PreTrainedModel) -> None:
        table = backbone.get_input_embeddings()
        weight = table.weight.float() * embedding_scale(table)
        drawn = torch.randn_like(parameter, dtype=torch.float32)
        init.copy_(parameter, weight.mean() + drawn * weight.std())

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers; an encoder of its own that reads the decoder's tokens gets as many."""
        before = self.get_input_embeddings().num_embeddings
        table = super().resize_token_embeddings(*args, **kwargs)
        config = self.config.encoder_config
        if config is not None and self.config.encoder_tokenizer is None and config.vocab_size == before:
            self.base_model.encoder_model.resize_token_embeddings(table.num_embeddings)
            config.vocab_size = table.num_embeddings
        return table

    # --- what trains ---

    def post_init(self) -> None:
        super().post_init()
        self.apply_trainable_set()
        if not self.trains_in_float32:
            return
        # What trains is loaded in float32 whatever type the rest is loaded in; the backbone names most of its parts.
        names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        names = [name for name in names if not self._keep_in_fp32_modules_strict & set(name.split("."))]
        self._keep_in_fp32_modules_strict |= {f"^{re.escape(name)}$" for name in names}
        if getattr(self.config, "quantization_config", None) is not None:
            # The library's quantizers leave these as they are.
            self._keep_in_fp32_modules |= {re.escape(path) for path in own_modules(self)}

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        model = super()._from_config(config, **kwargs)
        if cls.trains_in_float32:
            kept = set(model.base_model._keep_in_fp32_modules_strict)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad or kept & set(name.split(".")):
                    parameter.data = parameter.data.float()
        return model

    def apply_trainable_set(self) -> None:
        """Let the parameters train that `config.trainable_parameters`, or else the method, names; freeze the rest."""
        chosen, of_the_stage = self.config.trainable_parameters, self.config.stage_parameters
        usual = self.base_model.method_parameters if of_the_stage is None else of_the_stage
        patterns = [re.compile(pattern) for pattern in (usual if chosen is None else chosen)]
        matched = set()
        for name, parameter in self.named_parameters():
            hits = [pattern.pattern for pattern in patterns if pattern.search(name)]
            matched.update(hits)
            parameter.requires_grad_(bool(hits) and parameter.is_floating_point())
        unused = [] if chosen is None else [pattern for pattern in chosen if pattern not in matched]
        if chosen is None and of_the_stage and not matched:
            raise ValueError(
                f"`training_stage` {self.config.training_stage!r} trains query, key and value maps, and a decoder of "
                f"type {self.config.decoder_config.model_type!r} has none of the known names: name its own in "
                "`trainable_parameters`"
            )
        # The backbone alone has no LM head, so the whole set is only known to the model that has everything.
        if unused and self.get_output_embeddings() is not None:
            raise ValueError(f"`trainable_parameters` {unused} match no parameter of {type(self).__name__}")
        for module in self.modules() if self.trains_in_float32 else ():
            if isinstance(module, PreTrainedModel) and not isinstance(module, CompressorPreTrainedModel):
                note_trained_weights(module)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the base; what trains beside a frozen base is float32."""
        return self.get_input_embeddings().weight.dtype

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, **kwargs: Any
    ) -> None:
        with_adapters = CheckpointWithAdapters(self, gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, with_adapters, **kwargs)
        if self.config.carrier == "key_values":
            keep_caches_under_checkpointing(self, enable)

    @property
    def peft_config(self) -> dict[str, Any]:
        """The settings of the adapters that `peft.get_peft_model` has put on this model, by name."""
        if "_peft_config" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no adapters beside its own")
        return self.__dict__["_peft_config"]

    @peft_config.setter
    def peft_config(self, value: dict[str, Any]) -> None:
        if any(isinstance(m, AdaptedByPass) and path.endswith(".base_layer") for path, m in self.named_modules()):
            kinds = sorted({config.peft_type.value for config in value.values()})
            raise ValueError(f"{type(self).__name__} has LoRA of its own, and takes no other adapters, got {kinds}")
        self.__dict__["_peft_config"] = value
        for name, parameter in self.named_parameters():
            if not set(value) & set(name.split(".")):
                parameter.requires_grad_(False)

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["_peft_config"]
        self.apply_trainable_set()

    def load_adapter(
        self,
        peft_model_id: str | os.PathLike,
        adapter_name: str = "default",
        *args: Any,
        is_trainable: bool = False,
        adapter_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Put an adapter that PEFT has saved on this model, as in `transformers`, beside its own."""
        return put_adapter_on(self, peft_model_id, adapter_name, is_trainable, adapter_kwargs or {})

    def merge_adapters(self) -> None:
        """Add the adapters to the weights they sit on, so that inference needs no `peft`."""
        backbone, config = self.base_model, self.config
        check_adapters(self)
        if config.encoder_lora is not None or config.decoder_lora is not None:
            if getattr(config, "quantization_config", None) is not None:
                raise ValueError("adapters cannot be merged into quantized weights: load the model unquantized")
            # Most weights are the base's no more.
            remember_base(self, None)
            is_one_model = config.shared_adapter and config.decoder_adapter is None
            if config.has_encoder and backbone.encoder_model is None and not is_one_model:
                logger.warning("merge_adapters: encoder and decoder become two copies of the base, twice the memory")
                backbone.encoder_model = copy.deepcopy(backbone.language_model)
                config.encoder_config = copy.deepcopy(config.decoder_config)
            if backbone.encoder_model is not None:
                merge_lora(backbone.encoder_model, ENCODER)
            merge_lora(backbone.language_model, DECODER)
            config.encoder_lora = config.decoder_lora = None
            config.shared_adapter = False
            if config.trainable_parameters is not None:
                names = [f"model.{name}" if self is backbone else name for name, _ in self.named_parameters()]
                # None left is an empty list: `None` would be the method's own set.
                config.trainable_parameters = [
                    pattern
                    for pattern in config.trainable_parameters
                    if any(re.search(pattern, name) for name in names)
                ]
        self.apply_trainable_set()

    # --- checkpoints ---

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        base_model: str | os.PathLike | None = None,
        encoder_base_model: str | os.PathLike | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a checkpoint; arguments as `transformers.PreTrainedModel.from_pretrained`, and two more."""
        places = {DECODER_BASE: base_model, ENCODER_BASE: encoder_base_model}
        return load_checkpoint(cls, super().from_pretrained, pretrained_model_name_or_path, places, args, kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as in torch; frozen weights of the base, which light checkpoints leave out, do not count as missing."""
        result, record = super().load_state_dict(state_dict, strict=strict, assign=assign), base_record(self)
        if record is not None:
            trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
            missing = [key for key in result.missing_keys if key in trained or own_name(key) not in record.sums]
            result = result._replace(missing_keys=missing)
        return result

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        *,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        save_dtype: torch.dtype | str | None = None,
        include_base: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Save a folder that loads anywhere: safetensors, configuration, generation configuration, code and card."""
        if push_to_hub:
            raise ValueError("`push_to_hub=True` is not supported: call `model.push_to_hub(repo_id)`")
        save_checkpoint(self, super().save_pretrained, save_directory, state_dict, save_dtype, include_base, kwargs)

    @classmethod
    def auto_map(cls) -> dict[str, str]:
        """The `auto_map` of checkpoints of this class."""
        return cls.config_class.default_auto_map()

    @classmethod
    def is_remote_code(cls) -> bool:
        # The library would copy the code without making it flat; `save_pretrained` writes it itself.
        return False

    # --- answers ---

    def question_answering(self, tokenizer: PreTrainedTokenizerBase, **kwargs: Any) -> Any:
        """Return the [`ContextCompressionQAPipeline`] of this model, on its device; arguments as of that class."""
        if getattr(self, "hf_device_map", None) is None:
            kwargs.setdefault("device", self.device)
        return self.pipeline_class(model=self, tokenizer=tokenizer, **kwargs)


# compressor/backbone.py

# Pads for each token of a pass.
_MOST_PADDING_OF_CHUNKS = 0.2
Slots = Tensor | KeyValues


@dataclass
class Chunks:
    """Contexts cut into chunks that are compressed independently, all in one batch."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    starts: Tensor
    lengths: list[int]
    chunks_per_row: int
    inputs_embeds: Tensor | None = None

    def take(self, rows: Sequence[int]) -> Chunks:
        """Return some of the chunks without columns of pads alone; they are no longer those of whole contexts."""
        index = on_device(rows, self.input_ids.device)
        lengths = [self.lengths[row] for row in rows]
        tensors = {name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor)}
        tensors = {name: value[:, : max(lengths)] if value.dim() > 1 else value for name, value in tensors.items()}
        return replace(self, **tensors, lengths=lengths, chunks_per_row=1)

    @property
    def is_full(self) -> bool:
        """Return whether there are no pads."""
        return min(self.lengths) == self.attention_mask.shape[1]


class CompressorBackbone(CompressorPreTrainedModel):
    """`compress` of every compressor; a method adds `encode`."""

    memory_class = CompressedContext
    # What tells which tokens a slot is made of: a "plan", the "attention" of memory tokens, "windows" of r neighbours,
    # or "kept", places of the context itself; see `slot_origins`.
    slot_origin: str | None = None
    # Whether `encode` needs all chunks of a row, also those without tokens behind the last one of a short row.
    reads_full_rows = False
    # Whether `encode` takes a list `own_losses`, to which it adds a loss of each row `(batch_size,)` while it trains.
    has_own_loss = False
    # Learned vectors in front of the slots of each chunk and behind them.
    marker_embeddings: Any
    _fingerprint: tuple[tuple[Any, ...], str] | None = None
    # That of the stored weights, by that of the same weights as they were loaded.
    _stored_fingerprints: Mapping[str, str] = MappingProxyType({})

    def encode(self, chunks: Chunks, ratios: Sequence[Any]) -> Sequence[Slots]:
        """Make slots of every ratio from one pass over the context: the method itself."""
        raise NotImplementedError(f"{type(self).__name__} does not define `encode`; use the model class of a method")

    @property
    def encoder_backbone(self) -> nn.Module:
        """The language model that encodes."""
        raise NotImplementedError(f"{type(self).__name__} does not say what encodes")

    def compress(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        ratio: int | Tensor | Sequence[int] | None = None,
        allow_untrained_ratio: bool = False,
        *,
        chunk_lengths: Tensor | Sequence[Sequence[int]] | None = None,
        **unused: Any,
    ) -> CompressedContext | list[CompressedContext]:
        """Compress contexts into slots."""
        extras = self.extra_inputs(unused) if unused else {}
        if unknown := set(unused) - {"token_type_ids"}:
            raise TypeError(f"compress() got unexpected arguments {sorted(unknown)}")
        ratios = list(ratio) if isinstance(ratio, (list, tuple)) else [ratio]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.training):
            context = self.context_rows(input_ids, attention_mask, chunk_lengths=chunk_lengths)
            measure_rows(context)
            memories = self.compress_rows(context, ratios, allow_untrained_ratio, **extras)
        # While a model trains its weights change, and so would the name of its memories.
        name = "" if self.training else self.model_id
        for memory in memories:
            memory.maker, memory.model_id = weakref.ref(self), name
        return memories if isinstance(ratio, (list, tuple)) else memories[0]

    def extra_inputs(self, arguments: dict[str, Any], text: Any = None) -> dict[str, Any]:
        """Take other inputs of the method, such as images, out of a call's arguments; by default none."""
        return {}

    def context_memory(self, context: TokenRows, ratio: Any, **extras: Any) -> CompressedContext:
        """Check contexts, and compress them into one memory without a name."""
        measure_rows(context)
        return self.compress_rows(context, [ratio], **extras)[0]

    def text_rows(self, input_ids: Tensor, attention_mask: Tensor | None) -> TokenRows:
        """Return a text for [`measure_rows`]."""
        known = {"vocab_size": self.config.vocab_size, "task_token_ids": self.config.task_token_ids}
        return token_rows(input_ids, attention_mask, **known, needs_tokens=True)

    def context_rows(
        self, input_ids: Tensor, attention_mask: Tensor | None, name: str = "input_ids", chunk_lengths: Any = None
    ) -> TokenRows:
        """Return contexts for [`measure_rows`]; task tokens belong to texts, and are unknown here."""
        vocab_size = self.config.get_encoder_config().vocab_size
        return token_rows(input_ids, attention_mask, name, vocab_size=vocab_size, chunk_lengths=chunk_lengths)

    def compress_rows(
        self, context: TokenRows, ratios: Sequence[Any], allow_untrained_ratio: bool = False, **extras: Any
    ) -> list[CompressedContext]:
        """Return memories without a name of contexts that [`measure_rows`] has seen; no more waits for the
        device."""
        config, is_key_values = self.config, self.config.carrier == "key_values"
        allow_untrained_ratio |= not config.is_trained
        ratios = resolve_ratios(ratios, config.compression_ratios, context.input_ids, allow_untrained_ratio)
        chunks = self.chunks_of(context)
        chunk_ratios = [r.repeat_interleave(chunks.chunks_per_row) if isinstance(r, Tensor) else r for r in ratios]
        encoded: Sequence[Slots]
        with at_hand(self):
            if chunks.input_ids.shape[1]:
                encoded = self.encode_chunks(chunks, chunk_ratios, **extras)
            else:
                encoded = [self._no_slots(len(chunks.lengths)) for _ in ratios]
            around: Sequence[Tensor] = ()
            if config.markers_per_chunk:
                around = self.marker_embeddings.split([config.slot_markers[side] for side in ("before", "after")])
        memories: list[CompressedContext] = []
        for ratio, chunk_ratio, slots in zip(ratios, chunk_ratios, encoded, strict=True):
            counts = self.kept_slots(chunks, chunk_ratio)
            if around and isinstance(slots, Tensor) and max(counts):
                slots, counts = with_markers(slots, counts, *around)
            fields = vars(slots) if is_dataclass(slots) else {config.carrier: slots}
            joined = {name: join(field, counts, chunks.chunks_per_row) for name, field in fields.items()}
            slot_mask = joined[config.carrier][1]
            own: dict[str, Any] = {name: field for name, (field, _) in joined.items()}
            memory = CompressedContext(
                **own,
                inverse_frequencies=inverse_frequencies(self.encoder_backbone) if is_key_values else None,
                attention_mask=slot_mask,
                position_ids=self.slot_positions(slot_mask, chunks, counts),
                num_context_tokens=context.attention_mask.sum(dim=1),
                ratio=ratio,
                position_layout=config.position_layout,
                check=False,
            )
            rows = range(0, len(counts), chunks.chunks_per_row)
            memory.slot_counts = [sum(counts[row : row + chunks.chunks_per_row]) for row in rows]
            memories.append(memory)
        return memories

    def encode_chunks(self, chunks: Chunks, ratios: Sequence[Any], **extras: Any) -> Sequence[Slots]:
        """Return the slots of all chunks. A pass reads chunks of similar lengths, a bounded number of tokens, none
        empty."""
        rows = [row for row, length in enumerate(chunks.lengths) if length]
        if self.reads_full_rows:
            return self.slots_of(chunks, ratios, **extras)
        # Other inputs, such as images, belong to all rows; processes that share weights make equal numbers of passes.
        is_one_pass = bool(extras) or (torch.distributed.is_available() and torch.distributed.is_initialized())
        # In training all activations are kept in any case.
        usual = 8192 if chunks.input_ids.device.type == "cpu" else 16_384
        most_tokens = None if self.training or is_one_pass else self.tokens_at_once or usual
        groups = [[0]]
        if len(rows) > 1:
            lengths = [chunks.lengths[row] for row in rows]
            groups = length_batches(lengths, None, most_tokens, math.inf if is_one_pass else _MOST_PADDING_OF_CHUNKS)
        if len(groups) == 1 and (chunks.chunks_per_row == 1 or len(rows) == len(chunks.lengths)):
            return self.slots_of(chunks, ratios, **extras)
        passes = []
        for group in groups:
            some = [rows[place] for place in group]
            part, index = chunks.take(some), on_device(some, chunks.starts.device)
            own = [ratio[index] if isinstance(ratio, Tensor) else ratio for ratio in ratios]
            passes.append(self.slots_of(part, own, **extras))
        read = [rows[place] for group in groups for place in group]
        places = {row: place for place, row in enumerate(read)}
        order = [places.get(chunk, len(read)) for chunk in range(len(chunks.lengths))]
        return [gathered(slots, order) for slots in zip(*passes, strict=True)]

    def slots_of(self, chunks: Chunks, ratios: Sequence[Any], **extras: Any) -> Sequence[Slots]:
        """Return the slots of one pass as the memory holds them; arguments as of [`encode`]."""
        return self.encode(chunks, ratios, **extras)

    def kept_slots(self, chunks: Chunks, ratio: int | Tensor) -> list[int]:
        """Return the slots of each chunk that the memory holds: all of them, unless a method says otherwise."""
        return slot_counts(self.config, chunks.lengths, ratio)

    def chunks_of(self, context: TokenRows) -> Chunks:
        """Cut contexts into chunks; `ValueError` for one that is longer than the encoder has positions."""
        config, layout = self.config, self.config.position_layout
        if context.passages is not None and not config.has_chunks:
            raise ValueError(f"the base reads a context whole, without `chunk_lengths`, got {context.passages}")
        rows = (context.input_ids, context.attention_mask, context.lengths)
        chunks = cut(*rows, config.chunk_size, layout, context.passages)
        # Chunks count from 0 again, or on from the first one's first position.
        in_row = max(context.lengths) + config.first_context_position
        check_context_length(config, max(chunks.lengths) if layout == "default" else in_row)
        return chunks

    def slot_positions(self, slot_mask: Tensor, chunks: Chunks, counts: Sequence[int]) -> Tensor:
        """Return the slots' positions in the decoder, 0 at padding slots (EPL, Tables 2, 3 and 13 to 15)."""
        layout, device = self.config.position_layout, slot_mask.device
        if self.config.carrier == "embeddings" and layout != "enhanced":
            return (slot_mask.cumsum(dim=1) - 1).clamp(min=0) * slot_mask
        lengths, of_chunks = on_device(chunks.lengths, device), on_device(counts, device)
        ids = encoder_memory_ids(lengths, of_chunks, chunks.starts, layout, max(counts))
        joined: Any = join(ids[:, :, None], counts, chunks.chunks_per_row)[0]
        return joined[:, :, 0] * slot_mask

    def _no_slots(self, num_chunks: int) -> Slots:
        table = self.get_input_embeddings()
        with at_hand(table):
            weight = table.weight.detach()
        if self.config.carrier == "embeddings":
            return weight.new_zeros(num_chunks, 0, self.config.hidden_size)
        layers, heads, head_dim = key_value_shape(self.config.decoder_config)
        empty = weight.new_zeros(num_chunks, heads, 0, head_dim)
        return tuple((empty, empty) for _ in range(layers))

    @property
    def model_id(self) -> str:
        """The name that a memory must carry to be read by this model."""
        versions = weight_versions(self)
        if self._fingerprint is None or self._fingerprint[0] != versions:
            fingerprint = weights_fingerprint(self)
            self._fingerprint = (versions, self._stored_fingerprints.get(fingerprint, fingerprint))
        return f"{self.config.model_type}:{self._fingerprint[1]}-{settings_fingerprint(self.config)}"

    def is_own_memory(self, memory: CompressedContext) -> bool:
        """Return whether a memory is this model's, or nothing tells whose it is."""
        name = memory.model_id
        if name and not self.training:
            return name == self.model_id
        maker = None if memory.maker is None else memory.maker()
        # Another thread's twin of a model shares its weights.
        return bool(name) or maker is None or next(maker.parameters()) is next(self.parameters())


def slot_counts(config: Any, lengths: Sequence[int], ratio: int | Tensor) -> list[int]:
    """Return the slots of each chunk at an int ratio or a LongTensor `(num_chunks,)`; none where it has no tokens."""
    ratios = [ratio] * len(lengths) if isinstance(ratio, int) else ratio.tolist()
    return [config.chunk_slots(n, r) if n else 0 for n, r in zip(lengths, ratios, strict=True)]


class CompressorHead(CompressorPreTrainedModel):
    """A model with a compressor's backbone in `model`. Its class names the backbone's in `model_class`."""

    model_class: type[CompressorBackbone] = CompressorBackbone

    def __init_subclass__(cls, **kwargs: Any):
        cls.config_class = cls.model_class.config_class
        super().__init_subclass__(**kwargs)

    def __init__(self, config: Any):
        super().__init__(config)
        self.model = self.model_class(config)

    @property
    def model_id(self) -> str:
        """See [`CompressorBackbone.model_id`]."""
        return self.model.model_id

    def _setting(self, name: str, arguments: dict[str, Any]) -> Any:
        value = arguments.get(name, getattr(arguments.get("generation_config"), name, None))
        return getattr(self.generation_config, name, None) if value is None else value

    def compress(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, ratio: Any = None, **kwargs: Any
    ) -> Any:
        """Compress contexts into slots; see [`CompressorBackbone.compress`]."""
        return self.model.compress(input_ids, attention_mask, ratio, **kwargs)


def cut(
    input_ids: Tensor,
    attention_mask: Tensor,
    lengths: Sequence[int],
    chunk_size: int | None,
    layout: str,
    passages: Sequence[Sequence[int]] | None = None,
) -> Chunks:
    """Cut contexts into chunks of `chunk_size` real tokens; the last one of a row, or of a passage, may be short."""
    device, num_tokens = input_ids.device, input_ids.shape[1]
    if any(length != num_tokens for length in lengths):
        input_ids = right_padded(input_ids, attention_mask)
    size = chunk_size or max(1, num_tokens)
    passages = passages or [[length] for length in lengths]
    rows = [[min(size, n - start) for n in row for start in range(0, n, size)] for row in passages]
    chunks_per_row = max(1, max(map(len, rows)))
    rows = [row + [0] * (chunks_per_row - len(row)) for row in rows]
    in_chunks, of_chunks = on_device(rows, device), [n for row in rows for n in row]
    starts = (in_chunks.cumsum(dim=1) - in_chunks).reshape(-1)
    mask = first_places(of_chunks, device)
    position_ids = torch.arange(mask.shape[1], device=device).expand(mask.shape)
    places = (position_ids + starts[:, None]).clamp(max=num_tokens - 1)
    input_ids = input_ids.gather(1, places.reshape(len(rows), -1)).reshape(places.shape) * mask
    if layout != "default":
        position_ids = position_ids + starts[:, None] + 1
    return Chunks(input_ids, mask, position_ids, starts, of_chunks, chunks_per_row)


def on_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Return integers as a tensor, on CUDA without a wait for what the device has still to do."""
    return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=device.type == "cuda")


def first_places(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the mask `(len(counts), max(counts))` of so many left-aligned places in each row."""
    places = torch.arange(max(counts), device=device)
    return (places < on_device(counts, device)[:, None]).long()


def gathered(parts: Sequence[Any], order: Sequence[int]) -> Any:
    """Bring the slots of groups of chunks into the order of all chunks, with zeros for chunks in no group; `order` has
    each chunk's place among those of all groups, or their number where it is in none."""
    first = parts[0]
    if is_dataclass(first) and not isinstance(first, type):
        return replace(first, **{name: gathered([vars(part)[name] for part in parts], order) for name in vars(first)})
    if not isinstance(first, Tensor):
        layers = [zip(*of_layer, strict=True) for of_layer in zip(*parts, strict=True)]
        return tuple(tuple(gathered(states, order) for states in of_layer) for of_layer in layers)
    width = max(part.shape[-2] for part in parts)
    parts = [torch.nn.functional.pad(part, (0, 0, 0, width - part.shape[-2])) for part in parts]
    if sum(map(len, parts)) in order:
        parts = [*parts, parts[0].new_zeros((1, *parts[0].shape[1:]))]
    joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if list(order) == list(range(len(joined))):
        return joined
    return joined.index_select(0, on_device(order, joined.device))


def with_markers(slots: Tensor, counts: Sequence[int], before: Tensor, after: Tensor) -> tuple[Tensor, list[int]]:
    """Put vectors `(num_markers, hidden_size)` in front of the left-aligned slots of each chunk, and behind them."""
    around = [markers.to(slots.dtype).expand(len(counts), -1, -1) for markers in (before, after)]
    joined = torch.cat([around[0], slots[:, : max(counts)], around[1]], dim=1)
    num_markers = len(before) + len(after)
    totals = [count + num_markers if count else 0 for count in counts]
    if min(counts) < max(counts):
        mask = first_places(counts, slots.device)
        marks = mask[:, :1].expand(-1, num_markers)
        mask = torch.cat([marks[:, : len(before)], mask, marks[:, len(before) :]], dim=1)
        joined = take_places(joined, mask.argsort(dim=1, stable=True, descending=True))
    return joined, totals


def join(slots: Slots, counts: Sequence[int], chunks_per_row: int) -> tuple[Slots, Tensor]:
    """Join the chunks' left-aligned slots row by row, without gaps."""
    mask = first_places(counts, slots.device if isinstance(slots, Tensor) else slots[0][0].device)
    pads = (mask == 0)[:, :, None]
    num_slots = max(sum(counts[start : start + chunks_per_row]) for start in range(0, len(counts), chunks_per_row))
    in_rows = mask.reshape(len(counts) // chunks_per_row, -1)
    order = in_rows.argsort(dim=1, stable=True, descending=True)[:, :num_slots]
    joined = []
    for states in [slots] if isinstance(slots, Tensor) else [states for pair in slots for states in pair]:
        states = states[..., : max(counts), :]
        if min(counts) != max(counts):
            states = states.masked_fill(pads if states.dim() == 3 else pads[:, None], 0)
        if chunks_per_row > 1:
            # `(batch_size, num_heads, chunks_per_row, slots_per_chunk, head_dim)`, or the same without heads.
            chunks = states.unflatten(0, (-1, chunks_per_row)).movedim(1, -3)
            states = take_places(chunks.flatten(-3, -2), order, dim=states.dim() - 2)
        joined.append(states)
    slots = joined[0] if isinstance(slots, Tensor) else tuple(zip(joined[::2], joined[1::2], strict=True))
    return slots, in_rows.gather(1, order)


# compressor/context_compression_qa.py

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
    """Asks a compressor about documents that it reads once."""

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
        """Answer questions about documents or their memories."""
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
        """Compress texts as the checkpoint was trained to read them, in batches of similar length."""
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
        """Compress token ids of documents, or of each one's passages, as `document_ids` gives them, in one batch."""
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
        return self.model.base_model.memory_class

    def _memories(
        self, inputs: dict[str, Any], join: bool | str, ratio: int | None, allow_untrained_ratio: bool
    ) -> Iterable[CompressedContext]:
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
        beams = output.get("beam_indices")
        scores = self.model.compute_transition_scores(output.sequences, output.logits, beams, normalize_logits=True)
        new_tokens = output.sequences[:, -scores.shape[1] :]
        is_pad = new_tokens == self._pad_token_id
        means = scores.masked_fill(is_pad, 0).sum(dim=1) / (~is_pad).sum(dim=1)
        return list(zip(new_tokens, means.nan_to_num(nan=-math.inf).tolist(), strict=True))


def _check_documents(texts: Sequence[Any]) -> None:
    check_texts("context", [p for text in texts for p in (text if isinstance(text, (list, tuple)) else [text])])


def _as_list(name: str, value: Any) -> tuple[list[Any], bool]:
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError(f"`{name}` is an empty list")
        return list(value), False
    return [value], True


def _with_defaults(arguments: Mapping[str, Any], pad_token_id: int | None) -> dict[str, Any]:
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


# compressor/modeling_compressor.py

# What a compressor may learn beside a method's own parts.
_COMMON_PARTS = ("task_embeddings", "marker_embeddings", "residual_map")


class CompressorModel(CompressorBackbone):
    r"""
    Encoder, method parts and decoder backbone of a compressor; a method adds `encode` and its parts."""

    # Whether training on a text without context or memory is worth a warning; trainers that mean it say so.
    warns_of_no_context = True
    # The method's own modules and parameters, by name: they train, and are float32.
    method_parts: tuple[str, ...] = ()
    # Types of language models that it is tested on.
    checked_architectures: tuple[str, ...] = (
        *("llama", "qwen2", "qwen3", "mistral", "gemma2"),
        *("qwen3_5_text", "qwen3_next", "gemma3_text", "smollm3"),
    )
    # The LM head of a full checkpoint is not part of the backbone.
    _keys_to_ignore_on_load_unexpected = [r"lm_head\.weight"]

    def __init__(self, config: CompressorConfig):
        super().__init__(config)
        self._keep_in_fp32_modules_strict = ["lora_A", "lora_B", *_COMMON_PARTS, *self.method_parts]
        dtype = torch.get_default_dtype()
        if config.carrier == "key_values":
            check_has_key_values(config.decoder_config)
        for part in (config.decoder_config, config.encoder_config):
            if part is not None and part.model_type not in self.checked_architectures:
                logger.warning_once(
                    f"{part.model_type!r} is not among the architectures that compressors are tested on, "
                    f"{list(self.checked_architectures)}: it may ignore a bidirectional mask, or place slots wrongly"
                )
        self.language_model = AutoModel.from_config(config.decoder_config, dtype=dtype)
        self.encoder_model = None
        if config.encoder_config is not None:
            self.encoder_model = AutoModel.from_config(config.encoder_config, dtype=dtype)
        if config.encoder_lora is not None and config.shared_adapter:
            inject_lora(self.language_model, SHARED, config.encoder_lora)
        elif config.encoder_lora is not None:
            inject_lora(self.encoder_backbone, ENCODER, config.encoder_lora, self.encoder_lora_exclusions())
        if config.decoder_adapter is not None:
            inject_lora(self.language_model, DECODER, config.decoder_adapter)
        self.task_embeddings = None
        if config.task_token_ids:
            self.task_embeddings = nn.Parameter(torch.zeros(len(config.task_token_ids), config.hidden_size))
        self.marker_embeddings = None
        if config.markers_per_chunk:
            self.marker_embeddings = nn.Parameter(torch.zeros(config.markers_per_chunk, config.hidden_size))
        self.residual_map = None
        if config.embedding_residual and not config.maps_slots:
            self.residual_map = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        # Its names are `True` where this thread wants the base without adapters.
        self._base_alone = Passes()

    @property
    def method_parameters(self) -> tuple[str, ...]:
        """Patterns of what trains: adapters, task tokens, markers, the residual's map and the method's parts."""
        parts = "|".join((*_COMMON_PARTS, *self.method_parts))
        return rf"\.lora_[AB]\.({'|'.join(OWN_ADAPTERS)})\.", rf"(^|\.)({parts})(\.|$)"

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.residual_map:
            init.zeros_(module.weight)
            return
        super()._init_weights(module)
        for own in (self.task_embeddings, self.marker_embeddings) if module is self else ():
            if own is not None:
                self._init_like_embeddings(own, self.language_model)

    def start_from_base(self) -> None:
        """Give parts that start from the base's own weights their values; by default there are none."""

    @property
    def encoder_backbone(self) -> PreTrainedModel:
        """The language model that encodes: its own weights, or the decoder's."""
        return self.language_model if self.encoder_model is None else self.encoder_model

    # --- the encoder ---

    def encoder_lora_exclusions(self) -> list[str]:
        """Paths of the encoder's maps that get no adapter although the configuration's targets name them."""
        return []

    def encoder_outputs(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the encoder once with its adapter on `input_ids` `(num_chunks, num_tokens)` or `inputs_embeds`; the mask
        has their shape, or the backbone's own form."""
        inputs: dict[str, Any]
        inputs = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        if cache is not None:
            kwargs[CACHE] = cache
        inputs |= {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
        backbone = self.encoder_backbone
        with self._adapter(backbone, ENCODER):
            return run_backbone(backbone, **inputs, **kwargs)

    # --- slots ---

    def slots_of(self, chunks: Chunks, ratios: Sequence[Any], **extras: Any) -> Sequence[Slots]:
        slots = self.encode(chunks, ratios, **extras)
        if not self.config.embedding_residual or self.config.carrier != "embeddings":
            return slots
        embeddings = self._embed_text(chunks.input_ids).float()
        return [self._with_residual(*pair, embeddings, chunks) for pair in zip(slots, ratios, strict=True)]

    def _with_residual(self, slots: Any, ratio: Any, embeddings: Tensor, chunks: Chunks) -> Tensor:
        own = slots.float()
        mask = chunks.attention_mask
        if self.residual_map is not None:
            squares = (embeddings.square().mean(dim=-1) * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            with torch.autocast(own.device.type, enabled=False):
                own = functional.rms_norm(own, own.shape[-1:], eps=1e-6) * squares.sqrt()[:, None, None]
                own = self.residual_map(own)
        return (own + pooled_embeddings(embeddings, mask, ratio, chunks.lengths, own.shape[1])).to(slots.dtype)

    # --- adapters ---

    @contextmanager
    def _adapter(self, backbone: PreTrainedModel, name: str) -> Iterator[None]:
        with use_adapter(backbone, None if self._base_alone.names else name), in_base_precision(backbone):
            yield

    def base_language_model(self) -> AbstractContextManager[None]:
        """Inside this block the adapters are off: without a context, `forward` is the untouched base model's."""
        return activated(self._base_alone, True)

    def _replicate_for_data_parallel(self) -> CompressorModel:
        replica = super()._replicate_for_data_parallel()
        replica._base_alone = SimpleNamespace(names=self._base_alone.names)
        return replica

    # --- the decoder ---

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        ratio: int | Tensor | None = None,
        use_cache: bool | None = None,
        text_position_offset: Tensor | None = None,
        context_chunk_lengths: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read slots and text."""
        check_source(context_input_ids, memory, ratio, context_attention_mask, context_chunk_lengths)
        check_keywords(kwargs)
        if input_ids is None or kwargs.pop("inputs_embeds", None) is not None:
            raise ValueError("`input_ids` are needed, the text behind the slots (`inputs_embeds` are not read)")
        is_training = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if memory is None and context_input_ids is None and is_training and self.warns_of_no_context:
            logger.warning_once(
                "training without a context: rows bring no `context_input_ids` and no `memory`, so that nothing is "
                "compressed and the language model reads the text alone; see `CompressionCollator`"
            )
        extras = self.extra_inputs(kwargs) if kwargs else {}
        if extras and context_input_ids is None:
            raise ValueError(f"`{'`, `'.join(extras)}` must come with `context_input_ids`, and there are none")
        cache = past_key_values if cache is None else cache
        is_cached = cache is not None and bool(cache.get_seq_length())
        # Checkpointed layers take no cache that is written to, and would silently do without the memory in it.
        if self.training and self.language_model.is_gradient_checkpointing:
            if is_cached:
                raise ValueError("in training with gradient checkpointing layers read no filled `cache`")
            cache, use_cache = None, False
        context, sequence = None, None
        if context_input_ids is not None:
            contexts = (context_input_ids, context_attention_mask, "context_input_ids", context_chunk_lengths)
            context = self.context_rows(*contexts)
        if is_cached:
            if context is not None:
                memory = self.context_memory(context, ratio, **extras)
            if memory is None and (number := num_cached_slots(cache)):
                raise ValueError(
                    f"`cache` holds the {number} slots of a memory: give the memory, too, and `text_position_offset`"
                )
            reading = (position_ids, memory, text_position_offset)
            inputs = self.next_inputs(input_ids, attention_mask, *reading, cache)
        else:
            # One that has been emptied may have held a memory.
            note_cached_pairs(cache, None)
            text = self.text_rows(input_ids, attention_mask)
            memory, is_full, longest = self._checked_memory(text, memory, context, ratio, extras)
            # A cache's places are counted by the memory's.
            width = longest if cache is None and use_cache is False else None
            inputs, sequence = self.first_inputs(text, position_ids, memory, text_position_offset, is_full, width)
            if memory is None and attention_mask is None:
                # Without a mask, positions that start anew separate the texts of a packed row.
                inputs["attention_mask"] = None
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if memory is not None and memory.carrier == "key_values" and not is_cached:
            cache = self.cache_of_slots(memory, is_full, cache, use_cache)
        return_dict = kwargs.pop("return_dict", None)
        for name in ("output_hidden_states", "output_attentions"):
            kwargs.setdefault(name, getattr(self.config, name))
        inputs |= {CACHE: cache, "use_cache": use_cache}
        with self._adapter(self.language_model, DECODER):
            outputs = run_backbone(self.language_model, **inputs, **kwargs)
        if not is_cached:
            note_cached_slots(outputs.get(CACHE), 0 if memory is None else memory.attention_mask.shape[1])
        if not use_cache:
            # Some backbones hand back the cache that they were given; a field that is set cannot be taken out again.
            outputs = type(outputs)(**{name: value for name, value in outputs.items() if name != CACHE})
        if sequence is not None:
            sequence.cut_to_text(outputs)
        return outputs if return_dict in (None, True) else outputs.to_tuple()

    def _checked_memory(
        self,
        text: TokenRows,
        memory: CompressedContext | None,
        context: TokenRows | None,
        ratio: Any,
        extras: dict[str, Any],
    ) -> tuple[CompressedContext | None, bool, int | None]:
        if memory is not None:
            return fitted_text_and_memory(text, memory, self)
        if context is None and torch.compiler.is_exporting():
            return None, True, None
        measure_rows(*[text] if context is None else [context, text])
        if context is None:
            return None, True, None
        memory = self.compress_rows(context, [ratio], **extras)[0]
        counts = memory.slot_counts
        memory = fitted_memory(memory, self, text.input_ids)
        of_rows = counts * (len(text.lengths) // len(counts))
        longest = max(num_slots + length for num_slots, length in zip(of_rows, text.lengths, strict=True))
        return memory, min(counts) == max(counts), longest

    # --- what the language model reads ---

    def first_inputs(
        self,
        text: TokenRows,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
        is_full: bool = False,
        longest: int | None = None,
    ) -> tuple[dict[str, Any], PackedSequence | None]:
        """Return slots and text as one sequence for the language model; text alone where the cache holds the slots."""
        config, input_ids, text_mask = self.config, text.input_ids, text.attention_mask
        positions = text_positions(text_mask) if position_ids is None else position_ids.expand_as(input_ids)
        embeddings = self._embed_text(input_ids)
        if memory is None:
            sequence = pack(text_mask[:, :0], text_mask, is_full=text.is_full)
            return sequence.inputs(embeddings, positions), sequence
        if offset is None:
            offset = self.text_position_offset(memory, input_ids, text_mask)
        warn_about_positions(config.decoder_config, memory.attention_mask.shape[1], max(text.lengths))
        if memory.embeddings is None:
            slot_mask = self.cached_slot_mask(memory)
            check_sliding_window(config.decoder_config, memory.attention_mask.shape[1], text_mask.shape[1])
            return {
                "inputs_embeds": embeddings,
                "attention_mask": torch.cat([slot_mask, text_mask], dim=1),
                "position_ids": (positions + offset[:, None]) * text_mask,
                "is_full": is_full and text.is_full,
            }, None
        moves_first = self._moves_first(input_ids, text_mask)
        memory_positions = memory.position_ids
        text_offset = offset[:, None].expand_as(positions)
        if moves_first is not None:
            text_offset = text_offset * ~moves_first
            shift = moves_first.sum(dim=1, keepdim=True)
            if config.position_layout == "enhanced":
                # Its context starts at position 1.
                shift = (shift - 1).clamp(min=0)
            memory_positions = memory_positions + shift
        pad_in_front = bool(self.num_pads_in_front(memory))
        is_full = is_full and text.is_full
        pads = (longest, longest is not None)
        sequence = pack(memory.attention_mask, text_mask, moves_first, pad_in_front, is_full, *pads)
        joined = torch.cat([memory.embeddings.to(embeddings.dtype), embeddings], dim=1)
        return sequence.inputs(joined, torch.cat([memory_positions, positions + text_offset], dim=1)), sequence

    def next_inputs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
        cache: Cache,
    ) -> dict[str, Any]:
        """Return text that follows what is in the cache, slots and the text so far; arguments as of `forward`."""
        if memory is not None and len(memory) != len(input_ids):
            raise ValueError(f"behind a cache `memory` has {len(memory)} rows, and `input_ids` has {len(input_ids)}")
        num_cached = int(cache.get_seq_length()) - self.num_places(memory)
        text_mask = cached_text_mask(attention_mask, input_ids, num_cached)
        if position_ids is None:
            position_ids = text_positions(text_mask)[:, -input_ids.shape[1] :]
        if memory is not None:
            if offset is None:
                raise ValueError("with a cache, `text_position_offset` must say where the text starts; see `generate`")
            position_ids = position_ids + offset[:, None]
        if memory is not None and memory.carrier == "key_values":
            # The slots came first, and then the text as it was given.
            slot_mask = self.cached_slot_mask(memory)
            check_sliding_window(self.config.decoder_config, memory.attention_mask.shape[1], text_mask.shape[1])
            mask = torch.cat([slot_mask, text_mask], dim=1)
        else:
            slots = [text_mask[:, :0]]
            if memory is not None:
                slots = [text_mask.new_zeros(len(text_mask), self.num_pads_in_front(memory)), memory.attention_mask]
            # The cache holds a row's pads in front, so only their number matters.
            mask = torch.cat([*slots, text_mask], dim=1).sort(dim=1).values
        if cache.is_compileable:
            # One compiled graph serves passes of one shape; the places behind the text are masked by causality.
            length = max(getattr(layer, "max_cache_len", 0) for layer in cache.layers)
            mask = functional.pad(mask, (0, max(0, length - mask.shape[1])))
        return {
            "inputs_embeds": self._embed_text(input_ids),
            "attention_mask": mask,
            "position_ids": position_ids,
            "is_full": input_ids.shape[1] == 1 or memory is None or memory.carrier != "key_values",
        }

    def cache_of_slots(self, memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
        """Return a cache that starts with a memory of key/values, the one given or a new one."""
        return filled_cache(memory, is_full, cache, use_cache)

    def cached_slot_mask(self, memory: CompressedContext) -> Tensor:
        """Mark the places of such a cache that hold slots, `(batch_size, num_places)`."""
        return memory.attention_mask.sort(dim=1).values

    def num_pads_in_front(self, memory: CompressedContext) -> int:
        """Return the pads, 0 or 1, that every row needs in front of its slots beside its own; see `pack`."""
        falls = memory.position_layout == "enhanced" and memory.carrier == "embeddings"
        return int(falls and reads_falling_ids_as_packed(self.config.decoder_config, memory.batch_size))

    def num_places(self, memory: CompressedContext | None) -> int:
        """Return the places that a memory takes in the cache in front of the text."""
        return 0 if memory is None else memory.attention_mask.shape[1] + self.num_pads_in_front(memory)

    def text_position_offset(self, memory: CompressedContext, input_ids: Tensor, text_mask: Tensor | None) -> Tensor:
        """Return the position of each row's first text token, `(batch_size,)` (EPL, Tables 2, 3 and 13 to 15)."""
        if memory.position_layout != "enhanced":
            return memory.num_slots
        autoencoding = self.config.reconstruction_token_id
        if autoencoding is None:
            return memory.num_context_tokens
        first = torch.zeros_like(memory.num_slots) if text_mask is None else text_mask.argmax(dim=1)
        starts_with_ae = input_ids.gather(1, first[:, None])[:, 0] == autoencoding
        return memory.num_context_tokens * ~starts_with_ae

    def num_in_front(self, input_ids: Tensor) -> int:
        """Return the most tokens that a text without pads has in front of the slots; one pass has to read them and the
        slots."""
        moved = self._moves_first(input_ids, torch.ones_like(input_ids))
        return 0 if moved is None else int(moved.sum(dim=1).max())

    def _moves_first(self, input_ids: Tensor, text_mask: Tensor) -> Tensor | None:
        opening, bos = self.config.slots_after_ids, self.config.bos_token_id
        if opening:
            return through_first(input_ids, text_mask, opening)
        if not self.config.bos_before_slots or bos is None:
            return None
        is_first = (text_mask.cumsum(dim=1) == 1) & text_mask.bool()
        return is_first & (input_ids == bos)

    def _embed_text(self, input_ids: Tensor) -> Tensor:
        table = self.get_input_embeddings()
        if self.task_embeddings is None:
            return table(input_ids)
        embeddings = table(input_ids.clamp(max=self.config.vocab_size - 1))
        for row, task_id in enumerate(self.config.task_token_ids.values()):
            task = self.task_embeddings[row].to(embeddings.dtype)
            embeddings = torch.where((input_ids == task_id)[:, :, None], task, embeddings)
        return embeddings


# compressor/causal_lm.py

class _TaskTokensAsBOS(LogitsProcessorList):
    """Processors that look up a score for each token so far; task tokens outside the vocabulary have none."""

    stand_in = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return super().__call__(input_ids.masked_fill(input_ids >= scores.shape[-1], self.stand_in), scores, **kwargs)


class CompressorForCausalLM(CompressorHead, GenerationMixin):
    r"""
    A compressor with the decoder's LM head: training loss and `generate`."""

    model_class: type[CompressorModel] = CompressorModel

    def __init__(self, config: CompressorConfig):
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        table = self.get_input_embeddings()
        place = next(path for path, module in self.named_modules() if module is table)
        self._tied_weights_keys = {"lm_head.weight": f"{place}.weight"}
        self.post_init()

    def base_language_model(self) -> AbstractContextManager[None]:
        """See [`CompressorModel.base_language_model`]."""
        return self.model.base_language_model()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        ratio: int | Tensor | None = None,
        use_cache: bool | None = None,
        text_position_offset: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        context_chunk_lengths: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        r"""
        Read slots and text and predict the text's next tokens; arguments as [`CompressorModel.forward`], and:"""
        return_dict = kwargs.pop("return_dict", None)
        num_items = kwargs.pop("num_items_in_batch", None)
        own_losses: list[Tensor] = []
        if self.model.has_own_loss and self.training and labels is not None and context_input_ids is not None:
            kwargs["own_losses"] = own_losses
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            context_input_ids=context_input_ids,
            context_attention_mask=context_attention_mask,
            memory=memory,
            ratio=ratio,
            use_cache=use_cache,
            text_position_offset=text_position_offset,
            context_chunk_lengths=context_chunk_lengths,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.text_logits(outputs.last_hidden_state[:, keep, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items)
            # A row's own loss counts as its targets do, so that any split of a step into calls has one gradient.
            targets = (labels[:, 1:] != -100).sum(dim=1)
            for of_rows in own_losses:
                loss = loss + (of_rows * targets).sum() / (targets.sum() if num_items is None else num_items)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: outputs.get(CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return result if return_dict in (None, True) else result.to_tuple()

    def text_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `(batch_size, num_tokens, vocab_size)` of the backbone's last states."""
        logits = head_logits(self.lm_head, hidden_states)
        cap = getattr(self.config.decoder_config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # --- `GenerationMixin` with a memory ---

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        ratio: int | Tensor | None = None,
        context_chunk_lengths: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate text after slots and a question."""
        question = inputs if input_ids is None else input_ids
        if question is None:
            raise ValueError("`input_ids` are needed: the question, or at least one token such as BOS")
        check_source(context_input_ids, memory, ratio, context_attention_mask, context_chunk_lengths)
        # The library would cut the question by the cache's length, which counts the slots.
        cache, older = (kwargs.pop(name, None) for name in ("cache", "past_key_values"))
        cache = older if cache is None else cache
        if attention_mask is None:
            attention_mask = self._mask_of_pads(question, kwargs)
        if attention_mask is not None:
            attention_mask = token_rows(question, attention_mask).attention_mask
            if not bool(attention_mask.all()):
                if size := self._setting("prefill_chunk_size", kwargs):
                    raise ValueError(f"`prefill_chunk_size` ({size}) needs questions of one length: leave it out")
                if kwargs.get("position_ids") is not None:
                    kwargs["position_ids"] = left_padded(kwargs["position_ids"].expand_as(question), attention_mask)
                question, attention_mask = (left_padded(x, attention_mask) for x in (question, attention_mask))
        if context_input_ids is not None:
            contexts = (context_input_ids, context_attention_mask, "context_input_ids", context_chunk_lengths)
            extras = self.model.extra_inputs(kwargs, (question, attention_mask))
            memory = self.model.context_memory(self.model.context_rows(*contexts), ratio, **extras)
        if memory is None and num_cached_slots(cache):
            raise ValueError(f"`cache` holds {num_cached_slots(cache)} slots: give their memory in place of it")
        if memory is not None:
            if cache is not None and cache.get_seq_length():
                raise ValueError("`cache` must be empty when `generate` starts with a memory or a context")
            for name in ("assistant_model", "assistant_early_exit"):
                if self._setting(name, kwargs) is not None:
                    raise ValueError(f"`{name}` drafts without the memory: leave it out")
            memory = fitted_memory(memory, self.model, question)
            kwargs["memory"] = memory
            if size := self._setting("prefill_chunk_size", kwargs):
                kwargs["prefill_chunk_size"] = max(size, self.model.num_in_front(question))
            kwargs["text_position_offset"] = self.model.text_position_offset(memory, question, attention_mask)
        if cache is not None:
            kwargs[CACHE] = cache
        # Some tokenizers add it; the decoder has no use for it.
        kwargs.pop("token_type_ids", None)
        return super().generate(question, attention_mask=attention_mask, **kwargs)

    def _mask_of_pads(self, question: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        pad, eos = self._setting("pad_token_id", arguments), self._setting("eos_token_id", arguments)
        if (
            pad is None
            or pad in (eos if isinstance(eos, (list, tuple)) else [eos])
            or not bool((question == pad).any())
        ):
            return None
        return (question != pad).long()

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*args, **kwargs)
        if max(self.config.task_token_ids.values(), default=-1) < self.config.vocab_size:
            return processors
        processors = _TaskTokensAsBOS(processors)
        processors.stand_in = self.config.bos_token_id or 0
        return processors

    def _expand_inputs_for_generation(self, expand_size: int = 1, **arguments: Any) -> tuple[Tensor, dict[str, Any]]:
        if expand_size > 1 and arguments.get("memory") is not None:
            arguments["memory"] = arguments["memory"].repeat_interleave(expand_size)
        return super()._expand_inputs_for_generation(expand_size=expand_size, **arguments)

    def _prepare_cache_for_generation(self, settings: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        *others, max_cache_length = args
        max_cache_length += self.model.num_places(model_kwargs.get("memory"))
        return super()._prepare_cache_for_generation(settings, model_kwargs, *others, max_cache_length)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, cache: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        # With its cache hidden, the library leaves the mask two-dimensional; `forward` puts the slots' mask in front.
        model_inputs = super().prepare_inputs_for_generation(input_ids, **{CACHE: None}, **kwargs)
        model_inputs["cache"] = past_key_values if cache is None else cache
        return model_inputs


# compressor/memory_token_compressor.py

@dataclass
class MemoryRows:
    """A batch of `[context, memory tokens, pads]` rows, ready for the encoder."""

    inputs: dict[str, Any]
    places: Tensor
    groups: list[tuple[int, Tensor]]

    def read(self, states: Tensor) -> list[Tensor]:
        """Return the memory tokens' states of each ratio, `(num_chunks, num_slots, hidden_size)`; zeros for none."""
        states = take_places(states, self.places)
        return [
            states[:, first : first + mask.shape[1]].masked_fill(mask[:, :, None] == 0, 0)
            for first, mask in self.groups
        ]


def _block_mask(
    config: Any,
    sequence: PackedSequence,
    lengths: Tensor,
    widths: Sequence[int],
    bidirectional: bool,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    if config._attn_implementation not in PAIRWISE_MASKS:
        raise ValueError(f"memory tokens that see each other need eager or sdpa, got {config._attn_implementation!r}")
    device, num_tokens = lengths.device, sequence.attention_mask.shape[1] - sum(widths) - sequence.pad_in_front
    sizes = [num_tokens, *widths]
    blocks = torch.cat([torch.full((size,), block, device=device) for block, size in enumerate(sizes)])
    context_places = torch.arange(num_tokens, device=device).expand(len(lengths), -1)
    behind = torch.cat([torch.arange(width, device=device) for width in widths])
    places = sequence.arrange(torch.cat([context_places, lengths[:, None] + behind], dim=1))
    blocks = sequence.arrange(blocks.expand(len(lengths), -1))
    place, other_place, block, other = places[:, :, None], places[:, None], blocks[:, :, None], blocks[:, None]
    visible = ((other == 0) | (other == block)) & (other_place <= place)
    if bidirectional:
        visible = visible | ((other == block) & (other > 0))
    visible = visible & sequence.attention_mask.bool()[:, None]
    window = sliding_window(config)
    near = visible if window is None else visible & ((place - other_place).abs() < window)
    return mask_for(config, visible, near, dtype)


class MemoryTokenModel(CompressorModel):
    r"""
    A compressor whose encoder reads `[S(i); M(i)]`: the context of a chunk, then learned memory tokens, the same for
    all chunks (EPL, equation 1 and section 3.1.1). A method says what of them is the memory (`read_memory`)."""

    method_parts: tuple[str, ...] = ("memory_embeddings", "chunk_marker_embeddings")
    slot_origin = "attention"
    # Whether a memory token sees the ones behind it, too.
    has_bidirectional_memory = False

    def __init__(self, config: Any):
        super().__init__(config)
        count = 1 if config.num_memory_tokens is None else config.num_memory_tokens
        width = config.get_encoder_config().hidden_size
        self.memory_embeddings = nn.Parameter(torch.zeros(count, width))
        if config.chunk_markers and config.position_layout != "default":
            raise ValueError(f"`chunk_markers` need `position_layout='default'`, got {config.position_layout!r}")
        self.chunk_marker_embeddings = nn.Parameter(torch.zeros(2, width)) if config.chunk_markers else None

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            self.start_memory_tokens(self.memory_embeddings)
            if self.chunk_marker_embeddings is not None:
                self._init_like_embeddings(self.chunk_marker_embeddings, self.encoder_backbone)

    def start_memory_tokens(self, tokens: nn.Parameter) -> None:
        """Start memory tokens by `memory_start`, a repeated one at the mean embedding, beside pooled ones at zero."""
        table = self.encoder_backbone.get_input_embeddings()
        if self.adds_pooled_embeddings:
            init.zeros_(tokens)
        elif self.config.num_memory_tokens is None:
            init.copy_(tokens, embedding_scale(table) * table.weight.float().mean(dim=0, keepdim=True))
        elif self.config.memory_start == "standard_normal":
            init.normal_(tokens)
        elif self.config.memory_start == "eos":
            eos = self.config.get_encoder_config().eos_token_id
            if eos is None:
                raise ValueError("`memory_start='eos'` needs a base with an EOS token, got eos_token_id None")
            first = torch.tensor(eos if isinstance(eos, list) else [eos], device=table.weight.device)[:1]
            init.copy_(tokens, table(first).to(tokens).expand(tokens.shape))
        else:
            self._init_like_embeddings(tokens, self.encoder_backbone)

    @property
    def adds_pooled_embeddings(self) -> bool:
        """Return whether pooled embeddings are added to memory tokens, whose keys and values are kept."""
        return self.config.embedding_residual and self.config.carrier == "key_values"

    def memory_vectors(self, num_memory_tokens: int) -> Tensor:
        """Return the first memory tokens (EPL, section 3.1.1), or copies of the one, `(num_memory_tokens,
        hidden_size)`."""
        tokens = self.memory_embeddings
        if self.config.num_memory_tokens is None:
            return tokens.expand(num_memory_tokens, -1)
        if num_memory_tokens > len(tokens):
            raise ValueError(
                f"the context needs {num_memory_tokens} memory tokens, the checkpoint has {len(tokens)}: take a "
                "higher ratio, or shorter contexts or chunks"
            )
        return tokens[:num_memory_tokens]

    def memory_token_ids(self, chunks: Chunks, counts: Tensor, width: int) -> Tensor:
        """Return the encoder's position ids of `counts` memory tokens, `(num_chunks, width)` (EPL, Tables 1 and
        12)."""
        lengths = torch.tensor(chunks.lengths, device=counts.device)
        return encoder_memory_ids(lengths, counts, chunks.starts, self.config.position_layout, width)

    def memory_rows(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> Iterator[MemoryRows]:
        """Yield `[S(i); M(i)]` for each pass of the encoder, with the memory tokens of all its ratios behind it."""
        # Without later tokens in sight and with the same positions, fewer tokens are the first ones of more.
        apart = self.has_bidirectional_memory or self.adds_pooled_embeddings
        are_nested = not apart and self.config.position_layout == "default"
        counts = [slot_counts(self.config, chunks.lengths, ratio) for ratio in ratios]
        chunks = self._with_markers(chunks)
        encoder = self.encoder_backbone.config
        # Layers of linear attention take no mask between the tokens of two ratios.
        is_pairwise = encoder._attn_implementation in PAIRWISE_MASKS and "linear_attention" not in layer_kinds(encoder)
        for places in [slice(None)] if are_nested or is_pairwise else [slice(i, i + 1) for i in range(len(counts))]:
            yield self._joined_rows(chunks, counts[places], ratios[places], are_nested)

    def _with_markers(self, chunks: Chunks) -> Chunks:
        if self.chunk_marker_embeddings is None:
            return chunks
        embeddings = self.encoder_backbone.get_input_embeddings()(chunks.input_ids)
        embeddings, lengths = with_markers(embeddings, chunks.lengths, *self.chunk_marker_embeddings.split(1))
        mask = first_places(lengths, embeddings.device)
        places = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        return replace(chunks, inputs_embeds=embeddings, attention_mask=mask, position_ids=places, lengths=lengths)

    def _joined_rows(
        self, chunks: Chunks, counts: Sequence[Sequence[int]], ratios: Sequence[int | Tensor], are_nested: bool
    ) -> MemoryRows:
        layout, config, device = self.config.position_layout, self.encoder_backbone.config, chunks.input_ids.device
        lengths = torch.tensor(chunks.lengths, device=device)
        blocks = [[max(of_chunk) for of_chunk in zip(*counts, strict=True)]] if are_nested else counts
        widths = [max(block) for block in blocks]
        if layout == "default":
            places = [n + m for block in blocks for n, m in zip(chunks.lengths, block, strict=True) if m]
            check_context_length(self.config, max(places, default=0))
        memory_ids = [
            self.memory_token_ids(chunks, torch.tensor(block, device=device), width)
            for block, width in zip(blocks, widths, strict=True)
        ]
        memory_mask = torch.cat([first_places(block, device) for block in blocks], dim=1)
        is_full = chunks.is_full and all(min(b) == max(b) for b in blocks)
        pad = layout != "default" and reads_falling_ids_as_packed(config, len(lengths))
        sequence = pack(chunks.attention_mask, memory_mask, pad_in_front=pad, is_full=is_full, pads_behind=True)
        context = chunks.inputs_embeds
        context = self.encoder_backbone.get_input_embeddings()(chunks.input_ids) if context is None else context
        tokens = torch.cat([self.memory_vectors(width) for width in widths]).expand(len(lengths), -1, -1)
        if self.adds_pooled_embeddings:
            row = (context.float(), chunks.attention_mask)
            sizes = zip(ratios, widths, strict=True)
            tokens = tokens + torch.cat([pooled_embeddings(*row, r, chunks.lengths, w) for r, w in sizes], dim=1)
        joined = torch.cat([context, tokens.to(context.dtype)], dim=1)
        inputs: dict[str, Any] = sequence.inputs(joined, torch.cat([chunks.position_ids, *memory_ids], dim=1))
        if len(blocks) > 1 or self.has_bidirectional_memory:
            seen = (widths, self.has_bidirectional_memory, context.dtype)
            inputs["attention_mask"] = _block_mask(config, sequence, lengths, *seen)
        firsts = [0] * len(counts) if are_nested else [sum(widths[:i]) for i in range(len(widths))]
        groups = [(first, first_places(count, device)) for first, count in zip(firsts, counts, strict=True)]
        return MemoryRows(inputs, sequence.text_places, groups)

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> Sequence[Slots]:
        return [slots for rows in self.memory_rows(chunks, ratios) for slots in self.read_memory(rows)]

    def read_memory(self, rows: MemoryRows) -> Sequence[Slots]:
        """Run the encoder over the rows and read the memory of each ratio."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its memory is read from")

    def token_states(self, rows: MemoryRows) -> list[Tensor]:
        """Return the memory tokens' last hidden states of each ratio, `(num_chunks, num_slots, hidden_size)`."""
        return rows.read(self.encoder_outputs(**rows.inputs).last_hidden_state)

    def token_key_values(self, rows: MemoryRows) -> list[KeyValues]:
        """Return the memory tokens' keys and values of each ratio, by layer."""
        recorder = KeyValueRecorder(rows.places)
        self.encoder_outputs(**rows.inputs, cache=recorder)
        layers = recorder.close(self.dtype)
        spans = [slice(first, first + mask.shape[1]) for first, mask in rows.groups]
        return [tuple((keys[:, :, span], values[:, :, span]) for keys, values in layers) for span in spans]
