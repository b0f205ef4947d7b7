"""An ObjectStore in a folder: every object a file with just its body, so that `jq` reads a session's head.

Writes are atomic (a file of its own, flushed, renamed) and conditions are checked under a lock that the processes of
one machine share. An etag is the file's identity, size and time of change; the time is set to a nanosecond that no
other write of the store has, so that an etag never comes back.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from greenroom.runtime.errors import AlreadyExists, NotFound, PreconditionFailed, StorageError

LOCK = ".lock"
TEMPORARY = ".tmp"

T = TypeVar("T")
Keys = list[str]  # inside the class, `list` is the verb


class FileObjectStore:
    """`root`: the folder; it is made at the first write."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    async def get(self, key: str) -> tuple[bytes, str] | None:
        return await self._do(key, lambda: self._read(key))

    async def put_if_absent(self, key: str, body: bytes) -> str:
        def write() -> str:
            with self._locked():
                if self._path(key).exists():
                    raise AlreadyExists(f"{key} is already there", key=key)
                return self._write(key, body)

        return await self._do(key, write)

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        def write() -> str:
            with self._locked():
                found = self._etag(key)
                if found is None:
                    raise NotFound(f"there is no {key}", kind="not_found", key=key)
                if found != etag:
                    raise PreconditionFailed(f"{key} was changed by somebody else", key=key)
                return self._write(key, body)

        return await self._do(key, write)

    async def delete(self, key: str) -> None:
        await self.delete_many([key])

    async def delete_many(self, keys: Iterable[str]) -> None:
        wanted = list(keys)

        def remove() -> None:
            with self._locked():
                for key in wanted:
                    self._path(key).unlink(missing_ok=True)

        if wanted:
            await self._do(wanted[0], remove)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        for key in await self._do(prefix, lambda: self._keys(prefix)):
            yield key

    async def probe(self) -> None:
        """Writes, reads and removes an object."""
        key = f"probe-{secrets.token_hex(6)}"
        await self.put_if_absent(key, b"")
        await self.delete(key)

    async def close(self) -> None:
        """Holds nothing open."""

    async def _do(self, key: str, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise StorageError(
                f"the file store {self.root} failed at {key}: {error.strerror or error}",
                kind="unavailable",
                key=key,
                hint="Free some space on its disk" if full else "See that the folder exists and can be written",
            ) from error

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not all(parts) or any(part.startswith(".") or "\0" in part for part in parts):
            raise StorageError(f"{key!r} is no key", kind="internal", key=key)
        return self.root.joinpath(*parts)

    def _read(self, key: str) -> tuple[bytes, str] | None:
        try:
            with self._path(key).open("rb") as file:
                return file.read(), _etag_of(os.fstat(file.fileno()))
        except (FileNotFoundError, IsADirectoryError):
            return None

    def _etag(self, key: str) -> str | None:
        try:
            return _etag_of(self._path(key).stat())
        except FileNotFoundError:
            return None

    def _write(self, key: str, body: bytes) -> str:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.root / TEMPORARY / secrets.token_hex(8)
        temporary.parent.mkdir(exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(body)
                file.flush()
                now = time.time_ns()
                os.utime(file.fileno(), ns=(now, now))
                os.fsync(file.fileno())
                etag = _etag_of(os.fstat(file.fileno()))
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
        return etag

    def _keys(self, prefix: str) -> Keys:
        found = []
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            inside = Path(folder).relative_to(self.root).as_posix()
            for name in files:
                if not name.startswith("."):
                    found.append(name if inside == "." else f"{inside}/{name}")
        return sorted(key for key in found if key.startswith(prefix))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _etag_of(info: os.stat_result) -> str:
    return f"{info.st_mtime_ns:x}-{info.st_ino:x}-{info.st_size:x}"


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
