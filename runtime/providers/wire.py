"""What both dialects share: bodies that can be looked into, arguments, ids, the history as a wire takes it. Pure."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from functools import lru_cache
from typing import Any

from pydantic_core import from_json

from greenroom.runtime.messages import Message, ToolCallBlock, ToolResultBlock
from greenroom.runtime.providers.failures import broken_stream

MAX_WIRE_ID = 40
"""Characters of a call's id that every endpoint takes."""

_NO_WIRE_ID = re.compile(r"[^a-zA-Z0-9_-]")


class Body:
    """A body whose first non-blank byte can be looked at."""

    def __init__(self, chunks: AsyncIterable[bytes]) -> None:
        self._chunks = aiter(chunks)
        self._held = b""

    async def starts_with_brace(self) -> bool:
        async for chunk in self._chunks:
            self._held += chunk
            start = self._held.lstrip(b" \t\r\n")
            if start and not b"\xef\xbb\xbf".startswith(start[:3]):
                return start.removeprefix(b"\xef\xbb\xbf").startswith(b"{")
        return False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._held:
            yield self._held
        async for chunk in self._chunks:
            yield chunk


def json_object(data: bytes, *, emitted: bool) -> dict[str, Any]:
    """The JSON object in an event or a body; raises ProviderError of kind provider_stream."""
    try:
        found = from_json(data)  # a quarter of the cost; it takes no half characters, and says so
    except ValueError:
        try:
            found = json.loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            raise broken_stream(f"the stream holds no valid JSON: {data[:200]!r}", emitted=emitted) from None
    if not isinstance(found, dict):
        raise broken_stream(f"the stream holds no JSON object: {data[:200]!r}", emitted=emitted)
    return found


def object_of(raw: str) -> dict[str, Any] | None:
    """The arguments a text stands for: "" is {}; cut or other text is None and never repaired."""
    if not raw.strip():
        return {}
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def count_of(value: Any) -> int:
    """A number of tokens, whatever was sent for it."""
    return value if isinstance(value, int) and value > 0 else 0


def mint_id() -> str:
    """An id for a call that came without one of its own."""
    return f"call_{secrets.token_hex(8)}"


def wire_object(call: ToolCallBlock) -> dict[str, Any]:
    """Always an object, whatever the model once sent: anything else poisons every later request."""
    return call.arguments if call.arguments is not None else {"_raw": call.raw_arguments}


def wire_arguments(call: ToolCallBlock) -> str:
    """The text of that object."""
    return json.dumps(wire_object(call), ensure_ascii=False)


def wire_history(messages: Iterable[Message]) -> list[Message]:
    """The history with ids that every endpoint takes: short, of plain characters, each used for one call alone.

    Results keep to the call that they answer; whoever minted the ids may have used one again in a later turn.
    """
    messages = list(messages)
    if has_plain_ids(messages):
        return messages
    made: list[Message] = []
    used: set[str] = set()
    current: dict[str, str] = {}
    for message in messages:
        if message.role == "assistant" and message.tool_calls:
            current = {}
            for call in message.tool_calls:
                current[call.id] = _wire_id(call.id, used)
        if any(old != new for old, new in current.items()):
            message = message.but(content=tuple(_renamed(block, current) for block in message.content))
        made.append(message)
    return made


def has_plain_ids(messages: Iterable[Message]) -> bool:
    """Whether `wire_history` would leave the messages as they are."""
    used: set[str] = set()
    for message in messages:
        for call in message.tool_calls if message.role == "assistant" else ():
            if call.id in used or not _is_plain(call.id):
                return False
            used.add(call.id)
    return True


@lru_cache(maxsize=65536)
def _is_plain(id: str) -> bool:
    return bool(id) and len(id) <= MAX_WIRE_ID and _NO_WIRE_ID.search(id) is None


def _wire_id(id: str, used: set[str]) -> str:
    base = _NO_WIRE_ID.sub("_", id)[:MAX_WIRE_ID] or "call"
    found, number = base, 1
    while found in used:
        number += 1
        found = f"{base[: MAX_WIRE_ID - 6]}_{number}"
    used.add(found)
    return found


def _renamed(block: Any, ids: dict[str, str]) -> Any:
    if isinstance(block, ToolCallBlock):
        return block.but(id=ids.get(block.id, block.id))
    if isinstance(block, ToolResultBlock):
        return block.but(call_id=ids.get(block.call_id, block.call_id))
    return block


def json_of(message: Message, dialect: Any, encode: Callable[[Message], list[dict[str, Any]]]) -> str:
    """What the message is on a wire, as the inside of a JSON list; made once for a message and dialect."""
    found = message.wire_forms.get(dialect)
    if found is None:
        found = ",".join(json.dumps(part, ensure_ascii=False) for part in encode(message))
        message.wire_forms[dialect] = found
    return found
