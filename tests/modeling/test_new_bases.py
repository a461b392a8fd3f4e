# SPDX-License-Identifier: Apache-2.0
"""All methods on bases of 2026: hybrid attention (Qwen3.5, Qwen3-Next), Gemma 3 and SmolLM3."""

import pytest
import torch
from tiny_bases import NEW_BASES, ids_of
from tiny_models import METHODS, TRAINING_FREE, Case
from transformers import Qwen2MoeConfig

from context_compressors import MeanPoolingConfig, MeanPoolingModel
from context_compressors.modeling.compressor.read_slots import ReadSlots

CASES = [Case(method, architecture=base) for base in NEW_BASES for method in (*METHODS, *TRAINING_FREE)]
# They move keys, and Gemma 3 turns keys by two tables, SmolLM3 those of some layers by none.
RENUMBERED = ("activation_beacon", "streaming_llm")
# One method is not slow.
PARAMS = [pytest.param(c, marks=[] if c.method is METHODS[0] else pytest.mark.slow, id=str(c)) for c in CASES]


@pytest.mark.parametrize("of_base", PARAMS)
@torch.no_grad()
def test_a_method_reads_a_new_base_or_refuses_it_by_its_layers(of_base, pad_rows):
    if of_base.architecture.startswith("qwen3_") and of_base.method.config_class.carrier == "key_values":
        with pytest.raises(ValueError, match=r"layers of the kind 'linear_attention' have no keys and values"):
            of_base.build()
        return
    if of_base.method.name in RENUMBERED and not of_base.architecture.startswith("qwen3_"):
        with pytest.raises(ValueError, match=r"the rotary embedding of a base of type .* does not tell how"):
            of_base.build().compress(ids_of(11), ratio=2)
        return
    model, rows = of_base.build(), [ids_of(11), ids_of(6, seed=1)]
    together, text = model.compress(*pad_rows([row[0] for row in rows]), ratio=2), ids_of(4, seed=2)
    logits = model(text.expand(2, -1), memory=together).logits
    for row, own in enumerate(rows):
        alone = model.compress(own, ratio=2)
        expected = model(text, memory=alone).logits[0]
        torch.testing.assert_close(logits[row], expected, atol=1e-3, rtol=1e-3)
        # The context is read.
        assert not torch.allclose(expected, model(text).logits[0], atol=1e-2)
        settings = {"memory": alone, "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        assert model.generate(text, **settings).equal(model.generate(text, use_cache=False, **settings))


def test_linear_attention_reads_ratios_questions_and_static_caches():
    model = next(c for c in CASES if (c.method.name, c.architecture) == ("icae", "qwen3_5")).build(
        position_layout="enhanced"
    )
    both, text = model.compress(ids_of(12), ratio=[2, 3]), ids_of(4, seed=2)
    for ratio, memory in zip((2, 3), both, strict=True):
        torch.testing.assert_close(memory.embeddings, model.compress(ids_of(12), ratio=ratio).embeddings)
    assert ReadSlots(model).read(both[0], [[1, 2], [3]])[0] is both[0]
    settings = {"memory": both[0], "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    assert model.generate(text, **settings).equal(model.generate(text, cache_implementation="static", **settings))


def test_adapters_sit_on_the_linear_maps_beside_experts():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    base = Qwen2MoeConfig(vocab_size=32, shared_expert_intermediate_size=8, **sizes, **experts)
    names = [name for name, _ in MeanPoolingModel(MeanPoolingConfig(decoder_config=base)).named_parameters()]
    adapted = {name.partition(".lora_A.")[0] for name in names if ".lora_A." in name}
    assert {"language_model.layers.0.mlp.shared_expert.up_proj", "language_model.layers.0.self_attn.q_proj"} <= adapted
    assert not any(".experts." in path for path in adapted)
