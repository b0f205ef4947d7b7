"""Sequences that once went wrong, or nearly: late answers, cancels at awkward moments, tools that misbehave."""

from __future__ import annotations

import asyncio
import json
import sys
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
    Fenced,
    Limits,
    ModelRequest,
    RequestConflict,
    RunFailed,
    RunStatus,
    SandboxDied,
    Scripted,
    SessionBusy,
    Storage,
    SubAgent,
    TextDelta,
    ToolContext,
    ToolRegistry,
    UsageError,
)
from greenroom.runtime.calls import CallRef
from greenroom.runtime.journal import CANCELLED_WHILE_RUNNING, NOT_RUN_SANDBOX_LOST, OUTCOME_UNKNOWN
from greenroom.runtime.messages import Delta
from greenroom.runtime.operations import Execute
from greenroom.runtime.storage import MemoryObjectStore, SessionStore
from greenroom.runtime.storage.garbage import collect_garbage
from greenroom.runtime.tree_sandbox import SharedSandbox
from greenroom.testing import FakeSandbox, FakeSandboxes, Fault, FaultyStore, strict_history


def over(objects: Any, sandboxes: Any = None) -> AgentRuntime:
    return AgentRuntime(Storage.over(objects), sandboxes=sandboxes or FakeSandboxes())


def tools(*functions: Any, **options: Any) -> ToolRegistry:
    registry = ToolRegistry()
    for function in functions:
        registry.tool(function, **options)
    return registry


# -- the sandbox's ledger


@pytest.mark.slow
async def test_a_sandbox_forgets_an_outcome_only_when_it_is_durable(home: Path) -> None:
    """bash ends, its outcome's save is slow, a read follows, the owner dies: the command must not run again."""
    store = FaultyStore(MemoryObjectStore())
    sandboxes = FakeSandboxes()
    read = asyncio.Event()
    async with over(store, sandboxes) as runtime:
        session = await runtime.create_session(
            scripted(bash("pay"), calls(call("read_file", path="f")), "ok", durability="effects")
        )
        store.faults.append(Fault("delay", "put_if_match", "/head", skip=2, times=10, seconds=0.3))
        run = asyncio.create_task(session.run("go"))
        while session.id not in sandboxes.opened or not sandboxes.opened[session.id].commands:
            await asyncio.sleep(0.001)
        shared = await runtime._trees.find(session.id)
        assert isinstance(shared, SharedSandbox)
        while not run.done() and not read.is_set():
            await asyncio.sleep(0.001)
            if any(key.endswith("/2/0") for key in shared._ledger.entries):
                read.set()
        assert read.is_set(), "the read runs while bash's outcome is still being saved"
        assert any(key.endswith("/1/0") for key in shared._ledger.entries)
        await run


def ref(key: str, digest: str = "d", epoch: int = 1) -> CallRef:
    return CallRef("s", epoch, key, digest)


async def test_an_operation_that_comes_after_its_end_is_refused() -> None:
    sandbox = FakeSandbox()
    shared = SharedSandbox(sandbox)
    await shared.end(ref("k"))
    for key in ("k", "k#1"):
        with pytest.raises(SandboxDied):
            await shared.perform(ref(key), Execute("late"))
    assert sandbox.commands == []


async def test_ending_a_call_ends_all_of_its_operations() -> None:
    async def hang(command: str) -> str:
        await asyncio.sleep(60)
        return ""

    sandbox = FakeSandbox(hang)
    shared = SharedSandbox(sandbox)
    first = asyncio.create_task(shared.perform(ref("k#3"), Execute("one")))
    while not sandbox.running:
        await asyncio.sleep(0)
    await shared.end(ref("k"))
    assert sandbox.running == []
    assert (await asyncio.gather(first, return_exceptions=True))[0] is not None


async def test_a_dead_sandbox_is_opened_anew_and_the_call_is_said_not_to_have_run(home: Path) -> None:
    sandboxes = FakeSandboxes()
    async with over(MemoryObjectStore(), sandboxes) as runtime:
        session = await runtime.create_session(scripted(bash("one"), "ok", bash("two"), "ok"))
        await session.run("go")
        first = sandboxes.opened[session.id]
        first.closed = True
        await session.run("go")
        assert sandboxes.opened[session.id] is not first
        assert sandboxes.opened[session.id].commands == ["two"]
        assert OUTCOME_UNKNOWN not in [block.text for block in results(await session.transcript())]
    assert "did not run" in NOT_RUN_SANDBOX_LOST


