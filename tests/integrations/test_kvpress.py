# SPDX-License-Identifier: Apache-2.0
"""kvpress's own evaluation runs with our scorers as a press, in the environment that `make test-integrations` makes.

`KVPRESS_PYTHON` names its interpreter, and `KVPRESS_EVALUATION` the folder `evaluation` of kvpress's source.
"""

import json
import os
import subprocess
from pathlib import Path

import pandas
import pytest
import torch
from transformers import AutoTokenizer

from context_compressors import RankedKeyValuesForCausalLM

PYTHON, EVALUATION = os.environ.get("KVPRESS_PYTHON"), os.environ.get("KVPRESS_EVALUATION")
pytestmark = pytest.mark.skipif(
    not (PYTHON and EVALUATION),
    reason="kvpress has an environment of its own: make test-integrations",
)
ROOT = Path(__file__).resolve().parents[2]
TEXT = "The Harbour Museum opened in 1974. Its founder, Clara Holm, gave it forty ships. Visitors come by ferry."
# Logits of a question behind a context whose pairs of lowest score are hidden.
LOGITS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from context_compressors.integrations.kvpress import RankedKeyValuesPress

base, checkpoint, context, question, share = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
cache, press = DynamicCache(), RankedKeyValuesPress(checkpoint, compression_ratio=share)
with torch.no_grad():
    with press(model):
        model.model(torch.tensor([context]), past_key_values=cache)
    print(json.dumps(model(torch.tensor([question]), past_key_values=cache).logits[0].tolist()))
"""


@pytest.fixture(scope="module")
def checkpoint(small_checkpoints, tmp_path_factory):
    """Ranked key/values on a small base, fitted to a text, and its tokenizer."""
    folder, base = tmp_path_factory.mktemp("ranked"), small_checkpoints / "base"
    model = RankedKeyValuesForCausalLM.from_base(base, encoder_lora=None, compression_ratios=(4,))
    tokenizer = AutoTokenizer.from_pretrained(base)
    model.model.fit_scorers([(tokenizer(TEXT, return_tensors="pt").input_ids, None)])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


def run(*words, **environment):
    environment = {**os.environ, "PYTHONPATH": ROOT, "HF_HUB_OFFLINE": 1, **environment}
    command, settings = list(map(str, [PYTHON, *words])), {name: str(value) for name, value in environment.items()}
    done = subprocess.run(command, cwd=EVALUATION, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_press_keeps_the_pairs_that_the_memory_holds(checkpoint, small_checkpoints):
    folder, model, tokenizer = checkpoint
    ids = tokenizer(TEXT).input_ids
    context, question = ids[: len(ids) // 4 * 4], tokenizer(" Who?", add_special_tokens=False).input_ids
    arguments = json.dumps([str(small_checkpoints / "base"), str(folder), context, question, 0.75])
    found = torch.tensor(json.loads(run("-c", LOGITS, arguments)))
    with torch.no_grad():
        memory = model.compress(torch.tensor([context]), ratio=4)
        expected = model(torch.tensor([question]), memory=memory).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_kvpress_evaluates_the_press_on_a_local_data_set(checkpoint, small_checkpoints, tmp_path):
    rows = {"context": TEXT, "question": "\nWho?", "answer_prefix": " Answer:", "task": "qa_1", "max_new_tokens": 4}
    (tmp_path / "data").mkdir()
    pandas.DataFrame([rows | {"answer": ["Clara Holm"]}]).to_parquet(tmp_path / "data" / "test.parquet")
    options = {"dataset": "ruler", "data_dir": "data", "model": small_checkpoints / "base", "device": "cpu"}
    options |= {"press_name": "ranked_key_values", "compression_ratio": 0.5, "output_dir": tmp_path / "results"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    run(ROOT / "examples" / "kvpress_leaderboard.py", *words, CHECKPOINT=checkpoint[0], RULER=tmp_path)
    (metrics,) = (tmp_path / "results").rglob("metrics.json")
    assert 0 <= json.loads(metrics.read_text())["qa_1"]["string_match"] <= 100
    (predictions,) = (tmp_path / "results").rglob("predictions.csv")
    assert pandas.read_csv(predictions)["compression_ratio"].tolist() == [0.5]
