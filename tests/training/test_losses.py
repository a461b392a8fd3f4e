# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.nn import functional

from context_compressors.training.losses import (
    distillation_loss,
    negative_log_likelihood,
    prediction_positions,
)


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


def test_prediction_positions_are_one_before_the_labels():
    labels = torch.tensor([[-100, 5, -100, 6], [7, -100, -100, -100]])
    assert prediction_positions(labels).tolist() == [[True, False, True, False], [False] * 4]
