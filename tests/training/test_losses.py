# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.nn import functional
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from context_compressors.training.losses import (
    distillation_loss,
    logits_function,
    negative_log_likelihood,
    prediction_positions,
)


def test_kl_loss_by_hand():
    # Worked numbers for equations 5 and 6: two answer tokens, a vocabulary of two, ratios 4 and 8.
    def logits(probabilities):
        return torch.tensor(probabilities).log()

    def loss(teacher, student):
        return distillation_loss(logits(student), logits(teacher), lambda x: x, lambda x: x).item()

    teacher = [[0.5, 0.5], [0.5, 0.5]]
    by_ratio = {4: [[0.25, 0.75], [0.5, 0.5]], 8: [[0.25, 0.75], [0.25, 0.75]]}
    assert loss(teacher[:1], by_ratio[4][:1]) == pytest.approx(0.14384103622589042, abs=1e-6)
    assert loss(teacher, by_ratio[4]) == pytest.approx(0.14384103622589042, abs=1e-6)
    assert loss(teacher, by_ratio[8]) == pytest.approx(0.28768207245178085, abs=1e-6)
    assert sum(loss(teacher, student) for student in by_ratio.values()) == pytest.approx(0.4315231086776713, abs=1e-6)
    assert loss(by_ratio[4][:1], teacher[:1]) == pytest.approx(0.13081203594113697, abs=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_distillation_equals_a_plain_computation(chunk_size):
    torch.manual_seed(0)
    student, teacher = torch.randn(7, 6, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    student_head, teacher_head = torch.nn.Linear(6, 11), torch.nn.Linear(5, 11)
    p, q = (functional.softmax(head(x), -1) for head, x in ((teacher_head, teacher), (student_head, student)))
    plain = (p.detach() * (p.detach().log() - q.log())).sum()
    expected = torch.autograd.grad(plain, [student, student_head.weight, student_head.bias])
    loss = distillation_loss(student, teacher, student_head, teacher_head, chunk_size)
    torch.testing.assert_close(loss, plain)
    loss.backward()
    for found, wanted in zip((student.grad, student_head.weight.grad, student_head.bias.grad), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert teacher.grad is None
    assert teacher_head.weight.grad is None


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_likelihood_equals_cross_entropy(chunk_size):
    torch.manual_seed(0)
    states, targets, head = torch.randn(9, 6, requires_grad=True), torch.randint(0, 11, (9,)), torch.nn.Linear(6, 11)
    plain = functional.cross_entropy(head(states), targets, reduction="sum")
    expected = torch.autograd.grad(plain, [states, head.weight])
    total, correct = negative_log_likelihood(states, targets, head, chunk_size)
    torch.testing.assert_close(total, plain)
    assert correct == (head(states).argmax(-1) == targets).sum()
    total.backward()
    torch.testing.assert_close(states.grad, expected[0])
    torch.testing.assert_close(head.weight.grad, expected[1])


def test_no_more_than_one_chunk_of_logits_at_a_time():
    sizes = []

    def head(states):
        sizes.append(states.shape[0])
        return states @ torch.ones(4, 8)

    states = torch.randn(10, 4, requires_grad=True)
    distillation_loss(states, torch.randn(10, 4), head, head, chunk_size=3).backward()
    assert max(sizes) == 3
    # student and teacher, forward and again in backward, in four chunks
    assert len(sizes) == 2 * 2 * 4


def test_a_batch_without_targets_gives_a_differentiable_zero():
    states = torch.randn(0, 4, requires_grad=True)
    total, correct = negative_log_likelihood(states, torch.zeros(0, dtype=torch.long), lambda x: x)
    total.backward()
    assert total.item() == correct.item() == 0
    assert distillation_loss(states, torch.randn(0, 4), lambda x: x, lambda x: x).item() == 0


def test_different_answer_tokens_are_refused():
    with pytest.raises(ValueError, match="the same answer tokens, got 2 and 3"):
        distillation_loss(torch.zeros(2, 4), torch.zeros(3, 4), lambda x: x, lambda x: x)


def test_prediction_positions_are_one_before_the_labels():
    labels = torch.tensor([[-100, 5, -100, 6], [7, -100, -100, -100]])
    assert prediction_positions(labels).tolist() == [[True, False, True, False], [False] * 4]


def test_states_and_head_give_the_models_own_logits_with_soft_capping():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, final_logit_softcapping=0.5, attn_implementation="eager", initializer_range=0.5,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    ids = torch.arange(6)[None]
    logits = model(input_ids=ids).logits
    states = model.base_model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(logits_function(model)(states), logits)
    assert 0.1 < logits.abs().max() <= 0.5


def test_a_model_that_scales_its_logits_is_refused():
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    with pytest.raises(ValueError, match=r"GraniteForCausalLM scales its logits, .*: logits_scaling is 8\.0"):
        logits_function(GraniteForCausalLM(GraniteConfig(**sizes, **heads, logits_scaling=8.0)))
    assert logits_function(GraniteForCausalLM(GraniteConfig(**sizes, **heads)))(torch.zeros(1, 8)).shape == (1, 9)
