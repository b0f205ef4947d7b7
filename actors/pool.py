"""The green room: warm actors waiting for their next call. Owned by the Supervisor, used on its loop alone.

Session actors serve one session at a time; there is a fixed number of them, and beyond it those that children and
recoveries need, which end when they are given back. Sandbox actors are kept by the tree that used them last until
another tree needs one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import ray

from greenroom.actors.handles import SANDBOX_TIMEOUT, ActorLost, ActorSilent, SessionActorClient, ask
from greenroom.actors.sandbox import SandboxActor
from greenroom.actors.session import SessionActor
from greenroom.actors.wire import SandboxInfo
from greenroom.runtime.calls import SandboxSpec

RETIRE_AFTER = 5.0
"""Seconds that an actor which is not needed any more is kept, so that its last events can be read."""

MAX_USES = 1000
"""Sessions an actor serves before it is replaced."""


@dataclass(slots=True, eq=False)
class Slot:
    """A session actor."""

    client: SessionActorClient
    uses: int = 0


class SessionPool:
    """`size`: actors kept; `incarnation`: makes their names this pool's own."""

    def __init__(self, namespace: str, incarnation: str, store: str, size: int) -> None:
        self._namespace = namespace
        self._incarnation = incarnation
        self._store = store
        self._size = size
        self._count = 0
        self._idle: list[Slot] = []
        self.slots: set[Slot] = set()

    def fill(self) -> None:
        """Starts actors up to the pool's size; they come up by themselves."""
        while len(self.slots) < self._size:
            self._idle.insert(0, self._start())  # the coldest: it is taken last

    def take(self, *, beyond: bool) -> Slot | None:
        """An idle actor, the warmest first, while fewer than the pool's size are busy; with `beyond` always one."""
        if not beyond and len(self.slots) - len(self._idle) >= self._size:
            return None
        return self._idle.pop() if self._idle else self._start()

    def give_back(self, slot: Slot) -> None:
        """The actor is idle again; one too many, or one used up, is ended once its last events can have been read."""
        slot.uses += 1
        if slot.uses < MAX_USES:
            self._idle.append(slot)
        asyncio.get_running_loop().call_later(RETIRE_AFTER, self._retire, slot)

    def _retire(self, slot: Slot) -> None:
        if slot not in self.slots:
            return
        if slot.uses >= MAX_USES:
            self.lost(slot)
        elif slot in self._idle and len(self.slots) > self._size:
            self._idle.remove(slot)
            self.lost(slot)

    def lost(self, slot: Slot) -> None:
        """The actor is dead, or is to be; the pool is filled up again."""
        self.slots.discard(slot)
        ray.kill(slot.client.handle)
        self.fill()

    def stop(self) -> None:
        for slot in self.slots:
            ray.kill(slot.client.handle)
        self.slots.clear()
        self._idle.clear()

    def _start(self) -> Slot:
        self._count += 1
        name = f"greenroom-session-{self._incarnation}-{self._count}"
        handle: Any = SessionActor.options(name=name, namespace=self._namespace, lifetime="detached").remote(
            name, self._namespace, self._store
        )
        handle.pid.remote()  # its first call: the process imports what it needs before it is needed
        slot = Slot(SessionActorClient(handle))
        self.slots.add(slot)
        return slot


class SandboxPool:
    """Sandbox actors by the root of the tree that has them.

    `size`: how many trees that run nothing keep theirs open; beyond it the longest unused one changes hands.
    """

    def __init__(self, namespace: str, incarnation: str, store: str, size: int) -> None:
        self._namespace = namespace
        self._incarnation = incarnation
        self._store = store
        self._size = size
        self._count = 0
        self._open: OrderedDict[str, SandboxInfo] = OrderedDict()
        self._spare: list[Any] = []
        self._started: list[Any] = []
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
        for actor in self._started:  # also one that is just being opened
            ray.kill(actor)
        self._started.clear()

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
        name = f"greenroom-sandbox-{self._incarnation}-{self._count}"
        actor: Any = SandboxActor.options(name=name, namespace=self._namespace, lifetime="detached").remote(self._store)
        actor.pid.remote()  # its first call: the process imports what it needs before it is needed
        self._started.append(actor)
        return actor

    def _drop(self, actor: Any) -> None:
        """The actor is dead, or is to be."""
        ray.kill(actor)
        if actor in self._started:
            self._started.remove(actor)

    async def _answers(self, info: SandboxInfo) -> bool:
        try:
            return bool(await ask(info.actor.alive.remote(info.facts.incarnation)))
        except ActorLost:
            return False
        except ActorSilent:
            return True  # it may yet: its outcomes must not be given up
