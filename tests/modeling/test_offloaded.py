# SPDX-License-Identifier: Apache-2.0
"""A model whose weights accelerate has put on the disk or in host memory works as one that is all in place."""

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM

GREEDY = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_an_offloaded_model_compresses_reads_and_answers_as_a_plain_one(form_case, inputs, slots, tmp_path, place):
    model = form_case.build()
    model.save_pretrained(tmp_path / "model")
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    loading = {"device_map": "auto", "max_memory": {"cpu": int(0.8 * size)}, "offload_folder": tmp_path / "weights"}
    offloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **(loading if place == "disk" else {}))
    if place == "cpu":
        cpu_offload(offloaded)
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    memory = offloaded.compress(inputs["context_input_ids"])
    expected = model.compress(inputs["context_input_ids"])
    assert slots(memory).equal(slots(expected))
    assert memory.model_id == expected.model_id
    logits = model(**inputs).logits
    assert offloaded(**inputs).logits.equal(logits)
    torch.testing.assert_close(offloaded(inputs["input_ids"], memory=memory).logits, logits, atol=1e-4, rtol=0)
    assert offloaded.generate(**inputs, **GREEDY).equal(model.generate(**inputs, **GREEDY))
    # Nothing stays in place.
    assert any(parameter.is_meta for parameter in offloaded.parameters())
