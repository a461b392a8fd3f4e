# SPDX-License-Identifier: Apache-2.0
"""A trained checkpoint says what it was trained to read, and whoever asks it later takes that."""

import pytest
import yaml
from transformers import AutoTokenizer

from context_compressors import MeanPoolingForCausalLM
from context_compressors.data.prompts import default_prompts
from context_compressors.modeling.parts.prompting import document_ids, question_ids
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.training.train import main

PROMPTS = {
    "question_answering": ["Q: {question}\nA:", "{question}"],
    "summarization": ["Sum:"],
    "continuation": [""],
    "reconstruction": ["Again:"],
}


@pytest.fixture
def trained(base_folder, tmp_path):
    """A compressor from a recipe with prompts of its own, and its tokenizer."""
    (tmp_path / "prompts.yaml").write_text(yaml.safe_dump(PROMPTS))
    recipe = {
        "base": str(base_folder),
        "method": "mean_pooling",
        "sources": [{"generated": True, "tasks": ["question_answering", "reconstruction"], "weight": 1}],
        "prompts": str(tmp_path / "prompts.yaml"),
        "context_prefix": "# Text\n",
        "max_context_tokens": 60,
        "max_target_tokens": 64,
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert not main([str(tmp_path / "recipe.yaml")])
    return MeanPoolingForCausalLM.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_prompts_of_the_recipe_are_in_the_checkpoint_and_are_taken(trained):
    model, tokenizer = trained
    config = model.config
    assert config.prompts == {task: templates[0] for task, templates in PROMPTS.items()}
    assert config.context_prefix == "# Text\n"
    start = tokenizer.bos_token_id
    expected = [start, *encode(tokenizer, "Q: Who?\nA:")]
    assert question_ids(config, tokenizer, "Who?") == expected
    assert default_prompts(config) == config.prompts
    heading = encode(tokenizer, "# Text\n")
    assert document_ids(config, tokenizer, "Nora.") == [start, *heading, *encode(tokenizer, "Nora.")]
