"""SessionStore: CheckpointStore and TranscriptStore, once, over any ObjectStore.

    tree/{root}/{sid}/head                                       mutable, by compare-and-swap
    tree/{root}/{sid}/seg/{epoch}-{write_no}-{write_id}.jsonl    immutable
    agent/{digest}.json                                          immutable
    active/{sid}                                                 there while a run is owned

It decides every head write: 412 alone proves nothing, so after any refusal or lost reply it reads the head and
compares write ids. It never changes what a caller gave it beyond ownership in `acquire`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import overload
from urllib.parse import unquote

from greenroom.runtime.errors import (
    AlreadyExists,
    Conflict,
    Deleted,
    Fenced,
    NotFound,
    PreconditionFailed,
    SessionExists,
    SessionNotFound,
    StorageError,
    Undecided,
)
from greenroom.runtime.ids import encode_id, root_of
from greenroom.runtime.messages import Message
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.storage.head import Head, Segment, SegmentRef, decode_head, decode_segment, ref_of

DECIDE_ATTEMPTS = 5
"""Times an undecided write is tried again before it is reported."""


class SessionStore:
    """`prefix`: put before every key, with its own slash at the end."""

    def __init__(self, objects: ObjectStore, prefix: str = "") -> None:
        self.objects = objects
        self._prefix = prefix

    # -- heads

    @overload
    async def read(self, sid: str) -> tuple[Head, str] | None: ...

    @overload
    async def read(self, sid: str, refs: Iterable[SegmentRef]) -> tuple[Message, ...]: ...

    async def read(
        self, sid: str, refs: Iterable[SegmentRef] | None = None
    ) -> tuple[Head, str] | tuple[Message, ...] | None:
        """The head, or with `refs` the messages of these segments: the two ports share the verb."""
        return await self._read_head(sid) if refs is None else await self._read_messages(sid, refs)

    async def _read_head(self, sid: str) -> tuple[Head, str] | None:
        found = await self.objects.get(self._head_key(sid))
        if found is None:
            return None
        head = decode_head(found[0], self._head_key(sid))
        return None if head.life == "tombstone" else (head, found[1])

    async def create(self, sid: str, head: Head) -> str:
        body, key = head.encode(), self._head_key(sid)
        await self._mark_active(head)
        for _ in range(DECIDE_ATTEMPTS):
            try:
                return await self.objects.put_if_absent(key, body)
            except (AlreadyExists, Undecided) as refused:
                found = await self.objects.get(key)
                if found is None:
                    continue  # on create, missing means not landed
                if decode_head(found[0], key).write_id == head.write_id:
                    return found[1]
                raise SessionExists(
                    f"session {sid!r} is already there", session_id=sid, hint="Open it, or choose another id"
                ) from refused
        raise Undecided(f"{key}: the store never said whether the head was created", kind="unavailable", key=key)

    async def acquire(self, sid: str, owner: str) -> tuple[Head, str]:
        while True:
            found = await self._read_head(sid)
            if found is None:
                raise SessionNotFound(f"there is no session {sid!r}", session_id=sid)
            head, etag = found
            taken = head.model_copy(
                update={
                    "epoch": head.epoch + 1,
                    "owner": owner,
                    "write_no": head.write_no + 1,
                    "epoch_write_no": head.write_no + 1,
                    "write_id": uuid.uuid4().hex,
                }
            )
            try:
                return taken, await self.save(sid, taken, etag)
            except (Conflict, Fenced):
                await asyncio.sleep(0)  # somebody else wrote between our read and our write: look again

    async def save(self, sid: str, head: Head, etag: str) -> str:
        body, key = head.encode(), self._head_key(sid)
        if head.owner is not None and head.write_no == head.epoch_write_no:
            await self._mark_active(head)
        new = await self._decide(sid, key, body, head, etag)
        if head.owner is None:
            await self.objects.delete(self._active_key(sid))
        return new

    async def delete(self, sid: str) -> None:
        await self.objects.delete(self._head_key(sid))
        await self.objects.delete(self._active_key(sid))

    async def _decide(self, sid: str, key: str, body: bytes, head: Head, etag: str) -> str:
        for _ in range(DECIDE_ATTEMPTS):
            try:
                return await self.objects.put_if_match(key, body, etag)
            except (PreconditionFailed, NotFound, Undecided) as refused:
                found = await self.objects.get(key)
                if found is None:
                    raise Deleted(f"session {sid!r} was deleted", kind="not_found", key=key) from refused
                stored = decode_head(found[0], key)
                if stored.write_id == head.write_id:
                    return found[1]
                if stored.life == "tombstone":
                    raise Deleted(f"session {sid!r} was deleted", kind="not_found", key=key) from refused
                if stored.epoch > head.epoch:
                    raise Fenced(
                        f"session {sid!r} was taken over by {stored.owner or 'another owner'} at epoch {stored.epoch}",
                        key=key,
                    ) from refused
                if found[1] != etag:
                    raise Conflict(f"session {sid!r} was changed by somebody else", key=key) from refused
        raise Undecided(f"{key}: the store never said whether the head was written", kind="unavailable", key=key)

    # -- messages

    async def append(self, sid: str, segment: Segment) -> SegmentRef:
        body, key = segment.encode(), self._segment_key(sid, segment.name)
        await self._put_immutable(key, body)
        return ref_of(segment, body)

    async def _read_messages(self, sid: str, refs: Iterable[SegmentRef]) -> tuple[Message, ...]:
        parts = await asyncio.gather(*(self._read_segment(sid, ref) for ref in refs))
        return tuple(message for part in parts for message in part)

    async def remove(self, sid: str) -> None:
        prefix = self._session_key(sid, "seg/")
        await self.objects.delete_many([key async for key in self.objects.list(prefix)])

    async def _read_segment(self, sid: str, ref: SegmentRef) -> tuple[Message, ...]:
        key = self._segment_key(sid, ref.name)
        found = await self.objects.get(key)
        if found is None:
            raise StorageError(
                f"{key} is missing: session {sid!r} refers to it",
                kind="not_found",
                key=key,
                hint="The transcript cannot be read without it; restore it from a backup",
            )
        return decode_segment(found[0], ref, key)

    # -- agents and listings

    async def put_agent(self, digest: str, body: bytes) -> None:
        await self._put_immutable(self._agent_key(digest), body)

    async def get_agent(self, digest: str) -> bytes | None:
        found = await self.objects.get(self._agent_key(digest))
        return None if found is None else found[0]

    async def session_ids(self, prefix: str = "") -> AsyncIterator[str]:
        """Ids of all sessions whose id starts with `prefix`, in order of their keys."""
        base = f"{self._prefix}tree/"
        async for key in self.objects.list(base):
            parts = key[len(base) :].split("/")
            if len(parts) == 3 and parts[2] == "head":
                sid = unquote(parts[1])
                if sid.startswith(prefix):
                    yield sid

    async def active_ids(self) -> list[str]:
        """Ids that may be owned by a run: what a new Supervisor must look at."""
        base = f"{self._prefix}active/"
        return [unquote(key[len(base) :]) async for key in self.objects.list(base)]

    # -- keys

    async def _mark_active(self, head: Head) -> None:
        if head.owner is not None:
            await self._put_immutable(self._active_key(head.session_id), b"")

    async def _put_immutable(self, key: str, body: bytes) -> None:
        for _ in range(DECIDE_ATTEMPTS):
            try:
                await self.objects.put_if_absent(key, body)
                return
            except AlreadyExists:
                return  # named by content or by a unique write: the same object
            except Undecided:
                continue
        raise Undecided(f"{key}: the store never said whether it was written", kind="unavailable", key=key)

    def _head_key(self, sid: str) -> str:
        return self._session_key(sid, "head")

    def _segment_key(self, sid: str, name: str) -> str:
        return self._session_key(sid, f"seg/{name}.jsonl")

    def _session_key(self, sid: str, rest: str) -> str:
        return f"{self._prefix}tree/{encode_id(root_of(sid))}/{encode_id(sid)}/{rest}"

    def _active_key(self, sid: str) -> str:
        return f"{self._prefix}active/{encode_id(sid)}"

    def _agent_key(self, digest: str) -> str:
        return f"{self._prefix}agent/{digest}.json"
