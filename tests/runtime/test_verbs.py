"""Verbs that come again, hard ends, claims that are let go of, and what a failed run leaves to look at."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from scenarios import own
from scenes import bash, call, calls, results, scripted

from greenroom import (
    AgentRuntime,
    CancelToken,
    ClaimHeld,
    ConfigError,
    Conflict,
    Event,
    Fenced,
    Message,
    MessageDelta,
    RequestConflict,
    RunFailed,
    RunStatus,
    SessionBusy,
    SessionExists,
    Storage,
    TextBlock,
    TextDelta,
    ToolCallBlock,
    ToolRegistry,
    UsageError,
)
from greenroom.runtime import call_group
from greenroom.runtime.events import EventBuffer
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.storage import MemoryObjectStore, SessionStore
from greenroom.testing import FakeSandboxes, Fault, FaultyStore, strict_history


def over(objects: ObjectStore, **options: Any) -> AgentRuntime:
    return AgentRuntime(Storage.over(objects), sandboxes=options.pop("sandboxes", FakeSandboxes()), **options)


def waits(started: asyncio.Event) -> Any:
    async def hang(command: str) -> str:
        started.set()
        await asyncio.sleep(600)
        return ""

    return hang


ASK = calls(call("askFollowupQuestion", question="?"))

# -- create


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


# -- cancel


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


# -- terminate


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


# -- release_claim


async def abandoned(objects: ObjectStore, *, request_id: str | None = None) -> str:
    """A session whose owner died after it had accepted an answer; the question's id."""
    hanging, started = asyncio.Event(), asyncio.Event()

    async def model(request: Any) -> str:
        started.set()
        await hanging.wait()
        return "never"

    faulty = FaultyStore(objects)
    runtime = over(faulty)
    session = await runtime.create_session(scripted(ASK, model), "s")
    question = (await session.run("go")).interrupt
    assert question is not None
    answer = asyncio.create_task(session.answer(question.id, "yes", request_id=request_id))
    await started.wait()
    faulty.faults.append(Fault("unavailable", times=10**9))
    answer.cancel()
    await runtime.close()
    return question.id


async def test_a_claim_of_a_dead_owner_is_only_let_go_of_by_name(home: Path) -> None:
    objects = MemoryObjectStore()
    question = await abandoned(objects, request_id="R")
    async with over(objects) as runtime:
        session = await runtime.open("s", scripted(ASK, "went on"))
        info = await session.status()
        assert info.owner is not None
        revision = info.revision
        with pytest.raises(ClaimHeld, match=f"release_claim\\({info.epoch}\\)"):
            await session.answer(question, "no", request_id="other")
        with pytest.raises(ClaimHeld, match="R"):
            await session.answer(question, "yes", request_id="R")
        with pytest.raises(SessionBusy):
            await session.run("x")
        with pytest.raises(Conflict, match="epoch"):
            await session.release_claim(info.epoch - 1)
        await session.release_claim(info.epoch)
        released = await session.status()
        assert (released.owner, released.revision) == (None, revision)
        await session.release_claim(released.epoch)
        result = await session.answer(question, "yes", request_id="R")
        assert (result.text, result.revision) == ("went on", revision + 1)
        assert await session.answer(question, "yes", request_id="R") == result
        assert results(await session.transcript())[0].text == "yes"


async def test_a_released_claim_can_be_resumed(home: Path) -> None:
    objects = MemoryObjectStore()
    await abandoned(objects)
    async with over(objects) as runtime:
        session = await runtime.open("s", scripted(ASK, "went on"))
        await session.release_claim((await session.status()).epoch)
        result = await session.resume()
        assert result is not None
        assert result.text == "went on"


async def test_the_old_owner_is_fenced_off_by_the_release(home: Path) -> None:
    objects = MemoryObjectStore()
    await abandoned(objects)
    store = SessionStore(objects)
    found = await store.read("s")
    assert found is not None
    async with over(objects) as runtime:
        session = await runtime.open("s", scripted(ASK, "x"))
        await session.release_claim(found[0].epoch)
    with pytest.raises(OSError, match="taken over"):
        await store.save("s", found[0].but(write_no=99, write_id="late"), found[1])


async def test_a_claim_of_a_living_owner_is_not_let_go_of(home: Path) -> None:
    started = asyncio.Event()
    async with over(MemoryObjectStore(), sandboxes=FakeSandboxes(waits(started))) as runtime:
        session = await runtime.create_session(scripted(bash("x"), "ok"))
        run = asyncio.create_task(session.run("go"))
        await started.wait()
        with pytest.raises(SessionBusy, match="running here"):
            await session.release_claim((await session.status()).epoch)
        await session.cancel()
        await run


# -- run


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


async def test_a_failed_run_has_what_was_said_and_where_it_stands(home: Path) -> None:
    class Dies:
        async def stream(self, request: Any, cancel: CancelToken) -> Any:
            if request.call_no == 0:
                made = ToolCallBlock(id="1", name="bash", arguments={"command": "x"})
                yield MessageDelta(Message(role="assistant", content=(TextBlock(text="first"), made)))
                return
            yield TextDelta("so far")
            raise ValueError("the line is dead")

    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(dataclasses.replace(scripted("x"), provider=Dies()))
        with pytest.raises(RunFailed) as failed:
            await session.run("go")
        error = failed.value
        assert error.result.text == "so far"
        assert error.result.steps == 1
        assert "provider_permanent" in str(error)
        assert not error.resumable
        assert [message.text for message in (await session.transcript()).messages][-1] != "so far"


