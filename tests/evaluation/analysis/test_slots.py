# SPDX-License-Identifier: Apache-2.0
"""Slots in numbers and pictures: exact small cases, what each method shows, and the command."""

import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from context_compressors.configuration.configuration_comprexit import ComprExITConfig
from context_compressors.configuration.configuration_five_hundred_x import FiveHundredXConfig
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.configuration.configuration_ranked_key_values import RankedKeyValuesConfig
from context_compressors.configuration.configuration_snap_kv import SnapKVConfig
from context_compressors.configuration.configuration_streaming_llm import StreamingLLMConfig
from context_compressors.data.prompts import format_prompt
from context_compressors.evaluation.analysis.slot_origins import (
    attention_by_head,
    context_tokenizer,
    information_flow,
    one_chunk,
    reconstruction,
    slot_origins,
)
from context_compressors.evaluation.analysis.slots import (
    SlotAnalysis,
    analyse_ids,
    draw_slots,
    effective_rank,
    plot_memory_attention,
    singular_values,
    slot_correlation,
    slot_measures,
    slots_table,
    summary,
)
from context_compressors.modeling.modeling_comprexit import ComprExITForCausalLM
from context_compressors.modeling.modeling_five_hundred_x import FiveHundredXForCausalLM
from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.modeling.modeling_ranked_key_values import RankedKeyValuesForCausalLM
from context_compressors.modeling.modeling_snap_kv import SnapKVForCausalLM
from context_compressors.modeling.modeling_streaming_llm import StreamingLLMForCausalLM
from context_compressors.modeling.parts.cache_name import CACHE
from context_compressors.modeling.parts.prompting import document_ids

TEXT = "The mill\nstands by the river, for $3 a day or $4."


def analyse_slots(model, tokenizer, text, ratio=None):
    own = context_tokenizer(model, tokenizer)
    return analyse_ids(model, own, document_ids(model.config, own, text), ratio)


def build(model_class, config):
    torch.manual_seed(0)
    return model_class(config).eval()


@pytest.fixture(scope="module")
def comprexit(llama):
    config = ComprExITConfig(decoder_config=llama, compression_ratios=(4, 8), window_size=16, gate_size=8)
    return build(ComprExITForCausalLM, config)


