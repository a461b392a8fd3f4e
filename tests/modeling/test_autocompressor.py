# SPDX-License-Identifier: Apache-2.0
"""AutoCompressor beside a loop over segments, its numbers, and LLoCO's stage."""

import copy

import pytest
import torch
from tiny_bases import ids_of
from tiny_models import MEMORY_LORA, SMALL_LORA
from transformers import LlamaConfig, OPTConfig

from context_compressors import AutoCompressorConfig, AutoCompressorForCausalLM, ICAEForCausalLM
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.training.loading import changed_config

# Shapes of the papers' bases: hidden size, layers, heads, key/value heads, feed-forward size.
SHAPES = {
    "1B": (2048, 16, 32, 8, 8192),
    "135M": (576, 30, 9, 3, 1536),
    "Llama-2-7B": (4096, 32, 32, 32, 11008),
}


@pytest.fixture
def autocompressor(method_cases):
    return method_cases["autocompressor"]


def of_shape(name, **fields):
    hidden, layers, heads, key_value_heads, feed_forward = SHAPES[name]
    base = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=feed_forward,
        vocab_size=100,
    )
    with torch.device("meta"):
        return AutoCompressorForCausalLM(AutoCompressorConfig(decoder_config=base, **fields))


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
    """Values and gradients, in a batch with pads and a row without tokens, of rows with different ratios."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "compressor", "reader"),
    [("1B", 3_510_272, 1_703_936), ("135M", 1_872_000, 921_600), ("Llama-2-7B", 16_982_016, 8_388_608)],
)
def test_what_trains_has_the_papers_sizes(shape, compressor, reader):
    for stage, expected in (("compressor", compressor), ("reader", reader)):
        parameters = of_shape(shape, training_stage=stage).named_parameters()
        trained = {name: p.numel() for name, p in parameters if p.requires_grad}
        assert sum(trained.values()) == expected, stage
        of_the_stage = ".decoder." if stage == "reader" else ".shared."
        assert all(of_the_stage in name or "memory_embeddings" in name for name in trained), stage


def test_one_segment_is_icae_with_the_same_weights(autocompressor):
    model = autocompressor.build(shared_adapter=False)
    fields = {"chunk_size": 64, "compression_ratios": (2, 3, 8), "encoder_lora": SMALL_LORA, "task_token_ids": {}}
    icae = ICAEForCausalLM(ICAEConfig(decoder_config=model.config.decoder_config, **fields))
    icae.load_state_dict(model.state_dict())
    icae.eval()
    ids, text = ids_of(15), ids_of(4, seed=1)
    for ratio in (2, 8):
        torch.testing.assert_close(
            model.compress(ids, ratio=ratio).embeddings, icae.compress(ids, ratio=ratio).embeddings, atol=1e-5, rtol=0
        )
    read = {"input_ids": text, "context_input_ids": ids}
    torch.testing.assert_close(model(**read).logits, icae(**read).logits, atol=1e-4, rtol=0)


def test_a_segment_is_read_behind_those_before_it_alone(method_cases):
    """What ICAE's chunks do not: the first segment changes the second one's slots, and not the reverse."""
    ids = ids_of(12)
    for name, first_moves_second in (("autocompressor", True), ("icae", False)):
        model = method_cases[name].build(chunk_size=6)
        before = model.compress(ids, ratio=2).embeddings
        for place, moved in ((0, [True, first_moves_second]), (11, [False, True])):
            changed = ids.clone()
            changed[0, place] = 4
            after = model.compress(changed, ratio=2).embeddings
            spans = (slice(3), slice(3, 6))
            assert [not after[0, span].allclose(before[0, span], atol=1e-5) for span in spans] == moved, (name, place)


def test_summary_tokens_start_as_the_embedding_of_eos(tiny_base_config):
    base = tiny_base_config(eos_token_id=[7, 2])
    model = AutoCompressorForCausalLM(AutoCompressorConfig(decoder_config=base))
    tokens, table = model.model.memory_embeddings, model.get_input_embeddings().weight
    assert tokens.shape == (50, 32)
    assert tokens.equal(table[7].expand(50, 32))
    with pytest.raises(ValueError, match="eos_token_id None"):
        AutoCompressorForCausalLM(AutoCompressorConfig(decoder_config=tiny_base_config(eos_token_id=None)))


def test_configurations_say_what_is_allowed(tiny_base_config):
    for fields, named in (
        ({"accumulate_summaries": "all"}, "`accumulate_summaries`"),
        ({"training_stage": "keft"}, "`training_stage`"),
        ({"position_layout": "enhanced"}, "`position_layout` must be 'default'"),
        ({"slot_markers": {"after": 1}}, "`slot_markers`"),
        ({"decoder_lora": {"rank": 2}}, "`shared_adapter`"),
        ({"training_stage": "reader", "decoder_lora": None}, "`training_stage='reader'` trains a `decoder_lora`"),
    ):
        with pytest.raises(ValueError, match=named):
            AutoCompressorConfig(**fields)
    wide = tiny_base_config(hidden_size=48, num_attention_heads=4)
    with pytest.raises(ValueError, match="no map between widths"):
        AutoCompressorForCausalLM(AutoCompressorConfig(decoder_config=tiny_base_config(), encoder_config=wide))


# --- LLoCO ---


@pytest.mark.slow
@pytest.mark.parametrize("has_equal_settings", [False, True])
def test_the_reader_starts_from_a_compressor_and_reads_its_memories(has_equal_settings, autocompressor, tmp_path):
    """Its adapter is new, whatever the shared one's settings, starts without effect, and names no memory."""
    compressor = autocompressor.on(variant="fixed").build()
    compressor.save_pretrained(tmp_path / "compressor")
    memory = compressor.compress(ids_of(15))
    memory.save(tmp_path / "memory.safetensors")
    lora = compressor.config.encoder_lora if has_equal_settings else MEMORY_LORA
    changes = {"training_stage": "reader", "decoder_lora": lora}
    config = changed_config(AutoCompressorConfig.from_pretrained(tmp_path / "compressor"), changes)
    torch.manual_seed(1)
    reader = AutoCompressorForCausalLM.from_pretrained(tmp_path / "compressor", config=copy.deepcopy(config))
    trained = {name for name, parameter in reader.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".decoder." in name for name in trained)
    weights = compressor.state_dict()
    assert all(tensor.equal(weights[name]) for name, tensor in reader.state_dict().items() if name not in trained)
    assert all(reader.get_parameter(name).any() == ("lora_A" in name) for name in trained)
    assert reader.model_id == compressor.model_id
    text = ids_of(4, seed=1)
    torch.testing.assert_close(reader(text, memory=memory).logits, compressor(text, memory=memory).logits)
    with torch.no_grad():
        for name in trained:
            reader.get_parameter(name).add_(0.1)
    assert reader.model_id == compressor.model_id
    assert not reader(text, memory=memory).logits.allclose(compressor(text, memory=memory).logits, atol=1e-3)
    assert reader.compress(ids_of(15)).embeddings.equal(memory.embeddings)
    reader.save_pretrained(tmp_path / "reader")
    loaded = AutoCompressorForCausalLM.from_pretrained(tmp_path / "reader")
    stored = type(memory).load(tmp_path / "memory.safetensors", model_id=loaded.model_id)
    assert loaded(text, memory=stored).logits.equal(reader(text, memory=memory).logits)
    with torch.no_grad():
        loaded.model.memory_embeddings.add_(0.1)
    with pytest.raises(ValueError, match="not by this one"):
        loaded(text, memory=stored)
    # A checkpoint that lacks an adapter which its own configuration names is broken.
    reader.config.save_pretrained(tmp_path / "compressor")
    with pytest.raises(ValueError, match="lacks"):
        AutoCompressorForCausalLM.from_pretrained(tmp_path / "compressor")


