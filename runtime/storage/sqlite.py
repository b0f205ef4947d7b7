"""An ObjectStore in one SQLite file: durable (WAL, synchronous=FULL), shared by the processes of one machine.

All statements run on one thread of its own, so that the event loop never waits for a disk; the file is opened at the
first use. Every write is one transaction that checks its condition and writes.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from greenroom.runtime.errors import AlreadyExists, NotFound, PreconditionFailed, StorageError

BUSY_TIMEOUT = 30.0
"""Seconds a write waits for other processes' writes before it gives up."""

LIST_PAGE = 500

T = TypeVar("T")
Keys = list[str]  # inside the class, `list` is the verb


class SqliteObjectStore:
    """`path`: of the database file; its folder is made when missing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._connection: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None

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

        return await self._do(key, write)

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

        return await self._do(key, write)

    async def delete(self, key: str) -> None:
        await self.delete_many([key])

    async def delete_many(self, keys: Iterable[str]) -> None:
        rows = [(key,) for key in keys]

        def write(db: sqlite3.Connection) -> None:
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.executemany("DELETE FROM objects WHERE key = ?", rows)

        await self._do(rows[0][0] if rows else "", write)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        after = ""
        while True:
            page = await self._do(prefix, partial(self._page, prefix=prefix, after=after))
            for key in page:
                yield key
            if len(page) < LIST_PAGE:
                return
            after = page[-1]

    async def probe(self) -> None:
        await self._do("", lambda db: db.execute("SELECT 1 FROM objects LIMIT 1").fetchone())

    async def close(self) -> None:
        """Closes the file; a later use opens it again."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        await asyncio.get_running_loop().run_in_executor(thread, self._disconnect)
        thread.shutdown(wait=False)

    def __reduce__(self) -> tuple[type[SqliteObjectStore], tuple[str]]:
        return SqliteObjectStore, (str(self.path),)

    async def _do(self, key: str, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="greenroom-sqlite")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, key, work)

    def _guarded(self, key: str, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._connect()
            return work(self._connection)
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"the SQLite store {self.path} cannot be used: {error}",
                kind="unavailable",
                key=key,
                hint="See that its folder exists, can be written and has free space",
            ) from error

    def _connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute(
                "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, body BLOB NOT NULL, etag TEXT NOT NULL)"
                " WITHOUT ROWID"
            )
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @staticmethod
    def _page(db: sqlite3.Connection, prefix: str, after: str) -> Keys:
        rows = db.execute(
            "SELECT key FROM objects WHERE key > ? AND key >= ? AND substr(key, 1, ?) = ? ORDER BY key LIMIT ?",
            (after, prefix, len(prefix), prefix, LIST_PAGE),
        )
        return [row[0] for row in rows]
