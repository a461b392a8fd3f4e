# SPDX-License-Identifier: Apache-2.0
"""Operations against numbers worked out by hand, and against what torch counts in real modules."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5Model,
)

from context_compressors import cli, modeling  # noqa: F401  (importing the models registers them)
from context_compressors.configuration.layer_shape import stack_flops
from context_compressors.configuration.methods import METHODS, methods_on
from context_compressors.evaluation.flops import (
    compression_flops,
    flops_table,
    full_context_flops,
    generation_flops,
    method_config,
    named_config,
)
from context_compressors.modeling.parts.base_pass import CACHE

T5_SIZES = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 2}
T5_SIZES["num_heads"] = 4


def llama(**fields) -> LlamaConfig:
    """A tiny language model whose attention is plain matrix products, which torch counts."""
    fields = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, **fields}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **fields)
    config._attn_implementation = "eager"
    return config


def counted(function) -> int:
    """Return the operations that torch counts: matrix products, without the softmax."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


# --- section 4.3 and equation 11 ---


def test_generation_by_hand():
    config = named_config("llama-2-7b")
    slots = (814, 407, 3253)
    cached = [generation_flops(config, s, 50, 100) for s in slots]
    assert cached == [12912463042560, 7337395849216, 49968169906176]
    compression = [stack_flops(config, 3253, 8) + stack_flops(config, s, 1) for s in (814, 407)]
    assert compression == [12263280771456, 12090389502752]
    assert stack_flops(config, 3253) == 47691747288064
    assert full_context_flops(config, 3253, 50, 100) == cached[2]
    speed_ups = [cached[2] / (compression[i] + cached[i]) for i in range(2)]
    assert speed_ups == pytest.approx([1.984774, 2.571995], abs=1e-6)


@pytest.mark.parametrize("slots_are_key_values", [False, True])
def test_cached_generation_is_what_torch_counts(slots_are_key_values: bool):
    config = llama()
    model = LlamaModel(config).eval()

    def prefill(length: int, cache: DynamicCache) -> None:
        model(torch.full((1, length), 3), **{CACHE: cache})

    def generate(cache: DynamicCache, first: int) -> None:
        for length in (first, 1, 1, 1, 1):
            prefill(length, cache)

    cache = DynamicCache()
    if slots_are_key_values:
        with torch.no_grad():
            prefill(30, cache)
    total = counted(lambda: generate(cache, 7 if slots_are_key_values else 37))
    flops = generation_flops(config, 30, 7, 5, slots_are_key_values=slots_are_key_values)
    assert total == pytest.approx(flops, rel=0.02)


def test_a_t5_decoder_attends_to_slots_that_it_projects_once():
    config = T5Config(**T5_SIZES, feed_forward_proj="gated-gelu")
    config._attn_implementation = "eager"
    model, states = T5Model(config).eval(), torch.randn(1, 50, 64)

    def generate() -> None:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for length in (8, 1, 1, 1):
            model.decoder(torch.full((1, length), 3), encoder_hidden_states=states, **{CACHE: cache})

    assert counted(generate) == pytest.approx(generation_flops(config, 50, 7, 4), rel=0.02)
    reading = counted(lambda: model.encoder(torch.full((1, 50), 3)))
    assert reading == pytest.approx(stack_flops(config, 50), rel=0.02)
    both = stack_flops(config, 50) + generation_flops(config, 50, 7, 4)
    assert full_context_flops(config, 50, 7, 4) == both


# --- by method ---

