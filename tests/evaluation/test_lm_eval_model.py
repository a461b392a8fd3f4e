# SPDX-License-Identifier: Apache-2.0
"""The model of lm-evaluation-harness: documents from the task's own field, and scores of the whole decoder."""

import json

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from naive_twin import encode, make_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from context_compressors import (
    CompressedContext,
    SnapKVForCausalLM,
    StreamingLLMForCausalLM,
)
from context_compressors.evaluation.lm_eval_model import CompressorLM
from context_compressors.modeling.parts.chat_template import opening_ids
from context_compressors.modeling.parts.prompting import message_ids

ROWS = [
    {"passage": "Ada keeps a cat named Tom in Rome.", "question": "Who keeps a cat?", "choices": ["Ada", "Tom"]},
    {"passage": "The box holds 7 pens.", "question": "How many pens?", "choices": ["7", "seventy-seven"]},
    {"passage": "A ferry leaves Bern at noon.", "question": "When does it leave?", "choices": ["at six", "noon"]},
]
PROMPT = "{passage}\nQuestion: {question}\nAnswer:"
TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] + '\n' + m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def words_as_slots(model, monkeypatch):
    """The documents' own token embeddings in place of slots."""

    def compress(input_ids, attention_mask, **kwargs):
        lengths = attention_mask.sum(dim=1)
        return CompressedContext(
            embeddings=model.get_input_embeddings()(input_ids),
            attention_mask=attention_mask,
            position_ids=torch.arange(input_ids.shape[1]) * attention_mask,
            num_context_tokens=lengths,
            ratio=1,
        )

    monkeypatch.setattr(model, "compress", compress)


@torch.no_grad()
def whole_decoder(model, before, target):
    """Log-probability of a target in the plain decoder's single row, and whether its tokens were the likeliest."""
    logits = model(torch.tensor([[*before, *target]])).logits[0, len(before) - 1 : -1].log_softmax(-1)
    greedy = logits.argmax(-1).tolist() == target
    return float(logits[range(len(target)), target].sum()), greedy


def requests(kind, *arguments, rows=ROWS):
    return [
        Instance(kind, row, tuple(argument(row) for argument in arguments), 0, ("toy", number, 1))
        for number, row in enumerate(rows)
    ]


def prompt(row):
    return PROMPT.format(**row)


@pytest.fixture
def new(model, tokenizer):
    def build(**options):
        return CompressorLM(model, tokenizer, **{"document_field": "passage", **options})

    return build


def test_with_the_documents_words_as_slots_scores_are_the_whole_decoders(new, model, tokenizer, monkeypatch):
    words_as_slots(model, monkeypatch)
    pairs = [(row, choice) for row in ROWS for choice in row["choices"]]
    rows = [{**row, "choice": choice} for row, choice in pairs]
    found = new(batch_size=4).loglikelihood(
        requests("loglikelihood", prompt, lambda row: f" {row['choice']}", rows=rows), disable_tqdm=True
    )
    for (row, choice), (score, greedy) in zip(pairs, found, strict=True):
        rest = f"\nQuestion: {row['question']}\nAnswer:"
        before = [*encode(tokenizer, row["passage"]), tokenizer.bos_token_id, *encode(tokenizer, rest)]
        wanted = whole_decoder(model, before, encode(tokenizer, f" {choice}"))
        assert score == pytest.approx(wanted[0], abs=1e-3)
        assert greedy == wanted[1]


@torch.no_grad()
@pytest.mark.parametrize("method", [StreamingLLMForCausalLM, SnapKVForCausalLM])
def test_memories_that_open_the_text_are_read_at_ratio_1_as_the_whole_decoder_reads(method, folders, tokenizer):
    model = method.from_base(folders / "base")
    lm = CompressorLM(model, tokenizer, ratio=1, document_field="passage", batch_size=3)
    asked = requests("loglikelihood", prompt, lambda row: f" {row['choices'][0]}")
    scores = lm.loglikelihood(asked, disable_tqdm=True)
    how = {"until": ["\n"], "max_gen_toks": 5}
    written = lm.generate_until(requests("generate_until", prompt, lambda _: how), disable_tqdm=True)
    for row, (score, greedy), text in zip(ROWS, scores, written, strict=True):
        rest = f"\nQuestion: {row['question']}\nAnswer:"
        before = [tokenizer.bos_token_id, *encode(tokenizer, row["passage"]), *encode(tokenizer, rest)]
        wanted = whole_decoder(model, before, encode(tokenizer, f" {row['choices'][0]}"))
        assert (score, greedy) == (pytest.approx(wanted[0], abs=1e-3), wanted[1])
        ids = model.generate(torch.tensor([before]), max_new_tokens=5, do_sample=False)[0, len(before) :]
        assert text == tokenizer.decode(ids, skip_special_tokens=True).partition("\n")[0]


@pytest.mark.parametrize("options", [{"ratio": 4}, {"document_field": None}])
def test_a_batch_gives_what_single_requests_give(new, options):
    one, four = new(**options), new(**options, batch_size=4)
    how = {"until": ["e", "\n\n"], "max_gen_toks": 6}
    for kind, second in (("loglikelihood", lambda _: " noon"), ("generate_until", lambda _: how)):
        alone, together = (getattr(lm, kind)(requests(kind, prompt, second), disable_tqdm=True) for lm in (one, four))
        if kind == "loglikelihood":
            assert [score for score, _ in together] == pytest.approx([score for score, _ in alone], abs=1e-4)
        else:
            assert together == alone
            assert all("e" not in text for text in together)


