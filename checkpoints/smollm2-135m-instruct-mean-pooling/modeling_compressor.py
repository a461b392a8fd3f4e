# SPDX-License-Identifier: Apache-2.0
"""The base of every compressor: context in, slots out, and a decoder that reads slots and text as one sequence."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, Pipeline, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from .configuration_compressor import CompressorConfig
from .base_weights import own_modules, remember_base
from .checkpoints import CheckpointMixin
from .compressed_context import CompressedContext
from .key_value_memory import keep_caches_under_checkpointing
from .base_precision import as_head_takes, in_base_precision, note_trained_weights
from .call_views import for_one_call
from .lora import (
    DECODER,
    ENCODER,
    CheckpointWithAdapters,
    PeftTargetMixin,
    inject_lora,
    merge_lora,
    use_adapter,
)
from .compressing import CompressingMixin
from .decoding import DecodingMixin
from .generation import MemoryGenerationMixin

logger = logging.get_logger(__name__)

CHECKED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma2")


class CompressorPreTrainedModel(CheckpointMixin, PeftTargetMixin, PreTrainedModel):
    """Saving, loading, initialisation and the trainable set of all compressors."""

    config_class = CompressorConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["lora_A", "lora_B", "task_embeddings"]
    # What trains unless the configuration says otherwise; a method adds its own parts.
    method_parameters: tuple[str, ...] = (r"\.lora_[AB]\.(encoder|decoder)\.", r"(^|\.)task_embeddings$")

    def post_init(self) -> None:
        super().post_init()
        self.apply_trainable_set()
        # What trains is loaded in float32 whatever type the rest is loaded in; the class names most of its own parts.
        named = set(type(self)._keep_in_fp32_modules_strict)
        names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        names = [name for name in names if not named & set(name.split("."))]
        self._keep_in_fp32_modules_strict |= {f"^{re.escape(name)}$" for name in names}
        if getattr(self.config, "quantization_config", None) is not None:
            # The library's quantizers leave these as they are.
            self._keep_in_fp32_modules |= {re.escape(path) for path in own_modules(self)}

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the base; what trains is float32 beside it."""
        return self.get_input_embeddings().weight.dtype

    def apply_trainable_set(self) -> None:
        """Let the parameters train that `config.trainable_parameters`, or else the method, names; freeze the rest.

        Raises:
            ValueError: a pattern of `config.trainable_parameters` matches no parameter.
        """
        chosen = self.config.trainable_parameters
        patterns = [re.compile(pattern) for pattern in (self.method_parameters if chosen is None else chosen)]
        matched = set()
        for name, parameter in self.named_parameters():
            hits = [pattern.pattern for pattern in patterns if pattern.search(name)]
            matched.update(hits)
            parameter.requires_grad_(bool(hits) and parameter.is_floating_point())
        unused = [] if chosen is None else [pattern for pattern in chosen if pattern not in matched]
        # The backbone alone has no LM head, so the whole set is only known to the model that has everything.
        if unused and self.get_output_embeddings() is not None:
            raise ValueError(f"`trainable_parameters` {unused} match no parameter of {type(self).__name__}")
        for module in self.modules():
            if isinstance(module, PreTrainedModel) and not isinstance(module, CompressorPreTrainedModel):
                note_trained_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=getattr(self.config.decoder_config, "initializer_range", 0.02))
            if module.bias is not None:
                init.zeros_(module.bias)
        if isinstance(module, CompressorModel) and module.task_embeddings is not None:
            self._init_like_embeddings(module.task_embeddings, module.language_model)

    @staticmethod
    def _init_like_embeddings(parameter: nn.Parameter, backbone: PreTrainedModel) -> None:
        """N(mean, std), two scalars of the backbone's whole table of token embeddings (the code of EPL's authors)."""
        table = backbone.get_input_embeddings()
        weight = table.weight.float() * getattr(table, "scalar_embed_scale", 1.0)
        drawn = torch.randn_like(parameter, dtype=torch.float32)
        init.copy_(parameter, weight.mean() + drawn * weight.std())

    def question_answering(self, tokenizer: PreTrainedTokenizerBase, **kwargs: Any) -> Pipeline:
        """This model as the pipeline "context-compression-qa", on the device where it is.

        Args:
            tokenizer: the tokenizer saved with it.
            kwargs: arguments of [`ContextCompressionQAPipeline`].
        """
        # Here, so that a saved folder, and the copy that loading makes of its code, hold the pipeline, too.
        from .context_compression_qa import ContextCompressionQAPipeline

        if getattr(self, "hf_device_map", None) is None:
            kwargs.setdefault("device", self.device)
        return ContextCompressionQAPipeline(model=self, tokenizer=tokenizer, **kwargs)

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func: Any = None, **kwargs: Any):
        super()._set_gradient_checkpointing(enable, CheckpointWithAdapters(self), **kwargs)
        if self.base_model.carrier == "key_values":
            keep_caches_under_checkpointing(self, enable)


