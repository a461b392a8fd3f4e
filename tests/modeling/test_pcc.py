# SPDX-License-Identifier: Apache-2.0
"""PCC with a GPT-2 compressor beside a naive twin, the decoder's input, and counts."""

import pytest
import torch
from tiny_bases import AE, BOS, base_config, ids_of
from torch.nn import functional
from transformers import AutoModel, GPT2Config, LlamaForCausalLM

from context_compressors import PCCConfig, PCCForCausalLM
from context_compressors.data.task_tokens import text_starts
from context_compressors.modeling.parts.text_ids import restored_ids, start_ids
from context_compressors.training.objectives.compression_collator import CompressionCollator

SEGMENT = 6
GPT2 = GPT2Config(vocab_size=90, n_embd=48, n_layer=2, n_head=4, n_positions=16, initializer_range=0.3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a decoder, and of a GPT-2 of another width and vocabulary."""
    folder = tmp_path_factory.mktemp("pcc")
    torch.manual_seed(0)
    LlamaForCausalLM(base_config()).save_pretrained(folder / "decoder")
    AutoModel.from_config(GPT2).save_pretrained(folder / "encoder")
    return folder / "decoder", folder / "encoder"


@pytest.fixture
def lite(folders):
    """PCC-Lite, with nothing at a start value that could hide a mistake."""
    fields = {"compression_ratios": (2, 3), "chunk_size": SEGMENT, "memory_tokens": "fixed", "train_encoder": True}
    model = PCCForCausalLM.from_base(folders[0], encoder=folders[1], **fields)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (*model.model.converter.parameters(), model.model.task_embeddings):
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def naive_slots(model, encoder, context, ratio):
    """<mem> slots </mem> of each segment, one segment after the other, with the encoder as `transformers` has it."""
    norm, first, _, last = model.model.converter
    before, after = model.model.marker_embeddings
    places = []
    for start in range(0, context.shape[1], SEGMENT):
        tokens = model.model.memory_embeddings[: SEGMENT // ratio]
        inputs = torch.cat([encoder.wte(context[0, start : start + SEGMENT]), tokens])
        states = encoder(inputs_embeds=inputs[None]).last_hidden_state[0, -len(tokens) :]
        scaled = norm.weight * states / (states.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt()
        places += [before[None], last(functional.gelu(first(scaled))), after[None]]
    return torch.cat(places)


def test_slots_and_their_markers_equal_a_naive_twins_values_and_gradients(lite):
    context = ids_of(2 * SEGMENT + 1, most=GPT2.vocab_size)
    encoder = AutoModel.from_config(GPT2).eval()
    encoder.load_state_dict(lite.model.encoder_model.state_dict())
    lite.train()
    lite.model.encoder_model.eval()
    for ratio in (2, 3):
        found, expected = lite.compress(context, ratio=ratio).embeddings[0], naive_slots(lite, encoder, context, ratio)
        # Each of the three segments, the last of one token, too.
        assert len(found) == 3 * (SEGMENT // ratio + 2)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        names = [name for name, _ in encoder.named_parameters()]
        parts = [*lite.model.converter.parameters(), lite.model.memory_embeddings, lite.model.marker_embeddings]
        mine = [lite.model.encoder_model.get_parameter(name) for name in names]
        one = torch.autograd.grad(found.pow(2).sum(), [*parts, *mine])
        other = torch.autograd.grad(expected.pow(2).sum(), [*parts, *encoder.parameters()])
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


def test_the_decoder_reads_bos_then_segments_then_ae_or_text(lite, tiny_tokenizer):
    config, decoder = lite.config, lite.model.language_model
    assert config.task_token_ids == {"[AE]": AE}
    assert start_ids(config, tiny_tokenizer, [], "reconstruction") == [BOS, AE]
    assert start_ids(config, tiny_tokenizer, []) == [BOS]
    assert restored_ids(config, tiny_tokenizer) == []
    collator = CompressionCollator.from_tokenizer(tiny_tokenizer, **text_starts(config, tiny_tokenizer))
    example = {"context_ids": [5, 6], "prompt_ids": [], "target_ids": [7, 8], "task": "reconstruction"}
    batch = collator([example, {**example, "task": "continuation"}])
    assert batch["input_ids"].tolist() == [[BOS, AE, 7, 8], [BOS, 7, 8, tiny_tokenizer.pad_token_id]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 8], [-100, 7, 8, -100]]
    memory = lite.compress(ids_of(SEGMENT + 2, most=GPT2.vocab_size), ratio=2)
    table = decoder.get_input_embeddings()
    for text in ([BOS, AE, 7, 8], [BOS, 7, 8]):
        ids = torch.tensor([text])
        ae = lite.model.task_embeddings if AE in text else torch.zeros(0, config.hidden_size)
        behind = table(torch.tensor([token for token in text[1:] if token != AE]))
        row = torch.cat([table(ids[0, :1]), memory.embeddings[0], ae, behind])
        expected = decoder(inputs_embeds=row[None]).last_hidden_state[:, -len(text) + 1 :]
        found = lite.model(ids, memory=memory).last_hidden_state[:, 1:]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_counts_of_600_tokens_at_every_ratio_of_the_paper():
    by_ratio, fixed = (
        PCCConfig(compression_ratios=(4, 16, 128), memory_tokens=kind) for kind in ("by_ratio", "fixed")
    )
    assert fixed.num_memory_tokens == 64
    assert [fixed.num_slots(256, ratio) - 2 for ratio in (4, 16, 128)] == [64, 16, 2]
    assert fixed.num_slots(600, 4) == 192 + 6
    assert by_ratio.num_slots(600, 4) == 64 + 64 + 22 + 6
    assert fixed.chunk_flops(64, 4) > by_ratio.chunk_flops(64, 4)
