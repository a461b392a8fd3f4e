# SPDX-License-Identifier: Apache-2.0
"""The test matrix of all methods: a new method joins by one entry in `METHODS`.

A test asks for what it needs by the name of its argument: `method_case` (each method as it comes), `backbone_case` (on
every base architecture and attention), `variant_case` (with every hard setting), `case` (both of them).
"""

import functools
import string
import sys
import sysconfig
import venv
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import hypothesis
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from context_compressors.configuration.configuration_compression_tokens import CompressionTokensConfig
from context_compressors.configuration.configuration_comprexit import ComprExITConfig
from context_compressors.configuration.configuration_five_hundred_x import FiveHundredXConfig
from context_compressors.configuration.configuration_gmsa import GMSAConfig
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.configuration.configuration_tcp_autoencoder import TCPAutoencoderConfig
from context_compressors.modeling.modeling_compression_tokens import (
    CompressionTokensForCausalLM,
    CompressionTokensModel,
)
from context_compressors.modeling.modeling_comprexit import ComprExITForCausalLM, ComprExITModel
from context_compressors.modeling.modeling_five_hundred_x import FiveHundredXForCausalLM, FiveHundredXModel
from context_compressors.modeling.modeling_gmsa import GMSAForCausalLM, GMSAModel
from context_compressors.modeling.modeling_icae import ICAEForCausalLM, ICAEModel
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM, MeanPoolingModel
from context_compressors.modeling.modeling_tcp_autoencoder import TCPAutoencoderForCausalLM, TCPAutoencoderModel

VOCAB_SIZE, HIDDEN_SIZE = 128, 32
PAD, BOS, EOS = 0, 1, 2
TASK_TOKENS = {"[AE]": VOCAB_SIZE, "[LM]": VOCAB_SIZE + 1}
SMALL_LORA = {"rank": 4, "alpha": 8.0}
MEMORY_LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}
PRETRAINED = Path(__file__).resolve().parents[2].parent / "shared" / "models"

# Tests import the helper modules beside them by name.
sys.path.append(str(Path(__file__).parent))

# A busy machine is no reason to fail.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")


@dataclass(frozen=True)
class Method:
    """A method under test.

    Args:
        name: in the tests' ids.
        config_class, model_class, causal_lm_class: its classes.
        easy: fields of its plainest useful setting; two ratios at least, the first of them 2.
        hard: further settings, by name; each replaces some of the easy fields.
        bidirectional: whether the encoder of the easy setting sees what comes later.
        memory_tokens: whether memory tokens stand behind the context.
        sliding_window: of the bases that have one, where the method cannot do with the tests' short one.
        own_encoder: whether the encoder always has weights of its own.
    """

    name: str
    config_class: type
    model_class: type
    causal_lm_class: type
    easy: dict[str, Any]
    hard: dict[str, dict[str, Any]] = field(default_factory=dict)
    bidirectional: bool = True
    memory_tokens: bool = False
    sliding_window: int | None = None
    own_encoder: bool = False
    idle: tuple[str, ...] = ()


