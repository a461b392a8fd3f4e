# SPDX-License-Identifier: Apache-2.0
"""PCC alone: a GPT-2 compressor beside a naive twin, what the decoder reads, counts, sizes, and what trains."""

import pytest
import torch
from tiny_bases import AE, BOS, base_config, ids_of
from torch.nn import functional
from transformers import AutoModel, GPT2Config, LlamaConfig, LlamaForCausalLM

from context_compressors import PCCConfig, PCCForCausalLM, PCCModel
from context_compressors.data.task_tokens import text_starts
from context_compressors.modeling.parts.prompting import restored_ids, start_ids
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
        for gradient, wanted in zip(one, other, strict=True):
            torch.testing.assert_close(gradient, wanted, atol=2e-3, rtol=2e-3)


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


@pytest.mark.slow
def test_trainable_sizes_of_lite_and_large():
    llama = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    llama = LlamaConfig(**llama, num_attention_heads=32, num_key_value_heads=8)
    gpt2_large = GPT2Config(n_embd=1280, n_layer=36, n_head=20)
    operations = []
    for config, converter, width, compressor in (
        (
            PCCConfig(decoder_config=llama, encoder_config=gpt2_large, train_encoder=True),
            22_029_568,
            1280,
            774_030_080,
        ),
        (PCCConfig(decoder_config=llama), 33_566_720, 4096, 167_772_160),
    ):
        with torch.device("meta"):
            model = PCCModel(config)
        sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        assert sum(size for name, size in sizes.items() if name.startswith("converter.")) == converter
        inside = sum(size for name, size in sizes.items() if "lora_" in name or name.startswith("encoder_model."))
        assert inside == compressor
        # Memory tokens, and <mem>, </mem> and [AE].
        assert sum(sizes.values()) == converter + compressor + 64 * width + 3 * 4096
        operations.append(config.compression_flops(256, 4))
    assert 9 < operations[1] / operations[0] < 11, "by their sizes, but for the embeddings"


def test_every_weight_of_the_compressor_moves_and_the_decoder_is_bitwise_the_same(lite):
    before = {name: tensor.clone() for name, tensor in lite.state_dict().items()}
    lite.train()
    optimizer = torch.optim.AdamW([p for p in lite.parameters() if p.requires_grad], lr=1e-2)
    text = torch.cat([torch.tensor([[BOS, AE]]), ids_of(8)], dim=1)
    # All of the encoder's positions, and all of its tokens.
    context = torch.arange(GPT2.vocab_size)[None]
    labels = text.masked_fill(text == AE, -100)
    lite(text, context_input_ids=context, ratio=2, labels=labels).loss.backward()
    optimizer.step()
    moved = {name for name, tensor in lite.state_dict().items() if not tensor.equal(before[name])}
    trains = {name for name, parameter in lite.named_parameters() if parameter.requires_grad}
    assert moved == trains
    assert all(name.startswith("model.") for name in trains)
    assert not any(name.startswith("model.language_model") for name in trains)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"`encoder_lora` must be None with `train_encoder`, got \{'rank': 2"):
        PCCConfig(train_encoder=True, encoder_config=GPT2, encoder_lora={"rank": 2})
    with pytest.raises(ValueError, match="`train_encoder` needs an encoder of its own: the decoder"):
        PCCModel(PCCConfig(train_encoder=True, decoder_config=base_config()))
    with pytest.raises(ValueError, match="`slot_markers` must be left out"):
        PCCConfig(position_layout="enhanced")
