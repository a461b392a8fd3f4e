# SPDX-License-Identifier: Apache-2.0
"""Recipes of memory-token methods: the papers' tables, and the way from pretraining to questions."""

import itertools
import json
from pathlib import Path

import pytest
import small_recipes
import torch
import yaml
from small_recipes import parse
from transformers import AutoTokenizer, LlamaConfig
from transformers.optimization import get_scheduler

import context_compressors.training
from context_compressors.modeling.modeling_five_hundred_x import FiveHundredXForCausalLM, FiveHundredXModel
from context_compressors.modeling.modeling_icae import ICAEForCausalLM, ICAEModel
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer, main

RECIPES = Path(context_compressors.training.__file__).parent / "recipes"
CLASSES = {"icae": ICAEModel, "five_hundred_x": FiveHundredXModel}
LAYOUTS = ("default", "uniform", "enhanced")
EPL_BASES = {
    "llama3.2_1b": ("meta-llama/Llama-3.2-1B", 2040),
    "llama3.2_3b": ("meta-llama/Llama-3.2-3B", 2040),
    "llama3.1_8b": ("meta-llama/Llama-3.1-8B", 4080),
}
# hidden size, key/value width, layers, intermediate size.
SHAPES = {
    "llama3.2_1b": (2048, 512, 16, 8192),
    "llama3.2_3b": (3072, 1024, 28, 8192),
    "llama3.1_8b": (4096, 1024, 32, 14336),
}


def meta_model(method, base, method_config):
    """The backbone of a recipe on a base of the real shape, without memory for its weights."""
    hidden, key_values, layers, intermediate = SHAPES[base]
    heads = hidden // (64 if base == "llama3.2_1b" else 128)
    decoder = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads * key_values // hidden,
        max_position_embeddings=131072,
    )
    with torch.device("meta"):
        return CLASSES[method](CLASSES[method].config_class(decoder_config=decoder, **method_config))


def test_every_base_and_layout_of_the_paper_has_a_recipe():
    assert {path.stem for path in (RECIPES / "epl" / "bases").glob("*.yaml")} == set(EPL_BASES)
    assert {path.stem for path in (RECIPES / "epl" / "layouts").glob("*.yaml")} == set(LAYOUTS)


# A layout changes one field, on any base.
EPL_RUNS = [
    *itertools.product(CLASSES, ["enhanced"], EPL_BASES),
    *itertools.product(CLASSES, ("default", "uniform"), list(EPL_BASES)[:1]),
]


@pytest.mark.parametrize(("method", "layout", "base"), EPL_RUNS)
def test_epl_pretraining_holds_table_8(method, layout, base, tmp_path):
    files = [f"epl/{method}.yaml", f"epl/layouts/{layout}.yaml", f"epl/bases/{base}.yaml", "epl/pretraining.yaml"]
    model, data, args = parse(*files, folder=tmp_path)
    assert (args.optim, args.adam_beta1, args.adam_beta2, args.weight_decay) == ("adamw_torch", 0.9, 0.95, 0.1)
    assert (args.learning_rate, args.warmup_steps, args.max_steps, args.max_grad_norm) == (1e-4, 300, 20_000, 2.0)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 16
    assert (args.objective, args.alpha, args.context_mode) == ("joint", 0.5, "compressed")
    assert (model.base, data.max_document_tokens) == EPL_BASES[base]
    assert data.min_document_tokens == 510
    assert model.method == method
    config = meta_model(method, base, model.method_config).config
    assert config.position_layout == layout
    assert (config.compression_ratios, config.chunk_size, config.num_memory_tokens) == ((5,), 510, 102)
    # Section 3.1.1 appends all memory tokens to every chunk: those of SQuAD's mean text of 137 tokens, too.
    assert [config.chunk_slots(length, 5) for length in (510, 137)] == [102, 102]
    lora = {"rank": 128, "alpha": 256, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
    assert config.encoder_lora == lora
    assert config.decoder_lora is None
    assert list(config.task_token_ids) == ["[AE]", "[LM]"]


@pytest.mark.parametrize(("method", "base"), list(itertools.product(CLASSES, EPL_BASES)))
def test_epl_fine_tuning_holds_table_8(method, base, tmp_path):
    files = [f"epl/{method}.yaml", f"epl/bases/{base}.yaml", "epl/fine_tuning.yaml"]
    model, data, args = parse(*files, folder=tmp_path)
    assert (args.optim, args.adam_beta1, args.adam_beta2, args.weight_decay) == ("adamw_torch", 0.9, 0.95, 0.1)
    assert (args.learning_rate, args.warmup_steps, args.max_steps, args.max_grad_norm) == (5e-5, 300, 20_000, 2.0)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 16
    assert args.objective == "compression"
    # Both come with the checkpoint of the pretraining.
    assert (model.method, model.base, model.method_config) == (method, None, None)
    assert (data.prompts, data.context_prefix, data.first_answer) == ("memory_tokens", "### Context:\n", True)
    assert [source.tasks for source in data.parsed_sources()] == [("question_answering",)]


def test_learning_rate_is_constant_after_the_warmup(tmp_path):
    _, _, args = parse("epl/pretraining.yaml", folder=tmp_path)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, args.max_steps)
    assert [scheduler.lr_lambdas[0](step) for step in (150, 300, 19_999)] == [0.5, 1.0, 1.0]


