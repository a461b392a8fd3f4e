# SPDX-License-Identifier: Apache-2.0
"""The papers' stages of training, from their recipes in small: what trains moves, and nothing else."""

import pytest
import small_recipes
import yaml

from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer

QUESTIONS, RESTORED, CONTINUED = ["question_answering"], ["reconstruction"], ["continuation"]
SMALL = {
    **small_recipes.SMALL,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 0,
    "min_context_tokens": 16,
    "max_context_tokens": 60,
    "max_target_tokens": 61,
    "min_document_tokens": 32,
    "max_document_tokens": 48,
    "data_dir": None,
    "prompts": "default",
    "prompt_format": "plain",
    "overlong_contexts": "truncate",
}
BOUND = {"chunk_size": 16, "encoder_lora": None, "trainable_parameters": ["task_embeddings$"]}
TOKENS = {"chunk_size": 16, "encoder_lora": {"rank": 2}}
SHARED = {"chunk_size": 16, "encoder_lora": {"rank": 2}, "decoder_lora": {"rank": 2}}
BEACON = ["activation_beacon/activation_beacon.yaml", "activation_beacon/bases/llama3_8b.yaml"]
LAYERS = {"encoder_layers": 1, "encoder_lora": {"rank": 2}}


def epl(first, config):
    return [
        (["epl/pretraining.yaml", *first], RESTORED + CONTINUED, config),
        (["epl/fine_tuning.yaml", *first[:1]], QUESTIONS, None),
    ]


# Of each stage its recipes, the tasks that it trains here, and the configuration of a new compressor.
STAGES = {
    "comprexit": [
        (
            ["comprexit/comprexit.yaml", "comprexit/pretraining.yaml"],
            CONTINUED,
            {"window_size": 16, "gate_size": 8, "metric_size": 8},
        ),
        (["comprexit/comprexit.yaml", "comprexit/fine_tuning.yaml"], QUESTIONS, None),
    ],
    "icae": epl(["epl/icae.yaml", "epl/layouts/uniform.yaml"], TOKENS),
    "five_hundred_x": epl(["epl/five_hundred_x.yaml", "epl/layouts/enhanced.yaml"], TOKENS),
    "full_context": epl(["epl/full_context.yaml"], BOUND),
    "gmsa": [
        (["gmsa/gmsa.yaml", "gmsa/autoencoding.yaml"], RESTORED, LAYERS),
        (["gmsa/gmsa.yaml", "gmsa/keft.yaml"], QUESTIONS, None),
    ],
    "tcp_autoencoder": [(["gmsa/tcp_autoencoder.yaml", "gmsa/autoencoding.yaml"], RESTORED, LAYERS)],
    "cocom": [
        (["cocom/cocom.yaml", "cocom/pretraining.yaml"], RESTORED + CONTINUED, SHARED),
        (["cocom/cocom.yaml", "cocom/fine_tuning.yaml"], QUESTIONS, None),
    ],
    "pisco": [(["pisco/pisco.yaml"], QUESTIONS, SHARED)],
    "pcc": [
        (["pcc/large.yaml", "pcc/pretraining.yaml"], RESTORED + CONTINUED, {"chunk_size": 32}),
        (["pcc/large.yaml", "pcc/fine_tuning.yaml"], QUESTIONS, None),
    ],
    "xrag": [
        (
            ["xrag/xrag.yaml", "xrag/restating.yaml"],
            RESTORED,
            {"compression_ratios": [24], "passage_readout": "mean"},
        ),
        (["xrag/xrag.yaml", "xrag/tuning.yaml"], QUESTIONS, None),
    ],
    "activation_beacon": [
        (
            [*BEACON, "activation_beacon/pretraining.yaml"],
            CONTINUED,
            {"compression_ratios": [2, 4, 8], "window_size": 16, "num_sinks": 1},
        ),
        ([*BEACON, "activation_beacon/fine_tuning.yaml"], QUESTIONS, None),
    ],
    "voco": [(["embedded/five_hundred_x.yaml", "embedded/voco.yaml"], RESTORED, {})],
    "mean_pooling": [(["mean_pooling/multi_ratio.yaml"], QUESTIONS, {})],
    "mean_pooling_ablation": [
        (["mean_pooling/multi_ratio.yaml", "mean_pooling/ablations/fixed_decoder.yaml"], QUESTIONS, {})
    ],
    "compression_tokens": [
        (["mean_pooling/multi_ratio.yaml", "mean_pooling/compression_tokens/causal.yaml"], QUESTIONS, {})
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_trains_what_it_says_and_nothing_else(name, base_folder, tmp_path):
    folder = None
    for number, (recipes, tasks, config) in enumerate(STAGES[name]):
        fields = {**SMALL, "sources": [{"generated": True, "tasks": tasks, "weight": 1}]}
        if number == 0:
            fields |= {"base": str(base_folder), "method_config": config}
            fields |= {"encoder": str(base_folder)} if name == "xrag" else {}
        else:
            fields |= {"checkpoint": str(folder), "method_config": None}
        folder = tmp_path / str(number)
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(fields))
        trainer = build_trainer(*parse_recipe([*recipes, str(file), "--output_dir", str(folder)]))
        before = {key: parameter.detach().clone() for key, parameter in trainer.model.named_parameters()}
        trained = {key for key, parameter in trainer.model.named_parameters() if parameter.requires_grad}
        trainer.train()
        moved = {key for key, parameter in trainer.model.named_parameters() if not parameter.equal(before[key])}
        # Of vectors in front of a softmax, and behind the last word, none moves.
        assert moved <= trained
        assert len(moved) > 0.7 * len(trained)
        trainer.save_model(str(folder))
