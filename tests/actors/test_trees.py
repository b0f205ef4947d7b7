"""Session trees over several processes: wide, deep, endless, on little, and what they may use together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from scenes import alive, bash, call, calls, default_registry, results, scripted, tools, until

from greenroom import AgentConfig, Limits, RunResult, RunStatus, SubAgent, ToolContext
from greenroom.actors.client import RayRuntime, RaySession
from greenroom.testing import strict_history

pytestmark = pytest.mark.ray


async def test_a_fan_of_eight_works_in_one_sandbox_at_the_same_time(
    on_ray: RayRuntime, home: Path, tmp_path: Path
) -> None:
    """Each waits until all eight are there: one after the other they never would be."""

    async def arrive(ctx: ToolContext) -> int:
        (tmp_path / ctx.session_id).touch()
        while len(list(tmp_path.glob("*~*"))) < 8:
            await asyncio.sleep(0.02)
        return os.getpid()

    own = tools(arrive)
    child = scripted(
        calls(call("arrive")),
        bash("echo x >> all; wc -l < all"),
        "here",
        tools=[*default_registry(), *own],
        sandbox=None,
    )
    spawns = calls(*(call("helper", task=f"{n}") for n in range(8)))
    agent = scripted(spawns, bash("wc -l < all"), "done", subagents={"helper": SubAgent(child, parallel=True)})
    session = await on_ray.create_session(agent)
    assert (await asyncio.wait_for(session.run("go"), 120)).text == "done"
    tree = await session.tree()
    assert [info.state for info in tree.sessions()] == ["Success"] * 9
    *ends, seen = results(await session.transcript())
    assert [json.loads(block.text)["status"] for block in ends] == ["completed"] * 8
    assert json.loads(seen.text)["output"] == "8\n"
    below = [results(await (await on_ray.open(info.session_id)).transcript()) for info in list(tree.sessions())[1:]]
    assert len({pid.text for pid, _ in below}) == 8, "each in a process of its own"
    assert sorted(json.loads(line.text)["output"] for _, line in below) == [f"{n + 1}\n" for n in range(8)]
    deadline = time.monotonic() + 20
    while (await on_ray.pool_status()).session_actors > 2:
        assert time.monotonic() < deadline, "the actors beyond the pool's size are still there"
        await asyncio.sleep(0.1)


async def test_fifty_spawns_in_a_row_on_two_actors(on_ray: RayRuntime) -> None:
    child = scripted("child says", name="child", sandbox=None, tools=())
    batch = calls(*(call("helper", task=f"{n}") for n in range(50)))
    session = await on_ray.create_session(scripted(batch, "done", subagents={"helper": child}, sandbox=None, tools=()))
    assert (await asyncio.wait_for(session.run("go"), 120)).status is RunStatus.completed
    tree = await session.tree()
    assert [info.state for info in tree.sessions()] == ["Success"] * 51
    strict_history((await session.transcript()).messages)


async def test_a_model_that_spawns_itself_is_stopped_by_depth_and_by_count(on_ray: RayRuntime) -> None:
    batch = calls(*(call("again", task=f"{n}") for n in range(3)))
    limits = Limits(max_depth=2, max_children=2, max_consecutive_fail=9)
    agent = scripted(batch, "ok", subagents={"again": "self"}, limits=limits, sandbox=None, tools=())
    session = await on_ray.create_session(agent)
    assert (await asyncio.wait_for(session.run("go"), 120)).status is RunStatus.completed
    tree = await session.tree()
    assert len(list(tree.sessions())) == 1 + 2 + 4
    refused = [block.text for block in results(await session.transcript()) if "max_children" in block.text]
    assert len(refused) == 1
    (deepest, *_) = tree.children[0].children
    texts = [block.text for block in results(await (await on_ray.open(deepest.info.session_id)).transcript())]
    assert all("max_depth" in text for text in texts)


async def test_children_in_actors_of_their_own_are_charged_to_the_root(on_ray: RayRuntime) -> None:
    child = scripted("word " * 100, name="child", sandbox=None, tools=())  # a scripted model counts its words
    batch = calls(*(call("helper", task=f"{n}") for n in range(6)))
    limits = Limits(max_tokens_total=350)
    agent = scripted(batch, "done", subagents={"helper": child}, limits=limits, sandbox=None, tools=())
    session = await on_ray.create_session(agent)
    await asyncio.wait_for(session.run("go"), 120)
    tree = await session.tree()
    used = [info.usage.total for info in tree.sessions()]
    assert 350 <= sum(used) < 350 + max(used)
    told = [json.loads(block.text)["status"] for block in results(await session.transcript())]
    assert told[0] == "completed"
    assert told[-1] == "exhausted"


async def test_the_time_left_to_a_parent_bounds_a_child_elsewhere(on_ray: RayRuntime) -> None:
    child = scripted({"text": "late", "delay": 600}, name="child", sandbox=None, tools=())
    agent = scripted(
        calls(call("helper", task="t")),
        "never",
        subagents={"helper": child},
        limits=Limits(max_seconds=2),
        sandbox=None,
        tools=(),
    )
    session = await on_ray.create_session(agent)
    result = await asyncio.wait_for(session.run("go"), 60)
    assert result.status is RunStatus.cancelled
    assert [info.state for info in (await session.tree()).sessions()] == ["Interrupted"] * 2


ONE_CPU = """
import asyncio, sys
import ray
from greenroom import AgentConfig, PoolConfig, Scripted, connect

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 1024 * 1024)
child = AgentConfig(name="child", provider=Scripted(["child says"]))
middle = AgentConfig(
    name="middle",
    provider=Scripted([{"calls": [{"name": "go", "arguments": {"task": "t"}}]}, "middle says"]),
    subagents={"go": child},
)
parent = AgentConfig(
    name="parent",
    provider=Scripted([{"calls": [{"name": "go", "arguments": {"task": "t"}}]}, "parent says"]),
    subagents={"go": middle},
)


