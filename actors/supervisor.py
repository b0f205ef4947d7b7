"""Supervisor: one per namespace; keeps the green room, places commands, cancels, and takes over from dead actors.

Its memory is a cache and decides nothing that epochs do not decide again: two owners of one session are told apart by
the store. After its own death it asks the actors that live what they run, and the store what nobody runs any more. A
take-over follows only from an actor that is dead, or whose run loop has shown no beat for long; never from one that is
merely silent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from greenroom.actors.calls import SILENCE_PAUSE, ActorLost, ActorSilent, ask
from greenroom.actors.channel import Mailbox
from greenroom.actors.directory import Directory
from greenroom.actors.handles import SessionActorClient
from greenroom.actors.packets import Packets
from greenroom.actors.pool import SandboxPool, SessionPool, Slot
from greenroom.actors.takeover import command_for, find_orphans, pool_actors
from greenroom.actors.tombstones import Tombstones
from greenroom.actors.turns import Turns
from greenroom.actors.wire import (
    Command,
    CommandKey,
    Hello,
    Outcome,
    PoolConfig,
    PoolStatus,
    SandboxInfo,
    SandboxReport,
    SessionReport,
    UnknownCommand,
)
from greenroom.runtime.budget import TokenLedger
from greenroom.runtime.calls import CallBounds, SandboxSpec
from greenroom.runtime.errors import ClusterError, PoolMismatch, RequestConflict, RunFailed, SessionBusy
from greenroom.runtime.ids import root_of
from greenroom.runtime.storage.storage import Storage

log = logging.getLogger("greenroom.pool")

MAX_CONCURRENCY = 100_000
"""Calls that may wait here at once: every client that joins a run holds one."""

KEPT_OUTCOMES = 4096
"""Finished commands whose outcome a client can still fetch."""

MAX_RECOVERIES = 3
"""Actors that one command may lose before it is given up: it is then what kills them."""

TERMINATE_WAIT = 5.0
"""Seconds an actor has to park a terminated session before it is killed."""

LOCATE_WAIT = 1.0
"""Seconds that a look for a command's actor waits for it to be placed."""

LOOK_EVERY = 2.0
"""Seconds between two looks at the actors that run something."""

REPORT_TIMEOUT = 5.0
"""Seconds that an actor gets to report; it does so on a thread of its own."""

CLIENT_LOST = 30.0
"""Seconds without a word after which a client counts as gone."""

STOPPED = "pool stopped"
"""The reason that sessions are parked with when their pool is stopped."""

STOP_WAIT = 5.0
"""Seconds that running sessions get to park when the pool is stopped."""

ACTOR_BYTES = 150_000_000
"""Memory that a session's process is expected to take, with what its sandbox runs."""

MAX_SIZE = 64
"""Sessions that a pool which chooses its own size lets live at once."""


@dataclass(slots=True, eq=False)
class _Run:
    """A command from its start to its outcome."""

    command: Command
    outcome: asyncio.Future[Outcome]
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    slot: Slot | None = None
    recoveries: int = 0
    joined: list[CommandKey] = field(default_factory=list)

    @property
    def actor(self) -> SessionActorClient | None:
        return None if self.slot is None else self.slot.client

    @property
    def refused(self) -> bool:
        """Whether it ended without having run: asked again, it is a new command."""
        if not self.outcome.done():
            return False
        error = self.outcome.result().error
        return error is not None and not isinstance(error, RunFailed)


