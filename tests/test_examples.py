# SPDX-License-Identifier: Apache-2.0
"""The example client, against a server that does with a request what vLLM does with it."""

import base64
import io
import json
import runpy
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors import MeanPoolingForCausalLM

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = "Nora keeps eleven bees behind the tower, and Olaf keeps none."
QUESTIONS = ["Who keeps bees?", "How many?"]


@pytest.fixture(scope="module")
def checkpoint(small_checkpoints: Path) -> Path:
    return small_checkpoints / "mean_pooling"


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path):
    """A server of the plain decoder, loaded from a folder of its own; it keeps the requests in `requests`."""
    MeanPoolingForCausalLM.from_pretrained(checkpoint).decoder_language_model().save_pretrained(tmp_path / "served")
    decoder = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, request))
            payload = io.BytesIO(base64.b64decode(request["prompt_embeds"], validate=True))
            embeds = torch.load(payload, weights_only=True, map_location="cpu")
            output = decoder.generate(
                inputs_embeds=embeds[None],
                attention_mask=torch.ones(1, len(embeds)),
                max_new_tokens=request["max_tokens"],
                do_sample=request["temperature"] > 0,
            )
            text = tokenizer.decode(output[0], skip_special_tokens=True)
            body = json.dumps({"choices": [{"index": 0, "text": text}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            """Nothing to the test's output."""

    http = HTTPServer(("127.0.0.1", 0), Handler)
    http.requests = requests
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield http
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.mark.slow
def test_the_client_gets_the_answers_that_the_pipeline_gives(
    server: HTTPServer,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "bees.txt").write_text(DOCUMENT, encoding="utf-8")
    pipe = MeanPoolingForCausalLM.from_pretrained(checkpoint).question_answering(
        AutoTokenizer.from_pretrained(checkpoint)
    )
    memory = str(tmp_path / "bees.safetensors")
    pipe.compress([DOCUMENT], ratio=4).save(memory)
    asked = [part for question in QUESTIONS for part in ("--question", question)]
    address = f"http://127.0.0.1:{server.server_port}"
    options = [*asked, "--ratio", "4", "--server", address, "--served-model", "base", "--max-tokens", "8"]
    documents = ["vllm_client.py", str(checkpoint), str(tmp_path / "bees.txt"), memory]
    monkeypatch.setattr(sys, "argv", [*documents, *options])
    runpy.run_path(str(ROOT / "examples" / "vllm_client.py"), run_name="__main__")
    answers = pipe(QUESTIONS, context=[DOCUMENT] * 2, join=True, ratio=4, max_new_tokens=8)
    assert capsys.readouterr().out.splitlines() == [answer["answer"] for answer in answers]
    assert [path for path, _ in server.requests] == ["/v1/completions"] * 2
    assert server.requests[0][1]["model"] == "base"
