# SPDX-License-Identifier: Apache-2.0
"""Slots in numbers and pictures: exact small cases, what each method shows, and the command."""

import json
import math

import numpy as np
import pytest
import torch
from byte_tokenizers import byte_tokenizer
from matplotlib.figure import Figure

from context_compressors import cli
from context_compressors.configuration.configuration_comprexit import ComprExITConfig
from context_compressors.configuration.configuration_five_hundred_x import FiveHundredXConfig
from context_compressors.configuration.configuration_gmsa import GMSAConfig
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.configuration.configuration_ranked_key_values import RankedKeyValuesConfig
from context_compressors.configuration.configuration_snap_kv import SnapKVConfig
from context_compressors.configuration.configuration_streaming_llm import StreamingLLMConfig
from context_compressors.data.prompts import format_prompt
from context_compressors.evaluation.analysis.attention import attention_by_head, attention_of_ids, context_tokenizer
from context_compressors.evaluation.analysis.information_flow import information_flow
from context_compressors.evaluation.analysis.one_chunk import one_chunk
from context_compressors.evaluation.analysis.pictures import (
    plot_allocation,
    plot_layer_weights,
    plot_singular_values,
    plot_slot_correlation,
)
from context_compressors.evaluation.analysis.slot_origins import reconstruction, slot_origins
from context_compressors.evaluation.analysis.slots import (
    SlotAnalysis,
    analyse_ids,
    draw,
    effective_rank,
    singular_values,
    slot_correlation,
    slot_measures,
    summary,
    table,
)
from context_compressors.modeling.modeling_comprexit import ComprExITForCausalLM
from context_compressors.modeling.modeling_five_hundred_x import FiveHundredXForCausalLM
from context_compressors.modeling.modeling_gmsa import GMSAForCausalLM
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
    with pytest.raises(ValueError, match=r"a singular value above 0, got values that sum up to 0\.0"):
        effective_rank(torch.zeros(3))


def test_singular_values_are_those_of_the_slots_in_descending_order():
    # Two slots of the same two tokens, and one of another.
    values = singular_values(torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    torch.testing.assert_close(values, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    assert effective_rank(values) == pytest.approx(2.0)


def test_correlation_by_hand():
    rows = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [3.0, 2.0, 1.0], [1.0, 3.0, 2.0]])
    expected = torch.tensor([[1, 1, -1, 0.5], [1, 1, -1, 0.5], [-1, -1, 1, -0.5], [0.5, 0.5, -0.5, 1]])
    torch.testing.assert_close(slot_correlation(rows), expected.double())


