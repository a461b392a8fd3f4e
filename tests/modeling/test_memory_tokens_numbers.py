# SPDX-License-Identifier: Apache-2.0
"""Memory tokens: how many there are, where they stand, how they start, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_bases import AE, BOS, LM, ids_of

from context_compressors.configuration.configuration_compression_tokens import CompressionTokensConfig
from context_compressors.configuration.configuration_five_hundred_x import FiveHundredXConfig
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.modeling.parts.position_layout import encoder_memory_ids, encoder_position_ids

LAYOUTS = ["default", "uniform", "enhanced"]


@pytest.fixture
def icae(method_cases):
    return method_cases["icae"]


# --- numbers and positions of memory tokens ---


@given(
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=5),
    layout=st.sampled_from(LAYOUTS),
)
def test_memory_ids_of_many_chunks_equal_those_of_each(chunks, layout):
    lengths, counts, starts = (torch.tensor(column) for column in zip(*chunks, strict=True))
    counts = counts * (lengths > 0)
    found = encoder_memory_ids(lengths, counts, starts, layout, int(counts.max()))
    assert found.shape == (len(chunks), int(counts.max()))
    for row, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
        count = int(counts[row])
        expected = encoder_position_ids(length, count, layout, start)[1]
        assert found[row].tolist() == [*expected.tolist(), *[0] * (found.shape[1] - count)]


def test_the_papers_sizes():
    """EPL, section 4: 510 context tokens, 102 memory tokens."""
    for config in (ICAEConfig(), FiveHundredXConfig()):
        assert (config.chunk_size, config.num_memory_tokens, config.compression_ratios) == (510, 102, (5,))
        assert config.encoder_lora["target_modules"] == ["q_proj", "v_proj"]
        assert (config.encoder_lora["rank"], config.encoder_lora["alpha"]) == (128, 256.0)
        assert config.decoder_lora is None


def test_more_memory_tokens_than_there_are_is_an_error(icae, method_cases):
    ways_out = "take a higher ratio, or shorter contexts or chunks"
    with pytest.raises(ValueError, match=f"12 memory tokens, the checkpoint has 6: {ways_out}"):
        icae.build(chunk_size=12).compress(ids_of(12), ratio=1, allow_untrained_ratio=True)
    # A higher one than the lowest, where the context is longer than the checkpoint is made for.
    with pytest.raises(ValueError, match=f"17 memory tokens, the checkpoint has 16: {ways_out}"):
        method_cases["tcp_autoencoder"].model.compress(ids_of(33), ratio=2)


def test_task_tokens_stand_behind_the_vocabulary_by_default(tiny_base_config):
    base = tiny_base_config()
    assert ICAEConfig(decoder_config=base).task_token_ids == {"[AE]": AE, "[LM]": LM}
    assert ICAEConfig(decoder_config=base, task_token_ids={}).task_token_ids == {}
    config = FiveHundredXConfig(decoder_config=base, reconstruction_trigger="bos")
    assert config.task_token_ids == {"[LM]": AE}
    assert config.reconstruction_token_id == BOS
    assert CompressionTokensConfig(decoder_config=base).task_token_ids == {}


def test_memory_and_task_tokens_start_from_two_scalars_of_the_whole_table(tiny_base_config):
    """A table whose dimensions differ widely, as real ones do, gives start values that don't."""
    model = ICAEForCausalLM(ICAEConfig(decoder_config=tiny_base_config()))
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table.copy_(torch.randn_like(table) * torch.linspace(0.01, 5, 32) + torch.linspace(-3, 4, 32))
    for parameter in (model.model.memory_embeddings, model.model.task_embeddings):
        torch.manual_seed(3)
        expected = table.mean().item() + table.std().item() * torch.randn(parameter.shape)
        torch.manual_seed(3)
        model._init_like_embeddings(parameter, model.model.language_model)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-5)
    model.model.memory_embeddings._is_hf_initialized = False
    torch.manual_seed(4)
    model.model._init_weights(model.model)
    memory = model.model.memory_embeddings
    torch.testing.assert_close(memory.mean(dim=0), table.mean().expand(32), rtol=0, atol=4.5 * table.std().item() / 10)
    torch.testing.assert_close(memory.std(dim=0), table.std().expand(32), rtol=0.35, atol=0)


# --- what goes wrong ---


def test_scores_of_earlier_tokens_leave_task_tokens_out(icae):
    """Their ids lie outside the vocabulary, where a repetition penalty would look them up."""
    model = icae.model
    memory = model.compress(ids_of(9))
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    for num_beams in (1, 2):
        text = torch.tensor([[AE, 9]])
        generated = model.generate(text, memory=memory, repetition_penalty=1.5, num_beams=num_beams, **settings)
        assert generated[0, :2].tolist() == [AE, 9]
    plain = model.generate(torch.tensor([[9, 9]]), memory=memory, repetition_penalty=1e9, **settings)
    assert 9 not in plain[0, 2:].tolist()
