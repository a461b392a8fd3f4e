# SPDX-License-Identifier: Apache-2.0
"""A checkpoint says which code wrote it; another schema is refused."""

import json

import pytest

import context_compressors.modeling
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.configuration.versions import CODE_VERSION, CONFIG_SCHEMA


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
