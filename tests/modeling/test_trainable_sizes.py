# SPDX-License-Identifier: Apache-2.0
"""Counts of trainable numbers on the papers' bases."""

import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from context_compressors.configuration.methods import config_class
from context_compressors.modeling import model_class


def llama(hidden_size, intermediate_size, num_layers, num_heads, num_key_value_heads):
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        vocab_size=128,
        tie_word_embeddings=True,
    )


SMOLLM2_135M, LLAMA_3_2_1B = llama(576, 1536, 30, 9, 3), llama(2048, 8192, 16, 32, 8)
LLAMA_2_7B, LLAMA_3_1_8B = llama(4096, 11008, 32, 32, 32), llama(4096, 14336, 32, 32, 8)
QWEN2_7B = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4
)
GPT2_LARGE = GPT2Config(n_embd=1280, n_layer=36, n_head=20)
MISTRAL_7B = MistralConfig(num_hidden_layers=1, vocab_size=64)
MINILM = BertConfig(hidden_size=384, num_hidden_layers=1, num_attention_heads=12, vocab_size=64)
ALL_LINEAR = {"rank": 16, "alpha": 32, "dropout": 0.1, "target_modules": "all-linear"}
ADAPTERS = {"chunk_size": 128, "compression_ratios": (16,), "encoder_lora": ALL_LINEAR, "decoder_lora": ALL_LINEAR}
COCOM = {**ADAPTERS, "linear_after_encoder": False}
PISCO = {**ADAPTERS, "memory_tokens": "fixed", "task_token_ids": {}}
# Of rank 16 on all linear maps of Llama 3.2 1B.
ONE_ADAPTER = 11_272_192
SIZES = {
    # Scorers, and rank 8 on maps of 576 to 576, 192, 192, 576, and between 576 and 1536 three times.
    "ranked key/values": (
        "ranked_key_values",
        SMOLLM2_135M,
        {},
        30 * (576 * 3 + 3) + 30 * 8 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536)),
    ),
    # The authors' maps and the embedding; the last layer's queries never move.
    "beacon": ("activation_beacon", LLAMA_3_2_1B, {}, 100_663_296 - 4_194_304 + 2048),
    "beacon on SmolLM2": ("activation_beacon", SMOLLM2_135M, {}, 16_588_800 - 331_776 + 576),
    "AutoCompressor": ("autocompressor", LLAMA_2_7B, {}, 16_982_016),
    "LLoCO": ("autocompressor", LLAMA_2_7B, {"training_stage": "reader"}, 8_388_608),
    "ComprExIT": ("comprexit", LLAMA_3_2_1B, {}, 5_249_809 + 528_640 + 6_145 + 4_200_448 + 8_392_704),
    "COCOM": ("compression_tokens", LLAMA_3_2_1B, {**COCOM, "shared_adapter": True}, ONE_ADAPTER + 2048),
    "COCOM apart": ("compression_tokens", LLAMA_3_2_1B, COCOM, 2 * ONE_ADAPTER + 2048),
    # Eight memory tokens, and a separator.
    "PISCO": ("icae", LLAMA_3_2_1B, {**PISCO, "slot_markers": {"after": 1}}, 2 * ONE_ADAPTER + 9 * 2048),
    "VoCo": ("voco", LLAMA_3_2_1B, {}, ONE_ADAPTER + 2048),
    "GMSA": ("gmsa", LLAMA_2_7B, {}, 202_383_360 + 8 * 128 * (4 * (4096 + 4096) + 3 * (4096 + 11008))),
    "GMSA, second stage": ("gmsa", LLAMA_2_7B, {"training_stage": "keft"}, 1_610_612_736),
    "GMSA with biases": ("gmsa", QWEN2_7B, {"training_stage": "keft"}, 462_551_040),
    # Converter, compressor, memory tokens, and <mem>, </mem> and [AE].
    "PCC lite": (
        "pcc",
        LLAMA_3_1_8B,
        {"encoder_config": GPT2_LARGE, "train_encoder": True},
        22_029_568 + 774_030_080 + 64 * 1280 + 3 * 4096,
    ),
    # The perceptron alone.
    "xRAG": ("xrag", MISTRAL_7B, {"encoder_config": MISTRAL_7B}, 33_562_624),
    "xRAG of MiniLM": ("xrag", SMOLLM2_135M, {"encoder_config": MINILM}, 554_112),
    "PCC large": ("pcc", LLAMA_3_1_8B, {}, 33_566_720 + 167_772_160 + 64 * 4096 + 3 * 4096),
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "base", "fields", "expected"), SIZES.values(), ids=SIZES)
def test_what_trains_has_the_papers_size(method, base, fields, expected):
    with torch.device("meta"):
        model = model_class(method, "AutoModel")(config_class(method)(decoder_config=base, **fields))
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == expected
