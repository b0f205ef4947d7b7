"""Typed clients of the actors, so that nobody holds a bare handle; and Ray's errors turned into ours.

No actor class is imported here: a handle is found by name or handed over.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar, cast

import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from greenroom.actors.wire import Command, CommandKey, EventPage, Hello, Outcome, PoolStatus, SandboxInfo
from greenroom.runtime.agents import AgentPacket
from greenroom.runtime.calls import CallRef, SandboxSpec
from greenroom.runtime.errors import ClusterError, SandboxDied
from greenroom.runtime.operations import Operation, OperationResult

T = TypeVar("T")

SILENCE_PAUSE = 0.5
"""Seconds before an actor that did not answer is asked again."""

CALL_TIMEOUT = 60.0
"""Seconds for a short call to an actor, its process's start included."""

SANDBOX_TIMEOUT = 1800.0
"""Seconds for a sandbox to open or to close: a workspace may be fetched, or saved, on the way."""


class ActorLost(ClusterError):
    """The actor is dead: what it ran has to be taken over."""


class ActorSilent(ClusterError):
    """The actor does not answer now; it may yet. Nothing may be taken over because of this."""


async def ask(reference: Awaitable[Any], timeout: float | None = CALL_TIMEOUT) -> Any:
    """The answer of an actor call; the actor's own error as it was raised, Ray's as ActorLost or ActorSilent."""
    try:
        return await asyncio.wait_for(_as_coroutine(reference), timeout)
    except RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, Exception) else ClusterError(str(error))) from None
    except ActorDiedError as error:
        raise ActorLost(f"an actor died: {_first_line(error)}") from error
    except (ActorUnavailableError, GetTimeoutError, TimeoutError) as error:
        raise ActorSilent(f"an actor does not answer: {_first_line(error)}") from error
    except RayError as error:
        raise ClusterError(f"Ray failed: {_first_line(error)}") from error


class SupervisorClient:
    """The Supervisor of a namespace."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @classmethod
    def find(cls, name: str, namespace: str) -> SupervisorClient:
        """Raises ClusterError when there is none."""
        try:
            return cls(ray.get_actor(name, namespace=namespace))
        except ValueError as error:
            raise ClusterError(f"the namespace {namespace!r} has no Greenroom pool") from error

    async def hello(self, hello: Hello) -> None:
        """Raises PoolMismatch."""
        cast(Outcome, await ask(self._handle.hello.remote(hello))).unwrap()

    async def put_agent(self, packet: AgentPacket) -> None:
        """Gives the agent, its local parts by value, into the Supervisor's keeping."""
        body = cast(Any, cloudpickle).dumps(packet)
        await ask(self._handle.put_agent.remote(list(packet.documents), body))

    async def get_agent(self, digest: str) -> AgentPacket | None:
        body = await ask(self._handle.get_agent.remote(digest))
        if body is None:
            return None
        packet = cast(AgentPacket, pickle.loads(body))
        return AgentPacket(digest, packet.documents, packet.locals)

    async def start(self, command: Command) -> None:
        """Raises RequestConflict when the command's key came before with other content."""
        cast(Outcome, await ask(self._handle.start.remote(command))).unwrap()

    async def join(self, key: CommandKey) -> Outcome:
        """Waits for the command's end, as long as it takes."""
        return cast(Outcome, await ask(self._handle.join.remote(key), timeout=None))

    async def cancel(self, session_id: str, reason: str, timeout: float | None) -> Outcome | None:
        """None when the Supervisor knows of no run of the session."""
        return cast("Outcome | None", await ask(self._handle.cancel.remote(session_id, reason, timeout), timeout=None))

    async def terminate(self, session_id: str, reason: str) -> Outcome | None:
        """As cancel, but an actor that does not park in time is killed."""
        return cast("Outcome | None", await ask(self._handle.terminate.remote(session_id, reason), timeout=None))

    async def locate(self, key: CommandKey) -> SessionActorClient | None:
        """The actor that runs the command, once it is placed; None if that takes longer than a moment."""
        handle = await ask(self._handle.locate.remote(key))
        return None if handle is None else SessionActorClient(handle)

    async def actor_of(self, session_id: str) -> SessionActorClient | None:
        """The actor that runs the session, or ran it last."""
        handle = await ask(self._handle.actor_of.remote(session_id))
        return None if handle is None else SessionActorClient(handle)

    async def sandbox_for(self, root: str, spec: SandboxSpec) -> SandboxInfo:
        """Raises SandboxUnavailable."""
        return cast(SandboxInfo, await ask(self._handle.sandbox_for.remote(root, spec), SANDBOX_TIMEOUT))

    async def find_sandbox(self, root: str) -> SandboxInfo | None:
        return cast("SandboxInfo | None", await ask(self._handle.find_sandbox.remote(root)))

    async def reserve_tokens(
        self, session_id: str, used: int, wanted: int, limit: int, known: Mapping[str, int] | None = None
    ) -> bool | None:
        """None: the Supervisor has to be told what the tree's heads say."""
        asked = self._handle.reserve_tokens.remote(session_id, used, wanted, limit, known)
        return cast("bool | None", await ask(asked))

    async def settle_tokens(self, session_id: str, used: int) -> None:
        await ask(self._handle.settle_tokens.remote(session_id, used))

    async def close_sandbox(self, root: str) -> None:
        """Ends a tree's sandbox, if it is open."""
        await ask(self._handle.close_sandbox.remote(root), SANDBOX_TIMEOUT)

    async def status(self) -> PoolStatus:
        return cast(PoolStatus, await ask(self._handle.status.remote()))

    async def stop(self) -> None:
        """Ends the pool's actors, then the Supervisor itself."""
        await ask(self._handle.stop.remote())
        ray.kill(self._handle)


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


async def _as_coroutine(reference: Awaitable[T]) -> T:
    return await reference


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
