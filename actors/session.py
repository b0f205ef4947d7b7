"""SessionActor: runs one session at a time in a process of its own, and is reused for the next.

The verbs are SessionDriver's, the same as in the embedded edition. What Ray adds: a command is known by its request id
(asked twice it runs once), `cancel` and `events` answer on threads of their own and cross over to the run's loop, and
whatever happens comes back as a value.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from greenroom.actors.handles import SandboxActorClient, SupervisorClient
from greenroom.actors.wire import SUPERVISOR, Command, CommandKey, EventPage, Outcome, SessionReport, child_request
from greenroom.runtime.agents import AgentPacket
from greenroom.runtime.budget import used_by_tree
from greenroom.runtime.calls import CallBounds, SandboxSpec
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.children import create_child, run_child, time_left
from greenroom.runtime.clock import RandomIds, SystemClock
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import ClusterError, GreenroomError, PreflightError, RunFailed, SessionBusy
from greenroom.runtime.host import Host
from greenroom.runtime.ids import root_of
from greenroom.runtime.ports import Children
from greenroom.runtime.results import RunResult
from greenroom.runtime.session import SessionDriver
from greenroom.runtime.shelf import AgentShelf
from greenroom.runtime.storage.head import Head
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.tool_tasks import ToolTasks

T = TypeVar("T")

KEPT_CANCELS = 1024
"""Cancelled commands that are remembered until they arrive."""

BEAT = 1.0
"""Seconds between two beats of the run's loop."""

KEPT_SESSIONS = 32
"""Sessions whose events can still be read here after their run."""

EVENT_WAIT = 10.0
"""Seconds an events call waits for the first event of a session that runs here."""