BERT = BertConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, vocab_size=64)
# Whole windows of ComprExIT, one segment and one chunk: nothing is padded, nothing is read behind a cache.
SETTINGS = [
    *((method, {}) for method in methods_on(llama())),
    ("icae", {"chunk_size": 100, "embedding_residual": True}),
    ("mean_pooling", {"embedding_residual": True}),
    ("mean_pooling", {"linear_after_pooling": False, "normed_mlp_size": 512}),
    ("mean_pooling", {"encoder_config": {"hidden_size": 48, "intermediate_size": 96}}),
    ("compression_tokens", {"token_attention": "bidirectional", "linear_after_encoder": False}),
    ("icae", {"chunk_size": 100, "memory_tokens": "fixed"}),
    ("autocompressor", {"chunk_size": 100}),
    ("activation_beacon", {"window_size": 64, "num_sinks": 1}),
    ("activation_beacon", {"window_size": 64, "beacon_maps": ["value", "output"]}),
    ("comprexit", {"literal_equations": True}),
    ("comprexit", {"slot_aggregation": "window_attention"}),
    ("comprexit", {"token_anchors": "last_layer", "uniform_sender_share": 1.0}),
    ("comprexit", {"token_anchors": 1, "slot_aggregation": "mean"}),
    ("gmsa", {"encoder_layers": 3, "lsa_layers": 0}),
    ("gmsa", {"encoder_layers": 1, "lsa_layers": 2, "encoder_config": {"hidden_size": 48, "intermediate_size": 96}}),
    ("xrag", {"encoder_config": BERT, "passage_start_ids": (1, 3), "passage_end_ids": (2,)}),
]


@pytest.mark.parametrize(("method", "fields"), SETTINGS, ids=lambda value: value if isinstance(value, str) else "")
def test_compression_is_what_torch_counts(method: str, fields: dict):
    own = {name: llama(**value) for name, value in fields.items() if name == "encoder_config" and type(value) is dict}
    fields = fields | own
    config = method_config(method, llama(), [4, 8], encoder_lora=None, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.full((1, 256), 3)
    # Chunks stand in one batch, so that a short last one costs as much as a full one.
    length = 300 if fields.get("chunk_size") else 256
    for ratio in (4, 8):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            memory = model.compress(ids, ratio=ratio)
        assert config.num_slots(256, ratio) == int(memory.num_slots), ratio
        expected = compression_flops(config, length, ratio)
        assert counter.get_total_flops() == pytest.approx(expected, rel=0.05), ratio


def test_every_method_has_a_count():
    bases = (llama(), named_config("t5-v1.1-large"))
    assert sorted(name for base in bases for name in methods_on(base)) == sorted(METHODS)
    assert methods_on(bases[1]) == ("decal",)
    for base in bases:
        for method in methods_on(base):
            assert method_config(method, base, (4,)).compression_flops(100, 4) > 0


# --- shapes and the table ---


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.slow
def test_the_table_counts_every_method_beside_the_full_context(tmp_path):
    rows = cells_of(flops_table("llama-2-7b"))
    assert rows[0][:7] == ["full context", "", "", "", "49,968", "49,968", "1.00"]
    methods = [name for name in METHODS if name != "decal"]
    assert [row[:2] for row in rows[1:]] == [[method, ratio] for method in methods for ratio in ("4", "8")]
    # Mean pooling reads the whole context with all layers: it pays when the memory is used again.
    compression = (32 * 1490367102752 + 2 * 814 * 4096**2) / 1e9
    expected = [f"{compression:,.0f}", "12,912", f"{compression + 12912.463:,.0f}", "0.82", "3.87"]
    assert rows[1][2:] == ["814", *expected]
    gmsa = [row for row in rows if row[0] == "gmsa"]
    assert [row[2:] for row in gmsa] == [
        ["814", "12,263", "12,912", "25,176", "1.98", "3.87"],
        ["407", "12,090", "7,337", "19,428", "2.57", "6.81"],
    ]
    # A compressor as it is configured.
    AutoConfig.for_model("icae_compressor", decoder_config=llama(), compression_ratios=[5]).save_pretrained(tmp_path)
    assert [row[:2] for row in cells_of(flops_table(str(tmp_path)))[1:]] == [["icae", "5"]]
    for method, message in (("gmas", "did you mean 'gmsa'"), ("decal", "does not go with a base of type 'llama'")):
        with pytest.raises(ValueError, match=message):
            flops_table("llama-2-7b", [method])
