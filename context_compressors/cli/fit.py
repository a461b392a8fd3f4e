# SPDX-License-Identifier: Apache-2.0
"""`context-compressors fit BASE --data SOURCE ... --output FOLDER`."""

from __future__ import annotations

import argparse
import json

from .command import OVERWRITE, argument, command, positive_int

_EXAMPLES = """
context-compressors fit Qwen/Qwen3-0.6B --data 'notes/*.md' reports.jsonl --output my-compressor
context-compressors ask my-compressor notes/minutes.md --question "What was decided?" --ratio 4
context-compressors fit Qwen/Qwen3-0.6B --data Salesforce/wikitext:wikitext-2-raw-v1@train#500 --ratios 4 2 8 32 \\
    --output my-compressor
"""
_RECIPE = "ranked_key_values/fit.yaml"
_CHUNK_SIZE, _CONTEXT_TOKENS = 2048, 1024


@command(
    "fit",
    "Make a compressor of a language model in minutes, without training it: one linear map for each layer is fitted "
    "to rank keys and values (method ranked_key_values). Runs the recipe ranked_key_values/fit.yaml, which `train` "
    "takes with any other field.",
    argument("base", help="Hub id or folder of a language model"),
    argument(
        "--data",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="some hundred texts: FILE or pattern (.txt, .md, .parquet, .jsonl), HUB_NAME[:CONFIG][@SPLIT], with #N "
        "for N rows of it, or a recipe's source as YAML",
    ),
    argument("--output", required=True, metavar="FOLDER", help="the compressor"),
    OVERWRITE,
    argument("--contexts", type=positive_int, default=100, metavar="N", help="to fit it to (default: %(default)s)"),
    argument("--ratios", type=positive_int, nargs="+", default=[4, 8, 2, 16], metavar="R", help="(default: 4 8 2 16)"),
    examples=_EXAMPLES,
)
def fit(arguments: argparse.Namespace) -> None:
    """Run `context-compressors fit`."""
    from transformers import AutoConfig

    from ..data.sources import source_fields
    from ..modeling.checkpoint.pretrained_bases import base_place
    from ..training.arguments import ModelArguments
    from ..training.loading import load_tokenizer
    from ..training.run_record import check_output_dir
    from ..training.train import main

    check_output_dir(arguments.output, arguments.overwrite)
    sources = list(map(source_fields, arguments.data))
    tokenizer = load_tokenizer(ModelArguments(base=arguments.base))
    config = AutoConfig.from_pretrained(base_place(arguments.base)).get_text_config()
    chunk_size = min(_CHUNK_SIZE, config.to_dict().get("max_position_embeddings", 2 * _CHUNK_SIZE) // 2)
    limit, dtype = min(_CONTEXT_TOKENS, chunk_size), str(config.dtype or "bfloat16").removeprefix("torch.")
    method = {"compression_ratios": arguments.ratios, "chunk_size": chunk_size, "encoder_lora": None}
    fields = {
        "base": arguments.base,
        "output_dir": arguments.output,
        "sources": json.dumps([{"tasks": ["reconstruction"], **source} for source in sources]),
        "method_config": json.dumps(method),
        "fit_scorers": arguments.contexts,
        "min_context_tokens": min(64, limit),
        "max_context_tokens": limit,
        "max_target_tokens": limit + 1,
        "dtype": dtype,
        "save_dtype": dtype,
        "overwrite": arguments.overwrite,
    }
    if tokenizer.chat_template is None:
        # Documents stand in front of questions, in plain words.
        fields |= {"prompts": "null", "prompt_format": "plain"}
    main([_RECIPE, *(word for name, value in fields.items() for word in (f"--{name}", str(value)))])
    print(f"{arguments.output}: ask it with `context-compressors ask {arguments.output} FILE --question ...`")
