"""What saving a session costs, one JSON line each: requests, bytes and time of 300 and 5,000 steps of 2 KB.

Also what reading it back takes, and a whole-snapshot store through boto3 beside it, in the same run on the same server.

    python benchmarks/storage.py [--steps N] [--s3 URL]     # --s3 adds the given s3:// store and the boto3 rival
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

from greenroom import AgentConfig, AgentRuntime, Limits, Scripted, Storage, ToolRegistry
from greenroom.runtime.ports import ObjectStore

KILOBYTES = 2


class Measured:
    """Counts the requests and bytes that go to a store, and the bytes of each head write."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.requests: Counter[str] = Counter()
        self.written: list[int] = []

    async def get(self, key: str) -> tuple[bytes, str] | None:
        self.requests["get"] += 1
        return await self.inner.get(key)

    async def put_if_absent(self, key: str, body: bytes) -> str:
        self.requests["put"] += 1
        self.written.append(len(body))
        return await self.inner.put_if_absent(key, body)

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        self.requests["put"] += 1
        self.written.append(len(body))
        return await self.inner.put_if_match(key, body, etag)

    async def delete(self, key: str) -> None:
        self.requests["delete"] += 1
        await self.inner.delete(key)

    async def delete_many(self, keys: Iterable[str]) -> None:
        self.requests["delete"] += 1
        await self.inner.delete_many(keys)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        self.requests["list"] += 1
        async for key in self.inner.list(prefix):
            yield key

    async def probe(self) -> None:
        await self.inner.probe()

    async def close(self) -> None:
        await self.inner.close()


def agent(steps: int) -> AgentConfig:
    registry = ToolRegistry()
    registry.tool(lambda: "z" * (KILOBYTES * 1024), name="read", description="Gives 2 KB.", effect="read_only")
    script: list[Any] = [{"calls": [{"name": "read"}]}] * steps
    return AgentConfig(
        name="bench", provider=Scripted([*script, "done"]), tools=registry, limits=Limits(max_iter=steps + 1)
    )


async def ours(name: str, objects: ObjectStore, steps: int) -> None:
    store = Measured(objects)
    config = agent(steps)
    async with AgentRuntime(Storage.over(store)) as runtime:
        session = await runtime.create_session(config)
        store.requests.clear()
        store.written.clear()
        began, cpu = time.perf_counter(), time.process_time()
        await session.run("go")
        took, used = time.perf_counter() - began, time.process_time() - cpu
    written, puts, requests = sum(store.written), store.requests["put"], dict(store.requests)
    early, late = store.written[10 : len(store.written) // 2], store.written[len(store.written) // 2 :]
    store.requests.clear()
    async with AgentRuntime(Storage.over(store)) as runtime:
        await runtime.handle(session.id).transcript()
    line = {
        "what": f"{steps} steps of {KILOBYTES} KB on {name}",
        "puts_per_step": round(puts / steps, 2),
        "requests": requests,
        "megabytes": round(written / 1e6, 2),
        "bytes_late_per_early": round((sum(late) / len(late)) / (sum(early) / len(early)), 2),
        "seconds": round(took, 2),
        "cpu_ms_per_step": round(used / steps * 1000, 3),
        "gets_to_read_it_back": store.requests["get"],
    }
    print(json.dumps(line), flush=True)


def rival(url: str, steps: int) -> None:
    """The usual way: the whole history as one object, written again at every step, through boto3."""
    import boto3

    from greenroom.runtime.storage.s3 import S3ObjectStore

    store = S3ObjectStore.from_url(url)
    client = boto3.client("s3", endpoint_url=store.endpoint, region_name=store.region or "us-east-1")
    history: list[dict[str, str]] = []
    written = 0
    began, cpu = time.perf_counter(), time.process_time()
    for number in range(steps):
        history.append({"role": "tool", "content": "z" * (KILOBYTES * 1024)})
        body = json.dumps({"step": number, "messages": history}).encode()
        written += len(body)
        client.put_object(Bucket=store.bucket, Key=f"{store.prefix}rival", Body=body)
    line = {
        "what": f"{steps} steps of {KILOBYTES} KB as whole snapshots through boto3",
        "puts_per_step": 1.0,
        "megabytes": round(written / 1e6, 2),
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_ms_per_step": round((time.process_time() - cpu) / steps * 1000, 3),
    }
    print(json.dumps(line), flush=True)


async def main(steps: list[int], s3: str | None) -> None:
    from greenroom.runtime.storage import MemoryObjectStore, SqliteObjectStore
    from greenroom.runtime.storage.s3 import S3ObjectStore

    for count in steps:
        await ours("memory", MemoryObjectStore(), count)
        with tempfile.TemporaryDirectory() as folder:
            await ours("SQLite", SqliteObjectStore(os.path.join(folder, "bench.db")), count)
    if s3 is not None:
        await ours("S3", S3ObjectStore.from_url(s3), steps[0])
        await asyncio.to_thread(rival, s3, steps[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[300, 5000])
    parser.add_argument("--s3", metavar="URL")
    given = parser.parse_args()
    asyncio.run(main(given.steps, given.s3))
