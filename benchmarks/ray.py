"""What the Ray edition takes: activation, throughput, a fan-out, cancelling a tree, recoveries, a killed batch.

One JSON line per figure; every ratio is of one run. `python benchmarks/ray.py [PART ...]` runs some of: activation
throughput channel fanout cancel recovery batch. A folder of its own, a local Ray of its own; nothing is left behind.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this very folder: `import ray` must not find this file

import asyncio
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import ray

from greenroom import AgentConfig, PoolConfig, RunStatus, Scripted, SubAgent, ToolRegistry, connect
from greenroom.actors.channel import Channel, Mailbox
from greenroom.actors.client import RayRuntime
from greenroom.actors.cluster import ensure_ray
from greenroom.actors.session import SessionActor
from greenroom.runtime.tools.builtin import default_tools

WARM, COLD = 200, 8
TRIES = int(os.environ.get("BENCH_TRIES", "20"))
SESSIONS = int(os.environ.get("BENCH_SESSIONS", "500"))
LINES = int(os.environ.get("BENCH_LINES", "200"))


def say(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


def spread(seconds: list[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    at = min(len(ordered) - 1, int(len(ordered) * 0.99))
    return {
        "count": len(ordered),
        "p50_ms": round(statistics.median(ordered) * 1000, 2),
        "p99_ms": round(ordered[at] * 1000, 2),
        "max_ms": round(ordered[-1] * 1000, 2),
    }


def bash(command: str) -> dict[str, Any]:
    return {"calls": [{"name": "bash", "arguments": {"command": command}}]}


def spawn(count: int) -> dict[str, Any]:
    return {"calls": [{"name": "child", "arguments": {"task": f"{number}"}} for number in range(count)]}


def tools() -> ToolRegistry:
    return ToolRegistry(default_tools("host", yield_after=None))


@asynccontextmanager
async def pool(folder: str, **config: Any) -> AsyncIterator[RayRuntime]:
    """A client of a pool of its own, which is ended with it."""
    store = f"sqlite:///{folder}/{uuid.uuid4().hex}.db"
    async with connect(storage=store, namespace=uuid.uuid4().hex, pool=PoolConfig(**config)) as runtime:
        yield runtime
        pids = (await runtime.pool_status()).pids
        await runtime.stop_pool()
        deadline = time.monotonic() + 30
        while left := [pid for pid in pids if psutil.pid_exists(pid)]:
            if time.monotonic() > deadline:
                say("left after pool stop", pids=left)
                return
            await asyncio.sleep(0.05)


async def activation(folder: str) -> None:
    agent = AgentConfig(name="bench", provider=Scripted(["ok"]))
    async with pool(folder, session_actors=2) as runtime:
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
            actor: Any = SessionActor.remote(f"cold-{number}", "bench", runtime.storage.url)
            await actor.pid.remote()
            cold.append(time.perf_counter() - began)
        ratio = statistics.median(cold) / statistics.median(to_start)
        say("warm activation: asked to run_started", **spread(to_start))
        say("warm session of one step: asked to answered", **spread(whole))
        say("cold actor: asked to first answer", **spread(cold), cold_per_warm=round(ratio, 1))


def cpu_by_kind(pids: dict[str, list[int]]) -> dict[str, float]:
    def spent(pid: int) -> float:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    return {kind: sum(map(spent, found)) for kind, found in pids.items()}


async def throughput(folder: str) -> None:
    """Three-step sessions with two sandbox calls each; where the CPU time of it goes."""
    agent = AgentConfig(
        name="bench", provider=Scripted([bash("true"), bash("true"), "ok"]), tools=tools(), sandbox="host"
    )
    for size in (4, 8):
        async with pool(folder, session_actors=size, min_idle=size) as runtime:
            async for _ in runtime.map(agent, ["warm"] * size * 2, concurrency=size * 2):
                pass
            status = await runtime.pool_status()
            own = {"client": [os.getpid()], "supervisor": [status.supervisor_pid]}
            actors: dict[str, list[int]] = {"session actors": [], "sandbox actors": []}
            for pid in status.pids:
                name = "".join(psutil.Process(pid).cmdline())
                actors["session actors" if "SessionHost" in name else "sandbox actors"].append(pid)
            before, began, count = cpu_by_kind(own | actors), time.perf_counter(), size * 25
            ends = [end async for end in runtime.map(agent, ["go"] * count, concurrency=size * 2)]
            took = time.perf_counter() - began
            after = cpu_by_kind(own | actors)
            failed = sum(end.error is not None for end in ends)
            per = {kind: round((after[kind] - before[kind]) * 1000 / count, 2) for kind in before}
            rate = round(count / took, 1)
            say(
                "sessions of 3 steps, a sandbox of their own",
                actors=size,
                per_second=rate,
                failed=failed,
                cpu_ms_per_session=per,
            )


class Echo(Mailbox):
    """An actor that does nothing but answer."""

    async def echo(self, value: int) -> int:
        return value


async def channel(_: str) -> None:
    """Calls to one actor, many under way: each directly, against the channel's mailbox."""
    remote: Any = ray.remote
    handle = remote(num_cpus=0, max_concurrency=100_000)(Echo).remote()
    for under_way in (1, 32, 128):
        rates, slots = {}, asyncio.Semaphore(under_way)

        async def one(way: Channel, number: int, slots: asyncio.Semaphore = slots) -> None:
            async with slots:
                assert await way.call("echo", number) == number

        for name, way in (("direct", Channel(handle, direct=under_way)), ("channel", Channel(handle))):
            await asyncio.gather(*(one(way, number) for number in range(under_way)))
            began, count = time.perf_counter(), 200 if under_way == 1 else 3000
            await asyncio.gather(*(one(way, number) for number in range(count)))
            rates[name] = count / (time.perf_counter() - began)
        ratio = rates["channel"] / rates["direct"]
        per_second = {name: round(rate) for name, rate in rates.items()}
        say("calls to one actor", under_way=under_way, per_second=per_second, channel_per_direct=round(ratio, 2))


