"""The Anthropic Messages dialect as pure functions: a body to deltas, a request to a body.

Thinking is kept byte for byte and in its place, signed blocks without text too: the next request is refused without
them. Unknown events, blocks and deltas are passed over, as the protocol asks for.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from greenroom.runtime.calls import ModelRequest
from greenroom.runtime.messages import (
    Block,
    Delta,
    ImageBlock,
    Message,
    MessageDelta,
    RedactedThinkingBlock,
    StopKind,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolCallBlock,
    ToolCallDelta,
    ToolResultBlock,
    Usage,
    clean,
)
from greenroom.runtime.providers.failures import broken_stream, error_of_body
from greenroom.runtime.providers.sse import server_events
from greenroom.runtime.providers.wire import (
    Body,
    count_of,
    json_object,
    json_of,
    mint_id,
    object_of,
    wire_history,
    wire_object,
)

DEFAULT_MAX_TOKENS = 4096
"""What is asked for when the agent sets no max_tokens: the protocol wants a number."""

STOP_KINDS: dict[str, StopKind] = {
    "end_turn": "end",
    "stop_sequence": "end",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "context_window",
    "refusal": "refusal",
    "pause_turn": "pause",
}


# -- from a body to deltas ---------------------------------------------------------------------------------------


async def decode_anthropic(chunks: AsyncIterable[bytes]) -> AsyncIterator[Delta]:
    """Deltas of a body (no headers), streamed or one JSON document; the last is the MessageDelta.

    Raises ProviderError: for an error in the body by its type; with kind provider_stream when the body ends before a
    stop reason or message_stop.
    """
    body = Body(chunks)
    reply = _Reply()
    if await body.starts_with_brace():
        for delta in reply.take_document(json_object(b"".join([chunk async for chunk in body]), emitted=False)):
            yield delta
    else:
        async for event in server_events(body):
            for delta in reply.take(json_object(event.data, emitted=reply.emitted)):
                yield delta
            if reply.terminated:
                break
        if not reply.seen:
            raise broken_stream("the stream ended before any event", emitted=False)
    if reply.stop is None and not reply.terminated:
        raise broken_stream("the stream ended before the reply was finished", emitted=reply.emitted)
    yield MessageDelta(reply.message())


@dataclass(slots=True)
class _Part:
    """One content block as it grows; `given`: a call's input when it came whole."""

    type: str
    index: Any
    number: int
    text: list[str] = field(default_factory=list)
    signature: str | None = None
    data: str = ""
    id: str = ""
    name: str = ""
    given: Any = None


