# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` and `torch.export` of new models."""

import pytest
import torch
from tiny_bases import ids_of
from tiny_models import METHODS, Case
from transformers import CompileConfig

SETTINGS = [[Case(method, variant) for variant in ("easy", *method.hard)] for method in METHODS]
ADAPTED = [next(case for case in cases if {"encoder_lora", "decoder_lora"} & case.fields.keys()) for cases in SETTINGS]


# Each method in its first setting with an adapter. Each takes up to a minute, so that CI compiles one of them alone.
@pytest.mark.slow
@pytest.mark.parametrize(
    "adapted",
    [
        pytest.param(case, marks=() if case.method is METHODS[0] else pytest.mark.release, id=str(case))
        for case in ADAPTED
    ],
)
def test_a_compiled_model_reads_and_trains_as_an_eager_one(adapted, inputs):
    torch._dynamo.reset()
    model, other = adapted.build(), adapted.build()
    compiled = torch.compile(other, backend="eager")
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=0)
    model.train(), compiled.train()
    for one in (model, compiled):
        one(**inputs, labels=inputs["input_ids"]).loss.backward()
    for (name, expected), found in zip(model.named_parameters(), other.parameters(), strict=True):
        if expected.requires_grad:
            torch.testing.assert_close(found.grad, expected.grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.release
@pytest.mark.slow
def test_inductor_compiles_a_model_with_an_adapter(inputs):
    torch._dynamo.reset()
    model = ADAPTED[0].build()
    expected = model(**inputs).logits
    torch.testing.assert_close(torch.compile(model)(**inputs).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_text_alone_is_exported(method_case, random_rows, pad_rows):
    """As transformers' own models are: for texts of any length, padded or not, without a cache."""
    model, (ids, mask) = method_case.build(), pad_rows(random_rows([5, 7]), "left")
    shapes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    dynamic_shapes = {"input_ids": shapes, "attention_mask": shapes, "use_cache": None}
    text = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    exported = torch.export.export(model, (), text, dynamic_shapes=dynamic_shapes).module()
    ids, mask = pad_rows(random_rows([3, 9, 6], seed=1))
    text = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    torch.testing.assert_close(exported(**text).logits[mask.bool()], model(**text).logits[mask.bool()])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean_pooling", "five_hundred_x"])
def test_passes_over_one_token_compile_behind_slots_in_a_static_cache(name, method_cases):
    torch._dynamo.reset()
    model = method_cases[name].build()
    settings = {"memory": model.compress(ids_of(11), ratio=2), "max_new_tokens": 5, "do_sample": False}
    compiled = CompileConfig(backend="eager", mode=None)
    # As on a GPU.
    compiled._compile_all_devices = True
    for length in (4, 6):
        text = ids_of(length, seed=1)
        found = model.generate(text, cache_implementation="static", compile_config=compiled, **settings)
        assert found.tolist() == model.generate(text, **settings).tolist()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
