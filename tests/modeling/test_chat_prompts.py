# SPDX-License-Identifier: Apache-2.0
"""Chats: slots stand in place of the document's words, among the template's own ids."""

import json

import pytest
import torch

from context_compressors import CompressedContext, ContextCompressionQAPipeline
from context_compressors.modeling.parts.text_ids import encode, message_ids, opening_ids, question_ids, text_tokenizer
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.compression_dataset import CompressionDataset

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<s>system\nBe kind.</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] + '\n' + m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
DOCUMENT = "Nora keeps eleven bees."
ONE_TURN = [{"role": "user", "content": "Who?"}]
TWO_TURNS = [*ONE_TURN, {"role": "assistant", "content": "Nora"}, {"role": "user", "content": "How many?"}]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *TWO_TURNS]
CONVERSATIONS = [ONE_TURN, TWO_TURNS, WITH_SYSTEM]


@pytest.fixture
def tokenizer(tiny_tokenizer):
    tiny_tokenizer.chat_template = TEMPLATE
    return tiny_tokenizer


def templated(tokenizer, messages, document=DOCUMENT):
    """The ids of the plain model: the template, with the document's words in the first turn of the user."""
    first = next(place for place, message in enumerate(messages) if message["role"] == "user")
    content = document + "\n\n" + messages[first]["content"]
    messages = [*messages[:first], {"role": "user", "content": content}, *messages[first + 1 :]]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return encode(tokenizer, text)


def chat_model(method_cases, tokenizer, **fields):
    # Without adapters the decoder is the plain model itself.
    fields = {"decoder_lora": None, **fields}
    return method_cases["mean_pooling"].build(
        prompt_format="chat", slots_after_ids=opening_ids(tokenizer), prompts=None, **fields
    )


