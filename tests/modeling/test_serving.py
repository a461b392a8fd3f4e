# SPDX-License-Identifier: Apache-2.0
"""Prompts of embeddings: the plain decoder continues them as the compressor does."""

import base64
import io
import pickle
import re

import pytest
import torch

from context_compressors import CompressedContext, add_task_tokens
from context_compressors.modeling.parts.text_ids import message_ids

QUESTION = "Who?"
GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}assistant:"


def new_tokens(model, memory, ids):
    text = torch.tensor([ids])
    return model.generate(text, memory=memory, **GREEDY)[0, len(ids) :]


def served_tokens(language_model, embeds):
    return language_model.generate(inputs_embeds=embeds[None], attention_mask=torch.ones(1, len(embeds)), **GREEDY)[0]


def test_the_plain_decoder_writes_what_the_compressor_writes(place_case, tiny_tokenizer):
    model = place_case.model
    tokenizer, reason = tiny_tokenizer, None
    add_task_tokens(tokenizer, tuple(model.config.task_token_ids))
    memory = model.compress(torch.arange(5, 27)[None])
    if memory.carrier == "key_values":
        reason = "keys and values of every layer"
    elif place_case.fields.get("position_layout") == "enhanced":
        reason = "only contiguous positions can be served"
    if reason is not None:
        for arguments in ((tokenizer, QUESTION, model), ()):
            with pytest.raises(ValueError, match=reason):
                memory.to_prompt_embeds(*arguments)
        return
    embeds = memory.to_prompt_embeds(tokenizer, QUESTION, model)
    ids = message_ids(model.config, tokenizer, QUESTION)
    assert embeds.shape == (int(memory.num_slots) + len(ids), model.config.hidden_size)
    decoder = model.decoder_language_model()
    assert type(decoder).__name__ == "LlamaForCausalLM"
    assert served_tokens(decoder, embeds).equal(new_tokens(model, memory, ids))


@pytest.fixture
def model(method_cases):
    return method_cases["mean_pooling"].model


@pytest.fixture
def memory(model):
    return model.compress(torch.arange(5, 27)[None])


def test_base64_is_the_tensor_as_torch_saves_it(model, memory, tiny_tokenizer):
    embeds = memory.to_prompt_embeds(tiny_tokenizer, QUESTION, model)
    text = memory.to_prompt_embeds(tiny_tokenizer, QUESTION, model, encoding="base64")
    payload = base64.b64decode(text, validate=True)
    decoded = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    assert decoded.equal(embeds)


def test_joined_and_reloaded_memories_are_served(model, memory, tiny_tokenizer, tmp_path):
    memory.save(tmp_path / "memory.safetensors")
    loaded = CompressedContext.load(tmp_path / "memory.safetensors")
    # The slots alone need no model.
    assert loaded.to_prompt_embeds().equal(memory.embeddings[0])
    rounded = loaded.quantize("int8")
    assert rounded.to_prompt_embeds().equal(rounded.dequantize().embeddings[0])
    joined = CompressedContext.concatenate([loaded, memory])
    embeds = joined.to_prompt_embeds(tiny_tokenizer, QUESTION, model)
    expected = new_tokens(model, joined, message_ids(model.config, tiny_tokenizer, QUESTION))
    assert served_tokens(model.decoder_language_model(), embeds).equal(expected)


def test_a_memory_knows_its_maker_until_it_leaves_the_process(model, memory, tiny_tokenizer, tmp_path):
    embeds = memory.to_prompt_embeds(tiny_tokenizer, QUESTION, model)
    joined = CompressedContext.concatenate([memory, memory])
    memory.save(tmp_path / "memory.safetensors")
    loaded = CompressedContext.load(tmp_path / "memory.safetensors")
    for known in (memory, memory.rows(0), memory.to(torch.float64).to(torch.float32)):
        assert known.to_prompt_embeds(tiny_tokenizer, QUESTION).equal(embeds)
    for either in (joined, CompressedContext.concatenate([loaded, memory])):
        expected = joined.to_prompt_embeds(tiny_tokenizer, QUESTION, model)
        assert either.to_prompt_embeds(tiny_tokenizer, QUESTION).equal(expected)
    for unknown in (loaded, pickle.loads(pickle.dumps(memory))):
        with pytest.raises(
            ValueError,
            match=re.escape(f"name it, to_prompt_embeds(tokenizer, messages, model); it is {model.model_id}"),
        ):
            unknown.to_prompt_embeds(tiny_tokenizer, QUESTION)
        assert unknown.to_prompt_embeds(tiny_tokenizer, QUESTION, model).equal(embeds)


def test_one_message_is_a_question_and_more_need_a_chat_template(model, memory, tiny_tokenizer):
    as_text = memory.to_prompt_embeds(tiny_tokenizer, QUESTION, model)
    one = [{"role": "user", "content": QUESTION}]
    assert memory.to_prompt_embeds(tiny_tokenizer, one, model).equal(as_text)
    chat = [{"role": "system", "content": "Be brief."}, *one]
    tiny_tokenizer.chat_template = TEMPLATE
    embeds = memory.to_prompt_embeds(tiny_tokenizer, chat, model)
    rendered = tiny_tokenizer("system:Be brief.\nuser:Who?\nassistant:").input_ids
    assert embeds.shape[0] == int(memory.num_slots) + len(rendered)
    assert embeds[int(memory.num_slots) :].equal(model.get_input_embeddings()(torch.tensor(rendered)))


def test_what_cannot_be_served_is_refused(model, memory, tiny_tokenizer, case_on):
    two = model.compress(torch.arange(5, 27).view(2, 11))
    with pytest.raises(ValueError, match="this one has 2 rows: choose with `rows`"):
        two.to_prompt_embeds(tiny_tokenizer, QUESTION, model)
    gemma = case_on("mean_pooling", "gemma2-eager").model
    with pytest.raises(ValueError, match=r"'gemma2' multiplies token embeddings by 5\.657"):
        gemma.compress(torch.arange(5, 27)[None]).to_prompt_embeds(tiny_tokenizer, QUESTION, gemma)
    memory.model_id = "other:0"
    with pytest.raises(ValueError, match="other:0"):
        memory.to_prompt_embeds(tiny_tokenizer, QUESTION, model)
