# SPDX-License-Identifier: Apache-2.0
"""Soft context compressors: read a long context once, keep a few vectors, answer from those.

Public names are imported from their module at first use, so that `import context_compressors` alone loads no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULE_OF = {
    "CompressorConfig": "configuration.configuration_compressor",
    "MeanPoolingConfig": "configuration.configuration_mean_pooling",
    "CompressionTokensConfig": "configuration.configuration_compression_tokens",
    "ICAEConfig": "configuration.configuration_icae",
    "FiveHundredXConfig": "configuration.configuration_five_hundred_x",
    "ComprExITConfig": "configuration.configuration_comprexit",
    "GMSAConfig": "configuration.configuration_gmsa",
    "TCPAutoencoderConfig": "configuration.configuration_tcp_autoencoder",
    "DeCALConfig": "configuration.configuration_decal",
    "CompressorModel": "modeling.compressor.modeling_compressor",
    "CompressorForCausalLM": "modeling.compressor.modeling_compressor",
    "MeanPoolingModel": "modeling.modeling_mean_pooling",
    "MeanPoolingForCausalLM": "modeling.modeling_mean_pooling",
    "CompressionTokensModel": "modeling.modeling_compression_tokens",
    "CompressionTokensForCausalLM": "modeling.modeling_compression_tokens",
    "ICAEModel": "modeling.modeling_icae",
    "ICAEForCausalLM": "modeling.modeling_icae",
    "FiveHundredXModel": "modeling.modeling_five_hundred_x",
    "FiveHundredXForCausalLM": "modeling.modeling_five_hundred_x",
    "ComprExITModel": "modeling.modeling_comprexit",
    "ComprExITForCausalLM": "modeling.modeling_comprexit",
    "GMSAModel": "modeling.modeling_gmsa",
    "GMSAForCausalLM": "modeling.modeling_gmsa",
    "TCPAutoencoderModel": "modeling.modeling_tcp_autoencoder",
    "TCPAutoencoderForCausalLM": "modeling.modeling_tcp_autoencoder",
    "DeCALModel": "modeling.modeling_decal",
    "DeCALForConditionalGeneration": "modeling.modeling_decal",
    "DeCALForRetrieval": "modeling.modeling_decal_retrieval",
    "CompressedContext": "modeling.memory.compressed_context",
    "ContextCompressionQAPipeline": "modeling.compressor.context_compression_qa",
    "pretrained_base": "modeling.checkpoint.pretrained_bases",
    "chamfer": "modeling.parts.late_interaction",
    "mean_pool": "modeling.parts.pooling",
    "encoder_position_ids": "modeling.parts.position_layout",
    "decoder_position_ids": "modeling.parts.position_layout",
    "voco_position_ids": "modeling.parts.position_layout",
    "generate_document": "data.synthetic_documents",
    "add_task_tokens": "data.task_tokens",
    "CompressionDataset": "training.objectives.compression_dataset",
    "CompressionCollator": "training.objectives.compression_collator",
    "CompressionTrainer": "training.objectives.compression",
    "DistillationTrainer": "training.objectives.compression",
    "RetrievalPairs": "data.retrieval_sources",
    "RetrievalCollator": "training.objectives.retrieval",
    "RetrievalTrainer": "training.objectives.retrieval",
    "JointDataset": "training.objectives.joint_pretraining",
    "JointPretrainingTrainer": "training.objectives.joint_trainer",
    "EvaluationDataset": "evaluation.samples",
    "EvaluationReport": "evaluation.report",
    "EvaluationSettings": "evaluation.settings",
    "evaluate_model": "evaluation.evaluate",
    "layer_flops": "evaluation.flops",
    "compression_flops": "evaluation.flops",
    "generation_flops": "evaluation.flops",
    "analyse_slots": "evaluation.analysis.slots",
    "model_card": "hub_cards.cards",
    "language_model_card": "hub_cards.cards",
    "retrieval_card": "hub_cards.retrieval_cards",
    "write_card": "hub_cards.write_card",
}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    """Import a public name from its module at first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
