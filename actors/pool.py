"""The green room: warm actors waiting for their next call. Owned by the Supervisor, used on its loop alone.

Session actors serve one session at a time. There are as many as are needed, up to the pool's size, and beyond it those
that children and recoveries need, which end when they are given back. Sandbox actors are kept by the tree that used
them last until another tree needs one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import ray

from greenroom.actors.calls import ActorLost, ActorSilent, ask
from greenroom.actors.handles import SANDBOX_TIMEOUT, SessionActorClient
from greenroom.actors.sandbox import SandboxActor
from greenroom.actors.session import SessionActor
from greenroom.actors.wire import PoolConfig, SandboxInfo, SandboxReport
from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.errors import ClusterError

SESSION_ACTOR, SANDBOX_ACTOR = "greenroom-session-", "greenroom-sandbox-"
"""How the names of the pool's actors begin."""

RETIRE_AFTER = 5.0
"""Seconds that an actor which is not needed any more is kept, so that its last events can be read."""

END_WAIT = 4.0
"""Seconds that an actor gets to close what its agents hold open."""

PLACE, NO_PLACE = 0.99, 0.0001
"""What an actor takes of its node's slot resource. Of up to 99 units, as many actors have a place; and beside them all
there is room for children and recoveries on the same nodes, which nobody may wait for.
"""

MAX_USES = 1000
"""Sessions an actor serves before it is replaced."""


@dataclass(slots=True, eq=False)
class Slot:
    """A session actor; beat: monotonic seconds of the last beat of its run loop that is known; stuck: there was none
    for too long; extra: it takes no place of its node, and serves only who cannot wait for one.
    """

    name: str
    client: SessionActorClient
    extra: bool = False
    uses: int = 0
    beat: float = field(default_factory=time.monotonic)
    stuck: asyncio.Event = field(default_factory=asyncio.Event)


class SessionPool:
    """`size`: sessions that may live in it at once; `incarnation`: makes the names of its actors its own.

    It grows when somebody needs an actor, keeps `config.min_idle` warm ones ready, and lets those go that were idle for
    longer than `config.idle_after`.
    """

    def __init__(self, namespace: str, incarnation: str, store: str, size: int, config: PoolConfig) -> None:
        self.size = size
        self._namespace = namespace
        self._incarnation = incarnation
        self._store = store
        self._config = config
        self._count = 0
        self._idle: list[Slot] = []
        self._ending: set[asyncio.Task[None]] = set()
        self.slots: set[Slot] = set()

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def busy(self) -> int:
        return len(self.slots) - len(self._idle)

    def fill(self) -> None:
        """Keeps warm ones ready, within the size; they come up by themselves."""
        while len(self._idle) < self._config.min_idle and len(self.slots) < self.size:
            self._idle.insert(0, self._start(extra=False))  # the coldest: it is taken last

    def adopt(self, handle: Any, name: str, *, busy: bool) -> Slot:
        """Takes in an actor that another Supervisor has started."""
        slot = Slot(name, SessionActorClient(handle))
        self.slots.add(slot)
        if not busy:
            self._idle.append(slot)
            self._let_go_later(slot)
        return slot

    def take(self, *, beyond: bool) -> Slot | None:
        """An idle actor, the warmest first, while fewer than the pool's size are busy; with `beyond` always one."""
        if not beyond and self.busy >= self.size:
            return None
        slot = next((slot for slot in reversed(self._idle) if beyond or not slot.extra), None)
        if slot is None:
            slot = self._start(extra=beyond and self._config.slot_resource is not None)
        else:
            self._idle.remove(slot)
        slot.beat = time.monotonic()
        self.fill()
        return slot

    def give_back(self, slot: Slot) -> None:
        """The actor is idle again; one too many, or one used up, is ended once its last events can have been read."""
        slot.uses += 1
        if slot.uses < MAX_USES:
            self._idle.append(slot)
        self._let_go_later(slot)

    def _let_go_later(self, slot: Slot) -> None:
        needed = slot.uses < MAX_USES and len(self.slots) <= self.size and not slot.extra
        wait = max(RETIRE_AFTER, self._config.idle_after) if needed else RETIRE_AFTER
        asyncio.get_running_loop().call_later(wait, self._retire, slot, slot.uses)

    def _retire(self, slot: Slot, uses: int) -> None:
        """Lets an actor go that has not been used since, and is not needed."""
        if slot not in self.slots or slot.uses != uses:
            return
        if slot.uses >= MAX_USES:
            self.lost(slot)
        elif slot in self._idle and (self.idle > self._config.min_idle or len(self.slots) > self.size or slot.extra):
            self._idle.remove(slot)
            self.slots.discard(slot)
            self._ending.add(task := asyncio.get_running_loop().create_task(_end(slot)))
            task.add_done_callback(self._ending.discard)

    def lost(self, slot: Slot) -> None:
        """The actor is dead, or is to be; the pool is filled up again."""
        self.slots.discard(slot)
        ray.kill(slot.client.handle)
        self.fill()

    async def stop(self) -> None:
        await asyncio.gather(*(_end(slot) for slot in self.slots), *self._ending)
        self.slots.clear()
        self._idle.clear()

    def _start(self, *, extra: bool) -> Slot:
        self._count += 1
        name = f"{SESSION_ACTOR}{self._incarnation}-{self._count}"
        resource = self._config.slot_resource
        capped = {} if resource is None else {"resources": {resource: NO_PLACE if extra else PLACE}}
        handle: Any = SessionActor.options(name=name, namespace=self._namespace, lifetime="detached", **capped).remote(
            name, self._namespace, self._store
        )
        handle.pid.remote()  # its first call: the process imports what it needs before it is needed
        slot = Slot(name, SessionActorClient(handle), extra)
        self.slots.add(slot)
        return slot


