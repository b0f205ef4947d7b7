"""Tools, models and stores that misbehave, and what a run says then."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from scenarios import own
from scenes import call, calls, over, results, scripted, tools

from greenroom import (
    CancelToken,
    Limits,
    Message,
    MessageDelta,
    RunFailed,
    TextBlock,
    TextDelta,
    ToolCallBlock,
)
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.testing import FakeSandboxes, Fault, FaultyStore, strict_history


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


@pytest.mark.slow
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
