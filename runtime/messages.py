"""What is said: content blocks, messages, usage, and the deltas of a stream.

Plain frozen values with a JSON form (the wire names of api.md). Nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticSerializationError, PydanticUndefined


class Value(BaseModel):
    """Base of values that cross a border (store, actor, wire): frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def trusted(cls, **fields: Any) -> Self:
        """A value of parts that are checked already; defaults are filled in, nothing is checked again.

        For what the loop makes at every step: a quarter of the cost of the constructor.
        """
        defaults = _defaults(cls)
        assert fields.keys() <= cls.__pydantic_fields__.keys(), f"{cls.__name__} has not all of {sorted(fields)}"
        made = object.__new__(cls)
        object.__setattr__(made, "__dict__", {**defaults, **fields})
        object.__setattr__(made, "__pydantic_fields_set__", set(fields))
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made

    def but(self, **changes: Any) -> Self:
        """This value with some fields changed; they are not checked again.

        A tenth of the cost of `model_copy`, which a step would pay a dozen times.
        """
        made = object.__new__(type(self))
        object.__setattr__(made, "__dict__", self.__dict__ | changes)
        object.__setattr__(made, "__pydantic_fields_set__", self.__pydantic_fields_set__)
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made


MAX_SHORT_TEXT = 700
"""Characters of a reason or a failure's message; what is longer is cut, since a head carries it."""


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHORT_TEXT else f"{text[: MAX_SHORT_TEXT - 1]}…"


ShortText: TypeAlias = Annotated[str, AfterValidator(_cut)]


@cache
def _defaults(cls: type[Value]) -> dict[str, Any]:
    return {
        name: info.default for name, info in cls.__pydantic_fields__.items() if info.default is not PydanticUndefined
    }


class TextBlock(Value):
    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(Value):
    """A provider's signed thinking; kept byte for byte, also when the text is empty."""

    type: Literal["thinking"] = "thinking"
    text: str
    signature: str | None = None


class RedactedThinkingBlock(Value):
    type: Literal["redacted_thinking"] = "redacted_thinking"
    data: str


class ReasoningBlock(Value):
    """Unsigned reasoning text (`reasoning_content` of OpenAI-style endpoints)."""

    type: Literal["reasoning"] = "reasoning"
    text: str


class ToolCallBlock(Value):
    """One call the model asks for; `arguments` is None when the text was cut or is no JSON object."""

    type: Literal["tool_call"] = "tool_call"
    id: str
    name: str
    arguments: dict[str, Any] | None
    raw_arguments: str = ""


class ImageBlock(Value):
    """An image, carried through: `source` is the provider-neutral description (media type and data or URL)."""

    type: Literal["image"] = "image"
    source: dict[str, Any]


ContentBlock: TypeAlias = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(Value):
    type: Literal["tool_result"] = "tool_result"
    call_id: str
    content: tuple[ContentBlock, ...]
    is_error: bool = False

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.content if isinstance(block, TextBlock))


Block: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ReasoningBlock | ToolCallBlock | ImageBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Compaction(Value):
    """How a long history is shown to a model: its first `upto` messages as this summary; number: 1 for the first."""

    upto: int
    summary: str
    number: int = 1


class Usage(Value):
    """Tokens of one or more model calls."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total(self) -> int:
        """Of input and output together."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage.trusted(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
        )

    def __sub__(self, other: Usage) -> Usage:
        return Usage(
            input_tokens=self.input_tokens - other.input_tokens,
            output_tokens=self.output_tokens - other.output_tokens,
            cached_tokens=self.cached_tokens - other.cached_tokens,
        )


Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
StopKind: TypeAlias = Literal[
    "end", "tool_calls", "length", "context_window", "refusal", "content_filter", "pause", "other"
]


class Message(Value):
    """One message; the results of a batch are one message of role "tool", in call order.

    stop: the provider's own word, never ""; stop_kind: what it means.
    """

    role: Role
    content: tuple[Block, ...]
    stop: str | None = None
    stop_kind: StopKind | None = None
    usage: Usage | None = None

    @cached_property
    def text(self) -> str:
        """The text blocks joined; no thinking, no tool results."""
        return "".join(block.text for block in self.content if isinstance(block, TextBlock))

    @cached_property
    def tool_calls(self) -> tuple[ToolCallBlock, ...]:
        return tuple(block for block in self.content if isinstance(block, ToolCallBlock))

    @cached_property
    def encoded(self) -> bytes:
        """Its JSON, made once: a message is written with every save until it is rolled into a segment."""
        return self.__pydantic_serializer__.to_json(self)

    @cached_property
    def wire_forms(self) -> dict[Any, str]:
        """Its JSON on the wires it goes out on, by dialect: a message goes out with every later request."""
        return {}

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        return state | {"__dict__": self._fields_of(state["__dict__"])}

    def __copy__(self) -> Self:
        made = super().__copy__()
        object.__setattr__(made, "__dict__", self._fields_of(vars(made)))
        return made

    def but(self, **changes: Any) -> Self:
        made = super().but(**changes)
        object.__setattr__(made, "__dict__", self._fields_of(vars(made)))
        return made

    def _fields_of(self, values: dict[str, Any]) -> dict[str, Any]:
        """Without what was only computed."""
        return {key: value for key, value in values.items() if key in type(self).__pydantic_fields__}

    @classmethod
    def user(cls, text: str) -> Message:
        return cls(role="user", content=(TextBlock(text=text),))


def storable(message: Message) -> Message:
    """The message without lone surrogates, in whatever part of it a model put them: no store takes them."""
    try:
        _ = message.encoded
    except PydanticSerializationError:
        return Message.model_validate(cleaned(message.model_dump()))
    return message


def clean(text: str) -> str:
    """The text without lone surrogates, which no store and no provider takes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def cleaned(value: Any) -> Any:
    """Plain data whose texts hold no lone surrogates."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    type: Literal["text"] = "text"


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    text: str
    type: Literal["thinking"] = "thinking"


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the call at `index`; `id` and `name` are "" when this piece brings none."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    type: Literal["tool_call"] = "tool_call"


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """The complete message: the last delta of every stream, once."""

    message: Message
    type: Literal["message"] = "message"


Delta: TypeAlias = TextDelta | ThinkingDelta | ToolCallDelta | MessageDelta
