# SPDX-License-Identifier: Apache-2.0
"""Layers that compute in float32, whatever type their input or their weights are held in."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Float32Linear(nn.Linear):
    """`nn.Linear` in float32, also where autocast would take a smaller type."""

    def forward(self, inputs: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(inputs.device.type, enabled=False):
            return functional.linear(inputs.float(), self.weight.float(), bias)


class Float32LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in float32."""

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.layer_norm(
            inputs.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )


class Float32RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` in float32."""

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.rms_norm(inputs.float(), self.normalized_shape, self.weight.float(), self.eps)
