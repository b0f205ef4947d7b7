"""The OpenAI chat-completions dialect as pure functions: a body to deltas, a request to a body.

Written for what endpoints really send: calls without an index or an id, names in pieces or repeated, usage in the
last chunk or inside a choice, errors in a 200, streams that simply end.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from greenroom.runtime.calls import ModelRequest, ToolSchema
from greenroom.runtime.messages import (
    Block,
    Delta,
    ImageBlock,
    Message,
    MessageDelta,
    ReasoningBlock,
    StopKind,
    TextBlock,
    TextDelta,
    ThinkingDelta,
    ToolCallBlock,
    ToolCallDelta,
    ToolResultBlock,
    Usage,
    clean,
)
from greenroom.runtime.providers.failures import broken_stream, error_of_body
from greenroom.runtime.providers.sse import server_events
from greenroom.runtime.providers.strict import strict_schema
from greenroom.runtime.providers.wire import (
    Body,
    count_of,
    json_object,
    json_of,
    mint_id,
    object_of,
    wire_arguments,
    wire_history,
)

STOP_KINDS: dict[str, StopKind] = {
    "stop": "end",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "length": "length",
    "content_filter": "content_filter",
}


# -- from a body to deltas ---------------------------------------------------------------------------------------


async def decode_openai(chunks: AsyncIterable[bytes]) -> AsyncIterator[Delta]:
    """Deltas of a body (no headers), streamed or one JSON document; the last is the MessageDelta.

    Raises ProviderError: for an error in the body by its code; with kind provider_stream when the body ends without
    a finish reason or [DONE].
    """
    body = Body(chunks)
    if await body.starts_with_brace():
        async for delta in _decode_document(body):
            yield delta
        return
    reply = _Reply()
    async for event in server_events(body):
        if event.data.strip() == b"[DONE]":
            reply.terminated = True
            break
        for delta in reply.take(json_object(event.data, emitted=reply.emitted)):
            yield delta
    if not reply.seen:
        raise broken_stream("the stream ended before any event", emitted=False)
    if reply.stop is None and not reply.terminated:
        raise broken_stream("the stream ended before the reply was finished", emitted=reply.emitted)
    yield MessageDelta(reply.message())


async def _decode_document(body: AsyncIterable[bytes]) -> AsyncIterator[Delta]:
    reply = _Reply()
    document = json_object(b"".join([chunk async for chunk in body]), emitted=False)
    for choice in document.get("choices") or ():
        if isinstance(choice, dict) and isinstance(choice.get("message"), dict):
            choice["delta"] = choice["message"]
    for delta in reply.take(document):
        yield delta
    if reply.stop is None:
        raise broken_stream("the reply has neither a finished choice nor an error", emitted=reply.emitted)
    yield MessageDelta(reply.message())


@dataclass(slots=True)
class _Call:
    index: int | None
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Reply:
    """What a stream has said so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    stop: str | None = None
    refused: bool = False
    usage: Usage | None = None
    seen: bool = False
    emitted: bool = False
    terminated: bool = False

    def take(self, chunk: dict[str, Any]) -> list[Delta]:
        """Adds a chunk and answers its deltas; raises ProviderError for one that is an error."""
        self.seen = True
        if chunk.get("error"):
            raise error_of_body(chunk["error"], emitted=self.emitted)
        self._take_usage(chunk.get("usage"))
        deltas: list[Delta] = []
        for choice in chunk.get("choices") or ():
            if not isinstance(choice, dict) or choice.get("index") not in (0, None):
                continue
            self._take_usage(choice.get("usage"))
            delta = choice.get("delta")
            if isinstance(delta, dict):
                deltas += self._take_delta(delta)
            if choice.get("finish_reason"):
                self.stop = str(choice["finish_reason"])
        self.emitted = self.emitted or bool(deltas)
        return deltas

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details")
        self.usage = Usage(
            input_tokens=count_of(usage.get("prompt_tokens")),
            output_tokens=count_of(usage.get("completion_tokens")),
            cached_tokens=count_of(details.get("cached_tokens") if isinstance(details, dict) else None),
        )

    def _take_delta(self, delta: dict[str, Any]) -> list[Delta]:
        deltas: list[Delta] = []
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(reasoning, str):
            self.reasoning.append(clean(reasoning))
            deltas.append(ThinkingDelta(self.reasoning[-1]))
        for key in ("content", "refusal"):
            text = _text_of(delta.get(key))
            if text:
                self.refused = self.refused or key == "refusal"
                self.text.append(clean(text))
                deltas.append(TextDelta(self.text[-1]))
        for piece in delta.get("tool_calls") or ():
            if isinstance(piece, dict):
                deltas.append(self._take_call(piece))
        return deltas

    def _take_call(self, piece: dict[str, Any]) -> ToolCallDelta:
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name") or "", function.get("arguments")
        if arguments is None:
            arguments = ""
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = self._call_of(piece.get("index"), piece.get("id") or "", name)
        if name and name != call.name:
            call.name += name
        call.arguments.append(arguments)
        return ToolCallDelta(self.calls.index(call), call.id, call.name, arguments)

    def _call_of(self, index: Any, id: str, name: str) -> _Call:
        """The call a piece belongs to: a new one at an unseen index, or at a new id that comes with a name."""
        if isinstance(index, int):
            found = next((call for call in reversed(self.calls) if call.index == index), None)
            new = found is None or bool(id and name and found.id and id != found.id)
        else:
            index = None
            found = self.calls[-1] if self.calls else None
            new = found is None or bool(id and id != found.id)
        if new or found is None:
            found = _Call(index, id)
            self.calls.append(found)
        elif not found.id:
            found.id = id
        return found

    def message(self) -> Message:
        content: list[Block] = []
        if self.reasoning:
            content.append(ReasoningBlock(text="".join(self.reasoning)))
        text = "".join(self.text)
        if text:
            content.append(TextBlock(text=text))
        used: set[str] = set()
        for call in self.calls:
            raw = clean("".join(call.arguments))
            id = call.id if call.id and call.id not in used else mint_id()
            used.add(id)
            content.append(ToolCallBlock(id=id, name=clean(call.name), arguments=object_of(raw), raw_arguments=raw))
        return Message(
            role="assistant", content=tuple(content), stop=self.stop, stop_kind=self._stop_kind(), usage=self.usage
        )

    def _stop_kind(self) -> StopKind:
        kind = STOP_KINDS.get(self.stop or "", "end" if self.stop is None else "other")
        if self.refused and not self.calls:
            return "refusal"
        return "tool_calls" if self.calls and kind in ("end", "other") else kind


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return ""


