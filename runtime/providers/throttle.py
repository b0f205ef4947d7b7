"""Throttle: how many calls an endpoint gets at once, and how fast one after another, so that a fan-out is no storm.

One per provider and event loop. What an endpoint asks for with Retry-After holds for all of its calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_HOLD = 60.0
"""Seconds that one Retry-After can hold up the other calls."""


class Throttle:
    """max_concurrent: calls at once; requests_per_minute: starts of calls, evenly spaced; None for no bound."""

    def __init__(self, max_concurrent: int | None = None, requests_per_minute: float | None = None) -> None:
        self._places = None if max_concurrent is None else asyncio.Semaphore(max_concurrent)
        self._pause = 0.0 if requests_per_minute is None else 60.0 / requests_per_minute
        self._next = 0.0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Held by a call from its start to its end; waits for its turn."""
        if self._places is None:
            await self._turn()
            yield
            return
        async with self._places:
            await self._turn()
            yield

    def hold(self, seconds: float) -> None:
        """No call starts for so long."""
        self._next = max(self._next, self._now() + min(seconds, MAX_HOLD))

    async def _turn(self) -> None:
        begins = max(self._now(), self._next)
        self._next = begins + self._pause
        if begins > self._now():
            await asyncio.sleep(begins - self._now())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