class _BaseAlone(threading.local):
    """Whether this thread wants the base without adapters."""

    wanted = False

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), ()


class CompressorModel(DecodingMixin, CompressingMixin, CompressorPreTrainedModel):
    r"""
    Encoder, method parts and decoder backbone of a compressor; a method adds `encode` and its parts.

    `forward` returns `last_hidden_state` aligned with `input_ids` (batch_size, num_text_tokens, hidden_size): the
    slots' states are cut off, so any trainer that runs the backbone and then the LM head works without change.

    Args:
        config ([`CompressorConfig`]): the configuration.
    """

    # The LM head of a full checkpoint is not part of the backbone.
    _keys_to_ignore_on_load_unexpected = [r"lm_head\.weight"]

    def __init__(self, config: CompressorConfig):
        super().__init__(config)
        dtype = torch.get_default_dtype()
        for part in (config.decoder_config, config.encoder_config):
            if part is not None and part.model_type not in CHECKED_ARCHITECTURES:
                logger.warning_once(
                    f"{part.model_type!r} is not among the architectures that compressors are tested on, "
                    f"{list(CHECKED_ARCHITECTURES)}: it may ignore a bidirectional mask, or place slots wrongly"
                )
        self.language_model = AutoModel.from_config(config.decoder_config, dtype=dtype)
        self.encoder_model = None
        if config.encoder_config is not None:
            self.encoder_model = AutoModel.from_config(config.encoder_config, dtype=dtype)
        if config.encoder_lora is not None:
            inject_lora(self.encoder_backbone, ENCODER, config.encoder_lora, self.encoder_lora_exclusions())
        if config.decoder_lora is not None:
            inject_lora(self.language_model, DECODER, config.decoder_lora)
        self.task_embeddings = None
        if config.task_token_ids:
            self.task_embeddings = nn.Parameter(torch.zeros(len(config.task_token_ids), config.hidden_size))
        self._base_alone = _BaseAlone()

    def start_from_base(self) -> None:
        """Give parts that start from the base's own weights their values; by default there are none."""

    @property
    def encoder_backbone(self) -> PreTrainedModel:
        """The language model that encodes: its own weights, or the decoder's."""
        return self.language_model if self.encoder_model is None else self.encoder_model

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    # --- the encoder ---

    def encoder_lora_exclusions(self) -> list[str]:
        """Paths of the encoder's maps that get no adapter although the configuration's targets name them."""
        return []

    def encoder_states(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Last hidden states of the encoder with its adapter, `(num_chunks, num_tokens, hidden_size)`.

        Args:
            input_ids: `(num_chunks, num_tokens)`, or else `inputs_embeds`.
            attention_mask: same shape, or a mask in the backbone's own form.
            position_ids: same shape.
            inputs_embeds: `(num_chunks, num_tokens, hidden_size)`.
            kwargs: handed to the backbone.
        """
        if inputs_embeds is None and input_ids.shape[1] == 0:
            # No backbone runs on a sequence without places.
            return self.encoder_backbone.get_input_embeddings()(input_ids)
        inputs = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        backbone = for_one_call(self.encoder_backbone, kwargs.get("is_causal"))
        with self._adapter(self.encoder_backbone, ENCODER):
            outputs = backbone(
                **inputs, attention_mask=attention_mask, position_ids=position_ids, use_cache=False, **kwargs
            )
        return outputs.last_hidden_state

    # --- adapters ---

    def _adapter(self, backbone: PreTrainedModel, name: str) -> AbstractContextManager[None]:
        return in_base_precision(backbone, use_adapter(backbone, None if self._base_alone.wanted else name))

    @contextmanager
    def base_language_model(self) -> Iterator[None]:
        """Inside this block the adapters are off: without a context, `forward` is the untouched base model's.

        Other threads that use the model meanwhile, also those that are started in the block, have their adapters on.
        """
        before, self._base_alone.wanted = self._base_alone.wanted, True
        try:
            yield
        finally:
            self._base_alone.wanted = before

    def _replicate_for_data_parallel(self) -> CompressorModel:
        replica = super()._replicate_for_data_parallel()
        # Replicas work in threads of their own, and for the thread that makes them.
        replica._base_alone = SimpleNamespace(wanted=self._base_alone.wanted)
        return replica

    def merge_adapters(self) -> None:
        """Add the adapters to the weights they sit on, so that inference needs no `peft`.

        A shared base becomes two models, one for the encoder and one for the decoder, which takes twice the memory; a
        warning says so. What else trains goes on training.
        """
        self._merge_adapters(lambda: [f"model.{name}" for name, _ in self.named_parameters()])
        self.apply_trainable_set()

    def _merge_adapters(self, parameter_names: Callable[[], list[str]]) -> None:
        """Merge; `parameter_names` tells afterwards what the model with everything has."""
        config = self.config
        if config.encoder_lora is None and config.decoder_lora is None:
            return
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError("adapters cannot be merged into quantized weights: load the checkpoint unquantized first")
        # Most weights are the base's no more.
        remember_base(self, None)
        if self._has_encoder and self.encoder_model is None:
            logger.warning("merge_adapters: encoder and decoder become two copies of the base, twice the memory")
            self.encoder_model = copy.deepcopy(self.language_model)
            config.encoder_config = copy.deepcopy(config.decoder_config)
        if self.encoder_model is not None:
            merge_lora(self.encoder_model, ENCODER)
        merge_lora(self.language_model, DECODER)
        config.encoder_lora = config.decoder_lora = None
        if config.trainable_parameters is not None:
            names = parameter_names()
            # None left is an empty list: `None` would be the method's own set.
            config.trainable_parameters = [
                pattern for pattern in config.trainable_parameters if any(re.search(pattern, name) for name in names)
            ]


class CompressorForCausalLM(MemoryGenerationMixin, CompressorPreTrainedModel, GenerationMixin):
    r"""
    A compressor with the decoder's LM head: training loss and `generate`.

    A method's class only names its backbone in `model_class`.

    Args:
        config ([`CompressorConfig`]): the configuration.
    """

    model_class: type[CompressorModel] = CompressorModel
    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}

    def __init__(self, config: CompressorConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    @property
    def model_id(self) -> str:
        """See [`CompressorModel.model_id`]."""
        return self.model.model_id

    def compress(self, input_ids: Tensor, attention_mask: Tensor | None = None, ratio: Any = None, **kwargs: Any):
        """Compress contexts into slots; see [`CompressorModel.compress`]."""
        return self.model.compress(input_ids, attention_mask, ratio, **kwargs)

    def base_language_model(self) -> AbstractContextManager[None]:
        """See [`CompressorModel.base_language_model`]."""
        return self.model.base_language_model()

    def merge_adapters(self) -> None:
        """See [`CompressorModel.merge_adapters`]."""
        self.model._merge_adapters(lambda: [name for name, _ in self.named_parameters()])
        self.apply_trainable_set()

    def decoder_language_model(self) -> PreTrainedModel:
        """A copy of the decoder as a plain language model of its own architecture, its adapters merged: for a server.

        Where nothing of the decoder trains it is the base, and the server may as well load that.
        """
        from .serving import decoder_language_model

        return decoder_language_model(self)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        ratio: int | Tensor | None = None,
        use_cache: bool | None = None,
        text_position_offset: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        r"""
        Read slots and text and predict the text's next tokens; arguments as [`CompressorModel.forward`], and:

        Args:
            labels: `(batch_size, num_text_tokens)`, -100 where no loss is wanted; shifted inside.
            logits_to_keep: Compute only the last so many logits, or those at these indices; 0 for all.

        Returns:
            `logits` of shape `(batch_size, num_text_tokens, vocab_size)`, `loss` if there are labels, and the cache.
        """
        return_dict = kwargs.pop("return_dict", None)
        loss_arguments = {name: kwargs.pop(name) for name in ("num_items_in_batch",) if name in kwargs}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            context_input_ids=context_input_ids,
            context_attention_mask=context_attention_mask,
            memory=memory,
            ratio=ratio,
            use_cache=use_cache,
            text_position_offset=text_position_offset,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(as_head_takes(self.lm_head, outputs.last_hidden_state[:, keep, :]))
        cap = getattr(self.config.decoder_config, "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **loss_arguments)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return result if return_dict in (None, True) else result.to_tuple()