METHODS = [
    Method(
        name="mean_pooling",
        config_class=MeanPoolingConfig,
        model_class=MeanPoolingModel,
        causal_lm_class=MeanPoolingForCausalLM,
        easy={"compression_ratios": (2, 3, 8), "encoder_lora": SMALL_LORA, "decoder_lora": SMALL_LORA},
        hard={
            "chunks": {"chunk_size": 5},
            "uniform": {"chunk_size": 6, "position_layout": "uniform"},
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "task_token_ids": TASK_TOKENS},
            "bos_first": {"bos_before_slots": True},
            "bos_first_enhanced": {"bos_before_slots": True, "position_layout": "enhanced", "chunk_size": 4},
            "task_tokens": {"task_token_ids": TASK_TOKENS},
            "no_linear": {"linear_after_pooling": False},
            "embeddings": {"encoder_type": "embeddings", "encoder_lora": None},
            "causal": {"encoder_attention": "causal"},
            "fixed_encoder": {"encoder_lora": None},
            "fixed_decoder": {"decoder_lora": None},
            "attention_lora": {"encoder_lora": {**SMALL_LORA, "target_modules": ["q_proj", "v_proj"]}},
            "tied": {"decoder_config": {"tie_word_embeddings": True}},
            "own_encoder": {"encoder_config": {}},
            "wide_encoder": {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4}},
        },
    ),
    Method(
        name="compression_tokens",
        config_class=CompressionTokensConfig,
        model_class=CompressionTokensModel,
        causal_lm_class=CompressionTokensForCausalLM,
        easy={"compression_ratios": (2, 3, 8), "encoder_lora": SMALL_LORA, "decoder_lora": SMALL_LORA},
        hard={
            "bidirectional": {"token_attention": "bidirectional"},
            "bidirectional_chunks": {"token_attention": "bidirectional", "chunk_size": 5},
            "uniform": {"chunk_size": 6, "position_layout": "uniform"},
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "task_token_ids": TASK_TOKENS},
            "bidirectional_enhanced": {"token_attention": "bidirectional", "position_layout": "enhanced"},
            "bos_first": {"bos_before_slots": True},
            "no_linear": {"linear_after_encoder": False},
            "fixed_encoder": {"encoder_lora": None},
            "tied": {"decoder_config": {"tie_word_embeddings": True}},
            "wide_encoder": {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4}},
        },
        bidirectional=False,
        memory_tokens=True,
    ),
    Method(
        name="icae",
        config_class=ICAEConfig,
        model_class=ICAEModel,
        causal_lm_class=ICAEForCausalLM,
        easy={"compression_ratios": (2, 3, 8), "chunk_size": 64, "encoder_lora": MEMORY_LORA},
        hard={
            "chunks": {"chunk_size": 5},
            "uniform": {"chunk_size": 6, "position_layout": "uniform"},
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced"},
            "fixed": {"chunk_size": 6, "memory_tokens": "fixed"},
            "fixed_enhanced": {"chunk_size": 6, "memory_tokens": "fixed", "position_layout": "enhanced"},
            "no_task_tokens": {"task_token_ids": {}, "position_layout": "enhanced"},
            "decoder_lora": {"decoder_lora": SMALL_LORA},
            "own_encoder": {"encoder_config": {}},
            "tied": {"decoder_config": {"tie_word_embeddings": True}},
        },
        bidirectional=False,
        memory_tokens=True,
    ),
    Method(
        name="five_hundred_x",
        config_class=FiveHundredXConfig,
        model_class=FiveHundredXModel,
        causal_lm_class=FiveHundredXForCausalLM,
        easy={"compression_ratios": (2, 3, 8), "chunk_size": 64, "encoder_lora": MEMORY_LORA},
        hard={
            "chunks": {"chunk_size": 5},
            "uniform": {"chunk_size": 6, "position_layout": "uniform"},
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced"},
            "fixed": {"chunk_size": 6, "memory_tokens": "fixed", "position_layout": "enhanced"},
            "bos": {"reconstruction_trigger": "bos", "position_layout": "enhanced"},
            "all_linear": {"encoder_lora": SMALL_LORA},
            "own_encoder": {"encoder_config": {}},
            "tied": {"decoder_config": {"tie_word_embeddings": True}},
        },
        bidirectional=False,
        memory_tokens=True,
        sliding_window=128,
    ),
    Method(
        name="comprexit",
        config_class=ComprExITConfig,
        model_class=ComprExITModel,
        causal_lm_class=ComprExITForCausalLM,
        easy={"compression_ratios": (2, 3, 8), "gate_size": 8, "metric_size": 8, "window_size": 4},
        hard={
            "chunks": {"chunk_size": 5},
            "uniform": {"chunk_size": 6, "position_layout": "uniform"},
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "task_token_ids": TASK_TOKENS},
            "wide_window": {"window_size": 12},
            "segments": {"window_size": 5, "segment_windows": 1, "gate_temperature": 4.0, "transport_epsilon": 1.0},
            "bos_behind_slots": {"bos_before_slots": False},
            "last_layer": {"token_anchors": "last_layer"},
            "layer_mean": {"token_anchors": 1, "slot_aggregation": "mean"},
            "layer_attention": {"token_anchors": 0, "slot_aggregation": "window_attention"},
            "window_attention": {"slot_aggregation": "window_attention"},
            "literal": {"literal_equations": True, "gate_temperature": 4.0},
            "shuffled": {"shuffled_receivers": True},
            "uniform_mass": {"uniform_sender_share": 1.0},
            "fixed_encoder": {"decoder_lora": SMALL_LORA},
            "encoder_lora": {"encoder_lora": SMALL_LORA},
            "own_encoder": {"encoder_config": {}},
            "tied": {"decoder_config": {"tie_word_embeddings": True}},
            "wide_encoder": {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4}},
        },
        bidirectional=False,
        idle=("layer_gate.layer.bias", "sender_score.1.bias"),
    ),
    Method(
        name="gmsa",
        config_class=GMSAConfig,
        model_class=GMSAModel,
        causal_lm_class=GMSAForCausalLM,
        easy={"compression_ratios": (2, 3, 8), "encoder_layers": 1, "encoder_lora": SMALL_LORA},
        hard={
            "chunks": {"chunk_size": 5},
            "uniform": {"chunk_size": 6, "position_layout": "uniform"},
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "task_token_ids": TASK_TOKENS},
            "bos_first": {"bos_before_slots": True},
            "keft": {"training_stage": "keft"},
            "two_blocks": {"lsa_layers": 2, "encoder_layers": 2},
            "no_final_norm": {"lsa_final_norm": False},
            "no_alignment": {"lsa_layers": 0},
            "appended_tokens": {"appended_tokens": 16},
            "fixed_encoder": {"encoder_lora": None},
            "decoder_lora": {"decoder_lora": SMALL_LORA},
            "tied": {"decoder_config": {"tie_word_embeddings": True}},
            "wide_encoder": {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4}},
        },
        bidirectional=False,
        own_encoder=True,
    ),
    Method(
        name="tcp_autoencoder",
        config_class=TCPAutoencoderConfig,
        model_class=TCPAutoencoderModel,
        causal_lm_class=TCPAutoencoderForCausalLM,
        easy={
            "compression_ratios": (2, 3, 8),
            "encoder_layers": 1,
            "encoder_lora": SMALL_LORA,
            "appended_tokens": 16,
        },
        hard={
            "chunks": {"chunk_size": 5},
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "task_token_ids": TASK_TOKENS},
            "keft": {"training_stage": "keft"},
            "standard_normal": {"memory_start": "standard_normal"},
            "wide_encoder": {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4}},
        },
        bidirectional=False,
        memory_tokens=True,
        own_encoder=True,
    ),
]

