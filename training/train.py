# SPDX-License-Identifier: Apache-2.0
"""`context-compressors train`, also for `accelerate launch -m context_compressors.training.train`."""

from __future__ import annotations

import importlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, set_seed

from ..data.document_ids import document_id, source_ids_of
from ..data.rows import as_text, read_rows
from ..reporting.tables import markdown_table
from .arguments import DataArguments, ModelArguments, TrainingConfig, parse_recipe, recorded_recipe
from .run_record import (
    add_earlier_documents,
    check_output_dir,
    earlier_files,
    earlier_sources,
    latest_checkpoint,
    write_summary,
)

# What takes tables, of all that `report_to` names.
_TRACKERS = ("trackio", "wandb")
_COLUMNS = ("step", "question", "answer", "expected")
_NUM_ROWS = 4


def build_trainer(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> Trainer:
    """Return the trainer of the recipe's objective, with its model and data."""
    scheduled = [name for name in ("length_schedule", "task_schedule") if vars(data_args)[name] is not None]
    if scheduled and args.max_steps < 1 and args.num_train_epochs not in (0, 1):
        raise ValueError(
            f"{scheduled[0]} needs max_steps, or num_train_epochs 1, got num_train_epochs {args.num_train_epochs:g}"
        )
    set_seed(args.seed)
    file = {"joint": "joint_pretraining"}.get(args.objective, args.objective)
    trainer = importlib.import_module(f".objectives.{file}", __package__).build(model_args, data_args, args)
    if args.sample_answers_steps:
        add_sample_answers(trainer, data_args, args.sample_answers_steps)
    return trainer


def fit_scorers(trainer: Any, num_contexts: int) -> None:
    """Fit the scorers of ranked key/values by least squares to contexts that are taken evenly from the training."""
    model = trainer.accelerator.unwrap_model(trainer.model).base_model
    dataset = trainer.train_dataset
    count = min(num_contexts, len(dataset))

    def batches() -> Iterator[list[Tensor]]:
        for index in tqdm(range(count), desc="fit scorers", unit="context"):
            batch = trainer.data_collator([dataset[index * len(dataset) // count]])
            trainer.documents.trained.update(batch.get("documents", ()))
            if trainer.is_world_process_zero():
                trainer.run_counts.add(num_context_tokens=int(batch["context_attention_mask"].sum()))
            names = ("context_input_ids", "context_attention_mask", "context_chunk_lengths")
            yield [batch[name].to(model.device) for name in names if name in batch]

    begin = time.perf_counter()
    model.fit_scorers(batches())
    trainer.run_counts.earlier_seconds += time.perf_counter() - begin


class LogAnswersCallback(TrainerCallback):
    """Asks the model the same questions before the first step and every few steps, greedily and from memories.

    Answers go to the log, and as the table `sample_answers` to trackio and wandb where `report_to` names them.

    ```python
    SFTTrainer(..., callbacks=[LogAnswersCallback(rows, tokenizer, steps=50)])
    ```

    Args:
        rows: Mappings with `context`, `question` and `answers` (a list of texts): few, and none that is trained on.
        steps: Training steps from one asking to the next.
        settings: Of the pipeline's call, such as `ratio`.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], tokenizer: Any, steps: int, **settings: Any):
        self.rows, self.tokenizer, self.steps = list(rows), tokenizer, steps
        self.settings = {"max_new_tokens": 32, **settings}

    def answers(self, model: Any) -> list[str]:
        """Return what a compressor answers now, row by row; it comes back in the mode that it was in."""
        was_training = model.training
        model.eval()
        try:
            pipe = model.question_answering(self.tokenizer)
            # A list of passages is one document.
            return [pipe(row["question"], context=[row["context"]], **self.settings)[0]["answer"] for row in self.rows]
        finally:
            model.train(was_training)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the model as it is before it trains."""
        self._show(args, state, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask after every `steps` steps."""
        if state.global_step % self.steps == 0:
            self._show(args, state, kwargs["model"])

    def _show(self, args: Any, state: Any, model: Any) -> None:
        # Where weights are shared out, no process can do it alone.
        answers = self.answers(model)
        if not state.is_world_process_zero:
            return
        table = [
            [state.global_step, row["question"], answer, row["answers"][0]]
            for row, answer in zip(self.rows, answers, strict=True)
        ]
        tqdm.write(markdown_table(_COLUMNS, [[" ".join(str(cell).split()) for cell in line] for line in table]))
        for name in _TRACKERS:
            if name in args.report_to:
                tracker = importlib.import_module(name)
                logged = {"sample_answers": tracker.Table(columns=list(_COLUMNS), data=table)}
                tracker.log({**logged, "train/global_step": state.global_step})


def add_sample_answers(trainer: Any, data_args: DataArguments, steps: int) -> None:
    """Ask the first questions of `eval_sources` every few steps; their documents count as those that choose."""
    rows: list[dict[str, Any]] = []
    for source in data_args.of_evaluation().parsed_sources() if data_args.eval_sources else ():
        if "question_answering" in source.tasks and not source.generated:
            table = read_rows(source, data_args.data_dir, trainer.args.seed).slice(0, _NUM_ROWS - len(rows))
            rows += table.select(["context", "question", "answers"]).to_pylist()
            trainer.documents.chose |= source_ids_of(table)
    if not rows or not hasattr(trainer.model, "question_answering") or trainer.is_fsdp_enabled:
        raise ValueError("sample_answers_steps needs a compressor, no FSDP, and eval_sources of question_answering")
    trainer.documents.chose.update(document_id(as_text(row["context"])) for row in rows)
    longest = data_args.max_context_tokens
    trainer.add_callback(LogAnswersCallback(rows, trainer.processing_class, steps, max_tokens=longest))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the train command; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parse_recipe(argv)
    recipe = recorded_recipe(argv, arguments)
    args = arguments[2]
    resume = args.resume_from_checkpoint
    if resume == "latest":
        resume = latest_checkpoint(args.output_dir)
    if resume is None:
        check_output_dir(args.output_dir, args.overwrite)
    trainer = build_trainer(*arguments)
    add_earlier_documents(trainer, recipe)
    earlier = earlier_sources(recipe)
    # The model may have come from there.
    PartialState().wait_for_everyone()
    if resume is None and args.overwrite and trainer.is_world_process_zero():
        for path in earlier_files(args.output_dir):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if resume is None and args.fit_scorers:
        fit_scorers(trainer, args.fit_scorers)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        # The Trainer's arguments are a pickle, which has no place in a folder that people share.
        (Path(args.output_dir) / "training_args.bin").unlink(missing_ok=True)
    write_summary(trainer, recipe, Path(args.output_dir), earlier)
    return 0


def main_of_process(argv: Sequence[str] | None = None) -> int:
    """Run `main` in a process that does nothing else: an open process group may abort the end of its threads."""
    status = main(argv)
    PartialState().destroy_process_group()
    return status


if __name__ == "__main__":
    try:
        raise SystemExit(main_of_process())
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
