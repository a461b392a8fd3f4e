# SPDX-License-Identifier: Apache-2.0
"""Data, collator, trainer and recipes of encoder-decoders."""

import copy
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from tokenizers import processors
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

import context_compressors.training
from context_compressors import DeCALConfig, DeCALForConditionalGeneration
from context_compressors.data.task_tokens import add_sentinel_tokens
from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.report_tables import report_markdown
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.parts.text_ids import context_end_ids
from context_compressors.training.arguments import DataArguments, parse_recipe
from context_compressors.training.loading import load_compressor, new_encoder_decoder
from context_compressors.training.objectives.denoising import DenoisingDataset, SpanCorruption, SpanCorruptionCollator
from context_compressors.training.objectives.encoder_decoder import Seq2SeqCollator, Seq2SeqCompressionTrainer
from context_compressors.training.resume import changed_config
from context_compressors.training.train import main

RECIPES = Path(context_compressors.training.__file__).parent / "recipes"
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
    assert len({tuple(example["token_ids"]) for example in examples}) == 12
    again = DenoisingDataset(arguments, tokenizer, 12)
    assert again[7] == examples[7]


def test_without_a_number_every_row_starts_an_example_once(tokenizer, tmp_path):
    for name, size in (("a", 9), ("b", 4)):
        table = pyarrow.table({"text": [f"{name} {row} bells " * 9 for row in range(size)]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    sources = [{"path": f"{name}.parquet", "tasks": ["continuation"]} for name in "ab"]
    data = DenoisingDataset(DataArguments(sources=sources, data_dir=str(tmp_path)), tokenizer)
    ids = [data[index]["id"] for index in range(len(data))]
    assert sorted(ids) == [f"a.parquet/{row}" for row in range(9)] + [f"b.parquet/{row}" for row in range(4)]
    assert ids != sorted(ids, key=lambda name: name[0])


def test_questions_are_no_text_to_denoise(tokenizer):
    with pytest.raises(
        ValueError, match=r"must be among \['continuation', 'reconstruction'\], got.*question_answering"
    ):
        DenoisingDataset(DataArguments(sources=[{**SOURCE, "tasks": ["question_answering"]}]), tokenizer, 3)
    with pytest.raises(ValueError, match="inputs_length must be at least 3, got 2"):
        DenoisingDataset(DataArguments(sources=[SOURCE], max_context_tokens=2, min_context_tokens=1), tokenizer, 3)


def test_empty_texts_alone_are_an_error(tokenizer, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["", ""]}), tmp_path / "texts.parquet")
    data = DenoisingDataset(
        DataArguments(
            sources=[{"path": "texts.parquet", "tasks": ["continuation"]}],
            data_dir=str(tmp_path),
        ),
        tokenizer,
    )
    with pytest.raises(ValueError, match="all rows are empty"):
        data[0]


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
    with pytest.raises(ValueError, match="questions_per_example must be 1"):
        collator([{**EXAMPLE, "more_turns": [([1], [2])]}])


def test_what_a_tokenizer_puts_behind_a_document(tokenizer):
    assert context_end_ids(tokenizer) == []
    t5_like = copy.deepcopy(tokenizer)
    t5_like.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    assert context_end_ids(t5_like) == [tokenizer.eos_token_id]


def test_a_new_model_is_as_large_as_its_tokenizer_with_sentinels(model, own_tokenizer):
    assert model.config.vocab_size == len(own_tokenizer)
    assert max(add_sentinel_tokens(own_tokenizer)) == len(own_tokenizer) - 1
    # Where there is a BOS, questions start with it, and so does the decoder.
    assert model.config.decoder_start_token_id == own_tokenizer.bos_token_id
    config = model.config.decoder_config
    assert (config.relative_attention_num_buckets, config.relative_attention_max_distance) == (128, 512)
    assert (config.eos_token_id, config.pad_token_id) == (own_tokenizer.eos_token_id, own_tokenizer.pad_token_id)


# --- the trainer ---


def test_the_loss_is_that_of_the_stock_form_at_every_ratio(model, own_tokenizer, make_config):
    """What the trainer computes from its batch is T5's loss of corrupted text and target, summed over the ratios."""
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


