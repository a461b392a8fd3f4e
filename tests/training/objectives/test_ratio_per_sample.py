# SPDX-License-Identifier: Apache-2.0
"""`ratio_mode: per_sample`: rows of one batch at different ratios, for every objective that compresses."""

import pytest
import torch
import yaml

from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.training.arguments import DataArguments, parse_recipe
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.objectives.compression_trainer import CompressionTrainer
from context_compressors.training.objectives.distillation import DistillationTrainer
from context_compressors.training.objectives.joint_pretraining import JointDataset, JointPretrainingTrainer
from context_compressors.training.train import build_trainer

RATIOS = [2, 4]
TRAINERS = {"compressed": CompressionTrainer, "distillation": DistillationTrainer, "joint": JointPretrainingTrainer}
OBJECTIVES = {"compressed": "compression"}


@pytest.fixture(scope="module")
def datasets(tokenizer):
    questions = [{"generated": True, "tasks": ["question_answering", "reconstruction"], "weight": 1}]
    documents = [{"generated": True, "tasks": ["reconstruction", "continuation"], "weight": 1}]
    rows = CompressionDataset(
        DataArguments(sources=questions, max_context_tokens=60, max_target_tokens=64), tokenizer, 24
    )
    joint = JointDataset(
        DataArguments(sources=documents, min_document_tokens=24, max_document_tokens=80), tokenizer, 24
    )
    return {"compressed": rows, "distillation": rows, "joint": joint}


@pytest.fixture
def make_trainer(datasets, tokenizer, compressor, make_config):
    def make(mode, model=None, with_ratios=True, **fields):
        collator = CompressionCollator.from_tokenizer(
            tokenizer, mode=mode, ratios=RATIOS if with_ratios else None, with_metadata=True
        )
        return TRAINERS[mode](
            model=compressor if model is None else model,
            args=make_config(objective=OBJECTIVES.get(mode, mode), ratio_mode="per_sample", **fields),
            train_dataset=datasets[mode].as_dataset(),
            processing_class=tokenizer,
            data_collator=collator,
        )

    return make


@pytest.fixture
def icae(base_folder):
    torch.manual_seed(0)
    return ICAEForCausalLM.from_base(base_folder, compression_ratios=RATIOS, chunk_size=16, encoder_lora={"rank": 4})


