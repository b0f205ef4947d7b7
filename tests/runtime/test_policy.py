"""The seam where a batch is judged: once, whole, before any of it runs; what each verdict means; who may decide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scenes import bash, call, calls, results, scripted

from greenroom import (
    AgentRuntime,
    ConfigError,
    FailureKind,
    InterruptPending,
    ProposedCall,
    RunFailed,
    RunStatus,
    Storage,
    Verdict,
)
from greenroom.runtime.journal import DENIED, DENIED_BY_POLICY
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.testing import FakeSandboxes, strict_history


class Judge:
    """Gives verdicts by the command; counts what it was asked."""

    def __init__(self, **by_command: Any) -> None:
        self.by_command = by_command
        self.asked: list[list[str]] = []

    async def judge(self, session_id: str, proposed: tuple[ProposedCall, ...]) -> Sequence[Verdict]:
        commands = [str(call.arguments.get("command", call.tool)) for call in proposed]
        self.asked.append(commands)
        found = [self.by_command.get(command, "allow") for command in commands]
        return [verdict if isinstance(verdict, Verdict) else Verdict(verdict) for verdict in found]


BATCH = calls(call("bash", command="a"), call("bash", command="b"), call("bash", command="c"))


def commands(sandboxes: FakeSandboxes, sid: str) -> list[str]:
    return sandboxes.opened[sid].commands if sid in sandboxes.opened else []


async def test_a_batch_is_judged_once_and_whole_before_any_of_it_runs(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    judge = Judge(b=Verdict("deny", "not here"))
    session = await runtime.create_session(scripted(BATCH, "ok", policy=judge))
    assert (await session.run("go")).status is RunStatus.completed
    assert judge.asked == [["a", "b", "c"]]
    assert commands(sandboxes, session.id) == ["a", "c"]
    denied = results(await session.transcript())[1]
    assert denied.is_error
    assert denied.text == f"{DENIED_BY_POLICY} not here"


async def test_an_unknown_tool_or_bad_arguments_need_no_verdict(runtime: AgentRuntime) -> None:
    judge = Judge()
    batch = calls(call("nope"), call("bash", wrong=1), call("bash", command="a"))
    session = await runtime.create_session(scripted(batch, "ok", policy=judge))
    await session.run("go")
    assert judge.asked == [["a"]]


async def test_asking_is_a_barrier_and_allowing_runs_the_call(runtime: AgentRuntime, sandboxes: FakeSandboxes) -> None:
    judge = Judge(b=Verdict("ask", "it deletes things"))
    session = await runtime.create_session(scripted(BATCH, "ok", policy=judge))
    result = await session.run("go")
    assert result.status is RunStatus.suspended
    assert result.interrupt is not None
    assert result.interrupt.kind == "approval"
    assert result.interrupt.payload == {"tool": "bash", "arguments": {"command": "b"}, "reason": "it deletes things"}
    assert [pending.started for pending in result.pending_calls] == [False] * 3
    assert commands(sandboxes, session.id) == []
    revision = result.revision
    for wrong in ["yes", {"decision": "maybe"}, {"decision": "allow", "more": 1}, None, {"decision": True}]:
        with pytest.raises(ConfigError, match="decision"):
            await session.answer(result.interrupt.id, wrong)
    with pytest.raises(InterruptPending):
        await session.run("a message is no answer to it")
    assert (await session.status()).revision == revision, "a refused answer consumes nothing"
    answered = await session.answer(result.interrupt.id, {"decision": "allow"})
    assert answered.status is RunStatus.completed
    assert answered.revision == revision + 2
    assert commands(sandboxes, session.id) == ["a", "b", "c"]
    assert judge.asked == [["a", "b", "c"]], "it is not judged again"
    strict_history((await session.transcript()).messages)


async def test_denying_is_an_error_result_and_the_others_run(runtime: AgentRuntime, sandboxes: FakeSandboxes) -> None:
    session = await runtime.create_session(scripted(BATCH, "ok", policy=Judge(a="ask", c="ask")))
    first = (await session.run("go")).interrupt
    assert first is not None
    second = (await session.answer(first.id, '{"decision": "deny", "message": "too risky"}')).interrupt
    assert second is not None
    assert second.payload["arguments"] == {"command": "c"}
    assert commands(sandboxes, session.id) == []
    assert (await session.answer(second.id, {"decision": "allow"})).text == "ok"
    assert commands(sandboxes, session.id) == ["b", "c"]
    assert results(await session.transcript())[0].text == f"{DENIED} too risky"


async def test_the_verdicts_survive_the_process_and_the_answer_may_come_to_another(home: Path) -> None:
    objects, first_boxes, second_boxes = MemoryObjectStore(), FakeSandboxes(), FakeSandboxes()
    judge, other = Judge(b="ask"), Judge(a="deny")
    async with AgentRuntime(Storage.over(objects), sandboxes=first_boxes) as runtime:
        session = await runtime.create_session(scripted(BATCH, "ok", policy=judge), "s")
        question = (await session.run("go")).interrupt
        assert question is not None
    async with AgentRuntime(Storage.over(objects), sandboxes=second_boxes) as runtime:
        again = await runtime.open("s", scripted(BATCH, "ok", policy=other))
        await again.answer(question.id, {"decision": "allow"})
        assert other.asked == []
        assert commands(second_boxes, "s") == ["a", "b", "c"]


class Raises:
    async def judge(self, session_id: str, proposed: tuple[ProposedCall, ...]) -> Sequence[Verdict]:
        raise RuntimeError("policy server away")


class TooFew:
    async def judge(self, session_id: str, proposed: tuple[ProposedCall, ...]) -> Sequence[Verdict]:
        return [Verdict("allow")]


@pytest.mark.parametrize("policy", [Raises(), TooFew()])
async def test_a_policy_that_fails_lets_nothing_run(
    runtime: AgentRuntime, sandboxes: FakeSandboxes, policy: Any
) -> None:
    session = await runtime.create_session(scripted(BATCH, "ok", policy=policy))
    with pytest.raises(RunFailed) as failed:
        await session.run("go")
    assert failed.value.failure.kind is FailureKind.middleware
    assert commands(sandboxes, session.id) == []
    messages = (await session.transcript()).messages
    strict_history(messages)
    assert [result.is_error for result in results(await session.transcript())] == [True] * 3


async def test_a_cancelled_question_of_a_policy_says_that_nothing_ran(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    session = await runtime.create_session(scripted(bash("a"), "ok", policy=Judge(a="ask")))
    await session.run("go")
    assert (await session.cancel()) is not None
    assert commands(sandboxes, session.id) == []
    assert "did not run" in results(await session.transcript())[0].text


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="judge"):
        scripted("ok", policy="deny everything")
    with pytest.raises(ConfigError, match="verdict"):
        Verdict("maybe")  # type: ignore[arg-type]  # that is the point
