"""Supervisor: one per namespace; keeps the green room, places commands, cancels, and takes over from dead actors.

Its memory is a cache and decides nothing that epochs do not decide again: two owners of one session are told apart by
the store. A take-over follows only from an actor that is dead, never from one that is merely silent.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from greenroom.actors.handles import SILENCE_PAUSE, ActorLost, ActorSilent, SessionActorClient
from greenroom.actors.pool import SandboxPool, SessionPool, Slot
from greenroom.actors.wire import Command, CommandKey, Hello, Outcome, PoolConfig, PoolStatus, SandboxInfo
from greenroom.runtime.budget import TokenLedger
from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.errors import ClusterError, PoolMismatch, RequestConflict, RunFailed, SessionBusy
from greenroom.runtime.ids import root_of

MAX_CONCURRENCY = 100_000
"""Calls that may wait here at once: every client that joins a run holds one."""

KEPT_OUTCOMES = 4096
"""Finished commands whose outcome a client can still fetch."""

KEPT_AGENTS = 1024
"""Agents kept with their local parts, the least recently used go first; the stored ones are found again."""

MAX_RECOVERIES = 3
"""Actors that one command may lose before it is given up: it is then what kills them."""

TERMINATE_WAIT = 5.0
"""Seconds an actor has to park a terminated session before it is killed."""

LOCATE_WAIT = 1.0
"""Seconds that a look for a command's actor waits for it to be placed."""


@dataclass(slots=True, eq=False)
class _Run:
    """A command from its start to its outcome."""

    command: Command
    outcome: asyncio.Future[Outcome]
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    actor: SessionActorClient | None = None
    recoveries: int = 0
    joined: list[CommandKey] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """Whether it ended without having run: asked again, it is a new command."""
        if not self.outcome.done():
            return False
        error = self.outcome.result().error
        return error is not None and not isinstance(error, RunFailed)


