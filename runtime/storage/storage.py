"""Storage: the stores of one runtime, opened from a URL or put together by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from greenroom.runtime.errors import ConfigError
from greenroom.runtime.messages import Message
from greenroom.runtime.ports import CheckpointStore, ObjectStore, TranscriptStore
from greenroom.runtime.storage import layout
from greenroom.runtime.storage.files import FileObjectStore
from greenroom.runtime.storage.head import Head
from greenroom.runtime.storage.memory import MemoryObjectStore
from greenroom.runtime.storage.s3 import S3ObjectStore
from greenroom.runtime.storage.session_store import SessionStore
from greenroom.runtime.storage.sqlite import SqliteObjectStore

URL_KINDS = "memory:, sqlite:///FILE, file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL&region=NAME"


class Storage:
    """Where sessions live.

    checkpoints, transcripts: the two ports; objects: the object store below them, None for stores of a host's own
    (agents are then not stored, and sessions not listed).
    """

    def __init__(
        self,
        *,
        checkpoints: CheckpointStore,
        transcripts: TranscriptStore,
        objects: ObjectStore | None = None,
        url: str = "",
    ) -> None:
        self.checkpoints = checkpoints
        self.transcripts = transcripts
        self.objects = objects
        self.url = url
        self._store = checkpoints if isinstance(checkpoints, SessionStore) else None

    @classmethod
    def open(cls, url: str) -> Storage:
        """A storage from its URL, lazily: nothing is opened before the first use. Raises ConfigError.

        `memory:`; `sqlite:///file.db` and `file:///folder` relative to the working folder, a fourth slash makes them
        absolute; `s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1`.
        """
        if url == "memory:":
            return cls.over(MemoryObjectStore(), url=url)
        scheme, separator, rest = url.partition("://")
        if scheme == "sqlite" and separator and rest.startswith("/") and len(rest) > 1:
            path = Path(rest[1:]).absolute()
            return cls.over(SqliteObjectStore(path), url=f"sqlite:///{path}")
        if scheme == "file" and separator and rest.startswith("/") and len(rest) > 1:
            path = Path(rest[1:]).absolute()
            return cls.over(FileObjectStore(path), url=f"file:///{path}")
        if scheme == "s3" and separator:
            return cls.over(S3ObjectStore.from_url(url), url=url)
        raise ConfigError(f"{url!r} is no store", hint=f"A store is {URL_KINDS}")

    @classmethod
    def over(cls, objects: ObjectStore, *, url: str = "") -> Storage:
        """Both ports over one object store."""
        store = SessionStore(objects)
        return cls(checkpoints=store, transcripts=store, objects=objects, url=url)

    @classmethod
    def shared(cls, store: Any) -> Storage:
        """One object in both roles: CheckpointStore and TranscriptStore, its `read` taking the references or none."""
        return cls(checkpoints=store, transcripts=store, objects=getattr(store, "objects", None))

    @property
    def session_store(self) -> SessionStore | None:
        """Our own store over objects, which keeps sandboxes beside their sessions; None for a host's own ports."""
        return self._store

    @property
    def inlines(self) -> bool:
        """Whether heads may carry messages: not when transcripts have a backend of their own."""
        return id(self.checkpoints) == id(self.transcripts)

    # Large parts of a session: only stores over objects lay them apart, a host's own ports get whole heads.

    async def spill_values(self, head: Head, known: set[str]) -> Head:
        store = self._own()
        return head if store is None else await layout.spill_values(store, head, known)

    async def spill_batch(self, head: Head, known: set[str]) -> Head:
        store = self._own()
        return head if store is None else await layout.spill_batch(store, head, known)

    async def fold(self, head: Head, name: str) -> Head:
        store = self._own()
        return head if store is None else await layout.fold(store, head, name)

    async def gathered(self, head: Head) -> Head:
        """A head as it was read, with its batch whole again."""
        store = self._own()
        return head if store is None else await layout.gathered(store, head)

    async def messages_of(self, head: Head) -> tuple[Message, ...]:
        """The whole transcript of a head; raises StorageError when a part is missing or altered."""
        store = self._own()
        if store is not None:
            return await layout.messages_of(store, head)
        return (*await self.transcripts.read(head.session_id, head.segments), *head.inline)

    async def put_blob(self, sid: str, body: bytes, known: set[str]) -> str | None:
        """Keeps bytes under the hash of their content; None for a storage that keeps none."""
        store = self._own()
        return None if store is None else await store.put_blob(sid, body, known)

    async def is_tombstone(self, sid: str) -> bool:
        """Whether the session was deleted, perhaps not wholly."""
        return self._store is not None and await self._store.is_tombstone(sid)

    async def get_blob(self, sid: str, name: str) -> bytes | None:
        store = self._own()
        return None if store is None else await store.get_blob(sid, name)

    async def delete_tree(self, sid: str) -> list[str]:
        """Deletes a session and everything below it; answers the ids."""
        if self._store is not None:
            gone = await self._store.delete_tree(sid)
        else:
            gone = []
            waiting = [sid]
            while waiting:
                current = waiting.pop(0)
                found = await self.checkpoints.read(current)
                waiting += found[0].children.values() if found is not None else ()
                await self.checkpoints.delete(current)
                gone.append(current)
        for current in gone:
            await self.transcripts.remove(current)
        return gone

    async def probe(self) -> None:
        """Raises StorageError when the store cannot be used."""
        if self.objects is not None:
            await self.objects.probe()

    async def session_ids(self, prefix: str = "") -> AsyncIterator[str]:
        async for sid in self._listing().session_ids(prefix):
            yield sid

    async def put_agent(self, digest: str, body: bytes) -> None:
        """Stores an agent's document; a storage without objects keeps none."""
        if self._store is not None:
            await self._store.put_agent(digest, body)

    async def get_agent(self, digest: str) -> bytes | None:
        return None if self._store is None else await self._store.get_agent(digest)

    async def active_ids(self) -> list[str]:
        return await self._listing().active_ids()

    async def close(self) -> None:
        if self.objects is not None:
            await self.objects.close()

    def _own(self) -> SessionStore | None:
        """Our own store over objects, when it serves both roles."""
        return self._store if self.inlines else None

    def _listing(self) -> SessionStore:
        if self._store is None:
            raise ConfigError("this storage cannot list its sessions", hint="Only stores over an ObjectStore can")
        return self._store
