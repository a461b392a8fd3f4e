# SPDX-License-Identifier: Apache-2.0
# Written by context-compressors from its modules, whose names stand above their parts.

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, ClassVar

from transformers import AutoConfig, CONFIG_MAPPING, PreTrainedConfig


# configuration/layer_shape.py

def key_value_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return layers, key/value heads and head dimension of a language model."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, head_dim


def layer_kinds(config: PreTrainedConfig) -> Sequence[str]:
    """Return the kind of each layer, such as "sliding_attention"; none where the family has one kind."""
    return getattr(config, "layer_types", None) or ()


# configuration/nearest_names.py

# More than these are no help in a message.
_MOST_NAMES = 60


def nearest_name(name: str, allowed: Iterable[str], similarity: float = 0.5) -> str | None:
    """The allowed name that is most like another one, or `None` when none is near; `similarity` is from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, sorted(map(str, allowed)), n=1, cutoff=similarity)), None)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A clause such as `; did you mean 'context'?` with the nearest allowed name, or the names when none is near."""
    names = sorted(map(str, allowed))
    if (best := nearest_name(name, names)) is not None:
        return f"; did you mean {best!r}?"
    return f"; allowed: {', '.join(names)}" if 0 < len(names) <= _MOST_NAMES else ""


def check_choice(what: str, value: str, allowed: Iterable[str]) -> None:
    """Raise `ValueError` naming `what`, the value and the nearest allowed one, unless the value is allowed."""
    names = list(allowed)
    if value not in names:
        raise ValueError(f"unknown {what} {value!r}{nearest(str(value), names)}")


# configuration/field_checks.py

