# SPDX-License-Identifier: Apache-2.0
"""Soft context compressors: read a long context once, keep a few vectors, answer from those.

Public names are imported from their module at first use, so that `import context_compressors` alone loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .configuration.methods import METHODS

__version__ = "0.1.0"

_MODULE_OF = {
    "CompressorConfig": "configuration.configuration_compressor",
    **{names[0]: f"configuration.configuration_{method}" for method, names in METHODS.items()},
    "CompressorModel": "modeling.compressor.modeling_compressor",
    "CompressorForCausalLM": "modeling.compressor.causal_lm",
    **{name: "modeling" for names in METHODS.values() for name in names[1:]},
    "from_base": "modeling",
    "CompressedContext": "modeling.memory.compressed_context",
    "TextCompressor": "modeling.text_compressor",
    "mixed_memory": "modeling.memory.mixed_memory",
    "ContextCompressionQAPipeline": "modeling.compressor.context_compression_qa",
    "CorpusCompressor": "corpus.corpus_compressor",
    "MemoryStore": "corpus.memory_store",
    "pretrained_base": "modeling.checkpoint.pretrained_bases",
    "chamfer": "modeling.modeling_decal_retrieval",
    "mean_pool": "modeling.parts.pooling",
    "encoder_position_ids": "modeling.parts.position_layout",
    "decoder_position_ids": "modeling.parts.position_layout",
    "generate_document": "data.synthetic_documents",
    "add_task_tokens": "data.task_tokens",
    "DataArguments": "training.fields",
    "CompressionDataset": "training.objectives.compression_dataset",
    "CompressionCollator": "training.objectives.compression_collator",
    "CompressionTrainer": "training.objectives.compression_trainer",
    "DistillationTrainer": "training.objectives.distillation",
    "LogAnswersCallback": "training.log_answers",
    "RetrievalPairs": "training.objectives.retrieval",
    "RetrievalCollator": "training.objectives.retrieval",
    "RetrievalTrainer": "training.objectives.retrieval",
    "JointDataset": "training.objectives.joint_pretraining",
    "JointPretrainingTrainer": "training.objectives.joint_pretraining",
    "EvaluationDataset": "evaluation.samples",
    "EvaluationReport": "evaluation.report",
    "EvaluationSettings": "evaluation.settings",
    "evaluate_model": "evaluation.evaluate",
    "layer_flops": "configuration.layer_shape",
    "compression_flops": "evaluation.flops",
    "generation_flops": "evaluation.flops",
    "write_card": "hub_cards.cards",
}

__all__ = ["__version__", *sorted(_MODULE_OF)]


# For editors and type checkers, which see no names that are imported at first use.
if TYPE_CHECKING:
    from .configuration.configuration_activation_beacon import ActivationBeaconConfig as ActivationBeaconConfig
    from .configuration.configuration_autocompressor import AutoCompressorConfig as AutoCompressorConfig
    from .configuration.configuration_compression_tokens import CompressionTokensConfig as CompressionTokensConfig
    from .configuration.configuration_compressor import CompressorConfig as CompressorConfig
    from .configuration.configuration_comprexit import ComprExITConfig as ComprExITConfig
    from .configuration.configuration_decal import DeCALConfig as DeCALConfig
    from .configuration.configuration_five_hundred_x import FiveHundredXConfig as FiveHundredXConfig
    from .configuration.configuration_gmsa import GMSAConfig as GMSAConfig
    from .configuration.configuration_icae import ICAEConfig as ICAEConfig
    from .configuration.configuration_kv_zip import KVZipConfig as KVZipConfig
    from .configuration.configuration_mean_pooling import MeanPoolingConfig as MeanPoolingConfig
    from .configuration.configuration_pcc import PCCConfig as PCCConfig
    from .configuration.configuration_ranked_key_values import RankedKeyValuesConfig as RankedKeyValuesConfig
    from .configuration.configuration_snap_kv import SnapKVConfig as SnapKVConfig
    from .configuration.configuration_streaming_llm import StreamingLLMConfig as StreamingLLMConfig
    from .configuration.configuration_tcp_autoencoder import TCPAutoencoderConfig as TCPAutoencoderConfig
    from .configuration.configuration_voco import VoCoConfig as VoCoConfig
    from .configuration.configuration_xrag import XRAGConfig as XRAGConfig
    from .configuration.layer_shape import layer_flops as layer_flops
    from .corpus.corpus_compressor import CorpusCompressor as CorpusCompressor
    from .corpus.memory_store import MemoryStore as MemoryStore
    from .data.synthetic_documents import generate_document as generate_document
    from .data.task_tokens import add_task_tokens as add_task_tokens
    from .evaluation.evaluate import evaluate_model as evaluate_model
    from .evaluation.flops import compression_flops as compression_flops
    from .evaluation.flops import generation_flops as generation_flops
    from .evaluation.report import EvaluationReport as EvaluationReport
    from .evaluation.samples import EvaluationDataset as EvaluationDataset
    from .evaluation.settings import EvaluationSettings as EvaluationSettings
    from .hub_cards.cards import write_card as write_card
    from .modeling import from_base as from_base
    from .modeling.checkpoint.pretrained_bases import pretrained_base as pretrained_base
    from .modeling.compressor.causal_lm import CompressorForCausalLM as CompressorForCausalLM
    from .modeling.compressor.context_compression_qa import (
        ContextCompressionQAPipeline as ContextCompressionQAPipeline,
    )
    from .modeling.compressor.modeling_compressor import CompressorModel as CompressorModel
    from .modeling.memory.compressed_context import CompressedContext as CompressedContext
    from .modeling.memory.mixed_memory import mixed_memory as mixed_memory
    from .modeling.modeling_activation_beacon import ActivationBeaconForCausalLM as ActivationBeaconForCausalLM
    from .modeling.modeling_activation_beacon import ActivationBeaconModel as ActivationBeaconModel
    from .modeling.modeling_autocompressor import AutoCompressorForCausalLM as AutoCompressorForCausalLM
    from .modeling.modeling_autocompressor import AutoCompressorModel as AutoCompressorModel
    from .modeling.modeling_compression_tokens import CompressionTokensForCausalLM as CompressionTokensForCausalLM
    from .modeling.modeling_compression_tokens import CompressionTokensModel as CompressionTokensModel
    from .modeling.modeling_comprexit import ComprExITForCausalLM as ComprExITForCausalLM
    from .modeling.modeling_comprexit import ComprExITModel as ComprExITModel
    from .modeling.modeling_decal import DeCALForConditionalGeneration as DeCALForConditionalGeneration
    from .modeling.modeling_decal import DeCALModel as DeCALModel
    from .modeling.modeling_decal_retrieval import DeCALForRetrieval as DeCALForRetrieval
    from .modeling.modeling_decal_retrieval import chamfer as chamfer
    from .modeling.modeling_five_hundred_x import FiveHundredXForCausalLM as FiveHundredXForCausalLM
    from .modeling.modeling_five_hundred_x import FiveHundredXModel as FiveHundredXModel
    from .modeling.modeling_gmsa import GMSAForCausalLM as GMSAForCausalLM
    from .modeling.modeling_gmsa import GMSAModel as GMSAModel
    from .modeling.modeling_icae import ICAEForCausalLM as ICAEForCausalLM
    from .modeling.modeling_icae import ICAEModel as ICAEModel
    from .modeling.modeling_kv_zip import KVZipForCausalLM as KVZipForCausalLM
    from .modeling.modeling_kv_zip import KVZipModel as KVZipModel
    from .modeling.modeling_mean_pooling import MeanPoolingForCausalLM as MeanPoolingForCausalLM
    from .modeling.modeling_mean_pooling import MeanPoolingModel as MeanPoolingModel
    from .modeling.modeling_pcc import PCCForCausalLM as PCCForCausalLM
    from .modeling.modeling_pcc import PCCModel as PCCModel
    from .modeling.modeling_ranked_key_values import RankedKeyValuesForCausalLM as RankedKeyValuesForCausalLM
    from .modeling.modeling_ranked_key_values import RankedKeyValuesModel as RankedKeyValuesModel
    from .modeling.modeling_snap_kv import SnapKVForCausalLM as SnapKVForCausalLM
    from .modeling.modeling_snap_kv import SnapKVModel as SnapKVModel
    from .modeling.modeling_streaming_llm import StreamingLLMForCausalLM as StreamingLLMForCausalLM
    from .modeling.modeling_streaming_llm import StreamingLLMModel as StreamingLLMModel
    from .modeling.modeling_tcp_autoencoder import TCPAutoencoderForCausalLM as TCPAutoencoderForCausalLM
    from .modeling.modeling_tcp_autoencoder import TCPAutoencoderModel as TCPAutoencoderModel
    from .modeling.modeling_voco import VoCoForCausalLM as VoCoForCausalLM
    from .modeling.modeling_voco import VoCoModel as VoCoModel
    from .modeling.modeling_xrag import XRAGForCausalLM as XRAGForCausalLM
    from .modeling.modeling_xrag import XRAGModel as XRAGModel
    from .modeling.parts.pooling import mean_pool as mean_pool
    from .modeling.parts.position_layout import decoder_position_ids as decoder_position_ids
    from .modeling.parts.position_layout import encoder_position_ids as encoder_position_ids
    from .modeling.text_compressor import TextCompressor as TextCompressor
    from .training.fields import DataArguments as DataArguments
    from .training.log_answers import LogAnswersCallback as LogAnswersCallback
    from .training.objectives.compression_collator import CompressionCollator as CompressionCollator
    from .training.objectives.compression_dataset import CompressionDataset as CompressionDataset
    from .training.objectives.compression_trainer import CompressionTrainer as CompressionTrainer
    from .training.objectives.distillation import DistillationTrainer as DistillationTrainer
    from .training.objectives.joint_pretraining import JointDataset as JointDataset
    from .training.objectives.joint_pretraining import JointPretrainingTrainer as JointPretrainingTrainer
    from .training.objectives.retrieval import RetrievalCollator as RetrievalCollator
    from .training.objectives.retrieval import RetrievalPairs as RetrievalPairs
    from .training.objectives.retrieval import RetrievalTrainer as RetrievalTrainer
else:

    def __getattr__(name: str) -> Any:
        """Import a public name from its module at first use."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
        value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
