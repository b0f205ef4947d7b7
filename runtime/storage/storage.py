"""Storage: the stores of one runtime, opened from a URL or put together by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from greenroom.runtime.errors import ConfigError
from greenroom.runtime.ports import CheckpointStore, ObjectStore, TranscriptStore
from greenroom.runtime.storage.memory import MemoryObjectStore
from greenroom.runtime.storage.session_store import SessionStore
from greenroom.runtime.storage.sqlite import SqliteObjectStore

URL_KINDS = "memory: or sqlite:///FILE"


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

    @classmethod
    def open(cls, url: str) -> Storage:
        """A storage from its URL, lazily: nothing is opened before the first use. Raises ConfigError.

        `memory:`; `sqlite:///file.db` relative to the working folder, a fourth slash makes it absolute.
        """
        if url == "memory:":
            return cls.over(MemoryObjectStore(), url=url)
        scheme, separator, rest = url.partition("://")
        if scheme == "sqlite" and separator and rest.startswith("/") and len(rest) > 1:
            path = Path(rest[1:]).absolute()
            return cls.over(SqliteObjectStore(path), url=f"sqlite:///{path}")
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
    def inlines(self) -> bool:
        """Whether heads may carry messages: not when transcripts have a backend of their own."""
        return id(self.checkpoints) == id(self.transcripts)

    async def probe(self) -> None:
        """Raises StorageError when the store cannot be used."""
        if self.objects is not None:
            await self.objects.probe()

    async def session_ids(self, prefix: str = "") -> AsyncIterator[str]:
        async for sid in self._listing().session_ids(prefix):
            yield sid

    async def put_agent(self, digest: str, body: bytes) -> None:
        """Stores an agent's document; a storage without objects keeps none."""
        if isinstance(self.checkpoints, SessionStore):
            await self.checkpoints.put_agent(digest, body)

    async def get_agent(self, digest: str) -> bytes | None:
        return await self.checkpoints.get_agent(digest) if isinstance(self.checkpoints, SessionStore) else None

    async def active_ids(self) -> list[str]:
        return await self._listing().active_ids()

    async def close(self) -> None:
        if self.objects is not None:
            await self.objects.close()

    def _listing(self) -> SessionStore:
        if not isinstance(self.checkpoints, SessionStore):
            raise ConfigError("this storage cannot list its sessions", hint="Only stores over an ObjectStore can")
        return self.checkpoints
