"""Runs of the embedded edition over memory: limits, retries, batches, cancellation, take-over. No network."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scenes import bash, call, calls, default_registry, results, scripted

from greenroom import (
    AgentConfig,
    AgentRuntime,
    CancelToken,
    ExecResult,
    FailureKind,
    Fenced,
    Interrupt,
    Limits,
    ModelRequest,
    PreflightError,
    RequestConflict,
    RunFailed,
    RunStatus,
    Scripted,
    SessionBusy,
    Storage,
    SubAgent,
    TextDelta,
    ToolContext,
    ToolRegistry,
    UsageError,
    register_default_tools,
)
from greenroom.runtime.journal import (
    CANCELLED_BEFORE_START,
    CANCELLED_WHILE_RUNNING,
    CUT_REPLY_NOTE,
    NOT_RUN_REPLY_CUT,
    OUTCOME_UNKNOWN,
)
from greenroom.runtime.local_trees import LocalTreeSandboxes
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.testing import FakeClock, FakeSandboxes, SeededIds, strict_history


@pytest.fixture
async def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def timed(sandboxes: FakeSandboxes, home: Path, clock: FakeClock) -> AsyncIterator[AgentRuntime]:
    """The embedded edition on a clock that the test moves."""
    async with AgentRuntime("memory:", sandboxes=sandboxes, clock=clock, ids=SeededIds(7)) as runtime:
        yield runtime


def tools(*functions: Any, **options: Any) -> ToolRegistry:
    registry = ToolRegistry()
    for function in functions:
        registry.tool(function, **options)
    return registry


# -- a run and its limits


async def test_a_run_calls_tools_and_answers(runtime: AgentRuntime, sandboxes: FakeSandboxes) -> None:
    agent = scripted(bash("echo hi"), "done", system_prompt="Be brief.")
    session = await runtime.create_session(agent)
    result = await session.run("go")
    assert (result.status, result.text, result.steps, result.revision) == (RunStatus.completed, "done", 2, 1)
    assert sandboxes.opened[session.id].commands == ["echo hi"]
    transcript = await session.transcript()
    strict_history(transcript.messages)
    assert json.loads(results(transcript)[0].text) == {"status": "completed", "exit_code": 0, "output": "ran: echo hi"}
    assert (await session.status()).state == "Success"


async def test_usage_and_steps_are_the_runs_own_and_the_revision_counts_runs(runtime: AgentRuntime) -> None:
    entry = {"text": "x", "usage": {"input_tokens": 10, "output_tokens": 1}}
    session = await runtime.create_session(scripted(entry, entry))
    first, second = await session.run("one"), await session.run("two")
    assert first.usage.input_tokens == second.usage.input_tokens == 10
    assert (first.revision, second.revision) == (1, 2)
    assert (await session.status()).usage.input_tokens == 20


async def test_ten_steps_are_the_default_and_the_last_batch_still_runs(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    session = await runtime.create_session(scripted(*[bash(f"echo {n}") for n in range(20)]))
    result = await session.run("go")
    assert result.status is RunStatus.exhausted
    assert result.steps == 10
    assert len(sandboxes.opened[session.id].commands) == 10
    strict_history((await session.transcript()).messages)
    assert await session.resume() is None
    assert (await session.run("more")).steps == 10, "a new message starts the count again"


async def test_a_failing_model_is_tried_again_with_growing_waits(timed: AgentRuntime, clock: FakeClock) -> None:
    error = {"error": {"kind": "provider"}}
    session = await timed.create_session(scripted(error, error, "ok"))
    events: list[Any] = []

    async def watch() -> None:
        async for event in session.stream("go"):
            events.append(event)

    await clock.run(watch())
    waits = [event.delay for event in events if event.type == "retry"]
    assert len(waits) == 2
    assert 0.1 <= waits[0] <= 0.2 <= waits[1] * 2
    assert events[-1].result.status is RunStatus.completed
    assert "reset" not in {event.type for event in events}, "nothing had gone out"


async def test_a_model_that_keeps_failing_ends_the_run(timed: AgentRuntime, clock: FakeClock) -> None:
    session = await timed.create_session(scripted(*[{"error": {"kind": "provider_rate_limited"}}] * 5))
    with pytest.raises(RunFailed) as failed:
        await clock.run(session.run("go"))
    assert failed.value.failure.kind is FailureKind.provider_rate_limited
    assert (await session.status()).state == "Fail"
    assert len(clock.slept) == 2


async def test_a_permanent_error_ends_the_run_at_once(timed: AgentRuntime, clock: FakeClock) -> None:
    session = await timed.create_session(
        scripted({"error": {"kind": "provider_permanent", "message": "no model"}}, "x")
    )
    with pytest.raises(RunFailed, match="no model"):
        await clock.run(session.run("go"))
    assert clock.slept == []
    assert (await session.run("again")).text == "x", "the session is not lost"


async def test_past_the_end_of_a_script_the_run_fails_by_name(runtime: AgentRuntime) -> None:
    session = await runtime.create_session(scripted())
    with pytest.raises(RunFailed, match="script has no entry 0"):
        await session.run("go")


async def test_a_provider_that_breaks_ends_the_run_and_not_the_process(runtime: AgentRuntime) -> None:
    def broken(request: ModelRequest) -> str:
        raise ZeroDivisionError("oops")

    session = await runtime.create_session(scripted(broken))
    with pytest.raises(RunFailed, match="ZeroDivisionError: oops"):
        await session.run("go")


async def test_a_cut_reply_runs_none_of_its_calls_and_leaves_a_paired_history(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    cut = {**bash("rm -rf build"), "stop": "length", "stop_kind": "length"}
    session = await runtime.create_session(scripted(cut, "ok"))
    with pytest.raises(RunFailed) as failed:
        await session.run("go")
    assert failed.value.failure.kind is FailureKind.truncated
    assert sandboxes.opened == {}
    transcript = await session.transcript()
    assert [block.text for block in results(transcript)] == [NOT_RUN_REPLY_CUT]
    strict_history(transcript.messages)
    assert (await session.run("shorter, please")).text == "ok"


async def test_each_session_plays_its_script_from_the_start(runtime: AgentRuntime) -> None:
    agent = scripted("one", "two")
    first, second = await runtime.create_session(agent), await runtime.create_session(agent)
    assert [(await s.run("go")).text for s in (first, second, first)] == ["one", "one", "two"]


# -- tools in a batch


async def test_bad_calls_get_error_results_and_the_others_run(runtime: AgentRuntime) -> None:
    ran: list[str] = []

    def good(n: int) -> str:
        ran.append(f"good {n}")
        return f"got {n}"

    def boom() -> str:
        raise RuntimeError("boom")

    batch = calls(
        call("good", n=1),
        call("boom"),
        call("good", n="many"),
        {"name": "good", "arguments": '{"n": '},
        call("good"),
        call("good", n=1, m=2),
        call("nowhere"),
        call("good", n=2),
    )
    session = await runtime.create_session(scripted(batch, "ok", tools=tools(good, boom), sandbox=None))
    assert (await session.run("go")).text == "ok"
    assert ran == ["good 1", "good 2"]
    shown = results(await session.transcript())
    assert [block.is_error for block in shown] == [False, True, True, True, True, True, True, False]
    assert shown[1].text == "RuntimeError: boom"
    assert "n: " in shown[2].text
    assert "not valid JSON" in shown[3].text
    assert "n: required" in shown[4].text
    assert "'m'" in shown[5].text
    assert "Unknown tool 'nowhere'" in shown[6].text
    strict_history((await session.transcript()).messages)


async def test_three_steps_of_failing_calls_end_the_run(runtime: AgentRuntime) -> None:
    def boom() -> str:
        raise RuntimeError("boom")

    session = await runtime.create_session(scripted(*[calls(call("boom"))] * 5, tools=tools(boom), sandbox=None))
    with pytest.raises(RunFailed) as failed:
        await session.run("go")
    assert failed.value.failure.kind is FailureKind.tool
    assert failed.value.result.steps == 3
    strict_history((await session.transcript()).messages)


async def test_reads_run_together_writes_alone_and_results_keep_the_calls_order(runtime: AgentRuntime) -> None:
    log: list[str] = []
    both = asyncio.Barrier(2)

    async def read(n: int) -> str:
        log.append(f"+r{n}")
        await asyncio.wait_for(both.wait(), 5)
        log.append(f"-r{n}")
        return str(n)

    async def write() -> str:
        log.append("+w")
        await asyncio.sleep(0)
        log.append("-w")
        return "w"

    registry = tools(read, effect="read_only")
    registry.tool(write)
    batch = calls(call("read", n=1), call("read", n=2), call("write"), call("read", n=3), call("read", n=4))
    session = await runtime.create_session(scripted(batch, "ok", tools=registry, sandbox=None))
    await session.run("go")
    assert set(log[:4]) == {"+r1", "+r2", "-r1", "-r2"}
    assert log[4:6] == ["+w", "-w"]
    assert [block.text for block in results(await session.transcript())] == ["1", "2", "w", "3", "4"]


async def test_a_tool_that_takes_too_long_is_stopped_and_its_siblings_are_not(
    timed: AgentRuntime, clock: FakeClock
) -> None:
    stopped = False

    async def slow() -> str:
        nonlocal stopped
        try:
            await clock.sleep(500)
        finally:
            stopped = True
        return "never"

    async def quick() -> str:
        return "quick"

    registry = tools(slow, quick, effect="read_only")
    session = await timed.create_session(
        scripted(calls(call("slow"), call("quick")), "ok", tools=registry, sandbox=None)
    )
    await clock.run(session.run("go"))
    slow_result, quick_result = results(await session.transcript())
    assert slow_result.is_error
    assert "120 s" in slow_result.text
    assert quick_result.text == "quick"
    assert stopped
    assert clock.monotonic() == 120


async def test_a_time_limit_of_zero_is_none(timed: AgentRuntime, clock: FakeClock) -> None:
    async def slow() -> str:
        await clock.sleep(500)
        return "at last"

    limits = Limits(tool_timeout=0)
    session = await timed.create_session(
        scripted(calls(call("slow")), "ok", tools=tools(slow), sandbox=None, limits=limits)
    )
    await clock.run(session.run("go"))
    assert results(await session.transcript())[0].text == "at last"


async def test_a_context_carries_the_calls_key_and_progress_reaches_the_watcher(runtime: AgentRuntime) -> None:
    seen: list[str] = []

    def work(ctx: ToolContext) -> str:
        ctx.progress.emit_text("half way")
        seen.extend([ctx.session_id, ctx.call_key, ctx.idempotency_key])
        return "done"

    session = await runtime.create_session(scripted(calls(call("work")), "ok", tools=tools(work), sandbox=None))
    events = [event async for event in session.stream("go")]
    assert seen == [session.id, f"{session.id}/1/1/0", f"{session.id}/1/1/0"]
    types = [event.type for event in events]
    assert types.index("tool_started") < types.index("tool_progress") < types.index("tool_finished")
    assert types[0] == "run_started"
    assert types[-1] == "run_finished"


async def test_what_is_missing_is_said_before_anything_runs(runtime: AgentRuntime) -> None:
    no_sandbox = await runtime.create_session(scripted("x", sandbox=None))
    with pytest.raises(PreflightError, match="needs a sandbox"):
        await no_sandbox.run("go")
    registry = ToolRegistry()
    register_default_tools(registry, trust="sandboxed")
    distrusting = await runtime.create_session(scripted("x", tools=registry))
    with pytest.raises(PreflightError, match="isolation"):
        await distrusting.run("go")
    assert (await distrusting.status()).state == "Ready"
    assert (await distrusting.transcript()).messages == ()


# -- questions


async def test_a_question_waits_and_its_answer_is_the_calls_result(runtime: AgentRuntime) -> None:
    asks = calls(call("askFollowupQuestion", question="Which?", options=["a", "b"]))
    session = await runtime.create_session(scripted(asks, "thanks"))
    result = await session.run("go")
    assert result.status is RunStatus.suspended
    assert result.interrupt is not None
    assert result.interrupt.payload == {"question": "Which?", "options": ["a", "b"]}
    transcript = await session.transcript()
    strict_history(transcript.messages, open_calls=["call_0_0"])
    assert await session.resume() == result
    answered = await session.answer(result.interrupt.id, "b")
    assert (answered.text, answered.revision) == ("thanks", 3)
    assert [block.text for block in results(await session.transcript())] == ["b"]


async def test_a_question_is_a_barrier_nothing_of_its_batch_runs_before(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    registry = default_registry()

    def approve() -> Interrupt:
        return Interrupt(kind="approval", payload={"what": "deploy"})

    registry.tool(approve, may_interrupt=True)
    batch = calls(call("bash", command="A"), call("approve"), call("bash", command="C"))
    session = await runtime.create_session(scripted(batch, "ok", tools=registry))
    result = await session.run("go")
    assert sandboxes.opened == {}
    assert result.interrupt is not None
    await session.answer(result.interrupt.id, {"yes": True})
    assert sandboxes.opened[session.id].commands == ["A", "C"]
    assert [block.text for block in results(await session.transcript())][1] == '{"yes":true}'


# -- cancellation


async def cancelled_transcript(session: Any) -> list[str]:
    transcript = await session.transcript()
    strict_history(transcript.messages)
    assert (await session.status()).state == "Interrupted"
    return [block.text for block in results(transcript)]


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


# -- sub-agents


def family(**child_fields: Any) -> AgentConfig:
    child = scripted(*child_fields.pop("script", ("child says",)), name="child", **child_fields)
    return scripted(
        calls(call("helper", task="do this")), "parent says", subagents={"helper": SubAgent(child)}, name="parent"
    )


async def test_a_sub_agents_answer_is_the_calls_result_and_its_session_hangs_below(runtime: AgentRuntime) -> None:
    session = await runtime.create_session(family())
    assert (await session.run("go")).text == "parent says"
    transcript = await session.transcript()
    (child,) = transcript.children
    assert json.loads(results(transcript)[0].text) == {
        "status": "completed",
        "child_session_id": child,
        "final_resp": "child says",
    }
    below = await (await runtime.open(child)).transcript()
    assert below.parent == session.id
    assert [message.text for message in below.messages] == ["do this", "child says"]


async def test_a_child_shares_its_parents_sandbox(runtime: AgentRuntime, sandboxes: FakeSandboxes) -> None:
    session = await runtime.create_session(family(script=(bash("from the child"), "ok"), sandbox=None))
    await session.run("go")
    assert list(sandboxes.opened) == [session.id]
    assert sandboxes.opened[session.id].commands == ["from the child"]


@pytest.mark.parametrize(
    ("script", "limits", "status", "detail"),
    [
        (({"error": {"kind": "provider_permanent", "message": "no key"}},), Limits(), "failed", "no key"),
        ((bash("x"), bash("y")), Limits(max_iter=1), "exhausted", "max_iter"),
        ((calls(call("askFollowupQuestion", question="how?")),), Limits(), "suspended", "how?"),
        (({"text": ""},), Limits(), "completed", "without a final text"),
    ],
    ids=["failed", "exhausted", "waiting", "silent"],
)
async def test_every_end_of_a_child_is_a_result_for_its_parent(
    runtime: AgentRuntime, script: Any, limits: Limits, status: str, detail: str
) -> None:
    session = await runtime.create_session(family(script=script, limits=limits))
    assert (await session.run("go")).text == "parent says"
    block = results(await session.transcript())[0]
    shown = json.loads(block.text)
    assert shown["status"] == status
    assert detail in shown["detail"]
    assert block.is_error == (status != "completed")


async def test_a_model_that_spawns_itself_is_stopped_by_depth(runtime: AgentRuntime) -> None:
    agent = scripted(calls(call("again", task="deeper")), "ok", subagents={"again": "self"}, limits=Limits(max_depth=3))
    session = await runtime.create_session(agent)
    await session.run("go")
    infos = [info async for info in runtime.sessions()]
    assert len(infos) == 4
    deepest = max(infos, key=lambda info: len((info.parent or "").split("~")))
    assert deepest is not None
    refused = [
        block.text
        for info in infos
        for block in results(await (await runtime.open(info.session_id)).transcript())
        if "max_depth" in block.text
    ]
    assert len(refused) == 1


async def test_cancelling_a_parent_parks_its_children_first(runtime: AgentRuntime, sandboxes: FakeSandboxes) -> None:
    running = asyncio.Event()

    async def hang(command: str) -> str:
        running.set()
        await asyncio.sleep(60)
        return ""

    sandboxes._on_command = hang
    child = scripted(bash("slow"), "ok", name="child")
    agent = scripted(
        calls(call("helper", task="a"), call("helper", task="b")),
        "resumed",
        subagents={"helper": SubAgent(child, parallel=True)},
    )
    session = await runtime.create_session(agent)
    run = asyncio.create_task(session.run("go"))
    await running.wait()
    await asyncio.sleep(0.05)
    await session.cancel("stop")
    assert (await run).status is RunStatus.cancelled
    infos = [info async for info in runtime.sessions()]
    assert [info.state for info in infos] == ["Interrupted"] * 3
    for info in infos:
        strict_history((await (await runtime.open(info.session_id)).transcript()).messages)
    assert sandboxes.opened[session.id].running == []
    resumed = await session.resume()
    assert resumed is not None
    assert resumed.text == "resumed"


# -- another owner


@pytest.fixture
def shared() -> MemoryObjectStore:
    return MemoryObjectStore()


def over(objects: MemoryObjectStore, sandboxes: FakeSandboxes) -> AgentRuntime:
    return AgentRuntime(Storage.over(objects), sandboxes=sandboxes)


async def hanging_run(runtime: AgentRuntime, script: tuple[Any, ...], **fields: Any) -> tuple[str, asyncio.Task[Any]]:
    """A run that hangs in its first bash call, as its owner would if it had been stopped there."""
    session = await runtime.create_session(scripted(*script, **fields))
    run = asyncio.create_task(session.run("go"))
    trees = runtime._trees
    assert isinstance(trees, LocalTreeSandboxes)
    sandboxes = trees._factory
    assert isinstance(sandboxes, FakeSandboxes)
    while not (session.id in sandboxes.opened and sandboxes.opened[session.id].running):
        await asyncio.sleep(0)
    return session.id, run


async def hang(command: str) -> str:
    await asyncio.sleep(60)
    return "the old owner's"


async def test_a_second_owner_is_refused_and_resume_takes_over(home: Path, shared: MemoryObjectStore) -> None:
    async with over(shared, FakeSandboxes(hang)) as first, over(shared, FakeSandboxes()) as second:
        sid, run = await hanging_run(first, (bash("effect"), "never said", "honest"))
        session = await second.open(sid)
        with pytest.raises(SessionBusy) as busy:
            await session.run("me too")
        assert busy.value.owner.startswith("local:")
        assert "resume" in busy.value.hint
        with pytest.raises(SessionBusy):
            await session.submit("me too")
        result = await session.resume()
        assert result is not None
        assert result.status is RunStatus.completed
        assert [block.text for block in results(await session.transcript())] == [OUTCOME_UNKNOWN]
        strict_history((await session.transcript()).messages)
        first_sandbox = first._trees._factory.opened[sid]  # type: ignore[attr-defined]  # the fake
        first_sandbox._on_command = None
        for task in asyncio.all_tasks():
            if getattr(task.get_coro(), "__qualname__", "") == "FakeSandbox.execute":
                task.cancel()
        old = await first.open(sid)
        await old.cancel()
        with pytest.raises(RunFailed) as fenced:
            await run
        assert isinstance(fenced.value.__cause__, Fenced)
        assert (await session.status()).state == "Success", "the loser changed nothing"


async def test_a_finished_call_is_reused_and_a_read_only_one_runs_again(home: Path, shared: MemoryObjectStore) -> None:
    ran: list[str] = []

    def read(n: int) -> str:
        ran.append(f"read {n}")
        return f"value {n}"

    def effect(n: int) -> str:
        ran.append(f"effect {n}")
        return f"done {n}"

    def same(n: int) -> str:
        ran.append(f"same {n}")
        return f"same {n}"

    registry = default_registry()
    registry.tool(read, effect="read_only")
    registry.tool(effect)
    registry.tool(same, effect="idempotent")
    batch = calls(
        call("read", n=1), call("effect", n=1), call("same", n=1), call("bash", command="x"), call("effect", n=2)
    )
    async with over(shared, FakeSandboxes(hang)) as first, over(shared, FakeSandboxes()) as second:
        sid, run = await hanging_run(first, (batch, "ok"), tools=registry)
        assert ran == ["read 1", "effect 1", "same 1"]
        session = await second.open(sid, scripted("other script: never the recorded batch", "ok", tools=registry))
        assert (await session.resume()) is not None
        assert ran == ["read 1", "effect 1", "same 1", "effect 2"], "outcomes were recorded before bash began"
        texts = [block.text for block in results(await session.transcript())]
        assert texts == ["value 1", "done 1", "same 1", OUTCOME_UNKNOWN, "done 2"]
        run.cancel()
        await asyncio.wait([run])


async def test_cancelling_a_session_of_another_owner_parks_it(home: Path, shared: MemoryObjectStore) -> None:
    async with over(shared, FakeSandboxes(hang)) as first, over(shared, FakeSandboxes()) as second:
        sid, run = await hanging_run(first, (bash("x"), "ok"))
        session = await second.open(sid)
        result = await session.cancel("from afar")
        assert result is not None
        assert result.status is RunStatus.cancelled
        assert await cancelled_transcript(session) == [CANCELLED_WHILE_RUNNING]
        run.cancel()
        await asyncio.wait([run])


async def test_two_runs_of_one_session_wait_for_one_another_and_sessions_do_not(runtime: AgentRuntime) -> None:
    log: list[str] = []

    async def step(n: int) -> str:
        log.append(f"+{n}")
        await asyncio.sleep(0.01)
        log.append(f"-{n}")
        return ""

    agent = scripted(*[e for n in range(2) for e in (calls(call("step", n=n)), "ok")], tools=tools(step), sandbox=None)
    session = await runtime.create_session(agent)
    await asyncio.gather(session.run("a"), session.run("b"))
    assert log == ["+0", "-0", "+1", "-1"]
    strict_history((await session.transcript()).messages)
    log.clear()
    sessions = [await runtime.create_session(agent) for _ in range(20)]
    await asyncio.gather(*(session.run("a") for session in sessions))
    assert log[:20] == ["+0"] * 20


async def test_a_large_transcript_lies_in_segments_and_comes_back_whole(home: Path, shared: MemoryObjectStore) -> None:
    text = "z" * 6000
    async with over(shared, FakeSandboxes(lambda command: text)) as first:
        session = await first.create_session(scripted(*[bash(f"echo {n}") for n in range(9)], "ok"))
        await session.run("go")
        keys = [key async for key in shared.list(f"tree/{session.id}/")]
        assert len(keys) > 3
        found = await shared.get(f"tree/{session.id}/{session.id}/head")
        assert found is not None
        assert len(found[0]) < 24_000
    async with over(shared, FakeSandboxes()) as second:
        again = await (await second.open(session.id)).transcript()
        assert [block.text.count("z") for block in results(again)] == [6000] * 9
        strict_history(again.messages)


async def test_a_closed_runtime_refuses_and_closing_twice_is_harmless(home: Path) -> None:
    runtime = AgentRuntime("memory:", sandboxes=FakeSandboxes())
    async with runtime:
        session = await runtime.create_session(scripted("x"))
    await runtime.close()
    with pytest.raises(UsageError, match="closed"):
        await session.run("go")
    with pytest.raises(UsageError, match="closed"):
        await runtime.create_session(scripted("x"))


async def test_closing_cancels_what_runs(home: Path) -> None:
    sandboxes = FakeSandboxes(hang)
    runtime = AgentRuntime("memory:", sandboxes=sandboxes)
    async with runtime:
        sid, run = await hanging_run(runtime, (bash("x"), "ok"))
    assert (await run).status is RunStatus.cancelled
    assert sandboxes.opened[sid].closed


def test_the_blocking_verbs_work_without_a_loop_and_refuse_inside_one(home: Path) -> None:
    with AgentRuntime("memory:", sandboxes=FakeSandboxes()) as runtime:
        turn = runtime.run_turn_sync(scripted("one", "two"), "hi", session_id="host-chosen-7")
        assert (turn.session_id, turn.result.text) == ("host-chosen-7", "one")
        assert runtime.open_sync("host-chosen-7").run_sync("again").text == "two"

        async def inside() -> None:
            with pytest.raises(UsageError, match="await run_turn"):
                runtime.run_turn_sync(scripted("x"), "hi")

        asyncio.run(inside())


async def test_map_gives_each_prompt_one_result_and_errors_as_values(runtime: AgentRuntime) -> None:
    def answer(request: ModelRequest) -> Any:
        text = request.messages[-1].text
        return {"error": {"kind": "provider_permanent"}} if text == "bad" else f"re: {text}"

    prompts = ["a", "bad", "c", "d"]
    found = {r.index: r async for r in runtime.map(scripted(answer), prompts, concurrency=2)}
    assert set(found) == {0, 1, 2, 3}
    assert isinstance(found[1].error, RunFailed)
    assert [found[i].result.text for i in (0, 2, 3)] == ["re: a", "re: c", "re: d"]  # type: ignore[union-attr]  # as asserted


async def test_leaving_a_stream_early_cancels_nothing(runtime: AgentRuntime, sandboxes: FakeSandboxes) -> None:
    session = await runtime.create_session(scripted(bash("x"), "ok"))
    async for _ in session.stream("go"):
        break
    while (await session.status()).state != "Success":
        await asyncio.sleep(0)
    assert sandboxes.opened[session.id].commands == ["x"]


async def test_a_failed_stream_ends_with_its_result_and_a_refused_one_raises(runtime: AgentRuntime) -> None:
    session = await runtime.create_session(scripted({"error": {"kind": "provider_permanent"}}))
    events = [event async for event in session.stream("go")]
    assert events[-1].result.status is RunStatus.failed
    with pytest.raises(UsageError):
        _ = [event async for event in session.stream(None)]


async def test_a_request_id_gives_the_first_answer_again(runtime: AgentRuntime) -> None:
    session = await runtime.create_session(scripted("one", "two"))
    first = await session.run("go", request_id="r1")
    assert await session.run("go", request_id="r1") == first
    assert len((await session.transcript()).messages) == 2
    with pytest.raises(RequestConflict):
        await session.run("other", request_id="r1")


async def test_an_exec_result_of_any_kind_is_a_result(runtime: AgentRuntime, sandboxes: FakeSandboxes) -> None:
    sandboxes._on_command = lambda command: ExecResult(status="signaled", signal=9, output="abc")
    session = await runtime.create_session(scripted(bash("x"), "ok"))
    await session.run("go")
    assert json.loads(results(await session.transcript())[0].text)["signal"] == 9
