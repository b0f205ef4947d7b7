"""Record: one owned session in memory, and the only place that writes its head.

A save puts immutable objects first, then the head by compare-and-swap. Messages ride in the head and are rolled into a
segment when they grow; how they lie in the store is nobody else's business.
"""

from __future__ import annotations

import asyncio
from typing import Any

from greenroom.runtime.messages import Message
from greenroom.runtime.ports import IdSource
from greenroom.runtime.storage.head import CancelMark, Head, Segment
from greenroom.runtime.storage.storage import Storage

ROLL_BYTES = 16 * 1024
"""Messages in the head beyond this size are rolled into a segment."""


class Record:
    """`head` is what the next save will write; `messages` the whole transcript."""

    def __init__(self, storage: Storage, ids: IdSource, head: Head, etag: str, messages: tuple[Message, ...]) -> None:
        self.head = head
        self.messages = list(messages)
        self._storage = storage
        self._ids = ids
        self._etag = etag
        self._inline_bytes = sum(map(_size, head.inline))

    @classmethod
    async def load(cls, storage: Storage, ids: IdSource, head: Head, etag: str) -> Record:
        """Raises StorageError when a segment is missing or altered."""
        stored = await storage.transcripts.read(head.session_id, head.segments)
        return cls(storage, ids, head, etag, stored + head.inline)

    def update(self, **fields: Any) -> None:
        """Changes the head in memory."""
        self.head = self.head.model_copy(update=fields)

    def append(self, message: Message) -> None:
        self.messages.append(message)
        self._inline_bytes += _size(message)
        self.update(inline=(*self.head.inline, message))

    async def save(self) -> None:
        """Writes the head; when it returns, everything up to here is durable. Raises StorageError.

        A save that has begun is not cut off by a cancellation of its caller: it may have landed.
        """
        self.update(write_no=self.head.write_no + 1, write_id=self._ids.new_id())
        writing = asyncio.ensure_future(self._write(self.head))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise

    async def mark_cancelled(self, reason: str, now: float) -> None:
        """The first act of a cancellation: from here on nobody goes on with this run, whatever dies."""
        if self.head.cancel is None:
            self.update(cancel=CancelMark(reason=reason, at=now))
            await self.save()

    async def _write(self, head: Head) -> None:
        if head.inline and (self._inline_bytes > ROLL_BYTES or not self._storage.inlines):
            name = f"{head.epoch}-{head.write_no}-{head.write_id}"
            ref = await self._storage.transcripts.append(head.session_id, Segment(name, head.inline))
            self.update(segments=(*head.segments, ref), inline=())
            self._inline_bytes = 0
        self._etag = await self._storage.checkpoints.save(self.head.session_id, self.head, self._etag)


def _size(message: Message) -> int:
    return len(message.__pydantic_serializer__.to_json(message))
