"""TreeSnapshots: which snapshot a tree's workspace goes back to, and what that covers; kept in the sandbox head.

Whoever opens the tree's sandbox takes the head over: its epoch goes up, and an earlier sandbox that still lives can
save nothing any more. A snapshot counts from the moment the head names it; what it made superfluous is removed after.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from greenroom.runtime.errors import AlreadyExists, Conflict, Deleted, Fenced
from greenroom.runtime.ports import PackedWorkspace
from greenroom.runtime.storage.sandbox_head import SandboxHead
from greenroom.runtime.storage.session_store import SessionStore
from greenroom.runtime.storage.snapshots import Saved, SnapshotStore

TAKE_OVER_ATTEMPTS = 8
ASLEEP = "asleep"
KEPT_JOBS = 64
"""Background jobs that were ended when their workspace was put to sleep, and can still be asked for."""


@dataclass(slots=True)
class TreeSnapshots:
    """One sandbox's hold on the head of its tree. saved: what the head names; before: who had it, None for nobody."""

    store: SessionStore
    head: SandboxHead
    etag: str
    saved: Saved | None
    before: str | None
    objects: SnapshotStore = field(init=False)
    _count: int = 0
    _swept: bool = False
    _unsure: bool = False

    def __post_init__(self) -> None:
        self.objects = SnapshotStore(self.store, self.head.root)

    @classmethod
    async def take_over(cls, store: SessionStore, root: str) -> TreeSnapshots:
        """Fences every earlier sandbox of the tree; `claim` it when this one is open. Raises Deleted, StorageError.

        Until then the head names the one before: it is its folder that a next attempt looks for.
        """
        for attempt in range(TAKE_OVER_ATTEMPTS):
            found = await store.read_sandbox(root)
            old, etag = found if found is not None else (SandboxHead(root=root, write_id=""), None)
            head = old.but(epoch=old.epoch + 1, write_id=uuid.uuid4().hex)
            try:
                etag = await store.save_sandbox(head, etag)
            except (Conflict, Fenced, AlreadyExists):
                if attempt == TAKE_OVER_ATTEMPTS - 1:
                    raise
                continue
            objects = SnapshotStore(store, root)
            saved = None if old.snapshot is None else Saved(objects, await objects.get(old.snapshot))
            return cls(store, head, etag, saved, old.owner)
        raise AssertionError("the last attempt returns or raises")

    async def claim(self, incarnation: str) -> None:
        """This sandbox has the tree, and its folder is the newest. Raises Fenced, Deleted."""
        await self._write(owner=incarnation)

    def new_name(self) -> str:
        """A name that no other snapshot has; it begins with the epoch of whoever made it."""
        self._count += 1
        return f"{self.head.epoch}-{self._count}-{uuid.uuid4().hex[:8]}"

    async def put(self, packed: PackedWorkspace, watermark: Mapping[str, str]) -> None:
        """Stores the workspace, has the head name it, and removes what nothing needs any more.

        Raises Fenced or Deleted when another sandbox has the tree, or nobody any more.
        """
        if self._unsure:
            await self._look_again()
        before = set() if self.saved is None else self.saved.snapshot.objects
        snapshot = await packed.put(self.objects)
        try:
            await self._write(snapshot=snapshot.name, watermark=dict(watermark))
        except (Fenced, Deleted, Conflict):  # only then is it certain that nobody will ever look for it
            await self.objects.remove(snapshot.objects - before)
            raise
        self.saved = Saved(self.objects, snapshot)
        if not self._swept:  # a crash may have left something, here or in an earlier sandbox
            before = {name for name in await self.objects.names() if _epoch_of(name) <= self.head.epoch}
            self._swept = True
        await self.objects.remove(before - snapshot.objects)

    async def cover(self, watermark: Mapping[str, str]) -> None:
        """The workspace is still as it was saved: the snapshot covers these calls too."""
        if self.saved is not None and dict(watermark) != self.head.watermark:
            await self._write(watermark=dict(watermark))

    async def put_to_sleep(self, jobs: list[str]) -> None:
        """These background jobs were ended with the workspace."""
        await self._write(jobs=_with_asleep(self.head, jobs))

    async def _write(self, **changed: object) -> None:
        """Changes the head; after a write of which nobody knows what became, what stands there counts first."""
        if self._unsure:
            await self._look_again()
        head = self.head.but(**changed, write_id=uuid.uuid4().hex)
        self._unsure = True
        self.etag = await self.store.save_sandbox(head, self.etag)
        self.head, self._unsure = head, False

    async def _look_again(self) -> None:
        found = await self.store.read_sandbox(self.head.root)
        if found is None:
            raise Deleted(f"the tree {self.head.root!r} was deleted")
        if found[0].epoch != self.head.epoch:
            raise Fenced(f"another sandbox has the tree {self.head.root!r}")
        self.head, self.etag = found  # only this sandbox writes at its epoch
        name = self.head.snapshot
        if name is not None and (self.saved is None or self.saved.snapshot.name != name):
            self.saved = Saved(self.objects, await self.objects.get(name))
        self._unsure = False


async def note_asleep(store: SessionStore, root: str, jobs: list[str]) -> None:
    """The same for a tree that is not saved: its head names jobs alone. Raises StorageError."""
    found = await store.read_sandbox(root)
    head, etag = found if found is not None else (SandboxHead(root=root, write_id=""), None)
    await store.save_sandbox(head.but(jobs=_with_asleep(head, jobs), write_id=uuid.uuid4().hex), etag)


def _with_asleep(head: SandboxHead, jobs: list[str]) -> dict[str, str]:
    asleep = {**head.jobs, **dict.fromkeys(jobs, ASLEEP)}
    return dict(list(asleep.items())[-KEPT_JOBS:])


def _epoch_of(name: str) -> int:
    """The epoch of the sandbox that made an object; a later one's are its own."""
    first = name.partition("-")[0]
    return int(first) if first.isdigit() else 0