@pytest.mark.slow
async def test_more_trees_than_kept_sandboxes_lose_none_of_their_calls(home: Path) -> None:
    async def slow(command: str) -> str:
        await asyncio.sleep(0.005)
        return "x"

    async with over(MemoryObjectStore(), FakeSandboxes(slow)) as runtime:
        agent = scripted(bash("1"), bash("2"), bash("3"), "ok")
        found = [result async for result in runtime.map(agent, [str(n) for n in range(48)], concurrency=48)]
        for result in found:
            blocks = results(await runtime.handle(result.session_id).transcript())
            assert [json.loads(block.text)["output"] for block in blocks] == ["x"] * 3


# -- cancels at awkward moments


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


async def test_leaving_map_cancels_what_it_runs(home: Path) -> None:
    async def model(request: ModelRequest) -> str:
        if request.messages[0].text != "0":
            await asyncio.sleep(60)
        return "x"

    async with over(MemoryObjectStore()) as runtime:
        agent = scripted(model, sandbox=None, tools=ToolRegistry())
        mapped = runtime.map(agent, [str(n) for n in range(4)], concurrency=4)
        async for _ in mapped:
            break
        await mapped.aclose()  # type: ignore[attr-defined]  # an async generator
        states = sorted([info.state async for info in runtime.sessions()])
        assert states == ["Interrupted"] * 3 + ["Success"]


async def test_a_queued_run_does_not_begin_after_close(home: Path) -> None:
    asked: list[int] = []

    async def model(request: ModelRequest) -> str:
        asked.append(request.call_no)
        await asyncio.sleep(60)
        return "x"

    runtime = over(MemoryObjectStore())
    async with runtime:
        session = await runtime.create_session(scripted(model, model, sandbox=None, tools=ToolRegistry()))
        runs = [asyncio.create_task(session.run("go")) for _ in range(2)]
        while not asked:
            await asyncio.sleep(0)
    ends = await asyncio.gather(*runs, return_exceptions=True)
    assert asked == [0]
    assert isinstance(ends[1], UsageError)


async def test_submit_is_refused_while_the_session_runs_here(home: Path) -> None:
    gate = asyncio.Event()

    async def model(request: ModelRequest) -> str:
        await gate.wait()
        return "x"

    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(scripted(model, sandbox=None, tools=ToolRegistry()))
        run = asyncio.create_task(session.run("go"))
        while (await session.status()).owner is None:
            await asyncio.sleep(0)
        with pytest.raises(SessionBusy):
            await asyncio.wait_for(session.submit("more"), 1)
        gate.set()
        await run


async def test_a_cancel_asked_again_gives_its_result_again(home: Path) -> None:
    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(scripted(calls(call("askFollowupQuestion", question="?")), "ok"))
        await session.run("go")
        first = await session.cancel("stop", request_id="c1")
        assert first is not None
        assert await session.cancel("stop", request_id="c1") == first
        assert await session.cancel("stop") is None


# -- tools that misbehave


async def run_with(*functions: Any, home: Path, **options: Any) -> list[str]:
    batch = calls(*[call(function.__name__) for function in functions])
    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(
            scripted(batch, "ok", tools=tools(*functions, **options), sandbox=None, limits=Limits(tool_timeout=5))
        )
        assert (await asyncio.wait_for(session.run("go"), 10)).text == "ok"
        transcript = await session.transcript()
        strict_history(transcript.messages)
        return [block.text for block in results(transcript)]


async def test_tools_that_raise_what_they_should_not_end_only_themselves(home: Path) -> None:
    async def cancels_itself() -> str:
        raise asyncio.CancelledError

    async def exits() -> str:
        sys.exit(2)

    def exits_in_a_thread() -> str:
        sys.exit(2)

    def stops() -> str:
        raise StopIteration("done")

    def its_own_timeout() -> str:
        raise TimeoutError("the database did not answer")

    def fine() -> str:
        return "fine"

    texts = await run_with(cancels_itself, exits, exits_in_a_thread, stops, its_own_timeout, fine, home=home)
    assert "cancelled from inside" in texts[0]
    assert "SystemExit" in texts[1]
    assert "SystemExit" in texts[2]
    assert "StopIteration" in texts[3]
    assert texts[4] == "TimeoutError: the database did not answer"
    assert texts[5] == "fine"


