"""Deletion: the whole tree goes, nothing comes back, whoever writes meanwhile and wherever it is cut off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from scenes import bash, call, calls, over, scripted

from greenroom import (
    AgentRuntime,
    Deleted,
    Fenced,
    ModelRequest,
    RunFailed,
    RunStatus,
    SessionExists,
    SessionNotFound,
    Storage,
    StorageError,
    SubAgent,
    ToolRegistry,
)
from greenroom.runtime.ids import child_id
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.storage import MemoryObjectStore, SessionStore
from greenroom.runtime.storage.garbage import collect_garbage
from greenroom.runtime.storage.head import tombstone_of
from greenroom.testing import FakeSandboxes, Fault, FaultyStore, strict_history


def family() -> Any:
    grandchild = scripted("g", name="grandchild", sandbox=None)
    child = scripted(calls(call("deeper", task="d")), "c", name="child", sandbox=None, subagents={"deeper": grandchild})
    return scripted(calls(call("helper", task="h")), bash("echo x"), "ok", subagents={"helper": child})


async def test_deleting_takes_the_whole_tree_and_leaves_tombstones(
    home: Path, object_store: Callable[[], ObjectStore]
) -> None:
    objects = object_store()
    async with over(objects) as runtime:
        session = await runtime.create_session(family())
        other = await runtime.create_session(scripted("stays"))
        await session.run("go")
        await other.run("go")
        ids = [info.session_id async for info in runtime.sessions(prefix=session.id)]
        assert len(ids) == 3
        (home / "workspaces" / session.id).mkdir(parents=True)
        await session.delete()
        await session.delete()
        assert [info.session_id async for info in runtime.sessions()] == [other.id]
        for sid in ids:
            with pytest.raises(SessionNotFound):
                await runtime.open(sid)
        left = [key async for key in objects.list(f"tree/{session.id}/")]
        assert all(key.endswith("/head") for key in left)
        assert not (home / "workspaces" / session.id).exists()
        store = SessionStore(objects)
        assert await collect_garbage(store, 3600, 0) == 0
        assert await collect_garbage(store, -1, 10**12) == 3
        assert [key async for key in objects.list(f"tree/{session.id}/")] == []
        assert len((await other.transcript()).messages) == 2


async def test_deleting_ends_what_runs_and_its_owner_cannot_save_any_more(home: Path) -> None:
    objects = MemoryObjectStore()
    running = asyncio.Event()

    async def hang(command: str) -> str:
        running.set()
        await asyncio.sleep(60)
        return ""

    async with over(objects, sandboxes=FakeSandboxes(hang)) as runtime, over(objects) as other:
        session = await runtime.create_session(scripted(bash("x"), "ok"))
        run = asyncio.create_task(session.run("go"))
        await running.wait()
        await (await other.open(session.id)).delete()
        with pytest.raises(SessionNotFound):
            await session.cancel()
        with pytest.raises(RunFailed) as failed:
            await run
        assert isinstance(failed.value.__cause__, Deleted)
        assert [info async for info in runtime.sessions()] == []


@pytest.mark.parametrize("crash_at", range(14))
async def test_a_deletion_that_is_cut_off_anywhere_can_be_done_again(home: Path, crash_at: int) -> None:
    objects = MemoryObjectStore()
    async with over(objects) as runtime:
        session = await runtime.create_session(family())
        await session.run("go")
    faulty = FaultyStore(objects, faults=[Fault("unavailable", skip=crash_at, times=10**6)])
    try:
        await SessionStore(faulty).delete_tree(session.id)
    except StorageError:
        assert faulty.requests
    await SessionStore(objects).delete_tree(session.id)
    async with over(objects) as runtime:
        assert [info async for info in runtime.sessions()] == []
    assert all([key.endswith("/head") async for key in objects.list("tree/")])


async def test_a_registered_child_without_a_head_gets_a_tombstone(home: Path) -> None:
    objects = MemoryObjectStore()
    async with over(objects) as runtime:
        session = await runtime.create_session(scripted("ok"))
        key = f"tree/{session.id}/{session.id}/head"
        found = await objects.get(key)
        assert found is not None
        child = child_id(session.id, f"{session.id}/1/1/0")
        body = found[0].replace(b'"spawned":[]', b'"spawned":["1/1/0"]')
        await objects.put_if_match(key, body, found[1])
        await session.delete()
        store = SessionStore(objects)
        assert await store.is_tombstone(child)
        with pytest.raises(SessionExists):
            await store.create(child, tombstone_of(child, None).model_copy(update={"write_id": "late"}))


async def test_garbage_that_nobody_refers_to_goes_and_what_is_referred_to_stays(home: Path) -> None:
    objects = MemoryObjectStore()
    async with over(objects, sandboxes=FakeSandboxes(lambda command: "z" * 17_000)) as runtime:
        session = await runtime.create_session(scripted(*[bash("x")] * 5, "ok"))
        await session.run("go")
        before = await session.transcript()
        prefix = f"tree/{session.id}/{session.id}/seg/"
        await objects.put_if_absent(f"{prefix}1-2-lost.jsonl", b"")
        await objects.put_if_absent(f"{prefix}9-999-underway.jsonl", b"")
        assert await collect_garbage(SessionStore(objects), 0, 0) == 1
        names = [key async for key in objects.list(prefix)]
        assert any("underway" in name for name in names)
        assert await session.transcript() == before


class Intruded(MemoryObjectStore):
    """Before its request number `at` something else happens to the store, whole."""

    def __init__(self, at: int, happens: Callable[[ObjectStore], Any]) -> None:
        super().__init__()
        self.at = at
        self.count = -(10**9)
        self._happens = happens

    async def get(self, key: str) -> tuple[bytes, str] | None:
        await self._before()
        return await super().get(key)

    async def put_if_absent(self, key: str, body: bytes) -> str:
        await self._before()
        return await super().put_if_absent(key, body)

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        await self._before()
        return await super().put_if_match(key, body, etag)

    async def delete_many(self, keys: Iterable[str]) -> None:
        await self._before()
        await super().delete_many(keys)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        await self._before()
        async for key in super().list(prefix):
            yield key

    async def _before(self) -> None:
        self.count += 1
        if self.count == self.at:
            await self._happens(self)


async def delete_all(objects: ObjectStore) -> None:
    await SessionStore(objects).delete_tree("s")


async def nothing_is_left(objects: ObjectStore) -> None:
    left = [key async for key in objects.list("tree/")]
    assert all(key.endswith("/head") for key in left), left
    assert [key async for key in objects.list("active/")] == []
    async with over(objects) as runtime:
        assert [info async for info in runtime.sessions()] == []


@pytest.mark.parametrize("verb", ["run", "resume"])
async def test_a_deletion_between_any_two_requests_of_a_run_leaves_nothing(home: Path, verb: str) -> None:
    """Against acquire, every save, the registration and creation of children two levels deep, and the stop."""
    reached, at = True, 1
    while reached:
        objects = Intruded(at, delete_all)
        async with over(objects, sandboxes=FakeSandboxes(lambda command: "z" * 9000)) as first:
            session = await first.create_session(family(), "s")
            if verb == "resume":
                found = await objects.get("tree/s/s/head")
                assert found is not None
                await SessionStore(objects).acquire("s", "an owner that died")
            objects.count = 0
            with contextlib.suppress(RunFailed, SessionNotFound, Deleted):
                await (session.run("go") if verb == "run" else session.cancel() if at % 2 else session.resume())
            reached = objects.count >= at
        if reached:
            await nothing_is_left(objects)
        at += 1
    assert at > (20 if verb == "run" else 5)


@pytest.mark.slow
async def test_a_deletion_meets_other_deletions_and_a_garbage_collection(home: Path) -> None:
    async def others(objects: ObjectStore) -> None:
        await delete_all(objects)
        await collect_garbage(SessionStore(objects), 10**12, 0)

    reached, at = True, 1
    while reached:
        objects = Intruded(at, others)
        async with over(objects) as runtime:
            await (await runtime.create_session(family(), "s")).run("go")
        objects.count = 0
        await delete_all(objects)
        reached = objects.count >= at
        await nothing_is_left(objects)
        at += 1
    assert at > 8


@pytest.mark.slow
async def test_a_garbage_collection_between_any_two_requests_takes_nothing_that_is_needed(home: Path) -> None:
    """Saves under way have put segments that no head refers to yet; a reader holds references from a moment ago."""

    async def collect(objects: ObjectStore) -> None:
        await collect_garbage(SessionStore(objects), 10**12, 0)

    reached, at = True, 1
    while reached:
        objects = Intruded(at, collect)
        async with over(objects, sandboxes=FakeSandboxes(lambda command: "z" * 9000)) as runtime:
            session = await runtime.create_session(scripted(*[bash("x")] * 6, "ok"), "s")
            objects.count = 0
            await session.run("go")
            messages = (await session.transcript()).messages
            reached = objects.count >= at
            assert len(messages) == 14
            strict_history(messages)
        at += 1
    assert at > 15


async def test_deleting_does_not_wait_for_queued_runs(home: Path) -> None:
    asked: list[int] = []

    async def model(request: ModelRequest) -> str:
        asked.append(request.call_no)
        await asyncio.sleep(60)
        return "x"

    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(scripted(model, model, sandbox=None, tools=ToolRegistry()))
        runs = [asyncio.create_task(session.run("go")) for _ in range(2)]
        while not asked:
            await asyncio.sleep(0)
        await asyncio.wait_for(session.delete(), 5)
        await asyncio.gather(*runs, return_exceptions=True)
        assert asked == [0]
        assert [info async for info in runtime.sessions()] == []


async def test_a_session_made_again_under_a_deleted_id_has_all_of_its_parts(home: Path) -> None:
    objects = MemoryObjectStore()
    batch = calls(call("askFollowupQuestion", question="?"), call("write_file", path="f", content="x" * 3000))
    async with over(objects) as runtime:
        for _ in range(2):
            session = await runtime.create_session(scripted(batch, "ok"), "again")
            assert (await session.run("go")).status is RunStatus.suspended
            assert (await session.status()).waiting_for is not None
            await session.delete()
            await collect_garbage(SessionStore(objects), -1, 10**12)


async def test_a_deletion_cut_off_after_the_root_is_finished_by_the_garbage_collection(home: Path) -> None:
    objects = MemoryObjectStore()
    child = scripted("c", name="child", sandbox=None)
    async with over(objects) as runtime:
        session = await runtime.create_session(
            scripted(calls(call("helper", task="h")), "ok", subagents={"helper": SubAgent(child)})
        )
        await session.run("go")
        await SessionStore(objects).delete(session.id)
        assert len([info async for info in runtime.sessions()]) == 1
        await collect_garbage(SessionStore(objects), -1, 10**12)
        assert [info async for info in runtime.sessions()] == []


async def test_a_host_with_a_lower_fence_cannot_delete(home: Path) -> None:
    objects = MemoryObjectStore()
    async with AgentRuntime(Storage.over(objects), host_fence=5, sandboxes=FakeSandboxes()) as new:
        session = await new.create_session(scripted("one"))
        await session.run("go")
    async with AgentRuntime(Storage.over(objects), host_fence=3, sandboxes=FakeSandboxes()) as old:
        with pytest.raises(Fenced):
            await old.handle(session.id).delete()
