"""The world of the crash harness: every effect of an owner goes through a gate, where the owner may be killed.

A killed owner is one to whom nothing answers any more and whose tasks are ended before the next life begins; what it
had sent off may still arrive. Time is a fake clock, ids are seeded: the same schedule gives the same run.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from pydantic_core import to_jsonable_python

from greenroom.runtime.calls import CallRef, ExecResult, Interrupt, ModelRequest, SandboxSpec, compact_json
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.config import AgentConfig, SubAgent
from greenroom.runtime.engine import EmbeddedSession, Engine
from greenroom.runtime.errors import SessionExists, StorageError, Undecided
from greenroom.runtime.local_trees import LocalTreeSandboxes
from greenroom.runtime.messages import Delta, MessageDelta
from greenroom.runtime.operations import Operation, OperationResult
from greenroom.runtime.ports import LlmProvider, ObjectStore
from greenroom.runtime.sessions import list_sessions
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.testing.clock import FakeClock, SeededIds, settle
from greenroom.runtime.testing.history import strict_history
from greenroom.runtime.testing.sandbox import FakeSandbox
from greenroom.runtime.testing.schedules import Gate, Schedule
from greenroom.runtime.tools.output import to_output
from greenroom.runtime.tools.registry import Tool
from greenroom.runtime.tree_sandbox import SharedSandbox

SESSION = "s"
"""The id of every scenario's root session."""

DELAY = 1.0
"""Seconds on the fake clock that a delayed write takes."""

LATE_GATES = 6
"""Gates of the next life that pass before the late write of a killed owner arrives."""

EFFECT_SECONDS = 0.5
"""Seconds on the fake clock that a command or a tool takes, beyond its own: there is a middle to it."""

BURIAL_ROUNDS = 50
STUCK_WAITS = 200
"""Times, 10 ms each, that nothing happens and nothing is due before a life counts as stuck."""

T = TypeVar("T")
_outside: contextvars.ContextVar[bool] = contextvars.ContextVar("outside", default=False)


class Stuck(AssertionError):
    """Nothing happens any more, and the scenario is not at its end."""


@dataclasses.dataclass(slots=True)
class Effects:
    """What has really happened: per (tool, arguments) how often it began, and what it gave when it ended.

    asked: of those, the ones that asked someone instead of giving a result.
    """

    began: Counter[str] = dataclasses.field(default_factory=Counter)
    asked: set[str] = dataclasses.field(default_factory=set)
    outputs: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def begin(self, tool: str, arguments: Any) -> str:
        key = effect_key(tool, arguments)
        self.began[key] += 1
        return key

    def end(self, key: str, output: str) -> None:
        self.outputs.setdefault(key, []).append(output)


def effect_key(tool: str, arguments: Any) -> str:
    return compact_json([tool, to_jsonable_python(arguments)])


