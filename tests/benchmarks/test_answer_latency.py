# SPDX-License-Identifier: Apache-2.0
"""The latency benchmark's settings of GMSA's tables, compiled decoding, and what its roofline rests on."""

import json
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from context_compressors.configuration.layer_shape import LayerShape
from context_compressors.evaluation.flops import compression_flops, generation_flops
from context_compressors.modeling.parts.cache_name import CACHE

CPU = torch.device("cpu")
TOY = ["--hidden-size", "32", "--head-dim", "16", "--layers", "1", "--vocab-size", "64", "--device", "cpu"]


def llama(**fields) -> LlamaConfig:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=1, pad_token_id=1, **fields)


# --- settings ---


def test_a_setting_is_the_papers_on_a_gpu_and_small_on_a_cpu(script):
    parse = script("answer_latency.measure").parse
    gpu, cpu = (parse(["--setting", "table7", "--device", device]) for device in ("cuda", "cpu"))
    for arguments in (gpu, cpu):
        assert (arguments.method, arguments.lengths, arguments.ratios) == ("gmsa", [3253], [4, 8])
        assert (arguments.new_tokens, arguments.static_cache, arguments.merge_adapters) == (100, True, True)
    assert (gpu.shape, gpu.dtype, gpu.batch_sizes) == ("llama-2-7b", "bfloat16", [1, 8, 32])
    assert (cpu.shape, cpu.dtype, cpu.batch_sizes) == (None, "float32", [1])
    long = parse(["--setting", "table8", "--device", "cuda", "--batch-sizes", "2"])
    assert (long.shape, long.lengths, long.batch_sizes) == ("qwen2-7b", [32768], [2])


