"""Events over actors: many readers, readers that do not read, and readers that come back after a take-over."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest
from scenes import bash, scripted, until

from greenroom import Event, RunStatus
from greenroom.actors.client import RayRuntime, RaySession

pytestmark = pytest.mark.ray


async def read_run(session: RaySession, after: str | None = None) -> list[Event]:
    """The events from the cursor to the next end of a run."""
    found = []
    async for event in session.events(after=after, follow=True):
        found.append(event)
        if event.type == "run_finished":
            return found
    raise AssertionError("a reader that follows never ends")


async def actor_pid(runtime: RayRuntime, session_id: str) -> int:
    actor = await runtime.supervisor().actor_of(session_id)
    assert actor is not None
    return await actor.pid()


async def test_fifty_idle_readers_cost_next_to_nothing_and_see_the_next_run(on_ray: RayRuntime) -> None:
    session = await on_ray.create_session(scripted("first", "second"))
    await session.run("go")
    first = await read_run(session)
    readers = [asyncio.ensure_future(read_run(session, first[-1].id)) for _ in range(50)]
    await asyncio.sleep(2)  # by now all of them wait
    supervisor = psutil.Process((await on_ray.pool_status()).supervisor_pid)
    before = sum(supervisor.cpu_times()[:2])
    await asyncio.sleep(3)
    idle = (sum(supervisor.cpu_times()[:2]) - before) / 3
    assert not any(reader.done() for reader in readers)
    result = await session.run("again")
    assert result.text == "second"
    seen = await asyncio.wait_for(asyncio.gather(*readers), 30)
    for events in seen:
        assert events[0].type == "run_started"
        assert [event.id for event in events] == [event.id for event in seen[0]]
        assert events[-1].data["result"].text == "second"
    assert idle < 0.5, "a part of a CPU; polling takes all of one"


async def test_a_reader_that_never_reads_holds_up_nobody(on_ray: RayRuntime) -> None:
    session = await on_ray.create_session(scripted(*[bash("true")] * 3, "done"))
    lazy = session.stream("go")
    assert (await anext(lazy)).type == "run_started"
    idle = session.events(follow=True)
    await anext(idle)
    seen = await asyncio.wait_for(read_run(session), 30)
    assert seen[-1].data["result"].text == "done"
    assert (await session.status()).state == "Success"
    rest = [event async for event in lazy]  # what it left lies there still
    assert rest[-1].type == "run_finished"
    await idle.aclose()  # type: ignore[attr-defined]


async def test_who_reconnects_after_a_take_over_is_told_of_it_and_reads_to_the_end(on_ray: RayRuntime) -> None:
    session = await on_ray.create_session(scripted(bash("sleep 1; echo x"), bash("sleep 1; echo y"), "finished"))
    run = asyncio.create_task(session.run("go"))
    seen: list[Event] = []
    async for event in session.events(follow=True):
        seen.append(event)
        if event.type == "tool_started":
            break
    os.kill(await actor_pid(on_ray, session.id), signal.SIGKILL)
    rest = await asyncio.wait_for(read_run(session, seen[-1].id), 60)
    assert (await run).status is RunStatus.completed
    assert "reset" in [event.type for event in rest]
    ids = [tuple(map(int, event.id.split("."))) for event in [*seen, *rest]]
    assert ids == sorted(set(ids)), "in order, and none twice"
    assert rest[-1].data["result"].text == "finished"


async def test_a_reader_follows_from_run_to_run_and_over_actors(on_ray: RayRuntime) -> None:
    session = await on_ray.create_session(scripted("one", "two", "three"))
    texts: list[Any] = []

    async def follow() -> None:
        async for event in session.events(follow=True):
            if event.type == "run_finished":
                texts.append(event.data["result"].text)
            if len(texts) == 3:
                return

    reader = asyncio.ensure_future(follow())
    for number in range(3):
        await session.run("go")
        await until(lambda: len(texts) > number, "the reader sees its end")  # noqa: B023  # awaited here
        os.kill(await actor_pid(on_ray, session.id), signal.SIGKILL)
    await asyncio.wait_for(reader, 30)
    assert texts == ["one", "two", "three"]
