# SPDX-License-Identifier: Apache-2.0
"""`context-compressors export-decoder CHECKPOINT OUT`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .command import BASE_MODEL, DTYPE, REVISION, TRUST_REMOTE_CODE, argument, command

# Ranks that vLLM reserves memory for.
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_EXAMPLES = """
context-compressors export-decoder my-compressor my-decoder
context-compressors export-decoder my-compressor my-adapter --as lora
"""


@command(
    "export-decoder",
    "Write a checkpoint's decoder as a folder that vLLM and others serve: a plain language model without code of its "
    "own, or an adapter of the base.",
    argument("checkpoint", help="Hub id or folder of the compressor"),
    argument("output", help="folder to write; it does not exist, or is empty"),
    argument(
        "--as",
        dest="form",
        default="merged",
        choices=("merged", "lora"),
        help="a whole model with its adapters merged, or these alone in PEFT's format (default: %(default)s)",
    ),
    DTYPE,
    BASE_MODEL,
    REVISION,
    TRUST_REMOTE_CODE,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors export-decoder`.

    Raises:
        ValueError: as `load_compressor` and `export_decoder`.
    """
    from ..modeling.checkpoint.pretrained_bases import tokenizer_from_place
    from ..modeling.compressor.decoder_export import export_decoder, is_untouched_base
    from .loading import load_compressor

    name, output = arguments.checkpoint, arguments.output
    source = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
    model, _ = load_compressor(name, device="cpu", dtype=arguments.dtype, base_model=arguments.base_model, **source)
    # Not that of `load_compressor`, which splits special tokens: a server fills the chat template with them.
    tokenizer = tokenizer_from_place(name, **source)
    export_decoder(model, tokenizer, output, arguments.form)
    base = model.config.base_model_name_or_path
    if arguments.form == "lora":
        adapter = json.loads((Path(output) / "adapter_config.json").read_text(encoding="utf-8"))
        rank = next((rank for rank in _VLLM_RANKS if rank >= adapter["r"]), _VLLM_RANKS[-1])
        # Without its targets vLLM adapts the embedding table, too, and fails where a chat holds embeddings and text.
        options = f"--max-lora-rank {rank} --lora-target-modules {' '.join(sorted(adapter['target_modules']))}"
        print(f"vllm serve {base} --enable-prompt-embeds --enable-lora {options} --lora-modules decoder={output}")
        return
    if is_untouched_base(model):
        print(f"nothing of this decoder was trained: it is {base}, which a server may load in its place")
    print(f"vllm serve {output} --enable-prompt-embeds")
