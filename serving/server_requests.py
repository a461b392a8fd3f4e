# SPDX-License-Identifier: Apache-2.0
"""Fields of a server's requests, and the values that they may have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

_Text = Annotated[str, StringConstraints(min_length=1)]
# As large as a column of a store holds.
_Ratio = Annotated[int, Field(ge=1, lt=2**31)]
# Of a passage that an agent asks for.
_MOST_CHARACTERS = 20_000
# One text, or a list of them.
_Texts = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
_Parts = BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value)


class _Fields(BaseModel):
    """Fields of a request. An unknown one is refused, as it would change nothing; one that is null is not given."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        is_object = isinstance(values, dict)
        return {name: value for name, value in values.items() if value is not None} if is_object else values


class MemoriesRequest(_Fields):
    """`POST /v1/memories`: each text becomes a memory."""

    text: Annotated[list[_Text], Field(min_length=1), _Texts]
    ratio: _Ratio | None = None
    model: str | None = None


class ExpandRequest(_Fields):
    """`POST /v1/tools/expand`: the arguments of the tool `expand`, as a model writes them."""

    memory_id: Annotated[_Text, Field(description="The memory's id.")]
    containing: Annotated[str, Field(description="Words around whose first place the passage is.")] = ""
    start: Annotated[int, Field(ge=0, description="Character that the passage, or the search, starts at.")] = 0
    length: Annotated[int, Field(ge=1, le=_MOST_CHARACTERS, description="Characters of the passage.")] = 2000


def passage_of(name: str, text: str, containing: str = "", start: int = 0, length: int = 2000) -> dict[str, Any]:
    """Return `length` characters of a text from `start`, or around the next place of `containing` in any case.

    `ValueError` where the words are not in the text.
    """
    if containing:
        place = text.lower().find(containing.lower(), start)
        if place < 0:
            raise ValueError(f"{name} does not contain {containing!r} behind character {start}")
        start = max(0, place - length // 2)
    passage = text[start : start + min(length, _MOST_CHARACTERS)]
    return {"start": start, "of_characters": len(text), "text": passage}


# As `tools` of a chat takes it.
EXPAND_TOOL = {
    "type": "function",
    "function": {
        "name": "expand",
        "description": "Read a passage of the text that a memory was made of, before quoting or relying on its words.",
        "parameters": ExpandRequest.model_json_schema(),
    },
}


class OriginsRequest(_Fields):
    """`POST /page/slots`: what the slots of a text are made of, at a ratio."""

    text: _Text
    ratio: _Ratio


class TextPart(_Fields):
    """Words of a message."""

    type: Literal["text"]
    text: str


class MemoryPart(_Fields):
    """A memory, in place of the words that it was made of, at its own ratio or a coarser one that it holds."""

    type: Literal["memory"]
    memory_id: _Text
    ratio: _Ratio | None = None


class DocumentPart(_Fields):
    """A document whose own tokens are read, in place of a memory: the full text's answer."""

    type: Literal["document"]
    text: _Text


_Part = Annotated[TextPart | MemoryPart | DocumentPart, Field(discriminator="type")]


class Message(_Fields):
    """A message of a conversation, as a text or in parts, memories or documents before words."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[list[_Part], _Parts]

    @property
    def sources(self) -> list[MemoryPart | DocumentPart]:
        return [part for part in self.content if not isinstance(part, TextPart)]

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    @model_validator(mode="after")
    def _sources_before_words(self) -> Message:
        if any(isinstance(part, TextPart) for part in self.content[: len(self.sources)]):
            raise ValueError("parts of type 'memory' or 'document' must stand before those of type 'text'")
        if len({part.type for part in self.sources}) > 1:
            raise ValueError("parts of type 'memory' and 'document' are not read together: name one kind")
        return self


class StreamOptions(_Fields):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(_Fields):
    """`POST /v1/chat/completions`, in OpenAI's words."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[list[_Text], Field(max_length=4), _Texts] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Literal[1] = 1
    user: str = ""

    @property
    def sources(self) -> list[MemoryPart | DocumentPart]:
        """The memories or documents of the first message of the user, in order."""
        return next((message.sources for message in self.messages if message.role == "user"), [])

    @property
    def memories(self) -> list[MemoryPart]:
        """The memories among them."""
        return [part for part in self.sources if isinstance(part, MemoryPart)]

    @property
    def documents(self) -> list[str]:
        """The documents among them."""
        return [part.text for part in self.sources if isinstance(part, DocumentPart)]

    @model_validator(mode="after")
    def _sources_in_front(self) -> ChatRequest:
        if sum(len(message.sources) for message in self.messages) > len(self.sources):
            raise ValueError("memories and documents stand in the user's first message: name all of them there")
        return self
