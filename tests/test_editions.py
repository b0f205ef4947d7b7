"""One behaviour, two editions: what a user may rely on in one process and on Ray alike, with real commands."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from scenes import alive, bash, call, calls, default_registry, results, scripted, until

from greenroom import (
    CancelToken,
    FailureKind,
    Interrupt,
    InterruptPending,
    Limits,
    RunFailed,
    RunStatus,
    Runtime,
    Session,
    SessionNotFound,
    SubAgent,
    ToolContext,
    UnknownInterrupt,
    UsageError,
)
from greenroom.testing import strict_history


@pytest.fixture
def marker() -> str:
    return f"{600 + uuid.uuid4().int % 10**9}"


async def finished(session: Session) -> list[Any]:
    """The results of a session that stands still, its history checked."""
    transcript = await session.transcript()
    strict_history(transcript.messages)
    return results(transcript)


async def test_a_run_uses_bash_and_files_in_its_workspace(edition: Runtime, home: Path) -> None:
    agent = scripted(
        calls(call("write_file", path="notes/a.txt", content="hällo"), call("read_file", path="notes/a.txt")),
        bash("cat notes/a.txt; pwd; exit 3"),
        "done",
    )
    session = await edition.create_session(agent)
    result = await session.run("go")
    assert (result.status, result.text, result.steps, result.revision) == (RunStatus.completed, "done", 3, 1)
    wrote, read, ran = await finished(session)
    assert wrote.text == "wrote 6 bytes to notes/a.txt"
    assert read.text == "hällo"
    workspace = home / "workspaces" / session.id
    assert json.loads(ran.text) == {"status": "completed", "exit_code": 3, "output": f"hällo{workspace}\n"}
    assert (workspace / "notes" / "a.txt").read_text() == "hällo"


async def test_a_missing_file_or_one_outside_is_an_error_for_the_model(edition: Runtime) -> None:
    batch = calls(call("read_file", path="nope"), call("read_file", path="/etc/passwd"), call("read_file", path="../x"))
    session = await edition.create_session(scripted(batch, "ok"))
    await session.run("go")
    missing, outside, above = await finished(session)
    assert missing.is_error
    assert missing.text == "No such file or directory: nope"
    assert "outside the workspace" in outside.text
    assert "leaves the workspace" in above.text


async def test_a_stream_tells_the_run_from_start_to_end(edition: Runtime) -> None:
    session = await edition.create_session(scripted(bash("echo hi"), "the answer"))
    events = [event async for event in session.stream("go")]
    types = [event.type for event in events]
    assert types[0] == "run_started"
    assert types[-1] == "run_finished"
    assert [t for t in types if t.startswith("tool")] == ["tool_started", "tool_finished"]
    assert "".join(event.text for event in events if event.type == "text") == "the answer"
    assert events[-1].result.text == "the answer"
    assert [event.id for event in events] == sorted(
        (event.id for event in events), key=lambda id: int(id.split(".")[1])
    )
    again = [event async for event in session.events(after=events[2].id)]
    assert [event.id for event in again] == [event.id for event in events[3:]]


async def test_a_tool_of_the_users_own_script_runs(edition: Runtime) -> None:
    factor = 3
    registry = default_registry()

    async def triple(ctx: ToolContext, n: int) -> dict[str, Any]:
        """Triples a number."""
        ctx.progress.emit_text("tripling")
        return {"result": n * factor, "key": ctx.call_key}

    registry.tool(triple, effect="read_only")
    session = await edition.create_session(scripted(calls(call("triple", n=14)), "ok", tools=registry))
    events = [event async for event in session.stream("go")]
    (result,) = await finished(session)
    assert json.loads(result.text) == {"result": 42, "key": f"{session.id}/1/1/0"}
    assert [event.text for event in events if event.type == "tool_progress"] == ["tripling"]


async def test_a_question_suspends_and_an_answer_goes_on(edition: Runtime) -> None:
    asks = calls(call("askFollowupQuestion", question="Which?", options=["a", "b"]), call("bash", command="echo later"))
    session = await edition.create_session(scripted(asks, "thanks"))
    result = await session.run("go")
    assert result.status is RunStatus.suspended
    assert result.interrupt is not None
    info = await session.status()
    assert info.state == "WaitingForUser"
    assert info.waiting_for == result.interrupt
    with pytest.raises(UnknownInterrupt):
        await session.answer("another", "b")
    answered = await session.answer(result.interrupt.id, "b")
    assert (answered.status, answered.text, answered.revision) == (RunStatus.completed, "thanks", 3)
    answer, later = await finished(session)
    assert answer.text == "b"
    assert json.loads(later.text)["output"] == "later\n"
    with pytest.raises(UnknownInterrupt):
        await session.answer(result.interrupt.id, "c")


async def test_only_a_follow_up_question_is_answered_by_a_message(edition: Runtime) -> None:
    registry = default_registry()

    def approve() -> Interrupt:
        return Interrupt(kind="approval", payload={"what": "deploy"})

    registry.tool(approve, may_interrupt=True)
    session = await edition.create_session(
        scripted(calls(call("approve")), calls(call("askFollowupQuestion", question="?")), "ok", tools=registry)
    )
    first = await session.run("go")
    assert first.interrupt is not None
    with pytest.raises(InterruptPending) as pending:
        await session.run("yes")
    assert pending.value.interrupt_id == first.interrupt.id
    second = await session.answer(first.interrupt.id, {"decision": "allow"})
    assert second.interrupt is not None
    assert (await session.run("by a message")).text == "ok"
    assert [result.text for result in await finished(session)] == ['{"decision":"allow"}', "by a message"]


async def test_cancel_ends_a_command_and_everything_it_started(edition: Runtime, marker: str) -> None:
    session = await edition.create_session(scripted(bash(f"setsid sleep {marker} & sleep {marker}"), "resumed"))
    run = asyncio.create_task(session.run("go"))
    await until(lambda: len(alive(f"sleep\0{marker}")) == 2, "the command runs")
    began = time.monotonic()
    result = await session.cancel("enough")
    assert time.monotonic() - began < 5
    assert result is not None
    assert result.status is RunStatus.cancelled
    assert (await run).status is RunStatus.cancelled
    assert alive(f"sleep\0{marker}") == []
    assert (await session.status()).state == "Interrupted"
    assert (await finished(session))[0].text.startswith("Cancelled")
    assert await session.cancel() is None
    resumed = await session.resume()
    assert resumed is not None
    assert resumed.text == "resumed"
    assert await session.resume() is None


async def test_a_token_and_a_time_limit_cancel_a_run(edition: Runtime) -> None:
    session = await edition.create_session(scripted(bash("sleep 50"), bash("sleep 50"), "ok"))
    token = CancelToken()
    asyncio.get_running_loop().call_later(0.3, token.cancel, "by token")
    assert (await session.run("go", cancel=token)).status is RunStatus.cancelled
    assert (await session.run("go", timeout=0.3)).status is RunStatus.cancelled
    await finished(session)


async def test_sub_agents_share_the_sandbox_and_hang_below_their_parent(edition: Runtime) -> None:
    child = scripted(bash("cat from-parent; echo child > from-child"), "child says", name="child", sandbox=None)
    agent = scripted(
        bash("echo parent > from-parent"),
        calls(call("helper", task="look"), call("helper", task="again")),
        bash("cat from-child"),
        "done",
        subagents={"helper": SubAgent(child, parallel=True)},
    )
    session = await edition.create_session(agent)
    assert (await session.run("go")).text == "done"
    _, first, second, last = await finished(session)
    assert json.loads(first.text)["status"] == json.loads(second.text)["status"] == "completed"
    assert json.loads(last.text)["output"] == "child\n"
    transcript = await session.transcript()
    assert len(set(transcript.children)) == 2
    for id in transcript.children:
        below = await edition.open(id)
        assert (await below.transcript()).parent == session.id
        assert json.loads((await finished(below))[0].text)["output"] == "parent\n"


async def test_a_waiting_child_is_a_result_and_can_be_answered_by_its_id(edition: Runtime) -> None:
    child = scripted(calls(call("askFollowupQuestion", question="how?")), "thanks", name="child", sandbox=None)
    session = await edition.create_session(
        scripted(calls(call("helper", task="ask")), "went on", subagents={"helper": child})
    )
    assert (await session.run("go")).text == "went on"
    (result,) = await finished(session)
    shown = json.loads(result.text)
    assert shown["status"] == "suspended"
    below = await edition.open(shown["child_session_id"])
    waiting = (await below.status()).waiting_for
    assert waiting is not None
    assert (await below.answer(waiting.id, "so")).text == "thanks"


async def test_a_failed_run_raises_with_what_it_had(edition: Runtime) -> None:
    error = {"error": {"kind": "provider_permanent", "message": "no such model"}}
    session = await edition.create_session(scripted({**bash("echo 1"), "text": "so far"}, error, "ok"))
    with pytest.raises(RunFailed) as failed:
        await session.run("go")
    assert failed.value.failure.kind is FailureKind.provider_permanent
    assert failed.value.result.text == "so far"
    assert failed.value.result.revision == 1
    assert not failed.value.resumable
    events = [event async for event in session.stream("once more")]
    assert events[-1].result.text == "ok"


async def test_runs_of_one_session_queue(edition: Runtime) -> None:
    said = [str(number) for number in range(12)]
    session = await edition.create_session(scripted(bash("sleep 0.2; echo a"), *said))
    other = await edition.open(session.id)  # another handle of the same session
    runs = [(session if number % 2 else other).run(text) for number, text in enumerate(said)]
    assert [result.text for result in await asyncio.gather(*runs)] == said
    await finished(session)


async def test_a_step_limit_exhausts(edition: Runtime) -> None:
    session = await edition.create_session(scripted(*[bash("true")] * 5, limits=Limits(max_iter=2)))
    assert (await session.run("go")).status is RunStatus.exhausted
    assert len(await finished(session)) == 2


async def test_submit_appends_and_run_takes_it_up(edition: Runtime) -> None:
    session = await edition.create_session(scripted("hello"))
    with pytest.raises(UsageError):
        await session.run()
    assert (await session.submit("hi")).name == "Ready"
    assert (await session.run()).text == "hello"


async def test_a_turn_makes_its_session_or_goes_on_with_it(edition: Runtime) -> None:
    agent = scripted("one", "two")
    sid = f"host-chosen-{uuid.uuid4().hex}"
    assert (await edition.run_turn(agent, "hi", session_id=sid)).result.text == "one"
    assert (await edition.run_turn(agent, "hi", session_id=sid)).result.text == "two"
    assert (await edition.run_turn(agent, "hi")).session_id != sid
    with pytest.raises(SessionNotFound):
        await edition.open("never-seen")
    assert [info.session_id async for info in edition.sessions(prefix=sid)] == [sid]


async def test_map_answers_every_prompt_once(edition: Runtime) -> None:
    found = [result async for result in edition.map(scripted("x"), [str(n) for n in range(8)], concurrency=4)]
    assert sorted(result.index for result in found) == list(range(8))
    assert all(result.result is not None and result.result.text == "x" for result in found)


async def test_a_request_that_comes_again_gets_its_first_answer(edition: Runtime) -> None:
    session = await edition.create_session(scripted(bash("echo x >> marker; cat marker"), "one"))
    request = uuid.uuid4().hex
    first = await session.run("go", request_id=request)
    assert await session.run("go", request_id=request) == first
    assert len(await finished(session)) == 1


async def test_the_stored_agent_goes_on_without_the_script(edition: Runtime) -> None:
    session = await edition.create_session(scripted("one", "two"))
    await session.run("hi")
    assert (await (await edition.open(session.id)).run("more")).text == "two"
    other = await edition.open(session.id, scripted("", "", "from another agent"))
    assert (await other.run("more")).text == "from another agent"
    assert (await (await edition.open(session.id)).transcript()).messages[-1].text == "from another agent"
