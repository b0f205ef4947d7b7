"""The real Clock and IdSource."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable


class SystemClock:
    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        return asyncio.get_running_loop().call_later(seconds, callback).cancel


class RandomIds:
    def new_id(self) -> str:
        return os.urandom(16).hex()

    def random(self) -> float:
        return random.random()