@dataclass(slots=True)
class _Reply:
    """What a stream has said so far."""

    parts: list[_Part] = field(default_factory=list)
    stop: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    seen: bool = False
    emitted: bool = False
    terminated: bool = False

    def take(self, event: dict[str, Any]) -> list[Delta]:
        """Adds an event and answers its deltas; raises ProviderError for one that is an error."""
        self.seen = True
        if event.get("type") == "error" or (event.get("error") and "type" not in event):
            raise error_of_body(event.get("error") or "the provider reported an error", emitted=self.emitted)
        deltas: list[Delta] = []
        match event.get("type"):
            case "message_start":
                message = event.get("message")
                self._take_usage(message.get("usage") if isinstance(message, dict) else None)
            case "content_block_start":
                deltas = self._start(event.get("index"), event.get("content_block"))
            case "content_block_delta":
                deltas = self._grow(event.get("index"), event.get("delta"))
            case "message_delta":
                delta = event.get("delta")
                if isinstance(delta, dict) and delta.get("stop_reason"):
                    self.stop = str(delta["stop_reason"])
                self._take_usage(event.get("usage"))
            case "message_stop":
                self.terminated = True
        self.emitted = self.emitted or bool(deltas)
        return deltas

    def take_document(self, document: dict[str, Any]) -> list[Delta]:
        """Adds a reply that came whole."""
        if document.get("type") == "error" or document.get("error"):
            raise error_of_body(document.get("error") or "the provider reported an error")
        deltas: list[Delta] = []
        for index, block in enumerate(document.get("content") or ()):
            deltas += self._start(index, block)
        self.stop = str(document["stop_reason"]) if document.get("stop_reason") else None
        self._take_usage(document.get("usage"))
        return deltas

    def _take_usage(self, usage: Any) -> None:
        """The last report of each number wins: they are running totals."""
        if isinstance(usage, dict):
            self.usage |= {key: value for key, value in usage.items() if value is not None}

    def _start(self, index: Any, block: Any) -> list[Delta]:
        if not isinstance(block, dict):
            return []
        part = _Part(str(block.get("type")), index, sum(part.type == "tool_use" for part in self.parts))
        match part.type:
            case "text":
                self.parts.append(part)
                return self._add_text(part, block.get("text"))
            case "thinking":
                self.parts.append(part)
                self._add_signature(part, block.get("signature"))
                return self._add_thinking(part, block.get("thinking"))
            case "redacted_thinking":
                part.data = str(block.get("data") or "")
                self.parts.append(part)
            case "tool_use":
                part.id, part.name = str(block.get("id") or ""), str(block.get("name") or "")
                part.given = block.get("input")
                self.parts.append(part)
                return [ToolCallDelta(part.number, part.id, part.name)]
        return []

    def _grow(self, index: Any, delta: Any) -> list[Delta]:
        part = next((part for part in reversed(self.parts) if part.index == index), None)
        if part is None or not isinstance(delta, dict):
            return []
        match part.type, delta.get("type"):
            case "text", "text_delta":
                return self._add_text(part, delta.get("text"))
            case "thinking", "thinking_delta":
                return self._add_thinking(part, delta.get("thinking"))
            case "thinking", "signature_delta":
                self._add_signature(part, delta.get("signature"))
            case "tool_use", "input_json_delta":
                piece = delta.get("partial_json")
                if isinstance(piece, str) and piece:
                    part.text.append(piece)
                    return [ToolCallDelta(part.number, part.id, part.name, piece)]
        return []

    def _add_text(self, part: _Part, text: Any) -> list[Delta]:
        if not isinstance(text, str) or not text:
            return []
        part.text.append(clean(text))
        return [TextDelta(part.text[-1])]

    def _add_thinking(self, part: _Part, text: Any) -> list[Delta]:
        if not isinstance(text, str) or not text:
            return []
        part.text.append(text)
        return [ThinkingDelta(text)]

    def _add_signature(self, part: _Part, signature: Any) -> None:
        if isinstance(signature, str):
            part.signature = (part.signature or "") + signature

    def message(self) -> Message:
        content: list[Block] = []
        used: set[str] = set()
        for part in self.parts:
            text = "".join(part.text)
            match part.type:
                case "text" if text:
                    content.append(TextBlock(text=text))
                case "thinking" if text or part.signature:
                    content.append(ThinkingBlock(text=text, signature=part.signature))
                case "redacted_thinking":
                    content.append(RedactedThinkingBlock(data=part.data))
                case "tool_use":
                    id = part.id if part.id and part.id not in used else mint_id()
                    used.add(id)
                    raw = clean(text) if text or not part.given else json.dumps(part.given, ensure_ascii=False)
                    call = ToolCallBlock(id=id, name=clean(part.name), arguments=object_of(raw), raw_arguments=raw)
                    content.append(call)
        return Message(
            role="assistant", content=tuple(content), stop=self.stop, stop_kind=self._stop_kind(), usage=self._usage()
        )

    def _stop_kind(self) -> StopKind:
        kind = STOP_KINDS.get(self.stop or "", "end" if self.stop is None else "other")
        calls = any(part.type == "tool_use" for part in self.parts)
        return "tool_calls" if calls and kind in ("end", "other") else kind

    def _usage(self) -> Usage | None:
        """As the provider counts: input_tokens are those that were not read from its cache."""
        if not self.usage:
            return None
        return Usage(
            input_tokens=count_of(self.usage.get("input_tokens")),
            output_tokens=count_of(self.usage.get("output_tokens")),
            cached_tokens=count_of(self.usage.get("cache_read_input_tokens")),
        )


# -- from a request to a body ------------------------------------------------------------------------------------


def encode_anthropic(request: ModelRequest) -> dict[str, Any]:
    """The request's body without model and stream, which belong to the endpoint."""
    return _options(request) | {"messages": _encode_history(wire_history(request.messages))}