async def test_a_users_tool_that_uses_the_sandbox_is_ended_there_too(home: Path) -> None:
    async def hang(command: str) -> str:
        await asyncio.sleep(60)
        return ""

    registry = default_registry()

    async def deploy(ctx: ToolContext) -> str:
        assert ctx.sandbox is not None
        await ctx.sandbox.execute("first")
        return "never"

    registry.tool(deploy)
    sandboxes = FakeSandboxes(hang)
    async with over(MemoryObjectStore(), sandboxes) as runtime:
        session = await runtime.create_session(scripted(calls(call("deploy")), "ok", tools=registry))
        run = asyncio.create_task(session.run("go"))
        while session.id not in sandboxes.opened or not sandboxes.opened[session.id].running:
            await asyncio.sleep(0)
        await session.cancel("stop")
        assert (await run).status is RunStatus.cancelled
        assert sandboxes.opened[session.id].running == []


async def test_one_operation_of_a_tool_can_be_given_up_and_the_next_one_made() -> None:
    async def hang(command: str) -> str:
        if command == "slow":
            await asyncio.sleep(60)
        return command

    sandbox = FakeSandbox(hang)
    shared = SharedSandbox(sandbox)
    slow = asyncio.create_task(shared.perform(ref("k"), Execute("slow")))
    while not sandbox.running:
        await asyncio.sleep(0)
    await shared.end_operation(ref("k"))
    await asyncio.gather(slow, return_exceptions=True)
    assert sandbox.running == []
    with pytest.raises(SandboxDied):
        await shared.perform(ref("k"), Execute("slow"))
    assert isinstance(await shared.perform(ref("k#1"), Execute("next")), ExecResult)
    again = asyncio.create_task(shared.perform(ref("k#2"), Execute("slow")))
    while not sandbox.running:
        await asyncio.sleep(0)
    await shared.end_operation(ref("k#2"))
    await asyncio.gather(again, return_exceptions=True)
    assert sandbox.running == []


# -- saves


async def test_a_taken_over_run_still_answers_the_request_that_began_it(home: Path) -> None:
    charged: list[str] = []
    gate = asyncio.Event()

    async def model(request: ModelRequest) -> str:
        if not gate.is_set():
            await asyncio.sleep(60)
        return "charged"

    def charge() -> str:
        charged.append("x")
        return "ok"

    objects = MemoryObjectStore()
    agent = scripted(calls(call("charge")), model, "once more", tools=tools(charge), sandbox=None)
    async with over(objects) as first, over(objects) as second:
        session = await first.create_session(agent)
        lost = asyncio.create_task(session.run("charge me", request_id="A"))
        while not charged or (await session.status()).state != "Reasoning":
            await asyncio.sleep(0.001)
        gate.set()
        other = await second.open(session.id, agent)
        resumed = await other.resume()
        assert resumed is not None
        assert await other.run("charge me", request_id="A") == resumed
        assert charged == ["x"]
        lost.cancel()


async def test_a_submit_that_comes_again_is_taken_once(home: Path) -> None:
    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(scripted("one", "two", sandbox=None, tools=ToolRegistry()))
        await session.submit("hello", request_id="R")
        await session.submit("hello", request_id="R")
        with pytest.raises(RequestConflict):
            await session.submit("something else", request_id="R")
        await session.run()
        await session.submit("hello", request_id="R")
        assert [message.text for message in (await session.transcript()).messages] == ["hello", "one"]


async def test_deleting_does_not_wait_for_queued_runs(home: Path) -> None:
    asked: list[int] = []

    async def model(request: ModelRequest) -> str:
        asked.append(request.call_no)
        await asyncio.sleep(60)
        return "x"

    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(scripted(model, model, sandbox=None, tools=ToolRegistry()))
        runs = [asyncio.create_task(session.run("go")) for _ in range(2)]
        while not asked:
            await asyncio.sleep(0)
        await asyncio.wait_for(session.delete(), 5)
        await asyncio.gather(*runs, return_exceptions=True)
        assert asked == [0]
        assert [info async for info in runtime.sessions()] == []


async def test_a_session_made_again_under_a_deleted_id_has_all_of_its_parts(home: Path) -> None:
    objects = MemoryObjectStore()
    batch = calls(call("askFollowupQuestion", question="?"), call("write_file", path="f", content="x" * 3000))
    async with over(objects) as runtime:
        for _ in range(2):
            session = await runtime.create_session(scripted(batch, "ok"), "again")
            assert (await session.run("go")).status is RunStatus.suspended
            assert (await session.status()).waiting_for is not None
            await session.delete()
            await collect_garbage(SessionStore(objects), -1, 10**12)


