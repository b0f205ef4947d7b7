"""Sessions of another owner: refused, taken over, let go of, fenced off."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scenes import (
    ASK,
    bash,
    call,
    calls,
    cancelled_transcript,
    default_registry,
    hang,
    hanging_run,
    over,
    results,
    scripted,
    waits,
)

from greenroom import (
    ClaimHeld,
    Conflict,
    Fenced,
    RunFailed,
    RunStatus,
    SessionBusy,
)
from greenroom.runtime.journal import (
    CANCELLED_WHILE_RUNNING,
    OUTCOME_UNKNOWN,
)
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.storage import MemoryObjectStore, SessionStore
from greenroom.testing import FakeSandboxes, Fault, FaultyStore, strict_history


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
