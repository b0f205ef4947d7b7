"""A user's own tools in the background: handed over after their window, looked after, ended, lost with the process."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from scenes import call, calls, default_registry, over, results, scripted

from greenroom import (
    AgentConfig,
    AgentRuntime,
    CancelToken,
    ModelRequest,
    RunStatus,
    ToolContext,
    ToolOutput,
    ToolRegistry,
)
from greenroom.runtime.agents import pack, unpack
from greenroom.runtime.messages import ToolResultBlock
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.runtime.testing.clock import settle
from greenroom.testing import FakeClock

DEFAULTS = default_registry().subset(["check", "kill"])


def jobs_of(request: ModelRequest) -> list[dict[str, Any]]:
    """Every result so far that is JSON."""
    shown = [b.text for m in request.messages for b in m.content if isinstance(b, ToolResultBlock)]
    return [json.loads(text) for text in shown if text.startswith("{")]


def looks(tool: str, **more: Any) -> Any:
    """A script's entry: looks after the first job."""
    return lambda request: calls(call(tool, id=jobs_of(request)[0]["id"], **more))


def reporting(slow: Any, *script: Any, window: float = 2.0, **fields: Any) -> AgentConfig:
    """An agent with one slow tool, no sandbox, and what looks after jobs."""
    registry = ToolRegistry(DEFAULTS)
    registry.tool(yield_after=window, name="report")(slow)
    return scripted(calls(call("report")), *script, "done", tools=registry, sandbox=None, **fields)


async def shown(session: Any) -> list[dict[str, Any]]:
    return [json.loads(block.text) for block in results(await session.transcript())]


async def test_one_that_ends_in_its_window_is_an_ordinary_call(timed: AgentRuntime, clock: FakeClock) -> None:
    async def quick(ctx: ToolContext) -> dict[str, int]:
        await clock.sleep(1)
        return {"rows": 3}

    session = await timed.create_session(reporting(quick))
    result = await clock.run(session.run("go"))
    assert result.background_tasks == ()
    assert await shown(session) == [{"rows": 3}]


async def test_one_that_takes_longer_goes_on_and_gives_its_result_to_check(
    timed: AgentRuntime, clock: FakeClock
) -> None:
    async def slow(ctx: ToolContext) -> dict[str, int]:
        for number in range(5):
            ctx.progress.emit_text(f"line {number}\n")
            await clock.sleep(1)
        return {"rows": 3}

    session = await timed.create_session(reporting(slow, looks("check"), looks("check", wait_secs=30)))
    began = clock.monotonic()
    events = await clock.run(collected(session))
    first, second, third = await shown(session)
    assert first.pop("id").startswith("job-here-")
    assert first == {"status": "running", "output": "line 0\nline 1\n"}
    assert second["status"] == "running"
    assert third["status"] == "completed"
    assert third["result"] == '{"rows":3}'
    assert first["output"] + second["output"] + third["output"] == "".join(f"line {n}\n" for n in range(5))
    assert [event.text for event in events if event.type == "tool_progress"] == [f"line {n}\n" for n in range(5)]
    assert clock.monotonic() - began < 8
    assert events[-1].result.background_tasks == ()


async def collected(session: Any) -> list[Any]:
    return [event async for event in session.stream("go")]


async def test_a_tool_that_fails_in_the_background_says_so_at_the_next_look(
    timed: AgentRuntime, clock: FakeClock
) -> None:
    async def slow() -> None:
        await clock.sleep(3)
        raise ValueError("no such table")

    session = await timed.create_session(reporting(slow, looks("check", wait_secs=10)))
    await clock.run(session.run("go"))
    block = results(await session.transcript())[1]
    assert block.is_error
    assert json.loads(block.text)["status"] == "failed"
    assert json.loads(block.text)["result"] == "ValueError: no such table"


async def test_kill_ends_it_and_a_second_kill_finds_it_ended(timed: AgentRuntime, clock: FakeClock) -> None:
    ended: list[str] = []

    async def slow(ctx: ToolContext) -> None:
        try:
            await clock.sleep(600)
        except asyncio.CancelledError:
            ended.append(ctx.cancel.reason)
            raise

    session = await timed.create_session(reporting(slow, looks("kill"), looks("check")))
    result = await clock.run(session.run("go"))
    assert ended == ["killed"]
    assert [entry["status"] for entry in await shown(session)] == ["running", "killed", "killed"]
    assert result.background_tasks == ()


async def test_a_plain_function_is_asked_to_stop_and_the_truth_told(timed: AgentRuntime, clock: FakeClock) -> None:
    release = threading.Event()

    def stubborn(ctx: ToolContext) -> str:
        release.wait(30)
        return "never seen"

    session = await timed.create_session(reporting(stubborn, looks("kill")))
    await clock.run(session.run("go"))
    killed = (await shown(session))[1]
    assert killed["status"] == "killed"
    assert "has not ended yet" in killed["output"]
    release.set()


async def test_it_survives_the_run_and_its_cancel_and_is_named_in_the_result(
    timed: AgentRuntime, clock: FakeClock
) -> None:
    token = CancelToken()
    done: list[str] = []

    async def slow() -> str:
        await clock.sleep(100)
        done.append("slow")
        return "late"

    async def cancels(request: ModelRequest) -> str:
        token.cancel("enough")
        await clock.sleep(10)
        return "never"

    session = await timed.create_session(reporting(slow, cancels))
    result = await clock.run(session.run("go", cancel=token))
    assert result.status is RunStatus.cancelled
    (job,) = result.background_tasks
    assert (await session.status()).background_tasks == (job,)
    await clock.advance(200)
    assert done == ["slow"]


