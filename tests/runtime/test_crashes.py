"""The owner dies before or after any one request to the store; a fresh process recovers, and every promise holds.

The dead owner is one whose store answers nothing any more from that request on. What is checked: no command of the
sandbox ran twice, every history is one that a strict provider takes, the session and its child come to an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from scenes import bash, call, calls, default_registry, scripted

from greenroom import AgentRuntime, GreenroomError, RunStatus, Storage, StorageError, SubAgent
from greenroom.runtime import batch, record
from greenroom.runtime.journal import CallRecord, Recovery
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.testing import FakeSandboxes, strict_history


class DyingStore:
    """Goes well until request `last`, which is made or not (`after`) and answered by nobody, like all later ones."""

    def __init__(self, inner: ObjectStore, last: int, *, after: bool) -> None:
        self._inner = inner
        self._last = last
        self._after = after
        self.count = 0

    async def get(self, key: str) -> tuple[bytes, str] | None:
        found: tuple[bytes, str] | None = await self._request(lambda: self._inner.get(key))
        return found

    async def put_if_absent(self, key: str, body: bytes) -> str:
        made: str = await self._request(lambda: self._inner.put_if_absent(key, body))
        return made

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        made: str = await self._request(lambda: self._inner.put_if_match(key, body, etag))
        return made

    async def delete(self, key: str) -> None:
        await self._request(lambda: self._inner.delete(key))

    async def delete_many(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        await self._request(lambda: self._inner.delete_many(wanted))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        async for key in self._inner.list(prefix):
            yield key

    async def probe(self) -> None:
        """Is not counted."""

    async def close(self) -> None:
        """Nor is this."""

    @property
    def dead(self) -> bool:
        return self.count > self._last

    async def _request(self, work: Any) -> Any:
        self.count += 1
        await asyncio.sleep(0)
        if self.dead or (self.count == self._last and not self._after):
            self.count = max(self.count, self._last + 1)
            raise StorageError("the owner is dead", kind="unavailable")
        made = await work()
        if self.count == self._last:
            self.count += 1
            raise StorageError("the owner died before it heard the answer", kind="unavailable")
        return made


def scene(durability: str) -> Any:
    """Effects alone and in a batch with reads, large results that are rolled, a child with effects, a question."""
    registry = default_registry()
    registry.tool(lambda: "z" * 9000, name="read", description="r", effect="read_only")
    child = scripted(bash("child-1"), bash("child-2"), "child done", name="child", sandbox=None)
    return scripted(
        bash("one"),
        calls(call("read"), call("bash", command="two"), call("read"), call("bash", command="three")),
        calls(call("helper", task="h")),
        calls(call("read"), call("read"), call("read")),
        calls(call("askFollowupQuestion", question="?"), call("bash", command="four")),
        bash("five"),
        "done",
        tools=registry,
        subagents={"helper": SubAgent(child)},
        durability=durability,
    )


async def drive(runtime: AgentRuntime, agent: Any) -> None:
    """Brings the session to its end from wherever it is, as a host would."""
    try:
        session = await runtime.create_session(agent, "s")
    except GreenroomError:
        session = await runtime.open("s", agent)
    for _ in range(8):
        info = await session.status()
        if info.state == "Success":
            return
        if info.waiting_for is not None:
            await session.answer(info.waiting_for.id, "yes")
        elif info.state == "Ready":
            await session.run("go" if not (await session.transcript()).messages else None)
        else:
            await session.resume()
    raise AssertionError(f"the session does not come to its end: {await session.status()}")


async def crash_at(request: int, *, after: bool, durability: str) -> bool:
    """One schedule; False when the scene was over before that request."""
    inner = MemoryObjectStore()
    sandboxes = FakeSandboxes()
    ran: list[str] = []

    def note(command: str) -> str:
        ran.append(command)
        return "x"

    sandboxes._on_command = note
    agent = scene(durability)
    dying = DyingStore(inner, request, after=after)
    try:
        async with AgentRuntime(Storage.over(dying), sandboxes=sandboxes) as first:
            await drive(first, agent)
    except GreenroomError:
        pass
    reached = dying.dead
    async with AgentRuntime(Storage.over(inner), sandboxes=sandboxes) as second:
        await drive(second, agent)
        infos = [info async for info in second.sessions()]
        for info in infos:
            strict_history((await second.handle(info.session_id).transcript()).messages)
            assert info.owner is None
        assert [info.state for info in infos if info.session_id == "s"] == ["Success"]
    assert len(ran) == len(set(ran)), f"request {request} ({'after' if after else 'before'}): ran twice: {ran}"
    return reached


@pytest.mark.parametrize("durability", ["effects", "step"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_crash_at_any_request_repeats_no_effect(
    home: Path, monkeypatch: pytest.MonkeyPatch, after: bool, durability: str
) -> None:
    monkeypatch.setattr(record, "ROLL_BYTES", 500)  # so that the scene rolls and folds as a long session does
    monkeypatch.setattr(record, "FOLD_SEGMENTS", 1)
    schedules = 0
    while await crash_at(schedules + 1, after=after, durability=durability):
        schedules += 1
    assert schedules > 45


def always_runs(call: CallRecord, incarnation: str | None) -> Recovery:
    """A journal without marks."""
    return Recovery.reuse if call.outcome is not None else Recovery.run


async def test_a_journal_that_forgets_its_marks_is_caught(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "decide", always_runs)
    caught = 0
    for request in range(1, 51):
        try:
            await crash_at(request, after=False, durability="effects")
        except AssertionError as error:
            caught += "ran twice" in str(error)
    assert caught > 3


async def test_a_cancel_whose_owner_dies_at_any_request_ends_parked(home: Path) -> None:
    """From the cancel on: whatever the owner still managed to write, the next one parks and nothing runs again."""
    reached, request = True, 1
    while reached:
        inner = MemoryObjectStore()
        running = asyncio.Event()
        ran: list[str] = []

        async def hang(command: str, running: asyncio.Event = running, ran: list[str] = ran) -> str:
            ran.append(command)
            running.set()
            await asyncio.sleep(60)
            return ""

        sandboxes = FakeSandboxes(hang)
        agent = scripted(calls(call("bash", command="one"), call("bash", command="two")), "resumed")
        dying = DyingStore(inner, 10**9, after=False)
        first = AgentRuntime(Storage.over(dying), sandboxes=sandboxes)
        session = await first.create_session(agent, "s")
        run = asyncio.create_task(session.run("go"))
        await running.wait()
        dying._last = dying.count + request
        await asyncio.gather(session.cancel("stop"), run, return_exceptions=True)
        reached = dying.dead
        await first.close()
        async with AgentRuntime(Storage.over(inner), sandboxes=FakeSandboxes()) as second:
            again = await second.open("s", agent)
            info = await again.status()
            if info.owner is not None:
                result = await again.resume() if b'"cancel":{' in (await _head(inner)) else await again.cancel("stop")
                assert result is not None
                assert result.status is RunStatus.cancelled
            assert (await again.status()).state == "Interrupted"
            strict_history((await again.transcript()).messages)
        assert ran == ["one"]
        request += 1
    assert request > 3


async def _head(objects: ObjectStore) -> bytes:
    found = await objects.get("tree/s/s/head")
    assert found is not None
    return found[0]
