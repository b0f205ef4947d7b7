"""Sub-agents: their results, their sandbox, their depth, and their end with their parent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from scenes import bash, call, calls, results, scripted

from greenroom import (
    AgentConfig,
    AgentRuntime,
    Limits,
    RunStatus,
    SubAgent,
)
from greenroom.testing import FakeSandboxes, strict_history


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