class SupervisorHost:
    """The plain class behind the actor; all of its methods run on one event loop."""

    def __init__(self, namespace: str, hello: Hello, pool: PoolConfig) -> None:
        self._hello = hello
        self._session_pool = SessionPool(namespace, uuid.uuid4().hex[:8], hello.store, pool.session_actors)
        self._sandbox_pool = SandboxPool(namespace, uuid.uuid4().hex[:8], hello.store, pool.session_actors)
        self._agents: OrderedDict[str, bytes] = OrderedDict()
        self._runs: dict[CommandKey, _Run] = {}
        self._finished: deque[CommandKey] = deque()
        self._queue: deque[_Run] = deque()
        self._live: dict[str, _Run] = {}
        self._ledger = TokenLedger()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- handshake and agents

    async def hello(self, hello: Hello) -> Outcome:
        if hello != self._hello:
            return Outcome(
                error=PoolMismatch(
                    f"this namespace serves {self._hello}, the client wants {hello}",
                    hint="Connect with another namespace, or stop the pool that is there",
                )
            )
        self._session_pool.fill()
        self._sandbox_pool.fill()
        return Outcome()

    async def put_agent(self, digests: list[str], packet: bytes) -> None:
        for digest in digests:
            self._agents[digest] = packet
            self._agents.move_to_end(digest)
        while len(self._agents) > KEPT_AGENTS:
            self._agents.popitem(last=False)

    async def get_agent(self, digest: str) -> bytes | None:
        if digest in self._agents:
            self._agents.move_to_end(digest)
        return self._agents.get(digest)

    # -- commands

    async def start(self, command: Command) -> Outcome:
        """Takes a command on; the same one again changes nothing. Its error, if it is refused here."""
        known = self._runs.get(command.key)
        if known is not None and not known.refused:
            if known.command.same_content(command):
                return Outcome()
            return Outcome(
                error=RequestConflict(
                    f"request {command.request_id!r} came before with other content",
                    session_id=command.session_id,
                    hint="Use a new request_id for a new request",
                )
            )
        live = self._live.get(command.session_id)
        if command.verb == "resume" and live is not None:
            self._runs[command.key] = _Run(command, live.outcome, live.placed, live.actor)  # it joins what is running
            live.joined.append(command.key)
            return Outcome()
        run = _Run(command, asyncio.get_running_loop().create_future())
        self._runs[command.key] = run
        self._enqueue(run)
        return Outcome()

    async def join(self, key: CommandKey) -> Outcome:
        run = self._runs.get(key)
        if run is None:
            return Outcome(error=ClusterError(f"the pool knows no request {key[1]!r}", hint="Start it again"))
        return await asyncio.shield(run.outcome)

    async def locate(self, key: CommandKey) -> Any:
        """The handle of the actor that runs the command; None if it is not placed within a moment."""
        run = self._runs.get(key)
        if run is None:
            return None
        try:
            async with asyncio.timeout(LOCATE_WAIT):
                await run.placed.wait()
        except TimeoutError:
            return None
        return None if run.actor is None else run.actor.handle

    async def actor_of(self, session_id: str) -> Any:
        """The handle of the actor that runs the session, or ran it last."""
        run = self._live.get(session_id) or next(
            (run for run in reversed(list(self._runs.values())) if run.command.session_id == session_id), None
        )
        return None if run is None or run.actor is None else run.actor.handle

    async def cancel(self, session_id: str, reason: str, timeout: float | None) -> Outcome | None:
        """Cancels what the session runs or waits to run; None when it has nothing here."""
        waiting = [run for run in self._queue if run.command.session_id == session_id]
        for run in waiting:
            run.command = replace(run.command, cancelled=reason)
        live = self._live.get(session_id)
        self._pump()
        if live is None:
            return await asyncio.shield(waiting[0].outcome) if waiting else None
        live.command = replace(live.command, cancelled=reason)  # a recovery parks it too
        while not live.outcome.done():
            actor = live.actor
            assert actor is not None, "a live run has its actor"
            try:
                outcome = await actor.cancel(session_id, live.command.request_id, reason, timeout)
            except ActorLost:
                break  # the recovery parks it
            except ActorSilent:
                await asyncio.sleep(SILENCE_PAUSE)
                continue
            if isinstance(outcome.error, SessionBusy):
                return outcome
            break
        return await asyncio.shield(live.outcome)

    async def terminate(self, session_id: str, reason: str) -> Outcome | None:
        """As cancel; an actor that has not parked the session in time is killed, and its successor parks it."""
        live = self._live.get(session_id)
        try:
            async with asyncio.timeout(TERMINATE_WAIT):
                return await self.cancel(session_id, reason, None)
        except TimeoutError:
            if live is None:
                return None
        if self._live.get(session_id) is live and live.actor is not None:
            ray.kill(live.actor.handle)
        return await asyncio.shield(live.outcome)

    # -- sandboxes

    async def sandbox_for(self, root: str, spec: SandboxSpec) -> SandboxInfo:
        return await self._sandbox_pool.get(root, spec, self._live_roots())

    async def find_sandbox(self, root: str) -> SandboxInfo | None:
        return self._sandbox_pool.find(root)

    async def close_sandbox(self, root: str) -> None:
        await self._sandbox_pool.close_one(root)

    # -- token budgets

    async def reserve_tokens(
        self, session_id: str, used: int, wanted: int, limit: int, known: Mapping[str, int] | None
    ) -> bool | None:
        return self._ledger.reserve(session_id, used, wanted, limit, known)

    async def settle_tokens(self, session_id: str, used: int) -> None:
        self._ledger.settle(session_id, used)

    # -- the pool

    async def status(self) -> PoolStatus:
        pids = await asyncio.gather(*(slot.client.pid() for slot in self._session_pool.slots), return_exceptions=True)
        return PoolStatus(
            session_actors=len(self._session_pool.slots),
            sandbox_actors=self._sandbox_pool.size,
            busy=tuple(self._live),
            queued=len(self._queue),
            pids=tuple(pid for pid in pids if isinstance(pid, int)),
        )

    async def stop(self) -> None:
        """Ends every actor of the pool."""
        for task in self._tasks:
            task.cancel()
        self._session_pool.stop()
        await self._sandbox_pool.stop()

    # -- placement

    def _enqueue(self, run: _Run) -> None:
        if run.command.first:
            self._queue.appendleft(run)
        else:
            self._queue.append(run)
        self._pump()

    def _pump(self) -> None:
        """Places whatever can be placed: one run of a session at a time, who is waited for first."""
        for run in sorted(self._queue, key=lambda queued: not queued.command.first):
            if run.command.session_id in self._live:
                continue
            slot = self._session_pool.take(beyond=run.command.first)
            if slot is None:
                return
            self._queue.remove(run)
            self._live[run.command.session_id] = run
            run.actor = slot.client
            run.placed.set()
            task = asyncio.get_running_loop().create_task(self._drive(run, slot))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _drive(self, run: _Run, slot: Slot) -> None:
        outcome: Outcome | None = None
        try:
            while outcome is None:
                try:
                    outcome = await slot.client.run(run.command)
                except ActorSilent:
                    await asyncio.sleep(SILENCE_PAUSE)  # it joins the run when it answers again
            self._session_pool.give_back(slot)
        except ActorLost:
            self._session_pool.lost(slot)
            run.recoveries += 1
            if run.recoveries > MAX_RECOVERIES:
                outcome = Outcome(
                    error=ClusterError(
                        f"session {run.command.session_id!r} lost {run.recoveries} actors in a row",
                        hint="See what its tools do to the process; `resume` tries again",
                    )
                )
        except ClusterError as error:
            self._session_pool.lost(slot)
            outcome = Outcome(error=error)
        del self._live[run.command.session_id]
        if outcome is None:
            run.command = replace(run.command, recover=True)
            run.placed.clear()
            self._enqueue(run)
        else:
            run.outcome.set_result(outcome)
            self._forget_oldest(run)
            self._pump()

    def _forget_oldest(self, finished: _Run) -> None:
        """Keeps a bounded number of outcomes, the latest."""
        self._finished.extend([finished.command.key, *finished.joined])
        while len(self._finished) > KEPT_OUTCOMES:
            key = self._finished.popleft()
            known = self._runs.get(key)
            if known is not None and known.outcome.done():
                del self._runs[key]

    def _live_roots(self) -> frozenset[str]:
        return frozenset(root_of(sid) for sid in self._live)


_remote: Any = ray.remote  # its overloads know no options
SupervisorActor = _remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=MAX_CONCURRENCY)(
    SupervisorHost
)
