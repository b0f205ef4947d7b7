"""Files of a batch that lie in a bucket: tasks are fetched from there, results are put there now and then.

The sessions of a batch lie in the store anyway: results lost since the last time they were put there are found again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit, urlunsplit

from greenroom.runtime.errors import AlreadyExists, ConfigError, PreconditionFailed, StorageError, UsageError
from greenroom.runtime.storage.s3 import S3ObjectStore

log = logging.getLogger("greenroom.batch")

PUT_EVERY = 15.0
"""Seconds between two times that results are put into the bucket."""

SCHEME = "s3://"


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Where the tasks and the results of a batch lie on this machine, and the batch's name if the files give it one."""

    tasks: Path
    out: Path
    name: str | None = None


@asynccontextmanager
async def batch_files(tasks: str, out: str) -> AsyncIterator[BatchFiles]:
    """Paths stay as they are; of `s3://BUCKET/KEY?endpoint=URL&region=NAME` there is a copy while this is open.

    Raises ConfigError for tasks that are not there, UsageError when somebody else has put results there meanwhile: both
    ran the same batch. Results are put there once more at the end.
    """
    if not any(map(_is_remote, (tasks, out))):
        yield BatchFiles(Path(tasks), Path(out))
        return
    with TemporaryDirectory(prefix="greenroom-batch-") as folder:
        name = f"{_stem(tasks)}-{hashlib.sha256(f'{tasks} {out}'.encode()).hexdigest()[:8]}"
        local = BatchFiles(
            Path(folder, "tasks.jsonl") if _is_remote(tasks) else Path(tasks),
            Path(folder, "results.jsonl") if _is_remote(out) else Path(out),
            name,
        )
        if _is_remote(tasks) and not await _Copy.of(tasks, local.tasks).fetch():
            raise ConfigError(f"{tasks} is not there", hint="Put a file with a task a line there")
        if not _is_remote(out):
            yield local
            return
        results = _Copy.of(out, local.out)
        await results.fetch()
        putting = asyncio.create_task(_put_now_and_then(results))
        try:
            yield local
        finally:
            putting.cancel()
            await asyncio.wait([putting])
            await results.put()


@dataclass(slots=True)
class _Copy:
    """An object of a bucket and its copy on this machine."""

    url: str
    store: S3ObjectStore
    key: str
    path: Path
    etag: str | None = None
    put_bytes: int = -1
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, url: str, path: Path) -> _Copy:
        parts = urlsplit(url)
        folder, _, key = parts.path.strip("/").rpartition("/")
        if not key:
            raise ConfigError(f"{url!r} names no object", hint="Write s3://BUCKET/KEY?endpoint=URL&region=NAME")
        return cls(url, S3ObjectStore.from_url(urlunsplit(parts._replace(path=f"/{folder}"))), key, path)

    async def fetch(self) -> bool:
        """Whether there is one."""
        found = await self.store.get(self.key)
        if found is None:
            return False
        body, self.etag = found
        self.put_bytes = len(body)
        await asyncio.to_thread(self.path.write_bytes, body)
        return True

    async def put(self) -> None:
        """Puts whole lines only, and nothing when there are no new ones."""
        async with self.lock:
            body = await asyncio.to_thread(self.path.read_bytes) if self.path.exists() else b""
            body = body[: body.rfind(b"\n") + 1]
            if len(body) == max(self.put_bytes, 0):
                return
            try:
                if self.etag is None:
                    self.etag = await self.store.put_if_absent(self.key, body)
                else:
                    self.etag = await self.store.put_if_match(self.key, body, self.etag)
            except StorageError as error:
                if await self._is_ours(body):
                    pass
                elif isinstance(error, AlreadyExists | PreconditionFailed):
                    raise UsageError(
                        f"somebody else has put results to {self.url}",
                        hint="One process at a time runs a batch; run it again when the other has ended",
                    ) from error
                else:
                    raise
            self.put_bytes = len(body)

    async def _is_ours(self, body: bytes) -> bool:
        """Whether a write that was refused or got no answer has landed after all."""
        found = await self.store.get(self.key)
        if found is None or found[0] != body:
            return False
        self.etag = found[1]
        return True


async def _put_now_and_then(results: _Copy) -> None:
    while True:
        await asyncio.sleep(PUT_EVERY)
        try:
            await results.put()
        except (StorageError, UsageError) as error:  # tried again; said at the end
            log.warning("results are not in the bucket yet: %s", error)


def _is_remote(url: str) -> bool:
    return url.startswith(SCHEME)


def _stem(tasks: str) -> str:
    return Path(urlsplit(tasks).path if _is_remote(tasks) else tasks).stem[:40]
