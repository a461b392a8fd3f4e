# SPDX-License-Identifier: Apache-2.0
"""The pipeline "context-compression-qa" answers as `compress` and `generate` do."""

import hashlib
import math
from itertools import chain

import pytest
import torch
from decal_models import build as build_decal
from transformers import GenerationConfig, pipeline
from transformers.utils import ModelOutput

from context_compressors import CompressedContext, ContextCompressionQAPipeline, add_task_tokens
from context_compressors.modeling.compressor import context_compression_qa
from context_compressors.modeling.parts.text_ids import question_ids

DOCUMENTS = ["Nora keeps eleven bees.", "Olaf owns the mill. {x}", "No."]
QUESTIONS = ["Who?", "What does Nora keep [LM]?"]
LENGTH = {"max_new_tokens": 6, "min_new_tokens": 6}
# What is refused before a method has its turn: one stands for all.
before_any_method = pytest.mark.only(lambda case: case.method.name == "mean_pooling")


def pipeline_of(model, tokenizer):
    """The pipeline of a method, whose tokenizer knows its task tokens."""
    ids = model.config.task_token_ids
    assert add_task_tokens(tokenizer, tuple(ids)) == ids
    pipe = pipeline("context-compression-qa", model=model, tokenizer=tokenizer, device="cpu", **LENGTH)
    assert type(pipe) is ContextCompressionQAPipeline
    return pipe


@pytest.fixture
def pipe(form_case, tiny_tokenizer):
    return pipeline_of(form_case.model, tiny_tokenizer)


# BOS of the tests' tokenizer starts the decoder.
DECAL = {"compression_ratios": (2, 3), "decoder_config": {"decoder_start_token_id": 1, "eos_token_id": 2}}


def characters(tokenizer, text):
    """Ids of a text, letter by letter: no special token comes out of it."""
    return [tokenizer.convert_tokens_to_ids(letter) for letter in text]


def answer_by_hand(pipe, question, *documents, prompt=None, prefix="", ratio=None):
    """One document and one question at a time, without any part of the pipeline."""
    model, tokenizer = pipe.model, pipe.tokenizer
    task = model.config.task_token_ids.get("[LM]")
    if prompt is None and model.config.model_type == "comprexit_compressor":
        prompt = "Question: {question}Answer the question directly with a short span only, no explanation. Answer:"
    elif prompt is None:
        has_tokens = model.config.task_token_ids
        prompt = "\n### Question:\n{question}\n### Answer:\n" if has_tokens else "\nQuestion: {question}\nAnswer:"
    contexts = [
        torch.tensor([[tokenizer.bos_token_id, *characters(tokenizer, prefix + document)]]) for document in documents
    ]
    memory = CompressedContext.concatenate([model.compress(context, ratio=ratio) for context in contexts])
    start = [tokenizer.bos_token_id] if task is None else [task]
    if model.config.model_type in (
        "gmsa_compressor",
        "tcp_autoencoder_compressor",
        "voco_compressor",
        "activation_beacon_compressor",
    ):
        start = []
    before, after = prompt.split("{question}")
    text = torch.tensor([[*start, *characters(tokenizer, before + question + after)]])
    output = model.generate(text, memory=memory, do_sample=False, **LENGTH)
    return {"answer": tokenizer.decode(output[0, text.shape[1] :], skip_special_tokens=True).strip()}


@pytest.mark.costly
def test_a_question_is_answered_as_by_hand(method_case, tiny_tokenizer):
    pipe = pipeline_of(method_case.model, tiny_tokenizer)
    for ratio in (None, 3):
        answer = pipe(QUESTIONS[0], context=DOCUMENTS[1], ratio=ratio)
        assert answer == answer_by_hand(pipe, QUESTIONS[0], DOCUMENTS[1], ratio=ratio)
        assert answer["answer"]


def test_an_encoder_decoder_is_asked_the_same_way(tiny_tokenizer):
    encoder_decoder = build_decal(**DECAL)
    pipe = encoder_decoder.question_answering(tiny_tokenizer, **LENGTH)
    expected = [[answer_by_hand(pipe, question, document) for question in QUESTIONS] for document in DOCUMENTS]
    assert pipe(QUESTIONS, context=DOCUMENTS, batch_size=4) == expected
    together = answer_by_hand(pipe, QUESTIONS[0], *DOCUMENTS)
    assert pipe(QUESTIONS[0], memory=pipe.compress(DOCUMENTS), join=True) == together
    with pytest.raises(ValueError, match="by cross-attention, which servers do not offer"):
        pipe.compress(DOCUMENTS[:1]).to_prompt_embeds(tiny_tokenizer, "Who?", encoder_decoder)


