# SPDX-License-Identifier: Apache-2.0
import pytest
from transformers import AutoTokenizer

from context_compressors.data.task_tokens import add_task_tokens
from context_compressors.modeling.parts.text_ids import context_start_ids, encode, text_tokenizer


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
