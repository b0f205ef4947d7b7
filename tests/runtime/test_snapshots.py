"""Snapshots of a tree's workspace: when they are made, what they cover, who may make them, what is told when one is
gone back to, and sleep. Sandboxes are in memory; the real ones are in tests/sandbox/test_snapshots.py.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scenes import ASK, bash, call, calls, default_registry, results, scripted

from greenroom import AgentConfig, AgentRuntime, RunStatus, SandboxSpec, SandboxUnavailable, Storage, StorageError
from greenroom.runtime.calls import CallRef, ExecResult, JobState, SandboxLimits
from greenroom.runtime.clock import SystemClock
from greenroom.runtime.errors import Deleted, Fenced, SandboxDied
from greenroom.runtime.open_tree import open_tree
from greenroom.runtime.operations import CheckJob, Execute, ReadFile, StartJob, WriteFile
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.storage import MemoryObjectStore, SessionStore
from greenroom.runtime.storage.snapshots import Snapshot, SnapshotStore
from greenroom.runtime.tree_sandbox import SharedSandbox
from greenroom.runtime.tree_snapshots import TreeSnapshots
from greenroom.runtime.workspace import RESTORING
from greenroom.testing import FakeClock, FakeSandbox, FakeSandboxes, Fault, FaultyStore, strict_history

SPEC = SandboxSpec(kind="host", snapshots="on")


def spec(root: str, home: Path, **fields: Any) -> SandboxSpec:
    workspace = str(home / "workspaces" / root)
    return SandboxSpec(kind="host", snapshots="on", workspace=workspace, managed=True, **fields)


class Tree:
    """The sandbox of the root `r` over one store, opened again and again."""

    def __init__(self, home: Path, objects: ObjectStore, **fields: Any) -> None:
        self.factory = FakeSandboxes()
        self.objects = objects
        self.clock = FakeClock()
        self.spec = spec("r", home, **fields)
        self.number = 0

    async def open(self) -> SharedSandbox:
        storage = Storage.over(self.objects)
        return await open_tree(self.factory, self.spec, "r", storage, self.clock, auto=False)

    def folder(self) -> Path:
        """The workspace, made."""
        assert self.spec.workspace is not None
        folder = Path(self.spec.workspace)
        folder.mkdir(parents=True)
        return folder

    @property
    def backend(self) -> FakeSandbox:
        return self.factory.opened["r"]

    async def write(self, shared: SharedSandbox, name: str, data: bytes = b"x", sid: str = "r") -> None:
        self.number += 1
        ref = CallRef(sid, 1, f"{sid}/1/{self.number}/0", "d", step=self.number, acked_through=self.number - 1)
        await shared.perform(ref, WriteFile(name, data))

    async def settled(self, shared: SharedSandbox) -> None:
        await shared.settle("r", self.number)
        await asyncio.gather(*shared._background)

    async def names(self) -> set[str]:
        return await SnapshotStore(SessionStore(self.objects), "r").names()

    async def saved(self) -> Snapshot | None:
        found = await SessionStore(self.objects).read_sandbox("r")
        if found is None or found[0].snapshot is None:
            return None
        return await SnapshotStore(SessionStore(self.objects), "r").get(found[0].snapshot)


@pytest.fixture
def tree(home: Path, shared: MemoryObjectStore) -> Tree:
    return Tree(home, shared)


# -- when


async def test_a_stop_of_the_root_saves_and_an_unchanged_workspace_is_not_saved_again(tree: Tree) -> None:
    shared = await tree.open()
    await tree.settled(shared)
    assert await tree.saved() is None, "nothing was done in it"
    await tree.write(shared, "a")
    await tree.settled(shared)
    first = await tree.saved()
    assert first is not None
    assert await shared.covered("r") == "r/1/1/0"
    await tree.settled(shared)
    await tree.write(shared, "a")  # the same bytes again
    await tree.settled(shared)
    assert await tree.saved() == first
    assert await shared.covered("r") == "r/1/2/0", "it covers the write that changed nothing"


async def test_reads_and_a_childs_stop_save_nothing(tree: Tree) -> None:
    shared = await tree.open()
    await tree.write(shared, "a", sid="r~child")
    await shared.settle("r~child", 1)
    await asyncio.gather(*shared._background)
    assert await tree.saved() is None
    await tree.settled(shared)
    first = await tree.saved()
    assert first is not None
    assert await shared.covered("r~child") == "r~child/1/1/0"
    await shared.perform(CallRef("r", 1, "r/1/9/0", "d"), ReadFile("a"))
    await tree.settled(shared)
    assert await tree.saved() == first


async def test_after_so_many_calls_it_is_saved_while_the_run_goes_on(home: Path, shared: MemoryObjectStore) -> None:
    tree = Tree(home, shared, snapshot_every=3)
    sandbox = await tree.open()
    for number in range(2):
        await tree.write(sandbox, f"f{number}")
    await asyncio.gather(*sandbox._background)
    assert await tree.saved() is None
    await tree.write(sandbox, "f2")
    await asyncio.gather(*sandbox._background)
    found = await tree.saved()
    assert found is not None
    assert found.files == 3


async def test_closing_saves_what_no_snapshot_holds_yet(tree: Tree) -> None:
    shared = await tree.open()
    await tree.write(shared, "a")
    await shared.close()
    assert (await tree.saved() or shared).files == 1  # type: ignore[union-attr]


# -- what


async def test_the_workspace_comes_back_and_old_objects_go(tree: Tree) -> None:
    shared = await tree.open()
    for number in range(4):
        await tree.write(shared, f"f{number}", b"v%d" % number)
        await tree.settled(shared)
    found = await tree.saved()
    assert found is not None
    assert await tree.names() == found.objects, "nothing superfluous is left"
    await shared.close()
    again = await tree.open()
    assert tree.backend.files == {f"f{number}": b"v%d" % number for number in range(4)}
    assert again.restored == {"r": "r/1/4/0"}
    assert again.incarnation != shared.incarnation


async def test_a_crash_before_the_head_keeps_the_old_snapshot_and_the_next_one_sweeps(
    home: Path, shared: MemoryObjectStore
) -> None:
    store = FaultyStore(shared)
    tree = Tree(home, store)
    sandbox = await tree.open()
    await tree.write(sandbox, "a", b"old")
    await tree.settled(sandbox)
    old = await tree.saved()
    store.faults.append(Fault("unavailable", "put_if_match", "/sandbox/head", times=100))
    await tree.write(sandbox, "a", b"new")
    await tree.settled(sandbox)
    assert await tree.saved() == old
    assert len(await tree.names()) == 4, "the parts of one that no head names"
    store.faults.clear()
    again = await tree.open()
    assert tree.backend.files == {"a": b"old"}
    await tree.write(again, "b")
    await tree.settled(again)
    found = await tree.saved()
    assert found is not None
    assert await tree.names() == found.objects


@pytest.mark.parametrize("op", ["put_if_absent", "put_if_match"])
@pytest.mark.parametrize("kind", ["unavailable", "lose_reply", "lose_request"])
async def test_a_store_that_fails_now_and_then_loses_nothing(
    home: Path, shared: MemoryObjectStore, op: str, kind: str
) -> None:
    store = FaultyStore(shared)
    tree = Tree(home, store)
    sandbox = await tree.open()
    store.faults.append(Fault(kind, op, "/sandbox/", times=1))  # type: ignore[arg-type]
    await tree.write(sandbox, "a")
    await tree.settled(sandbox)
    await tree.settled(sandbox)  # the next occasion
    found = await tree.saved()
    assert found is not None
    assert found.files == 1
    await (await tree.open()).close()
    assert tree.backend.files == {"a": b"x"}


@pytest.mark.parametrize("harm", ["remove", "change"])
async def test_a_damaged_snapshot_is_an_error_and_never_an_empty_workspace(tree: Tree, harm: str) -> None:
    shared = await tree.open()
    await tree.write(shared, "a")
    await shared.close()
    found = await tree.saved()
    assert found is not None
    key = f"tree/r/sandbox/{found.index.parts[0].name}"
    await tree.objects.delete(key)
    if harm == "change":
        await tree.objects.put_if_absent(key, b"{}")
    with pytest.raises(StorageError, match=found.index.parts[0].name):
        await tree.open()


# -- who


async def test_an_earlier_sandbox_saves_nothing_once_another_has_the_tree(tree: Tree) -> None:
    first = await tree.open()
    await tree.write(first, "a")
    await tree.settled(first)
    second = await tree.open()
    await tree.write(first, "late")
    await tree.settled(first)
    assert not first.alive
    with pytest.raises(SandboxDied):
        await tree.write(first, "later")
    await tree.write(second, "b")
    await tree.settled(second)
    await (await tree.open()).close()
    assert set(tree.backend.files) == {"a", "b"}
    found = await tree.saved()
    assert found is not None
    assert await tree.names() == found.objects


async def test_a_deleted_tree_is_not_saved_and_not_opened(tree: Tree) -> None:
    shared = await tree.open()
    await tree.write(shared, "a")
    store = SessionStore(tree.objects)
    await store._delete_sandbox("r")
    await tree.settled(shared)
    assert not shared.alive
    assert await tree.names() == set()
    with pytest.raises(Deleted):
        await tree.open()


async def test_two_that_open_at_once_end_with_one_that_may_save(tree: Tree) -> None:
    both = await asyncio.gather(tree.open(), tree.open(), return_exceptions=True)
    for number, shared in enumerate(both):
        if isinstance(shared, SharedSandbox):
            await tree.write(shared, f"f{number}")
            await tree.settled(shared)
    assert sum(isinstance(shared, SharedSandbox) and shared.alive for shared in both) == 1


async def test_a_take_over_meets_a_save_and_one_of_them_wins(shared: MemoryObjectStore) -> None:
    store = SessionStore(shared)
    first = await TreeSnapshots.take_over(store, "r")
    await first.claim("one")
    second = await TreeSnapshots.take_over(store, "r")
    assert (first.head.epoch, second.head.epoch, second.before) == (1, 2, "one")
    with pytest.raises(Fenced):
        await first.put_to_sleep(["job"])
    assert (await TreeSnapshots.take_over(store, "r")).before == "one", "it was taken, and never claimed"
    with pytest.raises(Fenced):
        await second.claim("two")
    third = await TreeSnapshots.take_over(store, "r")
    await third.put_to_sleep(["job"])
    assert (await TreeSnapshots.take_over(store, "r")).head.jobs == {"job": "asleep"}


async def test_a_write_that_landed_unheard_is_found_and_gone_on_from(home: Path, shared: MemoryObjectStore) -> None:
    store = FaultyStore(shared)
    tree = Tree(home, store)
    sandbox = await tree.open()
    await tree.write(sandbox, "a")
    store.faults += [
        Fault("lose_reply", "put_if_match", "/sandbox/head"),
        Fault("unavailable", "get", "/sandbox/head", times=100),
        Fault("lose_request", "put_if_match", "/sandbox/head", times=100),
    ]
    await tree.settled(sandbox)
    store.faults.clear()
    await tree.write(sandbox, "b")
    await tree.settled(sandbox)
    assert sandbox.alive, "it has not fenced itself"
    found = await tree.saved()
    assert found is not None
    assert found.files == 2
    assert await tree.names() == found.objects


async def test_without_an_object_store_or_a_sandbox_that_saves_there_are_no_snapshots(home: Path) -> None:
    class Plain:
        kind = "plain"
        guarantees: frozenset[str] = frozenset()
        alive = True

        async def close(self) -> None: ...

    class Opens:
        async def open(self, spec: Any, root: str, snapshot: Any = None) -> Any:
            return Plain()

    own = Storage(checkpoints=object(), transcripts=object())  # type: ignore[arg-type]
    with pytest.raises(SandboxUnavailable, match="object store"):
        await open_tree(FakeSandboxes(), spec("r", home), "r", own, SystemClock(), auto=False)
    with pytest.raises(SandboxUnavailable, match="cannot save"):
        await open_tree(Opens(), spec("r", home), "r", Storage.open("memory:"), SystemClock(), auto=False)
    opened = await open_tree(
        Opens(), spec("r", home).but(snapshots="auto"), "r", Storage.open("memory:"), SystemClock(), auto=False
    )
    assert not opened.saves


# -- the folder that is here


async def test_a_folder_that_the_last_sandbox_left_here_is_taken_as_it_is(tree: Tree) -> None:
    folder = tree.folder()
    shared = await tree.open()
    await tree.write(shared, "a")
    await shared.close()
    again = await tree.open()
    assert again.restored is None
    assert tree.backend.files == {}, "a sandbox in memory begins empty unless it is told to go back"
    mark = folder.parents[1] / "marks" / "r"
    mark.write_text("somebody-else")
    assert (await tree.open()).restored == {"r": "r/1/1/0"}, "another sandbox went on elsewhere"
    shutil.rmtree(folder)
    assert (await tree.open()).restored is not None


async def test_what_a_folder_holds_unsaved_is_saved_by_the_next_sandbox(tree: Tree) -> None:
    """The owner died before it could: nobody may call again, and the machine may be lost after."""
    tree.folder()
    await tree.write(await tree.open(), "a")
    again = await tree.open()
    tree.backend.files = {"a": b"x"}  # it lies in the folder
    await tree.settled(again)
    found = await tree.saved()
    assert found is not None
    assert found.files == 1


async def test_an_open_that_fails_does_not_make_the_newest_folder_an_old_one(
    home: Path, shared: MemoryObjectStore
) -> None:
    store = FaultyStore(shared)
    tree = Tree(home, store)
    tree.folder()
    await (await tree.open()).close()
    opens, tree.factory.open = tree.factory.open, refuse  # type: ignore[method-assign]
    with pytest.raises(SandboxUnavailable):
        await tree.open()  # here, or on another machine
    tree.factory.open = opens  # type: ignore[method-assign]
    for fault in ("unavailable", "lose_request"):
        for skip in (0, 1):  # taking it over, claiming it
            store.faults.append(Fault(fault, "put_if_match", "/sandbox/head", skip=skip, times=100))
            with pytest.raises(StorageError):
                await tree.open()
            store.faults.clear()
    assert (await tree.open()).restored is None


async def refuse(*_: Any, **__: Any) -> Any:
    raise SandboxUnavailable("not here")


async def test_a_tree_that_was_saved_goes_on_being_saved(tree: Tree) -> None:
    """Its other machines are gone: that is when its snapshot counts."""
    await tree.write(shared := await tree.open(), "a")
    await shared.close()
    tree.spec = tree.spec.but(snapshots="auto")
    again = await tree.open()
    assert again.saves
    assert tree.backend.files == {"a": b"x"}


async def test_a_users_own_folder_is_taken_as_it_is_unless_it_is_empty(tree: Tree, tmp_path: Path) -> None:
    folder = tmp_path / "workspaces" / "r"  # its name alone makes it nobody else's
    folder.mkdir(parents=True)
    (folder / "mine").write_text("x")
    tree.spec = tree.spec.but(workspace=str(folder), managed=False)
    await (await tree.open()).close()
    assert (await tree.open()).restored is None
    (folder / RESTORING).touch()
    assert (await tree.open()).restored == {}, "what was never wholly restored"
    (folder / "mine").unlink()
    (folder / RESTORING).unlink()
    assert (await tree.open()).restored == {}
    assert not (tmp_path / "marks").exists()
    tree.spec = tree.spec.but(workspace="/")
    assert (await tree.open()).restored is None, "also one that has no folder above it"


# -- what a session is told


def agent_of(*script: Any, **fields: Any) -> AgentConfig:
    return scripted(
        *script, tools=default_registry(), sandbox=SandboxSpec(kind="host", **{"snapshots": "on", **fields})
    )


async def test_a_session_is_told_which_calls_a_restored_workspace_lacks(home: Path, shared: MemoryObjectStore) -> None:
    script = (
        calls(call("write_file", path="a", content="1")),
        "first",
        bash("make b"),
        calls(call("read_file", path="a"), call("write_file", path="c", content="3")),
        ASK,
        bash("ls"),
        "done",
    )
    agent = agent_of(*script)
    async with AgentRuntime(Storage.over(shared), sandboxes=FakeSandboxes()) as runtime:
        session = await runtime.create_session(agent, "r")
        await session.run("go")
        trees = await runtime._trees.find("r")
        assert isinstance(trees, SharedSandbox)
        await asyncio.gather(*trees._background)
        trees._snapshots = None  # from here on nothing is saved: its machine is about to be lost
        trees.__class__ = type("Lost", (SharedSandbox,), {"saves": True})
        waiting = await session.run("on")
        assert waiting.status is RunStatus.suspended
        assert waiting.interrupt is not None
    factory = FakeSandboxes()
    async with AgentRuntime(Storage.over(shared), sandboxes=factory) as runtime:
        session = await runtime.open("r", agent)
        events: list[Any] = []
        watching = asyncio.create_task(_collect(session, events.append))
        assert (await session.answer(waiting.interrupt.id, "yes")).text == "done"
        assert factory.opened["r"].files == {"a": b"1"}
        transcript = await session.transcript()
        await asyncio.sleep(0)
        watching.cancel()
    strict_history(transcript.messages)
    (notice,) = [message.text for message in transcript.messages if "last snapshot" in message.text]
    assert "bash in step 3, write_file in step 4" in notice
    assert transcript.messages[-2].text == notice, "it stands beside the results of the first batch there"
    (event,) = [event for event in events if event.type == "notice"]
    assert event.data["kind"] == "workspace_restored"
    assert len(event.data["lost_calls"]) == 2


async def _collect(session: Any, put: Callable[[Any], None]) -> None:
    async for event in session.events(follow=True):
        put(event)


async def test_a_session_whose_calls_are_all_covered_is_told_nothing(home: Path, shared: MemoryObjectStore) -> None:
    agent = agent_of(calls(call("write_file", path="a", content="1")), "first", bash("ls"), bash("ls"), "second")
    factory = FakeSandboxes()
    for text in ("go", "on"):
        async with AgentRuntime(Storage.over(shared), sandboxes=factory) as runtime:
            session = await runtime.open("r", agent) if text == "on" else await runtime.create_session(agent, "r")
            await session.run(text)
            transcript = await session.transcript()
    assert factory.opened["r"].files == {"a": b"1"}
    assert not [message for message in transcript.messages if "snapshot" in message.text]
    found = await Storage.over(shared).checkpoints.read("r")
    assert found is not None
    assert found[0].unsaved == ("2/3/0 bash", "2/4/0 bash"), "what the last snapshot covers is off the list"
    assert len(results(transcript)) == 3


async def test_without_snapshots_a_head_keeps_no_list_of_calls(home: Path, shared: MemoryObjectStore) -> None:
    agent = agent_of(bash("ls"), "ok", snapshots="off")
    async with AgentRuntime(Storage.over(shared), sandboxes=FakeSandboxes()) as runtime:
        session = await runtime.create_session(agent, "r")
        await session.run("go")
    found = await Storage.over(shared).checkpoints.read("r")
    assert found is not None
    assert found[0].unsaved == ()
    assert await SessionStore(shared).read_sandbox("r") is None


async def test_deleting_a_session_takes_its_snapshots_along(home: Path, shared: MemoryObjectStore) -> None:
    agent = agent_of(calls(call("write_file", path="a", content="1")), "ok")
    async with AgentRuntime(Storage.over(shared), sandboxes=FakeSandboxes()) as runtime:
        session = await runtime.create_session(agent, "r")
        await session.run("go")
        await session.delete()
    assert [key async for key in shared.list("tree/r/sandbox/")] == ["tree/r/sandbox/head"], "the tombstone"


# -- sleep


async def test_a_sandbox_that_nobody_asks_is_saved_and_closed(home: Path, shared: MemoryObjectStore) -> None:
    tree = Tree(home, shared, limits=SandboxLimits(idle_seconds=60))
    sandbox = await tree.open()
    await tree.write(sandbox, "a")
    await tree.clock.advance(61)
    assert sandbox.alive, "an outcome is not recorded yet"
    await sandbox.settle("r", tree.number)
    await tree.clock.advance(59)
    assert sandbox.alive
    await tree.clock.advance(2)
    await asyncio.gather(*sandbox._background)
    assert not sandbox.alive
    assert tree.backend.closed
    assert await tree.saved() is not None


@pytest.mark.parametrize("snapshots", ["on", "off"])
async def test_a_running_job_holds_sleep_up_for_a_while(home: Path, shared: MemoryObjectStore, snapshots: str) -> None:
    tree = Tree(home, shared, limits=SandboxLimits(idle_seconds=60, job_seconds=300))
    tree.spec = tree.spec.but(snapshots=snapshots)
    tree.factory = FakeSandboxes(lambda command: asyncio.sleep(10**6, ""), background=lambda command: True)
    sandbox = await tree.open()
    job = await sandbox.perform(CallRef("r", 1, "r/1/1/0", "d", step=1), StartJob("serve", 1.0))
    assert isinstance(job, JobState)
    await sandbox.settle("r", 1)
    await tree.clock.advance(240)
    assert sandbox.alive
    await tree.clock.advance(120)
    await asyncio.gather(*sandbox._background)
    assert not sandbox.alive
    assert tree.factory.opened["r"].ended == ["serve"]
    again = await tree.open()
    assert again.saves is (snapshots == "on")
    with pytest.raises(LookupError, match="put to sleep"):
        await again.perform(CallRef("r", 2, "r/2/2/0", "d", step=2), CheckJob(job.id))


async def test_a_sleeping_sandbox_wakes_up_for_the_next_run(home: Path, shared: MemoryObjectStore) -> None:
    clock = FakeClock()
    agent = agent_of(calls(call("write_file", path="a", content="1")), "first", bash("ls"), "second")
    factory = FakeSandboxes()
    async with AgentRuntime(Storage.over(shared), sandboxes=factory, clock=clock) as runtime:
        session = await runtime.create_session(agent, "r")
        await session.run("go")
        first = await runtime._trees.find("r")
        await clock.advance(601)
        assert isinstance(first, SharedSandbox)
        await asyncio.gather(*first._background)
        assert not first.alive
        assert (await session.run("on")).text == "second"
        assert factory.opened["r"].files == {"a": b"1"}
        assert not [m for m in (await session.transcript()).messages if "snapshot" in m.text]


async def test_a_command_is_never_cut_off_by_sleep(home: Path, shared: MemoryObjectStore) -> None:
    tree = Tree(home, shared, limits=SandboxLimits(idle_seconds=60))
    gate = asyncio.Event()

    async def slow(command: str) -> str:
        await gate.wait()
        return "done"

    tree.factory = FakeSandboxes(slow)
    sandbox = await tree.open()
    running = asyncio.create_task(sandbox.perform(CallRef("r", 1, "r/1/1/0", "d", step=1), Execute("long")))
    await tree.clock.advance(3600)
    gate.set()
    ended = await running
    assert isinstance(ended, ExecResult)
    assert ended.output == "done"
    await sandbox.close()
