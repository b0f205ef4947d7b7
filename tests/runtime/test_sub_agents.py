"""Sub-agents: their results, their sandbox, their depth, and their end with their parent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from scenes import bash, call, calls, results, scripted, tools, waits

from greenroom import (
    AgentConfig,
    AgentRuntime,
    Limits,
    RunStatus,
    SubAgent,
    ToolContext,
)
from greenroom.testing import FakeClock, FakeSandboxes, strict_history


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
        ((bash("x") | {"text": "so far"}, {"error": {"kind": "provider_permanent"}}), Limits(), "failed", "permanent"),
        ((bash("x"), bash("y")), Limits(max_iter=1), "exhausted", "max_iter"),
        ((calls(call("askFollowupQuestion", question="how?")),), Limits(), "suspended", "how?"),
        (({"text": ""},), Limits(), "completed", "without a final text"),
    ],
    ids=["failed", "failed later", "exhausted", "waiting", "silent"],
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


async def test_what_a_failed_child_had_said_is_in_its_result(runtime: AgentRuntime) -> None:
    script = (bash("x") | {"text": "so far"}, {"error": {"kind": "provider_permanent"}})
    session = await runtime.create_session(family(script=script))
    await session.run("go")
    assert json.loads(results(await session.transcript())[0].text)["final_resp"] == "so far"


async def test_a_child_that_recovers_from_a_failed_call_has_succeeded(runtime: AgentRuntime) -> None:
    script = (calls(call("no_such_tool")), bash("x"), "it works now")
    session = await runtime.create_session(family(script=script))
    await session.run("go")
    (block,) = results(await session.transcript())
    assert not block.is_error
    assert json.loads(block.text)["status"] == "completed"
    assert json.loads(block.text)["final_resp"] == "it works now"


async def test_a_child_that_was_cancelled_alone_is_a_result_and_its_parent_goes_on(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    running = asyncio.Event()
    sandboxes._on_command = waits(running)
    session = await runtime.create_session(family(script=(bash("slow"), "never")))
    run = asyncio.create_task(session.run("go"))
    await running.wait()
    (child,) = (await session.tree()).children
    await (await runtime.open(child.info.session_id)).cancel("enough of this one")
    assert (await run).text == "parent says"
    shown = json.loads(results(await session.transcript())[0].text)
    assert shown["status"] == "cancelled"
    assert (await (await runtime.open(child.info.session_id)).status()).state == "Interrupted"


async def test_a_child_that_asks_is_answered_by_its_id(runtime: AgentRuntime) -> None:
    ask = calls(call("askFollowupQuestion", question="which port?"))
    session = await runtime.create_session(family(script=(ask, "it is done")))
    await session.run("go")
    shown = json.loads(results(await session.transcript())[0].text)
    child = await runtime.open(shown["child_session_id"])
    waiting = (await child.status()).waiting_for
    assert waiting is not None
    assert waiting.id in shown["detail"], "the parent is told what it waits for"
    assert (await child.answer(waiting.id, "8080")).text == "it is done"


async def test_a_deadline_of_the_parent_bounds_its_child(timed: AgentRuntime, clock: FakeClock) -> None:
    left: list[float | None] = []

    async def slow(ctx: ToolContext) -> str:
        left.append(ctx.cancel.remaining)
        await clock.sleep(1000)
        return "late"

    child = scripted(calls(call("slow")), "never", name="child", tools=tools(slow), limits=Limits(tool_timeout=0))
    agent = scripted(
        calls(call("helper", task="t")), "never", subagents={"helper": child}, limits=Limits(max_seconds=30)
    )
    session = await timed.create_session(agent)
    began = clock.monotonic()
    result = await clock.run(session.run("go"))
    assert result.status is RunStatus.cancelled
    assert clock.monotonic() - began < 60
    assert left[0] is not None
    assert left[0] <= 30
    assert [info.state for info in (await session.tree()).sessions()] == ["Interrupted"] * 2


async def test_a_model_that_spawns_itself_is_stopped_by_count(runtime: AgentRuntime) -> None:
    batch = calls(*(call("again", task=f"{n}") for n in range(5)))
    agent = scripted(
        batch, "ok", subagents={"again": "self"}, limits=Limits(max_depth=1, max_children=3, max_consecutive_fail=9)
    )
    session = await runtime.create_session(agent)
    await session.run("go")
    tree = await session.tree()
    assert len(tree.children) == 3
    texts = [block.text for block in results(await session.transcript())]
    assert ["max_children" in text for text in texts] == [False] * 3 + [True] * 2


async def test_fifty_spawns_in_a_row(runtime: AgentRuntime) -> None:
    child = scripted("child says", name="child")
    batch = calls(*(call("helper", task=f"{n}") for n in range(50)))
    session = await runtime.create_session(scripted(batch, "ok", subagents={"helper": child}))
    assert (await session.run("go")).status is RunStatus.completed
    tree = await session.tree()
    assert len(list(tree.sessions())) == 51
    assert {info.state for info in tree.sessions()} == {"Success"}


async def test_a_tree_is_listed_from_any_of_its_sessions(runtime: AgentRuntime) -> None:
    below = scripted("g", name="g")
    child = scripted(calls(call("deeper", task="d")), "c", name="c", subagents={"deeper": below})
    agent = scripted(
        calls(call("first", task="1"), call("second", task="2")), "p", subagents={"first": child, "second": below}
    )
    session = await runtime.create_session(agent)
    await session.run("go")
    tree = await session.tree()
    assert [len(branch.children) for branch in tree.children] == [1, 0]
    assert [info.parent for info in tree.sessions()][1] == session.id
    first = await (await runtime.open(tree.children[0].info.session_id)).tree()
    assert first == tree.children[0]