@pytest.mark.slow
def test_documents_are_compressed_with_their_question_where_the_checkpoint_does_so(tiny_tokenizer):
    model = build_decal(question_placement="encoder", **DECAL)
    pipe = model.question_answering(tiny_tokenizer, **LENGTH)

    def by_hand(question, document, ratio=None):
        text = torch.tensor([characters(tiny_tokenizer, f"\nQuestion: {question}\nAnswer:")])
        context = torch.tensor([[tiny_tokenizer.bos_token_id, *characters(tiny_tokenizer, document)]])
        output = model.generate(text, context_input_ids=context, ratio=ratio, do_sample=False, **LENGTH)
        return {"answer": tiny_tokenizer.decode(output[0, text.shape[1] :], skip_special_tokens=True).strip()}

    for ratio in (None, 3):
        expected = [[by_hand(question, document, ratio) for question in QUESTIONS] for document in DOCUMENTS]
        assert pipe(QUESTIONS, context=DOCUMENTS, ratio=ratio, batch_size=4) == expected
    reason = r"compresses a document together with its question \(`question_placement='encoder'`\), "
    with pytest.raises(ValueError, match=f"{reason}so that several are not joined: ask about each"):
        pipe("Who?", context=DOCUMENTS, join=True)
    with pytest.raises(ValueError, match=f"{reason}so that no memory is asked here: give the document, `context`"):
        pipe("Who?", memory="document.safetensors")


@pytest.mark.slow
def test_many_questions_about_many_documents(pipe):
    expected = [[answer_by_hand(pipe, question, document) for question in QUESTIONS] for document in DOCUMENTS]
    assert len({answer["answer"] for answers in expected for answer in answers}) > 1
    for size in (1, 3, 8):
        assert pipe(QUESTIONS, context=DOCUMENTS, batch_size=size) == expected, size
        assert pipe(QUESTIONS, context=DOCUMENTS[0], batch_size=size) == expected[0], size
        assert pipe(question=QUESTIONS[1], context=DOCUMENTS, batch_size=size) == [row[1] for row in expected], size


def test_memories_are_read_in_place_of_documents(pipe, tmp_path):
    expected = pipe(QUESTIONS, context=DOCUMENTS)
    memory = pipe.compress(DOCUMENTS)
    assert pipe(QUESTIONS, memory=memory) == expected
    paths = [tmp_path / f"{row}.safetensors" for row in range(len(DOCUMENTS))]
    for row, path in enumerate(paths):
        memory.rows(row).save(path)
    assert pipe(QUESTIONS, memory=paths) == expected
    assert pipe(QUESTIONS, memory=str(paths[1])) == expected[1]
    assert pipe(QUESTIONS[0], memory=[memory.rows(0), str(paths[1])]) == [row[0] for row in expected[:2]]
    # Where its text is can be kept.
    digest = hashlib.sha256(DOCUMENTS[0].encode()).hexdigest()
    assert pipe.compress(DOCUMENTS[0], source="notes/a.txt").source == f"notes/a.txt sha256:{digest}"


def test_joined_documents_are_read_together_in_order(pipe, tmp_path):
    together = answer_by_hand(pipe, QUESTIONS[0], *DOCUMENTS)
    assert pipe(QUESTIONS[0], context=DOCUMENTS, join=True) == together
    assert pipe(QUESTIONS[0], memory=pipe.compress(DOCUMENTS), join=True, batch_size=1) == together
    assert pipe(QUESTIONS[0], context=DOCUMENTS[:1], join=True) == answer_by_hand(pipe, QUESTIONS[0], DOCUMENTS[0])


@before_any_method
def test_a_document_longer_than_was_measured_is_warned_of(pipe, monkeypatch):
    warned = []
    monkeypatch.setattr(context_compression_qa.logger, "warning_once", warned.append, raising=False)
    monkeypatch.setattr(pipe.model.config, "chunk_size", 20)
    pipe.compress("a" * 41)
    monkeypatch.setattr(pipe.model.config, "measured_chunks", 2)
    pipe.compress(["a" * 19, "b" * 39])
    assert warned == []
    pipe.compress(["a", "b" * 41])
    assert warned[0].startswith("a document has 3 chunks of 20 tokens, and this checkpoint was measured on 2 at most")


@pytest.mark.slow
def test_the_likeliest_answer_is_that_of_the_highest_mean_log_likelihood(pipe):
    model, tokenizer = pipe.model, pipe._question_tokenizer
    memories = [pipe.compress(document) for document in DOCUMENTS]

    def by_hand(question):
        prompt, likelihoods = torch.tensor([question_ids(model.config, tokenizer, question)]), {}
        for memory in memories:
            written = model.generate(prompt, memory=memory, do_sample=False, **LENGTH)
            logits = model(written, memory=memory).logits[0, prompt.shape[1] - 1 : -1]
            new = written[0, prompt.shape[1] :]
            likelihoods[tokenizer.decode(new, skip_special_tokens=True).strip()] = (
                logits.log_softmax(-1)[range(len(new)), new].mean().item()
            )
        return {"answer": max(likelihoods, key=likelihoods.get)}

    expected = [by_hand(question) for question in QUESTIONS]
    assert pipe(QUESTIONS, context=DOCUMENTS, join="likeliest") == expected
    assert pipe(QUESTIONS[0], memory=memories, join="likeliest", batch_size=1) == expected[0]
    assert pipe(QUESTIONS[0], context=DOCUMENTS, join="likeliest", num_beams=2)["answer"]
    pads = torch.full((1, 2), pipe._pad_token_id)
    logits = (torch.zeros(1, model.config.vocab_size),) * 2
    (answer,) = pipe._with_likelihoods(ModelOutput(sequences=pads, logits=logits))
    assert answer[1] == -math.inf


