# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM and SnapKV: which keys and values stay, beside kvpress and a naive twin; nothing of them trains."""

import inspect
from pathlib import Path

import pytest
import test_generation
import test_padding
import test_positions_and_chunks
import test_saving
import torch
import yaml
from decal_models import build as build_decal
from test_chat_prompts import DOCUMENT, ONE_TURN, TEMPLATE, WITH_SYSTEM, templated
from test_generation import texts  # noqa: F401
from tiny_bases import FAR_APART, ids_of
from tiny_models import TRAINING_FREE, TRAINING_FREE_CASES, Case, plain_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from context_compressors import CompressedContext, SnapKVForCausalLM, StreamingLLMForCausalLM

STREAMING_LLM, SNAP_KV = map(Case, TRAINING_FREE[:2])
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}

# --- beside kvpress ---

PRESS = yaml.safe_load(Path(__file__).with_name("kvpress_places.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def kvpress_base(tmp_path_factory):
    """Folder of the model, whose weights are the same in every version of the libraries."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    model, generator = LlamaForCausalLM(config), torch.Generator().manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        is_norm = "norm" in name
        weight.data = torch.ones_like(weight) if is_norm else 0.3 * torch.randn(weight.shape, generator=generator)
    folder = tmp_path_factory.mktemp("kvpress")
    model.save_pretrained(folder)
    return folder


def kvpress_ids(length):
    return torch.randint(5, 128, (1, length), generator=torch.Generator().manual_seed(length))


def places(memory, whole):
    """By layer and head, where each of a memory's keys stands in the whole context."""
    pairs = zip(memory.key_values, whole.key_values, strict=True)
    return [
        [
            torch.cdist(whole_head, head).argmin(dim=0).tolist()
            for head, whole_head in zip(kept[0], all_[0], strict=True)
        ]
        for (kept, _), (all_, _) in pairs
    ]


def test_snap_kv_keeps_what_kvpress_keeps(kvpress_base):
    for case in PRESS["snap_kv"]:
        length, ratio, window, kernel = case["settings"]
        model = SnapKVForCausalLM.from_base(kvpress_base, window_size=window, kernel_size=kernel)
        memory, whole = model.compress(kvpress_ids(length), ratio=[ratio, 1])
        end = list(range(length - window, length))
        assert places(memory, whole) == [[[*head, *end] for head in layer] for layer in case["places"]]
    model = SnapKVForCausalLM.from_base(kvpress_base, question_placement="encoder")
    ids = kvpress_ids(105)
    memory, whole = model.compress(ids[:, :96], ratio=[4, 1], question_input_ids=ids[:, 96:])
    assert places(memory, whole) == PRESS["question"]


def test_streaming_llm_keeps_what_kvpress_keeps_and_rotates_it_as_kvpress_does(kvpress_base):
    model = StreamingLLMForCausalLM.from_base(kvpress_base, position_layout="enhanced")
    for (length, ratio), expected in ((case["settings"], case["places"]) for case in PRESS["streaming_llm"]):
        memory, whole = model.compress(kvpress_ids(length), ratio=[ratio, 1])
        assert places(memory, whole) == [[expected] * 2] * 2
        assert memory.position_ids.tolist() == [expected]
    model = StreamingLLMForCausalLM.from_base(kvpress_base)
    memory = model.compress(kvpress_ids(64), ratio=8)
    assert memory.position_ids.tolist() == [list(range(8))]
    found = memory.key_values[1][0][0, 1, 5, :4]
    torch.testing.assert_close(found, torch.tensor(PRESS["rerotated_key"]), atol=1e-5, rtol=1e-5)
    # The latest token stays before any sink does.
    model = StreamingLLMForCausalLM.from_base(kvpress_base, position_layout="enhanced")
    few = [model.compress(kvpress_ids(20), ratio=ratio).position_ids[0].tolist() for ratio in (5, 8, 20, 40)]
    assert few == [[0, 1, 2, 19], [0, 1, 19], [19], [19]]


# --- beside a naive twin ---


def naive_snap_kv(model, ids, ratio, question=None):
    """By layer and head the places that stay, in plain loops over the attention of one whole reading."""
    config, length = model.config, len(ids)
    row = ids if question is None else torch.cat([ids, question])
    plain = plain_model(model, "eager")
    attentions = plain(row[None], output_attentions=True).attentions
    num_slots = -(-length // ratio)
    if question is not None:
        window, num_forced = min(len(question), config.window_size), 0
    else:
        window = config.window_size if num_slots > config.window_size else max(1, num_slots // 2)
        num_forced = window
    heads = config.decoder_config.num_key_value_heads
    kept = []
    for weights in attentions:
        kept.append([])
        for group in weights[0].unflatten(0, (heads, -1)):
            prefix = length - num_forced
            votes = group[:, -window:, :prefix].sum(dim=1).tolist()
            reach, pool = config.kernel_size // 2, sum if config.pooling == "average" else max
            pooled = [
                sum(pool(of_query_head[max(0, place - reach) : place + reach + 1]) for of_query_head in votes)
                for place in range(prefix)
            ]
            best = sorted(range(prefix), key=lambda place: -pooled[place])[: num_slots - num_forced]
            kept[-1].append([*sorted(best), *range(prefix, length)])
    return kept


@pytest.mark.slow
@torch.no_grad()
def test_snap_kv_is_a_loop_over_layers_heads_and_places(random_rows, pad_rows):
    rows, asked = random_rows([33, 9, 1, 20]), random_rows([4, 2, 6, 1], seed=3)
    for architecture, attention in FAR_APART:
        for placement in ("decoder", "encoder"):
            case = SNAP_KV.on(architecture=architecture, attention=attention)
            pooling = "average" if architecture == "llama" else "max"
            model = case.build(question_placement=placement, window_size=5, pooling=pooling)
            by_question = placement == "encoder"
            ids, mask = pad_rows(rows, "left")
            given = {}
            if by_question:
                question, question_mask = pad_rows(asked, "right")
                given = {"question_input_ids": question, "question_attention_mask": question_mask}
            for memory in model.compress(ids, mask, ratio=[2, 3, 8], **given):
                whole = model.compress(ids, mask, ratio=1, **given)
                for i, row in enumerate(rows):
                    expected = naive_snap_kv(model, row, memory.ratio, asked[i] if by_question else None)
                    assert places(memory.rows(i), whole.rows(i)) == expected, (case, placement, memory.ratio, i)


# --- beside the plain model ---


@pytest.mark.slow
@torch.no_grad()
def test_at_ratio_1_the_memory_is_the_whole_context():
    for case in TRAINING_FREE_CASES:
        model, ids, text = case.model, ids_of(13), ids_of(5, seed=1)
        plain = plain_model(model)
        memory, row = model.compress(ids, ratio=1), torch.cat([ids, text], dim=1)
        torch.testing.assert_close(model(text, memory=memory).logits, plain(row).logits[:, 13:], atol=1e-5, rtol=1e-4)
        answer = model.generate(text, memory=memory, **GREEDY)
        assert answer[0, 5:].tolist() == plain.generate(row, **GREEDY)[0, 18:].tolist(), case


# --- the shared tests ---


# Those that follow no gradient; others have these methods among their cases.
SHARED = (
    test_padding.test_slots_and_logits_do_not_depend_on_the_batch_or_its_padding,
    test_padding.test_what_stands_at_a_pad_does_not_matter,
    test_positions_and_chunks.test_many_ratios_cost_one_pass_and_equal_separate_calls,
    test_positions_and_chunks.test_callers_positions_count_within_the_text,
    test_generation.test_every_way_to_generate_greedily_gives_the_same_ids,
    test_saving.test_a_models_name_tells_every_setting_that_changes_slots_or_reading,
)


@pytest.mark.slow
@pytest.mark.parametrize("check", SHARED, ids=lambda check: check.__name__)
def test_the_shared_tests_hold(check, request, monkeypatch):
    for case in TRAINING_FREE_CASES:
        names = inspect.signature(check).parameters
        check(**{name: case if name.endswith("case") else request.getfixturevalue(name) for name in names})
        monkeypatch.undo()


# --- checkpoints without weights ---


@pytest.mark.slow
@torch.no_grad()
def test_a_checkpoint_names_its_base_and_holds_no_weights(inputs, tmp_path, local_hub, start_light):
    for number, case in enumerate((STREAMING_LLM, SNAP_KV)):
        model, folder = start_light(case, local_hub), tmp_path / str(number)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        model.save_pretrained(folder)
        assert not list(folder.glob("*.safetensors"))
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert loaded(**inputs).logits.equal(model(**inputs).logits)
        assert loaded.model_id == model.model_id


def test_snap_kv_reads_as_many_tokens_as_the_base_has_positions():
    model = SNAP_KV.build()
    limit = model.config.max_position_embeddings
    assert model.compress(ids_of(limit)).num_context_tokens.tolist() == [limit]
    with pytest.raises(ValueError, match=f"needs {limit + 1} positions, the encoder has {limit} .*: cut the context"):
        model.compress(ids_of(limit + 1))


# --- questions ---


@pytest.mark.parametrize("build", [SNAP_KV.build, build_decal], ids=["snap_kv", "decal"])
def test_a_memory_made_with_a_question_answers_no_other_one(build, tmp_path, random_rows, pad_rows):
    model = build(question_placement="encoder")
    ids, mask = pad_rows(random_rows([13, 7]))
    question, question_mask = pad_rows(random_rows([5, 3], seed=1), "left")
    asked = {"question_input_ids": question, "question_attention_mask": question_mask}
    memory = model.compress(ids, mask, **asked)
    expected = model.generate(question, attention_mask=question_mask, memory=memory, **GREEDY)
    context = {"context_input_ids": ids, "context_attention_mask": mask}
    assert model.generate(question, attention_mask=question_mask, **context, **GREEDY).equal(expected)
    memory.save(tmp_path / "memory.safetensors")
    loaded = CompressedContext.load(tmp_path / "memory.safetensors")
    other_pads, other_mask = pad_rows(random_rows([5, 3], seed=1), "right")
    assert model.generate(other_pads, attention_mask=other_mask, memory=loaded, **GREEDY)[:, -5:].equal(
        expected[:, -5:]
    )
    with pytest.raises(ValueError, match="row 0 of `memory` was compressed with another question"):
        model.generate(question.flip(0), attention_mask=question_mask.flip(0), memory=memory, **GREEDY)
    if not model.config.is_encoder_decoder:
        with pytest.raises(ValueError, match="row 0 of `memory` was compressed with another question"):
            model(question.flip(0), attention_mask=question_mask.flip(0), memory=memory)
        # A question that is read in pieces is checked whole.
        first = random_rows([5], seed=1)[0][None]
        written = model.generate(first, memory=memory.rows(0), prefill_chunk_size=2, **GREEDY)
        assert written[:, -5:].equal(expected[:1, -5:])
    with pytest.raises(ValueError, match="question_input_ids"):
        model.generate(question, memory=model.compress(ids, mask), **GREEDY)


@pytest.mark.slow
def test_the_pipeline_compresses_what_opens_the_chat_and_asks_what_follows(tiny_tokenizer):
    tiny_tokenizer.chat_template = TEMPLATE
    for placement in ("decoder", "encoder"):
        model = SNAP_KV.build(prompt_format="chat", question_placement=placement)
        pipe = model.question_answering(tiny_tokenizer, **GREEDY)
        row = torch.tensor([templated(tiny_tokenizer, ONE_TURN)])
        with model.base_language_model():
            plain = model.generate(row, pad_token_id=0, **GREEDY)[0, row.shape[1] :]
        wanted = tiny_tokenizer.decode(plain, skip_special_tokens=True).strip()
        # At ratio 1 the whole template has been read.
        assert pipe("Who?", context=DOCUMENT, ratio=1) == {"answer": wanted}
        answers = pipe(["Who?", "How many?"], context=[DOCUMENT, "No."], ratio=5)
        assert [pipe("How many?", context=text, ratio=5) for text in (DOCUMENT, "No.")] == [two[1] for two in answers]
    with pytest.raises(ValueError, match=r"the memory holds the opening of the chat.*leave out what `messages` say"):
        pipe(messages=WITH_SYSTEM, context=DOCUMENT)
