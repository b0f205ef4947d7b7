"""Server-sent events framed on bytes: lines end at CR, LF or CRLF and at nothing else (WHATWG HTML §9.2).

Two departures, both on purpose: an event that the end of the stream cuts off is still given out, and only its `event`
and `data` fields are kept.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator
from typing import NamedTuple

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class ServerEvent(NamedTuple):
    """`event` is "" when the stream names none; `data` the data lines joined by LF, undecoded."""

    event: str
    data: bytes


async def lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Lines without their ends, whatever the chunks; a last line without an end counts."""
    rest = b""
    first = True
    async for chunk in chunks:
        rest += chunk
        if first:
            if len(rest) < len(_BOM) and _BOM.startswith(rest):
                continue
            first = False
            rest = rest.removeprefix(_BOM)
        # A CR at the very end may be half of a CRLF: it waits for the next chunk.
        held = rest[-1:] == b"\r"
        pieces = _LINE_END.split(rest[:-1] if held else rest)
        rest = pieces.pop() + (b"\r" if held else b"")
        for piece in pieces:
            yield piece
    if rest:
        yield rest.removesuffix(b"\r")


async def server_events(chunks: AsyncIterable[bytes]) -> AsyncIterator[ServerEvent]:
    """The events of a body that have data; comments, ids and empty events are passed over."""
    event = b""
    data: list[bytes] = []
    async for line in lines(chunks):
        if not line:
            if found := _event(event, data):
                yield found
            event, data = b"", []
            continue
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            event = value
    if found := _event(event, data):
        yield found


def _event(event: bytes, data: list[bytes]) -> ServerEvent | None:
    """None for one without data."""
    payload = b"\n".join(data)
    return ServerEvent(event.decode("utf-8", "replace"), payload) if payload.strip() else None
