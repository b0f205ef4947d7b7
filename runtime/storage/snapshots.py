"""Snapshots of a tree's workspace in the object store: a manifest, and the parts that it names by size and hash.

    tree/{root}/sandbox/{name}          the manifest
    tree/{root}/sandbox/{name}.{part}   parts, each within PART_BYTES; a later snapshot may go on using them

What is in the parts is the business of the sandbox that wrote them. A snapshot counts once the sandbox head names it;
until then, and after a crash before that, the one before stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pydantic import Field

from greenroom.runtime.errors import NotFound, StorageError
from greenroom.runtime.messages import Value
from greenroom.runtime.storage import deciding
from greenroom.runtime.storage.documents import decode_document
from greenroom.runtime.storage.session_store import SessionStore

SNAPSHOT_SCHEMA = 1
PART_BYTES = 16 * 1024 * 1024


class Part(Value):
    """An object of a snapshot; `name`: below the tree's sandbox; sha256: of its bytes."""

    name: str
    size: int
    sha256: str


class Stream(Value):
    """Bytes that lie in parts, in order; `size`: what they hold before compression."""

    name: str
    size: int
    parts: tuple[Part, ...]


class Snapshot(Value):
    """The manifest. parent: the snapshot it was made from; made: Unix seconds.

    index: what is in the workspace; streams: the contents, this snapshot's own last; files: how many, size: their
    bytes; skipped: what no snapshot holds, such as sockets.
    """

    schema_version: int = Field(default=SNAPSHOT_SCHEMA, ge=1, le=SNAPSHOT_SCHEMA)
    name: str
    parent: str | None = None
    made: float
    index: Stream
    streams: tuple[Stream, ...] = ()
    files: int = 0
    size: int = 0
    skipped: int = 0

    @property
    def objects(self) -> set[str]:
        """Names of everything that it needs."""
        return {self.name, *(part.name for stream in (self.index, *self.streams) for part in stream.parts)}


class SnapshotStore:
    """The snapshots of one tree."""

    def __init__(self, store: SessionStore, root: str) -> None:
        self._store = store
        self._root = root

    async def put_part(self, name: str, body: bytes) -> Part:
        await deciding.put_immutable(self._store.objects, self._key(name), body)
        return Part(name=name, size=len(body), sha256=hashlib.sha256(body).hexdigest())

    async def get_part(self, part: Part) -> bytes:
        """Its bytes; raises StorageError when they are missing or altered."""
        body = await self._get(part.name)
        if hashlib.sha256(body).hexdigest() != part.sha256:
            raise StorageError(
                f"{self._key(part.name)} does not have the content its snapshot recorded",
                kind="serde",
                key=self._key(part.name),
                hint="The object was damaged or replaced; restore it from a backup",
            )
        return body

    async def read(self, stream: Stream) -> AsyncIterator[bytes]:
        """The stream's parts in order, each checked before it is given out."""
        for part in stream.parts:
            yield await self.get_part(part)

    async def put(self, snapshot: Snapshot) -> None:
        await deciding.put_immutable(
            self._store.objects, self._key(snapshot.name), snapshot.__pydantic_serializer__.to_json(snapshot)
        )

    async def get(self, name: str) -> Snapshot:
        """Raises StorageError when there is none or it is damaged, NewerSchema."""
        return decode_document(Snapshot, "snapshot", SNAPSHOT_SCHEMA, await self._get(name), self._key(name))

    async def names(self) -> set[str]:
        """Everything that lies here, the head left out."""
        prefix = self._key("")
        found = {key[len(prefix) :] async for key in self._store.objects.list(prefix)}
        return found - {"head"}

    async def remove(self, names: set[str]) -> None:
        await self._store.objects.delete_many([self._key(name) for name in sorted(names)])

    async def _get(self, name: str) -> bytes:
        key = self._key(name)
        found = await self._store.objects.get(key)
        if found is None:
            raise NotFound(f"{key} is missing", kind="not_found", key=key, hint="Restore it from a backup")
        return found[0]

    def _key(self, name: str) -> str:
        return self._store.sandbox_key(self._root, name)


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot and where its parts lie: what a sandbox goes back to."""

    store: SnapshotStore
    snapshot: Snapshot