def test_trainable_parameters_of_epl(tmp_path):
    """ICAE on Llama-3.2-1B: LoRA on q and v of 16 layers, 102 memory tokens, [AE] and [LM]."""
    model, *_ = parse("epl/icae.yaml", "epl/layouts/enhanced.yaml", "epl/bases/llama3.2_1b.yaml", folder=tmp_path)
    parameters = dict(meta_model("icae", "llama3.2_1b", model.method_config).named_parameters())
    trainable = {name: parameter.numel() for name, parameter in parameters.items() if parameter.requires_grad}
    assert sum(count for name, count in trainable.items() if "lora" in name) == 13_631_488
    assert trainable["memory_embeddings"] == 208_896
    assert trainable["task_embeddings"] == 4_096
    assert sum(trainable.values()) == 13_844_480


@pytest.mark.parametrize("bound", ["full_context", "no_context"])
@pytest.mark.parametrize("base", EPL_BASES)
def test_bounds_train_the_task_tokens_only(bound, base, tmp_path):
    model, _, args = parse(f"epl/{bound}.yaml", f"epl/bases/{base}.yaml", "epl/pretraining.yaml", folder=tmp_path)
    assert (args.objective, args.context_mode, args.learning_rate) == ("joint", bound, 1e-4)
    parameters = meta_model(model.method, base, model.method_config).named_parameters()
    assert [name for name, parameter in parameters if parameter.requires_grad] == ["task_embeddings"]
    model, _, args = parse(f"epl/{bound}.yaml", f"epl/bases/{base}.yaml", "epl/fine_tuning.yaml", folder=tmp_path)
    assert (args.objective, args.context_mode, model.base) == ("compression", bound, None)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "base"), list(itertools.product(CLASSES, ("llama3.2_1b", "llama3.2_3b"))))
def test_comprexit_baselines_hold_its_table_8(method, base, tmp_path):
    files = [f"comprexit_baselines/{method}.yaml", f"comprexit/bases/{base}.yaml"]
    model, data, args = parse(*files, "comprexit/pretraining.yaml", folder=tmp_path)
    assert (model.base, model.dtype) == (EPL_BASES[base][0], "bfloat16")
    assert (args.learning_rate, args.max_grad_norm, args.weight_decay) == (3e-5, 20.0, 0.0)
    # 1e9 tokens in samples of 512 + 128, a batch of 2,048 on four devices.
    assert args.max_steps == 10**9 // (2048 * 640) == 762
    assert args.warmup_steps == round(0.05 * 762)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 4 == 2048
    assert (data.max_context_tokens + 1, data.max_target_tokens, data.pack_texts) == (512, 128, True)
    assert [source.tasks for source in data.parsed_sources()] == [("continuation",)]
    config = meta_model(method, base, model.method_config).config
    assert (config.compression_ratios, config.chunk_size, config.num_memory_tokens) == ((4,), 512, 128)
    assert (config.memory_tokens, config.position_layout) == ("fixed", "default")
    lora = {"rank": 128, "alpha": 32, "dropout": 0.05, "target_modules": "all-linear"}
    assert config.encoder_lora == lora
    model, data, args = parse(*files, "comprexit/fine_tuning.yaml", folder=tmp_path)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 4 == 512
    assert (args.max_steps, args.num_train_epochs, model.base, model.method_config) == (-1, 1, None, None)
    # The authors' scripts, of which the paper has no table.
    assert (args.learning_rate, args.warmup_steps) == (1e-4, 0)


