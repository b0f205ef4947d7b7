"""The real Clock and IdSource."""

from __future__ import annotations

import asyncio
import random
import time
import uuid


class SystemClock:
    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class RandomIds:
    def new_id(self) -> str:
        return uuid.uuid4().hex

    def random(self) -> float:
        return random.random()
