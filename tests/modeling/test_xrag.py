# SPDX-License-Identifier: Apache-2.0
"""xRAG beside a naive twin, a sentence encoder with its own tokenizer, counts and sizes."""

import pytest
import torch
from tiny_bases import base_config, ids_of
from torch.nn import functional
from transformers import AutoModel, BertConfig, BertTokenizer, LlamaForCausalLM

from context_compressors import XRAGConfig, XRAGForCausalLM

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
CLS, SEP = 2, 3
TEXT = torch.tensor([[1, 9, 40, 7]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a decoder, and of a sentence encoder, a BERT of another width with its tokenizer."""
    folder = tmp_path_factory.mktemp("xrag")
    torch.manual_seed(0)
    LlamaForCausalLM(base_config()).save_pretrained(folder / "decoder")
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    bert = BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, initializer_range=0.3, **shape)
    AutoModel.from_config(bert).save_pretrained(folder / "encoder")
    BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}).save_pretrained(folder / "encoder")
    return folder / "decoder", folder / "encoder"


@pytest.mark.slow
def test_slots_equal_a_naive_twins_values_and_gradients(folders):
    context, ratios = ids_of(11, most=len(WORDS)), (4, 3, 11)
    retriever = AutoModel.from_pretrained(folders[1]).eval()
    for readout in ("last_token", "first_token", "mean"):
        for is_normal in (False, True):
            fields = {"passage_readout": readout, "normalize_embeddings": is_normal, "compression_ratios": ratios}
            model = XRAGForCausalLM.from_base(folders[0], encoder=folders[1], **fields).train()
            first, _, last = model.model.slot_mlp
            for ratio in ratios:
                found = model.compress(context, ratio=ratio).embeddings[0]
                expected = []
                for start in range(0, 11, ratio):
                    # As `tokenizer(passage)` gives it.
                    ids = torch.tensor([[CLS, *context[0, start : start + ratio].tolist(), SEP]])
                    states = retriever(ids).last_hidden_state[0].detach()
                    embedding = {"last_token": states[-1], "first_token": states[0], "mean": states.mean(dim=0)}[
                        readout
                    ]
                    embedding = embedding / embedding.norm() if is_normal else embedding
                    expected.append(last(functional.gelu(first(embedding))))
                torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-4)
                weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
                torch.testing.assert_close(
                    torch.autograd.grad(found.pow(2).sum(), weights),
                    torch.autograd.grad(torch.stack(expected).pow(2).sum(), weights),
                    atol=1e-4,
                    rtol=1e-3,
                )


def test_a_context_has_a_slot_for_each_180_tokens_begun(folders):
    config = XRAGConfig()
    counts = {0: 0, 1: 1, 179: 1, 180: 1, 181: 2, 540: 3, 100_000: 556}
    assert {length: config.num_slots(length, 180) for length in counts} == counts
    assert (config.compression_ratios, config.max_context_tokens(180)) == ((180,), None)
    # Passages are read apart.
    model, context = XRAGForCausalLM.from_base(folders[0], encoder=folders[1], compression_ratios=[7]), ids_of(21)
    other = context.clone() % len(WORDS)
    other[0, 15] = CLS
    slots = [model.compress(ids % len(WORDS)).embeddings[0] for ids in (context, other)]
    assert [not a.equal(b) for a, b in zip(*slots, strict=True)] == [False, False, True]


@pytest.mark.slow
@torch.no_grad()
def test_what_the_encoders_tokenizer_puts_around_a_text_stands_around_each_passage(folders, tmp_path, caplog):
    model = XRAGForCausalLM.from_base(folders[0], encoder=folders[1], compression_ratios=[7])
    assert "bert" not in caplog.text
    assert (model.config.passage_start_ids, model.config.passage_end_ids) == ([CLS], [SEP])
    document = "the otter sleeps at noon. " * 3
    context = model.encoder_tokenizer(document, return_tensors="pt")
    assert not {CLS, SEP} & set(context.input_ids[0].tolist())
    assert "longer than the specified maximum" not in caplog.text
    memory = model.compress(**context)
    assert int(memory.num_slots) == -(-context.input_ids.shape[1] // 7)
    # Contexts are in the encoder's tokens, texts in the decoder's.
    with pytest.raises(ValueError, match=f"100.*{len(WORDS)} tokens"):
        model.compress(torch.tensor([[100]]))
    assert model(torch.tensor([[100]]), memory=memory).logits.shape == (1, 1, 128)
    answer = model.generate(TEXT, memory=memory, max_new_tokens=3, do_sample=False)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "light", include_base=False)
    copies = {"base_model": folders[0], "encoder_base_model": folders[1]}
    for name, places in (("whole", {}), ("light", copies)):
        loaded = XRAGForCausalLM.from_pretrained(tmp_path / name, **places)
        assert loaded.encoder_tokenizer(document).input_ids == context.input_ids[0].tolist(), name
        assert loaded.compress(**context).embeddings.equal(memory.embeddings), name
        assert loaded.generate(TEXT, memory=memory, max_new_tokens=3, do_sample=False).equal(answer), name
    own = XRAGForCausalLM.from_base(folders[0], encoder=folders[1], compression_ratios=[7], passage_end_ids=[SEP, SEP])
    assert (own.config.passage_start_ids, own.config.passage_end_ids) == ([], [SEP, SEP])
