# SPDX-License-Identifier: Apache-2.0
import torch

from context_compressors.training.losses import distillation_loss, negative_log_likelihood


def test_no_more_than_one_chunk_of_logits_at_a_time():
    sizes = []

    def head(states):
        sizes.append(states.shape[0])
        return states @ torch.arange(32.0).view(4, 8).sin()

    states, teacher = torch.randn(10, 4, requires_grad=True), torch.randn(10, 4)
    whole = distillation_loss(states, teacher, head, head)
    (gradient,) = torch.autograd.grad(whole, states)
    sizes.clear()
    loss = distillation_loss(states, teacher, head, head, chunk_size=3)
    loss.backward()
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(states.grad, gradient)
    assert max(sizes) == 3
    # student and teacher, forward and again in backward, in four chunks
    assert len(sizes) == 2 * 2 * 4


def test_a_batch_without_targets_gives_a_differentiable_zero():
    states = torch.randn(0, 4, requires_grad=True)
    total, correct = negative_log_likelihood(states, torch.zeros(0, dtype=torch.long), lambda x: x)
    total.backward()
    assert total.item() == correct.item() == 0
    assert distillation_loss(states, torch.randn(0, 4), lambda x: x, lambda x: x).item() == 0
