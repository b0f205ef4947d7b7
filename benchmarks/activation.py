"""How long a warm activation takes against a cold actor start, in one run: one JSON line each, seconds.

A session's time from the client's call to its run_started event, over a warm pool, beside the time to start a plain
new actor of the same class and hear from it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from typing import Any

from greenroom import AgentConfig, PoolConfig, Scripted, connect
from greenroom.actors.session import SessionActor

WARM = 200
COLD = 8


def summary(name: str, seconds: list[float], **more: Any) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "what": name,
        "count": len(ordered),
        "p50_s": round(statistics.median(ordered), 5),
        "p99_s": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 5),
        **more,
    }


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{folder}/bench.db"
        agent = AgentConfig(name="bench", provider=Scripted(["ok"]))
        async with connect("local", store, "bench", PoolConfig(session_actors=2)) as runtime:
            for _ in range(10):
                await runtime.run_turn(agent, "warm up")
            to_start, whole = [], []
            for _ in range(WARM):
                session = await runtime.create_session(agent)
                began, began_at = time.perf_counter(), time.time()
                events = [event async for event in session.stream("go")]
                whole.append(time.perf_counter() - began)
                to_start.append(events[0].time - began_at)
            cold = []
            for number in range(COLD):
                began = time.perf_counter()
                actor: Any = SessionActor.remote(f"cold-{number}", "bench", store)
                await actor.pid.remote()
                cold.append(time.perf_counter() - began)
            ratio = statistics.median(cold) / statistics.median(to_start)
            print(json.dumps(summary("warm activation: asked to run_started", to_start)))
            print(json.dumps(summary("warm session of one step: asked to answered", whole)))
            print(json.dumps(summary("cold actor: asked to first answer", cold, cold_per_warm=round(ratio, 1))))


if __name__ == "__main__":
    asyncio.run(main())
