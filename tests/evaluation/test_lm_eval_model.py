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
    DeCALConfig,
    DeCALForConditionalGeneration,
    SnapKVForCausalLM,
    StreamingLLMForCausalLM,
)
from context_compressors.evaluation.lm_eval_model import CompressorLM
from context_compressors.modeling.parts.chat_template import opening_ids
from context_compressors.modeling.parts.prompting import document_ids, message_ids

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


def test_a_text_longer_than_the_decoder_is_scored_in_windows_behind_the_slots(new, model, tokenizer, monkeypatch):
    words_as_slots(model, monkeypatch)
    monkeypatch.setattr(model.config.decoder_config, "max_position_embeddings", 60)
    text = "The cat sleeps on the roof of the old house near the river."
    (found,) = new().loglikelihood_rolling(
        requests("loglikelihood_rolling", lambda _: text, rows=ROWS[:1]), disable_tqdm=True
    )
    slots, ids = [*encode(tokenizer, ROWS[0]["passage"]), tokenizer.bos_token_id], encode(tokenizer, text)
    room = 60 - len(slots)
    last = len(ids) % room
    assert len(ids) == 2 * room + last
    assert last > 1
    wanted = whole_decoder(model, slots, ids[:room])[0]
    wanted += whole_decoder(model, [*slots, ids[room - 1]], ids[room : 2 * room])[0]
    # The last window begins as far back as it can.
    wanted += whole_decoder(model, [*slots, *ids[len(ids) - room - 1 : -last]], ids[-last:])[0]
    assert found == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("has_document", [True, False])
def test_a_prompt_that_the_decoder_has_no_positions_for_is_cut_on_the_left(
    new, model, tokenizer, monkeypatch, has_document
):
    words_as_slots(model, monkeypatch)
    rest = "\nQuestion: Who keeps a cat named Tom?\nAnswer:"
    # The harness counts a prompt's last white space to the continuation.
    rows, asked = ROWS[:2], "{passage}" * has_document + rest
    slots = [encode(tokenizer, row["passage"]) if has_document else [] for row in rows]
    limit = max(map(len, slots)) + 42
    monkeypatch.setattr(model.config.decoder_config, "max_position_embeddings", limit)
    lm = new(batch_size=2, document_field="passage" if has_document else None)
    found = lm.loglikelihood(
        requests("loglikelihood", lambda row: asked.format(**row), lambda _: " Ada does", rows=rows), disable_tqdm=True
    )
    words, target = encode(tokenizer, rest), encode(tokenizer, " Ada does")
    num_cut = 0
    for own, (score, greedy) in zip(slots, found, strict=True):
        room = limit - len(own) - 1 - (len(target) - 1)
        num_cut += len(words) > room
        wanted = whole_decoder(model, [*own, tokenizer.bos_token_id, *words[-room:]], target)
        assert (score, greedy) == (pytest.approx(wanted[0], abs=1e-3), wanted[1])
    assert num_cut == lm.get_model_info()["prompts_cut"] == (1 if has_document else 2)
    # What is written has its positions, too.
    read, kept_generate = [], model.generate
    monkeypatch.setattr(
        model, "generate", lambda **kwargs: read.append(kwargs["input_ids"].tolist()) or kept_generate(**kwargs)
    )
    how = {"until": [], "max_gen_toks": 5}
    lm.generate_until(
        requests("generate_until", lambda row: asked.format(**row), lambda _: how, rows=rows[:1]), disable_tqdm=True
    )
    assert read == [[[tokenizer.bos_token_id, *words[-(limit - len(slots[0]) - 1 - 5) :]]]]
    # A continuation is never cut.
    with pytest.raises(
        ValueError, match=f"{limit} positions, too few however short the prompt is: .* and 299 for what"
    ):
        lm.loglikelihood(requests("loglikelihood", lambda row: asked.format(**row), lambda _: "x" * 300, rows=rows))


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


def test_texts_start_as_the_checkpoints_do(token_model, tokenizer):
    shape = {"vocab_size": len(tokenizer), "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    special = {"decoder_start_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    encoder_decoder = DeCALForConditionalGeneration(DeCALConfig(decoder_config={**shape, **special})).eval()
    for model in (token_model, encoder_decoder):
        lm = CompressorLM(model, tokenizer, document_field="passage", batch_size=2)
        found = lm.loglikelihood(requests("loglikelihood", prompt, lambda _: " noon"), disable_tqdm=True)
        for row, (score, _) in zip(ROWS, found, strict=True):
            memory = model.compress(torch.tensor([document_ids(model.config, tokenizer, row["passage"])]))
            rest = f"\nQuestion: {row['question']}\nAnswer:"
            ids = [model.config.continuation_token_id, *encode(tokenizer, rest)]
            target = encode(tokenizer, " noon")
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*ids, *target]]), memory=memory).logits[0, len(ids) - 1 : -1]
            wanted = logits.log_softmax(-1)[range(len(target)), target].sum()
            assert score == pytest.approx(float(wanted), abs=1e-3)


def test_a_document_matters_and_the_ratio_is_the_one_asked_for(new):
    asked = requests("loglikelihood", prompt, lambda _: " noon")
    scores = [new(ratio=ratio).loglikelihood(asked, disable_tqdm=True) for ratio in (None, 2, 4)]
    assert scores[0] == scores[1] != scores[2]
    others = [{**row, "passage": "Nobody knows."} for row in ROWS]
    assert new().loglikelihood(requests("loglikelihood", prompt, lambda _: " noon", rows=others)) != scores[0]
    with pytest.raises(ValueError, match=r"it has \[2, 4\]"):
        new(ratio=3).loglikelihood(asked)
    lm = new(ratio=3, allow_untrained_ratio=True, max_document_tokens=25)
    lm.loglikelihood(asked, disable_tqdm=True)
    assert {"ratio": 3, "documents": 3, "documents_cut": 2}.items() <= lm.get_model_info().items()


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
    # Where a prompt is cut, the slots keep their place in the user's turn.
    opening = opening_ids(tokenizer)
    assert read[0].text_ids[: read[0].num_kept] == ([] if opens_context else opening)


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


def test_what_cannot_be_a_model_is_refused(new, model, teacher, tokenizer):
    with pytest.raises(TypeError, match="a compressor with its LM head, got LlamaForCausalLM"):
        CompressorLM(teacher, tokenizer)
    with pytest.raises(ValueError, match="needs its tokenizer"):
        CompressorLM(model)
    with pytest.raises(ValueError, match="use_cache keeps answers by their prompts"):
        new(document_in_prompt=False).set_cache_hook(None)


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
