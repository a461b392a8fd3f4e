# SPDX-License-Identifier: Apache-2.0
"""DeCAL in generation, with questions and saved; refused inputs."""

import pytest
import torch
from decal_models import EOS, GREEDY, START, VOCAB_SIZE, build, raises
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from context_compressors import CompressedContext, DeCALConfig, DeCALForConditionalGeneration, DeCALModel
from context_compressors.modeling.parts.cache_name import CACHE


@pytest.fixture(scope="module")
def decal():
    return build()


@pytest.fixture
def question(random_rows):
    return torch.stack(random_rows([4, 4], seed=1))


@torch.no_grad()
def test_a_context_of_no_tokens_gives_no_slots_and_still_answers(decal, question):
    memory = decal.compress(question[:, :0])
    assert memory.num_slots.tolist() == [0, 0]
    mixed = decal.compress(question, torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))
    found, expected = (decal(input_ids=question, memory=one).logits[1] for one in (mixed, memory))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_an_empty_row_sends_no_nan_into_the_gradients(random_rows):
    model = build().train()
    ids = torch.stack(random_rows([6, 6]))
    mask = torch.tensor([[1] * 6, [0] * 6])
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# --- generation ---


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_caches_change_nothing(attention, question, random_rows, pad_rows):
    """Also where the decoder has another number of layers than the encoder."""
    model = build(attention=attention, decoder_config={"num_decoder_layers": 3})
    context = dict(zip(("context_input_ids", "context_attention_mask"), pad_rows(random_rows([13, 5])), strict=True))
    expected = model.generate(question, **context, **GREEDY)
    assert expected.shape == (2, 9)
    assert expected[:, :4].equal(question)
    memory = model.compress(*context.values())
    for settings in ({"use_cache": False}, {"cache_implementation": "static"}, {"use_cache": True}):
        assert model.generate(question, memory=memory, **GREEDY, **settings).equal(expected)
    beams = model.generate(question, memory=memory, num_beams=3, num_return_sequences=2, **GREEDY)
    assert beams.shape == (4, 9)
    rows = [
        model.generate(question[i : i + 1], memory=memory.rows(i), num_beams=3, num_return_sequences=2, **GREEDY)
        for i in range(2)
    ]
    assert beams.equal(torch.cat(rows))
    output = model.generate(question, memory=memory, return_dict_in_generate=True, output_scores=True, **GREEDY)
    assert output.sequences.equal(expected)
    assert len(output.scores) == 5


@torch.no_grad()
def test_a_mask_covers_the_text_in_the_cache_too(decal, random_rows):
    memory = decal.compress(torch.stack(random_rows([9])))
    text, mask = torch.tensor([[99, START, 7, 8]]), torch.tensor([[0, 1, 1, 1]])
    cache = decal(text[:, :3], mask[:, :3], memory=memory, use_cache=True)[CACHE]
    last = decal(text[:, 3:], mask, memory=memory, cache=cache).logits
    torch.testing.assert_close(last, decal(text[:, 1:], memory=memory).logits[:, -1:], atol=1e-5, rtol=1e-4)


def test_the_start_token_stands_in_front_once(decal, question, random_rows):
    memory = decal.compress(torch.stack(random_rows([13])))
    expected = decal.generate(question, memory=memory, **GREEDY)
    started = torch.cat([torch.full((2, 1), START), question], dim=1)
    assert decal.generate(started, memory=memory, **GREEDY)[:, 1:].equal(expected)
    assert decal.generate(memory=memory, **GREEDY).shape == (1, 5)


def test_the_eos_of_a_tokenizer_is_no_part_of_a_question(decal, random_rows, pad_rows, monkeypatch):
    memory, rows = decal.compress(torch.stack(random_rows([13]))), random_rows([4, 2], seed=1)
    read, decode = [], decal._decode
    monkeypatch.setattr(decal, "_decode", lambda *args, **kwargs: read.append(args[0]) or decode(*args, **kwargs))
    ids, mask = pad_rows([torch.cat([row, torch.tensor([EOS])]) for row in rows], value=EOS)
    decal.generate(ids, attention_mask=mask, memory=memory, **GREEDY)
    assert [row[row != START].tolist() for row in read[0]] == [row.tolist() for row in rows]


