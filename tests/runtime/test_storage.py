"""Object stores and the session store over them: conditions, races, damage, and what is never guessed."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom import (
    AlreadyExists,
    ConfigError,
    Conflict,
    Deleted,
    Fenced,
    Message,
    NewerSchema,
    NotFound,
    PreconditionFailed,
    SandboxSpec,
    SessionExists,
    SessionNotFound,
    Storage,
    StorageError,
    Undecided,
)
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.state import AgentState, Ready
from greenroom.runtime.storage import Head, MemoryObjectStore, Segment, SessionStore, SqliteObjectStore
from greenroom.runtime.storage.garbage import collect_garbage
from greenroom.runtime.storage.head import SCHEMA_VERSION, SandboxRef
from greenroom.runtime.storage.sandbox_head import SandboxHead


@pytest.fixture(params=["memory", pytest.param("sqlite", marks=pytest.mark.slow)])
async def objects(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    store: ObjectStore = MemoryObjectStore() if request.param == "memory" else SqliteObjectStore(tmp_path / "o.db")
    yield store
    await store.close()


def head(sid: str = "s", **fields: object) -> Head:
    base = Head(session_id=sid, root=sid, agent="a", write_id="w0", state=Ready(agent=AgentState(session_id=sid)))
    return base.model_copy(update=fields)


# -- object stores


async def test_conditions_are_honoured(objects: ObjectStore) -> None:
    assert await objects.get("k") is None
    with pytest.raises(NotFound):
        await objects.put_if_match("k", b"x", "1")
    first = await objects.put_if_absent("k", b"one")
    with pytest.raises(AlreadyExists):
        await objects.put_if_absent("k", b"two")
    second = await objects.put_if_match("k", b"two", first)
    with pytest.raises(PreconditionFailed):
        await objects.put_if_match("k", b"three", first)
    assert await objects.get("k") == (b"two", second)
    assert first != second
    await objects.delete("k")
    await objects.delete("k")
    assert await objects.get("k") is None
    third = await objects.put_if_absent("k", b"two")
    assert third not in (first, second), "an etag never comes back: a deleted and made again object is another one"


async def test_listing_is_by_prefix_and_in_order(objects: ObjectStore) -> None:
    keys = [f"a/{number:04}" for number in range(1203)]
    for key in reversed(keys):
        await objects.put_if_absent(key, b"")
    await objects.put_if_absent("a%/x", b"")
    await objects.put_if_absent("b", b"")
    assert [key async for key in objects.list("a/")] == keys
    await objects.delete_many(keys[1:])
    assert [key async for key in objects.list("")] == ["a%/x", "a/0000", "b"]


async def test_of_many_writers_exactly_one_wins_each_round(objects: ObjectStore) -> None:
    etag = await objects.put_if_absent("k", b"start")
    for round in range(20):
        tries = [objects.put_if_match("k", f"{round}-{writer}".encode(), etag) for writer in range(16)]
        ends = await asyncio.gather(*tries, return_exceptions=True)
        won = [end for end in ends if isinstance(end, str)]
        assert len(won) == 1
        assert all(isinstance(end, PreconditionFailed) for end in ends if not isinstance(end, str))
        etag = won[0]


@pytest.mark.slow
def test_processes_share_a_sqlite_store_without_losing_a_write(tmp_path: Path) -> None:
    script = f"""
import asyncio
from greenroom import PreconditionFailed
from greenroom.runtime.storage import SqliteObjectStore
async def main():
    store = SqliteObjectStore({str(tmp_path / "o.db")!r})
    for _ in range(50):
        while True:
            body, etag = await store.get("n")
            try:
                await store.put_if_match("n", str(int(body) + 1).encode(), etag)
                break
            except PreconditionFailed:
                pass
    await store.close()
