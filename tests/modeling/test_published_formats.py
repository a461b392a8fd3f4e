# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints in the form of each other code base, and a plain reading of their authors' equations."""

import json
import re

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_bases import base_config, ids_of
from tiny_tokenizer import train_tokenizer
from torch.nn.functional import gelu, layer_norm, linear, normalize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from context_compressors import cli
from context_compressors.modeling.checkpoint.published_formats import FORMATS, convert

WIDTH, NUM_SLOTS = 32, 4


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(vocab_size=120, num_texts=5)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    """A tiny Llama with random weights, and its tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(base_config(attn_implementation="eager")).save_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<|begin|>{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def drawn(*shape):
    return torch.randn(shape) * 0.3


def lora(prefix, rank=4, maps=("q_proj", "v_proj")):
    """LoRA of two layers, by PEFT's names."""
    tensors = {}
    for layer in range(2):
        for name in maps:
            place, width = f"{prefix}layers.{layer}.self_attn.{name}", WIDTH if name == "q_proj" else WIDTH // 2
            tensors[f"{place}.lora_A.default.weight"] = drawn(rank, WIDTH)
            tensors[f"{place}.lora_B.default.weight"] = drawn(width, rank)
    return tensors


def adapted(base, tensors, prefix, scale):
    """The base with an adapter in its weights: W + scale B A."""
    model = LlamaForCausalLM.from_pretrained(base)
    state = dict(model.model.named_parameters())
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            state[f"{name.removeprefix(prefix).partition('.lora_A')[0]}.weight"].data += scale * b @ a
    return model.model


def states(model, ids, tokens, in_front=False):
    """States and cache of a text and of vectors behind it or in front of it."""
    parts = [model.embed_tokens(ids), tokens[None]]
    return model(inputs_embeds=torch.cat(parts[::-1] if in_front else parts, dim=1), use_cache=True)


