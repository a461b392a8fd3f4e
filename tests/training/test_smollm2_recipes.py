# SPDX-License-Identifier: Apache-2.0
"""Recipes on SmolLM2-135M-Instruct: compressor, reader and the end of a training, in the chat template."""

import pytest

from context_compressors.data.sources import DataSource
from context_compressors.training.arguments import parse_recipe

# Read last: what makes the recipes small enough for a test, and nothing else.


@pytest.mark.parametrize("recipe", ["mean_pooling", "ranked_key_values", "reader"])
def test_what_trains_is_never_what_is_reported_or_chosen_by(recipe, tmp_path):
    _, data, _ = parse_recipe(
        ["smollm2/data.yaml", f"smollm2/{recipe}.yaml", "--output_dir", str(tmp_path), "--use_cpu", "true"]
    )
    for source in map(DataSource.from_mapping, data.sources):
        assert source.generated or "_train" in source.path
        assert source.generated or source.license.split()[0] in ("CC", "CC0", "Apache-2.0")
        assert source.generated or "NC" not in source.license
        if source.path == "qa_squad_train.parquet":
            assert source.rows == [0, 85_000]


@pytest.mark.parametrize(
    "method", ["mean_pooling_residual", "compression_tokens", "icae", "five_hundred_x", "comprexit", "gmsa"]
)
def test_the_family_starts_its_slots_as_pooled_embeddings_at_one_budget(method, tmp_path):
    recipes = ["smollm2/data.yaml", "smollm2/family.yaml", f"smollm2/comparison/{method}.yaml"]
    model, data, training = parse_recipe([*recipes, "--output_dir", str(tmp_path), "--use_cpu", "true"])
    assert model.method == method.removesuffix("_residual")
    # Those of 500xCompressor are keys and values.
    assert model.method_config["embedding_residual"] is (method != "five_hundred_x")
    assert model.method_config["compression_ratios"] == [2, 4, 8]
    assert (training.max_steps, training.per_device_train_batch_size, data.max_context_tokens) == (560, 24, 512)