# Sliding windows are shorter than the tests' sequences; the logits' caps are low enough to bend them.
BASES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 12}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "gemma2": (
        Gemma2Config,
        {"sliding_window": 8, "head_dim": 12, "query_pre_attn_scalar": 12, "final_logit_softcapping": 2.0},
    ),
}
# transformers has no sdpa for Gemma 2, whose attention scores are capped.
BACKBONES = [
    (name, attention) for name in BASES for attention in ("eager", "sdpa") if (name, attention) != ("gemma2", "sdpa")
]


def base_config(architecture: str = "llama", **fields: Any) -> Any:
    """Configuration of a tiny language model."""
    config_class, own_fields = BASES[architecture]
    return config_class(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "tie_word_embeddings": False,
            # Far from zero, so that positions, masks and adapters matter.
            "initializer_range": 0.3,
            **own_fields,
            **fields,
        }
    )


@functools.cache
def _cached_model(case: "Case") -> Any:
    return case.build()


@dataclass(frozen=True)
class Case:
    """One method in one setting on one base."""

    method: Method
    variant: str = "easy"
    architecture: str = "llama"
    attention: str = "sdpa"

    def __hash__(self) -> int:
        return hash((self.method.name, self.variant, self.architecture, self.attention))

    def __str__(self) -> str:
        return f"{self.method.name}-{self.variant}-{self.architecture}-{self.attention}"

    @property
    def fields(self) -> dict[str, Any]:
        return {**self.method.easy, **self.method.hard.get(self.variant, {})}

    @property
    def model(self) -> Any:
        """A `ForCausalLM` in evaluation mode that other tests use, too: not to be changed."""
        return _cached_model(self)

    def config(self, **fields: Any) -> Any:
        fields = {**self.fields, **fields}
        window = {}
        if self.method.sliding_window and "sliding_window" in BASES[self.architecture][1]:
            window = {"sliding_window": self.method.sliding_window}
        for name in ("decoder_config", "encoder_config"):
            if name == "decoder_config" or fields.get(name) is not None:
                fields[name] = base_config(self.architecture, **{**window, **fields.get(name, {})})
        return self.method.config_class(**fields)

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> Any:
        """A new `ForCausalLM` in evaluation mode, with nothing at a start value that could hide a mistake."""
        torch.manual_seed(seed)
        config = self.config(**fields)
        config._attn_implementation = self.attention
        model = self.method.causal_lm_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.15 * torch.randn_like(parameter)
        return cast_frozen(model, dtype).eval()

    @property
    def marks(self) -> tuple:
        """In a developer's inner loop one method goes through most of it, the others as they come."""
        is_quick = self.method is METHODS[0] and self.variant in QUICK and self.architecture in ("llama", "gemma2")
        is_quick = is_quick or self == Case(self.method)
        return () if is_quick else (pytest.mark.slow,)

    @property
    def all_of_its_method(self) -> list["Case"]:
        """The method on every base, and in every hard setting."""
        return [case for case in CASES["case"] if case.method.name == self.method.name]

    def on(self, **changes: Any) -> "Case":
        return replace(self, **changes)


