"""CPU and steps per second of the loop, one JSON line each, beside a bare hand-written loop in the same run.

10 to 1,000 steps over no store, memory and SQLite, by 1 and by 64 sessions; the bare loop appends what each step says
to SQLite (WAL, synchronous=FULL). Every step is one model call (scripted, no latency) and one effectful tool call. Each
line is the best of several rounds, taken in turn so that a slow moment of the machine meets all of them; `per_bare` is
the ratio to the bare loop of the same length. The last line says what 200 steps of 2 KB leave in a store.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterable
from typing import Any

from greenroom import AgentConfig, AgentRuntime, Limits, Message, Scripted, Storage, ToolRegistry
from greenroom.runtime.storage import Head, MemoryObjectStore, Segment
from greenroom.runtime.storage.head import SegmentRef

STEPS = (10, 50, 200, 1000)
ROUNDS = 5


class NoStore:
    """Both ports, keeping the last head and nothing else: what is left is the loop itself."""

    def __init__(self) -> None:
        self._heads: dict[str, Head] = {}

    async def read(self, sid: str, refs: Iterable[SegmentRef] | None = None) -> Any:
        if refs is not None:
            return ()
        head = self._heads.get(sid)
        return None if head is None else (head, head.write_id)

    async def create(self, sid: str, head: Head) -> str:
        self._heads[sid] = head
        return head.write_id

    async def save(self, sid: str, head: Head, etag: str) -> str:
        self._heads[sid] = head
        return head.write_id

    async def append(self, sid: str, segment: Segment) -> SegmentRef:
        return SegmentRef(name=segment.name, count=len(segment.messages), size=0, hash="")


def agent(steps: int, result: str = "done") -> AgentConfig:
    registry = ToolRegistry()

    async def act() -> str:
        return result

    registry.tool(act)
    script: list[Any] = [{"calls": [{"name": "act"}]}] * steps
    return AgentConfig(name="b", provider=Scripted([*script, "ok"]), tools=registry, limits=Limits(max_iter=steps + 1))


async def ours(store: str | Storage, steps: int, sessions: int) -> tuple[float, float]:
    """(wall, CPU) in seconds of all steps together."""
    config = agent(steps)
    async with AgentRuntime(store) as runtime:
        made = [await runtime.create_session(config) for _ in range(sessions)]
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(session.run("go") for session in made))
        return time.perf_counter() - wall, time.process_time() - cpu


def bare(path: str, steps: int) -> tuple[float, float]:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE steps (n INTEGER PRIMARY KEY, body TEXT)")
    wall, cpu = time.perf_counter(), time.process_time()
    for number in range(steps):
        message = {"role": "assistant", "calls": [{"name": "act", "arguments": {}}], "id": number}
        db.execute("INSERT INTO steps (body) VALUES (?)", (json.dumps(message),))
        db.execute("INSERT INTO steps (body) VALUES (?)", (json.dumps({"role": "tool", "content": "done"}),))
    took = time.perf_counter() - wall, time.process_time() - cpu
    db.close()
    return took


async def measured(steps: int, sessions: int, rounds: int) -> None:
    best: dict[str, tuple[float, float]] = {}

    def keep(what: str, took: tuple[float, float]) -> None:
        wall, cpu = best.get(what, took)
        best[what] = min(wall, took[0]), min(cpu, took[1])

    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            keep("bare loop, SQLite", bare(os.path.join(folder, "bare.db"), steps))
            keep("greenroom, no store", await ours(Storage.shared(NoStore()), steps, sessions))
            keep("greenroom, memory", await ours("memory:", steps, sessions))
            keep("greenroom, SQLite", await ours(f"sqlite:///{folder}/ours.db", steps, sessions))
    _, bare_cpu = best["bare loop, SQLite"]
    for what, (wall, cpu) in best.items():
        total = steps if what.startswith("bare") else steps * sessions
        line = {
            "what": what,
            "steps": steps,
            "sessions": 1 if what.startswith("bare") else sessions,
            "cpu_ms_per_step": round(cpu / total * 1000, 3),
            "per_bare": round(cpu / total / (bare_cpu / steps), 2),
            "steps_per_s": round(total / wall),
        }
        print(json.dumps(line), flush=True)


async def stored() -> None:
    """What lies in the store after 200 steps whose results are 2 KB each, all different."""
    objects = MemoryObjectStore()
    registry = ToolRegistry()

    async def act(number: int) -> str:
        return f"{number:04}" * 512

    registry.tool(act)
    script: list[Any] = [{"calls": [{"name": "act", "arguments": {"number": n}}]} for n in range(200)]
    config = AgentConfig(name="b", provider=Scripted([*script, "ok"]), tools=registry, limits=Limits(max_iter=201))
    async with AgentRuntime(Storage.over(objects)) as runtime:
        session = await runtime.create_session(config)
        await session.run(Message.user("go").text)
    found = [await objects.get(key) async for key in objects.list("tree/")]
    sizes = [len(body[0]) for body in found if body is not None]
    line = {"what": "stored after 200 steps of 2 KB", "objects": len(sizes), "megabytes": round(sum(sizes) / 1e6, 3)}
    print(json.dumps(line))


async def main() -> None:
    for steps in STEPS:
        await measured(steps, 1, ROUNDS if steps < 1000 else 3)
    await measured(50, 64, 2)
    await stored()


if __name__ == "__main__":
    asyncio.run(main())
