"""The verbs of a runtime that follow from the others, the same in both editions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from greenroom.runtime.blocking import BlockingRuntime, BlockingSession
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import SessionExists
from greenroom.runtime.fanout import map_prompts
from greenroom.runtime.results import MapResult, SessionInfo, Turn
from greenroom.runtime.sessions import list_sessions
from greenroom.runtime.storage.storage import Storage

S = TypeVar("S", bound=BlockingSession)


class RuntimeFacade(BlockingRuntime[S]):
    """Base of both editions: they add where sessions run."""

    storage: Storage

    async def run_turn(self, agent: AgentConfig, text: str, session_id: str | None = None) -> Turn:
        """One message to its answer: in a new session, or in the given one, which is made when it is not there."""
        try:
            session = await self.create_session(agent, session_id)
        except SessionExists:
            session = await self.open(str(session_id), agent)
        return Turn(session_id=session.id, result=await session.run(text))

    def map(self, agent: AgentConfig, prompts: Iterable[str], concurrency: int = 64) -> AsyncIterator[MapResult]:
        """A session per prompt, results as they finish; see fanout.map_prompts."""
        return map_prompts(self, agent, prompts, concurrency)

    async def sessions(self, prefix: str = "", state: str | None = None) -> AsyncIterator[SessionInfo]:
        """Every session whose id starts with `prefix`, as its head tells it."""
        async for info in list_sessions(self.storage, prefix, state):
            yield info
