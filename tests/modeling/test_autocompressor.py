# SPDX-License-Identifier: Apache-2.0
"""AutoCompressor beside a loop over segments, and its numbers."""

import pytest
import torch

from context_compressors import AutoCompressorConfig, AutoCompressorForCausalLM


def naive_slots(model, ids, ratio):
    """Segment by segment, each row alone: [slots so far, segment, summary tokens] through the language model."""
    backbone, config = model.model, model.config
    table, slots = model.get_input_embeddings(), []
    for segment in ids[0].split(config.chunk_size):
        count = config.chunk_slots(len(segment), ratio)
        kept = slots if config.accumulate_summaries else slots[-1:]
        row = torch.cat([*kept, table(segment), backbone.memory_embeddings[:count]])
        with backbone._adapter(backbone.language_model, "encoder"):
            states = backbone.language_model(inputs_embeds=row[None]).last_hidden_state[0]
        slots.append(states[-count:])
    return torch.cat(slots if config.accumulate_summaries else slots[-1:])


@pytest.mark.parametrize("variant", ["segments", "fixed", "latest_summaries", "two_adapters"])
def test_slots_are_those_of_a_loop_over_segments(variant, autocompressor, random_rows, pad_rows):
    """Values and gradients of padded rows with different ratios, one without tokens."""
    case = autocompressor.on(variant=variant)
    model = case.build(chunk_size=5) if variant == "two_adapters" else case.build()
    rows, ratios = random_rows([13, 4, 0, 10]), [2, 3, 2, 8]
    for side in ("left", "right"):
        model.train()
        model.zero_grad()
        found = model.compress(*pad_rows(rows, side), ratio=torch.tensor(ratios))
        expected = [
            naive_slots(model, row[None], ratio) if len(row) else None for row, ratio in zip(rows, ratios, strict=True)
        ]
        for row, slots in enumerate(expected):
            count = 0 if slots is None else len(slots)
            assert found.num_slots[row] == count == model.config.num_slots(len(rows[row]), ratios[row])
            if count:
                torch.testing.assert_close(found.embeddings[row, :count], slots, atol=2e-4, rtol=0)
        weights = torch.randn_like(found.embeddings)
        (found.embeddings * weights).sum().backward()
        moved = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        sum(
            (slots * weights[row, : len(slots)]).sum() for row, slots in enumerate(expected) if slots is not None
        ).backward()
        for name, gradient in moved.items():
            naive = model.get_parameter(name).grad
            torch.testing.assert_close(gradient, naive, atol=2e-3 * float(naive.abs().max()) + 1e-6, rtol=0, msg=name)
        assert any("memory_embeddings" in name for name in moved)


def test_the_papers_numbers():
    config = AutoCompressorConfig()
    assert (config.num_memory_tokens, config.shared_adapter, config.decoder_adapter) == (50, True, None)
    assert [config.num_slots(n, 31) for n in (0, 30, 1_536, 6_144, 12_288)] == [0, 50, 50, 200, 400]
    latest = AutoCompressorConfig(accumulate_summaries=False)
    assert [latest.num_slots(n, 31) for n in (0, 30, 6_144, 12_288)] == [0, 50, 50, 50]
    # The row of segment k has 50 (k - 1) + 1,536 + 50 places, and the last segment may be shorter.
    for positions, longest in ((4_096, 51 * 1_536 + 1_496), (1_636, 2 * 1_536 + 1_486)):
        fits = AutoCompressorConfig(decoder_config={"model_type": "llama", "max_position_embeddings": positions})
        assert fits.max_context_tokens(31) == longest
    base = {"model_type": "llama", "max_position_embeddings": 1_636}
    assert AutoCompressorConfig(decoder_config=base, accumulate_summaries=False).max_context_tokens(31) is None


def test_summary_tokens_start_as_the_embedding_of_eos(tiny_base_config):
    base = tiny_base_config(eos_token_id=[7, 2])
    model = AutoCompressorForCausalLM(AutoCompressorConfig(decoder_config=base))
    tokens, table = model.model.memory_embeddings, model.get_input_embeddings().weight
    assert tokens.shape == (50, 32)
    assert tokens.equal(table[7].expand(50, 32))
    with pytest.raises(ValueError, match="eos_token_id None"):
        AutoCompressorForCausalLM(AutoCompressorConfig(decoder_config=tiny_base_config(eos_token_id=None)))
