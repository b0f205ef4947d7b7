"""check_sandbox: what every sandbox must hold to, and that what it says it enforces stands up to an attack.

It needs bash and sleep inside the sandbox, and no test framework: `await check_sandbox(open)`. The first promise that
is broken raises ContractBroken.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from greenroom.runtime.calls import ExecResult
from greenroom.runtime.errors import SandboxError
from greenroom.runtime.ports import Process, Sandbox, SavesWorkspace, StartsProcesses
from greenroom.runtime.storage import MemoryObjectStore, SessionStore
from greenroom.runtime.storage.snapshots import Saved, SnapshotStore
from greenroom.runtime.testing.contracts import ContractBroken, check

KNOWN_GUARANTEES = frozenset({"isolated", "no_network", "memory_bound", "rooted_files"})

MAX_OUTPUT = 4 * 1024 * 1024
"""Characters of output beyond which a sandbox counts as keeping everything."""

PROMPT = 5.0
"""Seconds within which a command that has nothing to wait for has ended."""

OpensSandbox = Callable[[], Awaitable[Sandbox]]


async def check_sandbox(open: OpensSandbox) -> None:
    """`open` answers a fresh sandbox with an empty workspace each time. Raises ContractBroken."""
    for look in (_commands, _ends, _floods, _cancels, _processes, _files, _roots, _saves, _networks, _close):
        sandbox = await open()
        try:
            check("guarantees are known words", sandbox.guarantees <= KNOWN_GUARANTEES)
            await look(sandbox)
        finally:
            await sandbox.close()


async def _commands(sandbox: Sandbox) -> None:
    check("a fresh sandbox is alive", sandbox.alive)
    result = await sandbox.execute("echo out; echo err >&2; exit 3")
    check("a command's exit code is told", (result.status, result.exit_code) == ("exited", 3))
    check("stdout and stderr come together, in order", result.output == "out\nerr\n")
    check("a non-zero exit is not ok and a zero is", not result.ok and (await sandbox.execute("true")).ok)
    check("a command has no input", (await sandbox.execute("cat; read -r x; echo $?")).output == "1\n")
    check("text is passed as it is", (await sandbox.execute("printf '%s' 'ä€ \"$x\"'")).output == 'ä€ "$x"')
    check("bytes that are no text do no harm", "x" in (await sandbox.execute("printf '\\377x'")).output)
    first = await sandbox.execute("cd /; export A=1; pwd; echo $A")
    second = (await sandbox.execute("pwd; echo $A")).output
    check("commands do not share a shell", first.output == "/\n1\n" != second)
    if first.cwd is not None:
        check("a command tells where it ended", first.cwd == "/")
        there = await sandbox.execute("pwd; mkdir -p /tmp/gone; cd /tmp/gone", cwd=first.cwd)
        check("and the next one can begin there", there.output == "/\n" and there.cwd == "/tmp/gone")
        gone = await sandbox.execute("rmdir /tmp/gone; cd /; exit 3", cwd="/tmp/gone")
        check("also one that fails", gone.cwd == "/" and gone.exit_code == 3)
        lost = await sandbox.execute("pwd", cwd="/tmp/gone")
        check(
            "a folder that is gone is told of",
            "/tmp/gone" in lost.output and lost.output.endswith(second.split()[0] + "\n"),
        )
    long = f"x={'y' * 200_000}; echo ${{#x}}"
    check("a long command runs", (await sandbox.execute(long)).output == "200000\n")


async def _ends(sandbox: Sandbox) -> None:
    result = await sandbox.execute("printf abc; kill -9 $$")
    check("an end by a signal is told apart", (result.status, result.signal, result.exit_code) == ("signaled", 9, None))
    check("its output is kept", result.output == "abc")
    began = time.monotonic()
    result = await sandbox.execute("sleep 300 & echo done")
    check("a command ends with its own process", result.output == "done\n" and time.monotonic() - began < PROMPT)
    began = time.monotonic()
    command = "echo before; trap '' TERM; (sleep 1; echo late > late) & sleep 300"
    result = await sandbox.execute(command, timeout=0.3)
    check("a time limit is kept", result.status == "timed_out" and time.monotonic() - began < PROMPT)
    check("what it had put out is kept", result.output == "before\n")
    await asyncio.sleep(1.5)
    check("nothing of a timed-out command goes on", "late" not in await sandbox.list_dir("."))


async def _floods(sandbox: Sandbox) -> None:
    result = await sandbox.execute("head -c 20000000 /dev/zero | tr '\\0' x")
    check("a flood is bounded", len(result.output) < MAX_OUTPUT)
    check("what is missing is counted", result.dropped_bytes >= 20_000_000 - MAX_OUTPUT)


async def _cancels(sandbox: Sandbox) -> None:
    task = asyncio.ensure_future(sandbox.execute("(sleep 1; echo late > late) & sleep 300"))
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.wait([task])
    check("a cancelled command is cancelled", task.cancelled())
    await asyncio.sleep(1.5)
    check("nothing of it goes on", "late" not in await sandbox.list_dir("."))
    check("the sandbox can still be used", (await sandbox.execute("echo on")).output == "on\n")


async def _processes(sandbox: Sandbox) -> None:
    if not isinstance(sandbox, StartsProcesses):
        return
    process = await sandbox.start("echo a; sleep 0.5; echo b; exit 7")
    check("a running process has no end", process.end() is None and not await process.wait(0.05))
    seen = await _all_of(process)
    check("its output is given once, in order", seen == "a\nb\n")
    end = process.end()
    check("its end is true and stays", end is not None and (end.exit_code, process.end()) == (7, end))
    process = await sandbox.start("(sleep 1; echo late > late) & sleep 300")
    await process.kill()
    check("a killed process has ended by a signal", _status(process.end()) == "signaled" and await process.wait(5))
    await asyncio.sleep(1.5)
    check("so has everything it started", "late" not in await sandbox.list_dir("."))


async def _all_of(process: Process) -> str:
    seen = ""
    while not await process.wait(0.05):
        seen += process.take()[0]
    return seen + process.take()[0]


async def _files(sandbox: Sandbox) -> None:
    data = b"\xef\xbb\xbfa\r\nb\x00\xff"
    await sandbox.write_file("deep/er/file", data)
    check("a file comes back byte for byte", await sandbox.read_file("deep/er/file") == data)
    check(
        "commands see what tools write",
        (await sandbox.execute("wc -c < deep/er/file")).output.strip() == str(len(data)),
    )
    await sandbox.execute("chmod 751 deep/er/file; echo by-command > made")
    check("tools see what commands write", await sandbox.read_file("made") == b"by-command\n")
    await sandbox.write_file("deep/er/file", b"new")
    check("mode bits are kept", (await sandbox.execute("stat -c %a deep/er/file")).output == "751\n")
    check("folders are listed in order", tuple(await sandbox.list_dir(".")) == ("deep/", "made"))
    await _refused("a missing file is an error", sandbox.read_file("none"), (FileNotFoundError,))
    await sandbox.execute("mkfifo pipe; mkdir folder")
    for path in ("pipe", "folder"):
        await _refused(f"a {path} is no file", sandbox.read_file(path), (OSError, SandboxError))


async def _roots(sandbox: Sandbox) -> None:
    if "rooted_files" not in sandbox.guarantees:
        return
    await sandbox.execute("ln -s /etc/passwd link; ln -s .. up; mkdir in; ln -s ../../.. in/up; ln -s loop loop")
    paths = ("/etc/passwd", "../x", "in/../../x", "link", "up/x", "in/up/etc/passwd", "loop", "", "a\0b")
    for path in paths:
        await _refused(f"reading {path!r} is refused", sandbox.read_file(path), (OSError, ValueError, SandboxError))
        await _refused(
            f"writing {path!r} is refused", sandbox.write_file(path, b"x"), (OSError, ValueError, SandboxError)
        )


async def _saves(sandbox: Sandbox) -> None:
    if not isinstance(sandbox, SavesWorkspace):
        return
    store = SnapshotStore(SessionStore(MemoryObjectStore()), "r")
    await sandbox.write_file("kept/a", b"1")
    first = await _saved(sandbox, store, None, "s1")
    check("a workspace that is saved for the first time is saved", first is not None)
    assert first is not None
    check("what a snapshot needs is in the store", first.snapshot.objects <= await store.names())
    check("one that has not changed is not saved again", await _saved(sandbox, store, first, "s2") is None)
    await sandbox.write_file("kept/b", b"2")
    second = await _saved(sandbox, store, first, "s3")
    check("one that has changed is", second is not None and second.snapshot.parent == "s1")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        await sandbox.fork(copy)
        await sandbox.write_file("kept/b", b"3")
        check("a fork holds the files of its moment", (copy / "kept" / "b").read_bytes() == b"2")


async def _saved(sandbox: SavesWorkspace, store: SnapshotStore, base: Saved | None, name: str) -> Saved | None:
    packed = await sandbox.pack(base, name)
    if packed is None:
        return None
    try:
        return Saved(store, await packed.put(store))
    finally:
        packed.close()


async def _networks(sandbox: Sandbox) -> None:
    if "no_network" not in sandbox.guarantees:
        return
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        result = await sandbox.execute(f"exec 3<>/dev/tcp/127.0.0.1/{port}", timeout=10)
    finally:
        server.close()
    check("a sandbox without a network reaches no server of this machine", not result.ok)


async def _close(sandbox: Sandbox) -> None:
    process = await sandbox.start("sleep 300") if isinstance(sandbox, StartsProcesses) else None
    await sandbox.close()
    await sandbox.close()
    check("a closed sandbox is not alive", not sandbox.alive)
    check("closing ends what runs", process is None or await process.wait(10))
    await _refused("and it runs nothing more", sandbox.execute("true"), (SandboxError,))


async def _refused(what: str, work: Awaitable[object], errors: Iterable[type[Exception]]) -> None:
    try:
        await work
    except tuple(errors):
        return
    except Exception as error:
        raise ContractBroken(f"broken promise: {what}; it raised {type(error).__name__}: {error}") from error
    raise ContractBroken(f"broken promise: {what}")


def _status(end: ExecResult | None) -> str | None:
    return None if end is None else end.status
