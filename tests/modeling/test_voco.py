# SPDX-License-Identifier: Apache-2.0
"""VoCo on text beside the paper's masked pass, and its positions."""

import pytest
import torch
from tiny_bases import ids_of

from context_compressors.modeling.parts.lora import DECODER, use_adapter
from context_compressors.modeling.parts.position_layout import uniform_memory_ids

LAYOUTS = ("default", "uniform", "enhanced")


def voco_position_ids(num_image, num_voco, num_following, layout):
    """Return the places of image, VoCo and following tokens in one sequence (EPL, Figure 8)."""
    voco = torch.arange(num_image, num_image + num_voco)
    if layout != "default":
        voco = uniform_memory_ids(0, num_image, num_voco)
    behind = num_image if layout == "enhanced" else num_image + num_voco
    return torch.arange(num_image), voco, torch.arange(behind, behind + num_following)


def seen_inputs(model, monkeypatch):
    """Record the inputs of each pass of the language model."""
    backbone, calls = model.model.language_model, []
    forward = backbone.forward

    def recorded(*args, **kwargs):
        calls.append(kwargs)
        return forward(*args, **kwargs)

    monkeypatch.setattr(backbone, "forward", recorded)
    return calls


def masked_pass(model, context, text, num_voco, layout):
    """The paper's training, a naive twin: `[context, VoCo tokens, text]` in one pass; the text sees no context."""
    backbone, sizes = model.model, (context.shape[1], num_voco, text.shape[1])
    language_model, first = backbone.language_model, sizes[0]
    tokens = backbone.memory_embeddings.expand(1, num_voco, -1)
    table = backbone.get_input_embeddings()
    seen = torch.ones(sum(sizes), sum(sizes)).tril().bool()
    seen[first + num_voco :, :first] = False
    with use_adapter(language_model, DECODER):
        states = language_model(
            inputs_embeds=torch.cat([table(context), tokens, table(text)], dim=1),
            attention_mask=seen[None, None],
            position_ids=torch.cat(voco_position_ids(*sizes, layout))[None],
            use_cache=False,
        ).last_hidden_state
    return model.lm_head(states[:, first + num_voco :])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compressing_and_then_reading_is_the_papers_masked_pass(voco, layout):
    model = voco.build(position_layout=layout).train()
    context, text = ids_of(11), ids_of(5, seed=1)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    logits = model(text, context_input_ids=context, ratio=3).logits
    expected = masked_pass(model, context, text, 4, layout)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    weights = torch.randn_like(logits)
    found, wanted = (torch.autograd.grad((y * weights).sum(), parameters) for y in (logits, expected))
    assert all(gradient.any() for gradient in wanted)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_stand_where_figure_8_says(voco, layout, monkeypatch):
    for num_tokens, num_voco in ((6, 2), (4, 2), (7, 3), (12, 4)):
        model = voco.build(num_voco_tokens=num_voco, position_layout=layout).train()
        calls = seen_inputs(model, monkeypatch)
        expected = voco_position_ids(num_tokens, num_voco, 5, layout)
        memory = model.compress(ids_of(num_tokens))
        model(ids_of(5, seed=1), memory=memory)
        assert calls[0]["position_ids"][0].tolist() == torch.cat(expected[:2]).tolist()
        assert memory.position_ids[0].tolist() == expected[1].tolist()
        assert calls[1]["position_ids"][0].tolist() == expected[2].tolist()
    figure = {"default": ([6, 7], [8, 9]), "uniform": ([1, 4], [8, 9]), "enhanced": ([1, 4], [6, 7])}[layout]
    assert [ids.tolist() for ids in voco_position_ids(6, 2, 2, layout)] == [[0, 1, 2, 3, 4, 5], *figure]
