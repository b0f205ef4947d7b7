"""What `store gc` removes: old tombstones, segments and indices that nobody refers to."""

from __future__ import annotations

import json

from greenroom.runtime.storage.head import Head, decode_head
from greenroom.runtime.storage.session_store import SessionStore


async def collect_garbage(store: SessionStore, older_than: float, now: float) -> int:
    """Removes tombstones older than so many seconds and segments that nobody refers to; answers how many objects.

    A segment is only unreferenced when a later write of its session has landed: one of a write under way stays.
    """
    removed = 0
    async for key, sid in store.head_keys():
        found = await store.objects.get(key)
        if found is None:
            continue
        head = decode_head(found[0], key)
        if head.life == "live":
            removed += await _remove_unreferenced(store, sid, head)
        elif now - head.since > older_than:
            await _finish_deletion(store, sid, head)
            await store.objects.delete(key)
            removed += 1
    return removed


async def _finish_deletion(store: SessionStore, sid: str, head: Head) -> None:
    """The deletion may have been cut off: what is left of it goes before the tombstone does."""
    for child in head.children.values():
        if await store.read(child) is not None:
            await store.delete_tree(child)
    await store.remove(sid)
    if head.parent is None:
        await store.objects.delete_many([key async for key in store.objects.list(store.sandbox_key(sid, ""))])


async def _remove_unreferenced(store: SessionStore, sid: str, head: Head) -> int:
    kept = {ref.name for ref in head.segments}
    if head.index is not None:
        kept |= {str(ref).partition(":")[0] for ref in json.loads(await store.get_index(sid, head.index.name))}
    dead = []
    for part, names in (("seg/", kept), ("index/", {head.index.name} if head.index is not None else set())):
        prefix = store.session_key(sid, part)
        async for key in store.objects.list(prefix):
            name = key[len(prefix) :].removesuffix(".jsonl")
            if name not in names and int(name.split("-")[1]) <= head.write_no:
                dead.append(key)
    await store.objects.delete_many(dead)
    return len(dead)