LAST_WAIT = 0.5
"""Seconds it waits when the session does not run here: its command may be on the way."""


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A command under way, with the token that stops it from its first moment on."""

    command: Command
    token: CancelToken
    task: asyncio.Task[Outcome]


class SessionHost:
    """The plain class behind the actor. The constructor does no I/O."""

    def __init__(self, name: str, namespace: str, store: str) -> None:
        self._name = name
        self._namespace = namespace
        self._store = store
        self._host: Host | None = None
        self._supervisor: SupervisorClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drivers: OrderedDict[str, SessionDriver] = OrderedDict()
        self._runs: dict[CommandKey, _Accepted] = {}
        self._cancelled: OrderedDict[CommandKey, str] = OrderedDict()
        self._beat = time.monotonic()
        self._beating: asyncio.Task[None] | None = None

    # -- default group: the run's own loop

    async def run(self, command: Command) -> Outcome:
        """Carries out a command, or joins it when it is already running."""
        self._begin()
        accepted = self._runs.get(command.key)
        if accepted is None:
            token = CancelToken()
            reason = self._cancelled.pop(command.key, command.cancelled)
            if reason is not None:
                token.cancel(reason)
            task = asyncio.get_running_loop().create_task(self._carry_out(command, token))
            accepted = self._runs[command.key] = _Accepted(command, token, task)
            task.add_done_callback(lambda _: self._runs.pop(command.key, None))
        return await asyncio.shield(accepted.task)

    async def pid(self) -> int:
        """This process; asked once to see that it has started."""
        self._begin()
        return os.getpid()

    async def end(self) -> None:
        """Closes what agents hold open here; the process is ended next."""
        if self._host is not None:
            await self._host.parts.close()

    def _begin(self) -> None:
        """Knows the run's loop from its first call on, and shows from then on that it turns."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._beating = self._loop.create_task(self._keep_beating())

    async def _keep_beating(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT)

    # -- groups of their own

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]  # Ray's own
    async def cancel(self, session_id: str, request_id: str, reason: str, timeout: float | None) -> Outcome:
        """Cancels the command, also one that has not arrived yet, and answers once everything is parked."""
        return await self._on_loop(self._cancel((session_id, request_id), reason, timeout))

    @ray.method(concurrency_group="events")  # type: ignore[untyped-decorator]  # Ray's own
    async def events(self, session_id: str, position: int) -> EventPage:
        """The session's events from a position on; waits a moment for the first."""
        return await self._on_loop(self._events(session_id, position))

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]  # Ray's own
    async def report(self) -> SessionReport:
        """What runs here, and whether the run's loop turns: this answers on a thread of its own."""
        running = tuple(accepted.command for accepted in list(self._runs.values()))
        return SessionReport(self._name, os.getpid(), running, time.monotonic() - self._beat)

    # -- on the run's loop

    async def _carry_out(self, command: Command, token: CancelToken) -> Outcome:
        try:
            add_paths(command.paths)
            host = self._ensure_host()
            driver = self._driver(command.session_id)
            driver.agent = await host.shelf.get(command.agent) if command.agent is not None else None
            return Outcome(await self._verb(driver, command, token))
        except PreflightError as error:
            return Outcome(error=PreflightError(f"on node {_this_node()}: {error.message}", hint=error.hint))
        except GreenroomError as error:
            return Outcome(error=error)
        except Exception as error:  # a mistake of ours must not look like the actor's death
            return Outcome(error=ClusterError(f"{type(error).__name__} in a session actor: {error}"))

    async def _verb(self, driver: SessionDriver, command: Command, token: CancelToken) -> RunResult | None:
        if command.recover:
            recovered = await driver.recover(command.request_id, cancel=token)
            if recovered is not None:
                return recovered
        match command.verb:
            case "run":
                return await driver.run(
                    command.text, timeout=command.timeout, cancel=token, request_id=command.request_id
                )
            case "resume":
                return await driver.resume(cancel=token, request_id=command.request_id)
            case "answer":
                return await driver.answer(
                    command.interrupt_id, command.response, cancel=token, request_id=command.request_id
                )
            case "child":
                storage = self._ensure_host().storage
                return await run_child(driver, storage, command.text or "", cancel=token, timeout=command.timeout)

    async def _cancel(self, key: CommandKey, reason: str, timeout: float | None) -> Outcome:
        """Sets the command's own token first: whatever it is about to do, it finds itself cancelled."""
        accepted = self._runs.get(key)
        if accepted is not None:
            accepted.token.cancel(reason)
            done, _ = await asyncio.wait([accepted.task], timeout=timeout)
            return accepted.task.result() if done else Outcome(error=_not_yet(key[0], timeout))
        self._cancelled[key] = reason  # it is still on its way here
        while len(self._cancelled) > KEPT_CANCELS:
            self._cancelled.popitem(last=False)
        return Outcome()

    async def _events(self, session_id: str, position: int) -> EventPage:
        driver = self._driver(session_id)
        wait = EVENT_WAIT if self._has(session_id) else LAST_WAIT
        try:
            async with asyncio.timeout(wait):
                await driver.events.wait(position)
        except TimeoutError:
            pass
        events, end, missed = driver.events.read(position)
        return EventPage(tuple(events), end, missed, self._has(session_id))

    def _has(self, session_id: str) -> bool:
        return any(sid == session_id for sid, _ in self._runs)

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs on the loop of the default group, wherever it is called from."""
        while self._loop is None:  # noqa: ASYNC110  # another thread sets it, when the actor's first call begins
            await asyncio.sleep(0.001)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _driver(self, session_id: str) -> SessionDriver:
        driver = self._drivers.get(session_id)
        if driver is None:
            driver = self._drivers[session_id] = SessionDriver(session_id, self._ensure_host())
            idle = [sid for sid, kept in self._drivers.items() if not kept.running and sid != session_id]
            for sid in idle[: max(0, len(self._drivers) - KEPT_SESSIONS)]:
                del self._drivers[sid]
        return driver

    async def _fetch_agent(self, digest: str, wait: bool) -> AgentPacket | None:  # noqa: FBT001  # as AgentShelf calls it
        assert self._supervisor is not None, "an agent is fetched for a command"
        packet, paths = await self._supervisor.get_agent(digest, wait)
        add_paths(paths)
        return packet

    def _ensure_host(self) -> Host:
        if self._host is None:
            self._supervisor = SupervisorClient.find(SUPERVISOR, self._namespace)
            storage = Storage.open(self._store)
            remote = _Remote(self._supervisor, self._name)
            self._host = remote.host = Host(
                storage=storage,
                sandboxes=remote,
                children=remote,
                clock=SystemClock(),
                ids=RandomIds(),
                shelf=AgentShelf(storage, self._fetch_agent, remote),
                owner=f"ray:{self._namespace}:{self._name}",
                tasks=ToolTasks(RandomIds(), SystemClock(), outlive_runs=False),
                budgets=remote,
            )
        return self._host


def _this_node() -> str:
    return f"{platform.node()} ({ray.util.get_node_ip_address()})"


def add_paths(paths: Iterable[str]) -> None:
    """Makes a client's folders importable here, after all that is importable already."""
    for path in paths:
        if path not in sys.path and Path(path).is_dir():
            sys.path.append(path)


