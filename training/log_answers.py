# SPDX-License-Identifier: Apache-2.0
"""Answers to a few questions while a compressor trains, for people to read."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.document_ids import document_id, source_ids_of
from ..data.rows import PassageText, read_rows
from ..reporting.tables import markdown_table
from .base_trainer import BaseTrainer
from .fields import DataArguments

# What takes tables, of all that `report_to` names.
_TRACKERS = ("trackio", "wandb")
_COLUMNS = ("step", "question", "answer", "expected")
_NUM_ROWS = 4


class LogAnswersCallback(TrainerCallback):
    """Asks the model that trains the same questions every few steps, from memories, before the first step, too.

    The answers are written to the log, and as the table `sample_answers` to trackio and wandb, where `report_to` names
    them. They are greedy, so that a run goes on as it would without them.

    ```python
    SFTTrainer(..., callbacks=[LogAnswersCallback(rows, tokenizer, steps=50)])
    ```

    Args:
        rows: Mappings with `context`, `question` and `answers` (a list of texts): few, and none that is trained on.
        tokenizer: That of the compressor.
        steps: Training steps from one asking to the next.
        ratio: Context tokens per slot; the model's default if not given.
        max_new_tokens: The longest answer in tokens.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        steps: int,
        ratio: int | None = None,
        max_new_tokens: int = 32,
    ):
        self.rows, self.tokenizer, self.steps = list(rows), tokenizer, steps
        self.ratio, self.max_new_tokens = ratio, max_new_tokens

    def answers(self, model: Any) -> list[str]:
        """Return what a compressor answers now, row by row; it comes back in the mode that it was in."""
        was_training = model.training
        model.eval()
        try:
            pipe = model.question_answering(self.tokenizer)
            settings = {"ratio": self.ratio, "max_new_tokens": self.max_new_tokens}
            # A list of passages is one document.
            return [pipe(row["question"], context=[row["context"]], **settings)[0]["answer"] for row in self.rows]
        finally:
            model.train(was_training)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask the model as it is before it trains."""
        self._show(args, state, kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask after every `steps` steps."""
        if state.global_step % self.steps == 0:
            self._show(args, state, kwargs["model"])

    def _show(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
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


def add_sample_answers(trainer: BaseTrainer, data_args: DataArguments, steps: int) -> None:
    """Ask the first questions of `eval_sources` every few steps; their documents count as those that choose."""
    rows: list[dict[str, Any]] = []
    for source in data_args.of_evaluation().parsed_sources() if data_args.eval_sources else ():
        if "question_answering" in source.tasks and not source.generated:
            table = read_rows(source, data_args.data_dir, trainer.args.seed).slice(0, _NUM_ROWS - len(rows))
            rows += table.select(["context", "question", "answers"]).to_pylist()
            trainer.documents.chose |= source_ids_of(table)
    if not rows:
        raise ValueError("sample_answers_steps needs eval_sources with the task question_answering and a path or name")
    for row in rows:
        context = row["context"]
        trainer.documents.chose.add(document_id(context if isinstance(context, str) else PassageText(context)))
    trainer.add_callback(LogAnswersCallback(rows, trainer.processing_class, steps))
