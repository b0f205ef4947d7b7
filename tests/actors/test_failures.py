"""The failure table: each row really kills or stops processes, and prints how long it took to be running again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from scenes import alive, bash, call, calls, results, scripted, tools, until

from greenroom import ConfigError, PoolConfig, PoolMismatch, RunFailed, RunStatus, SubAgent, connect
from greenroom.actors.client import RayRuntime
from greenroom.actors.wire import Hello
from greenroom.runtime.journal import OUTCOME_UNKNOWN
from greenroom.testing import strict_history

pytestmark = pytest.mark.ray


@pytest.fixture
def marker() -> str:
    return f"{600 + uuid.uuid4().int % 10**9}"


@pytest.fixture
async def own_pool(ray_cluster: None, tmp_path: Path, home: Path) -> AsyncIterator[Callable[..., Any]]:
    """Opens clients of a pool of the test's own, which ends with it."""
    namespace = f"own-{uuid.uuid4().hex[:8]}"
    opened: list[RayRuntime] = []

    async def open_one(**config: Any) -> RayRuntime:
        pool = PoolConfig(**{"session_actors": 2, **config}) if config or not opened else None
        runtime = connect(storage=f"sqlite:///{tmp_path}/own.db", namespace=namespace, pool=pool)
        await runtime.__aenter__()
        opened.append(runtime)
        return runtime

    yield open_one
    for runtime in opened[1:]:
        await runtime.close()
    try:
        await opened[0].stop_pool()
    except Exception:
        pass  # some tests end the pool themselves
    await opened[0].close()


def told(what: str, began: float) -> None:
    """With -s: the time to running again."""
    print(f"\n{json.dumps({'failure': what, 'running_again_ms': round((time.monotonic() - began) * 1000)})}")


async def actor_pid(runtime: RayRuntime, session_id: str) -> int:
    actor = await runtime.supervisor().actor_of(session_id)
    assert actor is not None
    return await actor.pid()


async def sandbox_pid(runtime: RayRuntime, root: str) -> int:
    info = await runtime.supervisor().find_sandbox(root)
    assert info is not None
    return int(await info.actor.pid.remote())


async def kill_supervisor(runtime: RayRuntime) -> float:
    """Kills it, and returns once another one has come up."""
    pid = (await runtime.pool_status()).supervisor_pid
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    while (await runtime.pool_status()).supervisor_pid == pid:
        await asyncio.sleep(0.01)
    return began


SLOW = "sleep 1.5; echo x >> marker; echo done # {}"


async def test_the_supervisor_dies_and_nothing_is_lost(own_pool: Callable[..., Any], home: Path, marker: str) -> None:
    """What runs goes on in its actor, what waits is started again by whoever waits for it, agents come back."""

    async def own_tool() -> str:
        return "of a script"

    runtime = await own_pool(session_actors=1)
    slow = f"sleep 8; echo x >> marker; echo done # {marker}"
    running = await runtime.create_session(scripted(bash(slow), "finished"))
    waiting = await runtime.create_session(
        scripted(calls(call("own_tool")), "waited", sandbox=None, tools=tools(own_tool))
    )
    runs = [asyncio.create_task(session.run("go")) for session in (running, waiting)]
    await until(lambda: alive(f"# {marker}"), "the command runs")
    owner = await actor_pid(runtime, running.id)
    told("Supervisor", await kill_supervisor(runtime))
    status = await runtime.pool_status()
    assert status.busy == (running.id,)
    assert await actor_pid(runtime, running.id) == owner, "the very actor goes on"
    first, second = await asyncio.wait_for(asyncio.gather(*runs), 60)
    assert (first.text, second.text) == ("finished", "waited")
    assert (home / "workspaces" / running.id / "marker").read_text() == "x\n"
    assert (await running.status()).epoch == 1, "nobody took it over"


async def test_supervisor_and_session_die_together(own_pool: Callable[..., Any], home: Path, marker: str) -> None:
    async def own_tool() -> str:
        return "of a script"

    runtime = await own_pool()
    script = (bash(SLOW.format(marker)), calls(call("own_tool")), "finished")
    session = await runtime.create_session(scripted(*script, tools=[*scripted("x").registry, *tools(own_tool)]))
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"# {marker}"), "the command runs")
    victim = await actor_pid(runtime, session.id)
    os.kill((await runtime.pool_status()).supervisor_pid, signal.SIGKILL)
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    result = await asyncio.wait_for(run, 90)
    told("Supervisor and session", began)
    assert (result.status, result.text) == (RunStatus.completed, "finished")
    assert (home / "workspaces" / session.id / "marker").read_text() == "x\n", "the sandbox went on, nothing ran twice"
    blocks = results(await session.transcript())
    assert json.loads(blocks[0].text) == {"status": "completed", "exit_code": 0, "output": "done\n"}
    assert blocks[1].text == "of a script"
    strict_history((await session.transcript()).messages)


