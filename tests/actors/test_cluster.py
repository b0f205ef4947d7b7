"""What only Ray can break: actors that are really killed, a tree over several processes, more sessions than actors."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
import uuid
from pathlib import Path

import pytest
import ray
from scenes import alive, bash, call, calls, default_registry, results, scripted, until

from greenroom import (
    AgentUnavailable,
    ConfigError,
    Interrupt,
    InterruptPending,
    PoolConfig,
    PoolMismatch,
    RequestConflict,
    RunStatus,
    SandboxSpec,
    SessionNotFound,
    SubAgent,
    ToolContext,
    UsageError,
    connect,
)
from greenroom.actors.client import RayRuntime
from greenroom.runtime.journal import OUTCOME_UNKNOWN
from greenroom.testing import strict_history

pytestmark = pytest.mark.ray


@pytest.fixture
def marker() -> str:
    return f"{600 + uuid.uuid4().int % 10**9}"


async def pid_of(runtime: RayRuntime, session_id: str) -> int:
    """The process that runs the session."""
    actor = await runtime.supervisor().actor_of(session_id)
    assert actor is not None
    return await actor.pid()


async def test_a_killed_session_actor_is_taken_over_and_its_command_ran_once(
    on_ray: RayRuntime, home: Path, marker: str
) -> None:
    session = await on_ray.create_session(
        scripted(bash(f"sleep 1; echo x >> marker; echo done # {marker}"), "finished")
    )
    run = asyncio.create_task(session.run("go"))
    workspace = home / "workspaces" / session.id
    await until(lambda: alive(f"# {marker}"), "the command runs")
    victim = await pid_of(on_ray, session.id)
    os.kill(victim, signal.SIGKILL)
    result = await asyncio.wait_for(run, 60)
    assert (result.status, result.text) == (RunStatus.completed, "finished")
    assert (workspace / "marker").read_text() == "x\n"
    transcript = await session.transcript()
    strict_history(transcript.messages)
    (block,) = results(transcript)
    assert json.loads(block.text) == {"status": "completed", "exit_code": 0, "output": "done\n"}
    info = await session.status()
    assert info.epoch == 2
    assert await pid_of(on_ray, session.id) != victim


async def test_a_stream_goes_on_over_the_death_of_its_actor_with_a_reset(on_ray: RayRuntime) -> None:
    session = await on_ray.create_session(scripted(bash("sleep 1; echo x"), "finished"))
    types: list[str] = []
    async for event in session.stream("go"):
        types.append(event.type)
        if event.type == "tool_started" and "reset" not in types and "killed" not in types:
            types.append("killed")
            os.kill(await pid_of(on_ray, session.id), signal.SIGKILL)
    assert types[-1] == "run_finished"
    assert "reset" in types
    assert types.count("run_finished") == 1


async def test_a_users_own_effect_that_was_cut_off_is_said_to_be_unknown(on_ray: RayRuntime, tmp_path: Path) -> None:
    registry = default_registry()
    effects = str(tmp_path / "effects")

    def effect(ctx: ToolContext) -> str:
        with open(effects, "a") as file:
            file.write("x\n")
        time.sleep(60)
        return "never"

    registry.tool(effect)
    session = await on_ray.create_session(scripted(calls(call("effect")), "honest", tools=registry))
    run = asyncio.create_task(session.run("go"))
    await until(lambda: Path(effects).exists(), "the effect happened")
    os.kill(await pid_of(on_ray, session.id), signal.SIGKILL)
    assert (await asyncio.wait_for(run, 60)).text == "honest"
    assert [block.text for block in results(await session.transcript())] == [OUTCOME_UNKNOWN]
    assert Path(effects).read_text() == "x\n"


async def test_a_killed_parent_finds_its_child_again(on_ray: RayRuntime, home: Path, marker: str) -> None:
    child = scripted(bash(f"sleep 1; echo x >> marker # {marker}"), "child says", name="child", sandbox=None)
    session = await on_ray.create_session(
        scripted(calls(call("helper", task="t")), "parent says", subagents={"helper": child})
    )
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"# {marker}"), "the child's command runs")
    os.kill(await pid_of(on_ray, session.id), signal.SIGKILL)
    assert (await asyncio.wait_for(run, 60)).text == "parent says"
    assert (home / "workspaces" / session.id / "marker").read_text() == "x\n"
    (block,) = results(await session.transcript())
    assert json.loads(block.text)["final_resp"] == "child says"


async def test_a_killed_sandbox_actor_leaves_an_unknown_outcome_and_no_process(on_ray: RayRuntime, marker: str) -> None:
    session = await on_ray.create_session(scripted(bash(f"sleep {marker}"), bash("echo again"), "finished"))
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"sleep\0{marker}"), "the command runs")
    info = await on_ray.supervisor().find_sandbox(session.id)
    assert info is not None
    os.kill(await info.actor.pid.remote(), signal.SIGKILL)
    assert (await asyncio.wait_for(run, 60)).text == "finished"
    lost, again = results(await session.transcript())
    assert lost.text == OUTCOME_UNKNOWN
    assert json.loads(again.text)["output"] == "again\n"
    await until(lambda: alive(f"sleep\0{marker}") == [], "the command ended with its sandbox")


async def test_a_job_outlives_its_sessions_actor_and_not_its_sandbox(on_ray: RayRuntime, marker: str) -> None:
    session = await on_ray.create_session(
        scripted(
            bash(f"echo up; sleep {marker}"), "started", sandbox="bubblewrap", tools=default_registry(yield_after=0.5)
        )
    )
    (job,) = (await session.run("go")).background_tasks
    os.kill(await pid_of(on_ray, session.id), signal.SIGKILL)
    check = calls(call("check", id=job, wait_secs=0))
    later = scripted("-", "-", check, "looked", check, "looked again", sandbox="bubblewrap")
    session = await on_ray.open(session.id, later)
    assert (await session.run("and now?")).background_tasks == (job,)
    assert len(alive(f"sleep\0{marker}")) == 1
    info = await on_ray.supervisor().find_sandbox(session.id)
    assert info is not None
    os.kill(await info.actor.pid.remote(), signal.SIGKILL)
    await until(lambda: alive(marker) == [], "it ends with its sandbox")
    assert (await session.run("and now?")).background_tasks == ()
    shown = results(await session.transcript())
    assert [json.loads(block.text)["status"] for block in shown[:2]] == ["running", "running"]
    assert shown[2].is_error
    assert "gone" in shown[2].text


async def test_a_workspace_that_was_lost_with_its_sandbox_comes_back(
    on_ray: RayRuntime, home: Path, marker: str
) -> None:
    spec = SandboxSpec(kind="bubblewrap", snapshots="on", snapshot_every=2)
    script = (bash("echo 1 > a"), bash("echo 2 > b"), bash("echo 3 > c"), bash(f"sleep {marker}"), bash("ls"), "done")
    session = await on_ray.create_session(scripted(*script, sandbox=spec))
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"sleep\0{marker}"), "the command runs")
    store = on_ray.storage.session_store
    assert store is not None
    found = None
    while found is None or found[0].snapshot is None:
        found = await store.read_sandbox(session.id)
    info = await on_ray.supervisor().find_sandbox(session.id)
    assert info is not None
    os.kill(await info.actor.pid.remote(), signal.SIGKILL)
    await until(lambda: alive(f"sleep\0{marker}") == [], "the command ended with its sandbox")
    await asyncio.to_thread(shutil.rmtree, home / "workspaces" / session.id)
    assert (await asyncio.wait_for(run, 60)).text == "done"
    transcript = await session.transcript()
    strict_history(transcript.messages)
    shown = [block.text for block in results(transcript)]
    assert shown[3] == OUTCOME_UNKNOWN
    assert json.loads(shown[4])["output"] == "a\nb\n"
    (told,) = [message.text for message in transcript.messages if "last snapshot" in message.text]
    assert "bash in step 3, bash in step 4" in told


async def test_a_cancelled_tree_parks_all_of_it_within_a_second(on_ray: RayRuntime, marker: str) -> None:
    child = scripted(bash(f"sleep {marker}"), "child says", name="child", sandbox=None)
    agent = scripted(
        calls(call("helper", task="a"), call("helper", task="b")),
        "resumed",
        subagents={"helper": SubAgent(child, parallel=True)},
    )
    session = await on_ray.create_session(agent)
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"sleep\0{marker}"), "one child is in bash, the other waits for the sandbox's lock")
    children = list((await session.status()).children.values())
    while not all([(await (await on_ray.open(id)).status()).state == "ToolExecuting" for id in children]):
        await asyncio.sleep(0.01)
    began = time.monotonic()
    result = await session.cancel("stop all")
    took = time.monotonic() - began
    assert result is not None
    assert result.status is RunStatus.cancelled
    assert (await run).status is RunStatus.cancelled
    assert alive(f"sleep\0{marker}") == []
    infos = [info async for info in on_ray.sessions(prefix=session.id)]
    assert [info.state for info in infos] == ["Interrupted"] * 3
    assert len({info.session_id for info in infos}) == 3
    for info in infos:
        strict_history((await (await on_ray.open(info.session_id)).transcript()).messages)
    assert took < 5, "far beyond the second it takes on a quiet machine"
    resumed = await session.resume()
    assert resumed is not None
    assert resumed.text == "resumed"


async def test_a_queued_run_can_be_cancelled_and_leaves_a_parked_session(on_ray: RayRuntime) -> None:
    busy = [await on_ray.create_session(scripted(bash("sleep 30"), "x")) for _ in range(2)]
    runs = [asyncio.create_task(session.run("go")) for session in busy]
    waiting = await on_ray.create_session(scripted("never now", "later"))
    async with asyncio.timeout(30):
        while len((await on_ray.pool_status()).busy) < 2:
            await asyncio.sleep(0.02)
        queued = asyncio.create_task(waiting.run("go"))
        while not (await on_ray.pool_status()).queued:
            await asyncio.sleep(0.02)
    result = await waiting.cancel("not needed")
    assert result is not None
    assert result.status is RunStatus.cancelled
    assert (await queued).status is RunStatus.cancelled
    assert (await waiting.status()).state == "Interrupted"
    assert [message.text for message in (await waiting.transcript()).messages] == ["go"]
    await asyncio.gather(*(session.cancel() for session in busy))
    assert [run.status for run in await asyncio.gather(*runs)] == [RunStatus.cancelled] * 2
    resumed = await waiting.resume()
    assert resumed is not None
    assert resumed.text == "never now"


async def test_a_request_id_belongs_to_its_session_and_to_its_content(on_ray: RayRuntime) -> None:
    one, two = [await on_ray.create_session(scripted(name, "more")) for name in ("first", "second")]
    request = uuid.uuid4().hex
    assert (await one.run("go", request_id=request)).text == "first"
    assert (await two.run("go", request_id=request)).text == "second"
    assert (await one.run("go", request_id=request)).text == "first"
    with pytest.raises(RequestConflict):
        await one.run("something else", request_id=request)


async def test_a_refused_request_is_taken_when_it_comes_again(on_ray: RayRuntime) -> None:
    registry = default_registry()
    registry.tool(lambda: Interrupt(kind="approval"), name="approve", description="asks", may_interrupt=True)
    session = await on_ray.create_session(scripted(calls(call("approve")), "ok", "more", tools=registry))
    first = await session.run("go")
    assert first.interrupt is not None
    request = uuid.uuid4().hex
    with pytest.raises(InterruptPending):
        await session.run("now?", request_id=request)
    await session.answer(first.interrupt.id, "yes")
    assert (await session.run("now?", request_id=request)).text == "more"


async def test_deleting_a_running_session_ends_it_and_its_files(on_ray: RayRuntime, home: Path, marker: str) -> None:
    session = await on_ray.create_session(scripted(bash(f"sleep {marker}"), "never"))
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"sleep\0{marker}"), "the command runs")
    assert (home / "workspaces" / session.id).exists()
    await session.delete()
    assert (await run).status is RunStatus.cancelled
    assert alive(f"sleep\0{marker}") == []
    assert not (home / "workspaces" / session.id).exists()
    with pytest.raises(SessionNotFound):
        await on_ray.open(session.id)


async def test_an_actor_killed_while_it_cancels_still_ends_interrupted(on_ray: RayRuntime, marker: str) -> None:
    session = await on_ray.create_session(scripted(bash(f"trap '' TERM; sleep {marker}; true"), "never"))
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"sleep\0{marker}"), "the command runs")
    victim = await pid_of(on_ray, session.id)
    cancel = asyncio.create_task(session.cancel("stop"))
    await asyncio.sleep(0.05)
    os.kill(victim, signal.SIGKILL)
    result = await asyncio.wait_for(cancel, 60)
    assert result is not None
    assert result.status is RunStatus.cancelled
    assert (await run).status is RunStatus.cancelled
    assert (await session.status()).state == "Interrupted"
    assert len(results(await session.transcript())) == 1
    await until(lambda: alive(f"sleep\0{marker}") == [], "the command is gone")


async def test_many_sessions_share_few_actors(pool_store: str, tmp_path: Path, home: Path) -> None:
    store = f"sqlite:///{tmp_path}/many.db"
    async with connect(storage=store, namespace="many", pool=PoolConfig(session_actors=4)) as runtime:
        agent = scripted(bash("echo $((6 * 7))"), "done")
        found = [result async for result in runtime.map(agent, [str(n) for n in range(40)], concurrency=40)]
        assert [r.error for r in found if r.error is not None] == []
        assert len({r.session_id for r in found}) == 40
        status = await runtime.pool_status()
        assert status.size == 4
        assert (status.session_actors <= 4, status.busy, status.queued) == (True, (), ())
        states = [info.state async for info in runtime.sessions()]
        assert states == ["Success"] * 40
        pids = status.pids
        await runtime.stop_pool()
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the pool's processes are gone")
    with pytest.raises(ValueError, match="greenroom-supervisor"):
        ray.get_actor("greenroom-supervisor", namespace="many")


async def test_a_namespace_serves_one_store(on_ray: RayRuntime, tmp_path: Path) -> None:
    with pytest.raises(PoolMismatch, match="another namespace"):
        async with connect(storage=f"sqlite:///{tmp_path}/other.db", namespace="tests"):
            pass


def test_what_cannot_work_on_ray_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="memory:"):
        connect(storage="memory:")
    with pytest.raises(ConfigError, match="at least 1"):
        PoolConfig(session_actors=0)


async def test_an_unopened_runtime_says_so(tmp_path: Path) -> None:
    runtime = connect(storage=f"sqlite:///{tmp_path}/x.db")
    with pytest.raises(UsageError, match="async with"):
        await runtime.create_session(scripted("x"))


async def test_a_script_s_own_part_is_named_when_nobody_has_it_any_more(
    pool_store: str, tmp_path: Path, home: Path
) -> None:
    registry = default_registry()
    registry.tool(lambda: "x", name="mine", description="of this script")
    store = f"sqlite:///{tmp_path}/local.db"
    async with connect(storage=store, namespace="first", pool=PoolConfig(session_actors=1)) as runtime:
        session = await runtime.create_session(scripted("one", "two", tools=registry))
        assert (await session.run("go")).text == "one"
        await runtime.stop_pool()
    async with connect(storage=store, namespace="second", pool=PoolConfig(session_actors=1)) as runtime:
        with pytest.raises(AgentUnavailable, match="'agent/mine'"):
            await (await runtime.open(session.id)).run("go")
        again = await runtime.open(session.id, scripted("one", "two", tools=registry))
        assert (await again.run("go")).text == "two"
        await runtime.stop_pool()


def test_the_blocking_verbs_work_on_ray(pool_store: str, home: Path) -> None:
    with connect(storage=pool_store, namespace="tests") as runtime:
        turn = runtime.run_turn_sync(scripted("one", "two"), "hi")
        assert turn.result.text == "one"
        assert runtime.open_sync(turn.session_id).run_sync("hi").text == "two"


async def test_an_actor_that_is_only_silent_is_not_taken_over(on_ray: RayRuntime, home: Path, marker: str) -> None:
    """Stopped for a while and going on: the same owner, and each line once."""
    session = await on_ray.create_session(
        scripted(bash(f"sleep 1; echo x >> marker # {marker}"), bash("echo y >> second"), "done")
    )
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"# {marker}"), "the command runs")
    owner = await pid_of(on_ray, session.id)
    os.kill(owner, signal.SIGSTOP)
    await asyncio.sleep(3)
    assert not run.done()
    os.kill(owner, signal.SIGCONT)
    assert (await asyncio.wait_for(run, 60)).text == "done"
    workspace = home / "workspaces" / session.id
    assert (workspace / "marker").read_text() == "x\n"
    assert (workspace / "second").read_text() == "y\n"
    assert (await session.status()).epoch == 1


async def test_terminating_ends_the_tree_and_its_commands(on_ray: RayRuntime, marker: str) -> None:
    child = scripted(bash(f"sleep {marker}"), "child says", name="child", sandbox=None)
    session = await on_ray.create_session(
        scripted(calls(call("helper", task="a")), "resumed", subagents={"helper": child})
    )
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"sleep\0{marker}"), "the command runs")
    began = time.monotonic()
    await session.terminate()
    assert time.monotonic() - began < 10
    assert (await run).status is RunStatus.cancelled
    assert alive(f"sleep\0{marker}") == []
    children = (await session.status()).children
    assert [(await (await on_ray.open(sid)).status()).state for sid in children.values()] == ["Interrupted"]
    assert await on_ray.supervisor().find_sandbox(session.id) is None
    resumed = await session.resume()
    assert resumed is not None
    assert resumed.text == "resumed"


async def test_an_actor_that_does_not_park_a_terminated_session_is_killed(on_ray: RayRuntime, marker: str) -> None:
    session = await on_ray.create_session(scripted(bash(f"sleep {marker}"), "resumed"))
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"sleep\0{marker}"), "the command runs")
    owner = await pid_of(on_ray, session.id)
    os.kill(owner, signal.SIGSTOP)
    await asyncio.wait_for(session.terminate(), 90)
    assert (await asyncio.wait_for(run, 60)).status is RunStatus.cancelled
    assert (await session.status()).state == "Interrupted"


async def test_claims_are_not_released_by_hand_on_ray(on_ray: RayRuntime) -> None:
    session = await on_ray.create_session(scripted("ok"))
    with pytest.raises(UsageError, match="Supervisor"):
        await session.release_claim(1)


async def test_a_cancel_and_a_creation_that_come_again_on_ray(on_ray: RayRuntime, marker: str) -> None:
    agent = scripted(bash(f"sleep {marker}"), "resumed")
    session = await on_ray.create_session(agent, request_id=f"create-{marker}")
    assert (await on_ray.create_session(agent, request_id=f"create-{marker}")).id == session.id
    run = asyncio.create_task(session.run("go"))
    await until(lambda: alive(f"sleep\0{marker}"), "the command runs")
    cancelled = await session.cancel("stop", request_id="C")
    assert cancelled is not None
    await run
    resumed = await session.resume()
    assert resumed is not None
    assert resumed.text == "resumed"
    assert await session.cancel("stop", request_id="C") == cancelled
    assert (await session.status()).state == "Success"