async def main() -> None:
    async with connect(storage=sys.argv[1], namespace="one", pool=PoolConfig(session_actors=2)) as runtime:
        prompts = ["a", "b", "c", "d"]
        ends = [(r.index, r.result.text) async for r in runtime.map(parent, prompts, concurrency=4)]
        print(sorted(ends))
        await runtime.stop_pool()


asyncio.run(main())
"""


def test_more_parents_than_places_finish_on_one_cpu(tmp_path: Path) -> None:
    """Each parent waits for a child that waits for a child: whoever is waited for never waits for a place."""
    script = tmp_path / "one_cpu.py"
    script.write_text(ONE_CPU, encoding="utf-8")
    environ = os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environ.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(script), f"sqlite:///{tmp_path}/one.db"],
        capture_output=True,
        text=True,
        timeout=180,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith(f"{[(n, 'parent says') for n in range(4)]}")


def family(marker: str) -> AgentConfig:
    """1 + 4 + 16; of each four leaves one is in bash, one waits for the sandbox, one for a model, one in a back-off."""

    def leaf(name: str, *script: Any) -> AgentConfig:
        return scripted(*script, name=name, sandbox=None)

    leaves = {
        "command": leaf("command", bash(f"sleep {marker}"), "x"),
        "queue": leaf("queue", bash(f"sleep {marker}"), "x"),
        "model": leaf("model", {"text": "x", "delay": 600}),
        "wait": leaf("wait", {"error": {"kind": "provider_rate_limited", "retry_after": 600}}, "x"),
    }
    middle = scripted(
        calls(*(call(name, task="t") for name in leaves)),
        "x",
        name="middle",
        sandbox=None,
        subagents={name: SubAgent(agent, parallel=True) for name, agent in leaves.items()},
    )
    return scripted(
        calls(*(call("middle", task=str(n)) for n in range(4))),
        "x",
        subagents={"middle": SubAgent(middle, parallel=True)},
    )


async def whole_family(runtime: RayRuntime, marker: str) -> tuple[RaySession, asyncio.Task[RunResult]]:
    """All 21 sessions under way."""
    session = await runtime.create_session(family(marker))
    run = asyncio.create_task(session.run("go"))
    async with asyncio.timeout(120):
        while sum(info.owner is not None for info in (await session.tree()).sessions()) < 21:
            await asyncio.sleep(0.1)
    await until(lambda: alive(f"sleep\0{marker}"), "a command runs")
    return session, run


async def assert_parked(runtime: RayRuntime, session: RaySession, marker: str) -> None:
    infos = (await session.tree()).sessions()
    assert [info.state for info in infos] == ["Interrupted"] * 21
    assert alive(f"sleep\0{marker}") == []
    for info in infos:
        strict_history((await (await runtime.open(info.session_id)).transcript()).messages)


async def test_a_cancelled_tree_of_three_levels_is_parked_whole(on_ray: RayRuntime) -> None:
    marker = f"{600 + uuid.uuid4().int % 10**9}"
    session, run = await whole_family(on_ray, marker)
    began = time.monotonic()
    result = await session.cancel("enough", timeout=60)
    took = time.monotonic() - began
    assert result is not None
    assert result.status is RunStatus.cancelled
    assert (await run).status is RunStatus.cancelled
    await assert_parked(on_ray, session, marker)  # the answer is the acknowledgement of all of them
    print(f"\ncancel of 21 sessions: {took * 1000:.0f} ms")


async def test_a_cancelled_tree_is_parked_whole_though_its_owners_and_the_supervisor_die(on_ray: RayRuntime) -> None:
    marker = f"{600 + uuid.uuid4().int % 10**9}"
    session, run = await whole_family(on_ray, marker)
    children = (await session.status()).children.values()
    victims = []
    for sid in [session.id, *list(children)[:2]]:
        actor = await on_ray.supervisor().actor_of(sid)
        assert actor is not None
        victims.append(await actor.pid())
    victims.append((await on_ray.pool_status()).supervisor_pid)
    cancelling = asyncio.create_task(session.cancel("enough", timeout=60))
    await asyncio.sleep(0.02)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    result = await asyncio.wait_for(cancelling, 90)
    assert result is not None
    assert result.status is RunStatus.cancelled
    assert (await asyncio.wait_for(run, 90)).status is RunStatus.cancelled
    await assert_parked(on_ray, session, marker)


async def test_nothing_begins_below_a_session_that_was_cancelled_meanwhile(on_ray: RayRuntime) -> None:
    """The parent is cut off while it starts its children: those that come too late park, and run nothing."""
    marker = f"{600 + uuid.uuid4().int % 10**9}"
    child = scripted(bash(f"sleep {marker}"), "x", name="child", sandbox=None)
    agent = scripted(
        calls(*(call("child", task=str(n)) for n in range(8))), "x", subagents={"child": SubAgent(child, parallel=True)}
    )
    for pause in (0.0, 0.02, 0.05, 0.1):
        session = await on_ray.create_session(agent)
        run = asyncio.create_task(session.run("go"))
        while (await session.status()).owner is None:
            await asyncio.sleep(0.001)
        await asyncio.sleep(pause)
        await session.cancel("enough", timeout=60)
        assert (await run).status is RunStatus.cancelled
        await asyncio.sleep(0.5)
        states = {info.state for info in (await session.tree()).sessions()}
        assert states <= {"Interrupted", "Ready"}, "a child may be there that never began"
        assert alive(f"sleep\0{marker}") == []
