"""Snapshots of real sandboxes: saved while jobs run, restored with rights and owners, forked, killed half-way."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from scenes import bash, call, calls, default_registry, results, scripted

from greenroom import AgentRuntime, SandboxError, SandboxSpec, Storage
from greenroom.runtime.clock import SystemClock
from greenroom.runtime.open_tree import open_tree
from greenroom.runtime.storage import MemoryObjectStore, SessionStore
from greenroom.runtime.storage.snapshots import Saved, SnapshotStore
from greenroom.sandbox.factory import ShippedSandboxes
from greenroom.sandbox.folder import FolderSandbox
from greenroom.sandbox.saving import restore

pytestmark = pytest.mark.slow

Opens = Callable[..., Awaitable[FolderSandbox]]


@pytest.fixture(params=["host", "bubblewrap"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def opens(kind: str, tmp_path: Path) -> AsyncIterator[Opens]:
    """Opens sandboxes in folders of these names."""
    opened: list[FolderSandbox] = []

    async def open(name: str, saved: Saved | None = None) -> FolderSandbox:
        spec = SandboxSpec(kind=kind, workspace=str(tmp_path / name))
        sandbox = await ShippedSandboxes().open(spec, name, saved)
        assert isinstance(sandbox, FolderSandbox)
        opened.append(sandbox)
        return sandbox

    yield open
    for sandbox in opened:
        await sandbox.close()


@pytest.fixture
def store() -> SnapshotStore:
    return SnapshotStore(SessionStore(MemoryObjectStore()), "r")


async def save(sandbox: FolderSandbox, store: SnapshotStore, name: str, base: Saved | None = None) -> Saved | None:
    packed = await sandbox.pack(base, name)
    if packed is None:
        return None
    try:
        return Saved(store, await packed.put(store))
    finally:
        packed.close()


LOOK = "find . -printf '%y %m %p %l\\n' | sort; find . -type f | sort | xargs -r sha256sum"


async def test_a_workspace_comes_back_in_another_folder_with_all_its_rights(opens: Opens, store: SnapshotStore) -> None:
    one = await opens("one")
    made = await one.execute(
        "mkdir -p a/b; echo x > a/b/f; printf '#!/bin/sh\\necho ran' > run; chmod 755 run; ln -s a/b/f l;"
        "ln -s /etc/hostname out; echo s > secret; chmod 600 secret; mkfifo p; umask 077; mkdir closed; touch closed/t"
    )
    assert made.ok, made.output
    saved = await save(one, store, "s1")
    assert saved is not None
    assert (saved.snapshot.files, saved.snapshot.skipped) == (4, 1)
    two = await opens("two", saved)
    await one.execute("rm p")
    assert (await two.execute(LOOK)).output == (await one.execute(LOOK)).output
    written = await two.execute("./run; echo more >> a/b/f; echo new > closed/n; rm secret; cat l")
    assert written.output == "ran\nx\nmore\n"
    assert await save(two, store, "s2", saved) is not None
    assert (await one.execute("cat l; cat secret")).output == "x\ns\n", "what the other one did is not seen here"


async def test_a_snapshot_of_an_unchanged_workspace_is_none_also_in_a_new_sandbox(
    opens: Opens, store: SnapshotStore
) -> None:
    one = await opens("one")
    await one.execute("echo x > f")
    saved = await save(one, store, "s1")
    assert saved is not None
    assert await save(one, store, "s2", saved) is None
    await one.close()
    again = await opens("one")
    assert await save(again, store, "s3", saved) is None
    await again.execute("echo y > f")
    changed = await save(again, store, "s4", saved)
    assert changed is not None
    assert changed.snapshot.parent == "s1"
    assert [stream.name for stream in changed.snapshot.streams] == ["s4"], "the old content is needed no more"


async def test_deltas_pile_up_to_a_bound(opens: Opens, store: SnapshotStore) -> None:
    one = await opens("one")
    saved = None
    for number in range(20):
        await one.execute(f"echo {number} > f{number}")
        saved = await save(one, store, f"s{number}", saved)
        assert saved is not None
        assert len(saved.snapshot.streams) <= 17
    two = await opens("two", saved)
    assert (await two.execute("cat f* | sort -n | tr '\\n' ' '")).output.split() == [str(n) for n in range(20)]


async def test_what_runs_stands_still_while_the_folder_is_read_and_goes_on(opens: Opens, store: SnapshotStore) -> None:
    one = await opens("one")
    await one.execute("for i in $(seq 400); do head -c 20000 /dev/urandom > m$i; done; echo 0 > a; echo 0 > z")
    job = await one.start(
        "i=0; while true; do i=$((i+1)); echo $i > a.new; mv a.new a; echo $i > z.new; mv z.new z; done"
    )
    for number in range(3):
        await asyncio.sleep(0.1)
        saved = await save(one, store, f"s{number}")
        assert saved is not None
        assert saved.snapshot.size > 8_000_000
        restored = await opens(f"at{number}", saved)
        first, last = (await restored.execute("cat a z")).output.split()
        assert int(first) - int(last) in (0, 1), "a is written before z, and read long before it"
        before = (await one.execute("cat z")).output
        await until_differs(one, before)
    assert job.end() is None
    await job.kill()


async def until_differs(sandbox: FolderSandbox, before: str) -> None:
    deadline = time.monotonic() + 10
    while (await sandbox.execute("cat z")).output == before:
        assert time.monotonic() < deadline, "the job goes on"


async def test_what_was_stopped_before_stays_stopped(opens: Opens, store: SnapshotStore) -> None:
    one = await opens("one")
    job = await one.start("sleep 300 & kill -STOP $!; echo $! > pid; ps -o state= -p $! 2> /dev/null; wait")
    deadline = time.monotonic() + 10
    while not (await one.execute("cat pid 2> /dev/null")).output:
        assert time.monotonic() < deadline
    state = "cut -d' ' -f3 /proc/$(cat pid)/stat"
    assert (await one.execute(state)).output == "T\n"
    assert await save(one, store, "s1") is not None
    assert (await one.execute(state)).output == "T\n"
    await job.kill()


async def test_many_processes_stop_and_go_on(opens: Opens, store: SnapshotStore) -> None:
    one = await opens("one")
    job = await one.start("for i in $(seq 60); do (while true; do date +%N > d$i; sleep 0.01; done) & done; wait")
    await asyncio.sleep(0.5)
    saved = await save(one, store, "s1")
    assert saved is not None
    before = (await one.execute("cat d1 d60")).output
    deadline = time.monotonic() + 10
    while (await one.execute("cat d1 d60")).output == before:
        assert time.monotonic() < deadline
    await job.kill()


async def test_a_fork_is_a_workspace_of_its_own(opens: Opens, tmp_path: Path) -> None:
    one = await opens("one")
    await one.execute("mkdir d; echo x > d/f; ln -s d/f l; chmod 640 d/f")
    await one.fork(tmp_path / "copy")
    two = await opens("copy")
    assert (await two.execute(LOOK)).output == (await one.execute(LOOK)).output
    await two.execute("echo two > d/f; touch only-two")
    await one.execute("echo one >> d/f")
    assert (await one.execute("cat d/f; ls")).output == "x\none\nd\nl\n"
    assert (await two.execute("cat l")).output == "two\n"
    with pytest.raises(FileExistsError):
        await one.fork(tmp_path / "copy")
    assert (await two.execute("cat l")).output == "two\n"


async def test_a_workspace_that_is_too_large_is_refused_with_what_to_do(
    kind: str, store: SnapshotStore, tmp_path: Path
) -> None:
    spec = SandboxSpec(kind=kind, workspace=str(tmp_path / "w"))
    sandbox = await ShippedSandboxes().open(spec.but(limits=spec.limits.but(snapshot_bytes=1000)), "r")
    assert isinstance(sandbox, FolderSandbox)
    try:
        await sandbox.execute("head -c 1001 /dev/zero > f")
        with pytest.raises(SandboxError, match="snapshot_bytes"):
            await sandbox.pack(None, "s")
        assert (await sandbox.execute("echo on")).output == "on\n"
    finally:
        await sandbox.close()


async def test_a_damaged_part_leaves_the_folder_as_it_is(opens: Opens, tmp_path: Path) -> None:
    objects = MemoryObjectStore()
    store = SnapshotStore(SessionStore(objects), "r")
    one = await opens("one")
    await one.execute("echo x > f")
    saved = await save(one, store, "s1")
    assert saved is not None
    key = f"tree/r/sandbox/{saved.snapshot.streams[0].parts[0].name}"
    await objects.delete(key)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "mine").write_text("mine")
    with pytest.raises(Exception, match="is missing"):
        await opens("two", saved)
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"], "nothing half-made is left"


async def test_a_folder_that_cannot_be_replaced_is_filled(
    opens: Opens, store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point, say; and one that is a link stays a link."""
    one = await opens("one")
    await one.execute("mkdir d; echo x > d/f; ln -s d/f l")
    saved = await save(one, store, "s1")
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "two" or target.name == "two":
            raise OSError(errno.EBUSY, "busy")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    (tmp_path / "two").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "two", 65534, 65534)
    (tmp_path / "link").symlink_to("two")
    two = await opens("link", saved)
    assert (await two.execute(LOOK)).output == (await one.execute(LOOK)).output
    assert (await two.execute("touch mine")).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "one", "two"]
    assert (tmp_path / "link").is_symlink()


