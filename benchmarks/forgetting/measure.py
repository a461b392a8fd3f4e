# SPDX-License-Identifier: Apache-2.0
"""What a decoder forgot between two checkpoints: short questions, with their texts in words and without any memory.

    python -m benchmarks.forgetting.measure AUTOENCODER KEFT --data DATA --mmlu cais/mmlu:all

GMSA's knowledge extraction fine-tuning trains the decoder's query, key and value maps on answers from slots. Here the
decoders before and after it read no slots: each is a plain language model that gets the text and the question, as
GMSA's Table 3 asks GSM8K of it. DATA is a folder with the data files, of which GSM8K's test questions are taken
(their facts are the text); generated documents with one-hop questions are always there. Both checkpoints, compressors
or plain language models with one vocabulary, get the same samples and the same prompts.

The perplexity is that of the right answer's tokens, EOS included, so that it tells something where neither decoder
answers; exact match and F1 are of what they write. `--mmlu` adds Table 3's other column, MMLU in its published columns
and by its own metric: a question with four choices, no example in front of it, is answered with the likeliest of their
letters.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common.tools import DTYPES, add_place_arguments, device_of, positive_int, save_and_report, tells_errors

# Importing it registers every method with the Auto classes.
from context_compressors import modeling  # noqa: F401
from context_compressors.data.rows import read_table
from context_compressors.data.sources import parse_sources
from context_compressors.evaluation.data_sets import load_datasets
from context_compressors.evaluation.evaluate import can_compress, model_label
from context_compressors.evaluation.rows import FULL_CONTEXT
from context_compressors.evaluation.samples import EvaluationDataset, Sample, SampleBuilder
from context_compressors.evaluation.scoring import Condition, Scorer
from context_compressors.modeling.parts.text_ids import encode, start_token_id, text_tokenizer
from context_compressors.reporting.tables import markdown_table

_GSM8K = "gsm8k=qa_gsm8k_test.parquet"
_GENERATED = "generated=generated:one_hop"
_TASK = "question_answering"
_SCORED = ("answer_perplexity", "exact_match", "f1")
METRICS = (*_SCORED, "accuracy")
_LETTERS = "ABCD"


def load(name: str, arguments: argparse.Namespace) -> PreTrainedModel:
    """A checkpoint's language model, in evaluation mode; of a compressor, what it is without a memory.

    Raises:
        ValueError: there is no causal language model by this name.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, arguments.dtype))
    except (OSError, ValueError) as error:
        raise ValueError(f"there is no checkpoint {name!r}: {error}") from error
    return model.to(device_of(arguments)).eval()


def load_tokenizer(name: str, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, to which task tokens are characters."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    return text_tokenizer(tokenizer) if can_compress(model) and model.config.task_token_ids else tokenizer


def data_sets(tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace) -> list[EvaluationDataset]:
    """GSM8K where there is a folder with it, and generated documents.

    Raises:
        ValueError: GSM8K is not in the folder.
    """
    sources = [_GENERATED] if arguments.data is None else [_GSM8K, _GENERATED]
    return load_datasets(
        sources,
        tokenizer,
        data_dir=arguments.data,
        num_documents=arguments.samples,
        document_tokens=arguments.document_tokens,
    )


def make_samples(
    tokenizer: PreTrainedTokenizerBase, models: Sequence[PreTrainedModel], arguments: argparse.Namespace
) -> dict[str, list[Sample]]:
    """Data set -> the samples that both models get; what does not fit into both is cut on the right, and counted."""
    limits = [getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) for model in models]
    builder = SampleBuilder(
        tokenizer,
        min((limit for limit in limits if limit is not None), default=None),
        {_TASK: arguments.new_tokens},
        context_tokens=1,
        continuation_tokens=1,
        truncate_context=True,
        prompts=arguments.prompts,
    )
    sets = data_sets(tokenizer, arguments)
    return {test.name: builder.build(test, _TASK, arguments.samples) for test in sets}


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    arguments: argparse.Namespace,
) -> dict[str, float]:
    """The metrics of a model that reads text and question, and no slots."""
    reading = Condition(FULL_CONTEXT, model, with_context=True)
    scorer = Scorer(model, tokenizer, [reading], start_token_id(tokenizer))
    scores = scorer.score(_TASK, samples, arguments.batch_size, arguments.new_tokens, answer_perplexity=True)
    return {metric: scores[FULL_CONTEXT][metric] for metric in _SCORED}


