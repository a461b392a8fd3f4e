# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from small_recipes import write_recipe
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from context_compressors import ComprExITForCausalLM, DeCALConfig, DeCALForConditionalGeneration, ICAEForCausalLM
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.optimizers import (
    MuonWithAdamW,
    adafactor,
    orthogonalise,
    orthogonalise_together,
    parameter_groups,
)
from context_compressors.training.train import build_trainer


def naive_muon_step(weight, gradient, buffer, lr, momentum):
    buffer = momentum * buffer + gradient
    x = gradient + momentum * buffer
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.T if transposed else x
    return weight - lr * max(1, weight.shape[0] / weight.shape[1]) ** 0.5 * x, buffer


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
def test_three_steps_equal_a_naive_twin(shape):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for _ in range(2)]
    expected = [parameter.detach().clone() for parameter in parameters]
    buffers = [torch.zeros(shape) for _ in parameters]
    optimizer = MuonWithAdamW([{"params": parameters, "muon": True, "lr": 0.1}])
    for _ in range(3):
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn(shape)
            expected[i], buffers[i] = naive_muon_step(expected[i], parameter.grad, buffers[i], 0.1, 0.95)
        optimizer.step()
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


def test_singular_values_come_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 8, 20)))
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert orthogonalise(torch.zeros(1, 3, 3)).abs().max() == 0


def _two_processes(rank, address, matrices):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    for count in (1, 2, 5):
        together = orthogonalise_together(matrices[:count])
        torch.testing.assert_close(together, orthogonalise(matrices[:count]))
    torch.distributed.destroy_process_group()


def test_two_processes_share_the_work(tmp_path):
    torch.manual_seed(0)
    arguments = (f"file://{tmp_path / 'meeting'}", torch.randn(5, 6, 4))
    # Forked, since a fresh interpreter could not import this file by its name.
    torch.multiprocessing.start_processes(_two_processes, args=arguments, nprocs=2, start_method="fork")


def test_the_other_groups_are_plain_adamw():
    torch.manual_seed(0)
    first = torch.nn.Parameter(torch.randn(5))
    second = torch.nn.Parameter(first.detach().clone())
    options = {"betas": (0.9, 0.95), "eps": 0.5, "weight_decay": 0.1}
    mine = MuonWithAdamW([{"params": [first], "lr": 0.1}], **options)
    plain = torch.optim.AdamW([second], lr=0.1, **options)
    for _ in range(3):
        first.grad = torch.randn(5)
        second.grad = first.grad.clone()
        mine.step()
        plain.step()
    torch.testing.assert_close(first, second)


def test_saved_state_goes_on_exactly():
    def step(parameters, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    def build(parameters):
        return MuonWithAdamW([{"params": parameters[:1], "muon": True}, {"params": parameters[1:]}], lr=0.1)

    parameters = [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(4))]
    optimizer = build(parameters)
    step(parameters, optimizer, 0)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = build(copies)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(parameters, optimizer, 1)
    step(copies, resumed, 1)
    for parameter, other in zip(parameters, copies, strict=True):
        torch.testing.assert_close(parameter, other)


def test_groups_hold_every_trainable_parameter_once(language_model: LlamaForCausalLM):
    language_model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    groups = parameter_groups(language_model, "muon", 1e-3, 2e-2, 0.1)
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(p) for p in language_model.parameters() if p.requires_grad)
    hidden, matrices, vectors = groups
    assert len(hidden["params"]) == 2 * 7 - 1
    assert [tuple(p.shape) for p in matrices["params"]] == [tuple(language_model.get_input_embeddings().weight.shape)]
    assert all(p.ndim == 1 for p in vectors["params"])
    assert (hidden["lr"], matrices["lr"], vectors["weight_decay"]) == (2e-2, 1e-3, 0.0)
    assert not any(group["muon"] for group in parameter_groups(language_model, "adamw", 1e-3, 2e-2, 0.1))


def test_adafactor_moves_a_matrix_by_its_rate_times_its_size():
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=64, d_kv=8, d_ff=96, num_layers=1, num_heads=8))
    matrices = [p for p in model.parameters() if p.ndim == 2 and p.shape != (20, 64)]
    before = [matrix.detach().clone() for matrix in matrices]
    for matrix in matrices:
        # Of rank one, so that the factored second moment is that of the gradient, and each update has size 1.
        matrix.grad = torch.outer(torch.randn(len(matrix)), torch.randn(matrix.shape[1]))
    adafactor(model, 1e-2).step()
    for matrix, start in zip(matrices, before, strict=True):
        moved = (matrix.detach() - start).square().mean().sqrt()
        torch.testing.assert_close(moved, 1e-2 * start.square().mean().sqrt(), rtol=1e-3, atol=0)
    attention = model.encoder.block[0].layer[0].SelfAttention.q.weight
    assert attention.square().mean().sqrt() < 0.1


def test_adafactor_decays_matrices_alone_and_when_asked():
    model = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2))
    assert {group["weight_decay"] for group in adafactor(model, 1e-2).param_groups} == {0.0}
    groups = adafactor(model, 1e-2, weight_decay=0.1).param_groups
    assert [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in groups] == [(0.1, {2}), (0.0, {1})]


def test_embeddings_of_memory_task_and_layers_are_no_hidden_matrices(language_model: LlamaForCausalLM, tmp_path):
    language_model.save_pretrained(tmp_path)
    for model_class, names in (
        (ICAEForCausalLM, {"memory_embeddings", "task_embeddings"}),
        (ComprExITForCausalLM, {"layer_embeddings"}),
    ):
        model = model_class.from_base(str(tmp_path))
        hidden, others = parameter_groups(model, "muon", 1e-3, 2e-2, 0.1)[:2]
        of = {id(parameter): name for name, parameter in model.named_parameters()}
        assert {of[id(p)].rpartition(".")[2] for p in others["params"]} == names
        assert {of[id(p)].rpartition(".")[2] for p in hidden["params"]} == {"weight"}


def test_a_recipes_adam_epsilon_is_that_of_the_groups_of_adamw(tmp_path, base_folder):
    recipe = write_recipe(tmp_path, objective="teacher", base=str(base_folder), optimizer="muon", adam_epsilon=0.5)
    optimizer = build_trainer(*parse_recipe([recipe])).create_optimizer()
    assert {group["eps"] for group in optimizer.param_groups if not group["muon"]} == {0.5}


def test_no_table_of_embeddings_is_a_hidden_matrix():
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    for model in (T5ForConditionalGeneration(T5Config(**sizes)), DeCALForConditionalGeneration(DeCALConfig(sizes))):
        hidden, matrices, _ = parameter_groups(model, "muon", 1e-3, 2e-2, 0.1)
        tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        biases = [p for name, p in model.named_parameters() if "relative_attention_bias" in name]
        assert len(biases) >= 2
        assert {id(p) for p in biases} < tables
        assert tables <= {id(p) for p in matrices["params"]}
        assert not tables & {id(p) for p in hidden["params"]}
        assert len(hidden["params"]) >= 2 * (4 + 2) + 2 * (8 + 2)


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match="matrices only"):
        MuonWithAdamW([{"params": [torch.nn.Parameter(torch.ones(3))], "muon": True}])
