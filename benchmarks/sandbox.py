"""Times of a sandbox, one JSON line each: opening, a command, a tool's file, a flood; both kinds in one run.

`per_host` is the ratio to the host kind, which starts the same processes without any isolation; the last lines are a
bare subprocess of the same command, and the peak memory of this process while a command puts out 1 GB.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from greenroom import SandboxSpec
from greenroom.sandbox.factory import ShippedSandboxes

ROUNDS = 15
COMMANDS = 100
FLOOD = 1_000_000_000


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
        print(json.dumps(await flood(folder)))


if __name__ == "__main__":
    asyncio.run(main())
