# SPDX-License-Identifier: Apache-2.0
"""DeCAL in generation, with questions and saved; refused inputs."""

import pytest
import torch
from decal_models import EOS, GREEDY, START, build, raises
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
)

from context_compressors import DeCALConfig, DeCALForConditionalGeneration, DeCALModel
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


# --- errors ---


def test_mistakes_are_named(decal, question, random_rows):
    ids = torch.stack(random_rows([13, 13]))
    memory, other = decal.compress(ids), build(seed=1).compress(question)
    for fields, *parts in (
        ({"compression": "tokens"}, "`compression`", "'latents'", "'none'", "'tokens'"),
        ({"encoder_attention": "causal"}, "`latent_placement='appended'`", "'prepended'"),
        ({"encoder_lora": {"rank": 2}}, "`encoder_lora` must be left out", "rank"),
    ):
        with raises(*parts):
            DeCALConfig(**fields)
    for call in (decal, decal.generate):
        for given, *parts in (
            ({"memory": memory, "context_input_ids": ids}, "`context_input_ids` or `memory`, not both"),
            ({"memory": memory, "ratio": 3}, "`ratio` belongs to `context_input_ids`"),
            ({"memory": other}, other.model_id, decal.model_id),
        ):
            with raises(*parts):
                call(input_ids=question, **given)
    with raises("give a context"):
        decal(labels=question)
    with raises("`decoder_input_ids` or `labels`"):
        decal(input_ids=ids)