def test_a_document_matters_and_the_ratio_is_the_one_asked_for(new):
    asked = requests("loglikelihood", prompt, lambda _: " noon")
    scores = [new(ratio=ratio).loglikelihood(asked, disable_tqdm=True) for ratio in (None, 2, 4)]
    assert scores[0] == scores[1] != scores[2]
    others = [{**row, "passage": "Nobody knows."} for row in ROWS]
    assert new().loglikelihood(requests("loglikelihood", prompt, lambda _: " noon", rows=others)) != scores[0]
    with pytest.raises(ValueError, match=r"it has \[2, 4\]"):
        new(ratio=3).loglikelihood(asked)
    lm = new(ratio=3, allow_untrained_ratio=True)
    lm.loglikelihood(asked, disable_tqdm=True)
    assert lm.get_model_info()["ratio"] == 3
    with pytest.raises(NotImplementedError, match="--tasks continuation"):
        lm.loglikelihood_rolling(asked)


@pytest.mark.parametrize("opens_context", [False, True])
def test_a_chat_is_read_as_the_checkpoint_was_trained(model, monkeypatch, opens_context):
    tokenizer = make_tokenizer()
    # One token for two line breaks, which would reach from the opening into the words.
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["model"]["vocab"]["ĊĊ"], backend["model"]["merges"] = len(tokenizer), [["Ċ", "Ċ"]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)), **tokenizer.special_tokens_map
    )
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(model.config, "prompt_format", "chat")
    monkeypatch.setattr(model.config, "slots_after_ids", opening_ids(tokenizer))
    monkeypatch.setattr(type(model.config), "opens_context", opens_context)
    lm = CompressorLM(model, tokenizer, document_field="passage")
    message = {"role": "user", "content": f"{ROWS[0]['passage']}\n\nWho?"}
    text = lm.apply_chat_template([message])
    read = []
    monkeypatch.setattr(lm, "_scores", lambda readings, bar: read.extend(readings) or [(0.0, True)])
    lm.loglikelihood(requests("loglikelihood", lambda _: text, lambda _: "Ada", rows=ROWS[:1]), disable_tqdm=True)
    assert read[0].document == ROWS[0]["passage"]
    # The harness counts a prompt's last white space to the continuation.
    assert read[0].target_ids == encode(tokenizer, "\nAda")
    assert read[0].text_ids == message_ids(model.config, tokenizer, "Who?")[:-1]


@pytest.mark.parametrize(
    ("options", "row", "message"),
    [
        ({"document_field": "pasage"}, {}, "document 0 of task 'toy' has no text in 'pasage'; did you mean 'passage'"),
        ({}, {"passage": " "}, "has no text in 'passage': name its field"),
        ({"document_field": "hidden"}, {"hidden": "Another text."}, "does not hold the document word for word"),
    ],
)
def test_a_document_that_is_not_where_it_is_said_to_be_is_refused(new, options, row, message):
    asked = requests("loglikelihood", prompt, lambda _: " noon", rows=[{**ROWS[0], **row}])
    with pytest.raises((ValueError, TypeError), match=message):
        new(**options).loglikelihood(asked, disable_tqdm=True)


@pytest.mark.slow
def test_the_harness_evaluates_a_local_task_by_instance_and_by_name(new, model, tokenizer, folders, tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    shared = {
        "dataset_path": "parquet",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.parquet")}},
        "test_split": "test",
        "metadata": {"version": 1},
    }
    tasks = {
        "choose": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{passage}}\nQuestion: {{question}}\nAnswer:",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": 0,
            "num_fewshot": 1,
            "metric_list": [{"metric": "acc"}, {"metric": "acc_mutual_info"}],
        },
        "write": {
            "output_type": "generate_until",
            "doc_to_text": "{{passage}} {{question}}",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 4},
            "metric_list": [{"metric": "bypass"}],
        },
    }
    for name, task in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **shared, **task}))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    common = {"tasks": list(tasks), "task_manager": manager, "bootstrap_iters": 0}
    results = simple_evaluate(model=new(ratio=4, batch_size=2), **common)
    named = simple_evaluate(
        model="context-compressor",
        model_args={"pretrained": str(folders / "tiny-compressor"), "ratio": 4, "document_field": "passage"},
        batch_size=3,
        device="cpu",
        **common,
    )
    assert results["results"] == named["results"]
    assert results["config"]["ratio"] == 4
    assert results["config"]["model_fingerprint"] == named["config"]["model_fingerprint"]
    scores = [sample["filtered_resps"] for sample in results["samples"]["choose"]]
    for sample, found in zip(results["samples"]["choose"], scores, strict=True):
        asked, row = sample["arguments"], sample["doc"]
        memory = model.compress(torch.tensor([encode(tokenizer, row["passage"])]), ratio=4)
        for (text, choice), (score, _) in zip(asked, found, strict=True):
            ids = [tokenizer.bos_token_id, *encode(tokenizer, text.replace(row["passage"], ""))]
            target = encode(tokenizer, choice)
            given = {"memory": memory} if text else {}
            with torch.no_grad():
                logits = model(torch.tensor([[*ids, *target]]), **given).logits[0, len(ids) - 1 : -1]
            wanted = logits.log_softmax(-1)[range(len(target)), target].sum()
            assert score == pytest.approx(float(wanted), abs=1e-3)