def test_a_merged_reader_trains_nothing_that_makes_memories(autocompressor, tmp_path):
    reader = autocompressor.on(variant="reader").build()
    reader.merge_adapters()
    reader.save_pretrained(tmp_path)
    for model in (reader, AutoCompressorForCausalLM.from_pretrained(tmp_path)):
        assert model.config.has_frozen_memories
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_reader_on_opt_keeps_the_base_whose_weights_stand_in_a_decoder_too(local_hub, tmp_path):
    """OPT ties its head to `decoder.embed_tokens`; its weights have `.decoder.` in their names as the adapter has."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    local_hub("me/opt", OPTConfig(vocab_size=128, num_attention_heads=4, init_std=0.3, dropout=0.5, **sizes))
    compressor = AutoCompressorForCausalLM.from_base("me/opt", chunk_size=8, encoder_lora=SMALL_LORA)
    assert compressor.lm_head.weight is compressor.get_input_embeddings().weight
    compressor.save_pretrained(tmp_path)
    changes = {"training_stage": "reader", "decoder_lora": MEMORY_LORA}
    config = changed_config(AutoCompressorConfig.from_pretrained(tmp_path), changes)
    reader = AutoCompressorForCausalLM.from_pretrained(tmp_path, config=config)
    found = reader.state_dict()
    assert all(tensor.equal(found[name]) for name, tensor in compressor.state_dict().items())
    assert reader.model_id == compressor.model_id
    with torch.no_grad():
        reader.get_input_embeddings().weight[7] += 0.1
    assert reader.model_id != compressor.model_id


def test_memories_of_a_reader_in_training_are_those_of_evaluation(local_hub, tmp_path):
    """OPT has a dropout of its own, which the decoder keeps."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    local_hub("me/opt", OPTConfig(vocab_size=128, num_attention_heads=4, init_std=0.3, dropout=0.5, **sizes))
    reader = AutoCompressorForCausalLM.from_base(
        "me/opt", chunk_size=8, encoder_lora=SMALL_LORA, decoder_lora=MEMORY_LORA, training_stage="reader"
    )
    context, text = ids_of(15), ids_of(4, seed=1)
    expected = reader.eval().compress(context).embeddings
    memory = reader.train().compress(context)
    torch.testing.assert_close(memory.embeddings, expected)
    assert reader.model.language_model.training
    assert not reader(text, memory=memory).logits.equal(reader(text, memory=memory).logits)