def cast_frozen(model: Any, dtype: torch.dtype) -> Any:
    """The model as `from_pretrained(dtype=...)` gives it: what is frozen in that type, what trains in float32."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


# Of the first method's settings, those that have little in common.
QUICK = ("easy", "chunks", "bos_first_enhanced", "task_tokens", "embeddings", "tied", "wide_encoder")
METHOD_CASES = [Case(method) for method in METHODS]
BACKBONE_CASES = [
    case.on(architecture=architecture, attention=attention)
    for case in METHOD_CASES
    for architecture, attention in BACKBONES
]
VARIANT_CASES = [case.on(variant=variant) for case in METHOD_CASES for variant in case.method.hard]
CASES = {
    "method_case": METHOD_CASES,
    "backbone_case": BACKBONE_CASES,
    "variant_case": METHOD_CASES + VARIANT_CASES,
    "case": BACKBONE_CASES + VARIANT_CASES,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, cases in CASES.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, [pytest.param(case, marks=case.marks, id=str(case)) for case in cases])


def _random_rows(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def _pad_rows(rows: list[torch.Tensor], side: str = "right", value: int = PAD) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `(batch_size, width)`; two pads more than needed, so that no row is without."""
    width = max(len(row) for row in rows) + 2
    ids = torch.full((len(rows), width), value)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, row in enumerate(rows):
        spare = width - len(row)
        if side == "left":
            places = torch.arange(spare, width)
        elif side == "right":
            places = torch.arange(len(row))
        else:
            # Pads in the middle and at both ends.
            places = torch.arange(len(row)) + spare // 3
            places[len(row) // 2 :] += spare - spare // 3 - spare // 3
        ids[i, places], mask[i, places] = row, 1
    return ids, mask


def _slots(memory: Any) -> torch.Tensor:
    if memory.key_values is None:
        return memory.embeddings
    return torch.cat([part.transpose(1, 2).flatten(2) for pair in memory.key_values for part in pair], dim=2)


@pytest.fixture(scope="session")
def method_cases():
    """Each method as it comes, by name, for the tests of one method alone."""
    return {case.method.name: case for case in METHOD_CASES}


@pytest.fixture(scope="session")
def slots():
    """`slots(memory)`: what a memory carries, (batch_size, num_slots, width); of key/values those of all layers."""
    return _slots


@pytest.fixture(scope="session")
def random_rows():
    """`random_rows(lengths, seed)`: rows of ordinary token ids."""
    return _random_rows


@pytest.fixture(scope="session")
def pad_rows():
    """`pad_rows(rows, side, value)`: their ids and mask, padded on a side."""
    return _pad_rows


@pytest.fixture(scope="session")
def tiny_base_config():
    """`tiny_base_config(architecture, **fields)`: configuration of a tiny language model."""
    return base_config


@pytest.fixture(scope="session")
def clean_python(tmp_path_factory) -> Path:
    """An environment with this one's dependencies, and without this package.

    A line of a .pth file adds the folder alone: the .pth files inside it, the editable install's among them, are not
    read.
    """
    folder = tmp_path_factory.mktemp("clean") / "environment"
    venv.create(folder, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
    dependencies = list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))
    (own / "dependencies.pth").write_text("\n".join(dependencies) + "\n", encoding="utf-8")
    return Path(sysconfig.get_path("scripts", scheme="venv", vars=paths)) / Path(sys.executable).name


@pytest.fixture
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the tiny models' vocabulary: one token a character, BOS in front of what it encodes."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    names = ["<pad>", "<s>", "</s>", *characters]
    names += [f"<unused_{index}>" for index in range(VOCAB_SIZE - len(names))]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """`local_hub(repo_id, config)`: put a new language model into a cache that is all of the Hub there is; its commit.

    `local_hub.folder` is the cache.
    """
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def put(repo_id: str, config: Any, seed: int = 1, dtype: torch.dtype = torch.float32) -> str:
        commit = f"{seed:040x}"
        repository = folder / f"models--{repo_id.replace('/', '--')}"
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        return commit

    put.folder = folder
    return put


@pytest.fixture(scope="session")
def start_light():
    """`start_light(case, local_hub, **fields)`: a case's model on a base of the Hub, nothing at its start value."""

    def start(case: Case, hub: Any, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
        config = case.config()
        hub("me/base", config.decoder_config, dtype=dtype)
        fields = {**case.fields, **fields}
        own = {name: fields.pop(name) for name in ("decoder_config", "encoder_config") if name in fields}
        if own.get("encoder_config"):
            # An encoder may be cut to its first layers: its base is not.
            hub("me/encoder", base_config(case.architecture, **own["encoder_config"]), seed=2)
            fields["encoder"] = "me/encoder"
        elif "encoder_config" in own:
            fields["encoder_config"] = config.encoder_config
        torch.manual_seed(0)
        model = case.method.causal_lm_class.from_base("me/base", attn_implementation=case.attention, **fields)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.15 * torch.randn_like(parameter)
        return model

    return start


@pytest.fixture(params=["stories260K", "TinyStories-656K"])
def pretrained_base(request) -> Path:
    """Folder of a small pretrained Llama."""
    folder = PRETRAINED / request.param
    if not folder.is_dir():
        pytest.skip(f"the pretrained {request.param} is not beside the checkout")
    return folder