async def test_supervisor_and_a_whole_tree_die_together(own_pool: Callable[..., Any], marker: str) -> None:
    """Two places, two trees of depth three; the Supervisor and one session are killed: all finish, nothing is left."""
    runtime = await own_pool()
    deep = scripted(bash(f"sleep 8 # {marker}"), "deep", name="deep", sandbox=None)
    middle = scripted(calls(call("go", task="t")), "middle", name="middle", sandbox=None, subagents={"go": deep})
    agent = scripted(calls(call("go", task="t")), "top", subagents={"go": SubAgent(middle)})
    sessions = [await runtime.create_session(agent) for _ in range(2)]
    runs = [asyncio.create_task(session.run("go")) for session in sessions]
    await until(lambda: len(alive(f"# {marker}")) >= 2, "both deepest commands run", 60)
    victim = await actor_pid(runtime, sessions[0].id)
    os.kill((await runtime.pool_status()).supervisor_pid, signal.SIGKILL)
    os.kill(victim, signal.SIGKILL)
    ends = await asyncio.wait_for(asyncio.gather(*runs), 120)
    assert [end.text for end in ends] == ["top", "top"]
    for session in sessions:
        assert [info.state for info in (await session.tree()).sessions()] == ["Success"] * 3
    pids = [*(await runtime.pool_status()).pids, (await runtime.pool_status()).supervisor_pid]
    await runtime.stop_pool()
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "nothing is left of the pool")


async def test_session_and_sandbox_die_together(own_pool: Callable[..., Any], marker: str) -> None:
    runtime = await own_pool()
    session = await runtime.create_session(scripted(bash(f"sleep {marker}"), bash("echo again"), "finished"))
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"sleep\0{marker}"), "the command runs")
    victims = [await actor_pid(runtime, session.id), await sandbox_pid(runtime, session.id)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    result = await asyncio.wait_for(run, 60)
    told("session and sandbox", began)
    assert result.text == "finished"
    lost, again = results(await session.transcript())
    assert lost.text == OUTCOME_UNKNOWN
    assert json.loads(again.text)["output"] == "again\n"
    await until(lambda: alive(f"sleep\0{marker}") == [], "nothing is left of the lost command")


CLIENT = """
import asyncio, sys
from greenroom import AgentConfig, Scripted, ToolRegistry, connect, register_default_tools

registry = ToolRegistry()
register_default_tools(registry, trust="host", yield_after=None)
script = [{"calls": [{"name": "bash", "arguments": {"command": open(sys.argv[3]).read()}}]}, "finished"]
agent = AgentConfig(name="a", provider=Scripted(script), tools=registry, sandbox="host")


async def main() -> None:
    async with connect(address=sys.argv[4], storage=sys.argv[1], namespace=sys.argv[2]) as runtime:
        session = await runtime.create_session(agent, "of-a-client")
        await session.run("go", request_id="its-request")


asyncio.run(main())
"""


async def test_a_client_dies_and_its_run_does_not(
    own_pool: Callable[..., Any], tmp_path: Path, home: Path, marker: str
) -> None:
    runtime = await own_pool()
    script = tmp_path / "client.py"
    script.write_text(CLIENT, encoding="utf-8")
    (tmp_path / "command").write_text(SLOW.format(marker), encoding="utf-8")
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, str(script), runtime.storage.url, runtime._namespace, f"{tmp_path}/command", address]
    client = subprocess.Popen(  # noqa: ASYNC220  # it starts, and is not waited for
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    await until(lambda: alive(f"echo done # {marker}"), "its command runs", 60)
    client.send_signal(signal.SIGKILL)
    client.wait()
    session = await runtime.open("of-a-client")
    result = await asyncio.wait_for(session.resume(), 60)
    assert result is not None
    assert result.text == "finished"
    again = await session.run("go", request_id="its-request")
    assert again == result, "its request is answered, not run again"
    assert (home / "workspaces" / "of-a-client" / "marker").read_text() == "x\n"


async def test_an_actor_that_was_stopped_for_long_is_taken_over_and_repeats_nothing(
    own_pool: Callable[..., Any], home: Path, tmp_path: Path, marker: str
) -> None:
    """It wakes up after the take-over: the marker has one line."""
    runtime = await own_pool(stuck_after=5.0)
    session = await runtime.create_session(scripted(bash(SLOW.format(marker)), bash("echo y >> marker"), "finished"))
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"# {marker}"), "the command runs")
    victim = await actor_pid(runtime, session.id)
    os.kill(victim, signal.SIGSTOP)
    began = time.monotonic()
    try:
        result = await asyncio.wait_for(run, 90)
        told("a stopped owner, after stuck_after of 5 s", began)
    finally:
        try:
            os.kill(victim, signal.SIGCONT)
        except ProcessLookupError:
            pass
    assert result.text == "finished"
    assert time.monotonic() - began > 4, "not before it has been silent for long"
    await asyncio.sleep(1.0)
    assert (home / "workspaces" / session.id / "marker").read_text() == "x\ny\n"
    assert (await session.status()).epoch == 2


