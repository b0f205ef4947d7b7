"""Which actor runs a session, or ran it last; and when it gets another one."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from typing import Any

KEPT = 4096
"""Sessions whose last actor is known; the longest unused go first."""

PLACEMENT_WAIT = 20.0
"""Seconds that a question for the next placement waits."""


class Directory:
    """Placements are numbered in their order, also over the death of a Supervisor."""

    def __init__(self) -> None:
        self._number = 0
        self._placed: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._awaited: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    def place(self, session_id: str, handle: Any) -> None:
        """The session runs on this actor from now on."""
        self._number = max(self._number + 1, time.time_ns() // 1000)
        self._placed[session_id] = handle, self._number
        self._placed.move_to_end(session_id)
        while len(self._placed) > KEPT:
            self._placed.popitem(last=False)
        for future in self._awaited.pop(session_id, ()):
            if not future.done():
                future.set_result(None)

    async def find(self, session_id: str, after: int, *, wait: bool) -> tuple[Any, int]:
        """The session's actor and the placement's number, if that is beyond `after`; else None, and 0.

        wait: for a while, until there is such a placement.
        """
        if self._number_of(session_id) <= after and wait:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaited[session_id].add(future)
            try:
                async with asyncio.timeout(PLACEMENT_WAIT):
                    await future
            except TimeoutError:
                pass
            finally:
                self._forget(session_id, future)
        handle, number = self._placed.get(session_id, (None, 0))
        return (handle, number) if number > after else (None, 0)

    def _number_of(self, session_id: str) -> int:
        return self._placed[session_id][1] if session_id in self._placed else 0

    def _forget(self, session_id: str, future: asyncio.Future[None]) -> None:
        if session_id in self._awaited:
            self._awaited[session_id].discard(future)
            if not self._awaited[session_id]:
                del self._awaited[session_id]