def write(folder, tensors, config=None, file="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    if config is not None:
        name = "model_config.json" if "encoder_window_size" in config else "config.json"
        (folder / name).write_text(json.dumps(config))
    return folder


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def of_base(base, prefix="lm."):
    return {prefix + name: tensor for name, tensor in LlamaForCausalLM.from_pretrained(base).state_dict().items()}


def comprexit(base, folder, tokenizer):
    hidden, gate, states_ = WIDTH, 8, 3
    parts = {
        "query_fusion_weights": drawn(states_),
        "layer_fusion_layer_embeddings": drawn(states_, gate),
        **{f"layer_fusion_{name}_prj.weight": drawn(gate, hidden) for name in "qk"},
        **{f"layer_fusion_{name}_prj.bias": drawn(gate) for name in "qk"},
        "layer_fusion_v_prj.weight": drawn(hidden, hidden),
        "layer_fusion_v_prj.bias": drawn(hidden),
        **{f"{name}.weight": 1 + drawn(hidden) for name in ("metric_ln", "value_ln", "source_mass.ln")},
        **{f"{name}.bias": drawn(hidden) for name in ("metric_ln", "value_ln", "source_mass.ln")},
        "metric_prj.weight": drawn(6, hidden),
        "metric_prj.bias": drawn(6),
        "value_prj.weight": drawn(hidden, hidden),
        "value_prj.bias": drawn(hidden),
        "source_mass.mass_prj.weight": drawn(1, hidden),
        "source_mass.mass_prj.bias": drawn(1),
    }
    mlp = {f"projector.mlp.{i}.{n}": drawn(*([hidden] * d)) for i in (0, 2) for n, d in (("weight", 2), ("bias", 1))}
    config = {"architectures": ["HierarchicalCompressor"], "model_type": "hierarchical_compressor"}
    config |= {"pooling_method": "ot-dy-src", "top_k_layers": -1, "compression_ratio": 4, "ot_n_iter": 30}
    config |= {"layerwise_pooling_gate_hidden": gate, "layerwise_pooling_temperature": 0.7, "ot_window_size": 8}
    config |= {"ot_metric_dim": 6, "backbone_config_dict": base_config().to_dict()}
    tensors = {f"pooling_layer.{name}": tensor for name, tensor in parts.items()} | mlp | of_base(base)
    write(folder, tensors, config)
    tokenizer.save_pretrained(folder)

    def slots(ids):
        def mapped(name, x):
            return linear(x, parts[f"{name}.weight"], parts[f"{name}.bias"])

        def normed(name, x):
            return layer_norm(x, (hidden,), parts[f"{name}.weight"], parts[f"{name}.bias"])

        found = LlamaForCausalLM.from_pretrained(base).model(ids, output_hidden_states=True).hidden_states
        layers = torch.stack(found, dim=2)[0]  # (tokens, layers, hidden)
        query = mapped("layer_fusion_q_prj", parts["query_fusion_weights"].softmax(0) @ layers)
        keys = mapped("layer_fusion_k_prj", layers) + parts["layer_fusion_layer_embeddings"]
        weights = ((keys @ query[:, :, None])[..., 0] / gate**0.5 / 0.7).softmax(-1)
        fused = (weights[:, None] @ mapped("layer_fusion_v_prj", layers))[:, 0]
        rows = []
        for window in fused.split(8):
            anchors = torch.stack([block.mean(0) for block in window.split(4)])
            senders, receivers = (
                normalize(mapped("metric_prj", normed("metric_ln", x)), dim=-1) for x in (window, anchors)
            )
            mass = mapped("source_mass.mass_prj", normed("source_mass.ln", window))[:, 0].softmax(0)
            mass, share = 0.95 * mass + 0.05 / len(window), 1 / len(anchors)
            kernel = ((senders @ receivers.T - 1) / 0.1).exp()
            right = torch.ones(len(anchors))
            for _ in range(30):
                left = mass / (kernel @ right)
                right = share / (kernel.T @ left)
            plan = left[:, None] * kernel * right
            rows.append(plan.T @ mapped("value_prj", normed("value_ln", window)) / share)
        pooled = torch.cat(rows)
        inner = gelu(linear(pooled, mlp["projector.mlp.0.weight"], mlp["projector.mlp.0.bias"]))
        return linear(inner, mlp["projector.mlp.2.weight"], mlp["projector.mlp.2.bias"])

    return folder, slots, {}


def comprexit_icae(base, folder, tokenizer):
    prefix = "compressor.base_model.model.backbone."
    tensors = {"memory_embeddings": drawn(1, NUM_SLOTS, WIDTH), "ae_embedding": drawn(1, 1, WIDTH), **lora(prefix)}
    config = {"architectures": ["ICAE"], "model_type": "icae", "context_length": 16, "lora_alpha": 8}
    config["backbone_config_dict"] = base_config().to_dict()
    frozen = {f"{prefix}layers.0.self_attn.q_proj.base_layer.weight": drawn(WIDTH, WIDTH)}
    write(folder, tensors | frozen | of_base(base), config)
    tokenizer.save_pretrained(folder)

    def slots(ids):
        found = states(adapted(base, tensors, prefix, 8 / 4), ids, tensors["memory_embeddings"][0])
        return found.last_hidden_state[0, -NUM_SLOTS:]

    return folder, slots, {}


def icae(base, folder, tokenizer):
    prefix = "icae.base_model.model.model."
    tensors = {"memory_token_embed.weight": drawn(NUM_SLOTS + 3, WIDTH), **lora(prefix)}
    write(folder, tensors, file="mistral_7b_ft_icae.safetensors")

    def slots(ids):
        found = states(adapted(base, tensors, prefix, 32 / 4), ids, tensors["memory_token_embed.weight"][:NUM_SLOTS])
        return found.last_hidden_state[0, -NUM_SLOTS:]

    return folder / "mistral_7b_ft_icae.safetensors", slots, {"base": str(base)}


def five_hundred_x(base, folder, tokenizer):
    prefix = "llama.base_model.model.model."
    tensors = {"memory_embeddings": drawn(1, NUM_SLOTS, WIDTH), **lora(prefix)}
    write(folder, tensors, file="lora_qa.pt")

    def slots(ids):
        found = states(adapted(base, tensors, prefix, 32 / 4), ids, tensors["memory_embeddings"][0])
        return torch.cat(
            [t[0, :, -NUM_SLOTS:].flatten() for c in found.past_key_values.layers for t in (c.keys, c.values)]
        )

    return folder / "lora_qa.pt", slots, {"base": str(base)}


def autocompressor(base, folder, tokenizer):
    tokens = drawn(NUM_SLOTS, WIDTH)
    config = {**base_config().to_dict(), "summary_length": NUM_SLOTS, "accumulate_summary": True}
    config["architectures"] = ["LlamaAutoCompressorModel"]
    write(folder, {"embed_summary.weight": tokens, **of_base(base, "")}, config, "pytorch_model.bin")
    tokenizer.save_pretrained(folder)

    def slots(ids):
        return states(LlamaForCausalLM.from_pretrained(base).model, ids, tokens).last_hidden_state[0, -NUM_SLOTS:]

    return folder, slots, {}


def lclm(base, folder, tokenizer):
    adapter = {"norm.weight": 1 + drawn(WIDTH), "fc1.weight": drawn(WIDTH, WIDTH), "fc1.bias": drawn(WIDTH)}
    adapter |= {"fc2.weight": drawn(WIDTH, WIDTH), "fc2.bias": drawn(WIDTH)}
    write(folder / "adapter", adapter, file="adapter.safetensors")
    config = {"compression_ratio": 4, "encoder_window_size": 8, "pooling": "mean", "encoder_mask_type": "causal"}
    (folder / "model_config.json").write_text(json.dumps({**config, "boundary_overlap": 0, "adapter_type": "mlp"}))
    encoder = LlamaForCausalLM(base_config(attn_implementation="eager")).model
    for name, model in (("decoder", LlamaForCausalLM.from_pretrained(base)), ("encoder", encoder)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    def slots(ids):
        windows = [encoder.eval()(window).last_hidden_state[0] for window in ids.split(8, dim=1)]
        pooled = torch.cat([torch.stack([block.mean(0) for block in window.split(4)]) for window in windows])
        normed = pooled * (pooled.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * adapter["norm.weight"]
        inner = gelu(linear(normed, adapter["fc1.weight"], adapter["fc1.bias"]))
        return linear(inner, adapter["fc2.weight"], adapter["fc2.bias"])

    return folder, slots, {}


def naver_tables(base, rows, prefix=""):
    names = [f"{prefix}{name}.weight" for name in ("model.embed_tokens", "lm_head")]
    return {name: torch.cat([tensor, rows]) for name, tensor in of_base(base, prefix).items() if name in names}


def naver_slots(encoder, ids, tokenizer, rows, memory_tokens):
    """<ENC>, text, EOS and memory tokens, whose last states stand in front of <SEP>; `rows` end with both."""
    table = encoder.embed_tokens.weight
    embeddings = torch.cat([rows[[-2]], table[ids[0]], table[[tokenizer.eos_token_id]], memory_tokens])
    found = encoder(inputs_embeds=embeddings[None]).last_hidden_state[0, -len(memory_tokens) :]
    return torch.cat([found, rows[[-1]]])


def cocom(base, folder, tokenizer):
    prefix, rows = "decoder.base_model.model.", drawn(1 + 3, WIDTH)
    adapter = lora(f"{prefix}model.")
    config = {"compr_model_name": None, "compr_rate": 4, "lora": True, "lora_r": 4, "sep": True}
    config |= {"model_type": "COCOM", "decoder_model_name": str(base), "training_form": "both"}
    maps = re.compile(r"([qv]_proj)\.weight")
    tensors = of_base(base, prefix) | naver_tables(base, rows, prefix)
    write(folder, {maps.sub(r"\1.base_layer.weight", name): t for name, t in tensors.items()} | adapter, config)

    def slots(ids):
        memory_tokens = rows[:1].expand(-(-ids.shape[1] // 4), -1)
        return naver_slots(adapted(base, adapter, f"{prefix}model.", 2), ids, tokenizer, rows, memory_tokens)

    return folder, slots, {}


def pisco(base, folder, tokenizer):
    rows, adapters = drawn(NUM_SLOTS + 3, WIDTH), {name: lora("model.") for name in ("encoder", "decoder")}
    named = {f"{side}_adapter": {n.replace(".default", ""): t for n, t in a.items()} for side, a in adapters.items()}
    config = {"compr_model_name": None, "compr_rate": 4, "lora": True, "lora_r": 4, "sep": True, "doc_max_length": 16}
    config |= {"decoder_model_name": "gone", "training_form": "both_separately", "different_mem_tokens": True}
    write(folder, named, config, "adapters.pth")
    write(folder, naver_tables(base, rows), file="decoder_first_last_layers.pth")
    write(folder, {"weights": drawn(2)})

    def slots(ids):
        encoder = adapted(base, adapters["encoder"], "model.", 2)
        return naver_slots(encoder, ids, tokenizer, rows, rows[:NUM_SLOTS])

    return folder, slots, {"base": str(base)}


FORMS = [comprexit, comprexit_icae, icae, five_hundred_x, autocompressor, lclm, cocom, pisco]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@torch.no_grad()
def test_a_published_checkpoint_makes_the_memory_of_its_authors_equations(form, base, tokenizer, tmp_path):
    torch.manual_seed(1)
    place, slots, options = form(base, tmp_path / "published", tokenizer)
    (place if place.is_dir() else base).joinpath("README.md").write_text("---\nlicense: mit\n---\n")
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert cli.main(["convert", str(place), str(tmp_path / "out"), *words]) == 0
    model, ids = load(tmp_path / "out"), ids_of(14, most=100)
    expected = slots(ids)
    memory = model.compress(ids)
    if memory.key_values is None:
        found = memory.embeddings[0]
    else:
        found = torch.cat([tensor[0].flatten() for pair in memory.key_values for tensor in pair])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    output = model.generate(ids_of(3, seed=1, most=100), memory=memory, max_new_tokens=2)
    assert output.shape[1] == 5
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a").input_ids
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == (FORMATS.get(form.__name__, FORMATS["icae"]).license or "mit")


@pytest.mark.slow
def test_unknown_and_missing_tensors_are_refused_by_name(base, tokenizer, tmp_path):
    place, _, options = icae(base, tmp_path / "published", tokenizer)
    prefix = "icae.base_model.model.model."
    tensors = {"memory_token_embed.weight": drawn(NUM_SLOTS + 3, WIDTH), **lora(prefix)}
    lacking = {name: tensor for name, tensor in tensors.items() if "layers.1.self_attn.v_proj.lora_B" not in name}
    for changed, message in (
        (tensors | {"surplus.weight": drawn(2)}, "1 unknown tensors, the first is 'surplus.weight'"),
        (lacking, r"lacks 'model\..*layers.1.*lora_B"),
        ({"weight": drawn(2)}, "in none of the known formats, comprexit, "),
    ):
        write(place.parent, changed, file=place.name)
        with pytest.raises(ValueError, match=message):
            convert(str(place), tmp_path / "out", **options)


@pytest.mark.slow
@pytest.mark.parametrize("form", [cocom, pisco], ids=lambda form: form.__name__)
@torch.no_grad()
def test_a_converted_decoder_reads_with_the_authors_adapter_on_the_authors_base(form, base, tokenizer, tmp_path):
    place, _, options = form(base, tmp_path / "published", tokenizer)
    convert(str(place), tmp_path / "out", **options)
    model, text = load(tmp_path / "out"), ids_of(5, seed=1, most=100)
    memory = model.compress(ids_of(14, most=100))
    if form is cocom:
        tensors, prefix = load_file(place / "model.safetensors"), "decoder.base_model.model.model."
    else:
        tensors, prefix = torch.load(place / "adapters.pth")["decoder_adapter"], "model."
    expected = states(adapted(base, tensors, prefix, 2), text, memory.embeddings[0], in_front=True)
    read = model.model(text, memory=memory).last_hidden_state
    torch.testing.assert_close(read, expected.last_hidden_state[:, -5:], atol=1e-4, rtol=1e-4)
    LlamaForCausalLM(base_config()).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="must have the base's values"):
        convert(str(place), tmp_path / "refused", base=str(tmp_path / "other"))
    config = (place / "config.json").read_text()
    (place / "config.json").write_text(config.replace('"compr_model_name": null', '"compr_model_name": "bert"'))
    with pytest.raises(ValueError, match="compr_model_name of the checkpoint must be None, got 'bert'"):
        convert(str(place), tmp_path / "refused", **options)