asyncio.run(main())
"""

    async def first() -> None:
        store = SqliteObjectStore(tmp_path / "o.db")
        await store.put_if_absent("n", b"0")
        await store.close()

    async def last() -> bytes:
        store = SqliteObjectStore(tmp_path / "o.db")
        found = await store.get("n")
        await store.close()
        assert found is not None
        return found[0]

    asyncio.run(first())
    writers = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert asyncio.run(last()) == b"200"


def test_a_memory_store_does_not_pretend_to_be_shared(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="another process"):
        pickle.dumps(MemoryObjectStore())
    assert pickle.loads(pickle.dumps(SqliteObjectStore(tmp_path / "x"))).path == tmp_path / "x"


@pytest.mark.parametrize("url", ["", "nope", "sqlite://", "sqlite:///", "file:///", "postgres://x"])
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no store"):
        Storage.open(url)


def test_a_sqlite_url_is_relative_with_three_slashes_and_absolute_with_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Storage.open("sqlite:///a/b.db").url == f"sqlite:///{tmp_path}/a/b.db"
    assert Storage.open("sqlite:////x.db").url == "sqlite:////x.db"


async def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    storage = Storage.open(f"sqlite:///{tmp_path}/file/x.db")
    with pytest.raises(StorageError) as caught:
        await storage.probe()
    assert caught.value.kind == "unavailable"
    assert caught.value.hint
    (tmp_path / "no.db").write_text("this is no database" * 100)
    with pytest.raises(StorageError, match=r"no\.db"):
        await Storage.open(f"sqlite:///{tmp_path}/no.db").probe()


# -- the session store


async def test_a_head_comes_back_as_it_was_written_and_no_alias_of_it(objects: ObjectStore) -> None:
    store = SessionStore(objects)
    assert await store.read("s") is None
    written = head(inline=(Message.user("hällo"),), spawned=("1/2/0",))
    etag = await store.create("s", written)
    assert await store.read("s") == (written, etag)
    with pytest.raises(SessionExists):
        await store.create("s", head(write_id="other"))
    assert await store.create("s", written) == etag, "the same write again is that write"


async def test_every_acquire_is_a_higher_epoch_and_fences_the_one_before(objects: ObjectStore) -> None:
    store = SessionStore(objects)
    with pytest.raises(SessionNotFound):
        await store.acquire("s", "a")
    await store.create("s", head())
    first, etag = await store.acquire("s", "a")
    second, _ = await store.acquire("s", "b")
    assert (first.epoch, second.epoch, second.owner) == (1, 2, "b")
    with pytest.raises(Fenced, match="b"):
        await store.save("s", first.model_copy(update={"write_id": "late", "write_no": 9}), etag)
    winners = await asyncio.gather(*(store.acquire("s", str(number)) for number in range(8)))
    assert sorted(won.epoch for won, _ in winners) == list(range(3, 11))


async def test_what_runs_is_listed_as_active_until_it_stops(objects: ObjectStore) -> None:
    store = SessionStore(objects)
    await store.create("s", head())
    assert await store.active_ids() == []
    owned, etag = await store.acquire("s", "a")
    assert await store.active_ids() == ["s"]
    await store.save("s", owned.model_copy(update={"owner": None, "write_id": "w2", "write_no": 2}), etag)
    assert await store.active_ids() == []


async def test_a_lost_reply_is_decided_by_the_write_id(objects: ObjectStore) -> None:
    class LosesReplies(MemoryObjectStore):
        lose = 1

        async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
            made = await super().put_if_match(key, body, etag)
            if self.lose:
                self.lose -= 1
                raise Undecided("the reply was lost", key=key)
            return made

    store = SessionStore(LosesReplies())
    etag = await store.create("s", head())
    etag = await store.save("s", head(write_id="w1", write_no=1), etag)
    found = await store.read("s")
    assert found is not None
    assert (found[0].write_id, found[1]) == ("w1", etag)
    with pytest.raises(Conflict):
        await store.save("s", head(write_id="w2", write_no=2), "stale")
    await store.delete("s")
    with pytest.raises(Deleted):
        await store.save("s", head(write_id="w3", write_no=3), etag)


async def test_segments_are_checked_when_they_are_read(objects: ObjectStore) -> None:
    store = SessionStore(objects)
    messages = tuple(Message.user(f"line one\nline two {number}") for number in range(3))
    refs = [await store.append("s", Segment(f"1-{number}-x", messages)) for number in (1, 2)]
    assert await store.append("s", Segment("1-1-x", messages)) == refs[0]
    assert await store.read("s", refs) == messages + messages
    key = next(key for key in [key async for key in objects.list("tree/")] if "1-2-x" in key)
    found = await objects.get(key)
    assert found is not None
    await objects.put_if_match(key, found[0].replace(b"one", b"two"), found[1])
    with pytest.raises(StorageError, match="1-2-x") as damaged:
        await store.read("s", refs)
    assert damaged.value.kind == "serde"
    await store.remove("s")
    with pytest.raises(StorageError, match="missing") as missing:
        await store.read("s", refs)
    assert missing.value.kind == "not_found"


async def test_a_newer_or_broken_head_is_refused_by_name_and_left_alone(objects: ObjectStore) -> None:
    store = SessionStore(objects)
    document = json.loads(head().encode()) | {"schema_version": SCHEMA_VERSION + 1, "later": True}
    newer = json.dumps(document).encode()
    await objects.put_if_absent("tree/s/s/head", newer)
    with pytest.raises(NewerSchema, match=f"version {SCHEMA_VERSION + 1}"):
        await store.acquire("s", "a")
    found = await objects.get("tree/s/s/head")
    assert found is not None
    assert found[0] == newer
    await objects.put_if_absent("tree/t/t/head", b"{broken")
    with pytest.raises(StorageError, match="tree/t/t/head") as broken:
        await store.read("t")
    assert broken.value.kind == "serde"


async def test_any_id_is_one_element_of_a_key(objects: ObjectStore) -> None:
    store = SessionStore(objects)
    ids = ["../up", "a/b", "..", ".", "häuser 7%", "a"]
    for sid in ids:
        await store.create(sid, head(sid))
    keys = [key async for key in objects.list("tree/")]
    assert all(key.count("/") == 3 for key in keys)
    assert not any(part in (".", "..") for key in keys for part in key.split("/"))
    assert sorted([sid async for sid in store.session_ids()]) == sorted(ids)
    assert [sid async for sid in store.session_ids("a/")] == ["a/b"]


async def test_a_session_may_be_called_sandbox(objects: ObjectStore) -> None:
    store = SessionStore(objects)
    await store.create("sandbox", head("sandbox"))
    await store.save_sandbox(SandboxHead(root="sandbox", write_id="w"), None)
    assert [sid async for sid in store.session_ids()] == ["sandbox"]
    assert (await store.read("sandbox")) is not None
    assert (await store.read_sandbox("sandbox")) is not None


async def test_a_sandbox_head_is_changed_by_comparison_and_goes_with_its_root(objects: ObjectStore) -> None:
    store = SessionStore(objects)
    await store.create("s", head(sandbox=SandboxRef(spec=SandboxSpec(kind="host"))))
    assert await store.read_sandbox("s") is None
    first = SandboxHead(root="s", epoch=1, owner="one", write_id="a", watermark={"s": "s/1/2/0"}, jobs={"j": "running"})
    etag = await store.save_sandbox(first, None)
    assert await store.read_sandbox("s") == (first, etag)
    assert await store.save_sandbox(first, None) == etag, "the same write again is that write"
    with pytest.raises(Conflict):
        await store.save_sandbox(first.model_copy(update={"write_id": "other"}), None)
    second = first.model_copy(update={"epoch": 2, "owner": "two", "write_id": "b", "snapshot": "n1"})
    newer = await store.save_sandbox(second, etag)
    with pytest.raises(Fenced, match="two"):
        await store.save_sandbox(first.model_copy(update={"write_id": "late"}), etag)
    await objects.put_if_absent("tree/s/sandbox/n1", b"files")
    await store.delete_tree("s")
    assert await store.read_sandbox("s") is None
    with pytest.raises(Deleted):
        await store.save_sandbox(second.model_copy(update={"write_id": "late"}), newer)
    with pytest.raises(Deleted):
        await store.save_sandbox(SandboxHead(root="s", write_id="first"), None)
    await store.delete_tree("s")
    assert [key async for key in objects.list("tree/s/")] == ["tree/s/s/head", "tree/s/sandbox/head"]
    await collect_garbage(store, -1, 10**12)
    assert [key async for key in objects.list("tree/s/")] == []


async def test_a_newer_or_broken_sandbox_head_is_refused_by_name(objects: ObjectStore) -> None:
    store = SessionStore(objects)
    await objects.put_if_absent("tree/s/sandbox/head", b'{"schema_version":2,"root":"s","write_id":"x"}')
    with pytest.raises(NewerSchema, match="tree/s/sandbox/head"):
        await store.read_sandbox("s")
    await objects.put_if_absent("tree/t/sandbox/head", b'{"schema_version":1}')
    with pytest.raises(StorageError, match="tree/t/sandbox/head") as broken:
        await store.read_sandbox("t")
    assert broken.value.kind == "serde"


SANDBOX_FIXTURES = sorted((Path(__file__).parent / "sandbox_heads").glob("*.json"))


@pytest.mark.parametrize("path", SANDBOX_FIXTURES, ids=lambda path: path.stem)
async def test_sandbox_heads_of_every_schema_go_on_loading(path: Path, objects: ObjectStore) -> None:
    body = path.read_bytes().strip()
    await objects.put_if_absent("tree/s/sandbox/head", body)
    found = await SessionStore(objects).read_sandbox("s")
    assert found is not None
    assert found[0].encode() == body, "the form changed: raise SANDBOX_SCHEMA and add a fixture"


async def test_two_backends_share_the_two_roles_or_one_takes_both() -> None:
    first, second = SessionStore(MemoryObjectStore()), SessionStore(MemoryObjectStore())
    assert not Storage(checkpoints=first, transcripts=second).inlines
    assert Storage.shared(first).inlines


FIXTURES = sorted((Path(__file__).parent / "heads").glob("*/*.json"))


def holds(after: Any, before: Any) -> bool:
    """Whether everything that was there is there still; a later schema may have added to it."""
    if isinstance(before, dict):
        return all(name in after and holds(after[name], value) for name, value in before.items())
    return bool(after == before)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: f"{path.parent.name}-{path.stem}")
async def test_heads_of_every_schema_go_on_loading(path: Path, objects: ObjectStore) -> None:
    store = SessionStore(objects)
    sid = path.stem
    body = path.read_bytes().strip()
    await objects.put_if_absent(f"tree/{sid}/{sid}/head", body)
    found = await store.read(sid)
    assert found is not None
    before, after = json.loads(body), json.loads(found[0].encode())
    assert before["schema_version"] == int(path.parent.name)
    assert after["schema_version"] == SCHEMA_VERSION
    for field in ("session_id", "epoch", "revision", "inline", "usage_before"):
        assert after[field] == before[field]
    assert holds(after["state"], before["state"])
    if "children" in before:
        assert found[0].children == before["children"]
    assert [call["key"] for call in (after["batch"] or {"calls": []})["calls"]] == [
        call["key"] for call in (before["batch"] or {"calls": []})["calls"]
    ]
    if int(path.parent.name) == SCHEMA_VERSION:
        assert found[0].encode() == body, "the form changed: raise SCHEMA_VERSION and add fixtures"


def test_there_are_fixtures_of_every_schema() -> None:
    assert {int(path.parent.name) for path in FIXTURES} == set(range(1, SCHEMA_VERSION + 1))
