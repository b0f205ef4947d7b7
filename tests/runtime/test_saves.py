"""How a session is saved: what waits, what a lost answer means, how large a head gets, what deletion leaves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from scenes import bash, call, calls, default_registry, over, results, scripted

from greenroom import (
    ConfigError,
    Fenced,
    Limits,
    RequestConflict,
    RunFailed,
    RunStatus,
    SubAgent,
    ToolRegistry,
)
from greenroom.runtime.ids import MAX_ID, MAX_REQUEST_ID, child_id
from greenroom.runtime.limits import MAX_CHILDREN
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.record import FOLD_SEGMENTS, HEAD_BYTES, KEPT_RECEIPTS
from greenroom.runtime.results import Failure, FailureKind
from greenroom.runtime.state import AgentState, Fail
from greenroom.runtime.storage import Head, MemoryObjectStore, SessionStore
from greenroom.runtime.storage.garbage import collect_garbage
from greenroom.runtime.storage.head import Receipt, SegmentRef
from greenroom.runtime.storage.layout import LARGE_TEXT
from greenroom.testing import FakeSandboxes, Fault, FaultyStore, strict_history


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryObjectStore())


async def head_of(objects: ObjectStore, sid: str) -> tuple[bytes, dict[str, Any]]:
    found = await objects.get(f"tree/{sid}/{sid}/head")
    assert found is not None
    return found[0], json.loads(found[0])


# -- what is durable when


async def test_an_effect_waits_for_its_mark_and_a_read_does_not(home: Path, store: FaultyStore) -> None:
    seen: list[tuple[str, bool]] = []
    gate = asyncio.Event()

    async def stored_mark(key: str) -> bool:
        _, head = await head_of(store.inner, "s")
        return any(c["key"].endswith(key) and c["started"] for c in (head["batch"] or {"calls": []})["calls"])

    async def read() -> str:
        seen.append(("read", await stored_mark("/1/0")))
        return "r"

    async def effect() -> str:
        seen.append(("effect", await stored_mark("/1/1")))
        gate.set()
        return "e"

    registry = ToolRegistry()
    registry.tool(read, effect="read_only")
    registry.tool(effect)
    store.faults.append(Fault("delay", "put_if_match", "/head", skip=1, seconds=0.05))
    async with over(store) as runtime:
        session = await runtime.create_session(
            scripted(calls(call("read"), call("effect")), "ok", tools=registry, sandbox=None), "s"
        )
        await session.run("go")
    assert seen == [("read", False), ("effect", True)]


@pytest.mark.parametrize("durability", ["effects", "step"])
async def test_saves_overlap_the_model_only_under_effects(home: Path, store: FaultyStore, durability: str) -> None:
    unsaved: list[int] = []

    async def model(request: Any) -> Any:
        _, head = await head_of(store.inner, "s")
        unsaved.append(request.call_no - head["state"]["agent"]["call_no"])
        return calls(call("read")) if request.call_no < 3 else "ok"

    registry = ToolRegistry()
    registry.tool(lambda: "x", name="read", effect="read_only")
    async with over(store) as runtime:
        agent = scripted(*[model] * 4, tools=registry, sandbox=None, durability=durability)
        session = await runtime.create_session(agent, "s")
        store.faults.append(Fault("delay", "put_if_match", "/head", times=100, seconds=0.01))
        await session.run("go")
    assert (max(unsaved) > 0) == (durability == "effects")
    assert (await head_of(store.inner, "s"))[1]["state"]["name"] == "Success"


async def test_at_most_one_head_write_is_in_flight(home: Path) -> None:
    class Counting(MemoryObjectStore):
        now = most = 0

        async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.002)
            self.now -= 1
            return await super().put_if_match(key, body, etag)

    objects = Counting()
    registry = ToolRegistry()
    registry.tool(lambda: "x", name="read", effect="read_only")
    async with over(objects) as runtime:
        script = [calls(call("read"))] * 8
        session = await runtime.create_session(scripted(*script, "ok", tools=registry, sandbox=None))
        assert (await session.run("go")).status is RunStatus.completed
    assert objects.most == 1


# -- lost answers and broken stores


@pytest.mark.parametrize("kind", ["lose_reply", "lose_request", "undecided"])
@pytest.mark.parametrize("skip", range(6))
async def test_a_write_whose_answer_is_lost_is_decided_and_nothing_is_repeated(
    home: Path, store: FaultyStore, kind: Any, skip: int
) -> None:
    sandboxes = FakeSandboxes()
    async with over(store, sandboxes=sandboxes) as runtime:
        session = await runtime.create_session(scripted(bash("one"), bash("two"), "ok"))
        store.faults.append(Fault(kind, "put_if_match", "/head", skip=skip))
        result = await session.run("go")
        assert result.status is RunStatus.completed
        assert sandboxes.opened[session.id].commands == ["one", "two"]
        strict_history((await session.transcript()).messages)


@pytest.mark.parametrize("kind", ["lose_reply", "lose_request"])
@pytest.mark.parametrize("part", ["agent/", "active/", "seg/", "blob/", "/head"])
async def test_a_lost_answer_to_the_writing_of_any_object_is_decided(
    home: Path, store: FaultyStore, kind: Any, part: str
) -> None:
    sandboxes = FakeSandboxes(lambda command: "z" * 20_000)
    store.faults.append(Fault(kind, "put_if_absent", part, times=2))
    async with over(store, sandboxes=sandboxes) as runtime:
        session = await runtime.create_session(
            scripted(calls(call("bash", command="1"), call("bash", command="2")), "ok")
        )
        assert (await session.run("go")).status is RunStatus.completed
        assert sandboxes.opened[session.id].commands == ["1", "2"]
        strict_history((await session.transcript()).messages)


@pytest.mark.parametrize("verb", ["put_if_absent", "put_if_match", "get"])
async def test_a_store_that_goes_away_ends_the_run_and_loses_nothing(home: Path, store: FaultyStore, verb: str) -> None:
    sandboxes = FakeSandboxes(lambda command: "z" * 20_000)
    async with over(store, sandboxes=sandboxes) as runtime:
        session = await runtime.create_session(scripted(bash("one"), bash("two"), "ok"))
        store.faults.append(Fault("unavailable", verb, "tree/", skip=3, times=1))
        run = asyncio.create_task(session.run("go"))
        await asyncio.wait([run])
        ended = run.exception()
        if ended is not None:
            assert isinstance(ended, RunFailed)
            assert (ended.resumable, ended.failure.kind) == (True, "storage")
            async with over(store, sandboxes=FakeSandboxes(lambda command: "again")) as second:
                assert (await (await second.open(session.id)).resume()) is not None
        store.faults.clear()
        strict_history((await session.transcript()).messages)


async def test_losing_the_session_stops_the_model_at_once(home: Path, store: FaultyStore) -> None:
    streaming = asyncio.Event()

    async def hangs(request: Any) -> str:
        streaming.set()
        await asyncio.sleep(60)
        return "never"

    registry = ToolRegistry()
    registry.tool(lambda: "x", name="read", effect="read_only")
    store.faults.append(Fault("delay", "put_if_match", "/head", skip=1, seconds=0.1))
    async with over(store) as runtime, over(store) as other:
        session = await runtime.create_session(scripted(calls(call("read")), hangs, tools=registry, sandbox=None))
        run = asyncio.create_task(session.run("go"))
        await streaming.wait()
        await other.handle(session.id).cancel()
        with pytest.raises(RunFailed) as failed:
            await asyncio.wait_for(run, 5)
        assert isinstance(failed.value.__cause__, Fenced)


# -- the size of a head


@pytest.mark.slow
async def test_a_head_stays_within_its_bound_at_its_fullest(home: Path) -> None:
    objects = MemoryObjectStore()
    largest = 0

    class Watching(FaultyStore):
        async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
            nonlocal largest
            if key.endswith("/head"):
                largest = max(largest, len(body))
            return await super().put_if_match(key, body, etag)

    child = scripted("ok", name="child", sandbox=None, tools=ToolRegistry())
    registry = default_registry()

    def big(text: str) -> str:
        return "y" * 50_000

    registry.tool(big, effect="idempotent")
    spawns = calls(*[call("helper", task=f"task {n}") for n in range(60)])
    bigs = calls(*[call("big", text="x" * 3000) for _ in range(20)])
    asks = calls(call("askFollowupQuestion", question="q" * 3000), *[call("bash", command="c" * 3000)] * 30)
    agent = scripted(
        *[spawns, bigs, asks, "ok", *["short"] * 200],
        tools=registry,
        subagents={"helper": SubAgent(child, parallel=True)},
        limits=Limits(max_children=64),
    )
    async with over(Watching(objects)) as runtime:
        session = await runtime.create_session(agent)
        result = await session.run("go", request_id="first")
        assert result.status is RunStatus.suspended
        assert result.interrupt is not None
        assert (await session.answer(result.interrupt.id, "a" * 3000)).text == "ok"
        for number in range(KEPT_RECEIPTS + 5):
            await session.run("m" * 2000, request_id=f"request-{number}")
        strict_history((await session.transcript()).messages)
        assert largest <= HEAD_BYTES
        assert largest > HEAD_BYTES / 4, "the test does fill it"
    async with over(objects) as second:
        again = await second.open(session.id, agent)
        assert len(results(await again.transcript())) == 60 + 20 + 31
        assert (await again.run("m" * 2000, request_id="request-60")).text == "short"


def test_a_head_that_holds_the_most_of_everything_is_within_its_bound() -> None:
    """Children, receipts, references, ids, a summary of what the run said: what no rolling and spilling takes away."""
    sid = "s" * MAX_ID
    ref = SegmentRef(name="12345-123456-0123456789ab", count=123, size=123456, hash="f" * 32)
    receipt = Receipt(request_id="r" * MAX_REQUEST_ID, digest="d" * 32, blob="b" * 64)
    head = Head(
        session_id=child_id(sid, "x"),
        root=sid,
        parent=child_id(sid, "y"),
        parent_call=f"{child_id(sid, 'y')}/1/1/1",
        agent="a" * 64,
        write_id="w" * 32,
        state=Fail(
            agent=AgentState(session_id=sid, final_text="t" * LARGE_TEXT),
            failure=Failure(kind=FailureKind.tool, message="\U0001f600" * 5000, retryable=False),
        ),
        spawned=tuple(f"12/{1000 + number}/0" for number in range(MAX_CHILDREN)),
        segments=(ref,) * FOLD_SEGMENTS,
        index=ref,
        receipts=(receipt,) * KEPT_RECEIPTS,
        batch_blob="b" * 64,
    )
    assert HEAD_BYTES * 0.9 < len(head.encode()) <= HEAD_BYTES


async def test_a_long_answer_is_no_part_of_the_head_and_comes_back_whole(home: Path) -> None:
    objects = MemoryObjectStore()
    text = "ü" + "x" * 100_000
    async with over(objects) as runtime:
        session = await runtime.create_session(scripted({"text": text, "calls": [call("bash", command="c")]}, text))
        assert (await session.run("go", request_id="R")).text == text
    assert len((await head_of(objects, session.id))[0]) < 4096
    async with over(objects) as second:
        again = await second.open(session.id)
        assert (await again.run("go", request_id="R")).text == text


@pytest.mark.parametrize("request_id", ["", "r" * 129, "a\nb", "ü"])
async def test_a_request_id_that_no_receipt_can_carry_is_refused(home: Path, request_id: str) -> None:
    async with over(MemoryObjectStore()) as runtime:
        session = await runtime.create_session(scripted("ok"))
        with pytest.raises(ConfigError, match="request id"):
            await session.run("go", request_id=request_id)


@pytest.mark.slow
async def test_a_thousand_children_are_no_other_case(home: Path) -> None:
    objects = MemoryObjectStore()
    child = scripted("ok", name="child", sandbox=None, tools=ToolRegistry())
    batches = [calls(*[call("helper", task="t")] * 205)] * 5
    agent = scripted(
        *batches,
        "done",
        subagents={"helper": SubAgent(child, parallel=True)},
        limits=Limits(max_children=MAX_CHILDREN),
    )
    async with over(objects) as runtime:
        session = await runtime.create_session(agent)
        assert (await session.run("go")).text == "done"
        refused = [block for block in results(await session.transcript()) if "max_children" in block.text]
        assert len(refused) == 5 * 205 - MAX_CHILDREN == 1
        assert len((await session.status()).children) == MAX_CHILDREN
        assert len((await head_of(objects, session.id))[0]) <= HEAD_BYTES
        assert len([info async for info in runtime.sessions()]) == MAX_CHILDREN + 1
        await session.delete()
        assert [info async for info in runtime.sessions()] == []


@pytest.mark.slow
async def test_many_segments_are_folded_and_read_back(home: Path) -> None:
    objects = MemoryObjectStore()
    text = "z" * 17_000
    count = FOLD_SEGMENTS * 2 + 10
    async with over(objects, sandboxes=FakeSandboxes(lambda command: text)) as runtime:
        script = [bash(str(number)) for number in range(count)]
        session = await runtime.create_session(scripted(*script, "ok", limits=Limits(max_iter=count + 1)))
        await session.run("go")
        _, head = await head_of(objects, session.id)
        assert len(head["segments"]) <= FOLD_SEGMENTS
        assert head["index"] is not None
    async with over(objects) as second:
        transcript = await (await second.open(session.id)).transcript()
        assert len(results(transcript)) == count
        strict_history(transcript.messages)


@pytest.mark.slow
async def test_writes_and_bytes_per_step_do_not_grow_with_the_history(home: Path) -> None:
    store = FaultyStore(MemoryObjectStore())
    sizes: list[int] = []
    inner = store.inner

    class Measured(FaultyStore):
        async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
            sizes.append(len(body))
            return await super().put_if_match(key, body, etag)

        async def put_if_absent(self, key: str, body: bytes) -> str:
            sizes.append(len(body))
            return await super().put_if_absent(key, body)

    async with over(Measured(inner), sandboxes=FakeSandboxes(lambda command: "z" * 2000)) as runtime:
        session = await runtime.create_session(scripted(*[bash("x")] * 400, "ok", limits=Limits(max_iter=1000)))
        await session.run("go")
    early, late = sum(sizes[20:1020]), sum(sizes[-1000:])
    assert late < early * 1.3


@pytest.mark.slow
async def test_a_thousand_segments_and_sessions_are_no_other_case(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.runtime.record.ROLL_BYTES", 10)
    objects = MemoryObjectStore()
    async with over(objects) as runtime:
        script = [calls(call("read"))] * 600
        registry = ToolRegistry()
        registry.tool(lambda: "x", name="read", effect="read_only")
        session = await runtime.create_session(
            scripted(*script, "ok", tools=registry, sandbox=None, limits=Limits(max_iter=2000), durability="step")
        )
        await session.run("go")
        segments = [key async for key in objects.list(f"tree/{session.id}/") if "/seg/" in key]
        assert len(segments) > 1000
        assert len((await session.transcript()).messages) == 1202
        assert await collect_garbage(SessionStore(objects), 0, 0) > 10, "the indices before the last one"
        strict_history((await session.transcript()).messages)
        quick = scripted("x", sandbox=None, tools=ToolRegistry())
        for number in range(1100):
            await runtime.create_session(quick, f"many-{number:04}")
        assert len([info async for info in runtime.sessions(prefix="many-")]) == 1100


# -- receipts


@pytest.mark.slow
async def test_a_receipt_answers_long_after_and_from_another_process(home: Path) -> None:
    objects = MemoryObjectStore()
    async with over(objects) as runtime:
        session = await runtime.create_session(scripted(*[str(number) for number in range(100)]))
        first = await session.run("go", request_id="the one")
        for number in range(20):
            await session.run("more", request_id=f"other {number}")
    async with over(objects) as second:
        again = await second.open(session.id)
        assert await again.run("go", request_id="the one") == first
        with pytest.raises(RequestConflict):
            await again.run("something else", request_id="the one")
        assert (await again.status()).revision == 21
        for number in range(KEPT_RECEIPTS):
            await again.run("more", request_id=f"later {number}")
        beyond = await again.run("go", request_id="the one")
        assert beyond != first, "beyond the ring it is a new request, as the docs say"


# -- host fences


async def test_a_host_with_a_lower_fence_is_refused(home: Path) -> None:
    objects = MemoryObjectStore()
    async with over(objects, host_fence=7) as new:
        session = await new.create_session(scripted("one", "two", "three"))
        await session.run("go")
    async with over(objects, host_fence=6) as old:
        with pytest.raises(Fenced, match="host fence 7"):
            await (await old.open(session.id)).run("go")
    async with over(objects) as unfenced:
        with pytest.raises(Fenced):
            await (await unfenced.open(session.id)).run("go")
    async with over(objects, host_fence=7) as same:
        assert (await (await same.open(session.id)).run("go")).text == "two"


# -- deleting
