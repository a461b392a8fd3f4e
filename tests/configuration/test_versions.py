# SPDX-License-Identifier: Apache-2.0
"""A checkpoint says which code wrote it; older ones are brought up to date, newer ones are refused or warned about."""

import json
import logging

import pytest
from transformers import CONFIG_MAPPING

import context_compressors.modeling
from context_compressors.configuration import versions
from context_compressors.configuration.configuration_gmsa import GMSAConfig
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.configuration.configuration_tcp_autoencoder import TCPAutoencoderConfig
from context_compressors.configuration.versions import CODE_VERSION, CONFIG_SCHEMA, as_numbers, bring_up_to_date

TASK_PROMPT, TWO_NORMS = "### Question: {question}\n### Answer:", "window_attention_two_norms"


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


@pytest.fixture
def warnings(caplog):
    logging.getLogger("transformers").addHandler(caplog.handler)
    yield lambda: caplog.text
    logging.getLogger("transformers").removeHandler(caplog.handler)


def test_the_codes_version_is_the_packages():
    assert context_compressors.__version__ == CODE_VERSION


def test_a_configuration_records_both(saved):
    stored = json.loads((saved() / "config.json").read_text())
    assert stored["code_version"] == CODE_VERSION
    assert stored["config_schema"] == CONFIG_SCHEMA


def test_a_configuration_without_a_schema_loads_as_a_whole_checkpoint(saved, warnings):
    config = MeanPoolingConfig.from_pretrained(saved(config_schema=None, code_version=None, external_weights=None))
    assert config.config_schema == CONFIG_SCHEMA
    assert config.code_version == "0.0.0"
    assert config.external_weights is None
    assert not warnings()


def test_an_older_schema_goes_through_every_step(monkeypatch):
    steps = {0: lambda fields: {**fields, "ratio": 4}, 1: lambda fields: {**fields, "ratios": [fields["ratio"]]}}
    monkeypatch.setattr(versions, "CONFIG_SCHEMA", 2)
    monkeypatch.setattr(versions, "MIGRATIONS", steps)
    stored = {"model_type": "x"}
    assert bring_up_to_date(stored) == {"model_type": "x", "ratio": 4, "ratios": [4], "config_schema": 2}
    assert stored == {"model_type": "x"}


@pytest.mark.parametrize(
    ("model_type", "stored", "expected"),
    [
        ("icae_compressor", {}, {"prompts": {"question_answering": "### Question: {question}\n### Answer:"}}),
        ("mean_pooling_compressor", {"task_token_ids": {"[LM]": 9}}, {"prompts": {"question_answering": TASK_PROMPT}}),
        ("icae_compressor", {"task_token_ids": {}}, {"prompts": None}),
        ("icae_compressor", {"prompt_format": "chat"}, {"prompts": None}),
        ("five_hundred_x_compressor", {"prompts": {"reconstruction": "x"}}, {"prompts": {"reconstruction": "x"}}),
        ("comprexit_compressor", {}, {"prompts": {"question_answering": "\nQuestion: {question}\nAnswer:"}}),
        ("comprexit_compressor", {"slot_aggregation": "window_attention"}, {"slot_aggregation": TWO_NORMS}),
        ("comprexit_compressor", {"slot_aggregation": "mean"}, {"slot_aggregation": "mean"}),
        ("gmsa_compressor", {}, {"prompts": None}),
    ],
)
def test_a_checkpoint_of_schema_1_reads_what_it_was_trained_to(model_type, stored, expected):
    found = bring_up_to_date({"config_schema": 1, **stored}, CONFIG_MAPPING[model_type].migrations)
    assert {name: found.get(name) for name in expected} == expected
    assert (found["restores_context_start"], found["bos_before_text"]) == (False, True)


def test_what_schema_1_changed_is_new_in_new_configurations(tmp_path):
    for kind, bos in ((ICAEConfig, True), (GMSAConfig, False), (TCPAutoencoderConfig, False)):
        config = kind()
        assert (config.restores_context_start, config.bos_before_text, config.prompts) == (True, bos, None)
        config.save_pretrained(tmp_path)
        again = kind.from_pretrained(tmp_path)
        assert (again.restores_context_start, again.bos_before_text, again.prompts) == (True, bos, None)
        file = tmp_path / "config.json"
        names = ("config_schema", "restores_context_start", "bos_before_text")
        earlier = {name: value for name, value in json.loads(file.read_text()).items() if name not in names}
        file.write_text(json.dumps({**earlier, "config_schema": 1}))
        again = kind.from_pretrained(tmp_path)
        assert (again.restores_context_start, again.bos_before_text) == (False, True)


def test_a_schema_that_nothing_reads_says_what_to_do(monkeypatch):
    monkeypatch.setattr(versions, "MIGRATIONS", {})
    with pytest.raises(ValueError, match=r"schema 0 .*load and save the checkpoint with a version between"):
        bring_up_to_date({})


def test_a_newer_schema_is_refused_with_the_way_out(saved):
    folder = saved(config_schema=CONFIG_SCHEMA + 1, code_version="9.1.0")
    with pytest.raises(ValueError, match=r"context-compressors 9\.1\.0.*newer context-compressors.*trust_remote_code"):
        MeanPoolingConfig.from_pretrained(folder)


@pytest.mark.parametrize("schema", ["1", -1, True, 1.5])
def test_a_schema_that_is_no_number_is_refused(schema):
    with pytest.raises(ValueError, match="config_schema"):
        bring_up_to_date({"config_schema": schema})


def test_newer_code_of_the_same_schema_warns(saved, warnings):
    config = MeanPoolingConfig.from_pretrained(saved(code_version="9.1.0"))
    assert "written by context-compressors 9.1.0" in warnings()
    assert config.compression_ratios == (2,)


@pytest.mark.parametrize(
    ("lower", "higher"), [("0.1.0", "0.1.1"), ("0.9.0", "0.10.0"), ("0.1.0", "1.0.0.dev1"), ("", "0.0.1")]
)
def test_versions_are_compared_as_numbers(lower, higher):
    assert as_numbers(lower) < as_numbers(higher)