# What a checkpoint is asked to do.
PROMPTED_TASKS = ("question_answering", "summarization", "continuation", "reconstruction")
_LORA_DEFAULTS = {"rank": 16, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"}


def one_of(field: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of `allowed`, else raise a `ValueError` that names the field."""
    if value not in allowed:
        raise ValueError(f"`{field}` must be one of {list(allowed)}, got {value!r}")
    return value


def int_between(field: str, value: Any, least: int, most: int | None = None) -> int:
    """Return `value` if it is an int within limits, else raise a `ValueError` that names the field."""
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"`{field}` must be an int {limits}, got {value!r}")
    return value


def positive_int_or_none(field: str, value: Any) -> int | None:
    """Return `value` if it is `None` or an int of at least 1, else raise a `ValueError` that names the field."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"`{field}` must be an int of at least 1 or None, got {value!r}")
    return value


def ratio_tuple(value: Any) -> tuple[int, ...]:
    """Return one or more different ratios as a tuple, else raise a `ValueError`."""
    ratios = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    are_ints = all(isinstance(ratio, int) and not isinstance(ratio, bool) and ratio >= 1 for ratio in ratios)
    if not ratios or not are_ints or len(set(ratios)) != len(ratios):
        raise ValueError(f"`compression_ratios` must be one or more different ints of at least 1, got {value!r}")
    return ratios


def language_model_config(field: str, value: Any) -> PreTrainedConfig:
    """Return a language model's configuration, which may come as a dict with `model_type`."""
    if isinstance(value, PreTrainedConfig):
        return value
    if not isinstance(value, dict) or "model_type" not in value:
        raise ValueError(f"`{field}` must be a PreTrainedConfig or a dict with `model_type`, got {value!r}")
    fields = dict(value)
    model_type = fields.pop("model_type")
    check_choice(f"model_type of `{field}`:", model_type, CONFIG_MAPPING)
    return CONFIG_MAPPING[model_type](**fields)


def lora_or(value: Any, default: dict[str, Any] | None) -> dict[str, Any] | None:
    """A method's own adapter where the value is "default"."""
    return default if value == "default" else value


def lora_settings(field: str, value: Any) -> dict[str, Any] | None:
    """Return an adapter's settings with the defaults of those that are left out, or `None` for no adapter."""
    if value is None:
        return None
    if not isinstance(value, dict) or not value.keys() <= _LORA_DEFAULTS.keys():
        raise ValueError(f"`{field}` must be a dict with the keys {sorted(_LORA_DEFAULTS)} or None, got {value!r}")
    lora = {**_LORA_DEFAULTS, **value}
    int_between(f"{field}['rank']", lora["rank"], 1)
    targets = lora["target_modules"]
    if targets != "all-linear":
        if isinstance(targets, str) or not targets:
            raise ValueError(f"`{field}['target_modules']` must be 'all-linear' or a list of names, got {targets!r}")
        lora["target_modules"] = list(targets)
    return lora


def prompt_map(value: dict[str, str] | None) -> dict[str, str] | None:
    """Return prompts by task; that of questions holds `{question}` once, and no other does."""
    if value is None:
        return None
    for task, prompt in value.items():
        check_choice("task of `prompts`:", task, PROMPTED_TASKS)
        if prompt.count("{question}") != (task == "question_answering"):
            raise ValueError(
                f"`prompts` hold {{question}} once in 'question_answering' alone, got {task!r}: {prompt!r}"
            )
    return value


# configuration/configuration_compressor.py

# That of the package; a checkpoint's own code cannot ask the package.
CODE_VERSION = "0.1.0"
# Grows when a field changes its name or its meaning, not when one with a default value joins.
CONFIG_SCHEMA = 2
POSITION_LAYOUTS = ("default", "uniform", "enhanced")
PROMPT_FORMATS = ("plain", "chat")
# The task of `transformers.pipeline`, and the Auto classes whose models it can ask.
QUESTION_ANSWERING = "context-compression-qa"
_GENERATING = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
# What `save_pretrained` records about a checkpoint; nobody chooses these.
_RECORD = {
    "external_weights": None,
    "parent_model_name_or_path": None,
    "measured_chunks": None,
    "code_version": CODE_VERSION,
    "config_schema": CONFIG_SCHEMA,
}


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the most positions of a language model; `None` where its configuration names no limit."""
    return getattr(config, "max_position_embeddings", None)


class CompressorConfig(PreTrainedConfig):
    """The fields of every compressor: a language model that decodes, one that encodes, ratios, chunks and positions."""

    model_type = "context_compressor"
    sub_configs = {"decoder_config": AutoConfig, "encoder_config": AutoConfig}
    # Training objectives of the method.
    objectives: tuple[str, ...] = ("compression", "distillation", "joint")
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    # What a memory holds: "embeddings", or "key_values" of every layer.
    carrier = "embeddings"
    # Whether there is anything to train.
    is_trained = True
    # Whether what opens a text, BOS or the user's turn of a chat, is compressed in front of a document, and the text
    # goes on where the document ends.
    opens_context = False
    # Position of a context's first token under the uniform and enhanced layouts.
    first_context_position = 1
    # Whether a reconstruction behind its task token, [AE], starts with what the tokenizer puts in front of a context,
    # such as BOS. Under the enhanced layout its tokens then have the position ids that the encoder gave them: [AE] 0,
    # BOS 1, the first token of the text 2 (as in the code of EPL's authors).
    restores_context_start = True
    # Whether long contexts can be cut into chunks.
    has_chunks = True
    # Whether a language model reads the context.
    has_encoder = True
    # Learned tokens that can stand behind a chunk; `None`: as many as it takes.
    num_memory_tokens: int | None = None
    # Whether the encoder reads a learned vector in front of each chunk, and one between it and its memory tokens.
    chunk_markers = False
    # Whether a context is compressed together with its question, so that a memory answers no other one.
    compresses_questions = False
    # Whether the method's own last map starts at zero with `embedding_residual`, in place of a map for that.
    maps_slots = False
    # Whether BOS stands in front of a task token behind slots, too.
    bos_before_task_token = False
    # Patterns of what trains in the present one of a method's stages; `None`: adapters and the method's parts.
    stage_parameters: tuple[str, ...] | None = None
    # Whether this stage of a training changes no memory: the decoder's own adapter alone trains.
    has_frozen_memories = False
    # The packaged prompts of texts that start with no task token and stand in no chat: their name, and their question.
    plain_prompts = ("default", "\nQuestion: {question}\nAnswer:")
    # The method's fields that a model card names -> what it calls them.
    card_fields: ClassVar[dict[str, str]] = {"encoder_name_or_path": "Encoder's base model"}

    def __init__(
        self,
        decoder_config: PreTrainedConfig | dict[str, Any] | None = None,
        encoder_config: PreTrainedConfig | dict[str, Any] | None = None,
        base_model_name_or_path: str | None = None,
        base_model_revision: str | None = None,
        encoder_name_or_path: str | None = None,
        encoder_revision: str | None = None,
        encoder_tokenizer: str | None = None,
        compression_ratios: int | list[int] | tuple[int, ...] = (4,),
        chunk_size: int | None = None,
        position_layout: str = "default",
        encoder_lora: dict[str, Any] | None = None,
        decoder_lora: dict[str, Any] | None = None,
        shared_adapter: bool = False,
        slot_markers: dict[str, int] | None = None,
        embedding_residual: bool = False,
        trainable_parameters: list[str] | tuple[str, ...] | None = None,
        bos_before_text: bool = True,
        bos_before_slots: bool = False,
        slots_after_ids: list[int] | tuple[int, ...] = (),
        task_token_ids: dict[str, int] | None = None,
        prompts: dict[str, str] | None = None,
        prompt_format: str = "plain",
        context_prefix: str = "",
        use_cache: bool = True,
        **kwargs: Any,
    ):
        # A config class must be constructible without arguments: `to_diff_dict` compares with that instance.
        self.decoder_config = language_model_config("decoder_config", decoder_config or {"model_type": "llama"})
        self.encoder_config = (
            None if encoder_config is None else language_model_config("encoder_config", encoder_config)
        )
        self.base_model_name_or_path = base_model_name_or_path
        self.base_model_revision = base_model_revision
        self.encoder_name_or_path = encoder_name_or_path
        self.encoder_revision = encoder_revision
        self.encoder_tokenizer = encoder_tokenizer
        self.compression_ratios = ratio_tuple(compression_ratios)
        self.chunk_size = positive_int_or_none("chunk_size", chunk_size)
        self.position_layout = one_of("position_layout", position_layout, POSITION_LAYOUTS)
        self.encoder_lora = lora_settings("encoder_lora", encoder_lora)
        self.decoder_lora = lora_settings("decoder_lora", decoder_lora)
        self.shared_adapter = shared_adapter
        self.slot_markers = {"before": 0, "after": 0, **(slot_markers or {})}
        self.embedding_residual = embedding_residual
        if isinstance(trainable_parameters, str):
            trainable_parameters = [trainable_parameters]
        self.trainable_parameters = None if trainable_parameters is None else list(trainable_parameters)
        self.bos_before_text = bos_before_text
        self.bos_before_slots = bos_before_slots
        self.slots_after_ids = list(slots_after_ids)
        # Their embeddings stand in this order, which is that of a saved configuration.
        self.task_token_ids = dict(sorted((task_token_ids or {}).items()))
        self.prompts = prompt_map(prompts)
        self.prompt_format = one_of("prompt_format", prompt_format, PROMPT_FORMATS)
        self.context_prefix = context_prefix
        self.use_cache = use_cache
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, kwargs.pop(name, getattr(self.decoder_config, name, None)))
        self.tie_word_embeddings = kwargs.pop(
            "tie_word_embeddings", bool(getattr(self.decoder_config, "tie_word_embeddings", False))
        )
        for name, default in _RECORD.items():
            setattr(self, name, kwargs.pop(name, default))
        super().__init__(**kwargs)
        self._resolve_parts()
        self.auto_map = self.default_auto_map()
        self.custom_pipelines = self.default_custom_pipelines()

    def _resolve_parts(self) -> None:
        if self.shared_adapter:
            if self.decoder_lora is None and not self.has_frozen_memories:
                self.decoder_lora = self.encoder_lora
            has_other = self.decoder_adapter is not None and not self.has_frozen_memories
            if self.encoder_lora is None or has_other or self.encoder_config is not None:
                raise ValueError(
                    "`shared_adapter` needs an `encoder_lora`, no other `decoder_lora` and no `encoder_config`, got "
                    f"{self.encoder_lora!r}, {self.decoder_lora!r} and {type(self.encoder_config).__name__}"
                )
        if self.markers_per_chunk and (
            self.carrier != "embeddings" or self.is_encoder_decoder or self.position_layout == "enhanced"
        ):
            raise ValueError(
                f"`slot_markers` must be left out where a memory holds keys and values, where a decoder reads it by "
                f"cross-attention, and under `position_layout='enhanced'`, got {self.slot_markers!r}"
            )

        is_another = self.get_encoder_config().vocab_size != self.vocab_size or self.encoder_name_or_path is not None
        is_selected = self.carrier != "embeddings" and not self.maps_slots
        if self.embedding_residual and (is_selected or self.is_encoder_decoder or is_another):
            raise ValueError(
                "`embedding_residual` adds the decoder's token embeddings to slots or memory tokens. It must be False "
                "for other key/value memories, for encoder-decoders, and where the encoder is another model, got "
                f"{self.encoder_name_or_path or self.get_encoder_config().model_type!r}"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As `PreTrainedConfig.from_dict`; a `ValueError` for a configuration that this code does not read."""
        schema, written_by = config_dict.get("config_schema", 0), config_dict.get("code_version", "an unknown version")
        if schema != CONFIG_SCHEMA:
            other = "a newer" if schema > CONFIG_SCHEMA else "an older"
            raise ValueError(
                f"this configuration has schema {schema} (context-compressors {written_by}), and {CODE_VERSION} reads "
                f"{CONFIG_SCHEMA}: install {other} context-compressors, or load the checkpoint with the code beside "
                "it, by trust_remote_code=True in a process that does not import this package"
            )
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def default_auto_map(cls) -> dict[str, str]:
        """The three `auto_map` entries, by the file names `configuration_<method>.py` and `modeling_<method>.py`."""
        method = cls.__module__.rpartition(".")[2].removeprefix("configuration_")
        prefix = cls.__name__.removesuffix("Config")
        return {
            "AutoConfig": f"configuration_{method}.{prefix}Config",
            "AutoModel": f"modeling_{method}.{prefix}Model",
            "AutoModelForCausalLM": f"modeling_{method}.{prefix}ForCausalLM",
        }

    @classmethod
    def default_custom_pipelines(cls) -> dict[str, dict[str, Any]]:
        """Return the fields with which `transformers.pipeline` asks a checkpoint with the code in its own folder."""
        loaders = [name for name in cls.default_auto_map() if name in _GENERATING]
        return {
            QUESTION_ANSWERING: {
                "impl": "compressor_base.ContextCompressionQAPipeline",
                "pt": loaders,
                "type": "text",
            }
        }

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The decoder's configuration: caches, vocabulary and logits are the decoder's."""
        return self.decoder_config

    def get_encoder_config(self) -> PreTrainedConfig:
        """Configuration of the model that encodes: its own, or the decoder's when the weights are shared."""
        return self.decoder_config if self.encoder_config is None else self.encoder_config

    @property
    def reconstruction_token_id(self) -> int | None:
        """The token that a reconstruction starts with, [AE]; `None` for methods whose text starts with BOS."""
        return self.task_token_ids.get("[AE]")

    @property
    def continuation_token_id(self) -> int | None:
        """The token that a continuation, a question or a summary starts with, [LM]; `None` where it is BOS."""
        return self.task_token_ids.get("[LM]")

    @property
    def question_prompt(self) -> str:
        """The text, with `{question}` in it, that a checkpoint is asked with: the recorded one, or the usual one."""
        return (self.prompts or {}).get("question_answering", self._usual_prompts()[1])

    def _usual_prompts(self) -> tuple[str, str]:
        if self.prompt_format == "chat":
            return "chat", "{question}"
        behind_task_token = ("memory_tokens", "\n### Question:\n{question}\n### Answer:\n")
        return behind_task_token if self.task_token_ids else self.plain_prompts

    @property
    def decoder_adapter(self) -> dict[str, Any] | None:
        """Settings of an adapter of the decoder's own; `None` where it has none, or reads with a shared one alone."""
        is_shared = self.shared_adapter and not self.has_frozen_memories and self.decoder_lora == self.encoder_lora
        return None if is_shared else self.decoder_lora

    vocab_size: Any = property(attrgetter("decoder_config.vocab_size"))
    hidden_size: Any = property(attrgetter("decoder_config.hidden_size"))
    num_hidden_layers: Any = property(attrgetter("decoder_config.num_hidden_layers"))
    num_attention_heads: Any = property(attrgetter("decoder_config.num_attention_heads"))

    @property
    def max_position_embeddings(self) -> int | None:
        return max_positions(self.decoder_config)

    # --- how much a context costs, and how long it may be ---

    @property
    def encoder_limit(self) -> int | None:
        """Positions of the language model that reads whole chunks, which are then no longer; `None` for no limit."""
        return max_positions(self.get_encoder_config()) if self.has_encoder else None

    def chunk_slots(self, num_tokens: int, ratio: int) -> int:
        """Slots of a chunk of so many tokens: ceil(n / r)."""
        return -(-num_tokens // ratio)

    @property
    def markers_per_chunk(self) -> int:
        """Learned vectors around the slots of each chunk: places of the decoder beside `chunk_slots`."""
        return sum(self.slot_markers.values())

    def num_slots(self, num_context_tokens: int, ratio: int) -> int:
        """Slots of a context, all chunks and their markers together: what the decoder reads in its place."""
        chunks = self._chunks(num_context_tokens, ratio)
        return sum(times * (self.chunk_slots(length, ratio) + self.markers_per_chunk) for length, times in chunks)

    def _chunks(self, num_context_tokens: int, ratio: int) -> list[tuple[int, int]]:
        size = self.chunk_size or max(1, num_context_tokens)
        full, rest = divmod(num_context_tokens, size)
        return [(length, times) for length, times in ((size, full), (rest, 1)) if length and times]


# configuration/configuration_shallow_encoder.py

AUTOENCODING, KEFT = "autoencoding", "keft"
# W_Q, W_K and W_V of every decoder layer, one by one or in one map; their biases belong to them.
QUERY_KEY_VALUE = (
    r"(^|\.)language_model\.layers\.\d+\.(.+\.)?"
    r"(q_proj|k_proj|v_proj|qkv_proj|query_key_value)\.(base_layer\.)?(weight|bias)$"
)
# Section 4.3 of GMSA's paper.
_ENCODER_LAYERS = 8


class ShallowEncoderConfig(CompressorConfig):
    r"""
    An encoder of a few layers with weights of its own, slots that a trained module aligns with the decoder's input,
    and training in two stages."""

    card_fields = {
        **CompressorConfig.card_fields,
        "encoder_layers": "Encoder layers",
        "training_stage": "Last stage of training",
    }

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (4, 8),
        encoder_layers: int | None = None,
        encoder_lora: dict[str, Any] | str | None = "default",
        training_stage: str = AUTOENCODING,
        bos_before_text: bool = False,
        **kwargs: Any,
    ):
        self.training_stage = one_of("training_stage", training_stage, (AUTOENCODING, KEFT))
        default_lora = {"rank": 128, "alpha": 32.0, "dropout": 0.05, "target_modules": "all-linear"}
        super().__init__(
            compression_ratios=compression_ratios,
            encoder_lora=lora_or(encoder_lora, default_lora),
            bos_before_text=bos_before_text,
            **kwargs,
        )
        encoder = self.get_encoder_config()
        num_layers = encoder.num_hidden_layers
        if encoder_layers is None:
            encoder_layers = _ENCODER_LAYERS if num_layers >= 2 * _ENCODER_LAYERS else -(-num_layers // 4)
        self.encoder_layers = int_between("encoder_layers", encoder_layers, 1, num_layers)
        self.encoder_config = first_layers(encoder, self.encoder_layers)

    @property
    def stage_parameters(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """In knowledge extraction fine-tuning W_Q, W_K and W_V of every decoder layer (GMSA, equation 6)."""
        return (QUERY_KEY_VALUE,) if self.training_stage == KEFT else None


def first_layers(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy of a language model's configuration with its first `num_layers` layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = num_layers
    # Some families have layers of several kinds, named one by one.
    if kinds := layer_kinds(config):
        config.layer_types = kinds[:num_layers]
    return config


# configuration/configuration_gmsa.py

class GMSAConfig(ShallowEncoderConfig):
    r"""
    Group merging and layer semantic alignment ("GMSA: Enhancing Context Compression via Group Merging and Layer
    Semantic Alignment").

    The paper's ablations (Table 4 but for group merging, Figures 5 and 6) are values of this configuration: without
    layer semantic alignment: `lsa_layers=0`; other depths: `lsa_layers` and `encoder_layers`; without autoencoding:
    `training_stage="keft"` from the start. (Without knowledge extraction fine-tuning: the checkpoint of the first
    stage.)

    Args:
        lsa_layers: Blocks of layer semantic alignment, k_LSA in equation 3: copies of the decoder's first ones. 0: the
            merged states are the slots.
        lsa_final_norm: Whether the decoder's final norm, frozen, follows these blocks, as in the authors' code. The
            paper names none.
        kwargs: fields of [`ShallowEncoderConfig`] and [`CompressorConfig`].
    """

    model_type = "gmsa_compressor"
    card_fields = {**ShallowEncoderConfig.card_fields, "lsa_layers": "Blocks of layer semantic alignment"}

    def __init__(self, lsa_layers: int = 1, lsa_final_norm: bool = True, **kwargs: Any):
        self.lsa_final_norm = lsa_final_norm
        super().__init__(**kwargs)
        self.lsa_layers = int_between("lsa_layers", lsa_layers, 0, self.num_hidden_layers)