def test_bounds_of_other_methods_are_refused(model, make_config):
    with pytest.raises(ValueError, match="needs context_mode 'compressed', got 'no_context'"):
        Seq2SeqCompressionTrainer(model=model, args=make_config(context_mode="no_context"))


# --- recipes ---


def small(tmp_path, base_folder, **fields) -> list[str]:
    """One more recipe that brings a run down to what trains in a second."""
    recipe = {
        "sources": [SOURCE],
        "max_context_tokens": 40,
        "max_target_tokens": 41,
        "min_context_tokens": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "group_batches": 1,
        "max_steps": 2,
        "warmup_steps": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        "lr_scheduler_kwargs": {},
        "dtype": "float32",
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        **fields,
    }
    file = tmp_path / f"small_{len(list(tmp_path.iterdir()))}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return [str(file)]


def new(tmp_path, base_folder, **fields) -> list[str]:
    return small(tmp_path, base_folder, tokenizer=str(base_folder), model_config=TINY, **fields)


@pytest.mark.slow
def test_pretraining_then_questions_then_answers(tmp_path, base_folder):
    """The whole way of the small recipes: denoise from nothing, fine-tune the checkpoint, evaluate it."""
    pretrained, tuned = tmp_path / "pretrained", tmp_path / "tuned"
    assert main(["embedded/decal.yaml", *new(tmp_path, base_folder), "--output_dir", str(pretrained)]) == 0
    log = json.loads((pretrained / "training_summary.json").read_text())["log"]
    assert any("token_accuracy_ratio_2" in entry for entry in log)
    assert not (pretrained / "training_args.bin").exists()
    questions = [{**SOURCE, "tasks": ["question_answering"]}]
    recipe = small(tmp_path, base_folder, sources=questions)
    arguments = ["embedded/decal.yaml", "decal/small/fine_tuning.yaml", *recipe, "--checkpoint", str(pretrained)]
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


def test_a_question_in_the_encoder_is_evaluated_there(model, own_tokenizer):
    model.config.question_placement = "encoder"
    seen = []
    compress = model.compress
    model.compress = lambda ids, mask, **kwargs: seen.append(mask.sum(dim=1).tolist()) or compress(ids, mask, **kwargs)
    data = EvaluationDataset("own", [{"context": "Nora keeps bees.", "question": "Who?", "answers": ["Nora"]}])
    settings = EvaluationSettings(tasks=("question_answering",))
    evaluate_model(model, own_tokenizer, [data], settings, progress=False)
    (with_context,), (without,) = seen
    context = len(own_tokenizer("Nora keeps bees.").input_ids)
    assert with_context == without + context
    assert without > 0


def test_an_encoder_decoder_s_only_bound_is_scored_alone(model, own_tokenizer):
    data = EvaluationDataset("own", [{"context": "Nora keeps bees.", "question": "Who?", "answers": ["Nora"]}])
    tasks = ("question_answering", "reconstruction")
    settings = [EvaluationSettings(tasks=tasks, bounds_only=bounds_only) for bounds_only in (True, False)]
    alone, all_of_them = (evaluate_model(model, own_tokenizer, [data], each, progress=False) for each in settings)
    assert [(row.task, row.condition) for row in alone.rows] == [(task, "no_context") for task in tasks]
    assert [row.metrics for row in alone.rows] == [
        row.metrics for row in all_of_them.rows if row.condition == "no_context"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in (RECIPES / "decal" / "models").glob("*.yaml")))
