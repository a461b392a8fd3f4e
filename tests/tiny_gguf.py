# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama as a GGUF file, written as llama.cpp writes it."""

from pathlib import Path

import gguf
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

CHAT_TEMPLATE = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
MERGES = [("1", "2"), ("12", "3"), ("'", "l"), ("'l", "l"), ("l", "l"), ("Ġ", "1"), ("i", "t"), ("Ġ", "it")]
SPECIAL = ["<|none|>", "<|start|>", "<|end|>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), *("".join(pair) for pair in MERGES)]
CONFIG = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}
_Q4_1 = gguf.GGMLQuantizationType.Q4_1


def original() -> LlamaForCausalLM:
    """The model that the file was made of."""
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).float().eval()


def dequantised() -> dict[str, Tensor]:
    """The weights that the file stands for, by their names in transformers."""
    return {
        name: tensor
        if tensor.dim() < 2
        else torch.from_numpy(dequantize(quantize(tensor.numpy(), _Q4_1), _Q4_1).copy())
        for name, tensor in original().state_dict().items()
    }


def write(path: Path, pre_tokenizer: str = "smollm") -> None:
    """Write the file; its vocabulary splits texts by the rule of that name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("A Title")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in original().state_dict().items():
        if name == "lm_head.weight":
            continue
        for theirs, own in _NAMES.items():
            name = name.replace(theirs, own)
        heads = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}
        for part, count in heads.items():
            if part in name:
                # Rotary halves stand beside each other there.
                tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        if tensor.dim() < 2:
            writer.add_tensor(name, tensor.numpy())
        else:
            writer.add_tensor(name, quantize(tensor.contiguous().numpy(), _Q4_1), raw_dtype=_Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
