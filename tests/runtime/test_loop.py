"""Runs of the embedded edition over memory: limits, retries, batches, questions. No network."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from scenes import bash, call, calls, default_registry, results, scripted, tools

from greenroom import (
    AgentRuntime,
    ExecResult,
    FailureKind,
    Interrupt,
    Limits,
    ModelRequest,
    PreflightError,
    RunFailed,
    RunStatus,
    ToolContext,
    ToolRegistry,
    register_default_tools,
)
from greenroom.runtime.journal import (
    NOT_RUN_REPLY_CUT,
)
from greenroom.testing import FakeClock, FakeSandboxes, strict_history


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


async def test_an_exec_result_of_any_kind_is_a_result(runtime: AgentRuntime, sandboxes: FakeSandboxes) -> None:
    sandboxes._on_command = lambda command: ExecResult(status="signaled", signal=9, output="abc")
    session = await runtime.create_session(scripted(bash("x"), "ok"))
    await session.run("go")
    assert json.loads(results(await session.transcript())[0].text)["signal"] == 9
