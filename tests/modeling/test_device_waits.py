# SPDX-License-Identifier: Apache-2.0
"""Count how often a forward pass waits for the device, beside the plain language model's.

A wait is where the host needs a value that the device has yet to compute: a number, a truth value, a list, or the size
of a result that depends on values. The plain model has one in each pass: whether its mask hides anything.
"""

import pytest
import torch
from tiny_models import METHODS, ON_EVERY_BASE, TRAINING_FREE, Case
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

aten = torch.ops.aten
VALUES_NEEDED = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.masked_select, aten.nonzero}
VALUES_NEEDED |= {aten._unique2, aten.unique_dim, aten.unique_consecutive}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
CONTEXT = torch.arange(5, 29).view(2, 12)
TEXT = torch.tensor([[1, 9, 12, 14], [1, 30, 31, 32]])
# Layer semantic alignment is a language model of its own that reads the slots; SnapKV reads a context's end by itself.
FURTHER_PASSES = {"gmsa": 1, "snap_kv": 1}
# How many pairs each head keeps, and whether the text behind them has pads.
FURTHER_WAITS = {"ranked_key_values": 2}
CASES = [
    pytest.param(Case(method), id=method.name, marks=() if method.name in ON_EVERY_BASE else pytest.mark.slow)
    for method in (*METHODS, *TRAINING_FREE[:2])
]


class Waits(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = function.overloadpacket
        indices = args[1] if packet in INDEXING else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        self.count += packet in VALUES_NEEDED or by_mask or (packet is aten.repeat_interleave and len(args) == 1)
        return function(*args, **(kwargs or {}))


class Lists(TorchFunctionMode):
    """Counts tensors that become lists, which takes no operation on the host."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.Tensor.tolist, torch.Tensor.numpy)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def count(call):
    with Waits() as waits, Lists() as lists:
        call()
    return waits.count + lists.count


@pytest.mark.parametrize("of_method", CASES)
def test_a_forward_pass_waits_once_more_than_its_language_models_alone(of_method, monkeypatch):
    """Once, because token ids, masks and memories are checked: an unknown id would stop the device."""
    # On the CPU alone the solver looks at values.
    solver = "context_compressors.modeling.modeling_comprexit.sinkhorn"
    monkeypatch.setattr(solver, lambda cost, source, target, *_, **__: source[..., :, None] * target[..., None, :])
    name, model = of_method.method.name, of_method.model
    plain = AutoModelForCausalLM.from_config(model.config.decoder_config).eval()
    one_pass = count(lambda: plain(input_ids=TEXT, attention_mask=torch.ones_like(TEXT)))
    memory, further = model.compress(CONTEXT, ratio=3), FURTHER_WAITS.get(name, 0)
    # What names the model is read once.
    model(input_ids=TEXT, memory=memory)
    assert count(lambda: model(input_ids=TEXT)) <= one_pass + 1
    assert count(lambda: model(input_ids=TEXT, memory=memory)) <= one_pass + 1 + further
    passes = 2 + FURTHER_PASSES.get(name, 0)
    assert count(lambda: model(input_ids=TEXT, context_input_ids=CONTEXT, ratio=3)) <= passes * one_pass + 1 + further
