# SPDX-License-Identifier: Apache-2.0
"""COCOM and PISCO: one adapter for both sides, and learned vectors around each chunk's slots."""

import pytest
from tiny_bases import ids_of


@pytest.fixture
def separated(method_cases):
    """Two adapters, slots of chunks of 6 tokens, and a separator behind each."""
    return method_cases["icae"].on(variant="separator").build()


@pytest.fixture
def shared(method_cases):
    return method_cases["compression_tokens"].on(variant="shared_adapter").build()


# --- the vectors around slots ---


def test_the_separator_stands_behind_the_slots_of_each_chunk_and_trains(separated):
    marker = separated.model.marker_embeddings
    memory = separated.compress(ids_of(15), ratio=3)
    assert memory.num_slots.tolist() == [3 * (2 + 1)] == [separated.config.num_slots(15, 3)]
    assert memory.position_ids.tolist() == [list(range(9))]
    assert (memory.embeddings[0, [2, 5, 8]] == marker).all()
    plain = separated.compress(ids_of(15)[:, :6], ratio=3)
    assert memory.embeddings[0, :3].equal(plain.embeddings[0])
    assert memory.nbytes == 9 * 32 * 4, "they are kept with the slots"
    assert separated.compress(ids_of(15)[:, :0]).num_slots.tolist() == [0]
    separated.train()
    separated(input_ids=ids_of(4), labels=ids_of(4), context_input_ids=ids_of(15)).loss.backward()
    assert marker.grad.abs().sum() > 0


# --- one adapter for both sides ---


def test_a_shared_adapter_is_one_set_of_weights_with_gradient_from_both_sides(shared):
    adapters = {name: p for name, p in shared.named_parameters() if ".lora_" in name}
    assert {name.split(".")[-2] for name in adapters} == {"shared"}
    assert shared.model.encoder_backbone is shared.model.language_model
    context, text = ids_of(10), ids_of(4, seed=1)
    shared.train()

    def gradients(memory):
        shared.zero_grad()
        shared(input_ids=text, labels=text, memory=memory).loss.backward()
        return {name: p.grad.clone() for name, p in adapters.items()}

    def detached(memory):
        memory.embeddings = memory.embeddings.detach()
        return memory

    both = gradients(shared.compress(context))
    of_decoder = gradients(detached(shared.compress(context)))
    memory = shared.compress(context)
    with shared.base_language_model():
        of_encoder = gradients(memory)
    for name, gradient in both.items():
        assert of_decoder[name].abs().sum() > 0, name
        assert of_encoder[name].abs().sum() > 0, name
        assert not gradient.allclose(of_decoder[name]), name