class _Remote:
    """The ports that lead out of the process, through the Supervisor: sandbox, children, budget, turns at a model."""

    host: Host

    def __init__(self, supervisor: SupervisorClient, name: str) -> None:
        self._supervisor = supervisor
        self._name = name
        self._sending: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def place(self, bounds: CallBounds) -> AsyncIterator[None]:
        ticket = uuid.uuid4().hex
        try:
            await self._supervisor.begin_turn(ticket, self._name, bounds)
            yield
        finally:
            self._send(self._supervisor.end_turn(ticket))

    def hold(self, bounds: CallBounds, seconds: float) -> None:
        self._send(self._supervisor.hold_turns(bounds, seconds))

    def _send(self, message: Coroutine[Any, Any, None]) -> None:
        """Nobody waits for it."""
        task = asyncio.get_running_loop().create_task(_if_possible(message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def get(self, root: str, spec: SandboxSpec) -> SandboxActorClient:
        return SandboxActorClient(await self._supervisor.sandbox_for(root, spec))

    async def find(self, root: str) -> SandboxActorClient | None:
        info = await self._supervisor.find_sandbox(root)
        return None if info is None else SandboxActorClient(info)

    def children_of(self, parent: Head, agent: AgentConfig | None, token: CancelToken | None = None) -> Children:
        return _RemoteChildren(parent, agent, self.host, self._supervisor, token)

    async def left(self, session_id: str, used: int, limit: int) -> bool:
        left = await self._supervisor.tokens_left(session_id, used, limit)
        if left is None:
            known = await used_by_tree(self.host.storage, root_of(session_id))
            left = await self._supervisor.tokens_left(session_id, used, limit, known)
        return bool(left)

    async def tell(self, session_id: str, used: int) -> None:
        await self._supervisor.tell_tokens(session_id, used)


class _RemoteChildren:
    """Children in actors of their own; they belong to the pool, not to their parent's process."""

    def __init__(
        self,
        parent: Head,
        agent: AgentConfig | None,
        host: Host,
        supervisor: SupervisorClient,
        token: CancelToken | None,
    ) -> None:
        self._token = token
        self._commands: dict[str, Command] = {}
        self._parent = parent
        self._agent = agent
        self._host = host
        self._supervisor = supervisor

    async def start(self, call_key: str, tool: str, task: str) -> str:
        assert self._agent is not None, "only an agent's own run starts its children"
        child = await create_child(self._host, self._parent, call_key, self._agent.child_agent(tool))
        parent, left = self._parent.session_id, time_left(self._token)
        command = self._commands[child] = Command(
            child_request(child), child, "child", text=task, timeout=left, parent=parent
        )
        await self._supervisor.start(command)
        return child

    async def wait(self, child_id: str) -> RunResult:
        outcome = await self._supervisor.carry_on(self._commands[child_id])
        if isinstance(outcome.error, RunFailed):
            return outcome.error.result
        result = outcome.unwrap()
        assert result is not None, "a child's run always has a result"
        return result

    def abandon(self) -> None:
        """They run in actors of their own, where the next owner finds them."""

    async def cancel(self, child_id: str, reason: str) -> None:
        outcome = await self._supervisor.cancel(child_id, reason, None)
        if outcome is None and await self._host.storage.checkpoints.read(child_id) is not None:
            await SessionDriver(child_id, self._host).cancel(reason, None)


async def _if_possible(message: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(ClusterError):
        await message


def _not_yet(session_id: str, timeout: float | None) -> SessionBusy:
    return SessionBusy(
        f"session {session_id!r} has not parked within {timeout} s",
        session_id=session_id,
        hint="The cancellation goes on; ask again",
    )


_remote: Any = ray.remote  # its overloads know no options
SessionActor = _remote(
    num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={"control": 256, "events": 256}
)(SessionHost)
