# SPDX-License-Identifier: Apache-2.0
import pytest
from transformers import AutoTokenizer, LlamaConfig

from context_compressors.configuration.configuration_decal import DeCALConfig
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.configuration.configuration_pcc import PCCConfig
from context_compressors.data.task_tokens import add_task_tokens, text_starts
from context_compressors.modeling.parts.prompting import restored_ids, start_ids
from context_compressors.modeling.parts.text_ids import context_start_ids, encode, leave_out_bos, text_tokenizer


@pytest.fixture
def own_tokenizer(base_folder):
    return AutoTokenizer.from_pretrained(base_folder)


def test_a_document_that_names_a_task_token_stays_text(own_tokenizer):
    text = "The token [AE] asks for a copy, <|end|> ends it."
    expected = encode(own_tokenizer, "[AE]")
    ids = add_task_tokens(own_tokenizer)
    plain = text_tokenizer(own_tokenizer)
    assert ids["[AE]"] in encode(own_tokenizer, text)
    assert len(expected) > 1
    assert encode(plain, "[AE]") == expected
    assert own_tokenizer.eos_token_id not in encode(plain, text)
    assert plain.decode(encode(plain, text)) == text
    # The wrapper sets the backend at every call: it must set it to the same.
    assert context_start_ids(plain) == context_start_ids(own_tokenizer) == [own_tokenizer.bos_token_id]
    assert encode(plain, "[AE]") == expected
    assert encode(own_tokenizer, "[AE]") == [ids["[AE]"]]


def test_a_reconstruction_restores_what_stands_in_front_of_a_context(own_tokenizer):
    bos = own_tokenizer.bos_token_id
    base = LlamaConfig(vocab_size=400, bos_token_id=bos)
    model = ICAEConfig(decoder_config=base, position_layout="enhanced")
    assert start_ids(model, own_tokenizer, [], "reconstruction") == [400]
    assert restored_ids(model, own_tokenizer) == [bos]
    assert start_ids(model, own_tokenizer, []) == [401]
    assert restored_ids(PCCConfig(decoder_config=base), own_tokenizer) == []
    assert restored_ids(MeanPoolingConfig(decoder_config=base), own_tokenizer) == []
    assert restored_ids(DeCALConfig(), own_tokenizer) == []
    starts = text_starts(model, own_tokenizer)
    assert starts["restored_ids"] == [bos]
    leave_out_bos(own_tokenizer)
    assert restored_ids(model, own_tokenizer) == []
