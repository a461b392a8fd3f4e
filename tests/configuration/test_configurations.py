# SPDX-License-Identifier: Apache-2.0
"""Configurations refuse wrong values and come back from files."""

import json

import pytest
import transformers
from transformers import AutoConfig, Gemma2Config, LlamaConfig

import context_compressors.modeling
from context_compressors.configuration import methods
from context_compressors.configuration.configuration_compressor import CODE_VERSION, CONFIG_SCHEMA, CompressorConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.configuration.field_checks import PROMPTED_TASKS
from context_compressors.configuration.methods import METHODS
from context_compressors.data.prompts import TASKS
from context_compressors.modeling import model_class

LORA_KEYS = "alpha.*dropout.*rank.*target_modules"
# field, value, and what the message says beside the field and the value
WRONG = [
    ("compression_ratios", (), "at least 1"),
    ("compression_ratios", (4, 4), "different"),
    ("compression_ratios", "4", "ints"),
    ("chunk_size", 0, "at least 1 or None"),
    ("position_layout", "spread", "'default', 'uniform', 'enhanced'"),
    ("decoder_config", "meta-llama/Llama-3.2-1B", "PreTrainedConfig or a dict with `model_type`"),
    ("encoder_config", 3, "PreTrainedConfig or a dict with `model_type`"),
]
WRONG_LORA = [
    (16, LORA_KEYS),
    ({"r": 16}, f"{LORA_KEYS}.*'r'"),
    ({"rank": 0}, "rank.*at least 1.*0"),
    ({"target_modules": "q_proj"}, "target_modules.*all-linear.*'q_proj'"),
    ({"target_modules": []}, r"target_modules.*all-linear.*\[\]"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), WRONG, ids=lambda part: str(part)[:30])
def test_a_wrong_value_names_the_field_the_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=f"`{field}`") as error:
        MeanPoolingConfig(**{field: value})
    assert allowed in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("decoder_config", {"model_type": ["llama"]}, r"unknown model_type of `decoder_config`: \['llama'\]"),
        ("decoder_config", {"model_type": "lamma"}, "unknown model_type of `decoder_config`: 'lamma'; did you mean"),
        ("prompts", {"sumarisation": ""}, "unknown task of `prompts`: 'sumarisation'; did you mean 'summarization'"),
    ],
)
def test_a_wrong_part_of_a_value_is_named(field, value, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        MeanPoolingConfig(**{field: value})


def test_prompts_are_of_the_tasks_that_are_trained():
    assert PROMPTED_TASKS == TASKS


@pytest.mark.parametrize(("value", "message"), WRONG_LORA, ids=lambda part: str(part)[:30])
def test_wrong_adapter_settings_are_named(value, message):
    for side in ("encoder_lora", "decoder_lora"):
        with pytest.raises(ValueError, match=f"(?s)`{side}.*{message}"):
            MeanPoolingConfig(**{side: value})


@pytest.mark.parametrize("config_class", [CompressorConfig, MeanPoolingConfig])
def test_every_field_comes_back_from_a_file(config_class, tmp_path):
    config = config_class(
        decoder_config=Gemma2Config(num_hidden_layers=3, sliding_window=77),
        encoder_config={"model_type": "qwen3", "hidden_size": 48},
        base_model_name_or_path="org/base",
        base_model_revision="abc",
        compression_ratios=[8, 2],
        chunk_size=510,
        position_layout="uniform",
        encoder_lora={"rank": 3},
        decoder_lora=None,
        trainable_parameters=("lora_B",),
        bos_before_slots=True,
        task_token_ids={"[AE]": 7},
        use_cache=False,
    )
    config.save_pretrained(tmp_path)
    loaded = config_class.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.compression_ratios == (8, 2)
    assert loaded.default_ratio == 8
    assert loaded.encoder_lora == {"rank": 3, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"}
    assert loaded.decoder_lora is None
    assert loaded.decoder_config.sliding_window == 77
    assert loaded.encoder_config.model_type == "qwen3"
    assert loaded.get_encoder_config() is loaded.encoder_config
    assert loaded.get_text_config() is loaded.decoder_config
    assert config_class().to_dict() != loaded.to_dict()


def test_one_ratio_or_pattern_needs_no_list():
    assert CompressorConfig(compression_ratios=4).compression_ratios == (4,)
    assert CompressorConfig(trainable_parameters="lora").trainable_parameters == ["lora"]


def test_a_shared_base_is_both_sides():
    config = CompressorConfig(
        decoder_config=LlamaConfig(vocab_size=77, hidden_size=48, num_attention_heads=4, num_hidden_layers=3)
    )
    assert config.get_encoder_config() is config.decoder_config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (77, 48, 3)
    assert config.num_attention_heads == config.decoder_config.num_attention_heads
    assert config.max_position_embeddings == config.decoder_config.max_position_embeddings


def test_special_tokens_and_tying_are_the_decoders():
    decoder = LlamaConfig(bos_token_id=11, eos_token_id=12, pad_token_id=13, tie_word_embeddings=True)
    config = CompressorConfig(decoder_config=decoder)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (11, 12, 13)
    assert config.tie_word_embeddings is True
    assert CompressorConfig(decoder_config=decoder, tie_word_embeddings=False).tie_word_embeddings is False


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


# --- versions ---


@pytest.fixture
def saved(tmp_path):
    """`saved(**fields)`: a folder with a configuration whose stored fields are these; `None` leaves one out."""
    MeanPoolingConfig(compression_ratios=[2]).save_pretrained(tmp_path)

    def change(**fields):
        file = tmp_path / "config.json"
        stored = {**json.loads(file.read_text()), **fields}
        file.write_text(json.dumps({name: value for name, value in stored.items() if value is not None}))
        return tmp_path

    return change


def test_the_codes_version_is_the_packages():
    assert context_compressors.__version__ == CODE_VERSION


def test_a_configuration_records_both(saved):
    stored = json.loads((saved() / "config.json").read_text())
    assert stored["code_version"] == CODE_VERSION
    assert stored["config_schema"] == CONFIG_SCHEMA


@pytest.mark.parametrize("schema", [None, CONFIG_SCHEMA - 1])
def test_an_older_schema_is_refused_with_the_way_out(saved, schema):
    with pytest.raises(ValueError, match=r"install an older context-compressors, .*trust_remote_code"):
        MeanPoolingConfig.from_pretrained(saved(config_schema=schema))


def test_a_newer_schema_is_refused_with_the_way_out(saved):
    folder = saved(config_schema=CONFIG_SCHEMA + 1, code_version="9.1.0")
    with pytest.raises(
        ValueError, match=r"context-compressors 9\.1\.0.*install a newer context-compressors.*trust_remote_code"
    ):
        MeanPoolingConfig.from_pretrained(folder)
