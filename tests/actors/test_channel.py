"""The channel between processes: every call answered once, whatever dies; and which sessions count as cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import ray
from ray import cloudpickle
from scenes import until

from greenroom.actors.calls import ActorLost, ActorSilent
from greenroom.actors.channel import Channel, Mailbox
from greenroom.actors.directory import Directory
from greenroom.actors.tombstones import Tombstones
from greenroom.runtime.errors import ClusterError, RequestConflict


class Service(Mailbox):
    """Answers, or not, as it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes = 0
        self.begun: Counter[int] = Counter()
        self.gate = asyncio.Event()

    async def push(self, sender: str, calls: Any) -> str:
        self.pushes += 1
        return await super().push(sender, calls)

    async def double(self, number: int) -> int:
        self.begun[number] += 1
        return 2 * number

    async def wait(self, number: int) -> int:
        await self.gate.wait()
        return number

    async def open(self) -> None:
        self.gate.set()

    async def fail(self, ours: bool) -> None:
        raise RequestConflict("no") if ours else ValueError(object())

    async def seen(self) -> tuple[int, int]:
        return self.pushes, max(self.begun.values(), default=0)

    async def pid(self) -> int:
        return os.getpid()


class Wire:
    """A handle as Ray's, without Ray: calls reach `service`; those of `lost` arrive, and their answers do not."""

    def __init__(self) -> None:
        self.service = Service()
        self.lost: list[str] = []

    def __getattr__(self, method: str) -> Any:
        async def remote(*args: Any) -> Any:
            answer = await getattr(self.service, method)(*args)
            if method in self.lost:
                self.lost.remove(method)
                raise TimeoutError(method)
            return answer

        return type("Method", (), {"remote": staticmethod(remote)})


async def test_few_calls_go_directly_and_many_in_batches() -> None:
    wire = Wire()
    channel = Channel(wire, direct=4)
    assert await asyncio.gather(*(channel.call("double", n) for n in range(4))) == [0, 2, 4, 6]
    assert wire.service.pushes == 0
    assert await asyncio.gather(*(channel.call("double", n) for n in range(500))) == [2 * n for n in range(500)]
    assert 0 < wire.service.pushes < 10
    assert set(wire.service.begun.values()) == {1, 2}  # the first four were asked for twice


async def test_no_call_waits_for_another() -> None:
    wire = Wire()
    channel = Channel(wire, direct=0)
    slow = [asyncio.ensure_future(channel.call("wait", n, timeout=None)) for n in range(20)]
    assert await channel.call("double", 4) == 8
    assert not any(task.done() for task in slow)
    await channel.call("open")
    assert await asyncio.gather(*slow) == list(range(20))


async def test_an_actors_own_error_is_raised_and_a_mistake_is_a_cluster_error() -> None:
    channel = Channel(Wire(), direct=0)
    with pytest.raises(RequestConflict):
        await channel.call("fail", True)
    with pytest.raises(ClusterError, match="ValueError in fail"):
        await channel.call("fail", False)


async def test_a_lost_answer_is_told_and_nothing_is_taken_twice() -> None:
    wire = Wire()
    channel = Channel(wire, direct=0)
    for method in ("push", "take"):
        wire.lost.append(method)
        with pytest.raises(ActorSilent):
            await channel.call("double", 7)
        assert await channel.call("double", 8) == 16
    assert wire.service.begun == {7: 2, 8: 2}
    assert all(not box.results or box.first for box in wire.service._boxes.values())


async def test_a_batch_that_arrives_twice_is_begun_once() -> None:
    service = Service()
    for _ in range(2):
        await service.push("sender", [(1, "double", (3,)), (2, "double", (4,))])
    mark, results = await service.take("sender", service._mark, 0)
    assert (mark, sorted(results)) == (service._mark, [(1, 6, None), (2, 8, None)])
    assert set(service.begun.values()) == {1}


async def test_an_actor_that_began_anew_answers_what_it_knows_and_the_rest_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("greenroom.actors.channel.TAKE_WAIT", 0.2)  # Ray would end the old one's poll
    wire = Wire()
    channel = Channel(wire, direct=0)
    waiting = asyncio.ensure_future(channel.call("wait", 1, timeout=None))
    await until(lambda: bool(wire.service._boxes), "the call has arrived")
    wire.service = Service()
    assert await channel.call("double", 2) == 4
    with pytest.raises(ActorSilent):
        await waiting


async def test_a_call_that_takes_too_long_is_silent_and_its_late_answer_harms_nobody() -> None:
    wire = Wire()
    channel = Channel(wire, direct=0)
    with pytest.raises(ActorSilent):
        await channel.call("wait", 1, timeout=0.05)
    await channel.call("open")
    assert await channel.call("double", 1) == 2


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
async def test_calls_over_a_killed_process_are_told_and_asked_again() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actor cannot import a test
    remote: Any = ray.remote
    actor = remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=1000)(Service).remote()
    channel = Channel(actor)
    pid = await channel.call("pid")

    async def insist(method: str, *args: int) -> Any:
        while True:
            try:
                return await channel.call(method, *args, timeout=60)
            except ActorSilent:
                await asyncio.sleep(0.1)

    calls = [asyncio.ensure_future(insist("wait", number)) for number in range(100)]
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(90):
        while await insist("pid") == pid:
            pass
        await insist("open")
        assert await asyncio.gather(*calls) == list(range(100))
    ray.kill(actor)
    with pytest.raises(ActorLost):
        await asyncio.gather(*(channel.call("wait", number) for number in range(20)))


async def test_a_placement_is_found_and_the_next_one_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.actors.directory.PLACEMENT_WAIT", 0.05)
    directory = Directory()
    assert await directory.find("s", 0, wait=False) == (None, 0)
    assert await directory.find("s", 0, wait=True) == (None, 0)
    directory.place("s", "first")
    actor, number = await directory.find("s", 0, wait=True)
    assert actor == "first"
    assert await directory.find("s", number, wait=True) == (None, 0)
    readers = [asyncio.ensure_future(directory.find("s", number, wait=True)) for _ in range(50)]
    await asyncio.sleep(0)
    directory.place("other", "second")
    directory.place("s", "third")
    assert {(actor, later > number) for actor, later in await asyncio.gather(*readers)} == {("third", True)}
    assert not directory._awaited


def test_what_lies_below_a_cancelled_session_is_cancelled_however_deep() -> None:
    stones = Tombstones()
    ids = [uuid.uuid4().hex for _ in range(4)]
    for parent, child in pairwise(ids):
        stones.know(child, parent)
    assert stones.over(ids[3]) is None
    stones.put(ids[0], "enough")
    assert [stones.over(sid) for sid in ids] == ["enough"] * 4
    stones.put(ids[2], "this too")
    assert [stones.over(sid) for sid in ids] == ["enough", "enough", "this too", "this too"]


def test_whoever_goes_on_with_a_session_may_begin_what_is_below_it() -> None:
    stones = Tombstones()
    stones.know("child", "parent")
    stones.know("grandchild", "child")
    stones.put("parent", "enough")
    stones.clear("child")
    assert (stones.over("grandchild"), stones.over("parent")) == (None, "enough")
    stones.put("child", "again")
    assert stones.over("grandchild") == "again"
