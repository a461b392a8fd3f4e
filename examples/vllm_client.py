# SPDX-License-Identifier: Apache-2.0
"""Ask a vLLM server about documents that are compressed here: the server gets slots and text as embeddings.

    context-compressors publish export-decoder my-compressor my-decoder
    vllm serve my-decoder --enable-prompt-embeds
    python examples/vllm_client.py my-compressor report.txt minutes.txt --served-model my-decoder \\
        --question "Who wrote it?" --question "When?"

Several documents are read together. All questions go in one request to the completions API, in the checkpoint's own
prompt. With `--chat` each goes to the chat API, where the server puts slots and question into its chat template: for
checkpoints that were trained in it. With `--stream` answers are printed as they come.
"""

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import pipeline


def send(url: str, body: dict[str, Any], num_prompt_tokens: int) -> Iterator[dict[str, Any]]:
    """Send a request to a server of OpenAI's API, and check that it reads the embeddings.

    Args:
        url: such as `http://localhost:8000/v1/completions`.
        body: the request. With `stream`, the answer comes in pieces.
        num_prompt_tokens: slots and text tokens that the server must count, at least.

    Yields:
        The choices of the answer, or of each piece of it.

    Raises:
        RuntimeError: the server refuses, or counts fewer tokens: it has answered without the memory.
    """
    if body.get("stream"):
        # vLLM counts in every piece then, so that nothing is shown before the count is known.
        body = {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        response = urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url} answers {error.code}: {error.read().decode(errors='replace')}") from error
    with response:
        for piece in _pieces(response) if body.get("stream") else [json.load(response)]:
            if "error" in piece:
                raise RuntimeError(f"{url} ends with an error: {piece['error']}")
            found = (piece.get("usage") or {}).get("prompt_tokens", 0)
            if found < num_prompt_tokens:
                raise RuntimeError(
                    f"{url} read {found} prompt tokens, and slots and text are {num_prompt_tokens}: the answer is "
                    "not from the memory. The server must know `prompt_embeds` and run with --enable-prompt-embeds"
                )
            yield from piece["choices"]


def _pieces(response: Any) -> Iterator[dict[str, Any]]:
    """Return the data of a stream of server-sent events."""
    for line in response:
        data = line.decode().removeprefix("data: ").strip()
        if data and data != "[DONE]":
            yield json.loads(data)


def completion_requests(pipe: Any, memories: list[Any], questions: list[str], stream: bool) -> Iterator[tuple]:
    """Body and number of prompt tokens of requests to `/v1/completions`: all questions together, or one by one.

    Args:
        pipe: the checkpoint's pipeline.
        memories: read together, in this order.
        questions: each in the checkpoint's own prompt.
        stream: one request for each question.
    """
    memory = type(memories[0]).concatenate(memories)
    asked = [(pipe.tokenizer, question, pipe.model) for question in questions]
    prompts = [memory.to_prompt_embeds(*text, encoding="base64") for text in asked]
    lengths = [len(memory.to_prompt_embeds(*text)) for text in asked]
    # They have no field `prompt`: the server refuses an empty one.
    if stream:
        yield from (({"prompt_embeds": prompt}, length) for prompt, length in zip(prompts, lengths, strict=True))
    else:
        yield {"prompt_embeds": prompts}, sum(lengths)


def chat_requests(pipe: Any, memories: list[Any], questions: list[str]) -> Iterator[tuple]:
    """Body and least number of prompt tokens of requests to `/v1/chat/completions`, one for each question.

    Args:
        pipe: the checkpoint's pipeline.
        memories: each is a part of the user's message, in this order.
        questions: each is the part behind them, in the checkpoint's words.
    """
    # As parts of the content: a field `prompt_embeds` of a chat request is ignored without a word.
    parts = [{"type": "prompt_embeds", "data": memory.to_prompt_embeds(encoding="base64")} for memory in memories]
    num_slots = sum(int(memory.num_slots) for memory in memories)
    for question in questions:
        # The server joins parts by a line break; the checkpoint has read two between slots and question.
        text = "\n" + pipe.model.config.question_prompt.replace("{question}", question)
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        yield {"messages": messages}, num_slots + len(pipe.tokenizer(question, add_special_tokens=False).input_ids)


def main() -> None:
    """Read the arguments, compress, ask and print, one line for each question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="Hub id or folder of the compressor")
    parser.add_argument("documents", nargs="+", help="text files, or memory files (.safetensors), read together")
    parser.add_argument("--question", action="append", required=True, help="give it again for several")
    parser.add_argument("--ratio", type=int, help="context tokens per slot (default: the checkpoint's default)")
    parser.add_argument("--server", default="http://localhost:8000")
    parser.add_argument("--served-model", required=True, help="the decoder's name on the server")
    parser.add_argument("--chat", action="store_true", help="ask the chat API, in the server's chat template")
    parser.add_argument("--stream", action="store_true", help="print answers as they come")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    pipe = pipeline("context-compression-qa", model=arguments.checkpoint, trust_remote_code=True)
    memories = [
        pipe.load_memory(path)
        if path.endswith(".safetensors")
        else pipe.compress([Path(path).read_text(encoding="utf-8")], ratio=arguments.ratio)
        for path in arguments.documents
    ]
    url = f"{arguments.server}/v1/{'chat/' if arguments.chat else ''}completions"
    common = {"model": arguments.served_model, "max_tokens": arguments.max_tokens, "temperature": 0}
    common["stream"] = arguments.stream
    if arguments.chat:
        requests = chat_requests(pipe, memories, arguments.question)
    else:
        requests = completion_requests(pipe, memories, arguments.question, arguments.stream)
    for body, num_prompt_tokens in requests:
        for choice in send(url, {**common, **body}, num_prompt_tokens):
            words = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            text = words.get("content") or ""
            end = "\n" if choice["finish_reason"] else ""
            print(text if arguments.stream else text.strip(), end=end, flush=True)


if __name__ == "__main__":
    main()
