"""Opens the sandbox of a session tree with the workspace that belongs to it: the folder that is here, or a snapshot."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial

from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.errors import SandboxUnavailable
from greenroom.runtime.ports import Clock, SandboxFactory, SavesWorkspace
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.tree_sandbox import SharedSandbox
from greenroom.runtime.tree_snapshots import TreeSnapshots, note_asleep
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
    found = None if store is None else await store.read_sandbox(root)
    asleep = () if found is None else tuple(found[0].jobs)
    ever_saved = found is not None and found[0].owner is not None  # its newest state may lie in the store alone
    if spec.snapshots == "off" or (spec.snapshots == "auto" and not auto and not ever_saved):
        note = None if store is None else partial(note_asleep, store, root)
        return make(await factory.open(spec, root), note_sleep=note, asleep=asleep)
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
        note_sleep=tree.put_to_sleep,
        asleep=tree.head.jobs,
        unsaved=survived and tree.before is not None,
    )
