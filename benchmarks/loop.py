"""CPU and steps per second of the loop, one JSON line each, beside a bare hand-written loop in the same run.

10 to 1,000 steps, memory and SQLite, 1 and 64 sessions; the bare loop appends each step to SQLite (WAL). Every step is
one model call (scripted, no latency) and one effectful tool call.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import tempfile
import time
from typing import Any

from greenroom import AgentConfig, AgentRuntime, Limits, Scripted, ToolRegistry

STEPS = (10, 50, 200, 1000)


def agent(steps: int) -> AgentConfig:
    registry = ToolRegistry()

    async def act() -> str:
        return "done"

    registry.tool(act)
    script: list[Any] = [{"calls": [{"name": "act"}]}] * steps
    return AgentConfig(name="b", provider=Scripted([*script, "ok"]), tools=registry, limits=Limits(max_iter=steps + 1))


def report(what: str, steps: int, sessions: int, wall: float, cpu: float) -> None:
    total = steps * sessions
    line = {
        "what": what,
        "steps": steps,
        "sessions": sessions,
        "cpu_ms_per_step": round(cpu / total * 1000, 3),
        "steps_per_s": round(total / wall),
    }
    print(json.dumps(line), flush=True)


async def ours(store: str, name: str, steps: int, sessions: int) -> None:
    config = agent(steps)
    async with AgentRuntime(store) as runtime:
        made = [await runtime.create_session(config) for _ in range(sessions)]
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(session.run("go") for session in made))
        report(f"greenroom, {name}", steps, sessions, time.perf_counter() - wall, time.process_time() - cpu)


def bare(folder: str, steps: int) -> None:
    db = sqlite3.connect(os.path.join(folder, f"bare{steps}.db"), isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE steps (n INTEGER PRIMARY KEY, body TEXT)")
    wall, cpu = time.perf_counter(), time.process_time()
    for number in range(steps):
        message = {"role": "assistant", "calls": [{"name": "act", "arguments": {}}], "id": number}
        db.execute("INSERT INTO steps (body) VALUES (?)", (json.dumps(message),))
        db.execute("INSERT INTO steps (body) VALUES (?)", (json.dumps({"role": "tool", "content": "done"}),))
    report("bare loop, SQLite", steps, 1, time.perf_counter() - wall, time.process_time() - cpu)
    db.close()


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for steps in STEPS:
            bare(folder, steps)
            await ours("memory:", "memory", steps, 1)
            await ours(f"sqlite:///{folder}/one{steps}.db", "SQLite", steps, 1)
        await ours("memory:", "memory", 50, 64)
        await ours(f"sqlite:///{folder}/many.db", "SQLite", 50, 64)


if __name__ == "__main__":
    asyncio.run(main())