async def test_one_who_is_cancelled_waits_for_the_thread_that_works_for_him(
    opens: Opens, store: SnapshotStore, tmp_path: Path
) -> None:
    one = await opens("one")
    await one.execute("for i in $(seq 2000); do echo $i > f$i; done")
    saved = await save(one, store, "s1")
    assert saved is not None
    for number in range(6):
        opening = asyncio.ensure_future(restore(saved, tmp_path / "two", None, 1 << 30))
        await asyncio.sleep(0.01 * number)
        opening.cancel()
        await asyncio.wait([opening])
        left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".two")]
        assert left == [], "its folder is gone, and nothing writes there any more"


# -- a whole runtime


async def test_a_session_goes_on_after_its_folder_was_lost(kind: str, tmp_path: Path, home: Path) -> None:
    spec = SandboxSpec(kind=kind, snapshots="on", snapshot_every=100)
    script = (bash("echo one > f"), "first", bash("cat f; echo two > g"), calls(call("read_file", path="g")), "done")
    agent = scripted(*script, tools=default_registry(), sandbox=spec)
    storage = f"sqlite:///{tmp_path}/g.db"
    async with AgentRuntime(storage) as runtime:
        session = await runtime.create_session(agent, "r")
        await session.run("go")
    shutil.rmtree(home / "workspaces")
    async with AgentRuntime(storage) as runtime:
        session = await runtime.open("r", agent)
        assert (await session.run("on")).text == "done"
        shown = [block.text for block in results(await session.transcript())]
        assert '"output":"one\\n"' in shown[1]
        assert shown[2] == "two\n"
        await session.delete()
    assert list((home / "workspaces").iterdir()) == []
    assert list((home / "marks").iterdir()) == []