def test_both_forms_of_forward_agree(decal, random_rows, pad_rows):
    ids, mask = pad_rows(random_rows([13, 5]))
    targets = torch.stack(random_rows([6, 6], seed=3))
    first = decal(input_ids=ids, attention_mask=mask, labels=targets, ratio=3)
    text = torch.cat([torch.full((2, 1), START), targets], dim=1)
    labels = torch.cat([torch.full((2, 1), -100), targets], dim=1)
    context = {"context_input_ids": ids, "context_attention_mask": mask, "ratio": 3}
    second = decal(input_ids=text, labels=labels, **context)
    third = decal(input_ids=text, labels=labels, memory=decal.compress(ids, mask, ratio=3))
    torch.testing.assert_close(first.loss, second.loss)
    torch.testing.assert_close(second.loss, third.loss)
    torch.testing.assert_close(first.logits, second.logits[:, :-1])
    assert decal(input_ids=text, logits_to_keep=2, **context).logits.equal(second.logits[:, -2:])


class Recorder(BaseStreamer, StoppingCriteria):
    """A streamer and stopping criterion that keeps what it is shown."""

    def __init__(self):
        self.streamed, self.judged = [], []

    def put(self, value):
        self.streamed += value.flatten().tolist()

    def end(self):
        pass

    def __call__(self, input_ids, scores, **kwargs):
        self.judged.append(input_ids[0].tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_streamers_and_stopping_criteria_see_what_is_returned(decal, question, random_rows):
    context, recorder = {"context_input_ids": torch.stack(random_rows([13]))}, Recorder()
    settings = {"streamer": recorder, "stopping_criteria": [recorder], **GREEDY}
    generated = decal.generate(question[:1], **context, **settings)[0].tolist()
    assert recorder.streamed == generated
    assert recorder.judged == [generated[:end] for end in range(len(generated) - 4, len(generated) + 1)]


def test_the_encoders_states_and_attentions_are_those_of_t5(random_rows, pad_rows):
    model = build("baseline", attention="eager")
    ids, mask = pad_rows(random_rows([13, 5]))
    given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": torch.full((2, 1), START)}
    settings = {"output_hidden_states": True, "output_attentions": True}
    expected, found = (one(**given, **settings) for one in (model.as_t5().eval(), model))
    for part in ("encoder_hidden_states", "encoder_attentions"):
        for ours, theirs in zip(getattr(found, part), getattr(expected, part), strict=True):
            for row, length in enumerate((13, 5)):
                places = (row, ..., slice(length), slice(length) if part == "encoder_attentions" else slice(None))
                torch.testing.assert_close(ours[places], theirs[places], atol=1e-5, rtol=1e-4)
    assert model(**given).encoder_hidden_states is None


# --- questions in the encoder ---


def test_a_memory_with_a_question_in_it_answers_that_question_only(question, random_rows, pad_rows, tmp_path):
    model = build(question_placement="encoder")
    ids, mask = pad_rows(random_rows([13, 5]), "left")
    memory = model.compress(ids, mask, question_input_ids=question)
    # The question stands in front of the context and counts.
    assert memory.num_context_tokens.tolist() == [17, 9]
    joined = model.compress(torch.cat([question, ids], dim=1), torch.cat([torch.ones_like(question), mask], dim=1))
    assert memory.embeddings.equal(joined.embeddings)
    answers = model.generate(question, memory=memory, **GREEDY)
    context = {"context_input_ids": ids, "context_attention_mask": mask}
    assert model.generate(question, **context, **GREEDY).equal(answers)
    memory.save(tmp_path / "memory.safetensors")
    loaded = CompressedContext.load(tmp_path / "memory.safetensors", model_id=model.model_id)
    assert model.generate(question[1:], memory=loaded.rows(1), **GREEDY).equal(answers[1:])
    with raises("row 1", "another question"):
        model.generate(question[[0, 0]], memory=memory)
    with raises("row 0", "no question", "question_input_ids"):
        model.generate(question, memory=joined)
    with raises("questions"):
        CompressedContext.concatenate([memory, joined])
    assert CompressedContext.concatenate([memory, memory]).question_fingerprints.equal(memory.question_fingerprints)


# --- saving ---


@torch.no_grad()
def test_one_folder_serves_both_auto_classes(decal, question, random_rows, tmp_path):
    ids = torch.stack(random_rows([13, 13]))
    decal.save_pretrained(tmp_path)
    expected = decal.generate(question, memory=decal.compress(ids), **GREEDY)
    loaded, encoder = (auto.from_pretrained(tmp_path) for auto in (AutoModelForSeq2SeqLM, AutoModel))
    assert (type(loaded), type(encoder)) == (DeCALForConditionalGeneration, DeCALModel)
    assert not [name for name, _ in encoder.named_parameters() if "decoder" in name]
    # The encoder alone makes memories that the whole model reads.
    memory = encoder.compress(ids)
    assert memory.model_id == encoder.model_id == decal.model_id
    assert loaded.generate(question, memory=memory, **GREEDY).equal(expected)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert DeCALConfig.from_pretrained(tmp_path).to_dict() == decal.config.to_dict()


@torch.no_grad()
def test_weights_load_in_the_type_that_is_asked_for(decal, random_rows, tmp_path):
    decal.save_pretrained(tmp_path)
    loaded = DeCALForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    ids = torch.stack(random_rows([13, 13]))
    memory, expected = loaded.compress(ids), decal.compress(ids)
    assert memory.dtype == torch.bfloat16
    assert (memory.embeddings - expected.embeddings).norm() < 0.1 * expected.embeddings.norm()
    assert loaded.model_id == decal.model_id


# --- errors ---


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"compression": "tokens"}, ("`compression`", "'latents'", "'none'", "'tokens'")),
        ({"encoder_attention": "causal"}, ("`latent_placement='appended'`", "'prepended'")),
        ({"compression": "none", "compression_ratios": 2}, ("`compression_ratios` must be 1", "2")),
        ({"encoder_lora": {"rank": 2}}, ("`encoder_lora` must be left out", "rank")),
        ({"position_layout": "enhanced"}, ("`position_layout` must be one of", "'default'", "'enhanced'")),
        ({"task_token_ids": {"[AE]": 5}}, ("`task_token_ids` must be left out", "AE")),
    ],
    ids=lambda part: next(iter(part)),
)
def test_wrong_values_of_the_configuration_are_named(fields, parts):
    with raises(*parts):
        DeCALConfig(**fields)


