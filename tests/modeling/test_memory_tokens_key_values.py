# SPDX-License-Identifier: Apache-2.0
"""Key/values as a memory, beside a plain cache."""

from functools import partial

import pytest
import torch
from tiny_bases import LM, ids_of
from tiny_models import METHODS, Case
from transformers import (
    CohereConfig,
    DynamicCache,
    Exaone4Config,
    HunYuanDenseV1Config,
    NanoChatConfig,
    OPTConfig,
    SmolLM3Config,
    StableLmConfig,
)

from context_compressors import (
    CompressedContext,
    RankedKeyValuesConfig,
    RankedKeyValuesForCausalLM,
    SnapKVConfig,
    SnapKVForCausalLM,
)
from context_compressors.modeling.parts.base_pass import CACHE


# VoCo's text stands elsewhere, and is read with its adapter: test_voco.py. Heads that keep unlike numbers of pairs:
# test_kv_zip.py.
@pytest.mark.only(
    lambda case: (
        case.method.config_class.carrier == "key_values" and case.method.name != "voco" and not case.method.ranks
    )
)
@torch.no_grad()
def test_text_behind_keys_and_values_equals_a_plain_cache(backbone_case):
    is_whole = backbone_case.method.windows
    for layout in ("default",) if is_whole else ("default", "uniform", "enhanced"):
        model = backbone_case.build(
            **{"task_token_ids": {"[LM]": LM}} if is_whole else {"position_layout": layout, "chunk_size": 6}
        )
        memory, text = model.compress(ids_of(15), ratio=2), torch.tensor([[LM, 9, 44, 17]])
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(memory.key_values):
            cache.update(keys, values, layer)
        slots = int(memory.num_slots)
        first = 15 if layout == "enhanced" else slots
        with model.base_language_model():
            by_hand = model.model.language_model(
                inputs_embeds=model.model._embed_text(text),
                position_ids=torch.arange(first, first + 4)[None],
                attention_mask=torch.ones(1, slots + 4).long(),
                **{CACHE: cache},
            ).last_hidden_state
        states = model.model(text, memory=memory).last_hidden_state
        assert states.allclose(by_hand, atol=1e-5, rtol=0), layout
        without_cache = model.model(text, memory=memory, use_cache=False)
        assert CACHE not in without_cache
        assert without_cache.last_hidden_state.allclose(by_hand, atol=1e-5, rtol=0), layout


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
@pytest.mark.parametrize("name", ["five_hundred_x", "ranked_key_values"])
def test_slots_and_text_beyond_a_sliding_window_are_refused(name, architecture):
    method = next(method for method in METHODS if method.name == name)
    model = Case(method, architecture=architecture, attention="eager").build(decoder_config={"sliding_window": 10})
    memory = model.compress(ids_of(12), ratio=2)
    model(ids_of(4, seed=1), memory=memory)
    with pytest.raises(ValueError, match=r"6 slots and 5 text tokens.*window of 10 tokens"):
        model(ids_of(5, seed=1), memory=memory)
    with pytest.raises(ValueError, match=r"6 slots and 5 text tokens.*window of 10 tokens"):
        model.generate(ids_of(3, seed=1), memory=memory, max_new_tokens=4, min_new_tokens=4, do_sample=False)


def on_base(case, base, position_layout):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = base(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, pad_token_id=0, **heads)
    fields = {**case.fields, "decoder_config": config, "position_layout": position_layout}
    return case.method.causal_lm_class(case.method.config_class(**fields)).eval()


@pytest.mark.parametrize(
    ("base", "moves"),
    [
        (lambda **fields: SmolLM3Config(**fields, no_rope_layers=[1, 0]), False),
        (lambda **fields: SmolLM3Config(**fields, no_rope_layers=[1, 1]), True),
        (lambda **fields: Exaone4Config(**fields, layer_types=["sliding_attention", "full_attention"]), False),
        # The first turns a half the other way, the second norms keys behind the rotation.
        (NanoChatConfig, False),
        (lambda **fields: HunYuanDenseV1Config(**fields, head_dim=8), False),
        # A quarter of each head, and neighbouring channels.
        (StableLmConfig, False),
        (CohereConfig, False),
    ],
    ids=["smollm3", "smollm3_all", "exaone4", "nanochat", "hunyuan", "stablelm", "cohere"],
)
def test_keys_are_moved_where_the_base_turns_them_as_llama_does(five_hundred_x, base, moves, tmp_path):
    model, text = on_base(five_hundred_x, base, "enhanced"), ids_of(4, seed=1)
    memory = model.compress(ids_of(9), ratio=2)
    assert (memory.inverse_frequencies is not None) == moves
    memory.save(tmp_path / "memory.safetensors")
    loaded = CompressedContext.load(tmp_path / "memory.safetensors", model_id=model.model_id)
    assert model(text, memory=loaded).logits.equal(model(text, memory=memory).logits)
    if not moves:
        with pytest.raises(ValueError, match="needs inverse_frequencies in each memory"):
            CompressedContext.concatenate([memory, memory])
        snap_kv = SnapKVConfig(decoder_config=model.config.decoder_config, position_layout="default")
        with pytest.raises(ValueError, match="does not tell how: take 'enhanced'"):
            SnapKVForCausalLM(snap_kv).eval().compress(ids_of(9), ratio=2)


def test_a_base_whose_layers_are_elsewhere_is_refused_by_its_name(five_hundred_x):
    opt = partial(OPTConfig, ffn_dim=48, word_embed_proj_dim=32)
    with pytest.raises(ValueError, match="has no `layers`"):
        on_base(five_hundred_x, opt, "enhanced")
    base = opt(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match=r"type 'opt' cannot read pairs of their own: it has no `layers`"):
        RankedKeyValuesForCausalLM(RankedKeyValuesConfig(decoder_config=base))