def anthropic_text(request: ModelRequest, **more: Any) -> str:
    """`encode_anthropic` as JSON, with `more` beside it; what a message is there is made only once."""
    turns = _quick_turns(wire_history(request.messages))
    if turns is None:
        return json.dumps({**encode_anthropic(request), **more}, ensure_ascii=False)
    rest = json.dumps({**_options(request), **more}, ensure_ascii=False)
    return rest[:-1] + ', "messages": [' + ",".join(turns) + "]}"


def _quick_turns(messages: Sequence[Message]) -> list[str] | None:
    """The turns of a history as the loop makes it; None for one that has to be put in order first."""
    if not messages or messages[-1].role == "assistant":
        return None
    turns: list[tuple[str, list[str]]] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = json_of(message, "anthropic", _blocks_of)
        if not blocks:
            continue
        if turns and turns[-1][0] == role:
            if message.role == "tool":
                return None  # results come first in a turn
            turns[-1][1].append(blocks)
        else:
            turns.append((role, [blocks]))
    return [f'{{"role": "{role}", "content": [{",".join(blocks)}]}}' for role, blocks in turns]


def _blocks_of(message: Message) -> list[dict[str, Any]]:
    """None of a system message: the protocol has a place of its own for it."""
    if message.role == "system":
        return []
    return [block for block in map(_encode_block, message.content) if block is not None]


def _options(request: ModelRequest) -> dict[str, Any]:
    """Everything but the messages."""
    body: dict[str, Any] = {
        "max_tokens": DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
    }
    system = [request.system or "", *(message.text for message in request.messages if message.role == "system")]
    if any(text.strip() for text in system):
        body["system"] = "\n\n".join(text for text in system if text.strip())
    if request.tools:
        body["tools"] = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
            for tool in request.tools
        ]
    if request.temperature is not None:
        body["temperature"] = request.temperature
    return body


def _encode_history(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns that alternate: neighbours of one role merged, a batch's results together and first, blank turns gone."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = _blocks_of(message)
        if not blocks:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    for before, turn in zip([None, *turns], turns, strict=False):
        if turn["role"] == "user" and before is not None:
            turn["content"] = _results_first(before["content"], turn["content"])
    if turns and turns[-1]["role"] == "assistant":
        _strip_last_text(turns)
    return turns


def _results_first(asked: list[dict[str, Any]], content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    order = {block["id"]: number for number, block in enumerate(asked) if block["type"] == "tool_use"}
    results = [block for block in content if block["type"] == "tool_result"]
    results.sort(key=lambda block: order.get(block["tool_use_id"], len(order)))
    return results + [block for block in content if block["type"] != "tool_result"]


def _strip_last_text(turns: list[dict[str, Any]]) -> None:
    """A last assistant turn must not end in white space."""
    last = turns[-1]["content"][-1]
    if last["type"] == "text":
        last["text"] = last["text"].rstrip()


def _encode_block(block: Block) -> dict[str, Any] | None:
    match block:
        case TextBlock(text=text):
            return {"type": "text", "text": text} if text.strip() else None
        case ThinkingBlock(text=text, signature=signature):
            if signature is None:
                return None  # unsigned, it is refused
            return {"type": "thinking", "thinking": text, "signature": signature}
        case RedactedThinkingBlock(data=data):
            return {"type": "redacted_thinking", "data": data}
        case ToolCallBlock():
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": wire_object(block)}
        case ToolResultBlock():
            return _encode_result(block)
        case ImageBlock(source=source):
            return {"type": "image", "source": _image_source(source)}
    return None


def _encode_result(block: ToolResultBlock) -> dict[str, Any]:
    content: Any = block.text
    if any(isinstance(part, ImageBlock) for part in block.content):
        content = [part for part in map(_encode_block, block.content) if part is not None]
    encoded = {"type": "tool_result", "tool_use_id": block.call_id, "content": content}
    return encoded | ({"is_error": True} if block.is_error else {})


def _image_source(source: dict[str, Any]) -> dict[str, Any]:
    if source.get("url"):
        return {"type": "url", "url": source["url"]}
    return {"type": "base64", "media_type": source.get("media_type"), "data": source.get("data")}