def test_what_forward_and_generate_refuse(decal, question, random_rows):
    ids = torch.stack(random_rows([13, 13]))
    memory = decal.compress(ids)
    both, text = {"memory": memory, "context_input_ids": ids}, {"input_ids": question, "memory": memory}
    outside = {"input_ids": question.clamp(max=0) + VOCAB_SIZE, "memory": memory}
    for call in (decal, decal.generate):
        for given, *parts in (
            ({"input_ids": question, **both}, "`context_input_ids` or `memory`, not both"),
            ({**text, "ratio": 3}, "`ratio` belongs to `context_input_ids`"),
            ({**text, "context_attention_mask": torch.ones_like(ids)}, "`context_attention_mask`", "not given"),
            (outside, "has the token id 128", "128 tokens"),
        ):
            with raises(*parts):
                call(**given)
    for given, *parts in (
        ({"labels": question}, "give a context"),
        ({"input_ids": ids}, "`decoder_input_ids` or `labels`"),
        ({"decoder_input_ids": question, "memory": memory}, "the decoder's text is `input_ids`"),
        ({"input_ids": ids, "labels": question, "ratio": 4}, "not trained for the ratio 4", r"\[2, 3, 8\]"),
    ):
        with raises(*parts):
            decal(**given)
    for given, *parts in (
        ({}, "give a context"),
        ({**text, "prefill_chunk_size": 2}, "`prefill_chunk_size` does not go with an encoder-decoder"),
        ({**text, "assistant_model": decal}, "`assistant_model` does not go with an encoder-decoder"),
    ):
        with raises(*parts):
            decal.generate(**given)
    with pytest.raises(TypeError, match="did you mean 'context_input_ids'"):
        decal(input_ids=question, context_inputs_ids=ids)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_of_the_callers_is_written_to(decal, question, random_rows, name):
    memory = decal.compress(torch.stack(random_rows([13, 13])))
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    settings = {"memory": memory, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert decal.generate(question, **{name: cache}, **settings).equal(decal.generate(question, **settings))
    assert cache.get_seq_length()


def test_the_memory_of_another_model_is_refused(decal, question):
    other = build(seed=1).compress(question)
    for call in (decal, decal.generate):
        with raises(other.model_id, decal.model_id):
            call(input_ids=question, memory=other)
    with raises("2 rows", "1"):
        decal(input_ids=question[:1], memory=decal.compress(question))
