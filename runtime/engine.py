"""The embedded runtime: sessions in this process, without Ray. The composition root of everything in runtime/.

`greenroom.AgentRuntime` is this Engine with the shipped sandboxes. Handles (EmbeddedSession) only delegate: the verbs
of a session are SessionDriver's.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar
from weakref import WeakValueDictionary

from greenroom.runtime.blocking import BlockingSession
from greenroom.runtime.budget import LocalBudgets
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.children import LocalChildren
from greenroom.runtime.clock import RandomIds, SystemClock
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import ConfigError, UsageError
from greenroom.runtime.events import Event, follow_run
from greenroom.runtime.facade import RuntimeFacade
from greenroom.runtime.host import Host
from greenroom.runtime.ids import root_of
from greenroom.runtime.local_trees import LocalTreeSandboxes
from greenroom.runtime.ports import Children, Clock, IdSource, SandboxFactory, TreeSandboxes
from greenroom.runtime.results import RunResult, SessionInfo, SessionTree, Transcript
from greenroom.runtime.session import TERMINATED, SessionDriver
from greenroom.runtime.sessions import create_root, read_head, read_transcript, read_tree
from greenroom.runtime.shelf import AgentShelf
from greenroom.runtime.state import State
from greenroom.runtime.storage.head import Head
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.tool_tasks import ToolTasks
from greenroom.runtime.view import info_of
from greenroom.runtime.workspace import remove_managed_workspace

CLOSED = "runtime closed"
"""The reason that sessions are parked with when their runtime is closed."""

TERMINATE_TIMEOUT = 10.0
"""Seconds that a terminated session gets to park before that is given up."""

CLOSE_GRACE = 3.0
"""Seconds that sandboxes, and runs that did not park in time, get to end."""

R = TypeVar("R")


class OpenTrees(TreeSandboxes, Protocol):
    """The sandboxes of all trees, with their end."""

    async def close_one(self, root: str) -> None: ...

    async def close(self) -> None: ...


class Engine(RuntimeFacade["EmbeddedSession"]):
    """Sessions of this process over one storage.

    storage: a URL or a Storage; sandboxes: opens sandboxes, kept in this process unless `trees` keeps them; host_fence:
    an embedding host's own fencing number, 0 for none: a session that has seen a higher one is refused. Use it with
    `async with`, or with plain `with` for the *_sync verbs.
    """

    def __init__(
        self,
        storage: str | Storage = "sqlite:///greenroom.db",
        host_fence: int = 0,
        *,
        sandboxes: SandboxFactory,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        trees: OpenTrees | None = None,
    ) -> None:
        if host_fence < 0:
            raise ConfigError(f"host_fence is {host_fence}", hint="Give a number that only grows, or 0 for none")
        super().__init__()
        self.storage = Storage.open(storage) if isinstance(storage, str) else storage
        clock, ids = clock or SystemClock(), ids or RandomIds()
        self._trees: OpenTrees = trees or LocalTreeSandboxes(sandboxes, self._live_roots, self.storage, clock)
        self._host = Host(
            storage=self.storage,
            sandboxes=self._trees,
            children=self,
            clock=clock,
            ids=ids,
            shelf=AgentShelf(self.storage),
            owner=f"local:{socket.gethostname()}:{os.getpid()}:{ids.new_id()[:8]}",
            tasks=ToolTasks(ids, clock, outlive_runs=True),
            budgets=LocalBudgets(self.storage),
            host_fence=host_fence,
        )
        self._drivers: WeakValueDictionary[str, SessionDriver] = WeakValueDictionary()
        self._runs: set[asyncio.Task[Any]] = set()
        self._closed = False

    # -- sessions

    async def create_session(
        self,
        agent: AgentConfig,
        session_id: str | None = None,
        user_id: str | None = None,
        *,
        request_id: str | None = None,
    ) -> EmbeddedSession:
        """A new session, Ready and empty; raises SessionExists, unless this very request made it."""
        self.check_open()
        sid = await create_root(self._host, agent, session_id, user_id, request_id)
        return EmbeddedSession(self, self._driver(sid, agent))

    async def open(self, session_id: str, agent: AgentConfig | None = None) -> EmbeddedSession:
        """An existing session; with `agent` the next run uses it. Raises SessionNotFound, AgentUnavailable."""
        self.check_open()
        head = await read_head(self.storage, session_id)
        if agent is None and session_id not in self._drivers:
            await self._host.shelf.get(head.agent)
        return EmbeddedSession(self, self._driver(session_id, agent))

    # -- lifetime

    async def close(self, timeout: float = 10.0) -> tuple[str, ...]:
        """Cancels what runs, ends the sandboxes, lets go of connections. Harmless when called again.

        Takes `timeout` seconds for the runs, and CLOSE_GRACE at most for the rest. Answers the ids of sessions whose
        run would not end by then: they are left as they lie in the store, and `resume` takes them over.
        """
        if self._closed:
            return ()
        self._closed = self._host.lifetime.closed = True
        running = [driver for driver in list(self._drivers.values()) if driver.running]
        parked = await asyncio.gather(*(driver.cancel(CLOSED, timeout) for driver in running), return_exceptions=True)
        left = [driver for driver, end in zip(running, parked, strict=True) if not isinstance(end, RunResult)]
        for driver in left:
            driver.tell_cancelled(CLOSED, hard=True)
        for task in self._runs:
            task.cancel()
        ends = [asyncio.ensure_future(self._trees.close()), asyncio.ensure_future(self._host.tasks.close())]
        ending = [*ends, *self._runs]
        await asyncio.wait(ending, timeout=CLOSE_GRACE)
        await self._host.parts.close()
        await self.storage.close()
        return tuple(driver.session_id for driver in left)

    async def __aenter__(self) -> Self:
        await self.storage.probe()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- for the session's handle and the driver

    def children_of(self, parent: Head, agent: AgentConfig | None, token: CancelToken | None = None) -> Children:
        return LocalChildren(parent, agent, self._host, self._driver, token)

    def _driver(self, session_id: str, agent: AgentConfig | None) -> SessionDriver:
        """The one driver of a session in this process."""
        driver = self._drivers.get(session_id)
        if driver is None:
            driver = self._drivers[session_id] = SessionDriver(session_id, self._host, agent)
        elif agent is not None:
            driver.agent = agent
        return driver

    def handle(self, session_id: str) -> EmbeddedSession:
        """A session's handle for verbs that need no agent; nothing is looked up before the first one."""
        return EmbeddedSession(self, self._driver(session_id, None))

    async def terminate(self, driver: SessionDriver) -> None:
        """Parks the driver's session at once, and ends everything that runs in a root's sandbox; raises SessionBusy."""
        sid = driver.session_id
        is_root = root_of(sid) == sid
        for other in list(self._drivers.values()) if is_root else ():
            if root_of(other.session_id) == sid:
                other.tell_cancelled(TERMINATED, hard=True)
        await driver.cancel(TERMINATED, TERMINATE_TIMEOUT, hard=True)
        if is_root:
            await self._trees.close_one(sid)

    async def delete(self, driver: SessionDriver) -> None:
        """Deletes the driver's session with its tree, and a root's sandbox and managed workspace."""
        await driver.delete()
        if root_of(driver.session_id) == driver.session_id:
            await self._trees.close_one(driver.session_id)
            await asyncio.to_thread(remove_managed_workspace, driver.session_id)

    def new_id(self) -> str:
        return self._host.ids.new_id()

    def _live_roots(self) -> set[str]:
        return {root_of(driver.session_id) for driver in list(self._drivers.values()) if driver.running}

    def check_open(self) -> None:
        if self._closed:
            raise UsageError("the runtime is closed", hint="Make a new one")

    async def carried_on(self, run: Coroutine[Any, Any, R]) -> R:
        """The run's result; a caller that stops waiting does not stop it."""
        return await asyncio.shield(self.spawn(run))

    def spawn(self, run: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """A run that goes on when nobody waits for it; `close` ends it."""
        task = asyncio.get_running_loop().create_task(run)
        self._runs.add(task)
        task.add_done_callback(self._runs.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at, wherever it is awaited
        return task


class EmbeddedSession(BlockingSession):
    """A session's handle: its verbs, in this process."""

    def __init__(self, engine: Engine, driver: SessionDriver) -> None:
        super().__init__(engine)
        self._engine = engine
        self._driver = driver
        self.id = driver.session_id

    async def run(
        self,
        text: str | None = None,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        *,
        request_id: str | None = None,
    ) -> RunResult:
        """Appends `text` (None: runs what submit appended) and runs to a stop.

        timeout: seconds, then the run is cancelled. Raises RunFailed for a failed run only. A caller that goes away
        cancels nothing: the run goes on.
        """
        self._engine.check_open()
        run = self._driver.run(text, timeout=timeout, cancel=cancel, request_id=request_id)
        return await self._engine.carried_on(run)

    async def stream(self, text: str | None = None, *, request_id: str | None = None) -> AsyncIterator[Event]:
        """The run's events, ending with run_finished, also for a failed one. Leaving early cancels nothing."""
        self._engine.check_open()
        request = request_id or self._engine.new_id()
        position = self._driver.events.end
        run = self._engine.spawn(self._driver.run(text, request_id=request))
        async for event in follow_run(self._driver.events, position, request, run):
            yield event

    async def submit(self, text: str, *, request_id: str | None = None) -> State:
        """Appends a message and runs nothing."""
        self._engine.check_open()
        return await self._driver.submit(text, request_id=request_id)

    async def resume(self, *, request_id: str | None = None) -> RunResult | None:
        """Goes on with an interrupted run or takes one over from an owner that died; None when nothing is in flight."""
        self._engine.check_open()
        return await self._engine.carried_on(self._driver.resume(request_id=request_id))

    async def answer(self, interrupt_id: str, response: Any, request_id: str | None = None) -> RunResult:
        """Answers the open question and runs on."""
        self._engine.check_open()
        return await self._engine.carried_on(self._driver.answer(interrupt_id, response, request_id=request_id))

    async def cancel(
        self, reason: str = "", timeout: float = 10.0, *, request_id: str | None = None
    ) -> RunResult | None:
        """Parks the run and everything below it as Interrupted; None when nothing is in flight."""
        return await self._driver.cancel(reason, timeout, request_id=request_id)

    async def terminate(self, *, request_id: str | None = None) -> None:
        """Ends what runs at once, with everything below it and in a root's sandbox; parked as Interrupted."""
        self._engine.check_open()
        await self._engine.terminate(self._driver)

    async def release_claim(self, expected_epoch: int, *, request_id: str | None = None) -> None:
        """After a crash between an answer's acceptance and its run's end: fences the dead owner off, `resume` goes on.

        expected_epoch: as `status` tells it; Conflict when the session has moved on since.
        """
        self._engine.check_open()
        await self._driver.release_claim(expected_epoch)

    async def delete(self, *, request_id: str | None = None) -> None:
        """Deletes the session and everything below it: what runs is ended, a managed workspace removed. Repeatable."""
        self._engine.check_open()
        await self._engine.delete(self._driver)

    async def status(self) -> SessionInfo:
        return info_of(await read_head(self._engine.storage, self.id))

    async def transcript(self) -> Transcript:
        return await read_transcript(self._engine.storage, self.id)

    async def tree(self) -> SessionTree:
        """The session with everything below it, as the store has it."""
        return await read_tree(self._engine.storage, self.id)

    async def events(self, after: str | None = None, follow: bool = False) -> AsyncIterator[Event]:  # noqa: FBT001, FBT002  # the public API's
        """Events of this process's runs after the cursor; with `follow` for ever."""
        buffer = self._driver.events
        position = buffer.position_after(after)
        if follow:
            async for event in buffer.follow(position):
                yield event
        else:
            for event in buffer.page(position)[0]:
                yield event
