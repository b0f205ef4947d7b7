"""Runtime and Session: the verbs that both editions offer over the same types, for one annotation that fits both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.events import Event
from greenroom.runtime.results import MapResult, RunResult, SessionInfo, SessionTree, Transcript, Turn
from greenroom.runtime.state import State


class Session(Protocol):
    id: str

    async def run(
        self,
        text: str | None = None,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        *,
        request_id: str | None = None,
    ) -> RunResult: ...

    def stream(self, text: str | None = None, *, request_id: str | None = None) -> AsyncIterator[Event]: ...

    async def submit(self, text: str, *, request_id: str | None = None) -> State: ...

    async def resume(self, *, request_id: str | None = None) -> RunResult | None: ...

    async def answer(self, interrupt_id: str, response: Any, request_id: str | None = None) -> RunResult: ...

    async def cancel(
        self, reason: str = "", timeout: float = 10.0, *, request_id: str | None = None
    ) -> RunResult | None: ...

    async def terminate(self, *, request_id: str | None = None) -> None: ...

    async def release_claim(self, expected_epoch: int, *, request_id: str | None = None) -> None: ...

    async def delete(self, *, request_id: str | None = None) -> None: ...

    async def status(self) -> SessionInfo: ...

    async def transcript(self) -> Transcript: ...

    async def tree(self) -> SessionTree: ...

    def events(self, after: str | None = None, follow: bool = False) -> AsyncIterator[Event]: ...  # noqa: FBT001, FBT002  # the public API's


class Runtime(Protocol):
    async def create_session(
        self,
        agent: AgentConfig,
        session_id: str | None = None,
        user_id: str | None = None,
        *,
        request_id: str | None = None,
    ) -> Session: ...

    async def open(self, session_id: str, agent: AgentConfig | None = None) -> Session: ...

    async def run_turn(self, agent: AgentConfig, text: str, session_id: str | None = None) -> Turn: ...

    def map(self, agent: AgentConfig, prompts: Iterable[str], concurrency: int = 64) -> AsyncIterator[MapResult]: ...

    def sessions(self, prefix: str = "", state: str | None = None) -> AsyncIterator[SessionInfo]: ...

    async def close(self, timeout: float = 10.0) -> tuple[str, ...]: ...