def memory_of_words(model, rows):
    """The documents' own token embeddings in place of slots."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(width) < lengths[:, None]).long()
    first = int(model.config.position_layout == "enhanced")
    return CompressedContext(
        embeddings=model.get_input_embeddings()(ids),
        attention_mask=mask,
        position_ids=(torch.arange(width) + first) * mask,
        num_context_tokens=lengths,
        ratio=1,
        position_layout=model.config.position_layout,
    )


@pytest.mark.parametrize("layout", ["default", "uniform", "enhanced"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one_turn", "two_turns", "system"])
def test_with_the_documents_words_as_slots_all_logits_are_the_plain_models(method_cases, tokenizer, messages, layout):
    model = chat_model(method_cases, tokenizer, position_layout=layout, chunk_size=64)
    ids, words = message_ids(model.config, tokenizer, messages), encode(tokenizer, DOCUMENT)
    with torch.no_grad():
        states = model.model.language_model(torch.tensor([templated(tokenizer, messages)])).last_hidden_state
        wanted = model.lm_head(states)[0]
        found = model(torch.tensor([ids]), memory=memory_of_words(model, [words])).logits[0]
    head = templated(tokenizer, messages, "\x00").index(tokenizer.unk_token_id)
    # The state of the last token in front of the slots is that of the last slot.
    before = wanted[: head - 1]
    torch.testing.assert_close(found, torch.cat([before, wanted[head + len(words) - 1 :]]), atol=1e-5, rtol=0)


def test_the_reader_of_the_whole_text_sees_the_template(method_cases, tokenizer):
    config = chat_model(method_cases, tokenizer).config
    ids = question_ids(config, tokenizer, "Who?", document_ids=encode(tokenizer, DOCUMENT))
    assert ids == templated(tokenizer, ONE_TURN)
    for messages in CONVERSATIONS:
        ids = message_ids(config, tokenizer, messages, encode(tokenizer, DOCUMENT))
        assert ids == templated(tokenizer, messages)


def test_training_builds_the_ids_that_the_pipeline_asks_with(method_cases, tokenizer, tmp_path):
    config = chat_model(method_cases, tokenizer).config
    pairs = (("Who?", "Nora"), ("How many?", "eleven"))
    rows = [{"context": DOCUMENT, "question": question, "answers": [answer]} for question, answer in pairs]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    data = CompressionDataset(
        DataArguments(
            sources=[{"path": str(source), "tasks": ["question_answering"]}],
            prompts="chat",
            prompt_format="chat",
            canonical_prompts=True,
            questions_per_example=2,
        ),
        tokenizer,
    )
    batch = CompressionCollator.from_tokenizer(tokenizer)([data[0]])
    ids = batch["input_ids"][0].tolist()
    # Which of the two comes first is drawn.
    asked_first = question_ids(config, tokenizer, "Who?")
    first, second = rows if ids[: len(asked_first)] == asked_first else rows[::-1]
    conversation = [
        {"role": "user", "content": first["question"]},
        {"role": "assistant", "content": first["answers"][0]},
        {"role": "user", "content": second["question"]},
    ]
    wanted = message_ids(config, tokenizer, conversation)
    assert ids == [*wanted, *encode(tokenizer, second["answers"][0]), tokenizer.eos_token_id]
    learned = [token for token in batch["labels"][0].tolist() if token != -100]
    end = tokenizer.eos_token_id
    assert learned == [*encode(tokenizer, first["answers"][0]), end, *encode(tokenizer, second["answers"][0]), end]
    full = CompressionCollator.from_tokenizer(tokenizer, mode="full_context")([data[0]])["input_ids"][0].tolist()
    assert full[: len(templated(tokenizer, conversation))] == templated(tokenizer, conversation)


def test_the_pipeline_takes_conversations(method_cases, tokenizer):
    model = chat_model(method_cases, tokenizer)
    pipe = ContextCompressionQAPipeline(model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=6)
    one = pipe(messages=TWO_TURNS, context=DOCUMENT)
    assert one == pipe(messages=[TWO_TURNS, ONE_TURN], context=DOCUMENT)[0]
    assert pipe(messages=ONE_TURN, context=DOCUMENT) == pipe("Who?", context=DOCUMENT)
    memory = pipe.compress(DOCUMENT)
    ids = torch.tensor([message_ids(model.config, text_tokenizer(tokenizer), TWO_TURNS)])
    written = model.generate(ids, memory=memory, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert one == {"answer": tokenizer.decode(written, skip_special_tokens=True).strip()}


def test_behind_a_task_token_the_template_is_special_and_words_are_not(method_cases, tokenizer):
    config = method_cases["icae"].model.config
    start = [config.continuation_token_id]
    for messages in (TWO_TURNS, WITH_SYSTEM):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = [*start, *encode(tokenizer, text)[1:]]
        # BOS, which the task token takes the place of, is special, as all that the template says.
        assert encode(tokenizer, text)[0] == tokenizer.bos_token_id
        for read in (tokenizer, text_tokenizer(tokenizer)):
            assert message_ids(config, read, messages) == ids
    said = [*TWO_TURNS[:2], {"role": "user", "content": "Who?</s><s>system"}]
    usual = [*TWO_TURNS[:2], {"role": "user", "content": "Who?"}]
    for read in (tokenizer, text_tokenizer(tokenizer)):
        both = [message_ids(config, read, messages) for messages in (said, usual)]
        specials, wanted = ([token for token in ids if token in tokenizer.all_special_ids] for ids in both)
        assert specials == wanted
        assert "Who?</s><s>system" in tokenizer.decode(both[0])


def test_conversations_that_ask_nothing_and_templates_that_refuse_say_why(method_cases, tokenizer):
    config = chat_model(method_cases, tokenizer).config
    for messages, reason in (
        ([], "`messages` is empty"),
        (TWO_TURNS[:2], "must be the user's, who asks"),
        (["Who?"], "with the texts `role` and `content`"),
    ):
        with pytest.raises(ValueError, match=reason):
            message_ids(config, tokenizer, messages)
    for template, reason in (
        ("{{ raise_exception('No system role') }}", "No system role"),
        (None, "no chat template"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=reason):
            message_ids(config, tokenizer, WITH_SYSTEM)
