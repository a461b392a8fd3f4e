# SPDX-License-Identifier: Apache-2.0
"""A server of compressed documents for agents, over the Model Context Protocol (extra `mcp`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
except ImportError as error:
    raise ImportError("serving agents needs `mcp`: pip install -e '.[mcp]' in the clone") from error

from ..modeling.memory.memory_file import text_source
from .server_requests import passage_of

if TYPE_CHECKING:
    from ..modeling.compressor.context_compression_qa import ContextCompressionQAPipeline
    from ..modeling.memory.compressed_context import CompressedContext

_INSTRUCTIONS = (
    "Documents that are too long for your context. Call `compress` with a file once, `ask` for facts in it, and "
    "`expand` to read the file's own words before you quote or rely on them: answers come from a compressed memory."
)


class FileMemories:
    """The memories of the text files in a folder; no others can be read."""

    def __init__(self, pipe: ContextCompressionQAPipeline, folder: str | Path):
        self.pipe = pipe
        self.folder = Path(folder).resolve()
        self._memories: dict[str, CompressedContext] = {}

    def compress(self, file: str, ratio: int | None = None) -> dict[str, Any]:
        """Compress a text file into a memory that `ask` answers from. `ratio` is the number of tokens per slot."""
        memory: Any = self.pipe.compress(self._read(file), ratio=ratio, source=file)
        self._memories[file] = memory
        tokens, slots = int(memory.num_context_tokens[0]), int(memory.num_slots[0])
        return {"file": file, "source": memory.source, "tokens": tokens, "slots": slots}

    def ask(self, file: str, question: str, max_new_tokens: int = 64) -> str:
        """Answer a question about a file from its memory; a file that was not compressed yet is compressed first."""
        if file not in self._memories:
            self.compress(file)
        return self.pipe(question, memory=self._memories[file], max_new_tokens=max_new_tokens)["answer"]

    def expand(self, file: str, containing: str = "", start: int = 0, length: int = 2000) -> dict[str, Any]:
        """Return a passage of the file's own text: `length` characters from `start`, or around the first place behind
        `start` where the words `containing` stand (case is ignored)."""
        text = self._read(file)
        if file in self._memories and self._memories[file].source != text_source(file, text):
            raise ToolError(f"{file} has changed since it was compressed: compress it again")
        try:
            return {"file": file, **passage_of(file, text, containing, start, length)}
        except ValueError as error:
            raise ToolError(str(error)) from None

    def _read(self, file: str) -> str:
        """Return a file's text."""
        path = (self.folder / file).resolve()
        if not path.is_relative_to(self.folder) or not path.is_file():
            raise ToolError(f"{file!r} is no file in the documents' folder")
        try:
            return path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ToolError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def create_mcp_server(pipe: ContextCompressionQAPipeline, folder: str | Path) -> MCPServer:
    """Return a server with the tools `compress`, `ask` and `expand` over the text files of a folder."""
    memories = FileMemories(pipe, folder)
    server = MCPServer("context-compressors", instructions=_INSTRUCTIONS)
    for tool in (memories.compress, memories.ask, memories.expand):
        server.add_tool(tool)
    return server