async def test_a_lost_store_leaves_the_pending_calls_to_look_at(home: Path) -> None:
    objects = MemoryObjectStore()
    store = FaultyStore(objects)

    def breaks(command: str) -> str:
        store.faults.append(Fault("unavailable", times=10**9))
        return "x"

    sandboxes = FakeSandboxes(breaks)
    async with over(store, sandboxes=sandboxes) as runtime:
        batch = calls(call("bash", command="a"), call("bash", command="b"))
        session = await runtime.create_session(scripted({**batch, "text": "working"}, "ok"), "s")
        with pytest.raises(RunFailed) as failed:
            await session.run("go")
    result = failed.value.result
    assert failed.value.resumable
    assert result.text == "working"
    assert [(pending.name, pending.key[-3:]) for pending in result.pending_calls] == [("bash", "1/1")]


# -- events


def events(count: int, epoch: int = 1, first: int = 1) -> list[Event]:
    return [Event(f"{epoch}.{number}", "text", "s", 0.0, {"text": "x"}) for number in range(first, first + count)]


@pytest.mark.parametrize(
    ("cursor", "missed", "kept"),
    [("1.10", 0, 0), ("1.9", 0, 1), ("1.6", 0, 4), ("1.5", 1, 4), ("1.1", 5, 4), (None, 6, 4), ("2.1", 0, 0)],
)
def test_a_reader_learns_what_it_missed(cursor: str | None, missed: int, kept: int) -> None:
    buffer = EventBuffer(capacity=4)
    for event in events(10):
        buffer.emit(event)
    found, end = buffer.page(buffer.position_after(cursor))
    gaps = [event.missed for event in found if event.type == "gap"]
    assert (sum(gaps), len(found) - len(gaps), end) == (missed, kept, 10)


def test_a_cursor_of_an_earlier_owner_begins_with_what_is_here() -> None:
    buffer = EventBuffer()
    for event in events(3, epoch=2):
        buffer.emit(event)
    assert [event.id for event in buffer.page(buffer.position_after("1.7"))[0]] == ["2.1", "2.2", "2.3"]


# -- ordering


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


# -- close


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


# -- cancel, once more


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


async def test_a_resume_that_takes_a_request_over_has_a_receipt_of_its_own(home: Path) -> None:
    objects = MemoryObjectStore()
    question = await abandoned(objects, request_id="R1")
    async with over(objects) as runtime:
        session = await runtime.open("s", scripted(ASK, "went on"))
        result = await session.resume(request_id="R2")
        assert await session.resume(request_id="R2") == result
        assert await session.answer(question, "yes", request_id="R1") == result


async def test_a_host_fence_is_kept_by_whatever_changes_a_session(home: Path) -> None:
    objects = MemoryObjectStore()
    async with over(objects, host_fence=5) as new, over(objects, host_fence=1) as old:
        session = await (await old.create_session(scripted("ok"), "s")).submit("hello")
        assert session.name == "Ready"
        await (await new.open("s", scripted("ok"))).submit("more")
        with pytest.raises(Fenced):
            await old.handle("s").run()


async def test_a_half_character_of_a_model_does_no_harm(home: Path) -> None:
    class Half:
        async def stream(self, request: Any, cancel: CancelToken) -> Any:
            made = ToolCallBlock(id="1", name="send", arguments={"to": "half \ud83d"}, raw_arguments="{}")
            reply = (TextBlock(text="\udfff"), made) if request.call_no == 0 else (TextBlock(text="ok"),)
            yield MessageDelta(Message(role="assistant", content=reply))

    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(dataclasses.replace(own("x"), provider=Half()))
        assert (await session.run("go")).text == "ok"
        assert results(await session.transcript())[0].text == "sent to half ?"


async def test_a_head_holds_its_bound_whatever_a_provider_leaves_out(home: Path) -> None:
    objects = MemoryObjectStore()
    largest = 0

    class Watching(FaultyStore):
        async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
            nonlocal largest
            largest = max(largest, len(body) if key.endswith("/head") else 0)
            return await super().put_if_match(key, body, etag)

    class NoRaw:
        async def stream(self, request: Any, cancel: CancelToken) -> Any:
            made = [
                ToolCallBlock(id=str(n), name="bash", arguments={"command": "ü" * 4000 if n % 2 else "漢" * 980})
                for n in range(14)
            ]
            reply = tuple(made) if request.call_no == 0 else (TextBlock(text="ok"),)
            yield MessageDelta(Message(role="assistant", content=reply))

    async with over(Watching(objects)) as runtime:
        session = await runtime.create_session(dataclasses.replace(scripted("x"), provider=NoRaw()))
        assert (await session.run("go")).text == "ok"
    assert largest <= 40 * 1024
