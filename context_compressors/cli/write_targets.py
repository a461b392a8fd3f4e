# SPDX-License-Identifier: Apache-2.0
"""`context-compressors write-targets TEACHER --data SOURCE ... --output FILE`."""

from __future__ import annotations

import argparse
import sys

from .command import LOADING, PROMPT_FORMAT, argument, command, positive_int, seed

_EXAMPLES = """
# What an instruct model answers to the questions of a file, in its chat template:
context-compressors write-targets my-instruct-model --data squad_train.parquet --output targets.jsonl \\
    --prompts chat --prompt-format chat

# The sources of a recipe, read by a trained adapter; a second start goes on with it:
context-compressors write-targets reader-lora --base-model my-base --data recipe.yaml --output targets.jsonl --resume

# Summaries of the first 10,000 rows of a set on the Hub:
context-compressors write-targets my-instruct-model --task summarisation --output summaries.jsonl \\
    --data '{name: EdinburghNLP/xsum, rows: [0, 10000], columns: {context: document}, licence: mit}' \\
    --prompts chat --prompt-format chat --truncate-context
"""


@command(
    "write-targets",
    "Let a language model answer greedily, from the whole context, what a compressor shall learn to answer from "
    "slots; training reads the JSONL file as any other source.",
    argument("teacher", help="Hub id or folder of a language model, or adapter folder of PEFT"),
    argument(
        "--data",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="FILE (.parquet, .jsonl, .txt, .md), HUB_NAME[:CONFIG][@SPLIT], generated[:KIND], a recipe's source as "
        "YAML, or a recipe; of the Hub the split train where none is named",
    ),
    argument("--output", required=True, metavar="FILE", help="JSONL file; the teacher and its settings go beside it"),
    argument("--task", default="question_answering", help="question_answering (default) or summarisation"),
    argument("--data-dir", metavar="FOLDER", help="folder that the files are relative to"),
    argument("--batch-size", type=positive_int, default=8, metavar="B", help="rows per batch (default: %(default)s)"),
    argument(
        "--max-new-tokens", type=positive_int, default=128, metavar="N", help="of a target (default: %(default)s)"
    ),
    argument("--prompts", metavar="NAME", help="packaged prompts or a file of prompts, the first of the task"),
    PROMPT_FORMAT,
    argument("--context-prefix", default="", metavar="TEXT", help="in front of the contexts"),
    argument(
        "--max-context-tokens", type=positive_int, metavar="N", help="longest context (default: what the model reads)"
    ),
    argument("--truncate-context", action="store_true", help="cut contexts that do not fit, and say so in their rows"),
    argument("--truncation-side", default="right", metavar="SIDE", help="cut on the right (default) or left"),
    argument("--documents", type=positive_int, default=100, metavar="N", help="generated documents (default: 100)"),
    argument("--document-tokens", type=positive_int, default=128, metavar="N", help="length of these (default: 128)"),
    argument("--seed", type=seed, default=0, help="draws generated documents and max_samples (default: 0)"),
    argument("--resume", action="store_true", help="go on with an --output that was stopped"),
    *LOADING,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors write-targets`.

    Raises:
        ValueError, TypeError, OSError, ImportError: see `write_targets`, `load_model` and `parse_sources`.
    """
    import yaml

    from ..data.sources import parse_sources
    from ..evaluation.evaluate import model_label
    from ..evaluation.settings import EvaluationSettings
    from ..evaluation.teacher_targets import TARGET_COLUMNS, write_targets
    from ..modeling.checkpoint.pretrained_bases import tokenizer_from_place
    from .loading import load_model

    names = ["batch_size", "seed", "prompts", "prompt_format", "context_prefix"]
    names += ["max_context_tokens", "truncate_context", "truncation_side"]
    settings = EvaluationSettings(
        **{name: getattr(arguments, name) for name in names},
        max_new_tokens=dict.fromkeys(TARGET_COLUMNS, arguments.max_new_tokens),
    )
    sources = parse_sources(arguments.data, split="train")
    how = {name: getattr(arguments, name) for name in ("base_model", "dtype", "device", "trust_remote_code")}
    record = write_targets(
        load_model(arguments.teacher, **how),
        tokenizer_from_place(arguments.teacher, trust_remote_code=arguments.trust_remote_code),
        sources,
        arguments.output,
        task=arguments.task,
        settings=settings,
        data_dir=arguments.data_dir,
        num_documents=arguments.documents,
        document_tokens=arguments.document_tokens,
        teacher_name=model_label(arguments.teacher),
        resume=arguments.resume,
        progress=sys.stderr.isatty(),
    )
    print(
        "{rows:,} rows: {unfinished:,} cut at the limit, {empty:,} empty, {truncated:,} contexts cut".format(**record)
    )
    print(f"a recipe's source: {yaml.safe_dump([record['source']], sort_keys=False, width=1000).strip()}")