async def test_a_deletion_cut_off_after_the_root_is_finished_by_the_garbage_collection(home: Path) -> None:
    objects = MemoryObjectStore()
    child = scripted("c", name="child", sandbox=None)
    async with over(objects) as runtime:
        session = await runtime.create_session(
            scripted(calls(call("helper", task="h")), "ok", subagents={"helper": SubAgent(child)})
        )
        await session.run("go")
        await SessionStore(objects).delete(session.id)
        assert len([info async for info in runtime.sessions()]) == 1
        await collect_garbage(SessionStore(objects), -1, 10**12)
        assert [info async for info in runtime.sessions()] == []


async def test_a_host_with_a_lower_fence_cannot_delete(home: Path) -> None:
    objects = MemoryObjectStore()
    async with AgentRuntime(Storage.over(objects), host_fence=5, sandboxes=FakeSandboxes()) as new:
        session = await new.create_session(scripted("one"))
        await session.run("go")
    async with AgentRuntime(Storage.over(objects), host_fence=3, sandboxes=FakeSandboxes()) as old:
        with pytest.raises(Fenced):
            await old.handle(session.id).delete()


async def test_a_stop_and_its_receipt_are_one_write(home: Path) -> None:
    """A slow save under way when the run ends must show nothing of its end before all of it is there."""
    halves: list[str] = []

    class Watching(FaultyStore):
        async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
            head = json.loads(body)
            if head["state"]["name"] == "Success" and (head["owner"] or not head["receipts"] or not head["revision"]):
                halves.append(body.decode())
            return await super().put_if_match(key, body, etag)

    store = Watching(MemoryObjectStore())
    async with over(store) as runtime:
        registry = tools(lambda: "x", name="read", effect="read_only")
        session = await runtime.create_session(
            scripted(calls(call("read")), "paid", "twice", tools=registry, sandbox=None)
        )
        store.faults.append(Fault("delay", "put_if_match", "/head", skip=1, times=2, seconds=0.05))
        store.faults.append(Fault("delay", "put_if_absent", "blob/", seconds=0.1))
        first = await session.run("go", request_id="r")
        assert await session.run("go", request_id="r") == first
        assert first.text == "paid"
        assert halves == []


async def test_a_head_with_huge_arguments_stays_small(home: Path) -> None:
    largest = 0

    class Watching(FaultyStore):
        async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
            nonlocal largest
            largest = max(largest, len(body))
            return await super().put_if_match(key, body, etag)

    content = "x" * 1_000_000
    writes = calls(*[call("write_file", path=f"f{n}", content=content) for n in range(3)])
    sandboxes = FakeSandboxes()
    async with over(Watching(MemoryObjectStore()), sandboxes) as runtime:
        session = await runtime.create_session(scripted(writes, "ok"))
        assert (await session.run("go")).text == "ok"
        assert sandboxes.opened[session.id].files["f2"] == content.encode()
        assert largest <= 40 * 1024


async def test_a_sandbox_that_cannot_be_asked_ends_the_run_and_can_be_resumed(home: Path) -> None:
    class Failing(FakeSandboxes):
        fail = True

        async def open(self, spec: Any, root: str, snapshot: str | None = None) -> FakeSandbox:
            if self.fail:
                raise SandboxDied("the sandbox's process is gone")
            return await super().open(spec, root, snapshot)

    sandboxes = Failing()
    async with over(MemoryObjectStore(), sandboxes) as runtime:
        session = await runtime.create_session(scripted(bash("x"), "ok"))
        with pytest.raises(RunFailed) as failed:
            await session.run("go")
        assert failed.value.resumable
        sandboxes.fail = False
        result = await session.resume()
        assert result is not None
        assert result.status is RunStatus.completed


# -- providers


async def test_a_provider_needs_only_stream(home: Path) -> None:
    class Minimal:
        __slots__ = ()

        async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
            yield TextDelta("hi")
            async for delta in Scripted(["hi"]).stream(request, cancel):
                yield delta

    async with over(MemoryObjectStore()) as runtime:
        turn = await runtime.run_turn(AgentConfig(name="m", provider=Minimal()), "hello")
        assert turn.result.text == "hi"


async def test_providers_are_closed_with_the_runtime_whatever_they_are(home: Path) -> None:
    closed: list[str] = []

    class Slotted:
        __slots__ = ()

        async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
            async for delta in Scripted(["hi"]).stream(request, cancel):
                yield delta

        async def close(self) -> None:
            closed.append("slotted")

    class Plain(Scripted):
        async def close(self) -> None:
            closed.append("plain")

    plain = Plain(["hi"])
    async with over(MemoryObjectStore()) as runtime:
        await runtime.run_turn(AgentConfig(name="s", provider=Slotted()), "hello")
        await runtime.run_turn(AgentConfig(name="p", provider=plain), "hello")
    assert sorted(closed) == ["plain", "slotted"]
