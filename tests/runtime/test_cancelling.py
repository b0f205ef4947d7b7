"""Cancelling and terminating: wherever a run is, whatever it waits for, however often it is asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scenarios import own
from scenes import (
    ASK,
    bash,
    call,
    calls,
    cancelled_transcript,
    over,
    results,
    scripted,
    tools,
    waits,
)

from greenroom import (
    AgentConfig,
    AgentRuntime,
    CancelToken,
    ModelRequest,
    RequestConflict,
    RunFailed,
    RunStatus,
    Scripted,
    SessionBusy,
    SubAgent,
    TextDelta,
    ToolRegistry,
    UsageError,
)
from greenroom.runtime import call_group
from greenroom.runtime.journal import (
    CANCELLED_BEFORE_START,
    CANCELLED_WHILE_RUNNING,
    CUT_REPLY_NOTE,
)
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.testing import FakeClock, FakeSandboxes, Fault, FaultyStore, strict_history


async def test_a_cancelled_stream_keeps_what_it_said(runtime: AgentRuntime) -> None:
    streaming = asyncio.Event()

    class Endless(Scripted):
        async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Any]:
            if request.call_no == 0:
                yield TextDelta("half a ")
                streaming.set()
                await asyncio.sleep(60)
            async for delta in super().stream(request, cancel):
                yield delta

    agent = AgentConfig(name="a", provider=Endless(["", "whole"]))
    session = await runtime.create_session(agent)
    run = asyncio.create_task(session.run("go"))
    await streaming.wait()
    result = await session.cancel("enough")
    assert result is not None
    assert (result.status, result.text) == (RunStatus.cancelled, "half a ")
    assert await run == result
    assert await cancelled_transcript(session) == []
    resumed = await session.resume()
    assert resumed is not None
    assert resumed.text == "whole"
    transcript = await session.transcript()
    strict_history(transcript.messages)
    assert [message.text for message in transcript.messages] == ["go", "half a ", CUT_REPLY_NOTE, "whole"]
    assert transcript.messages[1].stop == "cancelled"


async def test_a_cancelled_batch_tells_each_call_how_far_it_had_come(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    running = asyncio.Event()

    async def hang(command: str) -> str:
        if command == "quick":
            return "done"
        running.set()
        await asyncio.sleep(60)
        return "never"

    sandboxes._on_command = hang
    batch = calls(call("bash", command="quick"), call("bash", command="slow"), call("bash", command="later"))
    session = await runtime.create_session(scripted(batch, "ok"))
    run = asyncio.create_task(session.run("go"))
    await running.wait()
    await session.cancel()
    assert (await run).status is RunStatus.cancelled
    texts = await cancelled_transcript(session)
    assert json.loads(texts[0])["output"] == "done"
    assert texts[1:] == [CANCELLED_WHILE_RUNNING, CANCELLED_BEFORE_START]
    assert sandboxes.opened[session.id].ended == ["slow"]
    assert sandboxes.opened[session.id].running == []
    resumed = await session.resume()
    assert resumed is not None
    assert resumed.status is RunStatus.completed
    assert sandboxes.opened[session.id].commands == ["quick", "slow"]


async def test_a_cancel_cuts_a_back_off_short(timed: AgentRuntime, clock: FakeClock) -> None:
    session = await timed.create_session(scripted({"error": {"kind": "provider", "retry_after": 30}}, "ok"))
    run = asyncio.create_task(session.run("go"))
    await clock.advance(0)
    assert clock.slept == [30]
    await session.cancel()
    assert (await run).status is RunStatus.cancelled
    assert clock.monotonic() == 0


async def test_an_already_cancelled_token_means_no_model_call_at_all(runtime: AgentRuntime) -> None:
    token = CancelToken()
    token.cancel("too late")
    session = await runtime.create_session(scripted("never"))
    result = await session.run("go", cancel=token)
    assert result.status is RunStatus.cancelled
    assert result.usage.input_tokens == 0
    assert (await session.status()).state == "Interrupted"


async def test_a_time_limit_of_a_run_cancels_it(timed: AgentRuntime, clock: FakeClock) -> None:
    async def slow() -> str:
        await clock.sleep(500)
        return ""

    session = await timed.create_session(scripted(calls(call("slow")), tools=tools(slow), sandbox=None))
    result = await clock.run(session.run("go", timeout=60))
    assert result.status is RunStatus.cancelled
    assert clock.monotonic() == 60


async def test_a_blocking_tool_holds_neither_the_loop_nor_the_cancel(runtime: AgentRuntime) -> None:
    entered, release = threading.Event(), threading.Event()

    def block() -> str:
        entered.set()
        release.wait(30)
        return "never"

    session = await runtime.create_session(scripted(calls(call("block")), "ok", tools=tools(block), sandbox=None))
    run = asyncio.create_task(session.run("go"))
    while not entered.is_set():
        await asyncio.sleep(0.001)
    began = time.monotonic()
    await session.cancel()
    assert time.monotonic() - began < 4
    release.set()
    assert (await run).status is RunStatus.cancelled
    assert await cancelled_transcript(session) == [CANCELLED_WHILE_RUNNING]


async def test_cancelling_a_question_drops_it_and_cancelling_nothing_is_nothing(runtime: AgentRuntime) -> None:
    session = await runtime.create_session(scripted(calls(call("askFollowupQuestion", question="?")), "ok"))
    assert await session.cancel() is None
    await session.run("go")
    result = await session.cancel()
    assert result is not None
    assert result.status is RunStatus.cancelled
    assert await cancelled_transcript(session) == [CANCELLED_WHILE_RUNNING]
    assert await session.cancel() is None


async def test_a_new_message_drops_an_interruption(runtime: AgentRuntime) -> None:
    session = await runtime.create_session(scripted(calls(call("askFollowupQuestion", question="?")), "a", "b"))
    await session.run("go")
    await session.cancel()
    assert (await session.submit("something else")).name == "Ready"
    assert await session.resume() is None
    assert (await session.run()).text == "a"
    with pytest.raises(UsageError, match="no message"):
        await session.run()
    strict_history((await session.transcript()).messages)


@pytest.mark.slow
async def test_a_cancel_that_meets_a_child_before_its_first_step_stops_it(home: Path) -> None:
    ran: list[str] = []
    store = FaultyStore(MemoryObjectStore())

    def note(command: str) -> str:
        ran.append(command)
        return "x"

    sandboxes = FakeSandboxes(note)
    child = scripted(bash("child effect"), "done", name="child", sandbox=None)
    agent = scripted(calls(call("helper", task="t")), "resumed", subagents={"helper": SubAgent(child)})
    async with over(store, sandboxes) as runtime:
        session = await runtime.create_session(agent)
        store.faults.append(Fault("delay", "get", "~", times=3, seconds=0.05))
        run = asyncio.create_task(session.run("go"))
        while not any("~" in request.key and request.verb == "get" for request in store.requests):
            await asyncio.sleep(0.001)
        await session.cancel("stop")
        assert (await run).status is RunStatus.cancelled
        await asyncio.sleep(0.2)
        assert ran == []
        states = [info.state async for info in runtime.sessions()]
        assert states == ["Interrupted"] * 2


async def test_the_cancel_mark_of_a_question_survives_and_its_answer_is_not_swallowed(home: Path) -> None:
    store = FaultyStore(MemoryObjectStore())
    async with over(store) as runtime:
        session = await runtime.create_session(scripted(calls(call("askFollowupQuestion", question="?")), "ok"))
        await session.run("go")
        store.faults.append(Fault("unavailable", "put_if_match", "/head", skip=1))
        with pytest.raises(Exception, match="away"):
            await session.cancel("stop")
        store.faults.clear()
    async with over(store) as second:
        again = await second.open(session.id)
        result = await again.resume()
        assert result is not None
        assert result.status is RunStatus.cancelled
        assert (await again.status()).state == "Interrupted"
        assert [block.text for block in results(await again.transcript())] == [CANCELLED_WHILE_RUNNING]
        went_on = await again.resume()
        assert went_on is not None
        assert went_on.text == "ok"


async def test_a_caller_that_goes_away_cancels_nothing(home: Path) -> None:
    running, gate = asyncio.Event(), asyncio.Event()

    async def wait(command: str) -> str:
        running.set()
        await gate.wait()
        return "x"

    async with over(MemoryObjectStore(), FakeSandboxes(wait)) as runtime:
        session = await runtime.create_session(scripted(bash("x"), "ok"))
        caller = asyncio.create_task(session.run("go"))
        await running.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert (await session.status()).state == "ToolExecuting"
        gate.set()
        while (await session.status()).state != "Success":
            await asyncio.sleep(0.001)
        assert json.loads(results(await session.transcript())[0].text)["output"] == "x"


async def test_a_cancel_asked_again_gives_its_result_again(home: Path) -> None:
    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(scripted(calls(call("askFollowupQuestion", question="?")), "ok"))
        await session.run("go")
        first = await session.cancel("stop", request_id="c1")
        assert first is not None
        assert await session.cancel("stop", request_id="c1") == first
        assert await session.cancel("stop") is None


async def test_a_cancel_that_comes_again_late_does_not_cancel_what_went_on(home: Path) -> None:
    started = asyncio.Event()
    objects = MemoryObjectStore()
    async with over(objects, sandboxes=FakeSandboxes(waits(started))) as runtime:
        session = await runtime.create_session(scripted(bash("x"), ASK, "ok"), "s")
        run = asyncio.create_task(session.run("go"))
        await started.wait()
        cancelled = await session.cancel("stop", request_id="C")
        assert cancelled is not None
        assert cancelled.status is RunStatus.cancelled
        await run
        resumed = await session.resume()
        assert resumed is not None
        assert resumed.status is RunStatus.suspended
        assert await session.cancel("stop", request_id="C") == cancelled
        assert (await session.status()).state == "WaitingForUser"
        with pytest.raises(RequestConflict):
            await session.run("x", request_id="C")
    async with over(objects) as second:
        assert await (await second.open("s")).cancel("stop", request_id="C") == cancelled


@pytest.mark.slow
async def test_terminating_gives_a_stubborn_tool_no_time_and_ends_the_sandbox(home: Path) -> None:
    started, objects, sandboxes = asyncio.Event(), MemoryObjectStore(), FakeSandboxes()
    registry = ToolRegistry()

    async def stubborn() -> str:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        await asyncio.sleep(600)  # it was told to end, and does not
        return "x"

    registry.tool(stubborn)
    registry.tool(lambda: "x", name="touch", description="t")
    async with over(objects, sandboxes=sandboxes) as runtime:
        session = await runtime.create_session(
            scripted(bash("a"), calls(call("stubborn")), "ok", tools=[*scripted("x").registry, *registry])
        )
        run = asyncio.create_task(session.run("go"))
        await started.wait()
        began = asyncio.get_running_loop().time()
        await session.terminate()
        assert asyncio.get_running_loop().time() - began < 2
        assert (await run).status is RunStatus.cancelled
        assert (await session.status()).state == "Interrupted"
        assert sandboxes.opened[session.id].closed
        await session.terminate()
        strict_history((await session.transcript()).messages)
        resumed = await session.resume()
        assert resumed is not None
        assert resumed.text == "ok"


async def test_terminating_what_does_not_run_changes_nothing(runtime: AgentRuntime) -> None:
    session = await runtime.create_session(scripted("ok"))
    await session.run("go")
    await session.terminate(request_id="R")
    assert (await session.status()).state == "Success"


async def test_a_cancelled_token_calls_no_model(runtime: AgentRuntime) -> None:
    asked: list[Any] = []

    def model(request: Any) -> str:
        asked.append(request)
        return "x"

    token = CancelToken()
    token.cancel("too late")
    session = await runtime.create_session(scripted(model))
    assert (await session.run("go", cancel=token)).status is RunStatus.cancelled
    assert asked == []


async def test_a_cancel_that_meets_a_refused_verb_parks_what_others_run(home: Path) -> None:
    started, objects = asyncio.Event(), MemoryObjectStore()
    async with over(objects, sandboxes=FakeSandboxes(waits(started))) as first, over(objects) as second:
        session = await first.create_session(scripted(bash("x"), "ok"), "s")
        run = asyncio.create_task(session.run("go"))
        run.add_done_callback(lambda done: done.cancelled() or done.exception())
        await started.wait()
        other = await second.open("s", scripted(bash("x"), "ok"))
        refused = asyncio.create_task(other.run("me too"))
        await asyncio.sleep(0)
        cancelled = await other.cancel("stop")
        assert cancelled is not None
        assert cancelled.status is RunStatus.cancelled
        with pytest.raises(SessionBusy):
            await refused
        await session.cancel()
        assert (await session.status()).state == "Interrupted"


@pytest.mark.slow
async def test_a_lost_parent_takes_its_children_along_and_a_cancel_says_that_it_could_not_park(home: Path) -> None:
    """The store is gone: nothing of the tree acts on, and whoever comes later finds all of it to go on with."""
    objects = MemoryObjectStore()
    store = FaultyStore(objects)
    started, sent = asyncio.Event(), []
    tools = ToolRegistry()

    @tools.tool
    async def slow() -> str:
        started.set()
        await asyncio.sleep(0.3)
        sent.append("slow")
        return "x"

    child = own(calls(call("slow")), "child done", name="child", tools=tools)
    agent = own(calls(call("helper", task="t")), "done", subagents={"helper": child})
    async with over(store) as runtime:
        session = await runtime.create_session(agent, "s")
        run = asyncio.create_task(session.run("go"))
        await started.wait()
        store.faults.append(Fault("unavailable", times=10**9))
        with pytest.raises(OSError, match="away"):
            await session.cancel("stop")
        with pytest.raises(RunFailed):
            await run
        await asyncio.sleep(0.5)
        assert sent == []
    async with over(objects) as second:
        again = await second.open("s", agent)
        result = await again.resume()
        assert result is not None
        assert result.text == "done"


async def test_a_cancel_reaches_a_policy_that_waits(home: Path) -> None:
    asked = asyncio.Event()

    class Waits:
        async def judge(self, session_id: str, proposed: Any) -> Any:
            asked.set()
            await asyncio.sleep(600)

    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(own(calls(call("send", to="a")), "ok", policy=Waits()))
        run = asyncio.create_task(session.run("go"))
        await asked.wait()
        assert (await session.cancel("stop", 2)) is not None
        assert (await run).status is RunStatus.cancelled
        assert "did not run" in results(await session.transcript())[0].text


@pytest.mark.slow
async def test_a_stubborn_tool_gets_its_grace_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_group, "CANCEL_GRACE", 0.3)
    started = asyncio.Event()
    tools = ToolRegistry()

    @tools.tool
    async def stubborn() -> str:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        await asyncio.sleep(600)
        return "x"

    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(own(calls(call("stubborn")), "ok", tools=tools))
        run = asyncio.create_task(session.run("go"))
        await started.wait()
        began = asyncio.get_running_loop().time()
        await session.cancel()
        assert asyncio.get_running_loop().time() - began < 0.5
        await run
