"""connect(): the Ray edition's client. The same verbs and types as the embedded AgentRuntime.

A client starts commands and joins their outcome, both by request id and both repeatable. What the store alone can tell
or change (status, transcript, submit, the list) it does itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

import ray

from greenroom.actors.cluster import ensure_ray
from greenroom.actors.handles import SandboxActorClient, SupervisorClient
from greenroom.actors.reader import follow_command, follow_session
from greenroom.actors.supervisor import SupervisorActor
from greenroom.actors.wire import SUPERVISOR, Command, Hello, Outcome, PoolConfig, PoolStatus
from greenroom.runtime.agents import AgentPacket, pack
from greenroom.runtime.blocking import BlockingSession
from greenroom.runtime.budget import LocalBudgets
from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.clock import RandomIds, SystemClock
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import ClusterError, ConfigError, UsageError
from greenroom.runtime.events import Event
from greenroom.runtime.facade import RuntimeFacade
from greenroom.runtime.host import Host
from greenroom.runtime.ids import root_of
from greenroom.runtime.ports import Children, TreeSandbox
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

CLIENT_BEAT = 5.0
"""Seconds between two words of a client to the Supervisor."""

LEAVE_WAIT = 5.0
"""Seconds that a client waits when it takes its leave."""

JOIN_GRACE = 5.0
"""Seconds that a stream waits for the outcome of a run whose end it has already told."""


def connect(
    address: str | None = None,
    storage: str | Storage = "sqlite:///greenroom.db",
    namespace: str = "greenroom",
    pool: PoolConfig | None = None,
) -> RayRuntime:
    """The Ray edition, for `async with` (or plain `with` and the *_sync verbs); nothing happens before that.

    address: None uses the Ray of this process, else a running one, else starts a local one, which ends with the
    client; "local" always starts one, "auto" never. Raises ConfigError for a store that processes cannot share.
    """
    return RayRuntime(address, storage, namespace, pool)


class RayRuntime(RuntimeFacade["RaySession"]):
    """See connect()."""

    def __init__(self, address: str | None, storage: str | Storage, namespace: str, pool: PoolConfig | None) -> None:
        super().__init__()
        self.storage = Storage.open(storage) if isinstance(storage, str) else storage
        if not self.storage.url or self.storage.url == "memory:":
            raise ConfigError(
                "on Ray every process opens the store by its URL, and memory: would be another one in each",
                hint="Use sqlite:///FILE",
            )
        self._address = address
        self._namespace = namespace
        self._pool = pool
        self._paths = tuple(dict.fromkeys([str(Path(sys.path[0] or ".").absolute()), os.getcwd()]))
        self._started_ray = False
        self._closed = False
        self._supervisor: SupervisorClient | None = None
        self._packets: dict[str, AgentPacket] = {}
        self._id = uuid.uuid4().hex
        self._incarnation = ""
        self._beating: asyncio.Task[None] | None = None
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._host = Host(
            storage=self.storage,
            sandboxes=self,
            children=self,
            clock=SystemClock(),
            ids=RandomIds(),
            shelf=AgentShelf(self.storage),
            owner=f"client:{os.getpid()}:{uuid.uuid4().hex[:8]}",
            tasks=ToolTasks(RandomIds(), SystemClock(), outlive_runs=False),
            budgets=LocalBudgets(self.storage),
        )

    # -- sessions

    async def create_session(
        self,
        agent: AgentConfig,
        session_id: str | None = None,
        user_id: str | None = None,
        *,
        request_id: str | None = None,
    ) -> RaySession:
        """A new session, Ready and empty; raises SessionExists, unless this very request made it."""
        self.supervisor()
        await self._send_agent(agent)
        sid = await create_root(self._host, agent, session_id, user_id, request_id)
        return RaySession(self, sid, None)

    async def open(self, session_id: str, agent: AgentConfig | None = None) -> RaySession:
        """An existing session; with `agent` the next run uses it. Raises SessionNotFound."""
        self.supervisor()
        await read_head(self.storage, session_id)
        return RaySession(self, session_id, None if agent is None else await self._send_agent(agent))

    # -- the pool

    async def pool_status(self) -> PoolStatus:
        return await self.supervisor().status()

    async def stop_pool(self) -> None:
        """Ends the namespace's pool and its Supervisor; sessions lie in the store."""
        supervisor, self._supervisor = self.supervisor(), None
        await supervisor.stop()

    # -- lifetime

    async def close(self, timeout: float = 10.0) -> tuple[str, ...]:
        """Leaves the pool and its runs going, unless its Ray was started here. Harmless when called again."""
        if self._closed:
            return ()
        self._closed = True
        if self._beating is not None:
            self._beating.cancel()
        if self._supervisor is not None and not self._started_ray:
            with contextlib.suppress(ClusterError, TimeoutError):
                async with asyncio.timeout(LEAVE_WAIT):
                    await self._supervisor.here(self._id, leaving=True)
        if self._started_ray:
            if self._supervisor is not None:
                await asyncio.wait([asyncio.ensure_future(self.stop_pool())], timeout=timeout)
            ray.shutdown()
        await self.storage.close()
        return ()

    async def __aenter__(self) -> Self:
        await self.storage.probe()
        self._started_ray = ensure_ray(self._address)
        try:
            hello = Hello.of(self.storage.url)
            handle: Any = SupervisorActor.options(
                name=SUPERVISOR, namespace=self._namespace, lifetime="detached", get_if_exists=True
            ).remote(self._namespace, hello, self._pool or PoolConfig())
            supervisor = SupervisorClient(handle)
            self._incarnation = await supervisor.hello(hello, self._pool)
        except BaseException:
            await self.close()
            raise
        self._supervisor = supervisor
        self._beating = asyncio.get_running_loop().create_task(self._keep_beating(supervisor))
        return self

    async def _keep_beating(self, supervisor: SupervisorClient) -> None:
        """Tells the Supervisor that this client is there, and brings a new one what the old one knew."""
        while True:
            with contextlib.suppress(ClusterError):
                await self._meet(supervisor)
            await asyncio.sleep(CLIENT_BEAT)

    async def _meet(self, supervisor: SupervisorClient) -> None:
        incarnation = await supervisor.here(self._id)
        if incarnation != self._incarnation:
            for packet in list(self._packets.values()):
                await supervisor.put_agent(packet, self._paths)
            self._incarnation = incarnation

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- for the session's handle

    def supervisor(self) -> SupervisorClient:
        """Raises UsageError when the runtime is not open."""
        if self._supervisor is None:
            raise UsageError("the runtime is not connected", hint="Use it inside `async with connect(...)`")
        return self._supervisor

    def driver(self, session_id: str) -> SessionDriver:
        """A driver for what the store alone decides: it never runs an agent here."""
        return SessionDriver(session_id, self._host)

    def command(self, session_id: str, **fields: Any) -> Command:
        request = fields.pop("request_id") or self._host.ids.new_id()
        return Command(request_id=request, session_id=session_id, paths=self._paths, **fields)

    async def start(self, command: Command) -> None:
        """Has the Supervisor take the command on, after those that this process gave it for the session before.

        An async actor may begin calls in another order than they were sent in.
        """
        sid = command.session_id
        turn = self._turns.setdefault(sid, asyncio.Lock())
        async with turn:
            await self.supervisor().start(command)

    async def carry_out(self, command: Command) -> Outcome:
        """Starts a command and waits for its end."""
        await self.start(command)
        return await self.joined(command)

    async def joined(self, command: Command) -> Outcome:
        """The end of a command that was started, also when the Supervisor dies meanwhile."""
        supervisor = self.supervisor()
        return await supervisor.carry_on(command, lambda: self._meet(supervisor))

    async def _send_agent(self, agent: AgentConfig) -> str:
        """The Supervisor keeps the agent with its local parts, the store its documents."""
        packet = pack(agent)
        if packet.digest not in self._packets:
            await self.supervisor().put_agent(packet, self._paths)
            self._packets[packet.digest] = packet
        return await self._host.shelf.put(agent)

    # -- ports of this process's drivers: parking a session from here reaches its tree through the Supervisor

    def children_of(self, parent: Head, agent: AgentConfig | None, token: CancelToken | None = None) -> Children:
        return _ParkedChildren(self)

    async def get(self, root: str, spec: SandboxSpec) -> TreeSandbox:
        raise UsageError("a client runs no tools")

    async def find(self, root: str) -> TreeSandbox | None:
        info = await self.supervisor().find_sandbox(root)
        return None if info is None else SandboxActorClient(info)


