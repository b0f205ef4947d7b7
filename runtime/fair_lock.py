"""FairLock: many readers or one writer, in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLock:
    """Held by whoever works; who waits can be cancelled and is then as if it had never asked."""

    def __init__(self) -> None:
        self._queue: deque[tuple[bool, asyncio.Future[None]]] = deque()
        self._readers = 0
        self._writing = False

    @asynccontextmanager
    async def held(self, *, shared: bool) -> AsyncIterator[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (shared, turn)
        self._queue.append(entry)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
            elif turn.done() and not turn.cancelled():
                self._release(shared=shared)
            self._admit()
            raise
        try:
            yield
        finally:
            self._release(shared=shared)
            self._admit()

    def _admit(self) -> None:
        while self._queue and not self._writing:
            shared, turn = self._queue[0]
            if turn.cancelled():
                self._queue.popleft()
                continue
            if not shared and self._readers:
                return
            self._queue.popleft()
            if shared:
                self._readers += 1
            else:
                self._writing = True
            turn.set_result(None)

    def _release(self, *, shared: bool) -> None:
        if shared:
            self._readers -= 1
        else:
            self._writing = False
