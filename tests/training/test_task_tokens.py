# SPDX-License-Identifier: Apache-2.0
import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaTokenizer

from context_compressors.configuration.configuration_decal import DeCALConfig
from context_compressors.configuration.configuration_five_hundred_x import FiveHundredXConfig
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.data.task_tokens import add_task_tokens, check_task_tokens, text_starts
from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.modeling.parts.prompting import restored_ids, start_ids
from context_compressors.modeling.parts.text_ids import context_start_ids, encode, leave_out_bos, text_tokenizer
from context_compressors.training.arguments import ModelArguments
from context_compressors.training.loading import load_compressor

SMALL = {"compression_ratios": [4], "chunk_size": 16, "encoder_lora": {"rank": 2}}


@pytest.fixture
def own_tokenizer(base_folder):
    return AutoTokenizer.from_pretrained(base_folder)


def test_tokens_are_added_once_and_saved(own_tokenizer, tmp_path):
    size = len(own_tokenizer)
    ids = add_task_tokens(own_tokenizer)
    assert ids == {"[AE]": size, "[LM]": size + 1}
    assert list(ids) == ["[AE]", "[LM]"]
    assert add_task_tokens(own_tokenizer) == ids
    assert len(own_tokenizer) == size + 2
    own_tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert add_task_tokens(loaded) == ids
    assert loaded("[LM] Who?", add_special_tokens=False).input_ids[0] == ids["[LM]"]
    assert loaded.decode([ids["[AE]"], *encode(loaded, "Who?")], skip_special_tokens=True) == "Who?"


def test_other_special_tokens_stay(own_tokenizer):
    own_tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    before = own_tokenizer.convert_tokens_to_ids("<tool>")
    add_task_tokens(own_tokenizer, ["[LM]"])
    assert own_tokenizer.convert_tokens_to_ids("<tool>") == before
    assert {"<tool>", "[LM]", own_tokenizer.eos_token} <= set(own_tokenizer.all_special_tokens)
    assert add_task_tokens(own_tokenizer, ()) == {}


def test_a_tokenizer_without_the_compressors_tokens_is_refused(own_tokenizer):
    ids = add_task_tokens(own_tokenizer)
    check_task_tokens(own_tokenizer, ids)
    check_task_tokens(own_tokenizer, {})
    with pytest.raises(ValueError, match=r"\[AE\] has the id 7, in the tokenizer it is 400"):
        check_task_tokens(own_tokenizer, {"[AE]": 7})
    with pytest.raises(ValueError, match=r"\[QA\] has the id 7, in the tokenizer it is None"):
        check_task_tokens(own_tokenizer, {"[QA]": 7})


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


@pytest.mark.parametrize("table", [300, 400, 512])
def test_a_new_compressor_takes_the_tokenizers_ids(own_tokenizer, tmp_path, table):
    """The base's table may be smaller than the tokenizer, as large, or padded beyond it."""
    config = LlamaConfig(
        vocab_size=table, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    arguments = ModelArguments(base=str(tmp_path / "base"), method="icae", method_config=SMALL)
    model = load_compressor(arguments, own_tokenizer)
    assert model.config.task_token_ids == {"[AE]": 400, "[LM]": 401}
    assert model.get_input_embeddings().weight.shape[0] == table
    ids = own_tokenizer("[LM]", add_special_tokens=False, return_tensors="pt").input_ids
    assert (model.model._embed_text(ids)[0, 0] == model.model.task_embeddings[1]).all()


def test_only_methods_with_task_tokens_get_them(own_tokenizer, base_folder, tmp_path):
    def load(method, **fields):
        return load_compressor(
            ModelArguments(base=str(base_folder), method=method, method_config=fields), own_tokenizer
        )

    size = len(own_tokenizer)
    lora = {"compression_ratios": [4], "encoder_lora": {"rank": 2}, "decoder_lora": {"rank": 2}}
    assert load("mean_pooling", **lora).config.task_token_ids == {}
    assert load("compression_tokens", **lora).config.task_token_ids == {}
    assert load("icae", **SMALL, task_token_ids={}).config.task_token_ids == {}
    assert len(own_tokenizer) == size
    bos = load("five_hundred_x", **SMALL, reconstruction_trigger="bos")
    assert bos.config.task_token_ids == {"[LM]": size}
    assert bos.config.reconstruction_token_id == own_tokenizer.bos_token_id
    assert load("five_hundred_x", **SMALL).config.task_token_ids == {"[AE]": size + 1, "[LM]": size}


def test_a_reconstruction_restores_what_stands_in_front_of_a_context(own_tokenizer):
    bos = own_tokenizer.bos_token_id
    base = LlamaConfig(vocab_size=400, bos_token_id=bos)
    model = ICAEConfig(decoder_config=base, position_layout="enhanced")
    assert start_ids(model, own_tokenizer, [], "reconstruction") == [400]
    assert restored_ids(model, own_tokenizer) == [bos]
    assert start_ids(model, own_tokenizer, []) == [401]
    earlier = ICAEConfig(decoder_config=base, restores_context_start=False)
    assert restored_ids(earlier, own_tokenizer) == []
    # As the trigger, BOS is the context's first token itself, unless it has the position in front of it.
    for layout, restored in (("default", []), ("uniform", []), ("enhanced", [bos])):
        config = FiveHundredXConfig(decoder_config=base, reconstruction_trigger="bos", position_layout=layout)
        assert restored_ids(config, own_tokenizer) == restored
        assert start_ids(config, own_tokenizer, [], "reconstruction") == [bos]
    assert restored_ids(MeanPoolingConfig(decoder_config=base), own_tokenizer) == []
    assert restored_ids(DeCALConfig(), own_tokenizer) == []
    starts = text_starts(model, own_tokenizer)
    assert starts["restored_ids"] == [bos]
    leave_out_bos(own_tokenizer)
    assert restored_ids(model, own_tokenizer) == []


@pytest.mark.parametrize("slow_class", [False, True])
def test_a_tokenizer_without_bos_stays_so_when_saved(own_tokenizer, tmp_path, slow_class):
    if slow_class:
        vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581a": 3, "a": 4, "\u2581": 5}
        own_tokenizer = LlamaTokenizer(vocab=vocab, merges=[("\u2581", "a")], add_bos_token=True)
    assert context_start_ids(own_tokenizer) == [own_tokenizer.bos_token_id]
    leave_out_bos(own_tokenizer)
    own_tokenizer.save_pretrained(tmp_path)
    for found in (own_tokenizer, text_tokenizer(own_tokenizer), AutoTokenizer.from_pretrained(tmp_path)):
        assert found("a").input_ids == encode(found, "a")
        assert found.bos_token_id == own_tokenizer.bos_token_id


def test_a_checkpoint_needs_its_own_tokenizer(own_tokenizer, base_folder, tmp_path):
    ICAEForCausalLM.from_base(base_folder, **SMALL, task_token_ids=add_task_tokens(own_tokenizer)).save_pretrained(
        tmp_path
    )
    arguments = ModelArguments(checkpoint=str(tmp_path), method="icae")
    assert load_compressor(arguments, own_tokenizer).config.task_token_ids == {"[AE]": 400, "[LM]": 401}
    with pytest.raises(ValueError, match=r"\[AE\] has the id 400, in the tokenizer it is None: take the tokenizer"):
        load_compressor(arguments, AutoTokenizer.from_pretrained(base_folder))
