"""An ObjectStore in one SQLite file: durable (WAL, synchronous=FULL), shared by the processes of one machine.

All statements run on one thread of its own, so that the event loop never waits for a disk; the file is opened at the
first use. Every write is one statement that checks its condition and writes. What has come in while the thread was busy
becomes one transaction, so that many sessions share the wait for the disk; nobody hears of a write before it is on it.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from greenroom.runtime.errors import AlreadyExists, NotFound, PreconditionFailed, StorageError

BUSY_TIMEOUT = 30.0
"""Seconds a write waits for other processes' writes before it gives up."""

LIST_PAGE = 500

GROUP = 128
"""Writes that at most share one transaction."""

T = TypeVar("T")
Keys = list[str]  # inside the class, `list` is the verb
Work = Callable[[sqlite3.Connection], Any]


class SqliteObjectStore:
    """`path`: of the database file; its folder is made when missing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._worker: _Worker | None = None

    async def get(self, key: str) -> tuple[bytes, str] | None:
        def read(db: sqlite3.Connection) -> tuple[bytes, str] | None:
            row = db.execute("SELECT body, etag FROM objects WHERE key = ?", (key,)).fetchone()
            return None if row is None else (bytes(row[0]), row[1])

        return await self._do(key, read)

    async def put_if_absent(self, key: str, body: bytes) -> str:
        etag = secrets.token_hex(8)

        def write(db: sqlite3.Connection) -> str:
            done = db.execute("INSERT OR IGNORE INTO objects (key, body, etag) VALUES (?, ?, ?)", (key, body, etag))
            if done.rowcount == 0:
                raise AlreadyExists(f"{key} is already there", key=key)
            return etag

        return await self._do(key, write, writes=True)

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        new = secrets.token_hex(8)

        def write(db: sqlite3.Connection) -> str:
            done = db.execute(
                "UPDATE objects SET body = ?, etag = ? WHERE key = ? AND etag = ?", (body, new, key, etag)
            )
            if done.rowcount:
                return new
            if db.execute("SELECT 1 FROM objects WHERE key = ?", (key,)).fetchone() is None:
                raise NotFound(f"there is no {key}", kind="not_found", key=key)
            raise PreconditionFailed(f"{key} was changed by somebody else", key=key)

        return await self._do(key, write, writes=True)

    async def delete(self, key: str) -> None:
        await self.delete_many([key])

    async def delete_many(self, keys: Iterable[str]) -> None:
        rows = [(key,) for key in keys]

        def write(db: sqlite3.Connection) -> None:
            with nullcontext() if db.in_transaction else db:
                if not db.in_transaction:
                    db.execute("BEGIN IMMEDIATE")
                db.executemany("DELETE FROM objects WHERE key = ?", rows)

        if rows:
            await self._do(rows[0][0], write, writes=True)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        after = ""
        while True:
            page = await self._do(prefix, partial(_page, prefix=prefix, after=after))
            for key in page:
                yield key
            if len(page) < LIST_PAGE:
                return
            after = page[-1]

    async def probe(self) -> None:
        await self._do("", lambda db: db.execute("SELECT 1 FROM objects LIMIT 1").fetchone())

    async def close(self) -> None:
        """Closes the file; a later use opens it again."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()

    def __reduce__(self) -> tuple[type[SqliteObjectStore], tuple[str]]:
        return SqliteObjectStore, (str(self.path),)

    async def _do(self, key: str, work: Callable[[sqlite3.Connection], T], *, writes: bool = False) -> T:
        if self._worker is None:
            self._worker = _Worker(self.path)
        try:
            done: T = await self._worker.do(work, writes=writes)
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"the SQLite store {self.path} cannot be used: {error}",
                kind="unavailable",
                key=key,
                hint="See that its folder exists, can be written and has free space",
            ) from error
        return done


@dataclass(slots=True, eq=False)
class _Job:
    """One piece of work and where its end is told; `work` None ends the thread."""

    work: Work | None
    writes: bool
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def run(self, db: sqlite3.Connection) -> None:
        assert self.work is not None
        self.result = self.error = None
        try:
            self.result = self.work(db)
        except Exception as error:
            self.error = error


class _Worker:
    """The thread of one store and its connection."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        Thread(target=self._serve, name="greenroom-sqlite", daemon=True).start()

    async def do(self, work: Work, *, writes: bool) -> Any:
        return await self._put(work, writes=writes)

    async def close(self) -> None:
        await self._put(None, writes=False)

    def _put(self, work: Work | None, *, writes: bool) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        job = _Job(work, writes, loop, loop.create_future())
        self._jobs.put(job)
        return job.done

    # -- on the thread

    def _serve(self) -> None:
        db: sqlite3.Connection | None = None
        while True:
            jobs = self._take()
            last = jobs[-1].work is None
            try:
                working = jobs[:-1] if last else jobs
                if working:
                    db = db or _connect(self._path)
                    _perform(db, working)
                if last and db is not None:
                    db.close()
            except Exception as error:
                for job in jobs:
                    job.error = job.error or error
            _tell(jobs)
            if last:
                return

    def _take(self) -> list[_Job]:
        """What has come in: one job at least, up to the one that ends the thread."""
        jobs = [self._jobs.get()]
        while len(jobs) < GROUP and jobs[-1].work is not None and not self._jobs.empty():
            jobs.append(self._jobs.get())
        return jobs


def _perform(db: sqlite3.Connection, jobs: list[_Job]) -> None:
    """Runs the jobs in order, in one transaction if several of them write; one by one if that cannot be committed."""
    if sum(job.writes for job in jobs) > 1:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:  # another process holds the file: none of them waits once more
            for job in jobs:
                job.error = error
            return
        try:
            for job in jobs:
                job.run(db)
                if isinstance(job.error, sqlite3.Error):
                    raise job.error
            db.execute("COMMIT")
            return
        except sqlite3.Error:  # such as a full disk: some of the writes may still fit
            if db.in_transaction:
                db.execute("ROLLBACK")
    for job in jobs:
        job.run(db)


def _tell(jobs: list[_Job]) -> None:
    """Each loop hears of its jobs in one call."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, theirs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, theirs)
        except RuntimeError:
            pass  # the loop has ended: nobody waits any more


def _settle(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.done.done():
            continue  # its caller was cancelled
        if job.error is not None:
            job.done.set_exception(job.error)
        else:
            job.done.set_result(job.result)


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        # With a rowid: a table of keys alone would have every search read the bodies of the rows that it compares with.
        db.execute("CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, body BLOB NOT NULL, etag TEXT NOT NULL)")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _page(db: sqlite3.Connection, prefix: str, after: str) -> Keys:
    rows = db.execute(
        "SELECT key FROM objects WHERE key > ? AND key >= ? AND key < ? ORDER BY key LIMIT ?",
        (after, prefix, f"{prefix}\U0010ffff", LIST_PAGE),
    )
    return [row[0] for row in rows]
