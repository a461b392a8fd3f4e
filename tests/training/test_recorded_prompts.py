# SPDX-License-Identifier: Apache-2.0
"""A trained checkpoint records the prompts of its training, and is asked with them."""

import pytest
import yaml
from small_recipes import write_recipe
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


@pytest.mark.slow
def test_prompts_of_the_recipe_are_in_the_checkpoint_and_are_taken(base_folder, tmp_path):
    (tmp_path / "prompts.yaml").write_text(yaml.safe_dump(PROMPTS))
    fields = {"prompts": str(tmp_path / "prompts.yaml"), "context_prefix": "# Text\n"}
    main([write_recipe(tmp_path, base=str(base_folder), **fields)])
    config = MeanPoolingForCausalLM.from_pretrained(tmp_path / "out").config
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert config.prompts == {task: templates[0] for task, templates in PROMPTS.items()} == default_prompts(config)
    start = tokenizer.bos_token_id
    assert question_ids(config, tokenizer, "Who?") == [start, *encode(tokenizer, "Q: Who?\nA:")]
    document = [start, *encode(tokenizer, "# Text\n"), *encode(tokenizer, "Nora.")]
    assert document_ids(config, tokenizer, "Nora.") == document