@pytest.mark.parametrize("end", ["terminate", "delete", "close"])
async def test_terminate_delete_and_close_end_it(timed: AgentRuntime, clock: FakeClock, end: str) -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await clock.sleep(600)
        finally:
            ended.append("ended")

    session = await timed.create_session(reporting(slow))
    result = await clock.run(session.run("go"))
    assert result.background_tasks
    await clock.run(timed.close() if end == "close" else getattr(session, end)())
    assert ended == ["ended"]
    if end == "terminate":
        assert (await session.status()).background_tasks == ()


async def test_a_cancel_within_the_window_ends_the_tool(timed: AgentRuntime, clock: FakeClock) -> None:
    ended: list[str] = []
    token = CancelToken()

    async def slow() -> None:
        token.cancel("now")
        try:
            await clock.sleep(600)
        finally:
            ended.append("ended")

    session = await timed.create_session(reporting(slow))
    assert (await clock.run(session.run("go", cancel=token))).status is RunStatus.cancelled
    assert ended == ["ended"]


async def test_an_id_of_an_earlier_process_is_unknown_and_not_another_job(shared: MemoryObjectStore) -> None:
    async def slow() -> None:
        await asyncio.sleep(600)

    async with over(shared) as first:
        session = await first.create_session(reporting(slow, window=0.0), "s")
        (old,) = (await session.run("go")).background_tasks
    async with over(shared) as second:
        again = reporting(slow, looks("check"), window=0.0)
        session = await second.open("s", scripted("x", "x", calls(call("check", id=old)), "done", tools=again.tools))
        result = await session.run("and now?")
        assert results(await session.transcript())[-1].text.startswith(
            f"the background job {old!r} belonged to another process"
        )
        assert result.background_tasks == ()


async def test_a_job_that_talks_without_end_is_kept_within_a_bound(timed: AgentRuntime, clock: FakeClock) -> None:
    async def slow(ctx: ToolContext) -> None:
        for number in range(300):
            ctx.progress.emit_text(f"{number:04} " + "x" * 1000 + "\n")
        await settle()
        await clock.sleep(600)

    session = await timed.create_session(reporting(slow))
    await clock.run(session.run("go"))
    (only,) = await shown(session)
    assert len(only["output"]) <= 64 * 1024
    assert only["output"].endswith("x\n")
    assert only["dropped_bytes"] > 200_000


async def test_what_it_says_after_the_run_is_no_event_of_a_later_one(timed: AgentRuntime, clock: FakeClock) -> None:
    async def slow(ctx: ToolContext) -> str:
        await clock.sleep(10)
        ctx.progress.emit_text("late")
        return "x"

    session = await timed.create_session(reporting(slow, "first", looks("check")))
    await clock.run(session.run("go"))
    await clock.advance(20)
    await clock.run(session.run("again"))
    ids = [event.id async for event in session.events()]
    assert ids == sorted(ids, key=lambda id: tuple(map(int, id.split("."))))
    assert "tool_progress" not in [event.type async for event in session.events()]


async def quiet(ctx: ToolContext) -> ToolOutput:
    return ToolOutput.of_text("x")


def test_its_window_is_stored_with_the_agent() -> None:
    registry = ToolRegistry()
    registry.tool(yield_after=3.0)(quiet)
    agent = scripted("x", tools=registry, sandbox=None)
    (again,) = unpack(pack(agent)).registry
    assert again.spec.yield_after == 3.0


async def test_a_session_sees_its_own_jobs_alone(timed: AgentRuntime, clock: FakeClock) -> None:
    async def slow() -> str:
        await clock.sleep(5)
        return "alice's secret"

    alice = await timed.create_session(reporting(slow))
    await clock.run(alice.run("go"))
    (job,) = (await alice.status()).background_tasks
    await clock.advance(10)
    looks_there = calls(call("check", id=job), call("kill", id=job))
    bob = await timed.create_session(scripted(looks_there, "done", tools=DEFAULTS, sandbox=None))
    await clock.run(bob.run("go"))
    assert all(block.is_error and "no background job" in block.text for block in results(await bob.transcript()))


async def test_a_session_with_many_jobs_waits_for_the_next_one(timed: AgentRuntime, clock: FakeClock) -> None:
    async def slow(ctx: ToolContext) -> str:
        await clock.sleep(600)
        return "late"

    async def quick() -> str:
        await clock.sleep(20)
        return "after a while"

    registry = ToolRegistry(DEFAULTS)
    registry.tool(yield_after=0.0, name="report", effect="read_only")(slow)
    registry.tool(yield_after=1.0)(quick)
    batch = calls(*(call("report") for _ in range(32)))
    session = await timed.create_session(scripted(batch, calls(call("quick")), "done", tools=registry, sandbox=None))
    result = await clock.run(session.run("go"))
    assert len(result.background_tasks) == 32
    assert results(await session.transcript())[-1].text == "after a while"


async def test_a_callback_that_raises_does_not_keep_a_job_alive(timed: AgentRuntime, clock: FakeClock) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    async def slow(ctx: ToolContext) -> None:
        ctx.cancel.on_cancel(broken)
        await clock.sleep(600)

    session = await timed.create_session(reporting(slow, looks("kill")))
    await clock.run(session.run("go"))
    assert (await shown(session))[1]["status"] == "killed"


async def test_on_ray_it_ends_with_its_run_also_when_that_breaks_off(
    timed: AgentRuntime, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await clock.sleep(600)
        finally:
            ended.append("ended")

    timed._host.tasks.outlive_runs = False  # as in a session actor
    session = await timed.create_session(reporting(slow))
    result = await clock.run(session.run("go"))
    assert ended == ["ended"]
    assert result.background_tasks == ()
