"""The world of the crash harness: every effect of an owner goes through a gate, where the owner may be killed.

A killed owner is one to whom nothing answers any more and whose tasks are ended before the next life begins; what it
had sent off may still arrive. Time is a fake clock, ids are seeded: the same schedule gives the same run.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from greenroom.runtime.calls import ExecResult
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.engine import EmbeddedSession, Engine
from greenroom.runtime.errors import SessionExists, StorageError, Undecided
from greenroom.runtime.local_trees import LocalTreeSandboxes
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.sessions import list_sessions
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.testing.clock import FakeClock, SeededIds, settle
from greenroom.runtime.testing.crash_ports import EFFECT_SECONDS, GatedStore, RemoteTrees, Sandboxes, gated_agent
from greenroom.runtime.testing.effects import Effects
from greenroom.runtime.testing.schedules import Gate, Schedule

SESSION = "s"
"""The id of every scenario's root session."""

DELAY = 1.0
"""Seconds on the fake clock that a delayed write takes."""

LATE_GATES = 6
"""Gates of the next life that pass before the late write of a killed owner arrives."""

BURIAL_ROUNDS = 50
STUCK_WAITS = 200
"""Times, 10 ms each, that nothing happens and nothing is due before a life counts as stuck."""

T = TypeVar("T")
_outside: contextvars.ContextVar[bool] = contextvars.ContextVar("outside", default=False)


class Stuck(AssertionError):
    """Nothing happens any more, and the scenario is not at its end."""


class CrashWorld:
    """One run of a scenario under one schedule, over as many lives of its owner as that takes.

    A scenario may use: `runtime` and `session()` of the present life, `clock`, `life`, and `cancelled`.
    """

    def __init__(
        self,
        schedule: Schedule,
        objects: ObjectStore,
        command: Callable[[str], str],
        background: Callable[[str], bool],
        seed: int,
    ) -> None:
        self.schedule = schedule
        self.objects = objects
        self.clock = FakeClock()
        self.effects = Effects()
        self.life = 0
        self.gates: list[Gate] = []
        self.cancelled = False
        self.problems: list[str] = []
        self.background = background
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
        self.sandboxes = Sandboxes(self)
        storage = Storage.over(self.objects)
        self._survivors = LocalTreeSandboxes(self.sandboxes, lambda: {SESSION}, storage, self.clock)

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
            Storage.over(GatedStore(self)),
            sandboxes=self.sandboxes,
            clock=self.clock,
            ids=SeededIds(self._seed * 1000 + self.life),
            trees=RemoteTrees(self, self._survivors) if survives else None,
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
            task = self._spawn(_cancel_quietly(self.runtime.handle(SESSION)), outside=False)
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
        return self._spawn(work, outside=True)

    def _spawn(self, work: Coroutine[Any, Any, T], *, outside: bool) -> asyncio.Task[T]:
        """A task inside or outside of the owner's process, and whatever it starts too."""
        token = _outside.set(outside)
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