def test_a_ratio_tells_nothing_of_an_answer(compressor, tokenizer):
    """Rows as TRL has them, without ids, of which many have the same answer."""
    rows = [
        {"context": f"Berth {n} is red.", "prompt": f"Is {n} red?", "completion": "yes" if n % 2 else "no"}
        for n in range(400)
    ]
    collator = CompressionCollator.from_model(compressor, tokenizer)
    ratios = collator(rows)["ratio"]
    assert collator.ratios == list(compressor.config.compression_ratios)
    assert ratios.equal(collator(rows)["ratio"])
    for start in (0, 1):
        of_answer = ratios[start::2]
        for ratio in collator.ratios:
            share = float((of_answer == ratio).float().mean())
            assert share == pytest.approx(1 / len(collator.ratios), abs=0.12), (start, ratio)
    assert "ratio" not in CompressionCollator.from_model(compressor, tokenizer, ratios=None)(rows[:2])
    assert set(CompressionCollator.from_model(compressor, tokenizer, ratios=[4])(rows)["ratio"].tolist()) == {4}


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("mode", TRAINERS)
@pytest.mark.parametrize("method", ["mean_pooling", "icae"])
def test_loss_and_gradients_are_those_of_each_row_at_its_own_ratio(mode, method, make_trainer, datasets, icae):
    trainer = make_trainer(mode, model=icae if method == "icae" else None)
    model = trainer.model.train()
    examples = [datasets[mode][index] for index in range(6)]
    batch = trainer.data_collator(examples)
    assert set(batch["ratio"].tolist()) == set(RATIOS)
    # A divisor that does not depend on the batch; distillation takes the mean over rows.
    count = torch.tensor([100.0, 70.0] if mode == "joint" else 100.0)
    loss = trainer.compute_loss(model, batch, num_items_in_batch=count)
    loss.backward()
    found, expected = gradients(model), torch.zeros(())
    for example in examples:
        row = trainer.data_collator([example])
        trainer.args.ratio_mode = "all"
        trainer.step_ratios = lambda row=row: row["ratio"].tolist()
        part = trainer.compute_loss(model, row, num_items_in_batch=count)
        part = part / len(examples) if mode == "distillation" else part
        part.backward()
        expected = expected + part.detach()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-4, atol=1e-5)
    by_row = gradients(model)
    assert set(found) == set(by_row)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, by_row[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mode", TRAINERS)
def test_a_run_logs_mixed_ratios_and_evaluates_each(mode, make_trainer, datasets):
    trainer = make_trainer(mode, max_steps=2)
    trainer.train()
    assert any(any("mixed_ratios" in name for name in entry) for entry in trainer.state.log_history)
    metrics = trainer.evaluate(datasets[mode].as_dataset().select(range(4)))
    for ratio in RATIOS:
        assert any(name.endswith(f"_ratio_{ratio}") for name in trainer.state.log_history[-1]), metrics


def test_draws_do_not_depend_on_batches_or_processes_and_differ_by_index_and_seed(datasets, tokenizer):
    rows = datasets["compressed"]
    examples = [rows[index] for index in range(24)]

    def draw(batches, seed=0):
        collator = CompressionCollator.from_tokenizer(tokenizer, ratios=RATIOS, seed=seed)
        return torch.cat([collator(batch)["ratio"] for batch in batches])

    whole = draw([examples])
    assert draw([examples[start : start + 4] for start in range(0, 24, 4)]).equal(whole)
    # What two processes get of every batch of four.
    first, second = ([examples[i] for i in range(24) if i % 4 // 2 == process] for process in (0, 1))
    both = torch.empty_like(whole)
    is_second = torch.arange(24) % 4 // 2 == 1
    both[~is_second], both[is_second] = draw([first]), draw([second])
    assert both.equal(whole)
    assert not draw([examples], seed=1).equal(whole)
    # One row that a data set comes back to is drawn anew.
    again = [{**examples[0], "index": index} for index in range(20)]
    assert set(draw([again]).tolist()) == set(RATIOS)


@pytest.mark.slow
def test_a_recipe_draws_with_its_seed(base_folder, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    source = {"generated": True, "tasks": ["reconstruction"], "weight": 1}
    fields = {"method_config": {"compression_ratios": RATIOS}, "ratio_mode": "per_sample", "sources": [source]}
    recipe.write_text(yaml.safe_dump({"base": str(base_folder), "max_steps": 4, "use_cpu": True, **fields}))
    drawn = []
    for seed in (1, 1, 2):
        trainer = build_trainer(*parse_recipe([str(recipe), "--seed", str(seed), "--output_dir", str(tmp_path)]))
        examples = [{**trainer.train_dataset[0], "index": index} for index in range(32)]
        drawn.append(trainer.data_collator(examples)["ratio"].tolist())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
def test_batches_without_ratios_are_refused(make_trainer, datasets):
    trainer = make_trainer("compressed", with_ratios=False)
    with pytest.raises(ValueError, match=r"'per_sample' needs a ratio in each row"):
        trainer.train()


def test_contexts_in_the_encoders_own_tokens(tokenizer):
    collator = CompressionCollator(2, 0, context_start_ids=[7], encoder_start_ids=[9])
    example = {"context_ids": [3, 4], "encoder_context_ids": [5], "prompt_ids": [6], "target_ids": [1]}
    assert collator([example])["context_input_ids"].tolist() == [[9, 5]]
    whole = CompressionCollator(2, 0, context_start_ids=[7], encoder_start_ids=[9], mode="full_context")
    assert whole([example])["input_ids"].tolist() == [[0, 3, 4, 6, 1]]
    del example["encoder_context_ids"]
    with pytest.raises(ValueError, match="examples need encoder_context_ids"):
        collator([example])
    same = CompressionCollator.from_tokenizer(tokenizer, context_tokenizer=tokenizer)
    assert same.encoder_start_ids == [tokenizer.bos_token_id]
