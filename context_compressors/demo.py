# SPDX-License-Identifier: Apache-2.0
"""The demo: compress documents, read them back from the slots, ask about them, fine-tune, save.

    make demo
    python -m context_compressors.demo --checkpoint checkpoints/mean_pooling --output outputs/demo --steps 40

Everything goes the way that a user of a checkpoint goes: `AutoModelForCausalLM` with remote code, and TRL's trainer.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from .demo_picture import plot_demo
from .evaluation.evaluate import evaluate_model
from .evaluation.report import (
    FULL_CONTEXT,
    NO_CONTEXT,
    EvaluationReport,
    environment,
    markdown_table,
    ratio_of,
)
from .evaluation.samples import EvaluationDataset, load_dataset_source
from .evaluation.settings import EvaluationSettings
from .evaluation.task_text import default_prompts, text_ids
from .hub_cards.card_records import Score, TrainingData, TrainingRecord
from .hub_cards.cards import model_card
from .training.collators import CompressionCollator
from .training.data import encode, task_start_ids
from .training.examples import CompressionDataset

CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints" / "mean_pooling"
DOCUMENTS = Path(__file__).resolve().parent / "demo_documents"
WRITTEN, GENERATED = "written", "generated"
_TITLES = {WRITTEN: "Documents written for this demo", GENERATED: "Generated documents"}
_CONTEXT_TOKENS = 48
_DOCUMENT_TOKENS = 48
_TRAINING_TOKENS = 48
_SEED = 0
_WIDTH = 100


@dataclass(frozen=True)
class Demo:
    """What every step of the demo works with."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ratios: list[int]
    prompts: str | None

    def compress(self, text: str) -> dict[int, Any]:
        """Memories of a text at every ratio, from one pass of the encoder."""
        ids = self.tokenizer(text, return_tensors="pt").input_ids.to(self.model.device)
        return dict(zip(self.ratios, self.model.compress(ids, ratio=self.ratios), strict=True))

    def write(self, memory: Any, task: str, max_new_tokens: int, question: str = "") -> str:
        """What the model writes behind the slots when it is given a task."""
        ids = text_ids(self.model.config, self.tokenizer, task, question, self.prompts)
        output = self.model.generate(
            input_ids=torch.tensor([ids], device=self.model.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self.model.device),
            memory=memory,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.eos_token_id,
        )
        return self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()


def load(checkpoint: str, prompts: str | None = None) -> Demo:
    """Load a checkpoint with the code in its own folder.

    Args:
        checkpoint: its folder.
        prompts: name or file of the prompts that it was trained with; those of its method when `None`.

    Raises:
        ValueError: there is no checkpoint.
    """
    folder = Path(checkpoint).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"there is no checkpoint in {folder}: run the demo in a clone of the repository, which has one in "
            "checkpoints/mean_pooling, or name a folder with --checkpoint"
        )
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    if not callable(getattr(model, "compress", None)):
        raise ValueError(f"{folder} holds a {type(model).__name__}, not a context compressor")
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    # The tokenizer is a plain one, but its loader looks at the configuration, too, which is remote code.
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ratios = [int(ratio) for ratio in model.config.compression_ratios]
    return Demo(model, tokenizer, ratios, prompts or default_prompts(model.config))


def load_documents(tokenizer: PreTrainedTokenizerBase) -> list[EvaluationDataset]:
    """The documents beside this file with their questions, and generated ones that no training has seen."""
    questions = json.loads((DOCUMENTS / "questions.json").read_text(encoding="utf-8"))
    written = [
        {"context": path.read_text(encoding="utf-8").strip(), **question}
        for path in sorted(DOCUMENTS.glob("*.txt"))
        for question in questions[path.stem]
    ]
    generated = load_dataset_source(
        f"{GENERATED}:one_hop", tokenizer, seed=_SEED, num_documents=12, document_tokens=_DOCUMENT_TOKENS
    )
    return [EvaluationDataset(WRITTEN, written, domain="out"), EvaluationDataset(GENERATED, generated.examples)]


def contexts(dataset: EvaluationDataset) -> list[str]:
    """The distinct documents of a data set."""
    return list(dict.fromkeys(example["context"] for example in dataset.examples))


