# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.nn import functional

from context_compressors.training.losses import (
    distillation_loss,
    negative_log_likelihood,
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