def test_every_model_of_the_paper_trains(name, tmp_path, base_folder):
    baseline, output = tmp_path / "baseline", tmp_path / "output"
    recipes = ["embedded/decal.yaml", f"decal/models/{name}.yaml"]
    if name in ("ccproxy", "fine_tune_only"):
        first = ["embedded/decal.yaml", "decal/models/t5.yaml", *new(tmp_path, base_folder)]
        main([*first, "--output_dir", str(baseline)])
    if name == "fine_tune_only":
        questions = small(tmp_path, base_folder, sources=[{**SOURCE, "tasks": ["question_answering"]}])
        recipes = ["embedded/decal.yaml", "decal/small/fine_tuning.yaml", f"decal/models/{name}.yaml", *questions]
        main([*recipes, "--base", str(baseline), "--output_dir", str(output)])
    elif name == "ccproxy":
        tasks = [{**SOURCE, "tasks": ["reconstruction", "continuation"]}]
        recipes += ["decal/small/autoencoding.yaml", *small(tmp_path, base_folder, sources=tasks)]
        main([*recipes, "--base", str(baseline), "--output_dir", str(output)])
    else:
        main([*recipes, *new(tmp_path, base_folder), "--output_dir", str(output)])
    config = DeCALConfig.from_pretrained(output)
    expected = yaml.safe_load((RECIPES / "decal" / "models" / f"{name}.yaml").read_text())["method_config"]
    for field, value in expected.items():
        found = getattr(config, field)
        assert found == (tuple(value) if isinstance(value, list) else value)


def test_the_paper_recipe_holds_section_4_1(tmp_path):
    model, data, args = parse_recipe(["decal/decal.yaml", "--output_dir", str(tmp_path), "--bf16", "false"])
    assert (args.objective, model.method, model.dtype) == ("denoising", "decal", "float32")
    assert args.max_steps * args.per_device_train_batch_size * 8 == 128_000_000
    assert (args.warmup_steps, args.learning_rate, args.lr_scheduler_type) == (10_000, 0.01, "inverse_sqrt")
    assert (args.optimizer, args.max_grad_norm, args.weight_decay) == ("adafactor", 0, 0)
    assert [(source.streaming, source.max_samples) for source in data.parsed_sources()] == [(True, 10_000_000)]
    corruption = SpanCorruption(data.noise_density, data.mean_span_length)
    assert (data.noise_density, data.mean_span_length) == (0.15, 3.0)
    assert corruption.lengths(corruption.raw_length(data.max_context_tokens)) == (1024, 229)
    config = DeCALConfig(decoder_config=model.model_config, **model.method_config)
    t5 = config.decoder_config
    assert (t5.relative_attention_num_buckets, t5.relative_attention_max_distance) == (128, 512)
    with torch.device("meta"):
        count = DeCALForConditionalGeneration(config).num_parameters()
    # T5 v1.1 Large has 783,150,080 parameters, with a quarter of the buckets and without latents.
    assert count == 783_150_080 + 2 * 3 * 32 * 16 + 2048


def test_every_data_set_of_tables_2_and_3_has_a_recipe(tmp_path):
    found = {}
    for path in (RECIPES / "decal" / "data").glob("*.yaml"):
        task = "question_answering" if path.stem == "triviaqa" else "summarisation"
        files = ["decal/decal.yaml", "decal/fine_tuning.yaml", f"decal/{task}.yaml", f"decal/data/{path.name}"]
        _, data, args = parse_recipe([*files, "--checkpoint", "C", "--output_dir", str(tmp_path), "--bf16", "false"])
        assert [source.tasks for source in data.parsed_sources()] == [(task,)]
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 8 == 128
        found[path.stem] = args.max_steps * 128
    # CNN / DailyMail and HotpotQA are those of the stages themselves.
    assert found == {"arxiv": 12_000_000, **dict.fromkeys(("pubmed", "mediasum", "triviaqa"), 6_000_000)}


@pytest.mark.parametrize("task", ["question_answering", "summarisation"])
def test_fine_tuning_holds_section_4_2_1(task, tmp_path):
    files = ["decal/decal.yaml", "decal/fine_tuning.yaml", f"decal/{task}.yaml"]
    model, data, args = parse_recipe([*files, "--checkpoint", "C", "--output_dir", str(tmp_path), "--bf16", "false"])
    assert (args.objective, data.max_context_tokens, data.overlong_contexts) == ("compression", 4096, "truncate")
    assert args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps * 8 == 6_000_000
    # A bias of T5 over 6,144 places has 16 heads.
    assert (args.per_device_train_batch_size, args.gradient_checkpointing) == (1, True)
    assert (args.optimizer, args.learning_rate, args.max_grad_norm) == ("adafactor", 1e-3, 0)
    assert [source.tasks for source in data.parsed_sources()] == [(task,)]
    assert (model.checkpoint, model.method_config, model.model_config) == ("C", None, None)
    placement = {"question_placement": "encoder"} if task == "question_answering" else {}
    assert model.checkpoint_config == {"decoder_config": {"dropout_rate": 0.1}, **placement}
    # "The (first) answer is the target" (section 4.2.1).
    assert data.first_answer == (task == "question_answering")


