"""Opens the sandbox of a session tree with the workspace that belongs to it: the folder that is here, or a snapshot."""

from __future__ import annotations

import asyncio
import uuid

from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.errors import SandboxUnavailable
from greenroom.runtime.ports import Clock, SandboxFactory, SavesWorkspace
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.tree_sandbox import SharedSandbox
from greenroom.runtime.tree_snapshots import TreeSnapshots
from greenroom.runtime.workspace import WorkspaceMark


async def open_tree(
    factory: SandboxFactory, spec: SandboxSpec, root: str, storage: Storage, clock: Clock, *, auto: bool
) -> SharedSandbox:
    """auto: whether SandboxSpec(snapshots="auto") means yes here. Raises SandboxUnavailable, StorageError.

    A folder that the tree's last sandbox left here is used as it is; else the workspace goes back to the last snapshot,
    and `restored` of the sandbox says how far that reaches.
    """
    limits = spec.limits
    if spec.snapshots == "off" or (spec.snapshots == "auto" and not auto):
        return SharedSandbox(await factory.open(spec, root), clock=clock, idle=limits.idle_seconds)
    store = storage.session_store
    if store is None:
        raise SandboxUnavailable(
            "snapshots lie in an object store, and this storage has none", hint="SandboxSpec(snapshots='off')"
        )
    incarnation = uuid.uuid4().hex
    mark = WorkspaceMark(spec, root)
    tree = await TreeSnapshots.take_over(store, root, incarnation, lambda before: mark.announce(before, incarnation))
    survived = await asyncio.to_thread(mark.is_of, tree.before)
    if survived or tree.saved is None:
        sandbox = await factory.open(spec, root)
    else:
        await asyncio.to_thread(mark.remove)
        sandbox = await factory.open(spec, root, tree.saved)
    if not isinstance(sandbox, SavesWorkspace):
        await sandbox.close()
        raise SandboxUnavailable(
            f"the sandbox {sandbox.kind!r} cannot save its workspace", hint="SandboxSpec(snapshots='off')"
        )
    await asyncio.to_thread(mark.put, incarnation)
    return SharedSandbox(
        sandbox,
        clock=clock,
        incarnation=incarnation,
        snapshots=tree,
        save_every=spec.snapshot_every,
        idle=limits.idle_seconds,
        job_time=limits.job_seconds,
        restored=None if survived else dict(tree.head.watermark),
    )
