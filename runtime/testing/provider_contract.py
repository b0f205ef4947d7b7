"""check_provider: what every provider that speaks HTTP must hold to, against a server on this machine.

The server plays each behaviour in turn: it streams, calls tools, fails before and after the first word, breaks off,
talks nonsense, hangs. The first promise that is broken raises ContractBroken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from greenroom.runtime.calls import ModelRequest, ToolSchema
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.errors import ProviderError
from greenroom.runtime.messages import Delta, Message, MessageDelta, TextDelta
from greenroom.runtime.ports import LlmProvider
from greenroom.runtime.providers import optional
from greenroom.runtime.testing.contracts import check
from greenroom.runtime.testing.model_server import (
    HANG,
    Answer,
    Dialect,
    ModelServer,
    call_pieces,
    end_pieces,
    error_answer,
    error_pieces,
    model_server,
    text_pieces,
)

PATIENCE = 10.0
"""Seconds that anything here may take."""

Make = Callable[[str], LlmProvider]


async def check_provider(make: Make, dialect: Dialect = "openai") -> None:
    """`make(base_url)`: the provider for a server at this address, which speaks `dialect`. Raises ContractBroken."""
    async with model_server() as server:
        provider = make(server.url)
        try:
            await _check_replies(provider, server, dialect)
            await _check_failures(provider, server, dialect)
            await _check_cancel(provider, server, dialect)
        finally:
            await optional.close(provider)
    await _check_nobody_there(make)


async def _check_replies(provider: LlmProvider, server: ModelServer, dialect: Dialect) -> None:
    server.answers = [Answer([*text_pieces(dialect, ["Hä", "llo ", "👋"]), *end_pieces(dialect)])]
    deltas, error = await _stream(provider)
    check("a reply has no error", error is None)
    check("the text comes in pieces", [d.text for d in deltas if isinstance(d, TextDelta)] == ["Hä", "llo ", "👋"])
    check("the last delta, and it alone, carries the message", _messages(deltas) == [deltas[-1]])
    message = _message(deltas)
    check("the message is whole", (message.text, message.stop_kind) == ("Hällo 👋", "end"))
    usage = message.usage
    check("the last report of usage counts", usage is not None and (usage.input_tokens, usage.output_tokens) == (5, 7))
    check("the history went out", "hi there" in str(server.bodies[-1]))
    check("the tools went out", "look" in str(server.bodies[-1].get("tools")))

    connections = server.accepted
    server.answers = [Answer([*call_pieces(dialect, "look", {"at": "ü"}), *end_pieces(dialect, calls=True)])]
    message = _message((await _stream(provider))[0])
    made = [(call.name, call.arguments) for call in message.tool_calls]
    check("a call is put together", (made, message.stop_kind) == ([("look", {"at": "ü"})], "tool_calls"))
    check("a connection is used again", server.accepted == connections)


async def _check_failures(provider: LlmProvider, server: ModelServer, dialect: Dialect) -> None:
    before: dict[str, tuple[Answer, bool, int | None]] = {
        "a rate limit": (error_answer(429, "rate_limit_error", "slow down", retry_after="0"), True, 429),
        "an overload": (error_answer(529, "overloaded_error", "busy"), True, 529),
        "a server's fault": (error_answer(500, "api_error", "oops"), True, 500),
        "a wrong key": (error_answer(401, "authentication_error", "who are you"), False, 401),
        "a wrong request": (error_answer(400, "invalid_request_error", "no"), False, 400),
        "an error with status 200": (Answer(error_pieces(dialect, "overloaded_error", "busy")), True, 529),
        "an empty body": (Answer([]), True, None),
        "nonsense": (Answer([b"data: {broken\n\n"]), True, None),
        "a page of HTML": (Answer([b"<html>502</html>"], 502), True, 502),
    }
    for what, (answer, retryable, status) in before.items():
        server.answers = [answer]
        deltas, error = await _stream(provider)
        check(f"{what} is a ProviderError", error is not None)
        assert error is not None
        check(f"{what} is told as retryable or not", error.retryable is retryable)
        check(f"{what} has its status", error.status == status)
        check(f"{what} came before any delta", (deltas, error.emitted) == ([], False))
    server.answers = [error_answer(429, "rate_limit_error", "slow down", retry_after="3")]
    _, error = await _stream(provider)
    check("Retry-After is told", error is not None and error.retry_after == 3)

    text = text_pieces(dialect, ["half"])
    for what, broken in {
        "a stream that ends early": Answer(text),
        "a connection that breaks": Answer(text, cut=True),
        "an error after the first word": Answer([*text, *error_pieces(dialect, "overloaded_error", "busy")]),
    }.items():
        server.answers = [broken]
        deltas, error = await _stream(provider)
        check(f"{what} is a ProviderError", error is not None)
        assert error is not None
        check(f"{what} can be tried again, and says that text went out", error.retryable and bool(deltas))
        check(f"{what} gives no message", _messages(deltas) == [])


async def _check_cancel(provider: LlmProvider, server: ModelServer, dialect: Dialect) -> None:
    server.answers = [Answer([*text_pieces(dialect, ["so far"]), HANG])]
    stream: Any = provider.stream(_request(), CancelToken())
    async with asyncio.timeout(PATIENCE):
        while not isinstance(await anext(stream), TextDelta):
            pass
        busy = server.busy
        await stream.aclose()
        while server.busy:  # noqa: ASYNC110  # the server's side is not ours to be told of
            await asyncio.sleep(0.01)
    check("closing the stream closes the connection", busy == 1 and server.busy == 0)


async def _check_nobody_there(make: Make) -> None:
    provider = make("http://127.0.0.1:9")
    _, error = await _stream(provider)
    check("an address where nobody listens is a retryable ProviderError", error is not None and error.retryable)
    await optional.close(provider)


def _request() -> ModelRequest:
    tool = ToolSchema("look", "Look at something.", {"type": "object", "properties": {"at": {"type": "string"}}})
    return ModelRequest("s", 0, "be brief", (Message.user("hi there"),), (tool,))


async def _stream(provider: LlmProvider) -> tuple[list[Delta], ProviderError | None]:
    """The deltas that went out, and the error that ended them."""
    deltas: list[Delta] = []
    try:
        async with asyncio.timeout(PATIENCE):
            async for delta in provider.stream(_request(), CancelToken()):
                deltas.append(delta)
    except ProviderError as error:
        return deltas, error
    return deltas, None


def _messages(deltas: list[Delta]) -> list[Delta]:
    return [delta for delta in deltas if isinstance(delta, MessageDelta)]


def _message(deltas: list[Delta]) -> Message:
    last = deltas[-1] if deltas else None
    check("a reply ends with its message", isinstance(last, MessageDelta))
    assert isinstance(last, MessageDelta)
    return last.message