async def _end(slot: Slot) -> None:
    """Lets an actor close what its agents hold open, for a moment, and ends it."""
    with contextlib.suppress(ClusterError):
        await slot.client.end(END_WAIT)
    ray.kill(slot.client.handle)


class SandboxPool:
    """Sandbox actors by the root of the tree that has them.

    `size`: how many trees that run nothing keep theirs open; beyond it the longest unused one changes hands.
    """

    def __init__(self, namespace: str, incarnation: str, store: str, size: int, slot_resource: str | None) -> None:
        self._namespace = namespace
        self._incarnation = incarnation
        self._store = store
        self._size = size
        self._nodes = {} if slot_resource is None else {"resources": {slot_resource: NO_PLACE}}
        self._count = 0
        self._open: OrderedDict[str, SandboxInfo] = OrderedDict()
        self._spare: list[Any] = []
        self.started: list[Any] = []
        self._locks: dict[str, asyncio.Lock] = {}

    @property
    def size(self) -> int:
        return len(self._open) + len(self._spare)

    def fill(self) -> None:
        """Keeps one warm actor at hand for the next tree."""
        if not self._spare:
            self._spare.append(self._start())

    def find(self, root: str) -> SandboxInfo | None:
        return self._open.get(root)

    def adopt(self, handle: Any, report: SandboxReport) -> None:
        """Takes in an actor that another Supervisor has started."""
        self.started.append(handle)
        if report.root is not None and report.facts is not None and report.root not in self._open:
            self._open[report.root] = SandboxInfo(handle, report.facts)
        else:
            self._spare.append(handle)

    async def get(self, root: str, spec: SandboxSpec, live: frozenset[str]) -> SandboxInfo:
        """The tree's sandbox, opened if it is not; `live`: roots whose trees run now. Raises SandboxUnavailable."""
        async with self._locks.setdefault(root, asyncio.Lock()):
            info = self._open.get(root)
            if info is not None and not await self._answers(info):
                await self._close(root)  # it sleeps, or its actor is dead
                info = None
            if info is None:
                info = await self._open_new(root, spec, live)
            self._open[root] = info
            self._open.move_to_end(root)
            self.fill()
            return info

    async def close_one(self, root: str) -> None:
        """Ends a tree's sandbox, if it is open; its actor serves the next tree."""
        async with self._locks.setdefault(root, asyncio.Lock()):
            await self._close(root)

    async def _close(self, root: str) -> None:
        """Under the tree's lock: nobody opens it anew before all of it is saved and ended."""
        info = self._open.pop(root, None)
        if info is None:
            return
        try:
            await ask(info.actor.close.remote(), SANDBOX_TIMEOUT)
        except (ActorLost, ActorSilent):
            self._drop(info.actor)  # a silent one may yet run what it was to end
            return
        self._spare.append(info.actor)

    async def stop(self) -> None:
        self._open.clear()
        self._spare.clear()
        for actor in self.started:  # also one that is just being opened
            ray.kill(actor)
        self.started.clear()

    async def _open_new(self, root: str, spec: SandboxSpec, live: frozenset[str]) -> SandboxInfo:
        actor = await self._take(live)
        try:
            facts = await ask(actor.open.remote(root, spec), SANDBOX_TIMEOUT)
        except ActorLost:
            self._drop(actor)
            actor = self._start()
            facts = await ask(actor.open.remote(root, spec), SANDBOX_TIMEOUT)
        except ActorSilent:
            self._drop(actor)  # it may yet open what was asked for: nobody else must get it
            raise
        except Exception:  # the sandbox was refused, and the actor is as good as before: whoever asked is told
            self._spare.append(actor)
            raise
        return SandboxInfo(actor, facts)

    async def _take(self, live: frozenset[str]) -> Any:
        """A spare actor, or that of the tree that has been idle longest, or a new one."""
        idle = [root for root in self._open if root not in live]
        free = [root for root in idle if root not in self._locks or not self._locks[root].locked()]
        if len(idle) >= self._size and free:
            await self.close_one(free[0])
            self._locks = {root: lock for root, lock in self._locks.items() if root in self._open or lock.locked()}
        return self._spare.pop() if self._spare else self._start()

    def _start(self) -> Any:
        self._count += 1
        name = f"{SANDBOX_ACTOR}{self._incarnation}-{self._count}"
        options = {"name": name, "namespace": self._namespace, "lifetime": "detached", **self._nodes}
        actor: Any = SandboxActor.options(**options).remote(self._store)
        actor.pid.remote()  # its first call: the process imports what it needs before it is needed
        self.started.append(actor)
        return actor

    def _drop(self, actor: Any) -> None:
        """The actor is dead, or is to be."""
        ray.kill(actor)
        if actor in self.started:
            self.started.remove(actor)

    async def _answers(self, info: SandboxInfo) -> bool:
        try:
            return bool(await ask(info.actor.alive.remote(info.facts.incarnation)))
        except ActorLost:
            return False
        except ActorSilent:
            return True  # it may yet: its outcomes must not be given up