async def test_an_actor_whose_loop_is_blocked_is_taken_over(own_pool: Callable[..., Any], tmp_path: Path) -> None:
    """It answers on its control thread all the time: a ping would say that it is well."""
    runtime = await own_pool(stuck_after=5.0)

    async def blocks() -> str:
        (tmp_path / "blocked").write_text(
            "x" + (tmp_path / "blocked").read_text() if (tmp_path / "blocked").exists() else "x"
        )
        time.sleep(120)
        return "late"

    session = await runtime.create_session(
        scripted(calls(call("blocks")), "finished", sandbox=None, tools=tools(blocks))
    )
    began = time.monotonic()
    result = await asyncio.wait_for(session.run("go"), 90)
    told("a blocked run loop, after stuck_after of 5 s", began)
    assert result.text == "finished"
    (block,) = results(await session.transcript())
    assert block.text == OUTCOME_UNKNOWN
    assert (tmp_path / "blocked").read_text() == "x"


async def test_a_pool_that_nobody_wants_ends_by_itself(own_pool: Callable[..., Any]) -> None:
    runtime = await own_pool(idle_shutdown=1.0)
    session = await runtime.create_session(scripted(bash("echo hi"), "done"))
    await session.run("go")
    status = await runtime.pool_status()
    pids = [*status.pids, status.supervisor_pid]
    await runtime.close()
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "nothing is left of the pool")
    again = connect(storage=runtime.storage.url, namespace=runtime._namespace)
    async with again:
        assert (await (await again.open(session.id, scripted("x", "x", "later"))).run("go")).text == "later"
        await again.stop_pool()


async def test_a_pool_grows_and_shrinks(own_pool: Callable[..., Any]) -> None:
    runtime = await own_pool(session_actors=4, min_idle=1, idle_after=6.0)
    assert (await runtime.pool_status()).session_actors == 1
    agent = scripted({"text": "x", "delay": 1.0}, sandbox=None, tools=())
    ends = [end async for end in runtime.map(agent, ["a", "b", "c", "d", "e", "f"], concurrency=6)]
    assert all(end.error is None for end in ends)
    grown = (await runtime.pool_status()).session_actors
    assert grown == 4
    deadline = time.monotonic() + 30
    while (await runtime.pool_status()).session_actors > 1:
        assert time.monotonic() < deadline, await runtime.pool_status()
        await asyncio.sleep(0.2)


async def test_stopping_a_pool_parks_what_runs(own_pool: Callable[..., Any], marker: str) -> None:
    runtime = await own_pool()
    session = await runtime.create_session(scripted(bash(f"sleep {marker}"), "resumed"))
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"sleep\0{marker}"), "the command runs")
    await runtime.stop_pool()
    await asyncio.wait([run])
    await until(lambda: alive(f"sleep\0{marker}") == [], "the command is gone")
    assert (await session.status()).state == "Interrupted"
    async with connect(storage=runtime.storage.url, namespace=runtime._namespace) as again:
        resumed = await (await again.open(session.id)).resume()
        assert resumed is not None
        assert resumed.text == "resumed"
        await again.stop_pool()


async def test_another_pool_or_other_code_is_refused(own_pool: Callable[..., Any]) -> None:
    runtime = await own_pool()
    with pytest.raises(PoolMismatch, match="session_actors"):
        async with connect(
            storage=runtime.storage.url, namespace=runtime._namespace, pool=PoolConfig(session_actors=9)
        ):
            pass
    other = Hello(**{**{n: getattr(Hello.of(runtime.storage.url), n) for n in Hello.__slots__}, "code": "other"})
    with pytest.raises(PoolMismatch, match="code 'other' here"):
        await runtime.supervisor().hello(other, None)
    rows: list[dict[str, Any]] = [{"session_actors": 0}, {"min_idle": -1}, {"stuck_after": 1.0}, {"idle_shutdown": -1}]
    for wrong in rows:
        with pytest.raises(ConfigError):
            PoolConfig(**wrong)


async def test_a_provider_that_is_away_is_a_failed_run(own_pool: Callable[..., Any]) -> None:
    runtime = await own_pool()
    agent = scripted({"error": {"kind": "provider_permanent"}}, "there again", sandbox=None, tools=())
    session = await runtime.create_session(agent)
    with pytest.raises(RunFailed) as failed:
        await session.run("go")
    assert not failed.value.resumable
    assert (await session.run("again")).text == "there again"
