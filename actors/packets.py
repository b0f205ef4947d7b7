"""The agents that clients have brought, with their local parts, and where those are imported from."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

KEPT_AGENTS = 1024
"""Agents kept with their local parts, the least recently used go first; the stored ones are found again."""

AGENT_WAIT = 15.0
"""Seconds that clients get to bring their agents again after the Supervisor has lost its memory."""


class Packets:
    """Agents by digest, pickled: they are loaded where they run, never here."""

    def __init__(self) -> None:
        self._agents: OrderedDict[str, bytes] = OrderedDict()
        self._paths: OrderedDict[str, None] = OrderedDict()
        self._news = asyncio.Condition()

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders that clients import from."""
        return tuple(self._paths)

    async def put(self, digests: list[str], packet: bytes, paths: tuple[str, ...]) -> None:
        for digest in digests:
            self._agents[digest] = packet
            self._agents.move_to_end(digest)
        while len(self._agents) > KEPT_AGENTS:
            self._agents.popitem(last=False)
        self._paths.update(dict.fromkeys(paths))
        async with self._news:
            self._news.notify_all()

    async def get(self, digest: str, *, wait: bool) -> bytes | None:
        """`wait`: a while, for a client that may bring it again."""
        if wait and digest not in self._agents:
            async with self._news:
                try:
                    async with asyncio.timeout(AGENT_WAIT):
                        await self._news.wait_for(lambda: digest in self._agents)
                except TimeoutError:
                    pass
        if digest in self._agents:
            self._agents.move_to_end(digest)
        return self._agents.get(digest)