SAVES = """
import asyncio, sys
from greenroom import SandboxSpec, Storage
from greenroom.runtime.calls import CallRef
from greenroom.runtime.clock import SystemClock
from greenroom.runtime.open_tree import open_tree
from greenroom.runtime.operations import Execute
from greenroom.sandbox.factory import ShippedSandboxes
async def main():
    spec = SandboxSpec(kind=sys.argv[1], snapshots="on", workspace=sys.argv[2], managed=True)
    tree = await open_tree(ShippedSandboxes(), spec, "r", Storage.open(sys.argv[3]), SystemClock(), auto=False)
    number = 0
    print("ready", flush=True)
    while True:
        number += 1
        command = "n=$(($(cat n 2> /dev/null || echo 0)+1)); for i in $(seq 30); do echo $n > f$i; done; echo $n > n"
        await tree.perform(CallRef("r", 1, f"r/1/{number}/0", "d", step=number), Execute(command))
        await tree.save()
asyncio.run(main())
"""


def killed_while_it_saves(workspace: Path, storage: str, seconds: float) -> None:
    program = [sys.executable, "-c", SAVES, "host", str(workspace), storage]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        process.kill()


async def gone(workspace: Path) -> None:
    """Removes the folder, also what a command that is just being killed still puts there."""
    while workspace.exists():
        shutil.rmtree(workspace, ignore_errors=True)
        await asyncio.sleep(0.2)


async def test_an_owner_that_is_killed_while_it_saves_leaves_a_whole_snapshot(tmp_path: Path) -> None:
    """Each time the folder is lost too: what comes back is of one moment, and never older than the one before."""
    storage, last = f"sqlite:///{tmp_path}/g.db", 0
    chance = random.Random(20261201)
    for life in range(8):
        workspace = tmp_path / "workspaces" / "r"
        await asyncio.to_thread(killed_while_it_saves, workspace, storage, 0.5 + chance.random())
        await gone(workspace)
        spec = SandboxSpec(kind="host", snapshots="on", workspace=str(workspace), managed=True)
        tree = await open_tree(ShippedSandboxes(), spec, "r", Storage.open(storage), SystemClock(), auto=False)
        await tree.close()
        numbers = {path.name: int(path.read_text()) for path in workspace.iterdir()}
        if not numbers and last == 0:
            continue  # killed before its first one was saved
        assert len(numbers) == 31, life
        assert len(set(numbers.values())) == 1, numbers
        assert numbers["n"] >= last
        last = numbers["n"]
    assert last > 0
    store = SnapshotStore(SessionStore(Storage.open(storage).objects), "r")  # type: ignore[arg-type]
    found = await SessionStore(Storage.open(storage).objects).read_sandbox("r")  # type: ignore[arg-type]
    assert found is not None
    assert found[0].snapshot is not None
    assert (await store.get(found[0].snapshot)).objects <= await store.names()
