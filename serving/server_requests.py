# SPDX-License-Identifier: Apache-2.0
"""What a server reads: the fields of its requests, what is allowed in them, and no others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

_Text = Annotated[str, StringConstraints(min_length=1)]
# As large as a column of a store holds.
_Ratio = Annotated[int, Field(ge=1, lt=2**31)]
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
    ratio: _Ratio | Literal["auto"] | None = None
    model: str | None = None


class TextPart(_Fields):
    """Words of a message."""

    type: Literal["text"]
    text: str


class MemoryPart(_Fields):
    """A memory, in place of the words that it was made of, at its own ratio or a coarser one that it holds."""

    type: Literal["memory"]
    memory_id: _Text
    ratio: _Ratio | None = None


class Message(_Fields):
    """A message of a conversation, as a text or in parts, memories before words."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[list[Annotated[TextPart | MemoryPart, Field(discriminator="type")]], _Parts]

    @property
    def memories(self) -> list[MemoryPart]:
        return [part for part in self.content if isinstance(part, MemoryPart)]

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    @model_validator(mode="after")
    def _memories_before_words(self) -> Message:
        if not all(isinstance(part, MemoryPart) for part in self.content[: len(self.memories)]):
            raise ValueError("parts of type 'memory' must stand before those of type 'text', as they are read")
        return self


class StreamOptions(_Fields):
    """What a stream has beside the answer."""

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
    def memories(self) -> list[MemoryPart]:
        """The memories of the first message of the user, in order."""
        return next((message.memories for message in self.messages if message.role == "user"), [])

    @model_validator(mode="after")
    def _memories_in_front(self) -> ChatRequest:
        if sum(len(message.memories) for message in self.messages) > len(self.memories):
            raise ValueError("memories are read in front of the first message of the user: name all of them there")
        return self
