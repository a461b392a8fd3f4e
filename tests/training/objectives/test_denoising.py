# SPDX-License-Identifier: Apache-2.0
"""Data, collator, trainer and recipes of encoder-decoders."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from small_recipes import write_recipe
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

from context_compressors import DeCALForConditionalGeneration
from context_compressors.data.task_tokens import add_sentinel_tokens
from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.report_tables import report_markdown
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.training.arguments import DataArguments
from context_compressors.training.loading import new_encoder_decoder
from context_compressors.training.objectives.compression_collator import Seq2SeqCollator
from context_compressors.training.objectives.compression_trainer import Seq2SeqCompressionTrainer
from context_compressors.training.objectives.denoising import DenoisingDataset, SpanCorruptionCollator
from context_compressors.training.train import main

SOURCE = {"generated": True, "tasks": ["continuation"], "weight": 1}
TINY = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
EXAMPLE = {"context_ids": [20, 21, 22], "prompt_ids": [30, 31], "target_ids": [40, 2], "task": "question_answering"}


@pytest.fixture
def own_tokenizer(base_folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(base_folder)


@pytest.fixture
def model(own_tokenizer):
    torch.manual_seed(0)
    fields = {"compression_ratios": [2, 4]}
    return new_encoder_decoder(DeCALForConditionalGeneration, TINY, fields, own_tokenizer, {"dtype": torch.float32})


# --- data ---


def test_texts_are_full_and_depend_on_their_index_alone(tokenizer, tmp_path):
    words = ["one two three four five six seven", "a b c", "", "x " * 200]
    pyarrow.parquet.write_table(pyarrow.table({"text": words}), tmp_path / "texts.parquet")
    sources = [{"path": "texts.parquet", "tasks": ["continuation"]}, {**SOURCE}]
    sources[0]["weight"] = 1
    # So long is what 70 tokens become.
    arguments = DataArguments(sources=sources, max_context_tokens=64, data_dir=str(tmp_path))
    data = DenoisingDataset(arguments, tokenizer, 12)
    examples = [data[index] for index in range(12)]
    assert {len(example["token_ids"]) for example in examples} == {70}
    assert [example["index"] for example in examples] == list(range(12))
    again = DenoisingDataset(arguments, tokenizer, 12)
    assert again[7] == examples[7]


def test_questions_go_where_the_model_places_them():
    arguments = {"task_start_ids": {"question_answering": 7}, "context_end_ids": [1]}
    batch = Seq2SeqCollator(0, 3, [5], **arguments)([EXAMPLE])
    assert batch["context_input_ids"].tolist() == [[5, 20, 21, 22, 1]]
    assert batch["input_ids"].tolist() == [[7, 30, 31, 40, 2]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 40, 2]]
    collator = Seq2SeqCollator(0, 3, [5], question_placement="encoder", **arguments)
    batch = collator([EXAMPLE])
    assert batch["context_input_ids"].tolist() == [[30, 31, 5, 20, 21, 22, 1]]
    assert batch["input_ids"].tolist() == [[7, 40, 2]]
    assert batch["labels"].tolist() == [[-100, 40, 2]]


# --- the trainer ---


def test_the_loss_is_that_of_the_stock_form_at_every_ratio(model, own_tokenizer, make_config):
    """The trainer's loss is T5's loss of corrupted text and target, summed over the ratios."""
    sentinels = add_sentinel_tokens(own_tokenizer)
    data = DenoisingDataset(DataArguments(sources=[SOURCE], max_context_tokens=37), own_tokenizer, 4)
    collator = SpanCorruptionCollator.from_tokenizer(
        own_tokenizer,
        sentinel_ids=sentinels,
        end_id=own_tokenizer.eos_token_id,
        task_start_ids={"reconstruction": model.config.decoder_start_token_id},
    )
    trainer = Seq2SeqCompressionTrainer(
        model=model,
        args=make_config(),
        train_dataset=data.as_dataset(),
        data_collator=collator,
        processing_class=own_tokenizer,
    )
    batch = collator([data[0], data[1]])
    model.eval()
    with torch.no_grad():
        loss = trainer.compute_loss(model, batch)
        context = {"input_ids": batch["context_input_ids"], "attention_mask": batch["context_attention_mask"]}
        outputs = [model(**context, labels=batch["labels"][:, 1:], ratio=ratio) for ratio in (2, 4)]
    torch.testing.assert_close(loss, sum(output.loss for output in outputs))
    labels = batch["labels"][:, 1:]
    expected = [(output.logits.argmax(-1) == labels)[labels != -100].float().mean() for output in outputs]
    logged = trainer._metrics["eval"]
    found = torch.tensor([logged[f"token_accuracy_ratio_{ratio}"][0] for ratio in (2, 4)])
    torch.testing.assert_close(found, torch.stack(expected))


# --- recipes ---


def small(tmp_path, **fields) -> str:
    """One more recipe that brings a run down to what trains in a second."""
    settings = {"min_context_tokens": 16, "group_batches": 1, "warmup_steps": 0, "dtype": "float32"}
    settings |= {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}, "gradient_accumulation_steps": 1}
    return write_recipe(tmp_path, **{**settings, "sources": [SOURCE], "max_context_tokens": 40, **fields})


@pytest.mark.slow
def test_pretraining_then_questions_then_answers(tmp_path, base_folder):
    """The whole way of the small recipes: denoise from nothing, fine-tune the checkpoint, evaluate it."""
    pretrained, tuned = tmp_path / "pretrained", tmp_path / "tuned"
    new = small(tmp_path, tokenizer=str(base_folder), model_config=TINY)
    assert main(["embedded/decal.yaml", new, "--output_dir", str(pretrained)]) == 0
    log = json.loads((pretrained / "training_summary.json").read_text())["log"]
    assert any("token_accuracy_ratio_2" in entry for entry in log)
    assert not (pretrained / "training_args.bin").exists()
    questions = [{**SOURCE, "tasks": ["question_answering"]}]
    recipe = small(tmp_path, sources=questions)
    arguments = ["embedded/decal.yaml", "decal/small/fine_tuning.yaml", recipe, "--checkpoint", str(pretrained)]
    assert main([*arguments, "--output_dir", str(tuned)]) == 0
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(tuned), AutoTokenizer.from_pretrained(tuned)
    assert type(model) is DeCALForConditionalGeneration
    data = EvaluationDataset("own", [{"context": "Nora keeps bees.", "question": "Who?", "answers": ["Nora"]}] * 3)
    settings = EvaluationSettings(tasks=("question_answering", "reconstruction"), max_samples=2, context_tokens=8)
    report = evaluate_model(model, tokenizer, [data], settings, progress=False)
    assert {row.condition for row in report.rows} == {"no_context", "ratio=2"}
    assert report_markdown(report)
    with pytest.raises(ValueError, match="no teacher, no zero shot"):
        evaluate_model(
            model, tokenizer, [data], EvaluationSettings(tasks=("reconstruction",), zero_shot=True), progress=False
        )
