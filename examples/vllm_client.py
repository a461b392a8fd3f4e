# SPDX-License-Identifier: Apache-2.0
"""Ask a vLLM server about a document that is compressed here: the server gets slots and question as embeddings.

    vllm serve served-decoder --enable-prompt-embeds
    python examples/vllm_client.py my-compressor report.txt --question "Who wrote it?" \\
        --served-model served-decoder

The server runs the decoder alone: the untouched base where the decoder is frozen, and otherwise what
`model.decoder_language_model().save_pretrained("served-decoder")` writes.
"""

import argparse
import json
import urllib.request
from pathlib import Path

from transformers import pipeline


def complete(server: str, served_model: str, prompt_embeds: str, max_tokens: int) -> str:
    """Send a prompt of embeddings to the server's completions API.

    Args:
        server: address of the server.
        served_model: the model's name there.
        prompt_embeds: the embeddings in base64.
        max_tokens: longest answer in tokens.

    Returns:
        the text that the server writes.
    """
    body = {
        "model": served_model,
        "prompt": "",
        "prompt_embeds": prompt_embeds,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{server}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        # The answer to embeddings comes before that to a text.
        return json.load(response)["choices"][0]["text"].strip()


def main() -> None:
    """Read the arguments, compress, ask and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="Hub id or folder of the compressor")
    parser.add_argument("documents", nargs="+", help="text files, or memory files (.safetensors), read together")
    parser.add_argument("--question", action="append", required=True, help="give it again for several")
    parser.add_argument("--ratio", type=int, help="context tokens per slot (default: the checkpoint's first)")
    parser.add_argument("--server", default="http://localhost:8000")
    parser.add_argument("--served-model", required=True, help="the decoder's name on the server")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    pipe = pipeline("context-compression-qa", model=arguments.checkpoint, trust_remote_code=True)
    memories = [
        pipe.load_memory(path)
        if path.endswith(".safetensors")
        else pipe.compress([Path(path).read_text(encoding="utf-8")], ratio=arguments.ratio)
        for path in arguments.documents
    ]
    memory = type(memories[0]).concatenate(memories)
    for question in arguments.question:
        prompt = memory.to_prompt_embeds(pipe.tokenizer, question, pipe.model, encoding="base64")
        print(complete(arguments.server, arguments.served_model, prompt, arguments.max_tokens))


if __name__ == "__main__":
    main()
