"""Fallbacks: the next provider answers when one fails for good; a new message begins with the first again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scenarios import own
from scenes import call, calls

from greenroom import (
    AgentConfig,
    AgentRuntime,
    ConfigError,
    Limits,
    Message,
    ModelRequest,
    OpenAICompatible,
    RunFailed,
    Scripted,
    Storage,
)
from greenroom.providers import encode_anthropic
from greenroom.runtime.agents import pack
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.testing import FakeClock, FakeSandboxes, crash_everywhere, strict_history

GONE = {"error": {"kind": "provider_permanent", "message": "no such model"}}
BUSY = {"error": {"kind": "provider_rate_limited", "retry_after": 1}}


def named(name: str, asked: list[str], *answers: Any) -> Scripted:
    """A model that says its name; beyond its answers it goes on with the last."""
    left = list(answers)

    def reply(request: ModelRequest) -> Any:
        asked.append(name)
        return left.pop(0) if len(left) > 1 else left[0]

    return Scripted([reply] * 50)


def agent(first: Any, *others: Any, **limits: Any) -> AgentConfig:
    return AgentConfig(name="a", provider=first, fallbacks=others, tools=own("x").registry, limits=Limits(**limits))


async def test_a_permanent_failure_goes_to_the_next_and_stays_there_for_the_run(runtime: AgentRuntime) -> None:
    asked: list[str] = []
    first = named("first", asked, GONE)
    second = named("second", asked, calls(call("send", to="x")), "from the second")
    session = await runtime.create_session(agent(first, second))
    events = [event async for event in session.stream("go")]
    assert events[-1].result.text == "from the second"
    assert asked == ["first", "second", "second"]
    assert [event.provider for event in events if event.type == "notice"] == [1]
    strict_history((await session.transcript()).messages)
    asked.clear()
    await session.run("again")
    assert asked[0] == "first", "a new message begins with the first again"


async def test_an_exhausted_one_is_left_after_its_tries(home: Path) -> None:
    asked: list[str] = []
    clock = FakeClock()
    async with AgentRuntime("memory:", sandboxes=FakeSandboxes(), clock=clock) as runtime:
        first, second = named("first", asked, BUSY), named("second", asked, BUSY, "ok")
        session = await runtime.create_session(agent(first, second, max_consecutive_fail=3))
        assert (await clock.run(session.run("go"))).text == "ok"
    assert asked == ["first"] * 3 + ["second"] * 2


async def test_when_all_have_failed_the_last_failure_is_told(runtime: AgentRuntime) -> None:
    asked: list[str] = []
    last = {"error": {"kind": "provider_permanent", "message": "the last one is gone too"}}
    session = await runtime.create_session(
        agent(named("1", asked, GONE), named("2", asked, GONE), named("3", asked, last))
    )
    with pytest.raises(RunFailed, match="the last one is gone too"):
        await session.run("go")
    assert asked == ["1", "2", "3"]


async def test_a_recovered_run_goes_on_with_the_one_it_had_come_to(home: Path) -> None:
    objects = MemoryObjectStore()
    asked: list[str] = []
    second = named("second", asked, calls(call("askFollowupQuestion", question="?")), "done")
    tools = own("x").registry

    def made() -> AgentConfig:
        from scenes import default_registry

        return AgentConfig(
            name="a",
            provider=named("first", asked, GONE),
            fallbacks=[second],
            tools=[*tools, *default_registry()],
            sandbox="host",
        )

    async with AgentRuntime(Storage.over(objects), sandboxes=FakeSandboxes()) as runtime:
        session = await runtime.create_session(made(), "s")
        question = (await session.run("go")).interrupt
        assert question is not None
    async with AgentRuntime(Storage.over(objects), sandboxes=FakeSandboxes()) as runtime:
        session = await runtime.open("s", made())
        assert (await session.answer(question.id, "yes")).text == "done"
    assert asked == ["first", "second", "second"]


@pytest.mark.slow
async def test_no_crash_breaks_a_run_over_fallbacks(home: Path) -> None:
    def made() -> AgentConfig:
        script = [GONE, calls(call("send", to="a")), "done"]
        return agent(Scripted([GONE] * 9), Scripted(script))

    await crash_everywhere(made, several_faults=5)


def test_fallbacks_are_checked_and_stored() -> None:
    with pytest.raises(ConfigError, match="no provider"):
        agent(Scripted(["x"]), 7)
    config = agent("openai:one", "openai:two", OpenAICompatible("three", "http://127.0.0.1:1/v1", max_concurrent=2))
    documents = pack(config).documents
    stored = documents[pack(config).digest]["fallbacks"]
    assert [entry["model"] for entry in stored] == ["two", "three"]
    assert stored[1]["max_concurrent"] == 2


async def test_a_turn_that_its_provider_paused_goes_on_from_there(runtime: AgentRuntime) -> None:
    seen: list[list[str]] = []

    def goes_on(request: ModelRequest) -> str:
        seen.append([message.text for message in request.messages])
        return "and the end"

    pause = {"text": "so far", "stop": "pause_turn", "stop_kind": "pause"}
    session = await runtime.create_session(agent(Scripted([pause, goes_on, "next"])))
    result = await session.run("go")
    assert (result.text, result.steps) == ("and the end", 2)
    assert seen == [["go", "so far"]]
    messages = (await session.transcript()).messages
    strict_history(messages)
    request = ModelRequest("s", 0, None, (*messages, Message.user("more")))
    turns = encode_anthropic(request)["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"], "one turn on the wire"
