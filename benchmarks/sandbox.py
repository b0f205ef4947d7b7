"""Times of a sandbox, one JSON line each: opening, a command, a tool's file, a flood, snapshots; all in one run.

`per_host` is the ratio to the host kind, which starts the same processes without any isolation; then come a bare
subprocess of the same command, snapshots of 5,000 files (60 MB that do not compress) beside `tar | zstd` and `cp -a` of
the same folder, and the peak memory of this process while a command puts out 1 GB.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from greenroom import SandboxSpec
from greenroom.runtime.storage import MemoryObjectStore, SessionStore
from greenroom.runtime.storage.snapshots import Saved, SnapshotStore
from greenroom.sandbox.factory import ShippedSandboxes
from greenroom.sandbox.folder import FolderSandbox

ROUNDS = 15
COMMANDS = 100
FLOOD = 1_000_000_000
FOLDERS, FILES, FILE_BYTES = 50, 100, 12_000


async def timed(work: Callable[[], Awaitable[Any]], rounds: int) -> tuple[float, float]:
    """Median and worst, in ms."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took), max(took)


async def measured(kind: str, folder: Path) -> dict[str, tuple[float, float]]:
    spec = SandboxSpec(kind=kind, workspace=str(folder / kind))
    factory = ShippedSandboxes()
    sandbox = await factory.open(spec, "r")  # the first one tries the isolation

    async def reopen() -> None:
        await (await factory.open(spec, "r")).close()

    async def open_only() -> None:
        opened.append(await factory.open(spec, "r"))

    opened: list[Any] = []
    found = {
        "open": await timed(open_only, ROUNDS),
        "open and close": await timed(reopen, ROUNDS),
        "command": await timed(lambda: sandbox.execute("true"), COMMANDS),
        "command with output": await timed(lambda: sandbox.execute("echo hello; pwd"), COMMANDS),
        "write a file": await timed(lambda: sandbox.write_file("f", b"x" * 1000), COMMANDS),
        "read a file": await timed(lambda: sandbox.read_file("f"), COMMANDS),
    }
    for one in [*opened, sandbox]:
        await one.close()
    return found


async def bare() -> tuple[float, float]:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec("bash", "-c", "true")
        await process.wait()

    return await timed(run, COMMANDS)


async def snapshots(folder: Path) -> dict[str, float]:
    """Seconds of each."""
    chance = random.Random(1)
    source = folder / "snapshots"
    for number in range(FOLDERS):
        (source / f"d{number}").mkdir(parents=True)
        for file in range(FILES):
            (source / f"d{number}" / f"f{file}").write_bytes(chance.randbytes(FILE_BYTES))
    store = SnapshotStore(SessionStore(MemoryObjectStore()), "r")
    factory, found = ShippedSandboxes(), {}
    sandbox = await factory.open(SandboxSpec(kind="host", workspace=str(source)), "r")
    assert isinstance(sandbox, FolderSandbox)

    async def save(name: str, base: Saved | None) -> Saved | None:
        packed = await sandbox.pack(base, name)
        return None if packed is None else Saved(store, await packed.put(store))

    async def took(what: str, work: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        result = await work
        found[what] = time.perf_counter() - began
        return result

    await asyncio.sleep(0.2)  # so that the files' times tell of every change
    first = await took("save", save("s1", None))
    await took("save, nothing changed", save("s2", first))
    await sandbox.execute("echo x > d1/f1")
    await took("save, one file changed", save("s3", first))
    await took("fork", sandbox.fork(folder / "forked"))
    spec = SandboxSpec(kind="host", workspace=str(folder / "restored"))
    restored = await took("open, restored", factory.open(spec, "r", first))
    await restored.close()
    await sandbox.close()
    peers = {"tar | zstd": f"tar -C {source} -c . | zstd -q -3 > {folder}/x", "cp -a": f"cp -a {source} {folder}/cp"}
    for what, command in peers.items():
        await took(what, (await asyncio.create_subprocess_exec("bash", "-c", command)).wait())
    return found


async def flood(folder: Path) -> dict[str, Any]:
    sandbox = await ShippedSandboxes().open(SandboxSpec(kind="bubblewrap", workspace=str(folder / "flood")), "r")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    result = await sandbox.execute(f"head -c {FLOOD} /dev/zero | tr '\\0' x")
    seconds = time.perf_counter() - began
    await sandbox.close()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "what": "1 GB of output",
        "seconds": round(seconds, 2),
        "kept_bytes": len(result.output),
        "dropped_bytes": result.dropped_bytes,
        "peak_memory_grown_mib": round(grown, 1),
    }


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        host, isolated = await measured("host", folder), await measured("bubblewrap", folder)
        for what, (median, worst) in isolated.items():
            plain = host[what]
            line = {"what": what, "bubblewrap_ms": round(median, 2), "worst_ms": round(worst, 1)}
            print(
                json.dumps({**line, "host_ms": round(plain[0], 2), "per_host": round(median / plain[0], 2)}), flush=True
            )
        print(json.dumps({"what": "bare subprocess, the same command", "ms": round((await bare())[0], 2)}), flush=True)
        seconds = await snapshots(folder)
        for what in ("save", "save, nothing changed", "save, one file changed", "fork", "open, restored"):
            peer = "cp -a" if what == "fork" else "tar | zstd"
            line = {"what": f"5,000 files: {what}", "ms": round(seconds[what] * 1000), "peer": peer}
            print(json.dumps({**line, "per_peer": round(seconds[what] / seconds[peer], 2)}), flush=True)
        print(json.dumps(await flood(folder)))


if __name__ == "__main__":
    asyncio.run(main())
