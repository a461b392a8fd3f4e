# SPDX-License-Identifier: Apache-2.0
"""Configuration shared by every context compressor."""

from bisect import bisect_left
from operator import attrgetter
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

from .field_checks import (
    language_model_config,
    lora_settings,
    one_of,
    positive_int_or_none,
    prompt_map,
    ratio_tuple,
)
from .layer_shape import linear_flops, stack_flops

# That of the package; a checkpoint's own code cannot ask the package.
CODE_VERSION = "0.1.0"
# Grows when a field changes its name or its meaning, not when one with a default value joins.
CONFIG_SCHEMA = 2
POSITION_LAYOUTS = ("default", "uniform", "enhanced")
PROMPT_FORMATS = ("plain", "chat")
# The task of `transformers.pipeline`, and the Auto classes whose models it can ask.
QUESTION_ANSWERING = "context-compression-qa"
_GENERATING = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
# Loads what ranks documents, and has no decoder.
RETRIEVAL_LOADER = "AutoModelForTextEncoding"
# Longer than any context: what fits it has no limit.
_ENDLESS = 2**40
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
    """The fields of every compressor: a language model that decodes, one that encodes, ratios, chunks and positions.

    Args:
        decoder_config: Configuration of the language model that reads the slots.
        encoder_config: Configuration of an encoder with weights of its own. `None`: the encoder is the decoder's own
            weights (held once), and adapters make the difference.
        base_model_name_or_path, base_model_revision: Hub repository or folder that the untouched weights come from,
            and its revision.
        encoder_name_or_path, encoder_revision: That of an encoder with weights of its own, if that is another model.
        encoder_tokenizer: Subfolder of the checkpoint with the tokenizer of contexts. `None`: contexts and texts have
            the same one.
        compression_ratios: Context tokens per slot that the checkpoint is trained for, each at least 1. The first one
            is the default.
        chunk_size: Context tokens per independently compressed chunk. `None`: never chunk.
        position_layout: `"default"`, `"uniform"` or `"enhanced"`, as in EPL, Tables 1 to 3.
        encoder_lora, decoder_lora: LoRA: `rank`, `alpha`, `dropout` and `target_modules` (`"all-linear"` or a list of
            module names). `None`: that side is frozen.
        shared_adapter: Whether the decoder reads with the encoder's adapter, the same weights, which get gradient from
            both sides. `decoder_lora` is then `encoder_lora`; another one is an adapter beside it, in a stage that
            trains that alone.
        slot_markers: Learned vectors in front of each chunk's slots (`"before"`) and behind them (`"after"`), such as
            `{"after": 1}` for a separator. They count among the slots, which must be embeddings with contiguous
            positions.
        embedding_residual: Whether the method adds to the sum of a window's token embeddings over the square root of
            their number: z_k = |S_k|^(-1/2) sum_{i in S_k} E(x_i) + W s_k rms(E(x)) / rms(s_k), with W = 0 at the
            start. The decoder then learns to read slots soon. No paper has it. Mean pooling's own W takes the place of
            this one, unscaled. 500xCompressor adds the sum to its memory tokens, which are zero at the start.
        trainable_parameters: Regular expressions, searched in parameter names, that replace the method's own trainable
            set.
        bos_before_text: Whether a text behind slots starts with BOS where the method has no task token. Otherwise a
            tokenizer that the compressor is trained with puts none in front of contexts either, and a text without a
            prompt still starts with BOS.
        bos_before_slots: Whether a leading BOS of the text moves in front of the slots.
        slots_after_ids: Token ids behind which the slots stand, where they first occur in the text, such as those that
            open the user's turn of a chat template. A text without them follows the slots.
        task_token_ids: Ids of the method's own special tokens, such as `{"[AE]": 32000}`.
        prompts: Texts between a memory and its answer, by task, as in training; the one of `"question_answering"`
            holds `{question}`. `None`: the method's usual ones.
        prompt_format: `"plain"`: the prompt follows the memory as it is. `"chat"`: memory and prompt are the user's
            turn of the tokenizer's chat template, and `slots_after_ids` open that turn.
        context_prefix: Text in front of every document of a question in training, such as a heading.
        use_cache: Whether the decoder returns its key/value cache.
        kwargs: Fields of [`PreTrainedConfig`], and the records of `save_pretrained`: `external_weights` (the base
            models whose weights it leaves out), `parent_model_name_or_path` (the checkpoint that it was fine-tuned
            from), `measured_chunks` (the most chunks of a document that its scores were measured on), `code_version`
            and `config_schema`.
    """

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

        # A merged checkpoint's encoder is a copy of the decoder, and reads the same tokens.
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
    def auto_classes(cls) -> dict[str, str]:
        """Every Auto class that loads a checkpoint of the method, with the class that it loads."""
        return cls.default_auto_map()

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

    @property
    def method(self) -> str:
        """The method's name, that of its files."""
        return self.model_type.removesuffix("_compressor")

    @property
    def card_text(self) -> str:
        """Whose description a model card has: the method's, or that of a published system that is a setting of it."""
        return self.method

    @property
    def auto_class(self) -> str:
        """Name of the Auto class that loads this checkpoint whole."""
        return next(name for name in self.auto_map if name not in ("AutoConfig", "AutoModel"))

    def card_rows(self) -> list[tuple[str, Any]]:
        """The method's fields that a model card names, by what it calls them."""
        return [(title, getattr(self, name)) for name, title in self.card_fields.items()]

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
        return self._usual_prompts()[0]

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

    def chunk_memory_tokens(self, num_tokens: int, ratio: int) -> int:
        """Learned tokens that the encoder reads behind a chunk of so many tokens."""
        return 0

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of compressing a chunk (see `LayerShape`): the encoder's, and those of a map in front of the
        embedding residual; a method adds those of its parts."""
        slots = self.chunk_slots(num_tokens, ratio) if self.embedding_residual and not self.maps_slots else 0
        total = linear_flops(slots, self.hidden_size, self.hidden_size)
        appended = self.chunk_memory_tokens(num_tokens, ratio) + 2 * self.chunk_markers
        return total + stack_flops(self.get_encoder_config(), num_tokens + appended)

    @property
    def markers_per_chunk(self) -> int:
        """Learned vectors around the slots of each chunk: places of the decoder beside `chunk_slots`."""
        return sum(self.slot_markers.values())

    def num_slots(self, num_context_tokens: int, ratio: int) -> int:
        """Slots of a context, all chunks and their markers together: what the decoder reads in its place."""
        chunks = self._chunks(num_context_tokens, ratio)
        return sum(times * (self.chunk_slots(length, ratio) + self.markers_per_chunk) for length, times in chunks)

    def compression_flops(self, num_context_tokens: int, ratio: int) -> int:
        """Operations of compressing one context; arguments as `num_slots`."""
        chunks = self._chunks(num_context_tokens, ratio)
        return sum(times * self.chunk_flops(length, ratio) for length, times in chunks)

    def _chunks(self, num_context_tokens: int, ratio: int) -> list[tuple[int, int]]:
        """Lengths of a context's chunks, and how many there are of each."""
        size = self.chunk_size or max(1, num_context_tokens)
        full, rest = divmod(num_context_tokens, size)
        return [(length, times) for length, times in ((size, full), (rest, 1)) if length and times]

    def max_context_tokens(self, ratio: int) -> int | None:
        """Most context tokens that are compressed at a ratio, start tokens included; `None` for no limit."""
        if self._fits(_ENDLESS, ratio):
            return None
        return bisect_left(range(1, _ENDLESS), True, key=lambda num_tokens: not self._fits(num_tokens, ratio))

    def _fits(self, num_tokens: int, ratio: int) -> bool:
        """Return whether a context has its positions in the encoder, and its memory tokens."""
        longest_chunk = num_tokens if self.chunk_size is None else min(self.chunk_size, num_tokens)
        appended = self.chunk_memory_tokens(longest_chunk, ratio)
        if self.num_memory_tokens is not None and appended > self.num_memory_tokens:
            return False
        limit = self.encoder_limit
        if limit is None:
            return True
        # Chunks start anew at 0, with memory tokens behind them; or they count on from 1, and memory tokens share the
        # positions of their chunk.
        in_row = num_tokens + self.first_context_position
        in_chunk = longest_chunk + appended + 2 * self.chunk_markers
        return (in_chunk if self.position_layout == "default" else in_row) <= limit
