# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints of other code bases, as checkpoints of this package's methods.

A format names a tensor that marks it, the fields that its configuration becomes, and what its tensors are called here.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..parts.text_ids import opening_ids
from .base_weights import base_name
from .checkpoint_card import is_hub_id
from .pretrained_bases import base_place

Tensors = dict[str, Tensor]
# The maps of a layer that LoRA is on, as PEFT names them behind a model's own prefix.
_LORA = r"(layers\..*)\.lora_([AB])\.default\.weight"
_ENCODER_LORA = r"model.language_model.\1.lora_\2.encoder.weight"


@dataclass(frozen=True)
class Format:
    """A form of published checkpoints.

    Args:
        method: name of the method here.
        marker: start of a tensor's name that no other format has.
        fields: the method's fields, of configuration and tensors.
        names: patterns of tensors, and their names here; `None` for those that this package does not need.
        prepare: splits and reshapes tensors first, given the configuration.
        base: prefix of the base's own tensors in the checkpoint, beside the configuration field that describes the
            base ("" for the whole configuration); `None` where the base is another repository.
        license: of the weights, as the Hub writes it; `None` where its own card or the base's names it.
    """

    method: str
    marker: str
    fields: Callable[[Mapping[str, Any], Tensors], dict[str, Any]]
    names: Sequence[tuple[str, str | None]]
    prepare: Callable[[Mapping[str, Any], Tensors], Tensors] = lambda config, tensors: tensors
    base: tuple[str, str] | None = None
    license: str | None = None


def _ratio(chunk_size: int, num_slots: int) -> int:
    """The lowest ratio at which a chunk has so many slots."""
    ratio = math.ceil(chunk_size / num_slots)
    if math.ceil(chunk_size / ratio) != num_slots:
        raise ValueError(f"no whole ratio gives {num_slots} slots for chunks of {chunk_size} tokens")
    return ratio


def _lora(tensors: Tensors, alpha: float) -> dict[str, Any]:
    """Settings of the adapter among the tensors; its alpha is in the authors' code alone."""
    names = [name for name in tensors if ".lora_A." in name]
    targets = sorted({name.partition(".lora_A.")[0].rpartition(".")[2] for name in names})
    rank = tensors[names[0]].shape[0]
    return {"rank": rank, "alpha": alpha, "dropout": 0.05, "target_modules": targets}


def _check(config: Mapping[str, Any], **required: Any) -> None:
    """Refuse a variant of the authors' code that has no counterpart here."""
    for name, value in required.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} of the checkpoint must be {value!r}, got {config[name]!r}")


# --- ComprExIT, github.com/Jiangnan0522/ComprExIT ---


