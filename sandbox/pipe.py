"""OutputPipe: reads what one command puts out, within bounds; what is too long to keep goes to a file as well."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from greenroom.runtime.calls import SandboxLimits
from greenroom.sandbox.output import OutputBuffer

PIECE = 1 << 16
"""Bytes that are read at once."""

LAST_PIECES = 16
"""That are still read when a command has exited: as much as a pipe may hold."""

NOWHERE_INTERVAL = 0.1
"""Seconds between two reads of what a child puts out that its command left behind."""


class OutputPipe:
    """`fd`: the end that is read, this object's own from now on; ask_for_file: has `write_to` called, once, with a file
    or with none. `news`: there is something to take; `drained`: nothing more comes.
    """

    def __init__(self, fd: int, limits: SandboxLimits, ask_for_file: Callable[[OutputPipe], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self.drained: asyncio.Future[None] = self._loop.create_future()
        self._fd = fd
        self._buffer = OutputBuffer(limits.output_head, limits.output_tail)
        self._kept = limits.output_head + limits.output_tail
        self._ask_for_file = ask_for_file
        self._file: int | None = None
        self._file_room = limits.spill_bytes
        self._left = False
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def take(self, *, final: bool) -> tuple[str, int]:
        """What came since the last take, and how many bytes of that are gone; final: nothing more is waited for."""
        self.news.clear()
        return self._buffer.take(final=final)

    def write_to(self, file: int | None, path: str) -> None:
        """The file for all of the output, None for no file: what came so far goes there first."""
        room, self._file_room = self._file_room, 0
        if file is not None and not self.closed:
            self._file, self._file_room = file, room
            self._buffer.whole = f"; the first {room} are in {path}"
            self._write(self._buffer.held())
        elif file is not None:
            os.close(file)
        self.news.set()
        if not self.closed and not self._left:
            self._loop.add_reader(self._fd, self._read)

    def leave(self, over: Callable[[], bool]) -> None:
        """Nobody wants more of it; but a child that goes on must not be stopped by a full pipe, until all is over."""
        if self.closed or self._left:
            return
        self._left = True
        self._loop.remove_reader(self._fd)
        for _ in range(LAST_PIECES):  # what was there before counts: perhaps it had to wait for the file
            data = self._piece()
            if data is None:
                break
            if not data:
                self.close()
                return
            self._keep(data)
        self._read_to_nowhere(over)

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        """Nothing more is read."""
        if self.closed:
            return
        self._loop.remove_reader(self._fd)
        fd, self._fd = self._fd, -1
        os.close(fd)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self.drained.set_result(None)

    def _read(self) -> None:
        data = self._piece()
        if data is None:
            return
        if not data:
            self.close()
            return
        self._keep(data)
        if self._file is None and self._file_room and self._buffer.total > self._kept:
            self._loop.remove_reader(self._fd)  # all of it is still there, and waits for the file
            self._ask_for_file(self)
            return
        self.news.set()

    def _piece(self) -> bytes | None:
        """What is there now; None for nothing, empty at the end."""
        try:
            return os.read(self._fd, PIECE)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _keep(self, data: bytes) -> None:
        self._buffer.add(data)
        if self._file is not None:
            self._write(data)

    def _write(self, data: bytes) -> None:
        assert self._file is not None, "only then it is written"
        try:
            self._file_room -= os.write(self._file, data[: self._file_room])
        except OSError:  # its room is full: what is there stays
            self._file_room = 0

    def _read_to_nowhere(self, over: Callable[[], bool]) -> None:
        """Slowly, so that a child which puts out without end does not keep us busy."""
        if self.closed:
            return
        if self._piece() == b"" or over():
            self.close()
        else:
            self._loop.call_later(NOWHERE_INTERVAL, self._read_to_nowhere, over)
