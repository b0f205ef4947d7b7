"""Bounds on calls of a model that the whole pool shares."""

from __future__ import annotations

import asyncio

import pytest

from greenroom import AgentConfig, OpenAICompatible, PreflightError
from greenroom.actors.client import RayRuntime
from greenroom.actors.turns import Turns
from greenroom.runtime.calls import CallBounds
from greenroom.runtime.testing.model_server import Answer, end_pieces, model_server, text_pieces

TWO = CallBounds("there", 2, None)


async def settled(*tasks: asyncio.Future[None]) -> list[bool]:
    for _ in range(5):
        await asyncio.sleep(0)
    return [task.done() and not task.cancelled() for task in tasks]


def asking(turns: Turns, count: int, bounds: CallBounds = TWO) -> list[asyncio.Future[None]]:
    return [asyncio.ensure_future(turns.begin(f"t{n}", f"actor{n % 2}", bounds)) for n in range(count)]


async def test_turns_come_in_order_and_never_more_at_once() -> None:
    turns = Turns()
    tasks = asking(turns, 4)
    assert await settled(*tasks) == [True, True, False, False]
    again = asyncio.ensure_future(turns.begin("t0", "actor0", TWO))
    assert await settled(again, *tasks) == [True, True, True, False, False]
    turns.end("t1")
    assert await settled(*tasks) == [True, True, True, False]
    turns.end("t3")  # not wanted any more
    turns.end("t0")
    turns.end("t2")
    turns.end("t2")
    assert await settled(*tasks) == [True, True, True, False]
    assert not turns._lines
    assert not turns._tickets


async def test_a_dead_owners_turns_are_free_again() -> None:
    turns = Turns()
    tasks = asking(turns, 6)
    assert await settled(*tasks) == [True, True, False, False, False, False]
    turns.drop("actor0")
    assert await settled(*tasks) == [True, True, False, True, False, False]


async def test_beginnings_are_spaced_and_an_endpoint_may_ask_for_time() -> None:
    turns, bounds = Turns(), CallBounds("there", None, 60_000 / 50)  # one each 50 ms
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*asking(turns, 3, bounds))
    assert asyncio.get_running_loop().time() - began >= 0.099
    turns.hold(bounds, 0.2)
    await turns.begin("late", "actor", bounds)
    assert asyncio.get_running_loop().time() - began >= 0.299
    assert await settled(*asking(turns, 2, CallBounds("elsewhere", 1, None))) == [True, True]  # "t0", "t1" have theirs


@pytest.mark.ray
async def test_sessions_in_many_processes_share_the_bound(on_ray: RayRuntime) -> None:
    async with model_server() as server:
        slow = [Answer([*text_pieces("openai", ["ok"]), *end_pieces("openai")], after=0.3) for _ in range(8)]
        for bound in (1, None):
            server.answers, server.most_at_once = list(slow), 0
            model = OpenAICompatible("m", f"{server.url}/v1", max_concurrent=bound)
            agent = AgentConfig(name="caller", provider=model)
            ends = [end async for end in on_ray.map(agent, ["go"] * 8, concurrency=8)]
            assert [end.error for end in ends] == [None] * 8
            assert (server.most_at_once == 1) == (bound == 1), (
                "two actors call at the same time when nothing bounds them"
            )


@pytest.mark.ray
async def test_a_missing_key_is_named_with_the_node_that_lacks_it(on_ray: RayRuntime) -> None:
    model = OpenAICompatible("m", "http://127.0.0.1:1/v1", api_key_env="NO_SUCH_KEY", needs_key=True)
    session = await on_ray.create_session(AgentConfig(name="caller", provider=model))
    with pytest.raises(PreflightError, match=r"on node .+ \(.+\).+NO_SUCH_KEY"):
        await session.run("go")
    assert (await session.status()).state == "Ready"