def show(demo: Demo, dataset: EvaluationDataset) -> None:
    """Print a document, and what the model makes of its slots at every ratio."""
    text = contexts(dataset)[0]
    question, answers = next((e["question"], e["answers"]) for e in dataset.examples if e["context"] == text)
    sentences = text.split(". ")
    middle = (len(sentences) + 1) // 2
    beginning, rest = ". ".join(sentences[:middle]) + ".", ". ".join(sentences[middle:])
    num_tokens = len(encode(demo.tokenizer, text))
    print(f"\n{_TITLES[dataset.name]}: the first of {len(contexts(dataset))}, {num_tokens} tokens\n")
    print(textwrap.indent(textwrap.fill(text, _WIDTH), "    "))
    print(f"\n    question: {question}  (right: {answers[0]})\n    its second half starts: {_excerpt(rest)}\n")
    whole, half = demo.compress(text), demo.compress(beginning)
    for ratio in demo.ratios:
        print(f"  ratio {ratio}: {int(whole[ratio].num_slots[0])} slots")
        print(f"    repeats:   {_excerpt(demo.write(whole[ratio], 'reconstruction', 40))}")
        print(f"    continues: {_excerpt(demo.write(half[ratio], 'continuation', 40))}")
        answer = demo.write(whole[ratio], "question_answering", 16, question)
        print(f"    answers:   {_excerpt(answer)}")


def _excerpt(text: str) -> str:
    return textwrap.shorten(text, _WIDTH - 15, placeholder=" ...") or "(nothing)"


def score(demo: Demo, datasets: Sequence[EvaluationDataset]) -> EvaluationReport:
    """Score all ratios beside no context and full context."""
    settings = EvaluationSettings(
        max_samples=48,
        batch_size=16,
        seed=_SEED,
        max_new_tokens={"question_answering": 16, "summarisation": 1},
        context_tokens=_CONTEXT_TOKENS,
        continuation_tokens=_CONTEXT_TOKENS,
        prompts=demo.prompts,
    )
    return evaluate_model(demo.model, demo.tokenizer, datasets, settings)


def score_table(demo: Demo, report: EvaluationReport, dataset: EvaluationDataset) -> str:
    """Size and quality at every ratio, beside the two bounds."""
    memories = [demo.compress(text) for text in contexts(dataset)]
    rows = []
    for condition in report.conditions("question_answering"):
        ratio = ratio_of(condition)
        sizes = ["-", "-"]
        if ratio is not None:
            slots = fmean(int(memory[ratio].num_slots[0]) for memory in memories)
            sizes = [f"{slots:.1f}", f"{fmean(memory[ratio].nbytes for memory in memories):.0f}"]
        elif condition == FULL_CONTEXT:
            sizes[0] = f"{fmean(len(encode(demo.tokenizer, text)) for text in contexts(dataset)):.1f} tokens"
        num_questions = next(
            row.num_samples
            for row in report.rows
            if (row.dataset, row.task, row.condition) == (dataset.name, "question_answering", condition)
        )
        right = report.score(dataset.name, "question_answering", condition, "exact_match") * num_questions / 100
        accuracy = report.score(dataset.name, "reconstruction", condition, "token_accuracy")
        perplexity = report.score(dataset.name, "continuation", condition, "perplexity")
        name = condition.replace("_", " ") if ratio is None else str(ratio)
        rows.append([name, *sizes, f"{accuracy:.1f} %", f"{perplexity:.1f}", f"{right:.0f} of {num_questions}"])
    header = ["ratio", "slots", "bytes", "reconstruction accuracy", "continuation perplexity", "answers right"]
    return f"{_TITLES[dataset.name]} (slots and bytes: mean of a document)\n\n{markdown_table(header, rows)}"


