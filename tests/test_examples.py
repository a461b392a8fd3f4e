# SPDX-License-Identifier: Apache-2.0
"""The example client, against a server that does with a request what vLLM does with it."""

import base64
import importlib
import io
import json
import runpy
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

import pages
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors import ICAEForCausalLM, MeanPoolingForCausalLM

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = "Nora keeps eleven bees behind the tower, and Olaf keeps none."
QUESTIONS = ["Who keeps bees?", "How many?"]
NUM_TOKENS = 8


@pytest.fixture
def checkpoint(small_checkpoints: Path, tmp_path: Path) -> Path:
    """A compressor that was trained in the chat template of its base."""
    pages.stand_in_checkpoints(small_checkpoints, tmp_path)
    return tmp_path / "checkpoints" / pages.CHECKPOINTS[0]


class Decoder:
    """A plain language model that reads the fields of a request as vLLM does."""

    def __init__(self, folder: Path, checkpoint: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def prompts(self, path: str, request: dict) -> list[torch.Tensor]:
        if path == "/v1/completions":
            assert "prompt" not in request
            texts = request["prompt_embeds"]
            return [self.load(text) for text in ([texts] if isinstance(texts, str) else texts)]
        assert path == "/v1/chat/completions"
        (message,) = request["messages"]
        slots = [self.load(part["data"]) for part in message["content"] if part["type"] == "prompt_embeds"]
        content = "\n".join(part.get("text", "\ue000") for part in message["content"])
        filled = [{**message, "content": content}]
        text = self.tokenizer.apply_chat_template(filled, tokenize=False, add_generation_prompt=True)
        ids = [self.tokenizer(piece, add_special_tokens=False).input_ids for piece in text.split("\ue000")]
        embedded = [self.model.get_input_embeddings()(torch.tensor(piece)).detach() for piece in ids]
        between = [part for pair in zip(embedded, slots, strict=False) for part in pair]
        return [torch.cat([*between, embedded[-1]])]

    @staticmethod
    def load(text: str) -> torch.Tensor:
        payload = io.BytesIO(base64.b64decode(text, validate=True))
        return torch.load(payload, weights_only=True, map_location="cpu")

    def pieces(self, embeds: torch.Tensor) -> list[str]:
        mask = torch.ones(1, len(embeds))
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
        output = self.model.generate(inputs_embeds=embeds[None], attention_mask=mask, **options)[0]
        texts = [self.tokenizer.decode(output[:end], skip_special_tokens=True) for end in range(len(output) + 1)]
        return [text[len(before) :] for before, text in pairwise(texts)]


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path):
    """A server of the plain decoder, loaded from a folder of its own; it keeps the requests in `requests`."""
    MeanPoolingForCausalLM.from_pretrained(checkpoint).decoder_language_model().save_pretrained(tmp_path / "served")
    decoder, requests = Decoder(tmp_path / "served", checkpoint), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, request))
            if request["model"] == "unknown":
                self.send_error(404, "The model `unknown` does not exist.")
                return
            assert (request["max_tokens"], request["temperature"]) == (NUM_TOKENS, 0)
            prompts = decoder.prompts(self.path, request)
            # This one answers without the embeddings.
            usage = {"prompt_tokens": 3 if request["model"] == "deaf" else sum(map(len, prompts))}
            answers = [decoder.pieces(embeds) for embeds in prompts]
            if not request["stream"]:
                answers = [["".join(pieces)] for pieces in answers]
            is_chat = "messages" in request
            choices = []
            for index, pieces in enumerate(answers):
                for place, text in enumerate(pieces):
                    name = ("delta" if request["stream"] else "message") if is_chat else "text"
                    reason = "length" if place == len(pieces) - 1 else None
                    words = {"content": text} if is_chat else text
                    choices.append({"index": index, name: words, "finish_reason": reason})
            if request["stream"]:
                assert request["stream_options"]["continuous_usage_stats"]
                events = [json.dumps({"choices": [choice], "usage": usage}) for choice in choices]
                body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
            else:
                body = json.dumps({"choices": choices, "usage": usage})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

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
    text, memory = tmp_path / "bees.txt", tmp_path / "bees.safetensors"
    text.write_text(DOCUMENT, encoding="utf-8")
    pipe = MeanPoolingForCausalLM.from_pretrained(checkpoint).question_answering(
        AutoTokenizer.from_pretrained(checkpoint)
    )
    pipe.compress([DOCUMENT], ratio=4).save(memory)

    def ask(*arguments: object, model: str = "base") -> list[str]:
        server.requests.clear()
        asked = [part for question in QUESTIONS for part in ("--question", question)]
        command = [*arguments, *asked, "--ratio", "4", "--server", f"http://127.0.0.1:{server.server_port}"]
        command += ["--served-model", model, "--max-tokens", NUM_TOKENS]
        monkeypatch.setattr(sys, "argv", ["vllm_client.py", *map(str, [checkpoint, *command])])
        runpy.run_path(str(ROOT / "examples" / "vllm_client.py"), run_name="__main__")
        return [line.strip() for line in capsys.readouterr().out.splitlines()]

    two = [
        answer["answer"] for answer in pipe(QUESTIONS, context=[DOCUMENT] * 2, join=True, ratio=4, max_new_tokens=8)
    ]
    one = [answer["answer"] for answer in pipe(QUESTIONS, context=DOCUMENT, ratio=4, max_new_tokens=8)]
    assert ask(text, memory) == two
    assert [(path, len(request["prompt_embeds"])) for path, request in server.requests] == [("/v1/completions", 2)]
    assert ask(text, memory, "--stream") == two
    assert ask(text, "--chat") == one
    assert ask(memory, "--chat", "--stream") == one
    assert [path for path, _ in server.requests] == ["/v1/chat/completions"] * 2
    ask(text, memory, "--chat")
    assert [part["type"] for part in server.requests[0][1]["messages"][0]["content"]] == ["prompt_embeds"] * 2 + [
        "text"
    ]
    for options in ([], ["--stream"], ["--chat"], ["--chat", "--stream"]):
        with pytest.raises(RuntimeError, match="read 3 prompt tokens, and slots and text are"):
            ask(text, *options, model="deaf")
        assert capsys.readouterr().out == ""
    with pytest.raises(RuntimeError, match="answers 404"):
        ask(text, model="unknown")


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
    build_parser = analyses.build_parser
    (tmp_path / "report.txt").write_text(DOCUMENT)
    for run, losses in (("a", (3.0, 1.0)), ("b", (2.0, 0.5))):
        log = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
        (tmp_path / run).mkdir()
        (tmp_path / run / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    document = ["--document", str(tmp_path / "report.txt"), "--ratio", "4"]
    pooled, icae = str(small_checkpoints / "mean_pooling"), str(tmp_path / "icae")
    base = str(small_checkpoints / "base")
    ICAEForCausalLM.from_base(base, compression_ratios=(4,)).save_pretrained(icae, include_base=True)
    AutoTokenizer.from_pretrained(base).save_pretrained(icae)
    for words in (
        ["slots", f"pooled={pooled}", f"icae={icae}", *document, "--output", str(tmp_path / "slots")],
        ["attention", icae, *document, "--output", str(tmp_path / "attention.png")],
        ["curves", f"one={tmp_path / 'a'}", f"one={tmp_path / 'b'}", "--output", str(tmp_path / "curves.png")],
        ["flops", "llama-2-7b", "--methods", "gmsa", "--ratios", "4"],
    ):
        arguments = build_parser().parse_args(words)
        arguments.run(arguments)
    printed = capsys.readouterr().out
    assert "| pooled" in printed
    assert "| gmsa" in printed
    for name in ("attention.png", "curves.png", "slots/allocation.png", "slots/correlation_of_slots.png"):
        assert (tmp_path / name).is_file(), name
