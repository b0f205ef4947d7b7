"""SessionStore over an object store: which requests a verb makes, under which keys, and what it makes of answers."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from greenroom import Conflict, Deleted, Fenced, Message, SandboxSpec, SessionExists, SessionNotFound, StorageError
from greenroom.runtime.ids import child_id
from greenroom.runtime.state import AgentState, Ready
from greenroom.runtime.storage import Head, MemoryObjectStore, Segment, SessionStore
from greenroom.runtime.storage.head import SandboxRef
from greenroom.runtime.storage.sandbox_head import SandboxHead


class Recording(MemoryObjectStore):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []

    async def get(self, key: str) -> tuple[bytes, str] | None:
        self.asked.append(("get", key))
        return await super().get(key)

    async def put_if_absent(self, key: str, body: bytes) -> str:
        self.asked.append(("create", key))
        return await super().put_if_absent(key, body)

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        self.asked.append(("replace", key))
        return await super().put_if_match(key, body, etag)

    async def keys(self) -> list[str]:
        return [key async for key in self.list("")]


def head(sid: str = "s", **fields: Any) -> Head:
    root = sid.partition("~")[0]
    base: dict[str, Any] = {"session_id": sid, "root": root, "agent": "d", "write_id": f"{sid}-first"}
    return Head.model_validate({**base, "state": Ready(agent=AgentState(session_id=sid)), **fields})


@pytest.fixture
def objects() -> Recording:
    return Recording()


@pytest.fixture
def store(objects: Recording) -> SessionStore:
    return SessionStore(objects)


# -- heads


async def test_a_head_lies_at_its_key_below_the_prefix(objects: Recording) -> None:
    store = SessionStore(objects, prefix="deep/down/")
    etag = await store.create("a b", head("a b"))
    assert await objects.keys() == ["deep/down/tree/a%20b/a%20b/head"]
    assert await store.read("a b") == (head("a b"), etag)
    assert await store.read("a") is None
    with pytest.raises(SessionExists):
        await store.create("a b", head("a b", write_id="another"))


async def test_acquiring_is_one_write_with_the_next_numbers(objects: Recording, store: SessionStore) -> None:
    await store.create("s", head(epoch=4, write_no=1, owner="old", epoch_write_no=1))
    objects.asked.clear()
    taken, etag = await store.acquire("s", "new")
    assert (taken.owner, taken.epoch, taken.write_no, taken.epoch_write_no) == ("new", 5, 2, 2)
    assert taken.write_id not in ("", "s-first")
    assert await store.read("s") == (taken, etag)
    assert objects.asked[:3] == [("get", "tree/s/s/head"), ("create", "active/s"), ("replace", "tree/s/s/head")]
    with pytest.raises(SessionNotFound):
        await store.acquire("nobody", "new")


async def test_acquiring_looks_again_when_somebody_was_faster(objects: Recording, store: SessionStore) -> None:
    await store.create("s", head(write_no=1))
    raced: list[str] = []

    async def overtaken(key: str, body: bytes, etag: str) -> str:
        if not raced:
            raced.append(key)
            await MemoryObjectStore.put_if_match(objects, key, head(write_no=2, write_id="other").encode(), etag)
        return await Recording.put_if_match(objects, key, body, etag)

    objects.put_if_match = overtaken  # type: ignore[method-assign]  # one other writer, just before ours
    taken, _ = await store.acquire("s", "new")
    assert (taken.write_no, taken.epoch) == (3, 1)


async def test_the_mark_of_a_running_session_is_put_once_an_epoch_and_goes_with_its_owner(
    objects: Recording, store: SessionStore
) -> None:
    etag = await store.create("s", head())
    assert "active/s" not in await objects.keys()
    number = int("1000")  # equal to the other below, and no cached object
    owned = head(owner="me", write_no=number, epoch_write_no=int("1000"), epoch=1, write_id="w1")
    etag = await store.save("s", owned, etag)
    assert ("create", "active/s") in objects.asked
    assert await store.active_ids() == ["s"]
    objects.asked.clear()
    etag = await store.save("s", owned.but(write_no=number + 1, write_id="w2"), etag)
    assert objects.asked == [("replace", "tree/s/s/head")], "one request a save"
    await store.save("s", owned.but(write_no=number + 2, write_id="w3", owner=None), etag)
    assert await store.active_ids() == []


async def test_a_save_is_lost_to_whoever_wrote(objects: Recording, store: SessionStore) -> None:
    etag = await store.create("s", head())
    newer = await store.save("s", head(write_id="w1", write_no=1), etag)
    with pytest.raises(Conflict):
        await store.save("s", head(write_id="w2", write_no=1), etag)
    await store.acquire("s", "other")
    with pytest.raises(Fenced, match="other"):
        await store.save("s", head(write_id="w3", write_no=2), newer)
    await store.delete("s")
    with pytest.raises(Deleted):
        await store.save("s", head(write_id="w4", write_no=9), newer)


async def test_a_host_fence_is_looked_up_before_it_is_saved(objects: Recording, store: SessionStore) -> None:
    etag = await store.create("s", head(host_fence=3))
    objects.asked.clear()
    etag = await store.save("s", head(host_fence=3, write_id="w1", write_no=1), etag)
    assert objects.asked == [("get", "tree/s/s/head"), ("replace", "tree/s/s/head")]
    with pytest.raises(Fenced, match="host fence 3, this is 2"):
        await store.save("s", head(host_fence=2, write_id="w2", write_no=2), etag)
    etag = await store.save("s", head(host_fence=4, write_id="w3", write_no=2), etag)
    with pytest.raises(Deleted):
        await store.save("gone", head("gone", host_fence=1, write_id="w"), "e")


# -- deletion


async def test_a_deletion_leaves_a_tombstone_and_nothing_else(objects: Recording, store: SessionStore) -> None:
    await store.create("s", head(owner="me", epoch=2))
    await store.append("s", Segment("1-1-a", (Message.user("hi"),)))
    await store.put_blob("s", b"blob", set())
    await store.put_index("s", "1-2-b", b"[]")
    assert not await store.is_tombstone("s")
    assert not await store.is_tombstone("never")
    await store.delete("s")
    assert await objects.keys() == ["tree/s/s/head"]
    assert await store.read("s") is None
    assert await store.is_tombstone("s")
    found = await objects.get("tree/s/s/head")
    assert found is not None
    assert b'"epoch":3' in found[0]
    await store.delete("s")
    assert await objects.get("tree/s/s/head") == found, "a second one changes nothing"


async def test_a_tree_goes_top_down_level_by_level(store: SessionStore) -> None:
    first, second = (child_id("r", f"r/1/1/{index}") for index in (0, 1))
    below = child_id("r", f"{first}/1/1/0")
    await store.create("r", head("r", spawned=("1/1/0", "1/1/1")))
    await store.create(first, head(first, parent="r", spawned=("1/1/0",)))
    for sid, parent in ((second, "r"), (below, first)):
        await store.create(sid, head(sid, parent=parent))
    assert await store.delete_tree("r") == ["r", first, second, below]
    assert [sid async for sid in store.session_ids()] == sorted(["r", first, second, below]), "tombstones are listed"


async def test_only_a_root_takes_its_sandbox_along(objects: Recording, store: SessionStore) -> None:
    sandbox = SandboxRef(spec=SandboxSpec(kind="host"))
    child = child_id("r", "r/1/1/0")
    await store.create("r", head("r", sandbox=sandbox))
    await store.create(child, head(child, parent="r", sandbox=sandbox))
    await store.create("plain", head("plain"))
    await store.save_sandbox(SandboxHead(root="r", write_id="w"), None)
    await store.delete(child)
    assert await store.read_sandbox("r") is not None
    await store.delete("plain")
    assert not [key for key in await objects.keys() if key.startswith("tree/plain/sandbox")]
    await store.delete("r")
    assert await store.read_sandbox("r") is None


async def test_the_head_of_a_sandbox_is_kept_like_a_sessions(store: SessionStore) -> None:
    first = SandboxHead(root="r", write_id="a", epoch=1)
    etag = await store.save_sandbox(first, None)
    assert await store.read_sandbox("r") == (first, etag)
    with pytest.raises(Conflict):
        await store.save_sandbox(SandboxHead(root="r", write_id="b", epoch=1), None)
    with pytest.raises(Fenced):
        await store.save_sandbox(SandboxHead(root="r", write_id="b", epoch=0), None)
    assert await store.save_sandbox(first.but(write_id="c", epoch=2), etag) != etag
    with pytest.raises(Fenced):
        await store.save_sandbox(first.but(write_id="d"), etag)


# -- messages, blobs, agents


async def test_segments_come_back_in_order_and_as_they_were_written(objects: Recording, store: SessionStore) -> None:
    refs = [await store.append("s", Segment(f"1-{n}-a", (Message.user(f"m{n}"),))) for n in range(3)]
    assert [ref.count for ref in refs] == [1, 1, 1]
    assert refs[0] == await store.append("s", Segment("1-0-a", (Message.user("m0"),))), "the same again changes nothing"
    assert [message.text for message in await store.read("s", refs)] == ["m0", "m1", "m2"]
    key = "tree/s/s/seg/1-1-a.jsonl"
    found = await objects.get(key)
    assert found is not None
    await objects.put_if_match(key, found[0] + b" ", found[1])
    with pytest.raises(StorageError, match="does not have the content"):
        await store.read("s", refs)
    await objects.delete(key)
    with pytest.raises(StorageError, match="is missing"):
        await store.read("s", refs)


async def test_a_blob_is_named_by_its_content_and_written_once(objects: Recording, store: SessionStore) -> None:
    known: set[str] = set()
    name = await store.put_blob("s", b"x", known)
    assert name == hashlib.sha256(b"x").hexdigest()
    assert await store.get_blob("s", name) == b"x"
    objects.asked.clear()
    assert await store.put_blob("s", b"x", known) == name
    assert objects.asked == []
    assert await store.put_blob("s", b"x", set()) == name, "another owner's, which is the same"
    found = await objects.get(f"tree/s/s/blob/{name}")
    assert found is not None
    etag = found[1]
    others = [str(number).encode() for number in range(20)]
    assert {hashlib.sha256(other).hexdigest() < name for other in others} == {True, False}, "whichever way it differs"
    for other in others:
        etag = await objects.put_if_match(f"tree/s/s/blob/{name}", other, etag)
        with pytest.raises(StorageError, match="named by"):
            await store.get_blob("s", name)
    with pytest.raises(StorageError, match="is missing"):
        await store.get_blob("s", "0" * 64)


async def test_agents_lie_beside_the_sessions(objects: Recording, store: SessionStore) -> None:
    await store.put_agent("d1", b"{}")
    await store.put_agent("d1", b"{}")
    assert await store.get_agent("d1") == b"{}"
    assert await store.get_agent("d2") is None
    assert await objects.keys() == ["agent/d1.json"]


async def test_only_heads_of_sessions_are_listed(objects: Recording, store: SessionStore) -> None:
    for sid in ("a/1", "a/2", "b"):
        await store.create(sid, head(sid))
    await store.save_sandbox(SandboxHead(root="b", write_id="w"), None)
    for stray in (
        "tree/head",
        "tree/b/head",
        "tree/b/b/seg/head",
        "tree/b/b/head/x",
        "tree/b/b/aaa",
        "tree/b/b/zzz",
        "elsewhere/b/b/head",
    ):
        await objects.put_if_absent(stray, b"")
    assert [sid async for sid in store.session_ids()] == ["a/1", "a/2", "b"]
    assert [sid async for sid in store.session_ids("a/")] == ["a/1", "a/2"]
    assert [key async for key, _ in store.head_keys()][-1] == "tree/b/b/head"
