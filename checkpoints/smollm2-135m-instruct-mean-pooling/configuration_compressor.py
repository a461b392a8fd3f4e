# SPDX-License-Identifier: Apache-2.0
"""Configuration shared by every context compressor."""

import re
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from .versions import CODE_VERSION, CONFIG_SCHEMA, bring_up_to_date

POSITION_LAYOUTS = ("default", "uniform", "enhanced")
PROMPT_FORMATS = ("plain", "chat")
# The task of `transformers.pipeline`, and the Auto classes whose models it can ask.
QUESTION_ANSWERING = "context-compression-qa"
_GENERATING = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
# What `save_pretrained` records about a checkpoint; nobody chooses these.
_RECORD = {
    "external_weights": None,
    "parent_model_name_or_path": None,
    "code_version": CODE_VERSION,
    "config_schema": CONFIG_SCHEMA,
}
_LORA_DEFAULTS = {"rank": 16, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"}


class CompressorConfig(PreTrainedConfig):
    r"""
    What every compressor has: a language model that decodes, one that encodes, ratios, chunks and positions.

    Args:
        decoder_config (`PreTrainedConfig` or `dict`):
            Configuration of the language model that reads the slots.
        encoder_config (`PreTrainedConfig` or `dict`, *optional*):
            Configuration of an encoder with weights of its own. `None`: the encoder is the decoder's own weights (held
            once), and adapters make the difference.
        base_model_name_or_path (`str`, *optional*):
            Hub repository or folder that the untouched weights come from.
        base_model_revision (`str`, *optional*):
            Revision of that repository.
        encoder_name_or_path (`str`, *optional*):
            Where an encoder with weights of its own comes from, if that is another model than the base.
        encoder_revision (`str`, *optional*):
            Revision of that repository.
        encoder_tokenizer (`str`, *optional*):
            Subfolder of the checkpoint with the tokenizer of contexts. `None`: contexts and texts have the same one.
        compression_ratios (`int` or sequence of `int`, defaults to `(4,)`):
            Context tokens per slot that the checkpoint is trained for, each at least 1. The first one is the default.
        chunk_size (`int`, *optional*):
            Context tokens per independently compressed chunk. `None`: never chunk.
        position_layout (`str`, defaults to `"default"`):
            `"default"`, `"uniform"` or `"enhanced"`, as in EPL, Tables 1 to 3.
        encoder_lora (`dict`, *optional*):
            LoRA of the encoder: `rank`, `alpha`, `dropout` and `target_modules` (`"all-linear"` or a list of module
            names). `None`: the encoder is frozen.
        decoder_lora (`dict`, *optional*):
            LoRA of the decoder, likewise. `None`: the decoder is frozen.
        trainable_parameters (sequence of `str`, *optional*):
            Regular expressions, searched in parameter names, that replace the method's own trainable set. The set is
            part of the checkpoint and is applied again when it is loaded.
        restores_context_start (`bool`, defaults to `True`):
            Whether a reconstruction behind its task token, [AE], starts with what the tokenizer puts in front of a
            context, such as BOS. Under the enhanced layout its tokens then have the position ids that the encoder gave
            them: [AE] 0, BOS 1, the first token of the text 2 (as in the code of EPL's authors).
        bos_before_text (`bool`, defaults to `True`):
            Whether a text behind slots starts with BOS where the method has no task token. Where it does not, a
            tokenizer that the compressor is trained with puts none in front of contexts either, and a text without a
            prompt still starts with BOS.
        bos_before_slots (`bool`, defaults to `False`):
            Whether a leading BOS of the text moves in front of the slots.
        slots_after_ids (sequence of `int`, defaults to `()`):
            Token ids behind which the slots stand, where they first occur in the text, such as those that open the
            user's turn of a chat template. A text without them follows the slots.
        task_token_ids (`dict[str, int]`, *optional*):
            Ids of the method's own special tokens, such as `{"[AE]": 32000}`.
        prompts (`dict[str, str]`, *optional*):
            What the checkpoint was trained to read between a memory and its answer, by task; the one of
            `"question_answering"` holds `{question}`. `None`: the method's usual ones.
        prompt_format (`str`, defaults to `"plain"`):
            `"plain"`: the prompt follows the memory as it is. `"chat"`: memory and prompt are the user's turn of the
            tokenizer's chat template, and `slots_after_ids` open that turn.
        context_prefix (`str`, defaults to `""`):
            Text that stood in front of every document of a question in its training, such as a heading.
        use_cache (`bool`, defaults to `True`):
            Whether the decoder returns its key/value cache.
        kwargs:
            Fields of [`PreTrainedConfig`], and what `save_pretrained` records about the checkpoint: `external_weights`
            (the base models whose weights it leaves out, or `None`), `parent_model_name_or_path` (the checkpoint that
            it was fine-tuned from), `code_version` and `config_schema`.

    Raises:
        ValueError: a value is not allowed; the message names the field, the value and what is allowed.
    """

    model_type = "context_compressor"
    sub_configs = {"decoder_config": AutoConfig, "encoder_config": AutoConfig}
    keys_to_ignore_at_inference = ["past_key_values"]

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
        trainable_parameters: list[str] | tuple[str, ...] | None = None,
        restores_context_start: bool = True,
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
        self.decoder_config = _language_model_config("decoder_config", decoder_config or {"model_type": "llama"})
        self.encoder_config = (
            None if encoder_config is None else _language_model_config("encoder_config", encoder_config)
        )
        self.base_model_name_or_path = base_model_name_or_path
        self.base_model_revision = base_model_revision
        self.encoder_name_or_path = encoder_name_or_path
        self.encoder_revision = encoder_revision
        self.encoder_tokenizer = encoder_tokenizer
        self.compression_ratios = _ratios(compression_ratios)
        self.chunk_size = _optional_positive_int("chunk_size", chunk_size)
        self.position_layout = one_of("position_layout", position_layout, POSITION_LAYOUTS)
        self.encoder_lora = _lora("encoder_lora", encoder_lora)
        self.decoder_lora = _lora("decoder_lora", decoder_lora)
        self.trainable_parameters = _patterns(trainable_parameters)
        self.restores_context_start = boolean("restores_context_start", restores_context_start)
        self.bos_before_text = boolean("bos_before_text", bos_before_text)
        self.bos_before_slots = boolean("bos_before_slots", bos_before_slots)
        self.slots_after_ids = _token_ids("slots_after_ids", slots_after_ids)
        self.task_token_ids = _task_token_ids(task_token_ids)
        self.prompts = _prompts(prompts)
        self.prompt_format = one_of("prompt_format", prompt_format, PROMPT_FORMATS)
        self.context_prefix = _text("context_prefix", context_prefix)
        self.use_cache = boolean("use_cache", use_cache)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, kwargs.pop(name, getattr(self.decoder_config, name, None)))
        self.tie_word_embeddings = kwargs.pop(
            "tie_word_embeddings", bool(getattr(self.decoder_config, "tie_word_embeddings", False))
        )
        for name, default in _RECORD.items():
            setattr(self, name, kwargs.pop(name, default))
        super().__init__(**kwargs)
        self.auto_map = self.default_auto_map()
        self.custom_pipelines = self.default_custom_pipelines()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """As `PreTrainedConfig.from_dict`, for configurations of older schemas, too; see [`bring_up_to_date`]."""
        return super().from_dict(bring_up_to_date(config_dict), **kwargs)

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
        """What `transformers.pipeline` must know to ask a checkpoint with the code in its own folder."""
        loaders = [name for name in cls.default_auto_map() if name in _GENERATING]
        return {
            QUESTION_ANSWERING: {
                "impl": "context_compression_qa.ContextCompressionQAPipeline",
                "pt": loaders,
                "type": "text",
            }
        }

    @property
    def default_ratio(self) -> int:
        """The ratio that `compress` takes when none is given: the first of `compression_ratios`."""
        return self.compression_ratios[0]

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
    def usual_prompts(self) -> str:
        """Name of the packaged prompts that a checkpoint is asked with which has none of its own."""
        if self.prompt_format == "chat":
            return "chat"
        return "memory_tokens" if self.task_token_ids else "default"

    @property
    def compresses_questions(self) -> bool:
        """Whether a context is compressed together with its question, so that a memory answers no other one."""
        return False

    @property
    def vocab_size(self) -> int:
        return self.decoder_config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.decoder_config.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.decoder_config.num_hidden_layers

    @property
    def num_attention_heads(self) -> int:
        return self.decoder_config.num_attention_heads

    @property
    def max_position_embeddings(self) -> int | None:
        return getattr(self.decoder_config, "max_position_embeddings", None)


