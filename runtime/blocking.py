"""The blocking face of either edition: plain `with` runs the runtime on a private loop thread.

Only a handful of verbs have a blocking twin; inside a running event loop they refuse and name the async verb.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import UsageError
from greenroom.runtime.results import RunResult, Turn

T = TypeVar("T")
S = TypeVar("S", bound="BlockingSession")


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="greenroom-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingRuntime(ABC, Generic[S]):
    """Mixin: `with runtime:` and the *_sync verbs."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None

    @abstractmethod
    async def create_session(
        self, agent: AgentConfig, session_id: str | None = None, user_id: str | None = None
    ) -> S: ...

    @abstractmethod
    async def open(self, session_id: str, agent: AgentConfig | None = None) -> S: ...

    @abstractmethod
    async def run_turn(self, agent: AgentConfig, text: str, session_id: str | None = None) -> Turn: ...

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __enter__(self) -> Self:
        _refuse_in_loop("with", "async with")
        self._thread = LoopThread()
        try:
            self._thread.run(self.__aenter__())
        except BaseException:
            self._thread.stop()
            self._thread = None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(self.__aexit__(kind, error, trace))
            finally:
                thread.stop()

    def run_turn_sync(self, agent: AgentConfig, text: str, session_id: str | None = None) -> Turn:
        return self._blocking("run_turn", self.run_turn(agent, text, session_id))

    def create_session_sync(self, agent: AgentConfig, session_id: str | None = None, user_id: str | None = None) -> S:
        return self._blocking("create_session", self.create_session(agent, session_id, user_id))

    def open_sync(self, session_id: str, agent: AgentConfig | None = None) -> S:
        return self._blocking("open", self.open(session_id, agent))

    def _blocking(self, verb: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            _refuse_in_loop(f"{verb}_sync", f"await {verb}")
            if self._thread is None:
                raise UsageError(f"{verb}_sync needs the runtime's own loop", hint="Use it inside `with runtime:`")
        except UsageError:
            work.close()
            raise
        return self._thread.run(work)


class BlockingSession(ABC):
    """Mixin: a session's run_sync."""

    id: str

    def __init__(self, runtime: BlockingRuntime[Any]) -> None:
        self._blocking_runtime = runtime

    @abstractmethod
    async def run(self, text: str | None = None, timeout: float | None = None) -> RunResult: ...

    @abstractmethod
    async def cancel(self, reason: str = "") -> RunResult | None: ...

    def run_sync(self, text: str | None = None, timeout: float | None = None) -> RunResult:
        return self._blocking_runtime._blocking("run", self.run(text, timeout))


def _refuse_in_loop(verb: str, instead: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(f"{verb} blocks, and an event loop is running here", hint=f"Use `{instead}`")