async def fanout(folder: str) -> None:
    agent = AgentConfig(name="bench", provider=Scripted([bash("true"), "ok"]), tools=tools(), sandbox="host")
    async with pool(folder, session_actors=16, min_idle=16) as runtime:
        async for _ in runtime.map(agent, ["warm"] * 32, concurrency=32):
            pass

        async def memory() -> float:
            pids = (await runtime.pool_status()).pids
            return sum(psutil.Process(pid).memory_info().rss for pid in pids if psutil.pid_exists(pid)) / 2**20

        start, sizes, began, statuses = await memory(), [], time.perf_counter(), []
        async for end in runtime.map(agent, ["go"] * SESSIONS, concurrency=64):
            statuses.append(end.result.status if end.result is not None else "error")
            if len(statuses) % (SESSIONS // 5) == 0:
                sizes.append(round(await memory() / start, 3))
        took = time.perf_counter() - began
        done = sum(status is RunStatus.completed for status in statuses)
        say(
            "sessions over 16 actors",
            sessions=SESSIONS,
            completed=done,
            per_second=round(SESSIONS / took, 1),
            memory_against_start=sizes,
        )


def family() -> AgentConfig:
    """1 + 4 + 16: of each four one in bash, one waiting for the sandbox, one in a model call, one in a back-off."""

    def leaf(name: str, *script: Any) -> AgentConfig:
        return AgentConfig(name=name, provider=Scripted(script), tools=tools())

    leaves = {
        "bash": leaf("bash", bash("sleep 600"), "x"),
        "queue": leaf("queue", bash("sleep 601"), "x"),
        "model": leaf("model", {"text": "x", "delay": 600}),
        "wait": leaf("wait", {"error": {"kind": "provider_rate_limited", "retry_after": 600}}, "x"),
    }
    batch = {"calls": [{"name": name, "arguments": {"task": "t"}} for name in leaves]}
    middle = AgentConfig(
        name="middle",
        provider=Scripted([batch, "x"]),
        subagents={name: SubAgent(agent, parallel=True) for name, agent in leaves.items()},
    )
    return AgentConfig(
        name="top",
        provider=Scripted([spawn(4), "x"]),
        tools=tools(),
        sandbox="host",
        subagents={"child": SubAgent(middle, parallel=True)},
    )


async def cancel(folder: str) -> None:
    took, agent = [], family()
    async with pool(folder, session_actors=24, min_idle=4) as runtime:
        for number in range(TRIES + 1):
            session = await runtime.create_session(agent)
            run = asyncio.create_task(session.run("go"))
            while len([info for info in (await session.tree()).sessions() if info.owner is not None]) < 21:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)
            began = time.perf_counter()
            await session.cancel("stop", timeout=60)
            if number:  # the first one starts the actors
                took.append(time.perf_counter() - began)
            await run
            states = [info.state for info in (await session.tree()).sessions()]
            assert states == ["Interrupted"] * 21, states
            left = [
                p.pid
                for p in psutil.process_iter(["cmdline"])
                if (p.info["cmdline"] or [])[-2:] in (["sleep", "600"], ["sleep", "601"])
            ]
            assert not left, left
        say("cancel of a tree of 21 sessions, everything parked", **spread(took))


