# SPDX-License-Identifier: Apache-2.0
"""Evaluating methods that keep a base's own keys and values: what opens a text, and questions, are compressed, too."""

import copy

import pytest
from naive_twin import QA, ROWS, run

from context_compressors.modeling.modeling_snap_kv import SnapKVForCausalLM


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<bos>{{ m['role'] + '\n' + m['content'] }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
    )
    return tokenizer


@pytest.mark.slow
def test_what_is_selected_of_a_chat_at_ratio_1_answers_as_the_full_context(chat_tokenizer, folders):
    for prompt_format in ("plain", "chat"):
        for placement in ("decoder", "encoder"):
            fields = {"prompt_format": prompt_format, "question_placement": placement, "window_size": 4}
            model = SnapKVForCausalLM.from_base(folders / "base", compression_ratios=1, **fields)
            # Two questions of one document are two contexts where the question chooses.
            rows = [*ROWS, {**ROWS[0], "question": "Where?"}]
            report = run(model, chat_tokenizer, rows, tasks=(QA,), ratios=(1, 3), answer_perplexity=True, batch_size=3)
            for metric in ("f1", "answer_perplexity"):
                full, whole, part = (
                    report.score("tiny", QA, name, metric) for name in ("full_context", "ratio=1", "ratio=3")
                )
                assert whole == pytest.approx(full, rel=1e-4), (prompt_format, placement, metric)
            assert part != pytest.approx(full, rel=1e-3), "the rest is missed"