def one_of(field: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of `allowed`, else raise a `ValueError` that names the field."""
    if value not in allowed:
        raise ValueError(f"`{field}` must be one of {list(allowed)}, got {value!r}")
    return value


def boolean(field: str, value: Any) -> bool:
    """Return `value` if it is a bool, else raise a `ValueError` that names the field."""
    if not isinstance(value, bool):
        raise ValueError(f"`{field}` must be True or False, got {value!r}")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _optional_positive_int(field: str, value: Any) -> int | None:
    if value is not None and (not _is_int(value) or value < 1):
        raise ValueError(f"`{field}` must be an int of at least 1 or None, got {value!r}")
    return value


def _token_ids(field: str, value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)) or not all(_is_int(token_id) and token_id >= 0 for token_id in value):
        raise ValueError(f"`{field}` must be a list of token ids of at least 0, got {value!r}")
    return list(value)


def _ratios(value: Any) -> tuple[int, ...]:
    ratios = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not ratios or not all(_is_int(ratio) and ratio >= 1 for ratio in ratios) or len(set(ratios)) != len(ratios):
        raise ValueError(f"`compression_ratios` must be one or more different ints of at least 1, got {value!r}")
    return ratios


def _language_model_config(field: str, value: Any) -> PreTrainedConfig:
    if isinstance(value, PreTrainedConfig):
        return value
    if not isinstance(value, dict) or "model_type" not in value:
        raise ValueError(f"`{field}` must be a PreTrainedConfig or a dict with `model_type`, got {value!r}")
    fields = dict(value)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _lora(field: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"`{field}` must be a dict with the keys {sorted(_LORA_DEFAULTS)} or None, got {value!r}")
    unknown = sorted(set(value) - set(_LORA_DEFAULTS))
    if unknown:
        raise ValueError(f"`{field}` has unknown keys {unknown}; allowed are {sorted(_LORA_DEFAULTS)}")
    lora = {**_LORA_DEFAULTS, **value}
    if not _is_int(lora["rank"]) or lora["rank"] < 1:
        raise ValueError(f"`{field}['rank']` must be an int of at least 1, got {lora['rank']!r}")
    if isinstance(lora["alpha"], bool) or not isinstance(lora["alpha"], (int, float)) or lora["alpha"] <= 0:
        raise ValueError(f"`{field}['alpha']` must be a number above 0, got {lora['alpha']!r}")
    if (
        isinstance(lora["dropout"], bool)
        or not isinstance(lora["dropout"], (int, float))
        or not 0 <= lora["dropout"] < 1
    ):
        raise ValueError(
            f"`{field}['dropout']` must be a number from 0 up to, not including, 1, got {lora['dropout']!r}"
        )
    targets = lora["target_modules"]
    names = isinstance(targets, (list, tuple)) and targets and all(isinstance(name, str) and name for name in targets)
    if targets != "all-linear" and not names:
        raise ValueError(
            f"`{field}['target_modules']` must be 'all-linear' or a list of module names, got {targets!r}"
        )
    lora["target_modules"] = "all-linear" if targets == "all-linear" else list(targets)
    return lora


def _patterns(value: Any) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(pattern, str) for pattern in value):
        raise ValueError(f"`trainable_parameters` must be a list of regular expressions or None, got {value!r}")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`trainable_parameters` has a broken regular expression {pattern!r}: {error}") from error
    return list(value)


def _task_token_ids(value: Any) -> dict[str, int]:
    value = {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(k, str) and _is_int(v) and v >= 0 for k, v in value.items()):
        raise ValueError(f"`task_token_ids` must map token strings to ids of at least 0, got {value!r}")
    # Their embeddings stand in this order, which is that of a saved configuration.
    return dict(sorted(value.items()))


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{field}` must be a text, got {value!r}")
    return value


def _prompts(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise ValueError(f"`prompts` must map tasks to texts or be None, got {value!r}")
    for task, prompt in value.items():
        if prompt.count("{question}") != (task == "question_answering"):
            raise ValueError(
                f"`prompts` must hold {{question}} once in 'question_answering' and nowhere else, got {task!r}: "
                f"{prompt!r}"
            )
    return dict(value)
