"""Typed clients of the actors, so that nobody holds a bare handle.

No actor class is imported here: a handle is found by name or handed over.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import ray
from ray import cloudpickle

from greenroom.actors.calls import CALL_TIMEOUT, SILENCE_PAUSE, ActorLost, ActorSilent, ask
from greenroom.actors.channel import Channel
from greenroom.actors.wire import (
    Command,
    CommandKey,
    EventPage,
    Hello,
    Outcome,
    PoolConfig,
    PoolStatus,
    SandboxInfo,
    SessionReport,
    UnknownCommand,
)
from greenroom.runtime.agents import AgentPacket
from greenroom.runtime.calls import CallBounds, CallRef, SandboxSpec
from greenroom.runtime.errors import ClusterError, SandboxDied
from greenroom.runtime.operations import Operation, OperationResult

RESTART_WAIT = 120.0
"""Seconds that a Supervisor may take to come up again; a busy machine needs some."""

SANDBOX_TIMEOUT = 1800.0
"""Seconds for a sandbox to open or to close: a workspace may be fetched, or saved, on the way."""


class SupervisorClient:
    """The Supervisor of a namespace; repeats: calls that had to be made again, the first may have been carried out."""

    def __init__(self, handle: Any) -> None:
        self.repeats = 0
        self._handle = handle
        self._channel = Channel(handle)

    @classmethod
    def find(cls, name: str, namespace: str) -> SupervisorClient:
        """Raises ClusterError when there is none."""
        try:
            return cls(ray.get_actor(name, namespace=namespace))
        except ValueError as error:
            raise ClusterError(f"the namespace {namespace!r} has no Greenroom pool") from error

    async def hello(self, hello: Hello, pool: PoolConfig | None) -> str:
        """The Supervisor's incarnation; raises PoolMismatch."""
        answer = cast("str | Outcome", await self._ask("hello", hello, pool))
        if isinstance(answer, Outcome):
            answer.unwrap()
        return str(answer)

    async def here(self, client: str, *, leaving: bool = False) -> str:
        """Tells that the client is there, or leaves; answers the Supervisor's incarnation."""
        return cast(str, await self._ask("here", client, leaving))

    async def put_agent(self, packet: AgentPacket, paths: tuple[str, ...]) -> None:
        """Gives the agent, its local parts by value, into the Supervisor's keeping; `paths`: where it imports from."""
        body = cast(Any, cloudpickle).dumps(packet)
        await self._ask("put_agent", list(packet.documents), body, paths)

    async def get_agent(self, digest: str, wait: bool) -> tuple[AgentPacket | None, tuple[str, ...]]:  # noqa: FBT001
        """The agent, and where it may import from; `wait`: a while for a client to bring it again."""
        body, paths = await self._ask("get_agent", digest, wait)
        if body is None:
            return None, paths
        packet = cast(AgentPacket, pickle.loads(body))
        return AgentPacket(digest, packet.documents, packet.locals), paths

    async def start(self, command: Command) -> None:
        """Raises RequestConflict when the command's key came before with other content."""
        cast(Outcome, await self._ask("start", command)).unwrap()

    async def join(self, key: CommandKey) -> Outcome:
        """Waits for the command's end, as long as it takes."""
        return cast(Outcome, await self._ask("join", key, within=None))

    async def carry_on(self, command: Command, again: Callable[[], Awaitable[None]] | None = None) -> Outcome:
        """The end of a command that was started, over the death of the Supervisor: a new one is given it once more.

        again: what to do first when the Supervisor has lost its memory.
        """
        while True:
            outcome = await self.join(command.key)
            if not isinstance(outcome.error, UnknownCommand):
                return outcome
            if again is not None:
                await again()
            await self.start(replace(command, recover=True))

    async def cancel(self, session_id: str, reason: str, timeout: float | None) -> Outcome | None:
        """None when the Supervisor knows of no run of the session."""
        return cast("Outcome | None", await self._ask("cancel", session_id, reason, timeout, within=None))

    async def terminate(self, session_id: str, reason: str) -> Outcome | None:
        """As cancel, but an actor that does not park in time is killed."""
        return cast("Outcome | None", await self._ask("terminate", session_id, reason, within=None))

    async def locate(self, key: CommandKey) -> SessionActorClient | None:
        """The actor that runs the command, once it is placed; None if that takes longer than a moment."""
        handle = await self._ask("locate", key)
        return None if handle is None else SessionActorClient(handle)

    async def actor_of(self, session_id: str) -> SessionActorClient | None:
        """The actor that runs the session, or ran it last."""
        return (await self.placement(session_id, 0, wait=False))[0]

    async def placement(self, session_id: str, after: int, *, wait: bool) -> tuple[SessionActorClient | None, int]:
        """The session's last placement beyond the one with number `after`: its actor and its number; None and 0.

        wait: for one to come, a while.
        """
        handle, number = await self._ask("actor_of", session_id, after, wait)
        return (None if handle is None else SessionActorClient(handle)), number

    async def sandbox_for(self, root: str, spec: SandboxSpec) -> SandboxInfo:
        """Raises SandboxUnavailable."""
        return cast(SandboxInfo, await self._ask("sandbox_for", root, spec, within=SANDBOX_TIMEOUT))

    async def find_sandbox(self, root: str) -> SandboxInfo | None:
        return cast("SandboxInfo | None", await self._ask("find_sandbox", root))

    async def tokens_left(
        self, session_id: str, used: int, limit: int, known: Mapping[str, int] | None = None
    ) -> bool | None:
        """None: the Supervisor has to be told what the tree's heads say."""
        return cast("bool | None", await self._ask("tokens_left", session_id, used, limit, known))

    async def tell_tokens(self, session_id: str, used: int) -> None:
        await self._ask("tell_tokens", session_id, used)

    async def begin_turn(self, ticket: str, owner: str, bounds: CallBounds) -> None:
        """Waits until the ticket has its turn at a model's endpoint, as long as it takes."""
        await self._ask("begin_turn", ticket, owner, bounds, within=None)

    async def end_turn(self, ticket: str) -> None:
        await self._ask("end_turn", ticket)

    async def hold_turns(self, bounds: CallBounds, seconds: float) -> None:
        await self._ask("hold_turns", bounds, seconds)

    async def close_sandbox(self, root: str) -> None:
        """Ends a tree's sandbox, if it is open."""
        await self._ask("close_sandbox", root, within=SANDBOX_TIMEOUT)

    async def status(self) -> PoolStatus:
        return cast(PoolStatus, await self._ask("status"))

    async def stop(self) -> None:
        """Ends the pool's actors, then the Supervisor itself."""
        await self._ask("stop")
        ray.kill(self._handle)

    async def _ask(self, method: str, *args: Any, within: float | None = CALL_TIMEOUT) -> Any:
        """The answer; every method may be asked again, and is while a new Supervisor comes up for a dead one."""
        deadline = time.monotonic() + RESTART_WAIT
        while True:
            try:
                return await self._channel.call(method, *args, timeout=within)
            except ActorSilent:
                if time.monotonic() > deadline:
                    raise
                self.repeats += 1
                await asyncio.sleep(SILENCE_PAUSE)