async def recovery(folder: str) -> None:
    registry = ToolRegistry()
    back = Path(folder) / "back"

    async def hang() -> str:
        """Says that it is there, and hangs in its first life."""
        import pathlib

        first = not pathlib.Path(f"{back}.first").exists()
        pathlib.Path(f"{back}.first").touch()
        pathlib.Path(back).write_text(str(time.time()))
        if first:
            await asyncio.sleep(600)
        return "x"

    registry.tool(effect="idempotent")(hang)
    agent = AgentConfig(
        name="bench",
        provider=Scripted([{"calls": [{"name": "hang", "arguments": {}}]}, "ok"]),
        tools=registry,
        sandbox="host",
    )
    async with pool(folder, session_actors=2, min_idle=2) as runtime:
        for what, victims in (("session actor", _session), ("Supervisor", _supervisor)):
            took = []
            for _ in range(min(TRIES, 10)):
                for path in (back, Path(f"{back}.first")):
                    path.unlink(missing_ok=True)
                session = await runtime.create_session(agent)
                run = asyncio.create_task(session.run("go"))
                while not back.exists() or not back.read_text():
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.3)
                pid = await victims(runtime, session.id)
                back.unlink()
                os.kill(pid, signal.SIGKILL)
                killed = time.time()
                if what == "Supervisor":
                    await runtime.pool_status()
                    took.append(time.time() - killed)
                    await session.cancel("enough")
                else:
                    while not back.exists() or not back.read_text():
                        await asyncio.sleep(0.001)
                    took.append(float(back.read_text()) - killed)
                await run
                await asyncio.sleep(0.5)
            say(
                f"kill -9 of a {what}: to {'serving' if what == 'Supervisor' else 'the call running'} again",
                **spread(took),
            )


async def _session(runtime: RayRuntime, session_id: str) -> int:
    actor = await runtime.supervisor().actor_of(session_id)
    assert actor is not None
    return await actor.pid()


async def _supervisor(runtime: RayRuntime, _: str) -> int:
    return (await runtime.pool_status()).supervisor_pid


async def batch(folder: str) -> None:
    """A batch of many lines, killed at half, gone on with: each line one result, no command of a finished one twice."""
    home = Path(folder) / "batch"
    effects = home / "effects"
    effects.mkdir(parents=True)
    (home / "tasks.jsonl").write_text("".join(f'{{"prompt": "task {n}"}}\n' for n in range(LINES)))
    command = f"echo x >> {effects}/$(basename $PWD)"
    (home / "script.yaml").write_text(json.dumps([bash(command), "done"]))
    line = [sys.executable, "-m", "greenroom", "batch", "run", "tasks.jsonl", "--out", "results.jsonl"]
    line += ["--model", "scripted:script.yaml", "--sandbox", "host", "--store", "sqlite:///b.db", "--json"]
    environ = os.environ | {"GREENROOM_HOME": str(home / "home")}
    environ.pop("RAY_ADDRESS", None)
    first = await asyncio.create_subprocess_exec(
        *line,
        cwd=home,
        env=environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    out = home / "results.jsonl"
    while not out.exists() or out.read_bytes().count(b"\n") < LINES // 2:
        assert first.returncode is None, "the batch ended by itself"
        await asyncio.sleep(0.01)
    first.kill()
    await first.wait()
    half, began = out.read_bytes().count(b"\n"), time.perf_counter()
    second = await asyncio.create_subprocess_exec(
        *line, cwd=home, env=environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}, stdout=subprocess.PIPE
    )
    report = json.loads((await second.communicate())[0])
    numbers = [json.loads(text)["line"] for text in out.read_text().splitlines()]
    repeats = [path.name for path in effects.iterdir() if path.read_text() != "x\n"]
    say(
        "batch killed -9 at half and gone on with",
        lines=LINES,
        at_half=half,
        results=len(numbers),
        each_once=sorted(numbers) == list(range(1, LINES + 1)),
        effects=len(list(effects.iterdir())),
        effects_twice=len(repeats),
        statuses=report["statuses"],
        found=report["found"],
        seconds=round(time.perf_counter() - began, 1),
    )


PARTS: dict[str, Callable[[str], Awaitable[None]]] = {
    "activation": activation,
    "throughput": throughput,
    "channel": channel,
    "fanout": fanout,
    "cancel": cancel,
    "recovery": recovery,
    "batch": batch,
}


async def main() -> None:
    ensure_ray("local")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GREENROOM_HOME"] = f"{folder}/home"
        for name in sys.argv[1:] or PARTS:
            await PARTS[name](folder)
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
