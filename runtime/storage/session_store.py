"""SessionStore: CheckpointStore and TranscriptStore, once, over any ObjectStore.

    tree/{root}/{sid}/head                                       mutable, by compare-and-swap
    tree/{root}/{sid}/seg/{epoch}-{write_no}-{write_id}.jsonl    immutable; so are index/… and blob/… (layout.py)
    tree/{root}/sandbox/head                                     mutable, by compare-and-swap (sandbox_head.py)
    agent/{digest}.json                                          immutable
    active/{sid}                                                 there while a run is owned

It decides every head write (deciding.py) and never changes what a caller gave it beyond ownership in `acquire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import overload
from urllib.parse import unquote

from greenroom.runtime.errors import (
    AlreadyExists,
    Conflict,
    Deleted,
    Fenced,
    SessionExists,
    SessionNotFound,
    StorageError,
)
from greenroom.runtime.ids import SANDBOX, encode_id, root_of
from greenroom.runtime.messages import Message
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.storage import deciding
from greenroom.runtime.storage.head import (
    Head,
    Segment,
    SegmentRef,
    decode_head,
    decode_segment,
    ref_of,
    tombstone_of,
)
from greenroom.runtime.storage.sandbox_head import SandboxHead, decode_sandbox_head, sandbox_tombstone


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
        await self._mark_active(head)
        try:
            return await deciding.create(self.objects, self._head_key(sid), head, decode_head)
        except AlreadyExists as error:
            raise SessionExists(
                f"session {sid!r} is already there", session_id=sid, hint="Open it, or choose another id"
            ) from error

    async def acquire(self, sid: str, owner: str) -> tuple[Head, str]:
        while True:
            found = await self._read_head(sid)
            if found is None:
                raise SessionNotFound(f"there is no session {sid!r}", session_id=sid)
            head, etag = found
            taken = head.but(
                epoch=head.epoch + 1,
                owner=owner,
                write_no=head.write_no + 1,
                epoch_write_no=head.write_no + 1,
                write_id=uuid.uuid4().hex,
            )
            try:
                return taken, await self.save(sid, taken, etag)
            except (Conflict, Fenced):
                await asyncio.sleep(0)  # somebody else wrote between our read and our write: look again

    async def save(self, sid: str, head: Head, etag: str) -> str:
        key = self._head_key(sid)
        if head.host_fence:
            await self._check_host_fence(sid, head, key)
        if head.owner is not None and head.write_no == head.epoch_write_no:
            await self._mark_active(head)
        try:
            new = await deciding.replace(self.objects, key, head, etag, decode_head)
        except Deleted:
            with contextlib.suppress(StorageError):  # what this owner has put beside the head meanwhile
                await self.objects.delete(self._active_key(sid))
                await self.remove(sid)
            raise
        if head.owner is None:
            with contextlib.suppress(StorageError):  # the head has landed; the mark is only a hint
                await self.objects.delete(self._active_key(sid))
        return new

    async def delete(self, sid: str) -> None:
        """Makes the head a tombstone, which fences every owner, then removes the session's data. Repeatable.

        The tombstone stays and keeps the children's ids, so that deleting a tree can go on after a crash. A root's
        sandbox goes with it.
        """
        buried = await deciding.bury(self.objects, self._head_key(sid), decode_head, partial(tombstone_of, sid))
        await self.objects.delete(self._active_key(sid))
        await self.remove(sid)
        if buried.parent is None and buried.sandbox is not None:
            await self._delete_sandbox(sid)

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

    async def _check_host_fence(self, sid: str, head: Head, key: str) -> None:
        found = await self.objects.get(key)
        stored = 0 if found is None else decode_head(found[0], key).host_fence
        if stored > head.host_fence:
            raise Fenced(f"session {sid!r} was fenced by host fence {stored}, this is {head.host_fence}", key=key)

    # -- the sandbox of a tree

    async def read_sandbox(self, root: str) -> tuple[SandboxHead, str] | None:
        """The sandbox head and its etag; None before the first one and after the deletion."""
        key = self.sandbox_key(root, "head")
        found = await self.objects.get(key)
        if found is None:
            return None
        head = decode_sandbox_head(found[0], key)
        return None if head.life == "tombstone" else (head, found[1])

    async def save_sandbox(self, head: SandboxHead, etag: str | None) -> str:
        """Writes it in place of the one with this etag, or as the first; raises Fenced, Conflict, Deleted."""
        key = self.sandbox_key(head.root, "head")
        if etag is not None:
            return await deciding.replace(self.objects, key, head, etag, decode_sandbox_head)
        try:
            return await deciding.create(self.objects, key, head, decode_sandbox_head)
        except AlreadyExists as error:
            found = await self.objects.get(key)
            stored = None if found is None else decode_sandbox_head(found[0], key)
            raise deciding.lost_to(stored, head, key) from error

    async def _delete_sandbox(self, root: str) -> None:
        head_key = self.sandbox_key(root, "head")

        await deciding.bury(self.objects, head_key, decode_sandbox_head, partial(sandbox_tombstone, root))
        keys = [key async for key in self.objects.list(self.sandbox_key(root, ""))]
        await self.objects.delete_many([key for key in keys if key != head_key])

    # -- messages

    async def append(self, sid: str, segment: Segment) -> SegmentRef:
        body, key = segment.encode(), self._segment_key(sid, segment.name)
        await deciding.put_immutable(self.objects, key, body)
        return ref_of(segment, body)

    async def _read_messages(self, sid: str, refs: Iterable[SegmentRef]) -> tuple[Message, ...]:
        parts = await asyncio.gather(*(self._read_segment(sid, ref) for ref in refs))
        return tuple(message for part in parts for message in part)

    async def remove(self, sid: str) -> None:
        """Deletes a session's segments, indices and blobs; its head stays."""
        for part in ("seg/", "index/", "blob/"):
            prefix = self.session_key(sid, part)
            await self.objects.delete_many([key async for key in self.objects.list(prefix)])

    async def put_index(self, sid: str, name: str, body: bytes) -> None:
        await deciding.put_immutable(self.objects, self.session_key(sid, f"index/{name}"), body)

    async def get_index(self, sid: str, name: str) -> bytes:
        return await self._get_immutable(self.session_key(sid, f"index/{name}"))

    async def put_blob(self, sid: str, body: bytes, known: set[str]) -> str:
        """The blob's name: the hash of its content. `known`: names that the caller has put before, and this one."""
        name = hashlib.sha256(body).hexdigest()
        if name not in known:
            await deciding.put_immutable(self.objects, self.session_key(sid, f"blob/{name}"), body)
            known.add(name)
        return name

    async def is_tombstone(self, sid: str) -> bool:
        found = await self.objects.get(self._head_key(sid))
        return found is not None and decode_head(found[0], self._head_key(sid)).life == "tombstone"

    async def get_blob(self, sid: str, name: str) -> bytes:
        key = self.session_key(sid, f"blob/{name}")
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
        await deciding.put_immutable(self.objects, self._agent_key(digest), body)

    async def get_agent(self, digest: str) -> bytes | None:
        found = await self.objects.get(self._agent_key(digest))
        return None if found is None else found[0]

    async def session_ids(self, prefix: str = "") -> AsyncIterator[str]:
        """Ids of all sessions whose id starts with `prefix`, in order of their keys."""
        async for _, sid in self.head_keys():
            if sid.startswith(prefix):
                yield sid

    async def head_keys(self) -> AsyncIterator[tuple[str, str]]:
        """Keys of all heads, tombstones too, with their session ids."""
        base = f"{self._prefix}tree/"
        async for key in self.objects.list(base):
            parts = key[len(base) :].split("/")
            if len(parts) == 3 and parts[2] == "head" and parts[1] != SANDBOX:
                yield key, unquote(parts[1])

    async def active_ids(self) -> list[str]:
        """Ids that may be owned by a run: what a new Supervisor must look at."""
        base = f"{self._prefix}active/"
        return [unquote(key[len(base) :]) async for key in self.objects.list(base)]

    # -- keys

    async def _mark_active(self, head: Head) -> None:
        if head.owner is not None:
            await deciding.put_immutable(self.objects, self._active_key(head.session_id), b"")

    def _head_key(self, sid: str) -> str:
        return self.session_key(sid, "head")

    def sandbox_key(self, root: str, rest: str) -> str:
        return f"{self._prefix}tree/{encode_id(root)}/{SANDBOX}/{rest}"

    def _segment_key(self, sid: str, name: str) -> str:
        return self.session_key(sid, f"seg/{name}.jsonl")

    def session_key(self, sid: str, rest: str) -> str:
        return f"{self._prefix}tree/{encode_id(root_of(sid))}/{encode_id(sid)}/{rest}"

    def _active_key(self, sid: str) -> str:
        return f"{self._prefix}active/{encode_id(sid)}"

    def _agent_key(self, digest: str) -> str:
        return f"{self._prefix}agent/{digest}.json"