def test_correlation_is_numpys_on_random_weights():
    rows = torch.rand(6, 40, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(slot_correlation(rows).numpy(), np.corrcoef(rows.double().numpy()), atol=1e-12)


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


def test_layers_are_numbered_from_1_without_the_embeddings(llama, tokenizer):
    config = ComprExITConfig(decoder_config=llama, window_size=16, gate_size=8, literal_equations=True)
    analysis = analyse_slots(build(ComprExITForCausalLM, config), tokenizer, TEXT)
    assert (analysis.layer_weights.shape, analysis.first_layer) == ((len(TEXT), 3), 1)


def test_an_ablation_without_a_gate_shows_its_allocation_alone(llama, tokenizer):
    config = ComprExITConfig(decoder_config=llama, token_anchors=1, slot_aggregation="mean")
    analysis = analyse_slots(build(ComprExITForCausalLM, config), tokenizer, TEXT)
    assert analysis.layer_weights is None
    assert analysis.allocation[0].tolist() == [0.25] * 4 + [0.0] * (len(TEXT) - 4)


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
    (line,) = table({"ranked": found}).splitlines()[2:]
    assert [cell.strip() for cell in line.strip("|").split("|")] == ["ranked", "-", "1", "49.0", "13.0", "-", "-", "-"]


def test_any_other_memory_has_its_slot_vectors(llama, tokenizer):
    pooling = build(MeanPoolingForCausalLM, MeanPoolingConfig(decoder_config=llama, compression_ratios=(4,)))
    analysis = analyse_slots(pooling, tokenizer, TEXT)
    assert set(analysis.vectors) == {"slots"}
    assert analysis.slots.shape == (13, 32)


def test_merged_groups_have_no_memory_tokens_to_show(llama, tokenizer):
    merging = build(GMSAForCausalLM, GMSAConfig(decoder_config=llama, encoder_layers=1, compression_ratios=(4,)))
    assert set(analyse_slots(merging, tokenizer, TEXT).vectors) == {"slots"}


def test_a_document_is_read_in_the_encoders_tokens(llama, tokenizer):
    config = GMSAConfig(decoder_config=llama, encoder_layers=1, compression_ratios=(4,), appended_tokens=16)
    model = build(GMSAForCausalLM, config)
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    model.encoder_tokenizer = byte_tokenizer([*names.values()], backwards=True, **names)
    inputs = model.encoder_tokenizer(TEXT, return_tensors="pt")
    assert inputs.input_ids.tolist() != tokenizer(TEXT, return_tensors="pt").input_ids.tolist()
    analysis = analyse_slots(model, tokenizer, TEXT)
    assert "".join(analysis.tokens) == TEXT
    torch.testing.assert_close(analysis.slots, model.compress(**inputs).embeddings[0])
    last = attention_by_head(model.model, **inputs)[-1][0].mean(dim=0)
    torch.testing.assert_close(analysis.allocation, last / last.sum(dim=1, keepdim=True))
    torch.testing.assert_close(attention_of_ids(model, inputs.input_ids[0].tolist())[-1], last)


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
    chunks, _ = one_chunk(ranked.model, rows, None, 4, "")
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
    with pytest.raises(ValueError, match="the document has no tokens"):
        analyse_slots(comprexit, tokenizer, "")
    with pytest.raises(ValueError, match="3"):
        analyse_slots(comprexit, tokenizer, TEXT, 3)


# --- pictures ---


def titled(figure):
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


@pytest.mark.slow
def test_allocation_has_a_map_for_each_model_with_its_tokens(tmp_path, figures):
    weights = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "new" / "map.png"
    maps, tokens = {"a": weights, "b": torch.zeros(2, 200)}, {"a": ["$x", "\n", " y", "$", "z"], "b": ["t"] * 200}
    assert plot_allocation(maps, path, tokens) == path
    assert path.read_bytes().startswith(b"\x89PNG")
    axes = titled(figures[0])
    np.testing.assert_array_equal(axes["a"].images[0].get_array(), weights.numpy())
    assert axes["a"].images[0].get_clim() == pytest.approx((0, np.quantile(weights.numpy(), 0.99)))
    assert [label.get_text() for label in axes["a"].get_xticklabels()] == ["$x", "\\n", "y", "$", "z"]
    # 200 names would be a grey bar.
    assert "t" not in [label.get_text() for label in axes["b"].get_xticklabels()]


@pytest.mark.slow
def test_layer_weights_stand_with_layers_up_and_tokens_across(tmp_path, figures):
    weights = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
    plot_layer_weights({"a": weights, "b": weights}, tmp_path / "gate.png", {"a": ["x", "y"]}, {"b": 1})
    for name, bottom in (("a", -0.5), ("b", 0.5)):
        axes = titled(figures[0])[name]
        image = axes.images[0]
        np.testing.assert_array_equal(image.get_array(), weights.T.numpy())
        assert image.get_extent() == [-0.5, 1.5, bottom, bottom + 3]
        assert axes.get_ylim() == (bottom, bottom + 3)


@pytest.mark.slow
def test_correlations_share_one_scale(tmp_path, figures):
    plot_slot_correlation({"a": torch.eye(3), "b": torch.full((2, 2), -1.0)}, tmp_path / "correlation.png")
    axes = titled(figures[0])
    assert {name: each.images[0].get_clim() for name, each in axes.items()} == {"a": (-1, 1), "b": (-1, 1)}
    np.testing.assert_array_equal(axes["a"].images[0].get_array(), np.eye(3))


def test_singular_values_start_at_1_and_tell_the_rank(tmp_path, figures):
    spectra = {"a": torch.tensor([4.0, 2.0, 1.0]), "b": torch.tensor([3.0, 3.0])}
    plot_singular_values(spectra, {"a": 2.5, "b": 2.0}, tmp_path / "values.png")
    lines = {line.get_label(): line for line in figures[0].axes[0].lines}
    assert list(lines) == ["a, effective rank 2.50", "b, effective rank 2.00"]
    assert list(lines["a, effective rank 2.50"].get_ydata()) == [1.0, 0.5, 0.25]
    assert list(lines["b, effective rank 2.00"].get_xdata()) == [1, 2]


def test_pictures_of_nothing_are_refused(tmp_path):
    path = tmp_path / "picture.png"
    for items in ({}, {"a": torch.zeros(0, 3)}):
        for plot in (plot_allocation, plot_layer_weights, plot_slot_correlation):
            with pytest.raises(ValueError, match="nothing to draw"):
                plot(items, path)
        with pytest.raises(ValueError, match="nothing to draw"):
            plot_singular_values(items, {}, path)
    assert not path.exists()


def test_only_what_a_model_has_is_drawn(tmp_path):
    paths = draw({"a": SlotAnalysis(("x", "y"), 2, torch.eye(2))}, tmp_path / "pictures")
    assert [path.name for path in paths] == ["correlation_of_slots.png", "singular_values_of_slots.png"]
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {path.name for path in paths}


# --- the command ---


@pytest.fixture(scope="module")
def folders(icae, comprexit, tokenizer, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, model in (("icae", icae), ("comprexit", comprexit)):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.mark.slow
def test_command_compares_models_over_several_documents(folders, tokenizer, icae, tmp_path, capsys):
    documents, output = tmp_path / "rows.jsonl", tmp_path / "out"
    texts = [TEXT, "A ferry leaves at noon, and another one at six in the evening, or so."]
    documents.write_text("".join(json.dumps({"context": text}) + "\n" for text in texts), encoding="utf-8")
    compared = [str(folders / "comprexit"), f"other={folders / 'icae'}"]
    options = ["--document", str(documents), "--output", str(output), "--device", "cpu", "--max-tokens", "60"]
    assert cli.main(["analyse", *compared, *options]) == 0
    captured = capsys.readouterr()
    assert "cut 1 of 2 documents to their first 60 tokens" in captured.err
    assert "| other" in captured.out
    assert {path.name for path in output.iterdir()} == {
        "allocation.png",
        "layer_weights.png",
        "slot_analysis.json",
        *(
            f"{picture}_of_{kind}.png"
            for picture in ("correlation", "singular_values")
            for kind in ("allocation", "slots")
        ),
    }
    content = json.loads((output / "slot_analysis.json").read_text(encoding="utf-8"))
    assert list(content["models"]) == ["comprexit", "other"]
    found = content["models"]["other"]
    analyses = [analyse_slots(icae, tokenizer, text[:60]) for text in texts]
    assert (found["ratio"], found["num_documents"], found["num_tokens"]) == (4, 2, (len(TEXT) + 60) / 2)
    for kind in ("allocation", "slots"):
        expected = [slot_measures(analysis.vectors[kind]) for analysis in analyses]
        for name, value in found["measures"][kind].items():
            assert value == pytest.approx(sum(each[name] for each in expected) / 2, rel=1e-4), (kind, name)
    assert str(tmp_path) not in (output / "slot_analysis.json").read_text(encoding="utf-8")


def test_command_refuses_what_it_cannot_analyse(folders, tmp_path, capsys):
    document, output = tmp_path / "mill.txt", tmp_path / "out"
    document.write_text(2 * TEXT, encoding="utf-8")
    options = ["--document", str(document), "--output", str(output), "--device", "cpu"]
    for names, more, message in (
        (["icae"], [], "1 to 64 tokens (one chunk), got 98"),
        (["comprexit"], ["--ratio", "3"], "3"),
        (["comprexit"], ["--max-tokens", "4"], "at least 2 are needed, got 1"),
        (["icae", "icae"], [], "two models have the name 'icae': give names as NAME=MODEL"),
    ):
        assert cli.main(["analyse", *(str(folders / name) for name in names), *options, *more]) == 1
        assert message in capsys.readouterr().err
    assert not output.exists()
