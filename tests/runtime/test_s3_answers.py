"""What S3 may answer to a head's write, by a proxy before a real server: each answer means what it says, no more."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3servers
from s3proxy import Plan, Step, proxy
from scenes import CASES, bash, scripted

from greenroom import AgentRuntime, Conflict, Deleted, Fenced, RunStatus, Storage, StorageError, Undecided
from greenroom.runtime.state import AgentState, Ready
from greenroom.runtime.storage import Head, SessionStore
from greenroom.runtime.storage.probe import probe_conditions
from greenroom.runtime.storage.s3 import S3ObjectStore
from greenroom.testing import FakeSandboxes, strict_history

pytestmark = pytest.mark.slow

ROWS = json.loads((CASES / "C33_s3_answers.json").read_text())["rows"]


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3servers.credentials().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def at(credentials: None) -> Callable[[str], S3ObjectStore]:
    """A store at an address, always below the same prefix."""
    prefix = f"{uuid.uuid4().hex}/"
    return lambda endpoint: S3ObjectStore(s3servers.BUCKET, prefix, endpoint=endpoint, region="us-east-1")


def head(number: int, **fields: Any) -> Head:
    state = Ready(agent=AgentState(session_id="s"))
    base = Head(session_id="s", root="s", agent="a", write_id=f"ours-{number}", write_no=number, state=state)
    return base.model_copy(update=fields)


def steps_of(answers: list[str]) -> list[Step]:
    names = {
        "200": "pass",
        "connection reset before the server stored it": "lose_request",
        "412": "412 PreconditionFailed",
    }
    return [Step(names.get(answer, answer)) for answer in answers]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(row["answers"]))
async def test_the_rows(row: dict[str, Any], seaweedfs: str, at: Callable[[str], S3ObjectStore]) -> None:
    direct = SessionStore(at(seaweedfs))
    answers = row["answers"]
    if "create" in row:
        with proxy(seaweedfs, Plan([Step("409 ConditionalRequestConflict"), Step()], key="/head")) as endpoint:
            await SessionStore(at(endpoint)).create("s", head(6))
        assert (await direct.read("s")) is not None
        return
    etag = await direct.create("s", head(6))
    if answers[-1].startswith("412"):  # somebody else was faster
        await direct.save("s", head(7, write_id="theirs"), etag)
    if answers == ["404 NoSuchKey"]:
        await direct.objects.delete("tree/s/s/head")
    plan = Plan(steps_of(answers), key="/head")
    with proxy(seaweedfs, plan) as endpoint:
        store = SessionStore(at(endpoint))
        if answers[-1].startswith("412"):
            with pytest.raises(Conflict):
                await store.save("s", head(7), etag)
            found = await direct.read("s")
            assert found is not None
            assert found[0].write_id == "theirs"
        elif answers == ["404 NoSuchKey"]:
            with pytest.raises(Deleted):
                await store.save("s", head(7), etag)
            assert await direct.read("s") is None
        else:
            await store.save("s", head(7), etag)
            found = await direct.read("s")
            assert found is not None
            assert found[0].write_id == "ours-7"


@pytest.mark.parametrize(
    "what", ["lose_reply", "lose_request", "500 InternalError", "503 SlowDown", "409 OperationAborted"]
)
async def test_a_lost_or_undecided_answer_is_decided(
    what: str, seaweedfs: str, at: Callable[[str], S3ObjectStore]
) -> None:
    plan = Plan([Step(what), Step(what)], key="/head")
    with proxy(seaweedfs, plan) as endpoint:
        store = SessionStore(at(endpoint))
        etag = await store.create("s", head(1))
        plan.steps = [Step(what)]
        etag = await store.save("s", head(2), etag)
        found = await store.read("s")
        assert found == (head(2), etag)
        taken, _ = await SessionStore(at(seaweedfs)).acquire("s", "other")
        plan.steps = [Step(what)]
        with pytest.raises(Fenced):
            await store.save("s", head(3), etag)
        assert taken.epoch == 1


async def test_a_server_that_only_fails_is_reported_and_not_waited_for_for_ever(
    seaweedfs: str, at: Callable[[str], S3ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greenroom.runtime.storage.deciding.DECIDE_PAUSE", 0.001)
    with proxy(seaweedfs, Plan([Step("500 InternalError")] * 100, key="/head")) as endpoint:
        with pytest.raises(Undecided) as failed:
            await SessionStore(at(endpoint)).create("s", head(1))
        assert "resume" in failed.value.hint
    denied = Plan([Step("403 AccessDenied")], key="/head")
    with proxy(seaweedfs, denied) as endpoint, pytest.raises(StorageError, match="refuses access"):
        await SessionStore(at(endpoint)).create("s", head(1))


@pytest.mark.parametrize("bare", [("PUT", "GET"), ("PUT",), ("GET",)], ids="+".join)
async def test_etags_with_and_without_quotes_are_the_same(
    bare: tuple[str, ...], seaweedfs: str, at: Callable[[str], S3ObjectStore]
) -> None:
    plan = Plan(bare_etags=bare)
    with proxy(seaweedfs, plan) as endpoint:
        store = SessionStore(at(endpoint))
        etag = await store.create("s", head(1))
        assert await store.read("s") == (head(1), etag)
        plan.steps = [Step("lose_request")]  # undecided: the head is read, and its etag compared
        etag = await store.save("s", head(2), etag)
        assert await store.read("s") == (head(2), etag)
        await probe_conditions(store.objects)


async def test_slow_answers_and_delays_change_nothing(seaweedfs: str, at: Callable[[str], S3ObjectStore]) -> None:
    plan = Plan([Step("delay", 0.2), Step("slow")], method="GET")
    with proxy(seaweedfs, plan) as endpoint:
        store = SessionStore(at(endpoint))
        etag = await store.create("s", head(1))
        assert await store.read("s") == (head(1), etag)
        assert await store.read("s") == (head(1), etag)
        assert plan.seen >= 2


@pytest.mark.parametrize("what", ["lose_reply", "lose_request", "503 SlowDown"])
async def test_a_whole_run_goes_through_while_answers_are_lost(
    what: str, seaweedfs: str, at: Callable[[str], S3ObjectStore], home: Path
) -> None:
    sandboxes = FakeSandboxes()
    plan = Plan()
    with proxy(seaweedfs, plan) as endpoint:
        async with AgentRuntime(Storage.over(at(endpoint)), sandboxes=sandboxes) as runtime:
            plan.steps = [Step("pass"), Step(what)] * 4
            session = await runtime.create_session(scripted(bash("one"), bash("two"), "ok"))
            assert (await session.run("go")).status is RunStatus.completed
            assert sandboxes.opened[session.id].commands == ["one", "two"]
            strict_history((await session.transcript()).messages)


async def test_of_many_owners_on_s3_exactly_one_runs(seaweedfs: str, at: Callable[[str], S3ObjectStore]) -> None:
    store = SessionStore(at(seaweedfs))
    await store.create("s", head(1))
    won = await asyncio.gather(*(store.acquire("s", f"owner {number}") for number in range(4)))
    assert sorted(taken.epoch for taken, _ in won) == [1, 2, 3, 4]


ENDS = """
import asyncio, sys
from greenroom.runtime.storage.s3 import S3ObjectStore
async def main():
    store = S3ObjectStore(sys.argv[1], sys.argv[2], endpoint=sys.argv[3])
    await store.put_if_absent("key", b"body")
    assert await store.get("key")
asyncio.run(main())
"""


async def test_a_process_that_just_used_s3_ends_well(seaweedfs: str, credentials: None) -> None:
    """Without the wait at its exit, every fourth or so of these is aborted (CPython issue 87135)."""
    in_turn = asyncio.Semaphore(4)

    async def ends() -> int:
        what = (s3servers.BUCKET, f"{uuid.uuid4().hex}/", seaweedfs)
        async with in_turn:
            return await (await asyncio.create_subprocess_exec(sys.executable, "-c", ENDS, *what)).wait()

    assert await asyncio.gather(*(ends() for _ in range(30))) == [0] * 30
