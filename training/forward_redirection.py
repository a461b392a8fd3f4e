# SPDX-License-Identifier: Apache-2.0
"""A training step as one forward pass of the model that DDP, FSDP or DeepSpeed wraps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.utils import is_compiled_module
from torch import nn

Result = TypeVar("Result")


def redirected_forward(
    wrapped: nn.Module, module: nn.Module, function: Callable[..., Result], **inputs: Any
) -> Result:
    """Run `function(**inputs)` in place of the forward pass of `module`, called through `wrapped`.

    A step that encodes once, reads several memories and applies the LM head by itself makes several passes. Wrappers
    count on a single one: DDP arms its gradient reduction in it, FSDP holds the embeddings and the head whole only
    while it runs.

    Args:
        wrapped: `module`, or what wraps it.
        module: the model whose parts `function` runs; they must not be `module` itself.
        function: the step; every tensor that needs a gradient must follow from what it returns.
        inputs: its arguments, which the wrapper brings to the device.

    Returns:
        What `function` returns.

    Raises:
        ValueError: a wrapper that runs copies of the module in threads (`DataParallel`), or a compiled module.
    """
    if isinstance(wrapped, nn.DataParallel):
        raise ValueError(
            "one process sees several GPUs (DataParallel), which this training step does not support: start one "
            "process for each GPU with `accelerate launch`, or show the process one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    if is_compiled_module(module):
        raise ValueError("torch_compile is not supported here: the step would run without it; leave it out")
    own_forward = vars(module).get("forward")
    module.forward = function
    try:
        return wrapped(**inputs)
    finally:
        if own_forward is None:
            del module.forward
        else:
            module.forward = own_forward
