"""SessionStore: CheckpointStore and TranscriptStore, once, over any ObjectStore.

    tree/{root}/{sid}/head                                       mutable, by compare-and-swap
    tree/{root}/{sid}/seg/{epoch}-{write_no}-{write_id}.jsonl    immutable; so are index/… and blob/… (layout.py)
    agent/{digest}.json                                          immutable
    active/{sid}                                                 there while a run is owned

It decides every head write: 412 alone proves nothing, so after any refusal or lost reply it reads the head and
compares write ids. It never changes what a caller gave it beyond ownership in `acquire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
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
from greenroom.runtime.storage.head import (
    Head,
    Segment,
    SegmentRef,
    decode_head,
    decode_segment,
    names_in_index,
    ref_of,
    tombstone_of,
)

DECIDE_ATTEMPTS = 8
"""Times an undecided write is tried again before it is reported."""

DECIDE_PAUSE = 0.05
"""Seconds before the second try of an undecided write; doubled for each further one."""


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
        refused: StorageError | None = None
        for attempt in range(DECIDE_ATTEMPTS):
            await _pause(attempt)
            try:
                return await self.objects.put_if_absent(key, body)
            except (AlreadyExists, Undecided) as error:
                refused = error
            found = await self._look(key)
            if found is None:
                continue  # missing means not landed on create; an unreadable one is looked at again
            if decode_head(found[0], key).write_id == head.write_id:
                return found[1]
            raise SessionExists(
                f"session {sid!r} is already there", session_id=sid, hint="Open it, or choose another id"
            ) from refused
        raise _never_said(key) from refused

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
        if head.host_fence:
            await self._check_host_fence(sid, head, key)
        if head.owner is not None and head.write_no == head.epoch_write_no:
            await self._mark_active(head)
        new = await self._decide(sid, key, body, head, etag)
        if head.owner is None:
            with contextlib.suppress(StorageError):  # the head has landed; the mark is only a hint
                await self.objects.delete(self._active_key(sid))
        return new

    async def delete(self, sid: str) -> None:
        """Makes the head a tombstone, which fences every owner, then removes the session's data. Repeatable.

        The tombstone stays and keeps the children's ids, so that deleting a tree can go on after a crash.
        """
        key = self._head_key(sid)
        while True:
            found = await self.objects.get(key)
            head = None if found is None else decode_head(found[0], key)
            if head is not None and head.life == "tombstone":
                break
            buried = tombstone_of(sid, head)
            try:
                if found is None:
                    await self.objects.put_if_absent(key, buried.encode())
                else:
                    await self.objects.put_if_match(key, buried.encode(), found[1])
            except (AlreadyExists, PreconditionFailed, NotFound, Undecided):
                continue  # somebody wrote meanwhile, or nobody knows: look again
        await self.objects.delete(self._active_key(sid))
        await self.remove(sid)

    async def delete_tree(self, sid: str) -> list[str]:
        """Deletes a session and everything below it, top-down; answers the ids. Repeatable after a crash anywhere."""
        gone, waiting = [], [sid]
        while waiting:
            current = waiting.pop(0)
            await self.delete(current)
            gone.append(current)
            found = await self.objects.get(self._head_key(current))
            if found is not None:
                waiting += decode_head(found[0], self._head_key(current)).children.values()
        return gone

    async def collect_garbage(self, older_than: float, now: float) -> int:
        """Removes tombstones older than so many seconds and segments that nobody refers to; answers how many objects.

        A segment is only unreferenced when a later write of its session has landed: one of a write under way stays.
        """
        removed = 0
        base = f"{self._prefix}tree/"
        async for key in self.objects.list(base):
            sid, _, rest = key[len(base) :].partition("/")[2].partition("/")
            if rest != "head":
                continue
            found = await self.objects.get(key)
            if found is None:
                continue
            head = decode_head(found[0], key)
            if head.life == "tombstone":
                if now - head.since > older_than:
                    for child in head.children.values():  # the deletion may have been cut off
                        if await self._read_head(child) is not None:
                            await self.delete_tree(child)
                    await self.remove(unquote(sid))
                    await self.objects.delete(key)
                    removed += 1
            else:
                removed += await self._remove_unreferenced(unquote(sid), head)
        return removed

    async def _remove_unreferenced(self, sid: str, head: Head) -> int:
        kept = {ref.name for ref in head.segments}
        if head.index is not None:
            kept |= set(names_in_index(await self.get_index(sid, head.index.name)))
        dead = []
        for part, names in (("seg/", kept), ("index/", {head.index.name} if head.index is not None else set())):
            prefix = self._session_key(sid, part)
            async for key in self.objects.list(prefix):
                name = key[len(prefix) :].removesuffix(".jsonl")
                if name not in names and int(name.split("-")[1]) <= head.write_no:
                    dead.append(key)
        await self.objects.delete_many(dead)
        return len(dead)

    async def _check_host_fence(self, sid: str, head: Head, key: str) -> None:
        found = await self.objects.get(key)
        stored = 0 if found is None else decode_head(found[0], key).host_fence
        if stored > head.host_fence:
            raise Fenced(f"session {sid!r} was fenced by host fence {stored}, this is {head.host_fence}", key=key)

    async def _decide(self, sid: str, key: str, body: bytes, head: Head, etag: str) -> str:
        """Writes the head, the same bytes again until it is known what became of them."""
        refused: StorageError | None = None
        for attempt in range(DECIDE_ATTEMPTS):
            await _pause(attempt)
            try:
                return await self.objects.put_if_match(key, body, etag)
            except (PreconditionFailed, NotFound, Undecided) as error:
                refused = error
            try:
                found = await self.objects.get(key)
            except StorageError as away:
                refused = away
                continue  # still undecided
            if found is None:
                raise Deleted(f"session {sid!r} was deleted", kind="not_found", key=key) from refused
            stored = decode_head(found[0], key)
            if stored.write_id == head.write_id:
                return found[1]
            if stored.life == "tombstone":
                raise Deleted(f"session {sid!r} was deleted", kind="not_found", key=key) from refused
            if stored.epoch > head.epoch:
                owner = stored.owner or "another owner"
                raise Fenced(f"session {sid!r} was taken over by {owner} at epoch {stored.epoch}", key=key) from refused
            if found[1] != etag:
                raise Conflict(f"session {sid!r} was changed by somebody else", key=key) from refused
        raise _never_said(key) from refused

    async def _look(self, key: str) -> tuple[bytes, str] | None:
        try:
            return await self.objects.get(key)
        except StorageError:
            return None

    # -- messages

    async def append(self, sid: str, segment: Segment) -> SegmentRef:
        body, key = segment.encode(), self._segment_key(sid, segment.name)
        await self._put_immutable(key, body)
        return ref_of(segment, body)

    async def _read_messages(self, sid: str, refs: Iterable[SegmentRef]) -> tuple[Message, ...]:
        parts = await asyncio.gather(*(self._read_segment(sid, ref) for ref in refs))
        return tuple(message for part in parts for message in part)

    async def remove(self, sid: str) -> None:
        """Deletes a session's segments, indices and blobs; its head stays."""
        for part in ("seg/", "index/", "blob/"):
            prefix = self._session_key(sid, part)
            await self.objects.delete_many([key async for key in self.objects.list(prefix)])

    async def put_index(self, sid: str, name: str, body: bytes) -> None:
        await self._put_immutable(self._session_key(sid, f"index/{name}"), body)

    async def get_index(self, sid: str, name: str) -> bytes:
        return await self._get_immutable(self._session_key(sid, f"index/{name}"))

    async def put_blob(self, sid: str, body: bytes, known: set[str]) -> str:
        """The blob's name: the hash of its content. `known`: names that the caller has put before, and this one."""
        name = hashlib.sha256(body).hexdigest()
        if name not in known:
            await self._put_immutable(self._session_key(sid, f"blob/{name}"), body)
            known.add(name)
        return name

    async def is_tombstone(self, sid: str) -> bool:
        found = await self.objects.get(self._head_key(sid))
        return found is not None and decode_head(found[0], self._head_key(sid)).life == "tombstone"

    async def get_blob(self, sid: str, name: str) -> bytes:
        key = self._session_key(sid, f"blob/{name}")
        body = await self._get_immutable(key)
        if hashlib.sha256(body).hexdigest() != name:
            raise StorageError(f"{key} does not have the content it is named by", kind="serde", key=key)
        return body

    async def _get_immutable(self, key: str) -> bytes:
        found = await self.objects.get(key)
        if found is None:
            raise StorageError(
                f"{key} is missing: its session refers to it",
                kind="not_found",
                key=key,
                hint="The session cannot be read without it; restore it from a backup",
            )
        return found[0]

    async def _read_segment(self, sid: str, ref: SegmentRef) -> tuple[Message, ...]:
        key = self._segment_key(sid, ref.name)
        return decode_segment(await self._get_immutable(key), ref, key)

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
        refused: StorageError | None = None
        for attempt in range(DECIDE_ATTEMPTS):
            await _pause(attempt)
            try:
                await self.objects.put_if_absent(key, body)
                return
            except AlreadyExists:
                return  # named by content or by a unique write: the same object
            except Undecided as error:
                refused = error
        raise _never_said(key) from refused

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


async def _pause(attempt: int) -> None:
    if attempt:
        await asyncio.sleep(DECIDE_PAUSE * 2 ** (attempt - 1))


def _never_said(key: str) -> Undecided:
    return Undecided(
        f"{key}: the store never said what became of a write",
        kind="unavailable",
        key=key,
        hint="Nothing is lost that was saved before; `resume` goes on when the store is back",
    )
