"""The sandboxes of the session trees that this process drives: opened at first use, kept for the tree's next run."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.open_tree import open_tree
from greenroom.runtime.ports import Clock, SandboxFactory
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.tree_sandbox import SharedSandbox

IDLE_SANDBOXES = 32
"""Sandboxes kept open; beyond it the longest unused ones of trees that run nothing are closed."""


class LocalTreeSandboxes:
    """`live`: roots of the trees that run now; their sandboxes are never closed to make room.

    storage: where snapshots go, for a SandboxSpec that asks for them: here the folders survive.
    """

    def __init__(self, factory: SandboxFactory, live: Callable[[], set[str]], storage: Storage, clock: Clock) -> None:
        self._factory = factory
        self._live = live
        self._storage = storage
        self._clock = clock
        self._open: OrderedDict[str, SharedSandbox] = OrderedDict()
        self._lock = asyncio.Lock()

    async def get(self, root: str, spec: SandboxSpec) -> SharedSandbox:
        async with self._lock:
            sandbox = self._open.get(root)
            if sandbox is not None and not sandbox.alive:
                await self._open.pop(root).close()
                sandbox = None
            if sandbox is None:
                sandbox = await open_tree(self._factory, spec, root, self._storage, self._clock, auto=False)
                self._open[root] = sandbox
            self._open.move_to_end(root)
            await self._close_idle(keep=root)
            return sandbox

    async def find(self, root: str) -> SharedSandbox | None:
        return self._open.get(root)

    async def close_one(self, root: str) -> None:
        """Closes a tree's sandbox, if it is open."""
        async with self._lock:
            sandbox = self._open.pop(root, None)
            if sandbox is not None:
                await sandbox.close()

    async def close(self) -> None:
        async with self._lock:
            sandboxes = list(self._open.values())
            self._open.clear()
            await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))

    async def _close_idle(self, keep: str) -> None:
        kept = self._live() | {keep}
        idle = [root for root, sandbox in self._open.items() if root not in kept and not sandbox.busy]
        for root in idle[: max(0, len(self._open) - IDLE_SANDBOXES)]:
            await self._open.pop(root).close()