def test_compiled_decoding_needs_a_static_cache(script, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        script("answer_latency.measure").parse(["--compile"])
    assert "--compile needs --static-cache" in capsys.readouterr().err


def test_a_named_shape_has_room_for_the_context(script):
    parse, shape_config = script("answer_latency.measure").parse, script("common.tools").shape_config
    config = shape_config(parse(["--shape", "llama-2-7b"]), 5000)
    assert (config.num_hidden_layers, config.vocab_size, config.max_position_embeddings) == (32, 32000, 5000)
    overhead = script("compression_overhead.measure").build_parser().parse_args(["--shape", "llama-3.2-1b"])
    config = shape_config(overhead, 4096)
    assert (config.num_key_value_heads, config.intermediate_size) == (8, 8192)
    # What the result file says.
    assert (overhead.hidden_size, overhead.layers, overhead.head_dim, overhead.vocab_size) == (2048, 16, 64, 128256)
    with pytest.raises(ValueError, match=r"t5-v1\.1-large is an encoder-decoder"):
        shape_config(parse(["--shape", "t5-v1.1-large"]), 100)


@pytest.mark.slow
def test_the_papers_setting_runs_small_on_a_cpu(script, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    latency, output = script("answer_latency.measure"), tmp_path / "latency.json"
    sizes = [*TOY, "--layers", "4"]
    arguments = ["--setting", "table7", *sizes, "--lengths", "40", "--new-tokens", "3", "--repeats", "2"]
    arguments += ["--batch-sizes", "1", "2", "--output", str(output)]
    assert latency.main(arguments) == 0
    content = json.loads(output.read_text(encoding="utf-8"))
    assert (content["benchmark"], content["settings"]["setting"]) == ("answer_latency", "table7")
    rows = content["rows"]
    assert [(row["batch_size"], row["ratio"], row["slots"]) for row in rows] == [
        (1, 4, 10),
        (1, 8, 5),
        (2, 4, 10),
        (2, 8, 5),
    ]
    for row in rows:
        assert len(row["samples"]["memory"]) == 2
        # Twice the rows: twice the operations and the cache, and the same weights.
        other = next(one for one in rows if one["batch_size"] == 1 and one["ratio"] == row["ratio"])
        for side in ("full_context", "memory"):
            mine, single = row["roofline"][side]["last_token"], other["roofline"][side]["last_token"]
            assert mine["flops"] == row["batch_size"] * single["flops"]
            assert mine["cache_bytes"] == row["batch_size"] * single["cache_bytes"]
            assert mine["weight_bytes"] == single["weight_bytes"]
            assert mine["least_seconds"] is None
    full, memory, compression = latency.medians(rows[0], "last_token")
    printed = capsys.readouterr().out
    assert "speed-up by FLOPs" in printed
    assert f" {full / (memory + compression):.2f} " in printed


@pytest.mark.slow
def test_layers_of_the_encoder_are_gmsas_alone(script, capsys: pytest.CaptureFixture[str]):
    tools, latency = script("common.tools"), script("answer_latency.measure")
    models = [tools.random_compressor("gmsa", llama(), [4], "float32", CPU, layers) for layers in (None, 3)]
    assert [model.config.encoder_layers for model in models] == [1, 3]
    sizes = [*TOY, "--layers", "4"]
    for method, encoder_layers, message in (
        ("icae", "2", "--encoder-layers is for GMSA and TCP-AE: icae encodes with all layers"),
        ("gmsa", "5", "encoder_layers"),
    ):
        assert latency.main([*sizes, "--method", method, "--encoder-layers", encoder_layers]) == 1
        assert message in capsys.readouterr().err


def test_sizes_that_do_not_fit_are_left_out_and_named(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    latency, output = script("answer_latency.measure"), tmp_path / "latency.json"

    def no_room(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(latency, "measure", no_room)
    assert latency.main([*TOY, "--lengths", "16", "--batch-sizes", "8", "--output", str(output)]) == 0
    assert json.loads(output.read_text())["rows"] == [{"num_tokens": 16, "batch_size": 8, "out_of_memory": True}]
    assert "8 contexts of 16 tokens do not fit into the memory" in capsys.readouterr().err


# --- compiled decoding ---


@pytest.mark.slow
def test_compiled_decoding_writes_the_same_tokens_and_leaves_prompts_alone(script, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    config = llama(initializer_range=0.3)
    model, ids = LlamaForCausalLM(config).eval(), torch.arange(2, 22).view(2, 10)
    lengths = []
    original = torch.compile

    def recording(function, **options):
        compiled = original(function, **options)
        return lambda *args, **kwargs: lengths.append(kwargs["input_ids"].shape[1]) or compiled(*args, **kwargs)

    def generate() -> torch.Tensor:
        cache = StaticCache(config=config, max_cache_len=20)
        return model.generate(ids, **{CACHE: cache}, max_new_tokens=8, min_new_tokens=8, do_sample=False)

    expected = generate()
    monkeypatch.setattr(torch, "compile", recording)
    script("answer_latency.measure").compile_decoding(model.base_model, backend="eager")
    assert torch.equal(generate(), expected)
    assert lengths == [1] * 7


# --- roofline ---


@pytest.mark.parametrize("num_cached", [0, 20])
def test_answers_cost_appendix_g_and_the_cache_that_they_fill(script, num_cached: int):
    config = llama()
    passes = script("answer_latency.roofline").answer_passes(config, 1000, 4, 3, 30, num_cached, 5)
    flops = generation_flops(config, num_cached or 30, 30 if num_cached else 0, 5, slots_are_key_values=num_cached > 0)
    assert sum(one.flops for one in passes) == 3 * flops
    assert {one.weight_bytes for one in passes} == {1000}
    cache, model = DynamicCache(), LlamaForCausalLM(config)
    sizes = []
    with torch.no_grad():
        for length in (*([num_cached] if num_cached else []), 30, 1, 1, 1, 1):
            model(torch.full((3, length), 5), **{CACHE: cache})
            sizes.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
    assert [one.cache_bytes for one in passes] == sizes[-5:]


def test_the_least_time_is_that_of_operations_or_of_bytes_pass_by_pass(script):
    roofline = script("answer_latency.roofline")
    hardware = roofline.Hardware(flops_per_second=100.0, bytes_per_second=10.0)
    passes = [roofline.ForwardPass(1500, 20, 10, future_flops=500), roofline.ForwardPass(10, 20, 5)]
    assert roofline.summary(passes, hardware) == {
        "flops": 1510,
        "weight_bytes": 40,
        "cache_bytes": 15,
        "least_seconds": 10.0 + 2.5,
    }
    assert roofline.summary(passes, None)["least_seconds"] is None
    assert roofline.hardware_of(CPU, torch.bfloat16) is None


def test_a_causal_kernel_leaves_out_the_pairs_with_later_tokens(script):
    shape, config = LayerShape.from_config(llama()), llama()
    # One pair at a time: the two products of a head's width, and the softmax.
    pairs = [(query, key) for query in range(7) for key in range(query + 1, 7)]
    assert shape.future_flops(7) == len(pairs) * (shape.flops(1, 6) - shape.flops(1, 5))
    first, second = script("answer_latency.roofline").answer_passes(
        config, 0, 4, 3, prefill=7, num_cached=5, new_tokens=2
    )
    assert (first.future_flops, second.future_flops) == (3 * 4 * shape.future_flops(7), 0)
    compressor = script("common.tools").random_compressor("gmsa", config, [4], "float32", CPU)
    assert script("answer_latency.roofline").compression_pass(
        compressor, 3, 40, 4
    ).future_flops == 3 * shape.future_flops(40)


def test_hardware_is_known_by_its_name(script, monkeypatch: pytest.MonkeyPatch):
    bandwidths = {"H200": 4.8e12, "H100 80GB HBM3": 3.35e12, "A100-SXM4-80GB": 2.04e12, "H20": 4.0e12}
    others = ("H100 NVL", "H100 PCIe", "GH200 480GB", "A100-SXM4-40GB", "other")
    for name, bandwidth in {**bandwidths, **dict.fromkeys(others)}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: f"NVIDIA {name}")
        found = script("answer_latency.roofline").hardware_of(torch.device("cuda"), torch.bfloat16)
        assert (found and found.bytes_per_second) == bandwidth, name
        assert script("answer_latency.roofline").hardware_of(torch.device("cuda"), torch.float32) is None


def test_compression_reads_the_weights_of_its_encoder_and_of_the_methods_parts(script):
    roofline, random_compressor = script("answer_latency.roofline"), script("common.tools").random_compressor
    sizes = {}
    for method in ("mean_pooling", "gmsa"):
        compressor = random_compressor(method, llama(), [4], "float32", CPU)
        compressor.merge_adapters()
        one = roofline.compression_pass(compressor, 3, 40, 4)
        assert one.flops == 3 * compression_flops(compressor.config, 40, 4)
        sizes[method] = one.weight_bytes // 4
    layer = sum(p.numel() for p in LlamaForCausalLM(llama()).model.layers[0].parameters())
    # All layers, the final norm and the linear map; a quarter of them, the norm and one block of alignment.
    assert sizes == {"mean_pooling": 4 * layer + 32 + 32 * 32, "gmsa": layer + 32 + layer}


def test_a_shared_encoder_counts_once_and_without_its_table(script):
    compressor = script("common.tools").random_compressor("icae", llama(), [4], "float32", CPU)
    weights = script("answer_latency.roofline").compression_pass(compressor, 1, 40, 4).weight_bytes
    assert weights == sum(p.nbytes for p in compressor.model.parameters()) - 64 * 32 * 4


# --- result files ---


def test_break_even_is_the_first_number_of_reads_at_which_compressing_costs_no_more(script):
    break_even = script("answer_latency.measure").break_even
    assert [break_even(compression, 2.0, 1.0) for compression in (3.0, 3.1, 0.1)] == [3, 4, 1]
    assert break_even(1.0, 1.0, 1.0) is break_even(1.0, 1.0, 2.0) is None


@pytest.mark.parametrize("merged", [False, True])
def test_answer_latency_writes_a_row_for_every_length_and_ratio(
    script, merged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    latency, output = script("answer_latency.measure"), tmp_path / "latency.json"
    arguments = [*TOY, "--lengths", "16", "33", "--ratios", "4", "8", "--new-tokens", "3", "--repeats", "2"]
    arguments += ["--output", str(output)] + ["--merge-adapters"] * merged
    assert latency.main(arguments) == 0
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert [(row["num_tokens"], row["ratio"], row["slots"]) for row in rows] == [
        (16, 4, 4),
        (16, 8, 2),
        (33, 4, 9),
        (33, 8, 5),
    ]
    for row in rows:
        assert len(row["samples"]["memory"]) == len(row["samples"]["compression"]) == 2
        first, last = (latency.medians(row, token) for token in ("first_token", "last_token"))
        assert (0 < first[0] < last[0], 0 < first[1] < last[1]) == (True, True)
        assert first[2] == last[2] > 0
    assert "break-even reads" in capsys.readouterr().out
