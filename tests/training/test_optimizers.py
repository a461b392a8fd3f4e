# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch

from context_compressors.training.base_trainer import MuonWithAdamW


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
    optimizer = MuonWithAdamW([{"params": parameters, "muon": True, "lr": 0.1, "weight_decay": 0.0}])
    for _ in range(3):
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn(shape)
            expected[i], buffers[i] = naive_muon_step(expected[i], parameter.grad, buffers[i], 0.1, 0.95)
        optimizer.step()
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


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
