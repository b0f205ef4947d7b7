"""A model's HTTP server on this machine that plays one behaviour per request, in either dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Dialect = Literal["openai", "anthropic"]
HANG = b"\0hang"
"""A piece after which the server says nothing more and keeps the connection."""


@dataclass(slots=True)
class Answer:
    """What one request gets: a status, headers, and the body in pieces; cut: the connection breaks before its end.

    after: seconds until it begins.
    """

    pieces: Iterable[bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    after: float = 0.0


@dataclass(slots=True)
class ModelServer:
    """`url`: its base address; `answers`: for requests in turn; `bodies`: what came in; `open`: connections now."""

    url: str
    answers: list[Answer] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    accepted: int = 0
    open: int = 0
    most_at_once: int = 0
    busy: int = 0


@asynccontextmanager
async def model_server() -> AsyncIterator[ModelServer]:
    """Runs it on a free loopback port of this event loop."""
    made = ModelServer("")
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        made.accepted += 1
        made.open += 1
        try:
            while await _answer_one(made, reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went away, or the test is over
        finally:
            made.open -= 1
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer_one(made: ModelServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """One request and its answer; whether the connection goes on."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:]) if name}
    made.bodies.append(json.loads(await reader.readexactly(int(headers.get("content-length") or 0))))
    made.headers.append(headers)
    made.busy += 1
    made.most_at_once = max(made.most_at_once, made.busy)
    try:
        answer = made.answers.pop(0)
        await asyncio.sleep(answer.after)
        lines = [f"HTTP/1.1 {answer.status} Status", "transfer-encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        for piece in answer.pieces:
            if piece == HANG:
                await reader.read(1)  # until the client goes away
                return False
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        if answer.cut:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
    finally:
        made.busy -= 1


# -- what a model says, in the words of either dialect


_MESSAGE_START: dict[str, Any] = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 1},
    },
}


def events(dialect: Dialect, *documents: dict[str, Any]) -> list[bytes]:
    """Documents as the events of a stream."""
    if dialect == "openai":
        return [b"data: " + json.dumps(document).encode() + b"\n\n" for document in documents]
    return [f"event: {document['type']}\ndata: {json.dumps(document)}\n\n".encode() for document in documents]


def text_pieces(dialect: Dialect, pieces: list[str]) -> list[bytes]:
    """A reply's text, not yet ended."""
    if dialect == "openai":
        return events(dialect, *({"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces))
    start = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}} for piece in pieces
    ]
    return events(dialect, _MESSAGE_START, start, *deltas)


def call_pieces(dialect: Dialect, name: str, arguments: dict[str, Any]) -> list[bytes]:
    """A reply's one call, its arguments in two pieces, not yet ended."""
    raw = json.dumps(arguments)
    halves = [raw[: len(raw) // 2], raw[len(raw) // 2 :]]
    if dialect == "openai":
        begin = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": halves[0]}}
        rest = {"index": 0, "function": {"arguments": halves[1]}}
        made = [{"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]} for piece in (begin, rest)]
        return events(dialect, *made)
    block = {"type": "tool_use", "id": "call_1", "name": name, "input": {}}
    start = {"type": "content_block_start", "index": 0, "content_block": block}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": half}}
        for half in halves
    ]
    return events(dialect, _MESSAGE_START, start, *deltas)


def end_pieces(dialect: Dialect, *, calls: bool = False) -> list[bytes]:
    """A reply's end, with usage 5 in and 7 out."""
    if dialect == "openai":
        reason = "tool_calls" if calls else "stop"
        finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}
        return [*events(dialect, finish, usage), b"data: [DONE]\n\n"]
    reason = "tool_use" if calls else "end_turn"
    delta = {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 7}}
    return events(dialect, delta, {"type": "message_stop"})


def error_pieces(dialect: Dialect, kind: str, message: str) -> list[bytes]:
    """An error inside a stream."""
    error: dict[str, Any] = {"error": {"type": kind, "message": message}}
    return events(dialect, error if dialect == "openai" else {"type": "error", **error})


def error_answer(status: int, kind: str, message: str, **headers: str) -> Answer:
    """An error as a response of its own."""
    body = json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
    return Answer([body], status, {name.replace("_", "-"): value for name, value in headers.items()})