SMALL = {
    **small_recipes.SMALL,
    "method_config": {"chunk_size": 16, "encoder_lora": {"rank": 2}},
    "warmup_steps": 0,
    "min_document_tokens": 24,
    "max_document_tokens": 80,
    "max_context_tokens": 60,
}


@pytest.fixture
def small(tmp_path, base_folder):
    """Recipes that bring a paper's settings down to what trains in a second."""

    def write(name, tasks, **fields):
        sources = [{"generated": True, "tasks": tasks, "weight": 1}]
        evaluation = {
            "eval_sources": [{**sources[0], "split": "test"}],
            "num_eval_examples": 2,
            "eval_strategy": "steps",
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**SMALL, **evaluation, "sources": sources, **fields}))
        return str(file)

    documents = ["reconstruction", "continuation"]
    return {
        "documents": write("documents", documents, base=str(base_folder)),
        "questions": write("questions", ["question_answering"], method_config=None),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "model_class"),
    [
        (["epl/icae.yaml", "epl/layouts/uniform.yaml"], ICAEForCausalLM),
        (["epl/five_hundred_x.yaml", "epl/layouts/enhanced.yaml"], FiveHundredXForCausalLM),
        (["epl/full_context.yaml"], ICAEForCausalLM),
        (["epl/no_context.yaml"], ICAEForCausalLM),
    ],
)
def test_pretraining_then_fine_tuning(first, model_class, small, tmp_path, base_folder):
    bound = first[0].removeprefix("epl/").removesuffix(".yaml") if len(first) == 1 else None
    pretrained, tuned = tmp_path / "pretrained", tmp_path / "tuned"
    main(
        [
            first[0],
            "epl/pretraining.yaml",
            small["documents"],
            *first[1:],
            *_bound_arguments(bound),
            "--output_dir",
            str(pretrained),
        ]
    )
    log = json.loads((pretrained / "training_summary.json").read_text())["log"]
    ending = bound or "ratio_5"
    for task in ("reconstruction", "continuation"):
        assert any(f"eval_loss_{task}_{ending}" in entry for entry in log)
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    model = model_class.from_pretrained(pretrained)
    assert model.config.task_token_ids == {"[AE]": 400, "[LM]": 401}
    assert tokenizer.convert_tokens_to_ids(["[AE]", "[LM]"]) == [400, 401]
    main(
        [
            first[0],
            "epl/fine_tuning.yaml",
            small["questions"],
            "--checkpoint",
            str(pretrained),
            "--output_dir",
            str(tuned),
        ]
    )
    further = model_class.from_pretrained(tuned)
    assert further.config.position_layout == (
        first[1].split("/")[-1].removesuffix(".yaml") if len(first) > 1 else "default"
    )
    before, after = (dict(m.named_parameters()) for m in (model, further))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name, parameter in after.items() if parameter.requires_grad} >= moved
    assert "model.task_embeddings" in moved
    assert (moved == {"model.task_embeddings"}) == (bound is not None)
    log = json.loads((tuned / "training_summary.json").read_text())["log"]
    assert any(f"eval_loss_{ending}" in entry for entry in log)


def _bound_arguments(bound):
    # The small file's method_config has an adapter, which a bound has not.
    config = '{chunk_size: 16, encoder_lora: null, trainable_parameters: ["task_embeddings$"]}'
    return [] if bound is None else ["--method_config", config]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "joint"), [("compression_tokens", False), *itertools.product(CLASSES, (False, True))]
)
def test_embedded_recipes_train(method, joint, base_folder, tmp_path):
    tasks = ["reconstruction", "continuation"] if joint else ["question_answering", "reconstruction"]
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"sources": [{"generated": True, "tasks": tasks, "weight": 1}]}))
    files = [f"embedded/{method}.yaml", *(["embedded/joint_pretraining.yaml"] if joint else []), str(overlay)]
    options = ["--base", str(base_folder), "--max_steps", "1", "--save_strategy", "no", "--use_cpu", "true"]
    trainer = build_trainer(*parse_recipe([*files, *options, "--output_dir", str(tmp_path / "out")]))
    config = trainer.model.config
    # The small base reads no slots that it was not tuned for.
    assert config.decoder_lora == config.encoder_lora
    if method != "compression_tokens":
        # Every context of these recipes, BOS included, is one chunk.
        assert trainer.args.objective == ("joint" if joint else "compression")
        assert config.position_layout == "enhanced"
        batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
        assert batch["context_input_ids"].shape[1] <= config.chunk_size
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0
