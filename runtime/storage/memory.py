"""An ObjectStore in this process's memory: for tests and as the reference of the contract.

It is not shared: a copy sent to another process would be another store, so it refuses to be pickled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from greenroom.runtime.errors import AlreadyExists, NotFound, PreconditionFailed, StorageError


class MemoryObjectStore:
    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, str]] = {}
        self._writes = 0

    async def get(self, key: str) -> tuple[bytes, str] | None:
        return self._objects.get(key)

    async def put_if_absent(self, key: str, body: bytes) -> str:
        if key in self._objects:
            raise AlreadyExists(f"{key} is already there", key=key)
        return self._put(key, body)

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        found = self._objects.get(key)
        if found is None:
            raise NotFound(f"there is no {key}", kind="not_found", key=key)
        if found[1] != etag:
            raise PreconditionFailed(f"{key} was changed by somebody else", key=key)
        return self._put(key, body)

    async def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    async def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._objects.pop(key, None)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        for key in sorted(key for key in self._objects if key.startswith(prefix)):
            yield key

    async def probe(self) -> None:
        """Nothing can be wrong with it."""

    async def close(self) -> None:
        """Keeps what it holds: whoever shares the object still sees it."""

    def __reduce__(self) -> tuple[object, ...]:
        raise StorageError(
            "a memory store cannot be sent to another process",
            kind="unavailable",
            hint="Use sqlite:///FILE, which every process of one machine can open",
        )

    def _put(self, key: str, body: bytes) -> str:
        self._writes += 1
        etag = str(self._writes)
        self._objects[key] = (bytes(body), etag)
        return etag
