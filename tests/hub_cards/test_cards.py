# SPDX-License-Identifier: Apache-2.0
"""Model cards: valid metadata, every number beside its bounds, and nothing left out."""

import re

import pytest
import torch
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models, processors
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from context_compressors.configuration.configuration_decal import DeCALConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.configuration.methods import METHODS, config_class
from context_compressors.hub_cards.cards import Score, method_text, model_card

TRAINING = "Steps: 48,000"
SCORES = [
    Score("question_answering", "SQuAD", "exact match", 4, 61.25, no_context=3.5, full_context=80.0),
    Score("continuation", "OpenStax", "perplexity", 8, 21.0, no_context=30.0, full_context=18.125),
]
LIMITS = ["It has read English only.", "It was never asked about more than 512 tokens."]


def config(**fields):
    fields = {"base_model_name_or_path": "org/base", "base_model_revision": "abc123", **fields}
    return MeanPoolingConfig(**{"compression_ratios": (4, 8), **fields})


def card(**changes):
    arguments = {"config": config(), "training": TRAINING, "scores": SCORES, "limits": LIMITS, **changes}
    return model_card(**arguments, model_id="me/mean-pooling-small")


def test_metadata_is_read_back_by_the_hub_library():
    light = config(external_weights={"decoder": {"repo_id": "org/base"}})
    data = ModelCard(card(config=light, datasets=["rajpurkar/squad"], new_version="me/better")).data
    assert (data.base_model, data.base_model_relation, data.new_version) == ("org/base", "adapter", "me/better")
    assert data.datasets == ["rajpurkar/squad"]
    assert [result.dataset_type for result in data.eval_results] == ["rajpurkar/squad", "openstax"]
    assert not hasattr(ModelCard(card()).data, "base_model_relation")
    assert data.library_name == "transformers"
    assert data.license == "apache-2.0"
    assert data.tags == ["context-compression", "soft-prompt", "mean-pooling"]
    assert [(result.metric_name, result.metric_value) for result in data.eval_results] == [
        ("exact match, ratio 4", 61.25),
        ("continuation perplexity, ratio 8", 21.0),
    ]
    assert [result.task_type for result in data.eval_results] == ["question-answering", "text-generation"]


def test_text_names_base_data_training_scores_limits_and_paper():
    text = re.sub(" +", " ", ModelCard(card()).text)
    for part in (
        "org/base, revision abc123",
        "| Question answering | SQuAD | exact match | 4 | 3.50 | 61.25 | 80.00 |",
        TRAINING,
        *LIMITS,
        'name = "me/mean-pooling-small"',
        "ratio=4)",
        "transformers` and `peft`",
        "one vector for every 4 or 8 tokens",
        "eprint = {2510.20797}",
    ):
        assert part in text, part
    assert "$" not in text


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_text_with_its_citation(method):
    text = card(config=config_class(method)(), scores=[])
    assert text.count("## Method") == text.count("## Citation") == 1
    assert "@" in method_text(config_class(method)()).partition("```bibtex")[2]
    assert "$" not in text
    assert ModelCard(text).data.tags[-1] == method.replace("_", "-")


@pytest.mark.parametrize("placement", ["decoder", "encoder"])
def test_the_snippets_of_an_encoder_decoder_ask_where_its_questions_are_placed(placement, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = Tokenizer(models.BPE(vocab={"<pad>": 0, "</s>": 1, "a": 2, "b": 3}, merges=[]))
    # As in T5: whatever is tokenized gets EOS behind.
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    t5 = {"vocab_size": 4, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = DeCALConfig(decoder_config=t5, question_placement=placement)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids, context = torch.tensor([[2, 3]]), torch.tensor([[2, 3, 3, 2, 1]])
    expected = model.generate(ids, context_input_ids=context, max_new_tokens=32)[:, 2:]
    written = model_card(config, TRAINING, [], LIMITS, model_id=str(tmp_path))
    for text in (written, (tmp_path / "README.md").read_text(encoding="utf-8")):
        assert ("memory.save" in text) == (placement == "decoder")
        code = text.partition("```python\n")[2].partition("```")[0]
        names = {"document": "abba", "question": "ab"}
        exec(code.replace("document.safetensors", str(tmp_path / "document.safetensors")), names)
        assert names["answer"][:, 3:].equal(expected)


@pytest.mark.parametrize(("parent", "base"), [("me/parent", "me/parent"), ("parent", "org/base")])
def test_a_fine_tuned_checkpoint_names_its_parent(parent, base):
    text = card(config=config(parent_model_name_or_path=parent))
    # The Hub draws a model's family tree from this field, where a folder's name means nothing.
    assert ModelCard(text).data.base_model == base
    assert f"| Fine-tuned from | {parent} |" in text
