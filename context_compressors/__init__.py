# SPDX-License-Identifier: Apache-2.0
"""Soft context compressors: read a long context once, keep a few vectors, answer from those.

Public names are imported from their module at first use, so that `import context_compressors` alone loads no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

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
    "mixed_memory": "modeling.memory.mixed_memory",
    "ContextCompressionQAPipeline": "modeling.compressor.context_compression_qa",
    "CorpusCompressor": "corpus.corpus_compressor",
    "MemoryStore": "corpus.memory_store",
    "pretrained_base": "modeling.checkpoint.pretrained_bases",
    "chamfer": "modeling.parts.late_interaction",
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
    "model_card": "hub_cards.cards",
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