def test_compression_may_start_in_fine_tuning(own_tokenizer, tmp_path):
    fields, loading = {"compression": "none"}, {"dtype": torch.float32}
    baseline = new_encoder_decoder(DeCALForConditionalGeneration, TINY, fields, own_tokenizer, loading)
    baseline.save_pretrained(tmp_path / "baseline")
    files = ["decal/decal.yaml", "decal/fine_tuning.yaml", "decal/question_answering.yaml"]
    arguments = ["--base", str(tmp_path / "baseline"), "--output_dir", str(tmp_path / "output"), "--bf16", "false"]
    model_args, data, args = parse_recipe([*files, "decal/models/fine_tune_only.yaml", *arguments])
    assert (args.objective, data.parsed_sources()[0].tasks) == ("compression", ("question_answering",))
    config = load_compressor(model_args, own_tokenizer).config
    found = (config.compression, config.compression_ratios, config.question_placement)
    assert found == ("latents", (2,), "encoder")


def test_fine_tuning_goes_on_with_dropout(model, own_tokenizer, tmp_path):
    pretrained = str(tmp_path / "pretrained")
    model.save_pretrained(pretrained)
    files = ["decal/decal.yaml", "decal/fine_tuning.yaml", "decal/question_answering.yaml"]
    arguments = ["--checkpoint", pretrained, "--output_dir", str(tmp_path / "output"), "--bf16", "false"]
    built = load_compressor(parse_recipe([*files, *arguments])[0], own_tokenizer)
    assert built.config.question_placement == "encoder"
    before, after = (each.config.decoder_config.to_dict() for each in (model, built))
    changed = {name for name in before if before[name] != after[name]} - {"dtype", "_name_or_path"}
    assert (changed, after["dropout_rate"]) == ({"dropout_rate"}, 0.1)
    assert {module.p for module in built.modules() if isinstance(module, torch.nn.Dropout)} == {0.1}
    for name, parameter in model.named_parameters():
        assert built.get_parameter(name).equal(parameter), name


def test_a_model_s_own_configuration_changes_by_field(model):
    config = model.config
    changed = changed_config(config, {"decoder_config": {"dropout_rate": 0.1}})
    assert (config.decoder_config.dropout_rate, changed.decoder_config.dropout_rate) == (0.0, 0.1)
    assert changed.decoder_config.to_dict() == {**config.decoder_config.to_dict(), "dropout_rate": 0.1}
    with pytest.raises(ValueError, match=r"field of decoder_config: 'dropout'"):
        changed_config(config, {"decoder_config": {"dropout": 0.1}})
    with pytest.raises(ValueError, match=r"(?s)`decoder_config` is no .*'d_model'.*'8'"):
        changed_config(config, {"decoder_config": {"d_model": "8"}})


def test_autoencoding_holds_section_4_2_3(tmp_path):
    files = ["decal/decal.yaml", "decal/models/ccproxy.yaml", "decal/autoencoding.yaml"]
    model, data, args = parse_recipe([*files, "--base", "B", "--output_dir", str(tmp_path), "--bf16", "false"])
    assert args.max_steps * args.per_device_train_batch_size * 8 == 26_000_000
    assert (args.optimizer, args.learning_rate) == ("adafactor", 1e-3)
    assert [source.tasks for source in data.parsed_sources()] == [("reconstruction", "continuation")]
    assert (model.base, model.model_config) == ("B", None)
    config = DeCALConfig(**model.method_config)
    assert (config.latent_placement, config.latent_pooling, config.encoder_attention) == ("appended", False, "causal")
