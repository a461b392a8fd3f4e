# SPDX-License-Identifier: Apache-2.0
"""`export-decoder`: what it writes is the compressor's decoder, for who knows nothing of compressors."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors import (
    DeCALConfig,
    DeCALForConditionalGeneration,
    FiveHundredXForCausalLM,
    ICAEForCausalLM,
    MeanPoolingForCausalLM,
    add_task_tokens,
    cli,
)
from context_compressors.data.document_ids import TrainingDocuments
from context_compressors.hub_cards.repository import select_files

LORA = {"rank": 4, "alpha": 8.0}
FILES = {
    "merged": [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_documents.json",
    ],
    "lora": ["adapter_config.json", "adapter_model.safetensors", "training_documents.json"],
}


def export(*arguments):
    return cli.main(["publish", "export-decoder", *map(str, arguments)])


def save(model, tokenizer, folder, **options):
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@torch.no_grad()
def test_merged_or_as_an_adapter_it_is_the_decoder(small_checkpoints, tmp_path, capsys):
    base, tokenizer = small_checkpoints / "base", AutoTokenizer.from_pretrained(small_checkpoints / "base")
    known, tasks = len(tokenizer), add_task_tokens(tokenizer)
    torch.manual_seed(0)
    model = ICAEForCausalLM.from_base(base, decoder_lora=LORA, task_token_ids=tasks)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.normal_(std=0.05)
    checkpoint = save(model, tokenizer, tmp_path / "checkpoint")
    TrainingDocuments(trained={"0" * 12}).save(checkpoint)
    assert export(checkpoint, tmp_path / "merged") == 0
    assert capsys.readouterr().out == f"vllm serve {tmp_path}/merged --enable-prompt-embeds\n"
    assert export(checkpoint, tmp_path / "lora", "--as", "lora") == 0
    options = (
        "--enable-lora --max-lora-rank 8 --lora-target-modules down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    )
    assert f"{options} --lora-modules decoder={tmp_path}/lora\n" in capsys.readouterr().out
    for form, names in FILES.items():
        assert sorted(path.name for path in (tmp_path / form).iterdir()) == names
    # Nothing of this machine is in them.
    select_files(tmp_path / "merged")
    assert str(tmp_path.parent) not in (tmp_path / "lora" / "adapter_config.json").read_text(encoding="utf-8")
    ids = tokenizer("The keeper of the lighthouse kept eleven hives of bees.", return_tensors="pt").input_ids
    wanted, untouched = model(ids).logits, AutoModelForCausalLM.from_pretrained(base)
    assert (untouched(ids).logits - wanted).abs().max() > 0.1, "the adapters make no difference here"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", trust_remote_code=False)
    assert type(merged) is type(untouched)
    adapted = PeftModel.from_pretrained(untouched, tmp_path / "lora")
    for decoder in (merged, adapted):
        torch.testing.assert_close(decoder(ids).logits, wanted, atol=1e-4, rtol=1e-4)
    # A server would look for a task token behind the table's last row.
    plain = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert len(plain) == known
    assert max(plain("[AE] [LM]").input_ids) < merged.config.vocab_size
    assert plain(plain.eos_token, add_special_tokens=False).input_ids == [plain.eos_token_id]
    assert export(checkpoint, tmp_path / "half", "--dtype", "bfloat16") == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


@pytest.mark.slow
def test_what_no_server_or_no_adapter_can_hold_is_refused_by_its_property(small_checkpoints, tmp_path, capsys):
    base, tokenizer = small_checkpoints / "base", AutoTokenizer.from_pretrained(small_checkpoints / "base")
    fields = {"task_token_ids": add_task_tokens(tokenizer)}
    own = {"trainable_parameters": [r"lora_", r"language_model\.layers\.0\.mlp"], "decoder_lora": LORA}
    t5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    models = {
        "key_values": FiveHundredXForCausalLM.from_base(base, decoder_lora=LORA, **fields),
        "cross_attention": DeCALForConditionalGeneration(DeCALConfig(decoder_config=t5)),
        "own_weights": MeanPoolingForCausalLM.from_base(base, **own),
    }
    for name, model in models.items():
        save(model, tokenizer, tmp_path / name)
    light = save(ICAEForCausalLM.from_base(base, **fields), tokenizer, tmp_path / "light", include_base=False)
    for name, options, message in (
        ("key_values", [], "keys and values of every layer"),
        ("cross_attention", [], "reads a memory by cross-attention"),
        ("own_weights", ["--as", "lora"], "weights of its own that have trained"),
        ("light", ["--as", "lora", "--base-model", base], "has no adapters: serve its base, base, as it is"),
    ):
        assert export(tmp_path / name, tmp_path / "out", *options) == 1
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    # Whole texts are read with the adapter alone, whatever the memories are.
    assert export(tmp_path / "key_values", tmp_path / "reader", "--as", "lora") == 0
    assert export(tmp_path / "own_weights", light) == 1
    assert "is not an empty folder" in capsys.readouterr().err
    # Whole it can be had all the same, and what it is is said where that is known.
    assert export(tmp_path / "own_weights", tmp_path / "out") == 0
    assert "nothing of this decoder was trained" not in capsys.readouterr().out
    assert export(light, tmp_path / "copy", "--base-model", base) == 0
    assert "nothing of this decoder was trained: it is base" in capsys.readouterr().out