def _comprexit_fields(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    _check(config, pooling_method="ot-dy-src", top_k_layers=-1, lora_compressor=False)
    return {
        "compression_ratios": (config.get("compression_ratio", 4),),
        "chunk_size": config["map_reduce_seg_len"] if config.get("trained_with_map_reduce") else None,
        "gate_size": config["layerwise_pooling_gate_hidden"],
        "gate_temperature": config["layerwise_pooling_temperature"],
        "window_size": config["ot_window_size"],
        "metric_size": config["ot_metric_dim"],
        "transport_iterations": config["ot_n_iter"],
    }


_COMPREXIT_NAMES = [
    (r"pooling_layer\.query_fusion_weights", "model.layer_gate.layer_prior"),
    (r"pooling_layer\.layer_fusion_q_prj\.(.+)", r"model.layer_gate.context.\1"),
    (r"pooling_layer\.layer_fusion_k_prj\.(.+)", r"model.layer_gate.layer.\1"),
    (r"pooling_layer\.layer_fusion_v_prj\.(.+)", r"model.layer_gate.anchor.\1"),
    (r"pooling_layer\.layer_fusion_layer_embeddings", "model.layer_gate.layer_embeddings"),
    (r"pooling_layer\.metric_ln\.(.+)", r"model.transmission.metric.0.\1"),
    (r"pooling_layer\.metric_prj\.(.+)", r"model.transmission.metric.1.\1"),
    (r"pooling_layer\.source_mass\.ln\.(.+)", r"model.transmission.sender_score.0.\1"),
    (r"pooling_layer\.source_mass\.mass_prj\.(.+)", r"model.transmission.sender_score.1.\1"),
    (r"pooling_layer\.value_ln\.(.+)", r"model.transmission.value_norm.\1"),
    (r"pooling_layer\.value_prj\.(.+)", r"model.transmission.value.\1"),
    (r"projector\.mlp\.(0|2)\.(.+)", r"model.slot_mlp.\1.\2"),
]

# --- its ICAE ---


def _comprexit_icae_fields(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    chunk_size, num_slots = config["context_length"], tensors["memory_embeddings"].shape[0]
    return {
        "compression_ratios": (_ratio(chunk_size, num_slots),),
        "chunk_size": chunk_size,
        "memory_tokens": "fixed",
        "task_token_ids": {},
        "bos_before_slots": True,
        "encoder_lora": _lora(tensors, config["lora_alpha"]),
    }


# --- ICAE, github.com/getao/icae, second version ---


def _icae_fields(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    num_slots = tensors["memory_embeddings"].shape[0]
    # Of its code: four tokens for each memory token, alpha 32.
    fields = {"compression_ratios": (4,), "chunk_size": 4 * num_slots, "memory_tokens": "fixed"}
    return {**fields, "encoder_lora": _lora(tensors, 32.0)}


def _icae_tokens(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The table has memory tokens, then [AE], [LM] and [FT], which a fine-tuned checkpoint puts before questions."""
    table = tensors.pop("memory_token_embed.weight")
    return {**tensors, "memory_embeddings": table[:-3], "task_embeddings": table[[-3, -1]]}


# --- 500xCompressor, github.com/ZongqianLi/500xCompressor ---


def _500x_fields(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    # Of its code: 500 tokens at once, alpha 32.
    return {
        "compression_ratios": (_ratio(500, tensors["memory_embeddings"].shape[0]),),
        "chunk_size": 500,
        "memory_tokens": "fixed",
        "task_token_ids": {},
        "bos_before_text": False,
        "encoder_lora": _lora(tensors, 32.0),
    }


def _500x_tensors(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The query map of the last layer bears on no key or value."""
    last = max(int(match[1]) for name in tensors if (match := re.search(r"\.layers\.(\d+)\.", name)))
    idle = re.compile(rf"\.layers\.{last}\.self_attn\.(?!k_proj|v_proj)")
    tensors = {name: tensor for name, tensor in tensors.items() if not idle.search(name)}
    return {**tensors, "memory_embeddings": tensors["memory_embeddings"][0]}


# --- AutoCompressor, github.com/princeton-nlp/AutoCompressors, on Llama ---


def _autocompressor_fields(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    # Its longest segments.
    chunk_size, num_slots = 1536, config["summary_length"]
    return {
        "compression_ratios": (_ratio(chunk_size, num_slots),),
        "chunk_size": chunk_size,
        "accumulate_summaries": config["accumulate_summary"],
        "encoder_lora": None,
        "decoder_lora": None,
    }


# --- LCLM, github.com/LeonLixyz/LCLM ---


def _lclm_fields(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    _check(config, pooling="mean", adapter_type="mlp", boundary_overlap=0)
    return {
        "compression_ratios": (config["compression_ratio"],),
        "chunk_size": config["encoder_window_size"],
        "encoder_attention": config["encoder_mask_type"],
        "encoder_lora": None,
        "decoder_lora": None,
        "linear_after_pooling": False,
        "normed_mlp_size": tensors["fc1.weight"].shape[0],
        "normed_mlp_bias": True,
    }


# --- COCOM and PISCO, huggingface.co/naver ---


def _naver_fields(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    _check(config, compr_model_name=None, lora=True)
    adapter, prompt = {**_lora(tensors, 2.0 * config["lora_r"]), "dropout": 0.1}, "[INST]{question}\n[/INST]\n"
    own: dict[str, Any] = {"linear_after_encoder": False, "shared_adapter": True, "bos_before_slots": True}
    if "doc_max_length" in config:
        _check(config, training_form="both_separately", different_mem_tokens=True, kbtc_training=False)
        own = {"memory_tokens": "fixed", "task_token_ids": {}, "prompt_format": "chat"}
        own["slots_after_ids"] = opening_ids(AutoTokenizer.from_pretrained(config["decoder_model_name"]))
        prompt = "Question:{question}"
    return {
        "compression_ratios": (config["compr_rate"],),
        "chunk_size": config.get("doc_max_length", 128),
        "encoder_lora": adapter,
        "decoder_lora": adapter,
        "slot_markers": {"after": int(config["sep"])},
        "chunk_markers": True,
        "prompts": {"question_answering": prompt},
        **own,
    }


def _naver_tensors(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The tables end with memory tokens, <AE>, <ENC> and <SEP>; the encoder reads <ENC>, BOS, text and EOS."""
    num_added = 3 + (config["doc_max_length"] // config["compr_rate"] if "doc_max_length" in config else 1)
    tables = {name: t for name, t in tensors.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
    rows = next(table for name, table in tables.items() if "embed_tokens" in name)
    eos = AutoTokenizer.from_pretrained(config["decoder_model_name"]).eos_token_id
    own = {"memory_embeddings": rows[-num_added:-3], "chunk_marker_embeddings": rows[[-2, eos]]}
    own |= {"marker_embeddings": rows[-1:]} if config["sep"] else {}
    return {**tensors, **own, **{name: table[:-num_added] for name, table in tables.items()}}


_NAVER_NAMES = [
    (r"((?:memory|chunk_marker|marker)_embeddings)", r"model.\1"),
    (rf"decoder\.base_model\.model\.model\.{_LORA}", r"model.language_model.\1.lora_\2.shared.weight"),
    (
        r"(en|de)coder_adapter\.model\.(layers\..*)\.lora_([AB])\.weight",
        r"model.language_model.\2.lora_\3.\1coder.weight",
    ),
    (r"(?:decoder\.base_model\.model\.)?model\.(.+)", r"model.language_model.\1"),
    (r"(?:decoder\.base_model\.model\.)?(lm_head\.weight)", r"\1"),
]
# PISCO's card says so, its metadata leave the NC out; COCOM is non-commercial, too.
_NAVER: Any = {"fields": _naver_fields, "names": _NAVER_NAMES, "prepare": _naver_tensors, "license": "cc-by-nc-4.0"}

FORMATS: dict[str, Format] = {
    "comprexit": Format(
        method="comprexit",
        marker="pooling_layer.query_fusion_weights",
        fields=_comprexit_fields,
        names=_COMPREXIT_NAMES,
        # The frozen base is stored under one of two names.
        prepare=lambda _, tensors: {key.replace("compressor.backbone.", "lm.model."): t for key, t in tensors.items()},
        base=("lm.", "backbone_config_dict"),
        license="llama3.2",
    ),
    "comprexit_icae": Format(
        method="icae",
        marker="ae_embedding",
        fields=_comprexit_icae_fields,
        names=[
            (r"memory_embeddings", "model.memory_embeddings"),
            (rf"compressor\.base_model\.model\.backbone\.{_LORA}", _ENCODER_LORA),
            # The frozen base once more, and a token of reconstruction that training did not use.
            (r"compressor\.base_model\.model\.backbone\.(?!.*lora_).+|ae_embedding", None),
        ],
        prepare=lambda _, tensors: {**tensors, "memory_embeddings": tensors["memory_embeddings"][0]},
        base=("lm.", "backbone_config_dict"),
        license="llama3.2",
    ),
    "icae": Format(
        method="icae",
        marker="memory_token_embed.weight",
        fields=_icae_fields,
        names=[
            (r"(memory|task)_embeddings", r"model.\1_embeddings"),
            (rf"icae\.base_model\.model\.model\.{_LORA}", _ENCODER_LORA),
        ],
        prepare=_icae_tokens,
    ),
    "500xcompressor": Format(
        method="five_hundred_x",
        marker="llama.base_model.model.",
        fields=_500x_fields,
        names=[
            (r"memory_embeddings", "model.memory_embeddings"),
            (rf"llama\.base_model\.model\.model\.{_LORA}", _ENCODER_LORA),
        ],
        prepare=_500x_tensors,
    ),
    "autocompressor": Format(
        method="autocompressor",
        marker="embed_summary.weight",
        fields=_autocompressor_fields,
        names=[(r"embed_summary\.weight", "model.memory_embeddings")],
        base=("", ""),
        license="llama2",
    ),
    "lclm": Format(
        method="mean_pooling",
        marker="fc1.weight",
        fields=_lclm_fields,
        names=[
            (r"norm\.weight", "model.slot_mlp.0.weight"),
            (r"fc1\.(.+)", r"model.slot_mlp.1.\1"),
            (r"fc2\.(.+)", r"model.slot_mlp.3.\1"),
        ],
    ),
    "cocom": Format("compression_tokens", "decoder.base_model.model.", **_NAVER),
    "pisco": Format("icae", "decoder_adapter.", **_NAVER),
}


def convert(name: str, output: str | Path, base: str | None = None) -> str:
    """Write a published checkpoint as one of this package.

    Args:
        name: Hub id or folder, or a single file of tensors.
        output: folder to write; it does not exist, or is empty.
        base: Hub id or folder of the language model, for checkpoints that lack it; COCOM's and PISCO's name theirs.

    Returns:
        The format's name.

    Raises:
        ValueError: an unknown format, tensors that are unknown, missing or of another shape, a base that is missing
            or not wanted, or an `output` with files in it.
    """
    from huggingface_hub import ModelCard, snapshot_download

    from .. import from_base

    output = Path(output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty")
    place = Path(name) if Path(name).exists() else Path(snapshot_download(name))
    config, tensors = _read(place)
    names = "\n".join(["", *tensors])
    format_name = next((key for key, form in FORMATS.items() if f"\n{form.marker}" in names), None)
    if format_name is None:
        raise ValueError(f"{name} is in none of the known formats, {', '.join(FORMATS)}")
    form = FORMATS[format_name]
    if "decoder_model_name" in config:
        base = config["decoder_model_name"] = str(base_place(base or config["decoder_model_name"]))
    tensors = form.prepare(config, tensors)
    renamed, others = _renamed(tensors, form)
    if others and form.base is None:
        raise ValueError(f"{name} has {len(others)} unknown tensors, the first is {min(others)!r}")
    with _base_folder(place, config, others, form, base) as (folder, encoder):
        fields = form.fields(config, tensors)
        model = from_base(folder, method=form.method, encoder=encoder, dtype="auto", **fields)
        _take(model, renamed, name)
        if base is None:
            model.config.base_model_name_or_path = name if is_hub_id(name) else Path(name).name
        model.save_pretrained(output, include_base=None if base else True)
        AutoTokenizer.from_pretrained(folder).save_pretrained(output)
        cards = [file for source in (place, Path(folder)) if (file := source / "README.md").is_file()]
        licenses = [form.license, *(ModelCard.load(file, ignore_metadata_errors=True).data.license for file in cards)]
    card = ModelCard.load(output / "README.md")
    card.data.license = next(filter(None, licenses), None)
    card.save(output / "README.md")
    return format_name


def _read(place: Path) -> tuple[dict[str, Any], Tensors]:
    """A checkpoint's configuration, if it has one, and its tensors; of an LCLM those of its adapter alone."""
    if place.is_file():
        return {}, _tensors_of(place)
    described = [file for name in ("model_config.json", "config.json") if (file := place / name).is_file()]
    config = json.loads(described[0].read_text(encoding="utf-8")) if described else {}
    folder = place / "adapter" if (place / "adapter").is_dir() else place
    # A folder of PISCO may also hold the weights of an earlier version.
    newest = [] if (folder / "adapters.pth").is_file() else sorted(folder.glob("*.safetensors"))
    files = newest or sorted(file for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    return config, {key: tensor for file in files for key, tensor in _tensors_of(file).items()}


def _tensors_of(file: Path) -> Tensors:
    if file.suffix == ".safetensors":
        return load_file(file)
    tensors: Tensors = {}
    for key, value in torch.load(file, map_location="cpu", weights_only=True).items():
        tensors |= {key: value} if isinstance(value, Tensor) else {f"{key}.{name}": t for name, t in value.items()}
    return tensors


def _renamed(tensors: Tensors, form: Format) -> tuple[Tensors, Tensors]:
    """The method's tensors by their names here, and all others, but for those that are not needed."""
    renamed, others = {}, {}
    for key, tensor in tensors.items():
        names = next((pair for pair in form.names if re.fullmatch(pair[0], key)), None)
        if names is None:
            others[key] = tensor
        elif names[1] is not None:
            renamed[re.sub(names[0], names[1], key)] = tensor
    return renamed, others


@contextmanager
def _base_folder(
    place: Path, config: Mapping[str, Any], tensors: Tensors, form: Format, base: str | None
) -> Iterator[tuple[str, str | None]]:
    """The language model that a checkpoint is on, as something to load, and its encoder if it has one of its own."""
    has_folders = (place / "decoder").is_dir()
    if (base is None) == (form.base is None and not has_folders):
        what = "lacks its base: name it with --base" if base is None else "has its base: leave --base out"
        raise ValueError(f"the checkpoint {what}")
    if base is not None:
        yield str(base_place(base)), None
    elif has_folders:
        yield str(place / "decoder"), str(place / "encoder")
    else:
        prefix, field = form.base or ("", "")
        described = dict(config[field] if field else config)
        described.pop("auto_map", None)
        base_config = CONFIG_MAPPING[described["model_type"]].from_dict(described)
        state = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
        table = state["model.embed_tokens.weight"]
        base_config.vocab_size = len(table)
        model = AutoModelForCausalLM.from_config(base_config, dtype=table.dtype)
        missing, unknown = model.load_state_dict(state, strict=False)
        wrong = [key for key in missing if key not in model.all_tied_weights_keys]
        wrong += [key for key in unknown if not key.endswith("rotary_emb.inv_freq")]
        if wrong:
            raise ValueError(f"the checkpoint {'lacks' if wrong[0] in missing else 'has the unknown'} {wrong[0]!r}")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(place).save_pretrained(folder)
            yield folder, None


@torch.no_grad()
def _take(model: Any, tensors: Tensors, name: str) -> None:
    """Give a compressor's own parameters their values; `ValueError` unless each has one, and the base has its own."""
    own = {key: parameter for key, parameter in model.named_parameters() if base_name(key) is None}
    base = {key: parameter for key, parameter in model.named_parameters() if key not in own and key in tensors}
    for key, parameter in base.items():
        tensor = tensors.pop(key).to(parameter.dtype)
        if not torch.equal(tensor, parameter[: len(tensor)]):
            raise ValueError(f"{key} of {name} must have the base's values: adapters alone are converted")
    if unlike := sorted(own.keys() ^ tensors.keys()):
        what = "lacks" if unlike[0] in own else "has more than the method needs:"
        raise ValueError(f"{name} {what} {unlike[0]!r}, and {len(unlike) - 1} more tensors differ")
    for key, parameter in own.items():
        if parameter.shape != tensors[key].shape:
            shapes = tuple(tensors[key].shape), tuple(parameter.shape)
            raise ValueError(f"{key} has the shape {shapes[0]} in {name}, and {shapes[1]} on this base")
        parameter.copy_(tensors[key])
