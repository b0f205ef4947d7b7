"""map: a session per prompt, a bounded number at once, results as they finish, errors as values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import ConfigError, GreenroomError
from greenroom.runtime.results import MapResult, RunResult


class _Session(Protocol):
    id: str

    async def run(self, text: str | None = None) -> RunResult: ...

    async def cancel(self, reason: str = "") -> RunResult | None: ...


class _Runtime(Protocol):
    async def create_session(self, agent: AgentConfig) -> _Session: ...


async def map_prompts(
    runtime: _Runtime, agent: AgentConfig, prompts: Iterable[str], concurrency: int
) -> AsyncIterator[MapResult]:
    """Exactly one MapResult per prompt, in order of finishing. Prompts are taken as places become free.

    Leaving the iteration early cancels what runs. Raises ConfigError for a concurrency below 1.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency is {concurrency}", hint="Give at least 1")
    waiting = enumerate(prompts)
    running: set[asyncio.Task[MapResult]] = set()
    try:
        while True:
            while len(running) < concurrency and (item := next(waiting, None)) is not None:
                running.add(asyncio.ensure_future(_one(runtime, agent, *item)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


async def _one(runtime: _Runtime, agent: AgentConfig, index: int, prompt: str) -> MapResult:
    session: _Session | None = None
    try:
        session = await runtime.create_session(agent)
        return MapResult(index, session.id, result=await session.run(prompt))
    except GreenroomError as error:
        return MapResult(index, session.id if session is not None else "", error=error)
    except asyncio.CancelledError:
        if session is not None:
            await session.cancel("map was left")
        raise