@pytest.mark.slow
def test_the_full_text_is_read_by_the_decoder_without_a_memory(pipe):
    model, tokenizer = pipe.model, pipe.tokenizer

    def by_hand(question, *documents):
        config, task = model.config, model.config.task_token_ids.get("[LM]")
        prompt = characters(tokenizer, config.question_prompt.replace("{question}", question))
        words = [
            [*([tokenizer.bos_token_id] * (task is not None)), *characters(tokenizer, text)] for text in documents
        ]
        start = [tokenizer.bos_token_id] if task is None else []
        row = [*start, *chain(*words), *([] if task is None else [task]), *prompt]
        output = model.generate(torch.tensor([row]), do_sample=False, **LENGTH)
        return {"answer": tokenizer.decode(output[0, len(row) :], skip_special_tokens=True).strip()}

    asked = {"full_text": True, "context": DOCUMENTS[:2]}
    assert pipe(QUESTIONS, **asked) == [[by_hand(question, text) for question in QUESTIONS] for text in DOCUMENTS[:2]]
    assert pipe(QUESTIONS[0], **asked, join=True) == by_hand(QUESTIONS[0], *DOCUMENTS[:2])
    assert pipe(QUESTIONS[0], context="abcdef", full_text=True, max_tokens=4) == by_hand(QUESTIONS[0], "abc")


def test_the_checkpoints_own_prompt_and_heading_are_taken(form_case, tiny_tokenizer):
    own = {"prompts": {"question_answering": "Q {question} A"}, "context_prefix": "# Text\n"}
    model = form_case.build(**own)
    add_task_tokens(tiny_tokenizer, tuple(model.config.task_token_ids))
    pipe = model.question_answering(tiny_tokenizer, **LENGTH)
    asked = {"prompt": "Q {question} A", "prefix": "# Text\n"}
    assert pipe(QUESTIONS[1], context=DOCUMENTS[0]) == answer_by_hand(pipe, QUESTIONS[1], DOCUMENTS[0], **asked)
    asked["prompt"] = "{question}!"
    found = pipe(QUESTIONS[1], context=DOCUMENTS[0], prompt="{question}!")
    assert found == answer_by_hand(pipe, QUESTIONS[1], DOCUMENTS[0], **asked)


@before_any_method
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "either `context`, `memory` or `store`"),
        ({"question": [], "context": "a"}, ValueError, "`question` is an empty list"),
        ({"question": None, "context": "a"}, ValueError, "either `question` or `messages`"),
        ({"context": "\udc00a"}, ValueError, r"`context` holds '\\udc00' at character 0"),
        ({"context": "a", "prompt": "Q:"}, ValueError, r"`prompt` must hold \{question\} exactly once, got 'Q:'"),
        ({"context": "a", "join": "no"}, ValueError, "`join` must be True, False or 'likeliest', got 'no'"),
        ({"context": "a", "full_text": True, "ratio": 2}, ValueError, "`full_text` compresses nothing: leave out"),
    ],
)
def test_what_cannot_be_asked_is_refused(pipe, arguments, error, message):
    with pytest.raises(error, match=message):
        pipe(**{"question": "Who?", **arguments})


def test_a_memory_is_asked_at_its_own_ratio_and_by_its_model(pipe):
    memory = pipe.compress(DOCUMENTS, ratio=torch.tensor([2, 2, 2]))
    assert pipe("Who?", memory=memory, ratio=2) == pipe("Who?", memory=memory)
    with pytest.raises(ValueError, match=r"`ratio` must be \[2, 2, 2\], the memory's own, got 4"):
        pipe("Who?", memory=memory, ratio=4)
    memory.model_id = "other:0"
    with pytest.raises(ValueError, match="other:0"):
        pipe("Who?", memory=memory)


def test_generation_settings_pass_through_and_stay_as_they_are(pipe):
    asked, short = {"question": QUESTIONS, "context": DOCUMENTS[0]}, {"max_new_tokens": 2, "min_new_tokens": 2}
    own = GenerationConfig(max_new_tokens=9, num_beams=2)
    beams = pipe(**asked, num_beams=2)
    assert pipe(**asked, generation_config=GenerationConfig(num_beams=2, **LENGTH)) == beams
    assert pipe(**asked, generation_config=own, **short) == pipe(**asked, num_beams=2, **short)
    assert (own.max_new_tokens, own.do_sample) == (9, None)
    greedy = pipe(**asked)
    for full, cut in zip(greedy, pipe(**asked, **short), strict=True):
        assert full["answer"].startswith(cut["answer"])
    pipe.model.generation_config.repetition_penalty = 1.5
    assert pipe(**asked) == greedy
    pipe.model.generation_config.repetition_penalty = None
