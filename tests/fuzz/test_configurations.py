# SPDX-License-Identifier: Apache-2.0
"""Every configuration, and `from_base`, with odd values in any field: built and saved alike, or refused by name."""

import inspect
import json
from dataclasses import dataclass
from typing import Any

import decal_models
import pytest
from budget import fuzz
from calls import assert_refused, result_or_refusal
from hypothesis import strategies as st
from tiny_bases import base_config
from tiny_models import METHOD_CASES, TRAINING_FREE_CASES
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config

from context_compressors import CompressorConfig, DeCALForConditionalGeneration

ODD = (None, True, False, -1, 0, 1, 3, 2.5, float("nan"), "", "text", "default", b"x", (), [], [2], [0], ["["], {})
ODD += ({"a": "b"}, {"rank": 0}, {"model_type": "none"}, object())
CLASSES = [case.method.causal_lm_class for case in (*METHOD_CASES, *TRAINING_FREE_CASES[::5])]
CLASSES += [DeCALForConditionalGeneration]


@dataclass(frozen=True)
class OddField:
    """A method's class, and an odd value in one of its configuration's fields."""

    model_class: type
    field: str
    value: Any


@st.composite
def odd_fields(draw: Any) -> OddField:
    model_class = draw(st.sampled_from(CLASSES))
    parameters = [inspect.signature(each.__init__).parameters for each in (model_class.config_class, CompressorConfig)]
    fields = sorted({name for names in parameters for name in names} - {"self", "kwargs"})
    return OddField(model_class, draw(st.sampled_from(fields)), draw(st.sampled_from(ODD)))


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Folders of base models, by whether they are encoder-decoders."""
    folders = {kind: tmp_path_factory.mktemp("base") for kind in (False, True)}
    AutoModelForCausalLM.from_config(base_config(num_hidden_layers=8)).save_pretrained(folders[False])
    AutoModelForSeq2SeqLM.from_config(T5Config(**decal_models.T5_FIELDS)).save_pretrained(folders[True])
    return {kind: str(folder) for kind, folder in folders.items()}


@fuzz("odd fields of configurations", call=odd_fields())
def test_odd_fields(call, bases):
    """What the configuration takes is saved and read alike; what it refuses, `from_base` refuses as well."""
    fields, config_class = {call.field: call.value}, call.model_class.config_class
    config = result_or_refusal(lambda: config_class(**fields), call.field)
    if config is not None:
        again = config_class.from_dict(json.loads(config.to_json_string(use_diff=False)))
        assert again.to_dict() == config.to_dict()
    base = bases[call.model_class is DeCALForConditionalGeneration]
    model = result_or_refusal(lambda: call.model_class.from_base(base, **fields), call.field)
    assert model is None or config is not None


@pytest.mark.parametrize("model_class", CLASSES)
def test_fields_that_no_configuration_has_are_refused(model_class, bases):
    base = bases[model_class is DeCALForConditionalGeneration]
    for name in ("compression_ratio", "chunksize", "positions", "lora"):
        assert_refused(lambda name=name: model_class.from_base(base, **{name: 4}), name)
