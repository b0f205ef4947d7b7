"""SandboxActor: one sandbox of one session tree at a time, in a process of its own.

What a shared sandbox is stands in runtime/tree_sandbox.py; this class opens it, hands calls on, and is reused for the
next tree. When the process dies, everything it ran dies with it.
"""

from __future__ import annotations

import os
from typing import Any

import ray

from greenroom.actors.wire import SandboxFacts, SandboxReport
from greenroom.runtime.calls import CallRef, SandboxSpec
from greenroom.runtime.clock import SystemClock
from greenroom.runtime.errors import SandboxDied
from greenroom.runtime.open_tree import open_tree
from greenroom.runtime.operations import Operation, OperationResult
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.tree_sandbox import SharedSandbox
from greenroom.sandbox.factory import ShippedSandboxes

MAX_CONCURRENCY = 10_000
"""Operations that may wait here at once; they wait on the sandbox's lock, not on the actor."""


class SandboxHost:
    """The plain class behind the actor."""

    def __init__(self, store: str) -> None:
        self._storage = Storage.open(store)
        self._sandbox: SharedSandbox | None = None
        self._root: str | None = None
        self._facts: SandboxFacts | None = None

    async def open(self, root: str, spec: SandboxSpec) -> SandboxFacts:
        """A fresh sandbox for this tree; the one before is closed."""
        await self.close()
        opened = await open_tree(ShippedSandboxes(), spec, root, self._storage, SystemClock(), auto=_many_machines())
        self._sandbox, self._root = opened, root
        self._facts = SandboxFacts(opened.incarnation, opened.guarantees, opened.saves, opened.restored)
        return self._facts

    async def covered(self, incarnation: str, session_id: str) -> str | None:
        return await self._opened(incarnation).covered(session_id)

    async def settle(self, incarnation: str, session_id: str, through: int) -> None:
        await self._opened(incarnation).settle(session_id, through)

    async def fence(self, incarnation: str, session_id: str, epoch: int) -> frozenset[str]:
        return await self._opened(incarnation).fence(session_id, epoch)

    async def perform(self, incarnation: str, ref: CallRef, operation: Operation) -> OperationResult:
        return await self._opened(incarnation).perform(ref, operation)

    async def end(self, incarnation: str, ref: CallRef) -> None:
        await self._opened(incarnation).end(ref)

    async def end_operation(self, incarnation: str, ref: CallRef) -> None:
        await self._opened(incarnation).end_operation(ref)

    async def end_jobs(self, incarnation: str, session_id: str) -> None:
        await self._opened(incarnation).end_jobs(session_id)

    async def alive(self, incarnation: str) -> bool:
        """Whether the sandbox that was opened under this mark can still be used."""
        sandbox = self._sandbox
        return sandbox is not None and sandbox.incarnation == incarnation and sandbox.alive

    async def close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()

    async def pid(self) -> int:
        return os.getpid()

    async def report(self) -> SandboxReport:
        """Whose sandbox is open here."""
        return SandboxReport(os.getpid(), self._root, self._facts) if self._sandbox else SandboxReport(os.getpid())

    def _opened(self, incarnation: str) -> SharedSandbox:
        """The sandbox; a caller that means an earlier one, perhaps of another tree, is turned away."""
        if self._sandbox is None or self._sandbox.incarnation != incarnation:
            raise SandboxDied("the sandbox is closed")
        return self._sandbox


def _many_machines() -> bool:
    """Whether a workspace folder may be lost with its machine, or be missing on the next one."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) > 1


_remote: Any = ray.remote  # its overloads know no options
SandboxActor = _remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=MAX_CONCURRENCY)(SandboxHost)
