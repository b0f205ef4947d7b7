"""Opens the sandbox of a session tree with the workspace that belongs to it: the folder that is here, or a snapshot."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial

from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.errors import SandboxUnavailable
from greenroom.runtime.ports import Clock, SandboxFactory, SavesWorkspace
from greenroom.runtime.storage.session_store import SessionStore
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
    make = partial(SharedSandbox, clock=clock, idle=spec.limits.idle_seconds, job_time=spec.limits.job_seconds)
    store = storage.session_store
    if not await _saves(spec, root, store, auto=auto):
        return make(await factory.open(spec, root))
    if store is None:
        raise SandboxUnavailable(
            "snapshots lie in an object store, and this storage has none", hint="SandboxSpec(snapshots='off')"
        )
    tree, mark = await TreeSnapshots.take_over(store, root), WorkspaceMark(spec)
    survived = await asyncio.to_thread(mark.is_of, tree.before)
    if survived or tree.saved is None:
        sandbox = await factory.open(spec, root)
    else:
        await asyncio.to_thread(mark.remove)
        sandbox = await factory.open(spec, root, tree.saved)
    try:
        if not isinstance(sandbox, SavesWorkspace):
            raise SandboxUnavailable(
                f"the sandbox {sandbox.kind!r} cannot save its workspace", hint="SandboxSpec(snapshots='off')"
            )
        incarnation = uuid.uuid4().hex
        await asyncio.to_thread(mark.put, incarnation)
        await tree.claim(incarnation)
    except BaseException:
        await sandbox.close()
        raise
    return make(
        sandbox,
        incarnation=incarnation,
        snapshots=tree,
        save_every=spec.snapshot_every,
        restored=None if survived else dict(tree.head.watermark),
        unsaved=survived and tree.before is not None,
    )


async def _saves(spec: SandboxSpec, root: str, store: SessionStore | None, *, auto: bool) -> bool:
    """A tree that was ever saved goes on being saved: its newest state may lie in the store alone."""
    if spec.snapshots != "auto":
        return spec.snapshots == "on"
    return store is not None and (auto or await store.read_sandbox(root) is not None)