def mmlu_questions(tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Ids of each question with its choices and ` A` behind them, and which choice is right.

    Raises:
        ValueError: a column of MMLU is missing.
    """
    (source,) = parse_sources([arguments.mmlu])
    table = read_table(source, arguments.data)
    missing = {"subject", "question", "choices", "answer"} - set(table.column_names)
    if missing:
        raise ValueError(f"{arguments.mmlu} is not MMLU as it is published: it has no {', '.join(sorted(missing))}")
    kept = sorted(random.Random(0).sample(range(table.num_rows), min(arguments.samples, table.num_rows)))
    questions = []
    for row in table.take(kept).to_pylist():
        # The prompt of MMLU's authors.
        text = f"The following are multiple choice questions (with answers) about {row['subject'].replace('_', ' ')}."
        text += f"\n\n{row['question']}"
        text += "".join(f"\n{letter}. {choice}" for letter, choice in zip(_LETTERS, row["choices"], strict=True))
        questions.append((encode(tokenizer, f"{text}\nAnswer: A"), row["answer"]))
    return questions


@torch.inference_mode()
def mmlu_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[tuple[list[int], int]]
) -> float:
    """Share of the questions, in per cent, whose right letter is the likeliest of the four."""
    letters = [encode(tokenizer, f"Answer: {letter}")[-1] for letter in _LETTERS]
    right = 0
    for ids, answer in questions:
        logits = model(torch.tensor([[start_token_id(tokenizer), *ids[:-1]]], device=model.device)).logits[0, -1]
        right += int(logits[letters].argmax()) == answer
    return 100 * right / len(questions)


def rows_of(
    models: Sequence[PreTrainedModel], tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each data set: the scores before and after."""
    rows = []
    samples = make_samples(tokenizer, models, arguments)
    for name, built in tqdm(samples.items(), desc="forgetting", unit="data set"):
        before, after = (score(model, tokenizer, built, arguments) for model in models)
        rows.append(
            {
                "dataset": name,
                "num_samples": len(built),
                "num_truncated": sum(sample.truncated for sample in built),
                "before": before,
                "after": after,
            }
        )
    if arguments.mmlu is not None:
        questions = mmlu_questions(tokenizer, arguments)
        before, after = ({"accuracy": mmlu_accuracy(model, tokenizer, questions)} for model in models)
        rows.append(
            {"dataset": "mmlu", "num_samples": len(questions), "num_truncated": 0, "before": before, "after": after}
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    header = ["data set", "samples", *(f"{metric}, {side}" for metric in METRICS for side in ("before", "after"))]
    body = [
        [row["dataset"], row["num_samples"]]
        + [f"{row[side][m]:.2f}" if m in row[side] else "" for m in METRICS for side in ("before", "after")]
        for row in rows
    ]
    return markdown_table(header, body)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("before", help="folder or Hub id of the first checkpoint")
    add("after", help="folder or Hub id of the second one")
    add("--data", metavar="PATH", help="folder with the data files (default: generated documents alone)")
    add("--mmlu", metavar="SOURCE", help="MMLU's test questions, such as cais/mmlu:all or a file in --data's folder")
    add("--samples", type=positive_int, default=200, metavar="N", help="questions per data set (default: 200)")
    add("--document-tokens", type=positive_int, default=64, metavar="N", help="of generated documents (default: 64)")
    add("--new-tokens", type=positive_int, default=16, metavar="N", help="most tokens of an answer (default: 16)")
    add("--batch-size", type=positive_int, default=16, metavar="B", help="default: 16")
    add("--prompts", metavar="NAME", help="packaged prompts or a file of prompts (default: the packaged default ones)")
    add("--dtype", choices=DTYPES, default="float32", help="default: float32")
    add_place_arguments(parser)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    names = arguments.before, arguments.after
    models = [load(name, arguments) for name in names]
    tokenizers = [load_tokenizer(name, model) for name, model in zip(names, models, strict=True)]
    # One of them may have task tokens besides.
    small, large = sorted((tokenizer.get_vocab() for tokenizer in tokenizers), key=len)
    if not small.items() <= large.items():
        raise ValueError(f"{' and '.join(names)} must have one vocabulary, they have two")
    rows = rows_of(models, tokenizers[0], arguments)
    # A result names no folders.
    arguments.before, arguments.after = model_label(arguments.before), model_label(arguments.after)
    arguments.data = None if arguments.data is None else "gsm8k"
    arguments.mmlu = None if arguments.mmlu is None else "mmlu"
    save_and_report(__file__, arguments, rows, table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
