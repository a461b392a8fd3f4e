# SPDX-License-Identifier: Apache-2.0
"""Chamfer scores beside loops, and DeCAL's vectors under padding, ratios, saving and loading."""

import decal_models
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize
from transformers import AutoModel, AutoModelForTextEncoding

from context_compressors import DeCALForConditionalGeneration, DeCALForRetrieval, DeCALModel, chamfer


def build(model_class=DeCALForRetrieval, **fields):
    return decal_models.build(model_class=model_class, **{"compression_ratios": (2, 3), **fields})


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture
def batch(random_rows, pad_rows):
    """`batch(side, seed)`: ids and mask of three rows."""
    return lambda side="right", seed=0: pad_rows(random_rows([9, 4, 7], seed), side)


# --- Chamfer similarity ---


def naive_chamfer(queries, documents):
    """sum_i max_j q_i . d_j, one product after the other; each text is a list of vectors."""
    rows = []
    for query in queries:
        row = []
        for document in documents:
            total = torch.zeros(())
            for vector in query:
                products = [vector @ other for other in document]
                total = total + (torch.stack(products).max() if products else torch.tensor(-torch.inf))
            row.append(total)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def ragged(counts, width, size, seed):
    """Vectors of `counts` a row at random places, with NaN at the pads."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(counts), width, dtype=torch.long)
    for row, count in enumerate(counts):
        mask[row, torch.randperm(width, generator=generator)[:count]] = 1
    vectors = torch.randn(len(counts), width, size, generator=generator)
    return vectors.masked_fill(mask[:, :, None] == 0, torch.nan), mask


@pytest.mark.parametrize("seed", range(2))
def test_chamfer_is_the_loop_over_vectors_with_its_gradients(seed):
    query_vectors, query_mask = ragged((3, 1, 5), 5, 4, seed)
    document_vectors, document_mask = ragged((2, 6, 1, 4), 6, 4, seed + 100)
    inputs = [tensor.clone().requires_grad_() for tensor in (query_vectors, document_vectors)]
    scores = chamfer(inputs[0], query_mask, inputs[1], document_mask)
    twins = [tensor.clone().requires_grad_() for tensor in (query_vectors, document_vectors)]
    queries, documents = (
        [row[kept == 1] for row, kept in zip(twin, mask, strict=True)]
        for twin, mask in zip(twins, (query_mask, document_mask), strict=True)
    )
    expected = naive_chamfer(queries, documents)
    torch.testing.assert_close(scores, expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed))
    (scores * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, theirs in zip(inputs, twins, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
        assert mine.grad.abs().sum() > 0


def test_a_text_without_vectors_has_a_score_and_no_nan_gradients():
    query_vectors, query_mask = ragged((2, 0), 3, 4, 0)
    document_vectors, document_mask = ragged((0, 3), 3, 4, 1)
    query_vectors.requires_grad_()
    document_vectors.requires_grad_()
    scores = chamfer(query_vectors, query_mask, document_vectors, document_mask)
    assert scores[0, 0] == -torch.inf
    assert scores[0, 1].isfinite()
    assert scores[1].tolist() == [0, 0]
    torch.softmax(scores, dim=1)[:, 1].log().sum().backward()
    assert query_vectors.grad.isfinite().all()
    assert document_vectors.grad.isfinite().all()


# --- vectors ---


@torch.no_grad()
def test_padding_and_batching_change_no_score(model, batch):
    ids, mask = batch()
    whole, left = model.encode(ids, mask), model.encode(*batch("left"))
    scores = model.score(*whole.to_tuple(), *whole.to_tuple())
    torch.testing.assert_close(model.score(*left.to_tuple(), *left.to_tuple()), scores)
    for row, expected in enumerate(scores):
        alone = model.encode(ids[row][mask[row].bool()][None])
        torch.testing.assert_close(alone.vectors.norm(dim=-1), alone.attention_mask.float())
        torch.testing.assert_close(model.score(*alone.to_tuple(), *whole.to_tuple())[0], expected)
    # A text is nearest to itself: each of its vectors finds itself.
    torch.testing.assert_close(scores.diagonal(), whole.attention_mask.sum(dim=1).float())


def test_forward_is_encode_and_every_weight_gets_a_gradient(model, batch):
    ids, mask = batch()
    model = build()
    vectors, vector_mask = model(ids, mask, return_dict=False)
    assert vectors.equal(model.encode(ids, mask, token_type_ids=mask).vectors)
    other = model(*batch(seed=1), ratio=3)
    model.score(vectors, vector_mask, *other.to_tuple()).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


# --- saving and loading ---


@torch.no_grad()
def test_a_checkpoint_loads_by_its_auto_classes_and_says_how(model, tmp_path, batch):
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "AutoModelForTextEncoding.from_pretrained" in card
    assert "generate" not in card
    ids, mask = batch()
    expected = model.encode(ids, mask).vectors
    loaded, encoder = (auto.from_pretrained(tmp_path) for auto in (AutoModelForTextEncoding, AutoModel))
    assert (type(loaded), type(encoder)) == (DeCALForRetrieval, DeCALModel)
    assert loaded.encode(ids, mask).vectors.equal(expected)
    assert normalize(encoder(ids, mask).last_hidden_state, dim=-1).equal(expected)


def test_the_decoder_of_a_generating_checkpoint_is_discarded(tmp_path, batch):
    generating = build(DeCALForConditionalGeneration)
    generating.save_pretrained(tmp_path / "generating")
    model = DeCALForRetrieval.from_pretrained(tmp_path / "generating")
    ids, mask = batch()
    with torch.no_grad():
        assert model.model(ids, mask).last_hidden_state.equal(generating.model(ids, mask).last_hidden_state)
    model.save_pretrained(tmp_path / "retrieval")
    assert not any("decoder" in name for name in load_file(tmp_path / "retrieval" / "model.safetensors"))
    with pytest.raises(ValueError, match=r"lacks .* weights of DeCALForConditionalGeneration"):
        DeCALForConditionalGeneration.from_pretrained(tmp_path / "retrieval")
