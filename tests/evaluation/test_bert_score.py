# SPDX-License-Identifier: Apache-2.0
"""BERTScore with a tiny scorer, against a twin that matches tokens one by one."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.metrics import BertScorer
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.evaluation.settings import EvaluationSettings

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
WORDS = ["red", "fox", "jumps", "over", "the", "lazy", "dog", "today"]
PREDICTIONS = ["red fox", "the", "lazy dog over the fox today", "jumps over"]
REFERENCES = [["red fox jumps over"], ["dog today lazy", "the"], ["the fox"], ["red"]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
        initializer_range=0.5,
    )
    path = tmp_path_factory.mktemp("scorer")
    BertModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def twin(folder: str, tokenizer: PreTrainedTokenizerFast, prediction: str, reference: str) -> float:
    model = BertModel.from_pretrained(folder).eval()
    vectors = []
    for text in (prediction, reference):
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(states[1:-1], dim=-1))
    similarity = vectors[0] @ vectors[1].T
    precision, recall = similarity.amax(dim=1).mean(), similarity.amax(dim=0).mean()
    return float(2 * precision * recall / (precision + recall))


def test_scores_are_those_of_each_pair_alone(folder: str, tokenizer: PreTrainedTokenizerFast):
    scorer = BertScorer(folder)
    best = [
        max(twin(folder, tokenizer, prediction, text) for text in texts)
        for prediction, texts in zip(PREDICTIONS, REFERENCES, strict=True)
    ]
    assert scorer.score(PREDICTIONS, REFERENCES) == pytest.approx(100 * sum(best) / 4, abs=1e-3)
    assert scorer.score(["red fox"], [["red fox"]]) == pytest.approx(100, abs=1e-3)
    assert scorer.score([""], [["red fox"]]) == 0


def test_an_evaluation_scores_what_is_written(folder: str, tokenizer: PreTrainedTokenizerFast):
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="[CLS]", eos_token="[SEP]", pad_token="[PAD]"
    )
    data = [EvaluationDataset("tiny", [{"context": "red fox jumps over", "question": "the", "answers": ["dog"]}])]
    tasks, limits = ("question_answering", "reconstruction"), {"question_answering": 4, "summarization": 4}
    settings = EvaluationSettings(tasks, max_new_tokens=limits, reconstruction_bleu=True, bert_score_model=folder)
    report = evaluate_model(LlamaForCausalLM(config), words, data, settings, progress=False)
    for task in tasks:
        for condition in ("no_context", "full_context"):
            assert -100 <= report.score("tiny", task, condition, "bert_score_f1") <= 100
    # A report names no folders.
    assert report.settings["bert_score_model"] == Path(folder).name
