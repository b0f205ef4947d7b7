"""A clock that only moves when it is told to, and ids and random numbers that come again with the same seed."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

SETTLE_ROUNDS = 200
"""Turns of the event loop after which nothing in memory is still about to happen."""


class FakeClock:
    """`start`: its first time() in Unix seconds. `slept`: the waits that have been asked for, in order."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = 0.0
        self._start = start
        self._alarms: list[tuple[float, int]] = []
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._count = 0
        self.slept: list[float] = []

    def time(self) -> float:
        return self._start + self._now

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        forget = self.call_later(seconds, lambda: woken.set_result(None))
        try:
            await woken
        finally:
            forget()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        self._count += 1
        number = self._count
        self._callbacks[number] = callback
        heapq.heappush(self._alarms, (self._now + seconds, number))
        return lambda: self._callbacks.pop(number, None) and None

    async def advance(self, seconds: float) -> None:
        """Moves on, waking who is due, each at its own time."""
        until = self._now + seconds
        await settle()
        while self.wake_next(until):
            await settle()
        self._now = until

    async def run(self, work: Awaitable[T]) -> T:
        """The work's result; whenever everybody waits, the clock jumps to the next who is due."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await settle()
            if not task.done() and not self.wake_next():
                await asyncio.wait([task], timeout=0.01)  # something outside, such as a thread, is still at work
        return task.result()

    def wake_next(self, until: float = math.inf) -> bool:
        """Jumps to whoever is due next, by `until` on monotonic(); False when nobody is."""
        while self._alarms and self._alarms[0][0] <= until:
            due, number = heapq.heappop(self._alarms)
            callback = self._callbacks.pop(number, None)
            if callback is not None:
                self._now = max(self._now, due)
                callback()
                return True
        return False


class SeededIds:
    """An IdSource whose ids and numbers follow from its seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def new_id(self) -> str:
        return f"{self._random.getrandbits(128):032x}"

    def random(self) -> float:
        return self._random.random()


async def settle() -> None:
    """Lets everything happen that needs no waiting."""
    ready = getattr(asyncio.get_running_loop(), "_ready", None)  # not public: without it all the turns are taken
    for _ in range(SETTLE_ROUNDS):
        await asyncio.sleep(0)
        if ready is not None and not ready:
            return
