# SPDX-License-Identifier: Apache-2.0
"""Configurations refuse wrong values and come back from files."""

import json

import pytest
import transformers
from transformers import AutoConfig, LlamaConfig

import context_compressors.modeling
from context_compressors.configuration import methods
from context_compressors.configuration.configuration_compressor import CONFIG_SCHEMA, CompressorConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.configuration.methods import METHODS
from context_compressors.modeling import model_class


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("compression_ratios", (), "at least 1"),
        ("compression_ratios", "4", "ints"),
        ("chunk_size", 0, "at least 1 or None"),
        ("position_layout", "spread", "'default', 'uniform', 'enhanced'"),
        ("decoder_config", {"model_type": "lamma"}, "did you mean 'llama'"),
        ("encoder_config", 3, "PreTrainedConfig or a dict with `model_type`"),
        ("encoder_lora", {"r": 16}, "'rank', 'target_modules'"),
        ("decoder_lora", {"target_modules": "q_proj"}, "all-linear"),
    ],
)
def test_a_wrong_value_names_the_field_the_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=f"`{field}") as error:
        MeanPoolingConfig(**{field: value})
    assert allowed in str(error.value)


@pytest.mark.parametrize("method", METHODS)
def test_the_registers_line_names_what_the_auto_classes_load(method):
    import context_compressors

    kind = methods.config_class(method)
    loaded = {name: place.split(".")[1] for name, place in kind.auto_classes().items()}
    assert sorted(METHODS[method]) == sorted(loaded.values())
    assert loaded[kind().auto_class] == METHODS[method][2] == model_class(method).__name__
    for name, class_name in loaded.items():
        found = kind if name == "AutoConfig" else model_class(method, name)
        assert found is getattr(context_compressors, class_name)
        if name != "AutoConfig":
            assert getattr(transformers, name)._model_mapping[kind] is found
    assert type(AutoConfig.for_model(kind.model_type)) is kind
    assert kind().method == method


@pytest.mark.parametrize("method", METHODS)
def test_a_card_names_fields_that_the_method_has(method):
    rows = dict(methods.config_class(method)().card_rows())
    assert all(isinstance(name, str) and name[0].isupper() for name in rows)
    assert len(rows) == len(methods.config_class(method).card_fields)


@pytest.mark.parametrize(
    ("schema", "way_out"), [(CONFIG_SCHEMA - 1, "install an older"), (CONFIG_SCHEMA + 1, "install a newer")]
)
def test_another_schema_is_refused_with_the_way_out(tmp_path, schema, way_out):
    MeanPoolingConfig(compression_ratios=[2]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    assert (stored["code_version"], stored["config_schema"]) == (context_compressors.__version__, CONFIG_SCHEMA)
    file.write_text(json.dumps({**stored, "config_schema": schema}))
    with pytest.raises(ValueError, match=f"{way_out} context-compressors.*trust_remote_code"):
        MeanPoolingConfig.from_pretrained(tmp_path)


def test_a_compressor_is_its_decoder_to_the_library():
    decoder = LlamaConfig(vocab_size=77, hidden_size=48, num_attention_heads=4, bos_token_id=11, pad_token_id=13)
    config = CompressorConfig(decoder_config=decoder, compression_ratios=4, tie_word_embeddings=True)
    assert config.get_encoder_config() is config.decoder_config
    for name in ("vocab_size", "hidden_size", "num_attention_heads", "bos_token_id", "pad_token_id"):
        assert getattr(config, name) == getattr(decoder, name)
    assert (config.compression_ratios, config.tie_word_embeddings) == ((4,), True)
