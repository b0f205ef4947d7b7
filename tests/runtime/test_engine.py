"""The embedded runtime around its runs: order, closing, blocking verbs, map, streams, requests that come again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scenarios import own
from scenes import bash, call, calls, hang, hanging_run, over, results, scripted, tools

from greenroom import (
    AgentConfig,
    AgentRuntime,
    CancelToken,
    ConfigError,
    ModelRequest,
    RequestConflict,
    RunFailed,
    RunStatus,
    Scripted,
    SessionBusy,
    SessionExists,
    TextDelta,
    ToolRegistry,
    UsageError,
)
from greenroom.runtime.messages import Delta
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.testing import FakeSandboxes, Fault, FaultyStore, strict_history


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


async def test_creating_comes_again(runtime: AgentRuntime) -> None:
    agent = scripted("one", "two")
    first = await runtime.create_session(agent, request_id="R")
    await first.run("go")
    assert (await runtime.create_session(agent, request_id="R")).id == first.id
    named = await runtime.create_session(agent, "mine", request_id="S")
    assert (await runtime.create_session(agent, "mine", request_id="S")).id == named.id
    with pytest.raises(SessionExists):
        await runtime.create_session(agent, "mine", request_id="T")
    with pytest.raises(SessionExists):
        await runtime.create_session(agent, "mine")
    assert len([info async for info in runtime.sessions()]) == 2


async def test_runs_of_a_session_wait_for_one_another_and_sessions_do_not(home: Path) -> None:
    running: list[str] = []
    overlap: set[tuple[str, ...]] = set()
    lock = threading.Lock()

    async def model(request: Any) -> str:
        with lock:
            running.append(request.session_id)
            overlap.add(tuple(sorted(running)))
        await asyncio.sleep(0.01)
        running.remove(request.session_id)
        return "ok"

    async with over(MemoryObjectStore()) as runtime:
        sessions = [await runtime.create_session(scripted(*[model] * 3), name) for name in ("a", "b")]
        await asyncio.gather(*(session.run(f"{n}") for session in sessions for n in range(3)))
        assert all(len(set(together)) == len(together) for together in overlap)
        assert ("a", "b") in overlap
        for session in sessions:
            messages = (await session.transcript()).messages
            assert [message.role for message in messages] == ["user", "assistant"] * 3


async def test_a_request_id_is_checked_by_every_verb(runtime: AgentRuntime) -> None:
    session = await runtime.create_session(scripted("ok"))
    for verb in (session.cancel, session.resume):
        with pytest.raises(ConfigError, match="request id"):
            await verb(request_id="ü")


@pytest.mark.slow
async def test_closing_takes_its_time_and_no_more_and_says_what_was_left(home: Path) -> None:
    started, objects = asyncio.Event(), MemoryObjectStore()
    tools = ToolRegistry()

    @tools.tool
    async def stubborn() -> str:
        started.set()
        while not done.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue
        return "x"

    @tools.tool
    def blocking() -> str:
        started.set()
        done.wait(30)
        return "x"

    done = threading.Event()
    runtime = over(objects)
    for number, name in enumerate(("stubborn", "blocking")):
        started.clear()
        session = await runtime.create_session(own(calls(call(name)), tools=tools), f"s{number}")
        run = asyncio.create_task(session.run("go"))
        run.add_done_callback(lambda done: done.cancelled() or done.exception())
        await started.wait()
    began = asyncio.get_running_loop().time()
    left = await runtime.close(0.2)
    assert asyncio.get_running_loop().time() - began < 0.2 + 3.5
    assert set(left) <= {"s0", "s1"}
    assert await runtime.close() == ()
    with pytest.raises(UsageError, match="closed"):
        await runtime.create_session(own("x"))
    done.set()
    async with over(objects) as second:
        for sid in ("s0", "s1"):
            await (await second.open(sid, own("x"))).cancel()
            assert (await second.handle(sid).status()).state == "Interrupted"
