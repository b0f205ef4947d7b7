"""Record: one owned session in memory, and the only place that writes its head.

A save puts immutable objects first, then the head by compare-and-swap. At most one write is in flight and one is
pending; a write takes the head as it was when it was last asked for, never what has changed since: half of a change is
not to be seen. `save_soon` asks for a write and goes on; `save` returns when everything up to here is durable. How
messages lie in the store is nobody else's business: they ride in the head, are rolled into a segment when they grow,
and the references to segments into an index when there are many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from greenroom.runtime.messages import Message, Value
from greenroom.runtime.ports import IdSource
from greenroom.runtime.storage.head import CancelMark, Claim, Head, Receipt, Segment
from greenroom.runtime.storage.storage import Storage

ROLL_BYTES = 16 * 1024
"""Messages in the head beyond this size are rolled into a segment."""

FOLD_SEGMENTS = 64
"""References in the head beyond this number are folded into an index object."""

KEPT_RECEIPTS = 64
"""Answered requests a session remembers; an older one asked again is a new request."""

HEAD_BYTES = 40 * 1024
"""A head is never larger: inline messages are rolled and the batch is spilled before it would be."""


class Record:
    """`head` is what the next save will write; `messages` the whole transcript.

    durable_write_no: the last write known to have landed; also_answers: further requests that this run's end answers.
    on_lost: called at once when a write finds that the session
    is not ours any more, or cannot be stored.
    """

    def __init__(self, storage: Storage, ids: IdSource, head: Head, etag: str, messages: tuple[Message, ...]) -> None:
        self.head = head
        self.messages = list(messages)
        self.durable_write_no = head.write_no
        self.also_answers: list[Claim] = []
        self.on_lost: Callable[[], None] = lambda: None
        self._storage = storage
        self._ids = ids
        self._etag = etag
        self._inline_bytes = sum(map(_size, head.inline))
        self._blobs: set[str] = set()  # written by this owner: they need not be written with every save
        self._asked = head  # what the next write takes
        self._version = 0  # counts the times that was asked for
        self._durable_version = 0
        self._writing: asyncio.Task[None] | None = None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._error: BaseException | None = None

    @classmethod
    async def load(cls, storage: Storage, ids: IdSource, head: Head, etag: str) -> Record:
        """Raises StorageError when a segment is missing or altered."""
        return cls(storage, ids, head, etag, await storage.messages_of(head))

    def update(self, **fields: Any) -> None:
        """Changes the head in memory."""
        self.head = self.head.but(**fields)

    def own(self, owner: str | None, now: float) -> None:
        """A new epoch under this owner, or under none, from the next write on."""
        head = self.head
        self.update(epoch=head.epoch + 1, epoch_write_no=head.write_no + 1, owner=owner, since=now)

    def append(self, message: Message, **fields: Any) -> None:
        """Adds a message, and changes the head's other fields with it."""
        self.messages.append(message)
        self._inline_bytes += _size(message)
        self.update(inline=(*self.head.inline, message), **fields)

    def save_soon(self) -> None:
        """Asks for the head as it is now to be written; raises the error of an earlier write."""
        if self._error is not None:
            raise self._error
        self._asked = self.head
        self._version += 1
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_pending())

    async def save(self) -> None:
        """Writes the head as it is now; when it returns, everything up to here is durable. Raises StorageError.

        A write that has begun is not cut off by a cancellation of its caller: it may have landed.
        """
        self.save_soon()
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._version, landed))
        await landed

    async def settle(self) -> None:
        """Waits for writes under way, whatever becomes of them."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def receipts_with(self, answer: Value, claim: Claim | None = None) -> tuple[Receipt, ...]:
        """The receipts with one for this answer, if its request was named by its caller. Changes nothing.

        claim: the request, the one that the run answers unless given.
        """
        claims = [claim] if claim is not None else [self.head.claim, *self.also_answers]
        given = [made for made in claims if made is not None and made.given]
        if not given:
            return self.head.receipts
        blob = await self._storage.put_blob(self.head.session_id, answer.model_dump_json().encode(), self._blobs)
        if blob is None:
            return self.head.receipts
        fresh = (Receipt(request_id=made.request_id, digest=made.digest, blob=blob) for made in given)
        return (*self.head.receipts, *fresh)[-KEPT_RECEIPTS:]

    async def mark_cancelled(self, reason: str, now: float) -> None:
        """The first act of a cancellation: from here on nobody goes on with this run, whatever dies."""
        if self.head.cancel is None:
            self.update(cancel=CancelMark(reason=reason, at=now))
            await self.save()

    async def _write_pending(self) -> None:
        try:
            while self._durable_version < self._version:
                version = self._version
                await self._write()
                self._durable_version = version
                self._tell(None)
        except Exception as error:  # told to whoever waits or saves next, and to the run at once
            self._error = error
            self._tell(error)
            self.on_lost()
        finally:
            self._writing = None

    def _tell(self, error: Exception | None) -> None:
        """Wakes those whose version has landed, or all of them with the error."""
        still = []
        for version, landed in self._waiting:
            if landed.done():
                continue  # its caller was cancelled
            if error is not None:
                landed.set_exception(error)
            elif version <= self._durable_version:
                landed.set_result(None)
            else:
                still.append((version, landed))
        self._waiting = still

    async def _write(self) -> None:
        """One head write: what it refers to first."""
        self.update(write_no=self.head.write_no + 1, write_id=self._ids.new_id())
        taken = self._asked.but(write_no=self.head.write_no, write_id=self.head.write_id)
        written = await self._laid_out(taken)
        self._etag = await self._storage.checkpoints.save(taken.session_id, written, self._etag)
        self.durable_write_no = taken.write_no
        rolled = len(taken.inline) - len(written.inline)
        if rolled or written.index != taken.index:
            self.head, self._asked = (
                head.but(segments=written.segments, index=written.index, inline=head.inline[rolled:])
                for head in (self.head, self._asked)
            )
            self._inline_bytes = sum(map(_size, self.head.inline))

    async def _laid_out(self, head: Head) -> Head:
        """The head as it will lie in the store, within its bound: large parts in objects of their own."""
        storage = self._storage
        name = f"{head.epoch}-{head.write_no}-{head.write_id[:12]}"
        spilled = await storage.spill_values(head, self._blobs)
        full = storage.inlines and _estimate(spilled, self._inline_bytes) > HEAD_BYTES
        if head.inline and (full or self._inline_bytes > ROLL_BYTES or not storage.inlines):
            ref = await storage.transcripts.append(head.session_id, Segment(name, head.inline))
            spilled = spilled.but(segments=(*head.segments, ref), inline=())
        if full:
            spilled = await storage.spill_batch(spilled, self._blobs)
        if len(spilled.segments) > FOLD_SEGMENTS:
            spilled = await storage.fold(spilled, name)
        return spilled


def _estimate(head: Head, inline_bytes: int) -> int:
    """About the size of the head in bytes, never much below it; cheap while it is small."""
    rough = inline_bytes + 100 * len(head.segments) + 300 * len(head.receipts) + 16 * len(head.spawned) + 4096
    if head.batch is not None:
        for call in head.batch.calls:
            rough += 1600 + len(call.call_id) + len(call.name) + (call.size if call.arguments_blob is None else 0)
        rough += sum(len(call.answered.model_dump_json()) for call in head.batch.calls if call.answered is not None)
        rough += sum(len(call.question.model_dump_json()) for call in head.batch.calls if call.question is not None)
    return rough if rough <= HEAD_BYTES // 2 else len(head.encode())


def _size(message: Message) -> int:
    return len(message.encoded)