class _ParkedChildren:
    """Children as a client sees them: it can only cancel them."""

    def __init__(self, runtime: RayRuntime) -> None:
        self._runtime = runtime

    async def start(self, call_key: str, tool: str, task: str) -> str:
        raise UsageError("a client starts no sub-agents")

    async def wait(self, child_id: str) -> RunResult:
        raise UsageError("a client waits for no sub-agents")

    def abandon(self) -> None:
        """None runs here."""

    async def cancel(self, child_id: str, reason: str) -> None:
        outcome = await self._runtime.supervisor().cancel(child_id, reason, None)
        if outcome is None and await self._runtime.storage.checkpoints.read(child_id) is not None:
            await self._runtime.driver(child_id).cancel(reason, None)


class RaySession(BlockingSession):
    """A session's handle: its verbs, carried out by the pool. `agent`: digest of the one to use from now on."""

    def __init__(self, runtime: RayRuntime, session_id: str, agent: str | None) -> None:
        super().__init__(runtime)
        self._runtime = runtime
        self._agent = agent
        self.id = session_id

    async def run(
        self,
        text: str | None = None,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        *,
        request_id: str | None = None,
    ) -> RunResult:
        """Appends `text` (None: runs what submit appended) and runs to a stop.

        timeout: seconds, then the run is cancelled. Raises RunFailed for a failed run only.
        """
        cancelled = cancel.reason if cancel is not None and cancel.cancelled else None
        command = self._command("run", text=text, timeout=timeout, request_id=request_id, cancelled=cancelled)
        watcher = asyncio.ensure_future(self._cancel_with(cancel)) if cancel is not None else None
        try:
            result = (await self._runtime.carry_out(command)).unwrap()
        finally:
            if watcher is not None:
                watcher.cancel()
        assert result is not None, "a run always has a result"
        return result

    async def stream(self, text: str | None = None, *, request_id: str | None = None) -> AsyncIterator[Event]:
        """The run's events, ending with run_finished, also for a failed one. Leaving early cancels nothing."""
        command = self._command("run", text=text, request_id=request_id)
        supervisor = self._runtime.supervisor()
        await self._runtime.start(command)
        run = asyncio.ensure_future(self._runtime.joined(command))
        try:
            async for event in follow_command(supervisor, command, run):
                yield event
                if event.type == "run_finished":
                    await asyncio.wait([run], timeout=JOIN_GRACE)  # its answer is on the way: no call is left open
        finally:
            run.cancel()

    async def submit(self, text: str, *, request_id: str | None = None) -> State:
        """Appends a message and runs nothing."""
        return await self._runtime.driver(self.id).submit(text, request_id=request_id)

    async def resume(self, *, request_id: str | None = None) -> RunResult | None:
        """Goes on with an interrupted run, joins a running one, takes over one whose owner is gone; else None."""
        return (await self._runtime.carry_out(self._command("resume", request_id=request_id))).unwrap()

    async def answer(self, interrupt_id: str, response: Any, request_id: str | None = None) -> RunResult:
        """Answers the open question and runs on."""
        command = self._command("answer", interrupt_id=interrupt_id, response=response, request_id=request_id)
        result = (await self._runtime.carry_out(command)).unwrap()
        assert result is not None, "an answered session runs"
        return result

    async def cancel(
        self, reason: str = "", timeout: float = 10.0, *, request_id: str | None = None
    ) -> RunResult | None:
        """Parks the run and everything below it as Interrupted; None when nothing is in flight."""
        store = self._runtime.driver(self.id)
        if request_id is not None:  # the store knows whether it was answered before
            answered = await store.answered_cancel(request_id)
            if answered is not None:
                return answered
        supervisor = self._runtime.supervisor()
        repeats = supervisor.repeats
        outcome = await supervisor.cancel(self.id, reason, timeout)
        if outcome is None:
            again = supervisor.repeats > repeats
            return await store.cancel(reason, timeout, request_id=request_id, again=again)
        result = outcome.unwrap()
        if request_id is not None and result is not None:
            await store.keep_cancel(request_id, result)
        return result

    async def terminate(self, *, request_id: str | None = None) -> None:
        """Ends what runs at once, with everything below it and in a root's sandbox; parked as Interrupted."""
        supervisor = self._runtime.supervisor()
        outcome = await supervisor.terminate(self.id, TERMINATED)
        if outcome is None:
            await self._runtime.driver(self.id).cancel(TERMINATED, None, hard=True)
        else:
            outcome.unwrap()
            await self._runtime.driver(self.id).end_jobs()
        if root_of(self.id) == self.id:
            await supervisor.close_sandbox(self.id)

    async def release_claim(self, expected_epoch: int, *, request_id: str | None = None) -> None:
        """On Ray there is nothing to release: the Supervisor takes over from an owner that died."""
        raise UsageError(
            "on Ray the Supervisor takes over from a dead owner by itself", hint="`resume` joins, or takes over"
        )

    async def delete(self, *, request_id: str | None = None) -> None:
        """Deletes the session and everything below it: what runs is ended, a managed workspace removed. Repeatable."""
        await self._runtime.supervisor().cancel(self.id, "deleted", None)
        await self._runtime.driver(self.id).delete()
        if root_of(self.id) == self.id:
            await self._runtime.supervisor().close_sandbox(self.id)
            await asyncio.to_thread(remove_managed_workspace, self.id)

    async def status(self) -> SessionInfo:
        return info_of(await read_head(self._runtime.storage, self.id))

    async def transcript(self) -> Transcript:
        return await read_transcript(self._runtime.storage, self.id)

    async def tree(self) -> SessionTree:
        """The session with everything below it, as the store has it."""
        return await read_tree(self._runtime.storage, self.id)

    async def events(self, after: str | None = None, follow: bool = False) -> AsyncIterator[Event]:  # noqa: FBT001, FBT002  # the public API's
        """Events that an actor still holds, after the cursor; with `follow` for ever, over take-overs."""
        async for event in follow_session(self._runtime.supervisor(), self.id, after, forever=follow):
            yield event

    def _command(self, verb: str, **fields: Any) -> Command:
        return self._runtime.command(self.id, verb=verb, agent=self._agent, **fields)

    async def _cancel_with(self, token: CancelToken) -> None:
        await token.wait()
        await self.cancel(token.reason)