class CrashWorld:
    """One run of a scenario under one schedule, over as many lives of its owner as that takes.

    A scenario may use: `runtime` and `session()` of the present life, `clock`, `life`, and `cancelled`.
    """

    def __init__(self, schedule: Schedule, objects: ObjectStore, command: Callable[[str], str], seed: int) -> None:
        self.schedule = schedule
        self.objects = objects
        self.clock = FakeClock()
        self.effects = Effects()
        self.life = 0
        self.gates: list[Gate] = []
        self.cancelled = False
        self.problems: list[str] = []
        self._command = command
        self._seed = seed
        self._count = 0
        self._threads = threading.active_count()
        self._dead = asyncio.Event()
        self._late: list[Callable[[], Awaitable[Any]]] = []
        self._engine: Engine | None = None
        self._agent: AgentConfig | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancels: set[asyncio.Task[Any]] = set()
        self.sandboxes = _Sandboxes(self)
        self._survivors = LocalTreeSandboxes(self.sandboxes, lambda: {SESSION})

    # -- for scenarios

    @property
    def runtime(self) -> Engine:
        """The runtime of the present life."""
        assert self._engine is not None, "a scenario is driven inside a life"
        return self._engine

    async def session(self) -> EmbeddedSession:
        """The scenario's root session, made when it is not there."""
        assert self._agent is not None
        try:
            return await self.runtime.create_session(self._agent, SESSION)
        except SessionExists:
            return await self.runtime.open(SESSION, self._agent)

    # -- lives

    async def live(self, agent: AgentConfig, drive: Callable[[CrashWorld], Coroutine[Any, Any, None]]) -> bool:
        """One life of the owner; whether it came to the scenario's end. What `drive` raises goes through."""
        loop = asyncio.get_running_loop()
        self.life += 1
        self._count, self._dead, self._tasks = 0, asyncio.Event(), set()
        self._agent = gated_agent(agent, self)
        survives = self.schedule.sandbox == "survives"
        self._engine = Engine(
            Storage.over(_Store(self)),
            sandboxes=self.sandboxes,
            clock=self.clock,
            ids=SeededIds(self._seed * 1000 + self.life),
            trees=_RemoteTrees(self, self._survivors) if survives else None,
        )
        loop.set_task_factory(self._note_task)
        try:
            driving = loop.create_task(self._drive_and_close(drive))
            await self._until(lambda: driving.done() or self._dead.is_set())
            if not self._dead.is_set():
                driving.result()
                return True
            await self._bury()
            await self._look_at_marks()
            return False
        finally:
            loop.set_task_factory(None)

    async def let_arrive(self) -> None:
        """Lets everything arrive that a dead owner had sent off."""
        late, self._late = self._late, []
        for send in late:
            try:
                await send()
            except StorageError:
                pass  # refused: its sender was fenced off

    async def end(self) -> None:
        """Ends what survived."""
        await self.let_arrive()
        await self._survivors.close()

    async def _drive_and_close(self, drive: Callable[[CrashWorld], Coroutine[Any, Any, None]]) -> None:
        try:
            await drive(self)
            if self._cancels:
                await asyncio.wait(self._cancels)
        finally:
            await self.runtime.close()

    async def _until(self, over: Callable[[], bool]) -> None:
        """Lets things happen until it is over; the clock jumps to who is due next whenever everybody waits."""
        idle = 0
        while not over():
            await settle()
            if threading.active_count() > self._threads:
                await asyncio.sleep(0.002)  # a thread of a tool or a store may be at work: time does not pass for it
            if over() or self.clock.wake_next():
                idle = 0
                continue
            await asyncio.sleep(0.01)
            idle += 1
            if idle > STUCK_WAITS:
                raise Stuck(f"nothing happens any more after gate {self._count} of life {self.life}")

    async def _bury(self) -> None:
        """Ends the dead owner's tasks; whatever they still try is answered by nobody."""
        for _ in range(BURIAL_ROUNDS):
            left = [task for task in self._tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            await settle()
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()

    async def _look_at_marks(self) -> None:
        """Whoever looks for what a dead owner left must find it: every owned session is marked as active."""
        storage = Storage.over(self.objects)
        active = await storage.active_ids()
        async for info in list_sessions(storage):
            if info.owner is not None and info.session_id not in active:
                self.problems.append(f"{info.session_id} is owned by {info.owner}, and not marked as active")

    def _note_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
        if not _outside.get():
            self._tasks.add(task)
        return task

    # -- gates

    async def gate(self, name: str, *, writes: bool = False, waits: bool = True) -> str | None:
        """Passes a gate of the owner, or falls: then it never returns (unless it is told not to wait).

        Answers the blow that falls on the effect itself: lose, delay or late.
        """
        if self._dead.is_set():
            if waits:
                await asyncio.Event().wait()
            return None
        self._count += 1
        if self.life == 1:
            self.gates.append(Gate(name, writes))
        if self.life > 1 and self._count == LATE_GATES:
            await self.let_arrive()
        blow = self.schedule.at(self.life, self._count)
        if blow == "cancel":
            self.cancelled = True
            session = self.runtime.handle(SESSION)
            task = asyncio.get_running_loop().create_task(_cancel_quietly(session))
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)
        if blow == "kill" or (blow == "late" and not writes):
            self._dead.set()
            if waits:
                await asyncio.Event().wait()
        return blow

    async def write(self, name: str, send: Callable[[], Awaitable[T]]) -> T:
        """A write to the store, which a blow may delay, lose the answer of, or let arrive after the owner's death."""
        blow = await self.gate(f"before {name}", writes=True)
        if blow == "late":
            self._late.append(send)
            self._dead.set()
            await asyncio.Event().wait()
        if blow == "delay":
            await self.clock.sleep(DELAY)
        made = await send()
        if blow == "lose":
            raise Undecided(f"{name}: the answer was lost", kind="unavailable")
        await self.gate(f"after {name}")
        return made

    async def command(self, command: str) -> ExecResult:
        """A command in the sandbox: gates of the owner where it dies with it; else the owner may die beside it."""
        dies = self.schedule.sandbox == "dies"
        await self.gate(f"before the command {command!r}", waits=dies)
        key = self.effects.begin("bash", {"command": command})
        await self.gate(f"in the middle of the command {command!r}", waits=dies)
        await self.clock.sleep(EFFECT_SECONDS)
        output = self._command(command)
        self.effects.end(key, output)
        await self.gate(f"after the command {command!r}", waits=dies)
        return ExecResult(status="exited", exit_code=0, output=output)

    def outside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work in another process than the owner's: it goes on when the owner dies."""
        token = _outside.set(True)
        try:
            return asyncio.get_running_loop().create_task(work)
        finally:
            _outside.reset(token)

    @property
    def owner_is_dead(self) -> bool:
        return self._dead.is_set()