class SessionActorClient:
    """One session actor."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @property
    def id(self) -> str:
        return str(self.handle._actor_id.hex())

    async def run(self, command: Command) -> Outcome:
        return cast(Outcome, await ask(self.handle.run.remote(command), timeout=None))

    async def cancel(self, session_id: str, request_id: str, reason: str, timeout: float | None) -> Outcome:
        return cast(
            Outcome, await ask(self.handle.cancel.remote(session_id, request_id, reason, timeout), timeout=None)
        )

    async def events(self, session_id: str, position: int) -> EventPage:
        """The events from `position` on; waits a moment for the first."""
        return cast(EventPage, await ask(self.handle.events.remote(session_id, position)))

    async def pid(self) -> int:
        return cast(int, await ask(self.handle.pid.remote()))

    async def end(self, timeout: float) -> None:
        """The actor is let go: it closes what its agents hold open."""
        await ask(self.handle.end.remote(), timeout)

    async def report(self, timeout: float) -> SessionReport:
        """Answered while the run's loop is blocked, too."""
        return cast(SessionReport, await ask(self.handle.report.remote(), timeout))


class SandboxActorClient:
    """A sandbox that lives in an actor: the TreeSandbox of the Ray edition."""

    def __init__(self, info: SandboxInfo) -> None:
        self.incarnation = info.facts.incarnation
        self.guarantees = info.facts.guarantees
        self.saves = info.facts.saves
        self.restored = info.facts.restored
        self._handle = info.actor

    async def fence(self, session_id: str, epoch: int) -> frozenset[str]:
        reference = self._handle.fence.remote(self.incarnation, session_id, epoch)
        return cast("frozenset[str]", await self._ask(reference, CALL_TIMEOUT))

    async def covered(self, session_id: str) -> str | None:
        reference = self._handle.covered.remote(self.incarnation, session_id)
        return cast("str | None", await self._ask(reference, CALL_TIMEOUT))

    async def settle(self, session_id: str, through: int) -> None:
        await self._ask(self._handle.settle.remote(self.incarnation, session_id, through), CALL_TIMEOUT)

    async def perform(self, ref: CallRef, operation: Operation) -> OperationResult:
        """As TreeSandbox says; an actor that is silent for a while is asked again and joins what it runs."""
        try:
            while True:
                try:
                    reference = self._handle.perform.remote(self.incarnation, ref, operation)
                    return cast(OperationResult, await self._ask(reference, None))
                except ActorSilent:
                    await asyncio.sleep(SILENCE_PAUSE)
        except asyncio.CancelledError:
            ending = self._handle.end_operation.remote(self.incarnation, ref)
            await asyncio.shield(self._ask(ending, CALL_TIMEOUT))
            raise

    async def end(self, ref: CallRef) -> None:
        await self._ask(self._handle.end.remote(self.incarnation, ref), CALL_TIMEOUT)

    async def end_jobs(self, session_id: str) -> None:
        await self._ask(self._handle.end_jobs.remote(self.incarnation, session_id), CALL_TIMEOUT)

    async def _ask(self, reference: Awaitable[Any], timeout: float | None) -> Any:
        try:
            return await ask(reference, timeout)
        except ActorLost as error:
            raise SandboxDied("the sandbox's process is gone") from error
