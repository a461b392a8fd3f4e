# SPDX-License-Identifier: Apache-2.0
"""Compressed documents over the Model Context Protocol, with the official client: `make test-integrations`."""

import asyncio
import json
import os
import sys

import pytest

REASON = "needs the extra mcp: make test-integrations"
mcp = pytest.importorskip("mcp", reason=REASON)
create_mcp_server = pytest.importorskip("context_compressors.serving.mcp_server", reason=REASON).create_mcp_server

TEXT = "The Harbour Museum opened in 1974. Its founder, Clara Holm, gave it forty ships."


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "museum.txt").write_text(TEXT)
    (tmp_path / "secret.txt").write_text("not for agents")
    (tmp_path / "documents" / "image.bin").write_bytes(b"\xff\xfe\x00")
    return tmp_path / "documents"


def call(server, *calls):
    """The results of tool calls, in one session."""

    async def run():
        async with mcp.Client(server) as client:
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(run())


def test_an_agent_compresses_asks_and_expands_over_stdio(small_checkpoints, memories, folder):
    checkpoint = str(small_checkpoints / "mean_pooling")
    words = ["-P", "-m", "context_compressors.cli", "serve", checkpoint, "--mcp", str(folder), "--device", "cpu"]
    server = mcp.stdio_client(mcp.StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ)))

    async def run():
        async with mcp.Client(server) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["compress", "ask", "expand"]
            made = await client.call_tool("compress", {"file": "museum.txt", "ratio": 4})
            asked = await client.call_tool("ask", {"file": "museum.txt", "question": "Who?", "max_new_tokens": 4})
            return made, asked, await client.call_tool("expand", {"file": "museum.txt", "containing": "CLARA"})

    made, asked, expanded = asyncio.run(run())
    pipe = memories.pipe
    memory = pipe.compress(TEXT, ratio=4)
    compressed = json.loads(made.content[0].text)
    assert (compressed["tokens"], compressed["slots"]) == (int(memory.num_context_tokens), int(memory.num_slots))
    assert asked.content[0].text == pipe("Who?", memory=memory, max_new_tokens=4)["answer"]
    assert "Clara Holm" in json.loads(expanded.content[0].text)["text"]


def test_what_an_agent_cannot_read_is_an_error_in_words(memories, folder):
    server = create_mcp_server(memories.pipe, folder)
    call(server, ("compress", {"file": "museum.txt"}))
    (folder / "museum.txt").write_text(TEXT + " It closed in 2009.")
    for name, arguments, words in (
        ("compress", {"file": "../secret.txt"}, "no file in the documents' folder"),
        ("compress", {"file": "image.bin"}, "is not UTF-8 text"),
        ("expand", {"file": "museum.txt"}, "has changed since it was compressed"),
    ):
        (result,) = call(server, (name, arguments))
        assert result.is_error
        assert words in result.content[0].text
    again, passage, missing = call(
        server,
        ("compress", {"file": "museum.txt"}),
        ("expand", {"file": "museum.txt", "start": 80}),
        ("expand", {"file": "museum.txt", "containing": "Vasa"}),
    )
    assert not again.is_error
    assert json.loads(passage.content[0].text)["text"] == " It closed in 2009."
    assert "does not contain 'Vasa'" in missing.content[0].text