async def _cancel_quietly(session: EmbeddedSession) -> None:
    try:
        await session.cancel("the harness")
    except Exception:  # what a cancel is told does not matter here: how the session ends does
        pass


# -- ports behind gates


class _Store:
    """The owner's way to the objects of the world."""

    def __init__(self, world: CrashWorld) -> None:
        self._world = world

    async def get(self, key: str) -> tuple[bytes, str] | None:
        await self._world.gate(f"before get {key}")
        found = await self._world.objects.get(key)
        await self._world.gate(f"after get {key}")
        return found

    async def put_if_absent(self, key: str, body: bytes) -> str:
        return await self._world.write(f"create {key}", lambda: self._world.objects.put_if_absent(key, body))

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        return await self._world.write(f"write {key}", lambda: self._world.objects.put_if_match(key, body, etag))

    async def delete(self, key: str) -> None:
        await self._world.write(f"delete {key}", lambda: self._world.objects.delete(key))

    async def delete_many(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        await self._world.write("delete many", lambda: self._world.objects.delete_many(wanted))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        await self._world.gate(f"before list {prefix}")
        async for key in self._world.objects.list(prefix):
            yield key

    async def probe(self) -> None:
        """Nothing goes wrong with it."""

    async def close(self) -> None:
        """The objects outlive every owner."""


class _Provider:
    """A model behind gates; every history it is sent must be one that the strictest provider takes."""

    def __init__(self, inner: LlmProvider, world: CrashWorld) -> None:
        self._inner = inner
        self._world = world

    async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
        try:
            strict_history(request.messages)
        except ValueError as error:
            self._world.problems.append(f"a model was sent a history that a strict provider refuses: {error}")
        await self._world.gate(f"before model call {request.call_no} of {request.session_id}")
        async for delta in self._inner.stream(request, cancel):
            if isinstance(delta, MessageDelta):
                await self._world.gate(f"after model call {request.call_no} of {request.session_id}")
            yield delta


def gated_agent(agent: AgentConfig, world: CrashWorld) -> AgentConfig:
    """The agent with its model and the tools of its own process behind gates, down to its sub-agents."""
    children: dict[str, SubAgent] = {}
    for name in agent.subagents:
        child = agent.subagent(name)
        inner = child.agent if child.agent == "self" else gated_agent(child.agent, world)
        children[name] = dataclasses.replace(child, agent=inner)
    tools = [_gated_tool(tool, world) if tool.spec.runs_in == "process" else tool for tool in agent.registry]
    return dataclasses.replace(agent, provider=_Provider(agent.llm, world), tools=tools, subagents=children)


def _gated_tool(tool: Tool, world: CrashWorld) -> Tool:
    async def gated(*args: Any, **named: Any) -> Any:
        given = {name: value for name, value in named.items() if name != tool.context}
        arguments = given if tool.calling == "fields" else args[1]
        await world.gate(f"before the tool {tool.spec.name}")
        key = world.effects.begin(tool.spec.name, arguments)
        await world.gate(f"in the middle of the tool {tool.spec.name}")
        await world.clock.sleep(EFFECT_SECONDS)
        made = tool.function(*args, **named)
        if inspect.isawaitable(made):
            made = await made
        if isinstance(made, Interrupt):
            world.effects.asked.add(key)
        else:
            world.effects.end(key, to_output(made).text)
        await world.gate(f"after the tool {tool.spec.name}")
        return made

    return dataclasses.replace(tool, function=gated, builtin=None)


class _Sandboxes:
    """Opens sandboxes whose files are the tree's folder: they outlive the sandbox."""

    def __init__(self, world: CrashWorld) -> None:
        self._world = world
        self._files: dict[str, dict[str, bytes]] = {}
        self.open_ones: list[FakeSandbox] = []

    async def open(self, spec: SandboxSpec, root: str, snapshot: str | None = None) -> FakeSandbox:
        sandbox = FakeSandbox(self._world.command)
        sandbox.files = self._files.setdefault(root, sandbox.files)
        self.open_ones.append(sandbox)
        return sandbox


class _RemoteTrees:
    """TreeSandboxes in a process of their own: they outlive the owner."""

    def __init__(self, world: CrashWorld, inner: LocalTreeSandboxes) -> None:
        self._world = world
        self._inner = inner

    async def get(self, root: str, spec: SandboxSpec) -> _RemoteTree:
        return _RemoteTree(self._world, await self._inner.get(root, spec))

    async def find(self, root: str) -> _RemoteTree | None:
        found = await self._inner.find(root)
        return None if found is None else _RemoteTree(self._world, found)

    async def close_one(self, root: str) -> None:
        await self._inner.close_one(root)

    async def close(self) -> None:
        """They go on."""


class _RemoteTree:
    """A sandbox as its owner reaches it by messages, each of which it may not live to send or to hear answered."""

    def __init__(self, world: CrashWorld, inner: SharedSandbox) -> None:
        self._world = world
        self._inner = inner
        self.incarnation = inner.incarnation
        self.guarantees = inner.guarantees

    async def fence(self, session_id: str, epoch: int) -> frozenset[str]:
        await self._world.gate(f"before fencing {session_id} at {epoch}")
        held = await self._inner.fence(session_id, epoch)
        await self._world.gate(f"after fencing {session_id} at {epoch}")
        return held

    async def perform(self, ref: CallRef, operation: Operation) -> OperationResult:
        await self._world.gate(f"before asking for {ref.call_key}")
        work = self._world.outside(self._inner.perform(ref, operation))
        try:
            result = await asyncio.shield(work)
        except asyncio.CancelledError:
            if not self._world.owner_is_dead:
                await self._world.outside(self._inner.end_operation(ref))
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        await self._world.gate(f"after hearing of {ref.call_key}")
        return result

    async def end(self, ref: CallRef) -> None:
        await self._world.gate(f"before ending {ref.call_key}")
        await self._world.outside(self._inner.end(ref))
        await self._world.gate(f"after ending {ref.call_key}")
