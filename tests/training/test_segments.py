# SPDX-License-Identifier: Apache-2.0
"""AutoCompressor's objective, next tokens behind summaries, and LLoCO's, answers from stored memories."""

import json

import datasets
import pytest
import small_recipes
import torch
import yaml
from parameters import assert_same_gradients, disturb, gradients
from transformers import AutoModelForCausalLM

from context_compressors import AutoCompressorForCausalLM, cli
from context_compressors.data.sources import DataSource
from context_compressors.training.arguments import DataArguments, parse_recipe
from context_compressors.training.objectives.segments import SegmentCollator, SegmentDataset, SegmentTrainer
from context_compressors.training.train import build_trainer, main

LORA = {"rank": 4, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
NOTHING = datasets.Dataset.from_dict({"index": [0]})
CONTINUED = {"generated": True, "tasks": ["continuation"], "weight": 1}
SMALL = {**small_recipes.SMALL, "max_document_tokens": 64, "warmup_steps": 0}


@pytest.fixture
def autocompressor(base_folder):
    torch.manual_seed(0)
    fields = {"compression_ratios": [8], "chunk_size": 16, "encoder_lora": LORA, "dtype": torch.float32}
    return disturb(AutoCompressorForCausalLM.from_base(base_folder, **fields))


@pytest.fixture
def trainer(autocompressor, tokenizer, make_config):
    args = make_config(objective="segments")
    return SegmentTrainer(model=autocompressor, args=args, train_dataset=NOTHING, processing_class=tokenizer)


@pytest.fixture
def batch():
    """Two rows of 40 tokens, in segments of 12 and 8, and of 5 and 15."""
    rows = torch.randint(5, 400, (2, 40), generator=torch.Generator().manual_seed(3))
    labels = rows.clone()
    labels[:, [0, 20]] = -100
    lengths = [[12, 8], [5, 15]]
    return {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": labels, "segment_lengths": lengths}


def test_gradient_crosses_exactly_one_border(trainer, batch):
    """From a segment to the one before it in its substep, and to no embedding of an earlier substep."""
    model, leaves = trainer.model.train(), []

    def follow(module, inputs, output):
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    model.get_input_embeddings().register_forward_hook(follow)
    # Nothing of a substep's first segment is learned: what reaches it comes through its summary.
    labels = torch.full_like(batch["labels"], -100)
    for span in (slice(13, 20), slice(26, 40)):
        labels[:, span] = batch["labels"][:, span]
    losses = [trainer._step_loss(part, None) for part in trainer._parts({**batch, "labels": labels})]
    losses[1].backward()
    assert [leaf.grad is None for leaf in leaves] == [True, True, False, False]
    assert all(leaf.grad.any() for leaf in leaves[2:])
    losses[0].backward()
    assert all(leaf.grad.any() for leaf in leaves[:2])


def naive_loss(model, batch):
    """Row by row: the joined states of a substep's segments predict its tokens."""
    table, slots, losses = model.get_input_embeddings(), [[] for _ in batch["input_ids"]], []
    for row, ids in enumerate(batch["input_ids"]):
        start = 0
        for lengths in batch["segment_lengths"]:
            slots[row], states = [part.detach() for part in slots[row]], []
            for length in lengths:
                segment = table(ids[start : start + length])
                parts = torch.cat([*slots[row], segment, model.model.memory_embeddings])
                with model.model._adapter(model.model.language_model, "encoder"):
                    found = model.model.language_model(inputs_embeds=parts[None]).last_hidden_state[0]
                states.append(found[-length - 2 : -2])
                slots[row].append(found[-2:])
                start += length
            logits = model.lm_head(torch.cat(states))[:-1]
            targets = ids[start - sum(lengths) + 1 : start]
            losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return torch.stack(losses).sum() / (2 * (40 - 2))


def test_each_substep_has_its_backward_pass_and_the_sum_is_that_of_a_loop(trainer, batch, monkeypatch):
    model = trainer.model.train()
    trainer.args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = 1
    naive = naive_loss(model, batch)
    naive.backward()
    expected = gradients(model)
    trainer.compute_loss(model, dict(batch)).backward()
    at_once = gradients(model)
    passes, backward = [], trainer.accelerator.backward
    monkeypatch.setattr(trainer.accelerator, "backward", lambda *a, **k: passes.append(1) or backward(*a, **k))
    loss = trainer.training_step(model, dict(batch))
    torch.testing.assert_close(loss, naive.detach(), atol=1e-5, rtol=1e-5)
    assert len(passes) == 2
    assert any("memory_embeddings" in name for name in expected)
    for found in (gradients(model), at_once):
        assert_same_gradients(found, expected)
    with torch.no_grad():
        again = trainer.compute_loss(model, dict(batch))
    torch.testing.assert_close(again, naive.detach(), msg="a batch starts without the summaries of the one before")


def test_blocks_are_one_stream_cut_at_random_places_that_a_batch_shares(tokenizer):
    source = DataSource(generated=True, tasks=("continuation",), weight=1.0)
    data = DataArguments(sources=[source.__dict__], max_document_tokens=50)
    blocks = SegmentDataset(data, tokenizer, num_examples=6, seed=1)
    examples = [blocks[index] for index in range(6)]
    assert {len(example["token_ids"]) for example in examples} == {49}, "BOS is the first of the 50"
    collator = SegmentCollator.from_tokenizer(tokenizer, longest_segment=20, seed=1)
    batch = collator(examples[:2])
    assert batch["input_ids"].shape == (2, 50)
    assert batch["input_ids"][:, 0].tolist() == [tokenizer.bos_token_id] * 2
    assert (batch["labels"] == -100).nonzero()[:, 1].tolist() == [0, 25, 0, 25]
    found = [collator([example])["segment_lengths"] for example in examples]
    assert found[0] == batch["segment_lengths"]
    assert len({str(lengths) for lengths in found}) > 3
    for lengths in found:
        assert [sum(substep) for substep in lengths] == [25, 25]
        assert all(5 <= length <= 20 for substep in lengths for length in substep)
    equal = SegmentCollator.from_tokenizer(tokenizer, is_random=False, substeps=1, segments_per_substep=5)
    assert equal(examples[:1])["segment_lengths"] == [[10] * 5]
    with pytest.raises(ValueError, match=r"25 tokens cannot be cut into 2 segments of 2 to 12 tokens"):
        SegmentCollator.from_tokenizer(tokenizer, longest_segment=12)(examples[:1])


@pytest.mark.slow
def test_memories_of_a_compressor_trained_in_segments_are_read_by_lloco(base_folder, tmp_path):
    """From the recipes: every trained parameter moves and nothing else; a file and its context give one loss."""
    config = {"compression_ratios": [8], "chunk_size": 16, "encoder_lora": {"rank": 4, "dropout": 0.1}}
    evaluation = {"eval_sources": [{**CONTINUED, "split": "test"}], "num_eval_examples": 2, "eval_strategy": "steps"}
    first = {**SMALL, "base": str(base_folder), "method_config": config, "sources": [CONTINUED], **evaluation}
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(first))
    one, two = tmp_path / "one", tmp_path / "two"
    main(["autocompressor/llama2_7b.yaml", str(tmp_path / "first.yaml"), "--output_dir", str(one)])
    log = json.loads((one / "training_summary.json").read_text())["log"]
    assert any("eval_loss_ratio_8" in entry for entry in log)
    compressor = AutoCompressorForCausalLM.from_pretrained(one)
    base = AutoModelForCausalLM.from_pretrained(base_folder).state_dict()
    for name, parameter in compressor.named_parameters():
        if parameter.requires_grad:
            start = compressor.get_input_embeddings().weight[compressor.config.eos_token_id]
            assert parameter.any() if "lora" in name else not parameter.allclose(start.expand_as(parameter)), name
        else:
            assert parameter.equal(base[name.replace("language_model.", "").replace(".base_layer", "")]), name

    stories = [
        f"{name} keeps {count} hives of bees behind the mill. " * 3 for name, count in (("Nora", 7), ("Ole", 3))
    ]
    rows = [{"context": story, "question": q, "answers": ["bees"]} for story in stories for q in ("What?", "Who?")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    memories = tmp_path / "memories"
    cli.main(["compress", str(one), str(tmp_path / "rows.jsonl"), "--by-document", "--output", str(memories)])
    assert len(list(memories.glob("*.safetensors"))) == 2, "one for each distinct document"
    second = {**SMALL, "sources": [{"path": str(tmp_path / "rows.jsonl"), "tasks": ["question_answering"]}]}
    (tmp_path / "second.yaml").write_text(yaml.safe_dump(second))
    files = ["lloco/lloco.yaml", str(tmp_path / "second.yaml")]
    stage = [*files, "--checkpoint", str(one), "--output_dir", str(two)]
    read = [*stage, "--memories", str(memories)]
    stored, fresh = (build_trainer(*parse_recipe(options)) for options in (read, stage))
    losses = []
    for trainer in (stored, fresh):
        batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
        assert ("memory" in batch) == (trainer is stored)
        fresh.model.load_state_dict(stored.model.state_dict())
        trainer.model.train()
        torch.manual_seed(0)
        losses.append(trainer.compute_loss(trainer.model, batch))
    assert losses[0].equal(losses[1])
    assert losses[0].requires_grad
    main(read)
    reader = AutoCompressorForCausalLM.from_pretrained(two)
    assert reader.model_id == compressor.model_id
    weights = compressor.state_dict()
    for name, parameter in reader.named_parameters():
        assert parameter.requires_grad == (name not in weights) == (".decoder." in name), name
        assert parameter.any() if parameter.requires_grad else parameter.equal(weights[name]), name
    with pytest.raises(ValueError, match="memories need a stage that trains nothing that makes them"):
        build_trainer(*parse_recipe([*read, "--checkpoint_config", "null"]))
    short = build_trainer(*parse_recipe([*read, "--max_context_tokens", "32"]))
    with pytest.raises(ValueError, match=r"is a memory of .* tokens, and the context"):
        short.data_collator([short.train_dataset[0]])
    next(memories.glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match="--by-document"):
        stored.data_collator([stored.train_dataset[index] for index in range(4)])
