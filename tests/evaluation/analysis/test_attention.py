# SPDX-License-Identifier: Apache-2.0
"""Attention of memory tokens: averaged over heads, drawn by layer, and refused where there is none."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from context_compressors import cli
from context_compressors.configuration.configuration_gmsa import GMSAConfig
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.evaluation.analysis.attention import attention_by_head, attention_of_ids, context_tokenizer
from context_compressors.evaluation.analysis.pictures import plot_memory_attention
from context_compressors.modeling.modeling_gmsa import GMSAForCausalLM
from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.modeling.parts.prompting import document_ids

TEXT = "The mill stands by the river."


def memory_attention(model, tokenizer, text, ratio=None):
    return attention_of_ids(model, document_ids(model.config, context_tokenizer(model, tokenizer), text), ratio)


@pytest.fixture(scope="module")
def model(llama):
    torch.manual_seed(0)
    config = ICAEConfig(decoder_config=llama, compression_ratios=(4, 8), chunk_size=64, position_layout="enhanced")
    return ICAEForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("icae")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, for a look at their axes."""
    saved = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: saved.append(figure) or save(figure, *a, **k))
    return saved


def test_heads_are_averaged_layer_by_layer(model, tokenizer, monkeypatch):
    asked = []

    def two_layers_of_two_heads(backbone, input_ids, ratio):
        asked.append((input_ids.tolist(), ratio))
        heads = torch.tensor([[[[0.1, 0.2, 0.3]], [[0.3, 0.4, 0.7]]]])
        return heads, heads / 2

    monkeypatch.setattr("context_compressors.evaluation.analysis.attention.attention_by_head", two_layers_of_two_heads)
    attention = memory_attention(model, tokenizer, "abc", ratio=3)
    assert asked == [([tokenizer("abc").input_ids], 3)]
    torch.testing.assert_close(attention, torch.tensor([[[0.2, 0.3, 0.5]], [[0.1, 0.15, 0.25]]]))


def test_a_document_gives_a_row_for_each_memory_token(model, tokenizer):
    for ratio, num_memory_tokens in ((None, 8), (8, 4)):
        attention = memory_attention(model, tokenizer, TEXT, ratio)
        assert attention.shape == (3, num_memory_tokens, len(TEXT))
        # The rest of a row is attention to memory tokens, of which each sees itself at least.
        sums = attention.sum(dim=-1)
        assert ((sums > 0) & (sums < 1)).all()
    heads = attention_by_head(model.base_model, tokenizer(TEXT, return_tensors="pt").input_ids, ratio=8)
    torch.testing.assert_close(attention, torch.stack([layer[0].mean(dim=0) for layer in heads]))


def test_a_method_without_memory_tokens_is_refused(llama, tokenizer):
    pooling = MeanPoolingForCausalLM(MeanPoolingConfig(decoder_config=llama))
    with pytest.raises(ValueError, match="MeanPoolingForCausalLM has no memory tokens"):
        memory_attention(pooling, tokenizer, TEXT)
    merging = GMSAForCausalLM(GMSAConfig(decoder_config=llama, encoder_layers=1))
    with pytest.raises(ValueError, match="GMSAForCausalLM has no memory tokens"):
        memory_attention(merging, tokenizer, TEXT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "titles"),
    [(None, ["layer 2 of 4", "layer 4 of 4"]), ([3], ["layer 3 of 4"]), ([4, 1], ["layer 4 of 4", "layer 1 of 4"])],
)
def test_the_picture_has_a_map_of_each_chosen_layer(tmp_path, figures, layers, titles):
    attention = torch.rand(4, 3, 12)
    path = plot_memory_attention(attention, tmp_path / "new" / "map.png", layers)
    assert path.read_bytes().startswith(b"\x89PNG")
    maps = [axes for axes in figures[0].axes if axes.get_title()]
    assert [axes.get_title() for axes in maps] == titles
    for axes, title in zip(maps, titles, strict=True):
        expected = attention[int(title.split()[1]) - 1].numpy()
        np.testing.assert_array_equal(axes.images[0].get_array(), expected)
        assert axes.images[0].get_clim() == pytest.approx((0, np.quantile(expected, 0.99)))
        # 12 tokens in 3 groups of 4, whose middles are 1.5, 5.5 and 9.5: half to even.
        assert list(axes.lines[0].get_xdata()) == [2, 6, 10]


def test_a_single_layer_is_drawn_once(tmp_path, figures):
    plot_memory_attention(torch.zeros(1, 2, 4), tmp_path / "map.png")
    assert [axes.get_title() for axes in figures[0].axes if axes.get_title()] == ["layer 1 of 1"]


@pytest.mark.parametrize("layers", [[0], [5], [], [1, 9]])
def test_layers_that_are_not_there_are_refused(tmp_path, layers):
    with pytest.raises(ValueError, match=r"layers must be one or more of 1 to 4, got"):
        plot_memory_attention(torch.rand(4, 3, 12), tmp_path / "map.png", layers)
    with pytest.raises(ValueError, match=r"no attention to draw in shape \(4, 0, 12\)"):
        plot_memory_attention(torch.rand(4, 0, 12), tmp_path / "map.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_command_draws_a_document(folder, tmp_path, capsys):
    document, output = tmp_path / "mill.txt", tmp_path / "map.png"
    document.write_text(TEXT, encoding="utf-8")
    options = ["--document", str(document), "--output", str(output), "--device", "cpu"]
    assert cli.main(["attention", folder, *options, "--ratio", "8", "--layers", "1"]) == 0
    assert "4 memory tokens of 29 context tokens" in capsys.readouterr().out
    assert output.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["attention", folder, *options, "--max-tokens", "9", "--overwrite"]) == 0
    captured = capsys.readouterr()
    assert "3 memory tokens of 9 context tokens" in captured.out
    assert "cut the document from 29 to 9 tokens" in captured.err


def test_command_refuses_what_it_cannot_draw(folder, tmp_path, capsys):
    document, rows = tmp_path / "long.txt", tmp_path / "rows.jsonl"
    document.write_text(TEXT * 3, encoding="utf-8")
    rows.write_text('{"context": "a"}\n{"context": "b"}\n', encoding="utf-8")
    options = ["--output", str(tmp_path / "map.png"), "--device", "cpu"]
    for arguments, message in (
        (["--document", str(document)], "1 to 64 tokens (one chunk), got 87"),
        (["--document", str(rows)], "holds 2 documents: give a file with one"),
        (["--document", str(document), "--max-tokens", "8", "--ratio", "3"], "3"),
        (["--document", str(document), "--max-tokens", "8", "--layers", "4"], "1 to 3, got [4]"),
    ):
        assert cli.main(["attention", folder, *options, *arguments]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "map.png").exists()
