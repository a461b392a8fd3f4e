# SPDX-License-Identifier: Apache-2.0
"""Count how often a forward pass waits for the device, beside the plain language model's.

A wait is where the host needs a value that the device has yet to compute: a number, a truth value, a list, or the size
of a result that depends on values. The plain model has one in each pass: whether its mask hides anything.
"""

from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

aten = torch.ops.aten
# What only the values tell the size or the truth of.
VALUES_NEEDED = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# On the host these read a tensor without an operation.
LISTS = {torch.Tensor.tolist, torch.Tensor.numpy}


class Waits(TorchDispatchMode):
    """Counts the operations that would make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = function.overloadpacket
        indices = args[1] if packet in INDEXING else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if packet in VALUES_NEEDED or by_mask or (packet is aten.repeat_interleave and len(args) == 1):
            self.found[str(packet)] += 1
        return function(*args, **(kwargs or {}))


class Lists(TorchFunctionMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in LISTS:
            self.found[function.__name__] += 1
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def count(call):
    waits = Waits()
    with waits, Lists(waits.found):
        call()
    return waits.found.total()


CONTEXT = torch.arange(5, 29).view(2, 12)
TEXT = torch.tensor([[1, 9, 12, 14], [1, 30, 31, 32]])
# Layer semantic alignment is a language model of its own that reads the slots; SnapKV reads a context's end by itself.
FURTHER_PASSES = {"gmsa": 1, "snap_kv": 1}
# How many pairs each head keeps, and whether the text behind them has pads.
FURTHER_WAITS = {"ranked_key_values": 2}


@pytest.fixture(autouse=True)
def transport_without_a_host(monkeypatch):
    """On the CPU alone the solver looks at values."""
    name = "context_compressors.modeling.modeling_comprexit.sinkhorn"
    monkeypatch.setattr(
        name, lambda cost, source, target, *_, **__: source[..., :, None] * target[..., None, :] + 0 * cost
    )


@pytest.mark.costly
def test_a_forward_pass_waits_once_more_than_its_language_models_alone(method_case):
    """Once, because token ids, masks and memories are checked: an unknown id would stop the device."""
    model = method_case.model
    plain = AutoModelForCausalLM.from_config(model.config.decoder_config).eval()
    one_pass = count(lambda: plain(input_ids=TEXT, attention_mask=torch.ones_like(TEXT)))
    further = FURTHER_PASSES.get(method_case.method.name, 0)
    memory = model.compress(CONTEXT, ratio=3)
    # What names the model is read once.
    model(input_ids=TEXT, memory=memory)
    assert count(lambda: model(input_ids=TEXT)) <= one_pass + 1
    further_waits = FURTHER_WAITS.get(method_case.method.name, 0)
    assert count(lambda: model(input_ids=TEXT, memory=memory)) <= one_pass + 1 + further_waits
    reading = count(lambda: model(input_ids=TEXT, context_input_ids=CONTEXT, ratio=3))
    assert reading <= (2 + further) * one_pass + 1 + further_waits