# -- from a request to a body ------------------------------------------------------------------------------------


def encode_openai(request: ModelRequest, *, reasoning: bool = True, strict: bool = False) -> dict[str, Any]:
    """The request's body without model and stream options, which belong to the endpoint.

    reasoning: whether `reasoning_content` goes back with the tool-call turns it came with (DeepSeek refuses a history
    without it). strict: tools with strict schemas.
    """
    messages: list[dict[str, Any]] = []
    for message in wire_history(request.messages):
        _encode_message(message, messages, reasoning=reasoning)
    body: dict[str, Any] = {"messages": [*_system(request), *messages]}
    return body | _options(request, strict=strict)


def openai_text(request: ModelRequest, *, reasoning: bool, strict: bool, **more: Any) -> str:
    """`encode_openai` as JSON, with `more` beside it. What a message is there is made once, not with every request."""
    turns = list(map(json.dumps, _system(request)))
    pending: list[Message] = []  # user messages, which are merged with their neighbours
    for message in [*wire_history(request.messages), None]:
        if message is not None and message.role not in ("assistant", "tool"):
            pending.append(message)
            continue
        if pending:
            merged: list[dict[str, Any]] = []
            for waiting in pending:
                _encode_message(waiting, merged, reasoning=reasoning)
            turns += (json.dumps(turn, ensure_ascii=False) for turn in merged)
            pending = []
        if message is not None:
            turns.append(json_of(message, ("openai", reasoning), lambda one: _encoded(one, reasoning=reasoning)))
    rest = json.dumps({**_options(request, strict=strict), **more}, ensure_ascii=False)
    return rest[:-1] + ', "messages": [' + ",".join(turn for turn in turns if turn) + "]}"


def _encoded(message: Message, *, reasoning: bool) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    _encode_message(message, made, reasoning=reasoning)
    return made


def _system(request: ModelRequest) -> list[dict[str, Any]]:
    return [{"role": "system", "content": request.system}] if request.system else []


def _options(request: ModelRequest, *, strict: bool) -> dict[str, Any]:
    """Everything but the messages."""
    body: dict[str, Any] = {}
    if request.tools:
        body["tools"] = [{"type": "function", "function": _encode_tool(tool, strict=strict)} for tool in request.tools]
    if request.temperature is not None:
        body["temperature"] = request.temperature
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens
    return body


def _encode_tool(tool: ToolSchema, *, strict: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return made | ({"parameters": strict_schema(tool.parameters), "strict": True} if strict else {})


def _encode_message(message: Message, messages: list[dict[str, Any]], *, reasoning: bool) -> None:
    if message.role == "tool":
        for block in message.content:
            if isinstance(block, ToolResultBlock):
                messages.append({"role": "tool", "tool_call_id": block.call_id, "content": block.text})
        return
    if message.role == "assistant":
        encoded = _encode_assistant(message, reasoning=reasoning)
        if encoded is not None:
            messages.append(encoded)
        return
    parts = [part for part in map(_encode_part, message.content) if part is not None]
    if not parts:
        return
    if messages and messages[-1]["role"] == message.role:  # templates of many servers want alternating roles
        parts = _as_parts(messages.pop()["content"]) + parts
    messages.append({"role": message.role, "content": _as_content(parts)})


def _encode_assistant(message: Message, *, reasoning: bool) -> dict[str, Any] | None:
    """None for a turn that says nothing."""
    text, calls = message.text, message.tool_calls
    if not text.strip() and not calls:
        return None
    encoded: dict[str, Any] = {"role": "assistant", "content": text.rstrip() if text.strip() else None}
    thought = "".join(block.text for block in message.content if isinstance(block, ReasoningBlock))
    if reasoning and thought and calls:
        encoded["reasoning_content"] = thought
    if calls:
        encoded["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": wire_arguments(call)}}
            for call in calls
        ]
    return encoded


def _encode_part(block: Block) -> dict[str, Any] | None:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text} if block.text.strip() else None
    if isinstance(block, ImageBlock):
        source = block.source
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    return None


def _as_parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _as_content(parts: list[dict[str, Any]]) -> Any:
    """A plain string where it is only text: every endpoint takes that."""
    if all(part["type"] == "text" for part in parts):
        return "\n\n".join(part["text"] for part in parts)
    return parts