class SupervisorHost(Mailbox):
    """The plain class behind the actor; all of its methods run on one event loop."""

    def __init__(self, namespace: str, hello: Hello, pool: PoolConfig) -> None:
        super().__init__()
        self._namespace = namespace
        self._hello = hello
        self._pool = pool
        self._incarnation = uuid.uuid4().hex[:8]
        size = pool.session_actors or default_size(ray.cluster_resources(), pool.slot_resource)
        self._session_pool = SessionPool(namespace, self._incarnation, hello.store, size, pool)
        self._sandbox_pool = SandboxPool(namespace, self._incarnation, hello.store, size, pool.slot_resource)
        self._rebuilding: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._storage: Storage | None = None
        self._clients: dict[str, float] = {}
        self._last_used = time.monotonic()
        self._packets = Packets()
        self._directory = Directory()
        self._tombstones = Tombstones()
        self._runs: dict[CommandKey, _Run] = {}
        self._finished: deque[CommandKey] = deque()
        self._queue: deque[_Run] = deque()
        self._live: dict[str, _Run] = {}
        self._ledger = TokenLedger()
        self._turns = Turns()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- handshake and agents

    async def hello(self, hello: Hello, pool: PoolConfig | None) -> str | Outcome:
        """This Supervisor's incarnation, or what does not fit."""
        differs = hello.difference(self._hello)
        if not differs and pool is not None and pool != self._pool:
            differs = f"pool {pool} here, {self._pool} there"
        if differs:
            return Outcome(
                error=PoolMismatch(
                    f"the pool in namespace {self._namespace!r} is another one: {differs}",
                    hint="Connect with another namespace, or end the pool that is there with `greenroom pool stop`",
                )
            )
        await self._known()
        self._session_pool.fill()
        self._sandbox_pool.fill()
        return self._incarnation

    async def here(self, client: str, leaving: bool) -> str:  # noqa: FBT001  # a message
        """A client tells that it is there."""
        self._clients[client] = time.monotonic()
        if leaving:
            del self._clients[client]
        self._last_used = time.monotonic()
        return self._incarnation

    async def put_agent(self, digests: list[str], packet: bytes, paths: tuple[str, ...]) -> None:
        await self._packets.put(digests, packet, paths)

    async def get_agent(self, digest: str, wait: bool) -> tuple[bytes | None, tuple[str, ...]]:  # noqa: FBT001  # a message
        """The agent's packet, and where clients import from; `wait`: for a client that may bring it again."""
        return await self._packets.get(digest, wait=wait), self._packets.paths

    # -- after a death: what the actors run, and what nobody runs any more

    async def _known(self) -> None:
        """Waits until everything that a Supervisor before this one knew is known again, as far as actors can tell."""
        if self._rebuilding is None:
            self._rebuilding = asyncio.get_running_loop().create_task(self._rebuild())
        await asyncio.shield(self._rebuilding)

    async def _rebuild(self) -> None:
        names = await asyncio.to_thread(pool_actors, self._namespace)
        await asyncio.gather(*(self._take_in(name) for name in names))
        self._recovering = self._spawn(self._recover_orphans())
        self._spawn(self._look_after())

    async def _take_in(self, name: str) -> None:
        """An actor that another Supervisor has started; one that says nothing for long is taken for stuck."""
        try:
            handle: Any = await asyncio.to_thread(ray.get_actor, name, self._namespace)
        except ValueError:
            return  # it has ended meanwhile
        deadline = time.monotonic() + self._pool.stuck_after
        while True:
            try:
                report = await ask(handle.report.remote(), REPORT_TIMEOUT)
                break
            except ActorSilent:
                if time.monotonic() > deadline:
                    ray.kill(handle)
                    return
            except ActorLost:
                return
        if isinstance(report, SandboxReport):
            self._sandbox_pool.adopt(handle, report)
            return
        assert isinstance(report, SessionReport)
        slot = self._session_pool.adopt(handle, report.name, busy=bool(report.running))
        for command in report.running:
            if command.parent is not None:
                self._tombstones.know(command.session_id, command.parent)
            run = _Run(command, asyncio.get_running_loop().create_future())
            self._runs[command.key] = run
            self._place(run, slot)

    async def _recover_orphans(self) -> None:
        """Goes on with what an actor of this namespace owned that is not there any more."""
        if self._storage is None:
            self._storage = Storage.open(self._hello.store)
        while True:
            try:
                actors = {slot.name for slot in self._session_pool.slots}
                orphans = await find_orphans(self._storage, self._namespace, actors)
                break
            except Exception as error:  # the store is away: it is asked until it answers
                log.warning("cannot look for sessions that nobody runs: %s", error)
                await asyncio.sleep(LOOK_EVERY)
        for head in orphans:
            command = command_for(head, self._packets.paths)
            if command.session_id not in self._live and command.key not in self._runs:
                log.warning("session %s goes on: its owner %s is gone", head.session_id, head.owner)
                await self.start(command)

    async def _look_after(self) -> None:
        """Looks whether actors that run something still beat, and whether the pool is still wanted."""
        while True:
            await asyncio.sleep(min(LOOK_EVERY, self._pool.stuck_after / 4))
            await asyncio.gather(*(self._look_at(run) for run in list(self._live.values())))
            now = time.monotonic()
            self._clients = {client: seen for client, seen in self._clients.items() if now - seen < CLIENT_LOST}
            if self._clients or self._live or self._queue:
                self._last_used = now
            elif self._pool.idle_shutdown and now - self._last_used > self._pool.idle_shutdown:
                log.info("no client and nothing to do for %g s: the pool ends", self._pool.idle_shutdown)
                await self.stop()
                ray.kill(ray.get_runtime_context().current_actor)

    async def _look_at(self, run: _Run) -> None:
        slot = run.slot
        if slot is None:
            return
        asked = time.monotonic()
        try:
            report = await slot.client.report(REPORT_TIMEOUT)
            slot.beat = max(slot.beat, asked - report.beat)
        except ClusterError:
            pass  # silent, or dead: whoever waits for its answer hears of its death
        if time.monotonic() - slot.beat > self._pool.stuck_after:
            log.warning("the actor of %s has not moved for %g s", run.command.session_id, self._pool.stuck_after)
            slot.stuck.set()

    # -- commands

    async def start(self, command: Command) -> Outcome:
        """Takes a command on; the same one again changes nothing. Its error, if it is refused here."""
        await self._known()
        command = self._told_apart(command)
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
            self._runs[command.key] = _Run(command, live.outcome, live.placed, live.slot)  # it joins what is running
            live.joined.append(command.key)
            return Outcome()
        run = _Run(command, asyncio.get_running_loop().create_future())
        self._runs[command.key] = run
        self._enqueue(run)
        return Outcome()

    def _told_apart(self, command: Command) -> Command:
        """A child of what was cancelled is cancelled from the start; whoever goes on with a session clears it."""
        if command.parent is not None:
            self._tombstones.know(command.session_id, command.parent)
        if command.verb != "child" and not command.recover:
            self._tombstones.clear(command.session_id)
        return self._if_cancelled(command)

    def _if_cancelled(self, command: Command) -> Command:
        reason = self._tombstones.over(command.session_id)
        return command if reason is None else replace(command, cancelled=reason)

    async def join(self, key: CommandKey) -> Outcome:
        await self._known()
        run = self._runs.get(key)
        if run is None:
            return Outcome(error=UnknownCommand(f"the pool knows no request {key[1]!r}", hint="Start it again"))
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

    async def actor_of(self, session_id: str, after: int, wait: bool) -> tuple[Any, int]:  # noqa: FBT001  # a message
        """The session's actor and its placement's number, see Directory; while it runs, whatever `after` says."""
        await self._known()
        return await self._directory.find(session_id, 0 if session_id in self._live else after, wait=wait)

    async def cancel(self, session_id: str, reason: str, timeout: float | None) -> Outcome | None:
        """Cancels what the session runs or waits to run; None when it has nothing here."""
        await self._known()
        self._tombstones.put(session_id, reason or "cancelled")
        if self._recovering is not None and session_id not in self._live:  # its owner may be among the dead
            await asyncio.wait([self._recovering], timeout=timeout)
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
        await self._known()
        return await self._sandbox_pool.get(root, spec, self._live_roots())

    async def find_sandbox(self, root: str) -> SandboxInfo | None:
        await self._known()
        return self._sandbox_pool.find(root)

    async def close_sandbox(self, root: str) -> None:
        await self._sandbox_pool.close_one(root)

    # -- token budgets

    async def tokens_left(self, session_id: str, used: int, limit: int, known: Mapping[str, int] | None) -> bool | None:
        return self._ledger.left(session_id, used, limit, known)

    async def tell_tokens(self, session_id: str, used: int) -> None:
        self._ledger.tell(session_id, used)

    # -- calls of models

    async def begin_turn(self, ticket: str, owner: str, bounds: CallBounds) -> None:
        await self._turns.begin(ticket, owner, bounds)

    async def end_turn(self, ticket: str) -> None:
        self._turns.end(ticket)

    async def hold_turns(self, bounds: CallBounds, seconds: float) -> None:
        self._turns.hold(bounds, seconds)

    # -- the pool

    async def status(self) -> PoolStatus:
        await self._known()
        asked = [slot.client.report(REPORT_TIMEOUT) for slot in self._session_pool.slots]
        asked += [ask(actor.report.remote(), REPORT_TIMEOUT) for actor in self._sandbox_pool.started]
        reports = await asyncio.gather(*asked, return_exceptions=True)
        return PoolStatus(
            size=self._session_pool.size,
            session_actors=len(self._session_pool.slots),
            idle=self._session_pool.idle,
            sandbox_actors=self._sandbox_pool.size,
            busy=tuple(self._live),
            queued=tuple(run.command.session_id for run in self._queue),
            clients=len(self._clients),
            supervisor_pid=os.getpid(),
            pids=tuple(report.pid for report in reports if isinstance(report, SessionReport | SandboxReport)),
        )

    async def stop(self) -> None:
        """Ends every actor of the pool; what runs is parked, if it does that in time."""
        await self._known()
        running = [root for root in self._live if root_of(root) == root]
        parking = [asyncio.ensure_future(self.cancel(sid, STOPPED, STOP_WAIT)) for sid in running]
        if parking:
            await asyncio.wait(parking, timeout=STOP_WAIT)
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        await self._session_pool.stop()
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
            run.command = self._if_cancelled(run.command)
            slot = self._session_pool.take(beyond=run.command.first)
            if slot is None:
                return
            self._queue.remove(run)
            self._place(run, slot)

    def _place(self, run: _Run, slot: Slot) -> None:
        self._live[run.command.session_id] = run
        run.slot = slot
        run.placed.set()
        self._directory.place(run.command.session_id, slot.client.handle)
        self._spawn(self._drive(run, slot))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _drive(self, run: _Run, slot: Slot) -> None:
        outcome: Outcome | None = None
        try:
            while outcome is None:
                try:
                    outcome = await _outcome_of(slot, run.command)
                except ActorSilent:
                    await asyncio.sleep(SILENCE_PAUSE)  # it joins the run when it answers again
            self._session_pool.give_back(slot)
        except ActorLost:
            self._lost(slot)
            run.recoveries += 1
            if run.recoveries > MAX_RECOVERIES:
                outcome = Outcome(
                    error=ClusterError(
                        f"session {run.command.session_id!r} lost {run.recoveries} actors in a row",
                        hint="See what its tools do to the process; `resume` tries again",
                    )
                )
        except ClusterError as error:
            self._lost(slot)
            outcome = Outcome(error=error)
        del self._live[run.command.session_id]
        if outcome is None:
            run.command = replace(run.command, recover=True)
            run.placed.clear()
            run.slot = None
            self._enqueue(run)
        else:
            run.outcome.set_result(outcome)
            self._forget_oldest(run)
            self._pump()

    def _lost(self, slot: Slot) -> None:
        self._session_pool.lost(slot)
        self._turns.drop(slot.name)

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


async def _outcome_of(slot: Slot, command: Command) -> Outcome:
    """How the command ends on this actor; raises ActorLost when it is dead or stuck."""
    call = asyncio.ensure_future(slot.client.run(command))
    stuck = asyncio.ensure_future(slot.stuck.wait())
    try:
        await asyncio.wait([call, stuck], return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise ActorLost("the actor's run loop has stopped")
        return call.result()
    finally:
        stuck.cancel()
        call.cancel()


def default_size(resources: Mapping[str, float], slot_resource: str | None = None) -> int:
    """Sessions that a cluster with these resources lets live at once: four a CPU, and half its memory.

    slot_resource: where nodes tell how many they take, that counts.
    """
    if slot_resource is not None and resources.get(slot_resource, 0) >= 1:
        return int(resources[slot_resource])
    by_memory = int(resources.get("memory", 0) / 2 / ACTOR_BYTES) or MAX_SIZE
    return max(2, min(MAX_SIZE, 4 * int(resources.get("CPU", 1)), by_memory))


_remote: Any = ray.remote  # its overloads know no options
SupervisorActor = _remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=MAX_CONCURRENCY)(
    SupervisorHost
)
