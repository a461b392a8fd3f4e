# SPDX-License-Identifier: Apache-2.0
"""The examples: a client of vLLM's requests, and the papers' analyses."""

import base64
import importlib
import io
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pages
import pytest
import torch
from transformers import AutoTokenizer

from context_compressors import ICAEForCausalLM, MeanPoolingForCausalLM

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = "Nora keeps eleven bees behind the tower, and Olaf keeps none."
QUESTIONS = ["Who keeps bees?", "How many?"]


# tests/integrations/test_vllm.py asks a real server.
@pytest.mark.slow
def test_the_clients_requests_hold_slots_and_text(small_checkpoints: Path, tmp_path: Path, monkeypatch):
    pages.stand_in_checkpoints(small_checkpoints, tmp_path)
    folder = tmp_path / "checkpoints" / pages.CHECKPOINTS[0]
    model, tokenizer = MeanPoolingForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    pipe = model.question_answering(tokenizer)
    client = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "vllm_client.py")))
    memories = [pipe.compress([text], ratio=4) for text in (DOCUMENT, "No.")]
    joined = memories[0].concatenate(memories)
    expected = [joined.to_prompt_embeds(tokenizer, question, model) for question in QUESTIONS]

    def decoded(text):
        return torch.load(io.BytesIO(base64.b64decode(text, validate=True)), weights_only=True)

    ((body, count),) = client.completion_requests(pipe, memories, QUESTIONS, stream=False)
    assert all(decoded(text).equal(one) for text, one in zip(body["prompt_embeds"], expected, strict=True))
    assert count == sum(map(len, expected))
    (body, count), _ = client.chat_requests(pipe, memories, QUESTIONS)
    *slots, text = body["messages"][0]["content"]
    assert all(decoded(part["data"]).equal(one.embeddings[0]) for part, one in zip(slots, memories, strict=True))
    assert QUESTIONS[0] in text["text"]

    # A server that counts too few tokens has not read the slots.
    monkeypatch.setattr(
        "urllib.request.urlopen", lambda _: io.BytesIO(b'{"choices": ["yes"], "usage": {"prompt_tokens": 9}}')
    )
    assert list(client.send("http://localhost", {}, 9)) == ["yes"]
    with pytest.raises(RuntimeError, match="read 9 prompt tokens, and slots and text are 10"):
        list(client.send("http://localhost", {}, 10))


@pytest.mark.slow
def test_the_papers_analyses_draw_and_count(small_checkpoints: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    analyses = importlib.import_module("examples.analyses")
    # Two slots of the same two tokens, and one of another.
    values = analyses.singular_values(torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    torch.testing.assert_close(values, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    assert analyses.effective_rank(torch.tensor([6.0, 2.0, 0.0])) == pytest.approx(1.7547653506033232)
    rows = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 3.0, 2.0], [1.0, 1.0, 1.0]])
    expected = torch.tensor([[1, 1, 0.5, 0], [1, 1, 0.5, 0], [0.5, 0.5, 1, 0], [0, 0, 0, 1]]).double()
    torch.testing.assert_close(analyses.correlation(rows), expected)
    curve = {100: 4.0, 200: 3.0, 300: 1.5, 400: 1.0}
    assert [analyses.steps_to_reach(curve, loss) for loss in (9.0, 3.5, 2.25, 0.9)] == [100.0, 150.0, 250.0, None]
    for run, losses in (("a", (3.0, 1.0)), ("b", (2.0, 0.5))):
        log = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
        (tmp_path / run).mkdir()
        (tmp_path / run / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    pages.stand_in_checkpoints(small_checkpoints, tmp_path)
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    cells = json.loads((ROOT / "examples" / "analyses.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    exec(code.replace("RUNS = []", "RUNS = ['one=../a', 'one=../b']"), {})
    icae, base = str(tmp_path / "icae"), str(small_checkpoints / "base")
    ICAEForCausalLM.from_base(base, compression_ratios=(4,)).save_pretrained(icae, include_base=True)
    AutoTokenizer.from_pretrained(base).save_pretrained(icae)
    words = ["attention", icae, "--document", "analyses/document.txt", "--ratio", "4", "--output", "attention.png"]
    arguments = vars(analyses.build_parser().parse_args(words))
    arguments.pop("run")(**arguments)
    printed = capsys.readouterr().out
    assert "| mean pooling" in printed
    assert "| gmsa" in printed
    slots = {path.name for path in Path("analyses/slots").iterdir()}
    assert slots >= {"allocation.png", "correlation_of_allocation.png", "correlation_of_slots.png"}
    assert Path("attention.png").is_file()
    assert Path("analyses/curves.png").is_file()