def fine_tune(demo: Demo, steps: int, output: Path) -> None:
    """Train for some steps with TRL's own trainer: the model, tokenized examples, and this project's collator."""
    examples = CompressionDataset(
        [{"generated": True, "tasks": ["question_answering", "reconstruction"], "weight": 1.0}],
        demo.tokenizer,
        steps * 8,
        max_context_tokens=_TRAINING_TOKENS,
        max_target_tokens=_TRAINING_TOKENS + 1,
        canonical_prompts=True,
        prompts=demo.prompts,
        seed=_SEED,
    )
    trainer = SFTTrainer(
        model=demo.model,
        args=SFTConfig(
            output_dir=str(output / "trainer"),
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-4,
            logging_steps=max(1, steps // 4),
            save_strategy="no",
            report_to="none",
            disable_tqdm=False,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            seed=_SEED,
        ),
        train_dataset=examples.as_dataset(),
        data_collator=CompressionCollator.from_tokenizer(
            demo.tokenizer, ratios=demo.ratios, task_start_ids=task_start_ids(demo.model.config)
        ),
        processing_class=demo.tokenizer,
    )
    trainer.train()
    demo.model.eval()


def save(demo: Demo, folder: Path, report: EvaluationReport, steps: int) -> None:
    """Write a folder that is ready for the Hub: weights, code, tokenizer, and a card with the scores before tuning."""
    demo.model.save_pretrained(folder)
    demo.tokenizer.save_pretrained(folder)
    scores = [
        Score(
            task=row.task,
            dataset=f"{row.dataset} documents, before fine-tuning",
            metric="exact match",
            ratio=ratio_of(row.condition),
            value=row.metrics["exact_match"],
            no_context=report.score(row.dataset, row.task, NO_CONTEXT, "exact_match"),
            full_context=report.score(row.dataset, row.task, FULL_CONTEXT, "exact_match"),
        )
        for row in report.rows
        if row.task == "question_answering" and ratio_of(row.condition) is not None
    ]
    facts = environment()
    record = TrainingRecord(
        data=[TrainingData("generated documents", "apache-2.0", note="training split, made on the fly")],
        steps=steps,
        seeds=[_SEED],
        hardware=", ".join(facts["gpus"]) or facts["cpu"],
        versions={name: version for name, version in facts["versions"].items() if version},
    )
    limits = ["It comes from a demonstration: a few steps of fine-tuning, enough to show how it is done."]
    summary = f"The demo's compressor, with the ratios {', '.join(map(str, demo.ratios))}."
    card = model_card(demo.model.config, record, scores, limits, model_id=folder.name, summary=summary)
    (folder / "README.md").write_text(card, encoding="utf-8")


def check_saved(demo: Demo, folder: Path, text: str) -> None:
    """Load the folder again and compare what it writes with the model in memory.

    Raises:
        RuntimeError: it writes something else.
    """
    again = load(str(folder), demo.prompts)
    written = [one.write(one.compress(text)[demo.ratios[0]], "reconstruction", 24) for one in (demo, again)]
    if written[0] != written[1]:
        raise RuntimeError(f"the saved model writes {written[1]!r}, the one in memory {written[0]!r}")
    print(f"loaded it again: it writes the same, {_excerpt(written[1])}")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m context_compressors.demo",
        description="Compress documents, read them back, ask about them, fine-tune and save.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--checkpoint", default=str(CHECKPOINT), metavar="FOLDER", help="default: the clone's checkpoints/mean_pooling"
    )
    add("--output", default="outputs/demo", metavar="FOLDER", help="where results go (default: outputs/demo)")
    add("--prompts", metavar="NAME", help="packaged prompts or a file of prompts (default: the method's own)")
    add("--steps", type=int, default=40, metavar="N", help="fine-tuning steps (default: 40)")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """All steps, in order."""
    output = Path(arguments.output).expanduser()
    print(f"1. load {Path(arguments.checkpoint).name}")
    demo = load(arguments.checkpoint, arguments.prompts)
    datasets = load_documents(demo.tokenizer)
    print(f"   {demo.model.num_parameters() / 1e6:.1f}M parameters, ratios {demo.ratios}, on {demo.model.device}")
    print("\n2. compress, repeat, continue, answer")
    for dataset in datasets:
        show(demo, dataset)
    print("\n3. score every ratio, beside no context and the full context\n")
    report = score(demo, datasets)
    tables = [score_table(demo, report, dataset) for dataset in datasets]
    print(f"\n4. fine-tune with trl.SFTTrainer, {arguments.steps} steps on generated documents\n")
    fine_tune(demo, arguments.steps, output)
    folder = output / "model"
    print(f"\n5. save a folder that is ready for the Hub: {folder}")
    save(demo, folder, report, arguments.steps)
    check_saved(demo, folder, contexts(datasets[0])[0])
    print("\n6. results of the checkpoint as it was loaded\n")
    for table in tables:
        print(f"{table}\n")
    report.save(output / "results.json")
    picture = plot_demo(report, [dataset.name for dataset in datasets], output / "quality_by_ratio.png")
    print(f"wrote {output / 'results.json'}\nwrote {picture}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, got {arguments.steps}")
    start = time.perf_counter()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # Notices of the libraries to their own developers would hide what the demo shows.
            warnings.simplefilter("ignore", FutureWarning)
            run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"done in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