@pytest.fixture(scope="module")
def icae(llama):
    return build(ICAEForCausalLM, ICAEConfig(decoder_config=llama, compression_ratios=(4, 8), chunk_size=64))


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, for a look at their axes."""
    saved = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: saved.append(figure) or save(figure, *a, **k))
    return saved


# --- numbers ---


def test_worked_effective_ranks():
    assert effective_rank(torch.tensor([3.0, 1.0])) == pytest.approx(1.7547653506033232)
    assert effective_rank(singular_values(torch.eye(32))) == pytest.approx(32.0)
    # The size of the values is no matter, and a value of 0 counts for nothing.
    assert effective_rank(torch.tensor([6.0, 2.0, 0.0])) == pytest.approx(1.7547653506033232)
    assert effective_rank(singular_values(torch.ones(5, 7))) == pytest.approx(1.0)


def test_singular_values_are_those_of_the_slots_in_descending_order():
    # Two slots of the same two tokens, and one of another.
    values = singular_values(torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    torch.testing.assert_close(values, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    assert effective_rank(values) == pytest.approx(2.0)


def test_correlation_by_hand():
    rows = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [3.0, 2.0, 1.0], [1.0, 3.0, 2.0]])
    expected = torch.tensor([[1, 1, -1, 0.5], [1, 1, -1, 0.5], [-1, -1, 1, -0.5], [0.5, 0.5, -0.5, 1]])
    torch.testing.assert_close(slot_correlation(rows), expected.double())


def test_a_slot_that_has_everything_alike_is_correlated_with_no_other():
    correlation = slot_correlation(torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.2, 0.3, 0.5]]))
    assert correlation.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_measures_count_the_pairs():
    measures = slot_measures(torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [3.0, 2.0, 1.0]]))
    assert measures["mean_correlation"] == pytest.approx(-1 / 3)
    assert measures["highly_correlated_pairs"] == pytest.approx(1 / 3)
    # Gram matrix of (1, 2, 3) and (3, 2, 1): 14 and 10; the second row is twice the first.
    gram = torch.tensor([[14.0, 28, 10], [28, 56, 20], [10, 20, 14]]).double()
    sizes = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    shares = [float(size / sizes.sum()) for size in sizes if size > 1e-6]
    assert measures["effective_rank"] == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)), rel=1e-5)
    with pytest.raises(ValueError, match="at least 2 are needed, got 1"):
        slot_measures(torch.ones(1, 4))


def test_a_summary_is_the_mean_over_documents():
    one = SlotAnalysis(("a",) * 4, 2, torch.eye(2), torch.eye(2, 4))
    other = SlotAnalysis(("a",) * 8, 4, torch.eye(4), torch.eye(4, 8))
    found = summary([one, other])
    assert (found["num_documents"], found["num_tokens"], found["num_slots"]) == (2, 6, 3)
    assert found["measures"]["allocation"]["effective_rank"] == pytest.approx(3.0)
    # Of 4 tokens, (1, 0, 0, 0) and (0, 1, 0, 0) correlate by -1/3, of 8 by -1/7.
    assert found["measures"]["allocation"]["mean_correlation"] == pytest.approx((-1 / 3 - 1 / 7) / 2)


# --- methods ---


def test_a_transmission_plan_and_its_gate_are_the_models_own(comprexit, tokenizer):
    for ratio, num_slots in ((None, 13), (8, 7)):
        analysis = analyse_slots(comprexit, tokenizer, TEXT, ratio)
        inputs = tokenizer(TEXT, return_tensors="pt")
        flow = information_flow(comprexit.model, **inputs, ratio=ratio)
        assert "".join(analysis.tokens) == TEXT
        assert analysis.allocation.shape == (num_slots, len(TEXT))
        torch.testing.assert_close(analysis.allocation, flow.allocation[0])
        torch.testing.assert_close(analysis.allocation.sum(dim=1), torch.ones(num_slots))
        torch.testing.assert_close(analysis.layer_weights, flow.layer_weights[0])
        assert (analysis.layer_weights.shape, analysis.first_layer) == ((len(TEXT), 4), 0)
        torch.testing.assert_close(analysis.slots, comprexit.compress(**inputs, ratio=ratio).embeddings[0])


def test_memory_tokens_show_their_last_layers_attention_in_sum_1(icae, tokenizer):
    analysis = analyse_slots(icae, tokenizer, TEXT, 8)
    inputs = tokenizer(TEXT, return_tensors="pt")
    last = attention_by_head(icae.model, **inputs, ratio=8)[-1][0].mean(dim=0)
    assert analysis.allocation.shape == (7, len(TEXT))
    torch.testing.assert_close(analysis.allocation, last / last.sum(dim=1, keepdim=True))
    torch.testing.assert_close(analysis.slots, icae.compress(**inputs, ratio=8).embeddings[0])
    assert analysis.layer_weights is None


def test_keys_and_values_have_an_allocation_and_no_slot_vectors(llama, tokenizer):
    config = FiveHundredXConfig(decoder_config=llama, compression_ratios=(4,), chunk_size=64, bos_token_id=0)
    analysis = analyse_slots(build(FiveHundredXForCausalLM, config), tokenizer, TEXT)
    assert set(analysis.vectors) == {"allocation"}
    assert analysis.allocation.shape == (13, len(TEXT))


def test_keys_and_values_of_each_head_are_counted_and_not_measured(llama, tokenizer):
    config = RankedKeyValuesConfig(decoder_config=llama, compression_ratios=(4,), chunk_size=64)
    analysis = analyse_slots(build(RankedKeyValuesForCausalLM, config), tokenizer, TEXT)
    assert (analysis.vectors, analysis.num_slots) == ({}, 13)
    found = summary([analysis])
    assert (found["num_slots"], found["measures"]) == (13, {})
    (line,) = slots_table({"ranked": found}).splitlines()[2:]
    assert [cell.strip() for cell in line.strip("|").split("|")] == ["ranked", "-", "1", "49.0", "13.0", "-", "-", "-"]


def test_origins_of_slots_are_what_each_method_makes_them_of(llama, tokenizer, comprexit, icae):
    ids = tokenizer(2 * TEXT).input_ids
    rows = torch.tensor([ids])

    # The windows, of two chunks: without an encoder a slot is the mean of its tokens' embeddings.
    config = MeanPoolingConfig(
        decoder_config=llama, encoder_type="embeddings", linear_after_pooling=False, chunk_size=63
    )
    pooling = build(MeanPoolingForCausalLM, config)
    origins = slot_origins(pooling, ids, 4)
    assert (origins.kind, [tuple(chunk.shape) for chunk in origins.chunks]) == ("windows", [(16, 63), (9, 35)])
    embeddings = pooling.get_input_embeddings()(rows)[0].split(63)
    slots = torch.cat([weights @ part for weights, part in zip(origins.chunks, embeddings, strict=True)])
    torch.testing.assert_close(slots, pooling.compress(rows, ratio=4).embeddings[0])
    strongest = origins.strongest(8)
    assert strongest[1] == [(place, 0.25) for place in range(4, 8)]
    assert strongest[15] == [(place, pytest.approx(1 / 3)) for place in range(60, 63)]
    assert strongest[16] == [(place, 0.25) for place in range(63, 67)]

    # The plan, and the attention in each chunk.
    flow = information_flow(comprexit.model, rows, ratio=8)
    assert slot_origins(comprexit, ids, 8).kind == "plan"
    torch.testing.assert_close(slot_origins(comprexit, ids, 8).chunks[0], flow.allocation[0])
    origins = slot_origins(icae, ids)
    last = attention_by_head(icae.model, rows[:, 64:])[-1][0].mean(dim=0)
    assert origins.kind == "attention"
    torch.testing.assert_close(origins.chunks[1], last / last.sum(dim=1, keepdim=True))

    # What stays: values of the first layer are the base's own, wherever their tokens stand.
    for model_class, config_class in (
        (StreamingLLMForCausalLM, StreamingLLMConfig),
        (SnapKVForCausalLM, SnapKVConfig),
    ):
        model = build(model_class, config_class(decoder_config=llama, compression_ratios=(4,)))
        origins = slot_origins(model, ids)
        assert (origins.kind, origins.chunks[0].shape) == ("kept", (25, 98))
        torch.testing.assert_close(origins.chunks[0].sum(dim=1), torch.ones(25))
        if model_class is StreamingLLMForCausalLM:
            values = model.model.language_model(rows, use_cache=True)[CACHE].layers[0].values[0]
            kept = model.compress(rows).key_values[0][1][0]
            torch.testing.assert_close(origins.chunks[0] @ values, kept)
        with pytest.raises(ValueError, match="cannot reconstruct"):
            reconstruction(model, tokenizer, ids, model.compress(rows))

    # Heads that keep unlike numbers of them: pairs of a layer's places may be another layer's.
    ranked = build(RankedKeyValuesForCausalLM, RankedKeyValuesConfig(decoder_config=llama, compression_ratios=(4,)))
    origins, memory = slot_origins(ranked, ids), ranked.compress(rows)
    assert (origins.kind, origins.chunks[0].shape) == ("kept", (25, 98))
    chunks, _ = one_chunk(ranked.model, rows, None, 4)
    tokens = torch.cat(list(ranked.model.kept_tokens(chunks, 4)), dim=1)[0]
    whole = ranked.compress(rows, ratio=1, allow_untrained_ratio=True)
    values, of_all = (torch.cat([pair[1] for pair in found.key_values], dim=1)[0] for found in (memory, whole))
    torch.testing.assert_close(of_all[memory.head_ids[0].T.long(), tokens], values)
    torch.testing.assert_close(
        origins.chunks[0].sum(dim=0) * len(tokens), torch.bincount(tokens.flatten(), minlength=98).float()
    )

    # A method that says nothing of all this has no origins.
    pooling.model.pools_windows = False
    assert slot_origins(pooling, ids) is None


def test_errors_of_a_reconstruction_are_the_models_own_loss_by_token(llama, icae, tokenizer):
    pooling = build(MeanPoolingForCausalLM, MeanPoolingConfig(decoder_config=llama))
    ids = tokenizer(12 * TEXT).input_ids
    request = tokenizer(format_prompt("reconstruction")).input_ids
    for model, start in ((pooling, [0, *request]), (icae, [icae.config.reconstruction_token_id])):
        for memory in (model.compress(torch.tensor([ids])), None):
            found = reconstruction(model, tokenizer, ids, memory)
            rows = torch.tensor([[*start, *ids]])
            labels = rows.clone()
            labels[:, : len(start)] = -100
            output = model(rows, memory=memory, labels=labels)
            torch.testing.assert_close(found.errors.mean(), output.loss.detach())
            hits = output.logits[0, len(start) - 1 : -1].argmax(dim=-1) == torch.tensor(ids)
            assert found.is_likeliest.tolist() == hits.tolist()
            assert found.accuracy == pytest.approx(100 * float(hits.float().mean()))


def test_documents_that_cannot_be_shown_are_refused(icae, comprexit, tokenizer):
    with pytest.raises(ValueError, match=r"1 to 64 tokens \(one chunk\), got 98"):
        analyse_slots(icae, tokenizer, 2 * TEXT)
    with pytest.raises(ValueError, match="3"):
        analyse_slots(comprexit, tokenizer, TEXT, 3)


# --- pictures ---


def titled(figure):
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


@pytest.mark.slow
def test_pictures_show_each_model_what_it_has(tmp_path, figures):
    generator = torch.Generator().manual_seed(0)
    slots, allocation, layers = (torch.rand(*shape, generator=generator) for shape in ((3, 7), (3, 5), (5, 4)))
    first = SlotAnalysis(("$x", "\n", " y", "$", "z"), 3, slots, allocation, layers, first_layer=1)
    second = SlotAnalysis(("t",) * 200, 2, torch.eye(2))
    paths = draw_slots({"a": first, "b": second}, tmp_path / "pictures")
    kinds = ("allocation", "layer_weights", "correlation_of_allocation", "singular_values_of_allocation")
    assert [path.stem for path in paths] == [*kinds, "correlation_of_slots", "singular_values_of_slots"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    (axes,) = titled(figures[0]).values()
    np.testing.assert_array_equal(axes.images[0].get_array(), allocation.numpy())
    assert axes.images[0].get_clim() == pytest.approx((0, np.quantile(allocation.numpy(), 0.99)))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["$x", "\\n", "y", "$", "z"]
    image = titled(figures[1])["a"].images[0]
    np.testing.assert_array_equal(image.get_array(), layers.T.numpy())
    assert image.get_extent() == [-0.5, 4.5, 0.5, 4.5]
    assert {name: each.images[0].get_clim() for name, each in titled(figures[4]).items()} == {
        "a": (-1, 1),
        "b": (-1, 1),
    }
    lines = {line.get_label(): line for line in figures[5].axes[0].lines}
    assert "b, effective rank 2.00" in lines
    assert list(lines["b, effective rank 2.00"].get_ydata()) == [1.0, 1.0]
    assert draw_slots({"b": second}, tmp_path / "more") == [
        tmp_path / "more" / "correlation_of_slots.png",
        tmp_path / "more" / "singular_values_of_slots.png",
    ]


def test_attention_is_drawn_by_layer_as_a_mean_over_heads(icae, llama, tokenizer, tmp_path, figures):
    ids = tokenizer(TEXT).input_ids
    plot_memory_attention(icae, ids, tmp_path / "attention.png", 8)
    heads = attention_by_head(icae.base_model, torch.tensor([ids]), ratio=8)
    maps = titled(figures[0])
    assert list(maps) == ["layer 2 of 3", "layer 3 of 3"]
    np.testing.assert_allclose(maps["layer 2 of 3"].images[0].get_array(), heads[1][0].mean(dim=0).numpy(), atol=1e-6)
    # The rest of a row is attention to memory tokens, of which each sees itself at least.
    sums = torch.stack([layer[0].mean(dim=0).sum(dim=-1) for layer in heads])
    assert ((sums > 0) & (sums < 1)).all()
    for layers in ([0], [4], []):
        with pytest.raises(ValueError, match="layers must be one or more of 1 to 3, got"):
            plot_memory_attention(icae, ids, tmp_path / "map.png", 8, layers)
    pooling = build(MeanPoolingForCausalLM, MeanPoolingConfig(decoder_config=llama))
    with pytest.raises(ValueError, match="MeanPoolingModel has no memory tokens"):
        plot_memory_attention(pooling, ids, tmp_path / "map.png")
