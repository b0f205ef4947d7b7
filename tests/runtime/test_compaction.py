"""Compaction: never between a call and its result, the transcript whole, a failure without harm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import ASK, CASES, bash, call, calls, over, scripted

from greenroom import (
    AgentConfig,
    AgentRuntime,
    CancelToken,
    ConfigError,
    Message,
    ModelRequest,
    RunStatus,
    Scripted,
    Storage,
    TextBlock,
    ToolCallBlock,
    ToolResultBlock,
    Usage,
)
from greenroom.runtime.compaction import MAX_SUMMARY, SummaryCompactor, as_text, safe_cut, shown
from greenroom.runtime.messages import Compaction
from greenroom.runtime.ports import LlmProvider
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.testing import FakeSandboxes, strict_history


def from_anthropic(document: dict[str, Any]) -> Message:
    blocks: list[Any] = []
    for block in document["content"]:
        if block["type"] == "text":
            blocks.append(TextBlock(text=block["text"]))
        elif block["type"] == "tool_use":
            blocks.append(ToolCallBlock(id=block["id"], name=block["name"], arguments=block["input"]))
        else:
            content = (TextBlock(text=block["content"]),)
            blocks.append(ToolResultBlock(call_id=block["tool_use_id"], content=content))
    holds_results = any(isinstance(block, ToolResultBlock) for block in blocks)
    return Message(role="tool" if holds_results else document["role"], content=tuple(blocks))


DOCUMENT = json.loads((CASES / "C18_compaction_cut.json").read_text())
CASE = [from_anthropic(document) for document in DOCUMENT["messages"]]


@pytest.mark.parametrize("keep", range(9))
def test_the_case(keep: int) -> None:
    cut = safe_cut(CASE, keep)
    assert cut <= len(CASE) - keep
    view = shown(CASE, Compaction(upto=cut, summary="so far"))
    assert view[0].role == "user"
    strict_history(view)
    assert view[1:] == tuple(CASE[cut:])
    moved = [at for at in range(cut + 1, len(CASE) - keep + 1) if _valid(at)]
    assert moved == [], "it is cut as late as it can be"
    told = as_text(CASE[:cut])
    assert all(block.text in told for message in CASE[:cut] for block in results_of(message))


def _valid(at: int) -> bool:
    try:
        strict_history(shown(CASE, Compaction(upto=at, summary="s")))
    except ValueError:
        return False
    return True


def results_of(message: Message) -> list[ToolResultBlock]:
    return [block for block in message.content if isinstance(block, ToolResultBlock)]


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(0, 30), st.booleans())
def test_no_cut_parts_a_call_from_its_result(sizes: list[int], keep: int, open_call: bool) -> None:
    messages: list[Message] = [Message.user("task")]
    for turn, size in enumerate(sizes):
        ids = [f"{turn}-{n}" for n in range(size)]
        made = tuple(ToolCallBlock(id=id, name="t", arguments={}) for id in ids)
        messages.append(Message(role="assistant", content=(TextBlock(text="x"), *made)))
        answers = tuple(ToolResultBlock(call_id=id, content=()) for id in ids)
        messages.append(Message(role="tool", content=answers) if ids else Message.user("go on"))
    if open_call and messages[-1].role != "assistant":
        messages.append(Message(role="assistant", content=(ToolCallBlock(id="open", name="t", arguments={}),)))
    cut = safe_cut(messages, keep)
    assert 0 <= cut <= max(0, len(messages) - keep)
    last = messages[-1].tool_calls
    strict_history(shown(messages, Compaction(upto=cut, summary="s")), [block.id for block in last])


# -- in a run


class Watching:
    """Plays a script and keeps what it was asked."""

    def __init__(self, *script: Any) -> None:
        self.seen: list[Sequence[Message]] = []
        self.asked: list[Any] = []
        self._script = list(script)

    def entry(self, request: Any) -> Any:
        self.seen.append(request.messages)
        self.asked.append(request)
        return self._script[len(self.seen) - 1]

    @property
    def provider(self) -> Scripted:
        return Scripted([self.entry] * 50)


def agent(model: Watching, summaries: Any, **fields: Any) -> AgentConfig:
    compactor = SummaryCompactor(max_tokens=300, keep=2, provider=Scripted(summaries))
    base = scripted("unused", sandbox="host", **fields)
    return AgentConfig(name="a", provider=model.provider, tools=base.registry, sandbox="host", compactor=compactor)


LONG = [bash(f"step {n} " + "x" * 300) for n in range(6)]


async def test_a_long_history_is_shown_as_a_summary_and_kept_whole(home: Any, shared: MemoryObjectStore) -> None:
    model = Watching(*LONG, "done")
    summaries = Watching("first", *["later"] * 9)
    config = agent(model, [summaries.entry] * 9)
    async with AgentRuntime(Storage.over(shared), sandboxes=FakeSandboxes()) as runtime:
        session = await runtime.create_session(config, "s")
        told = [event.data async for event in session.stream("the task") if event.type == "notice"]
        transcript = await session.transcript()
        used = (await session.status()).usage if hasattr(await session.status(), "usage") else None
    assert told
    assert {data["kind"] for data in told} == {"compaction"}
    strict_history(transcript.messages)
    assert len(transcript.messages) == 14, "all of it is there"
    assert len(model.seen[-1]) < 8
    for seen in model.seen:
        strict_history(seen)
        assert seen[0].role == "user"
    assert "summary" in model.seen[-1][0].text
    for request in summaries.asked:
        assert request.tools == ()
        strict_history(request.messages)
        assert len(request.messages) == 1
    assert "first" in summaries.seen[1][0].text, "a later summary is made of the one before"
    assert used is None or used.output_tokens > 0


async def test_it_survives_a_restart(home: Any, shared: MemoryObjectStore) -> None:
    model = Watching(*LONG, "done", "after")
    config = agent(model, ["kept in mind"] * 9)
    async with AgentRuntime(Storage.over(shared), sandboxes=FakeSandboxes()) as runtime:
        await (await runtime.create_session(config, "s")).run("the task")
    async with AgentRuntime(Storage.over(shared), sandboxes=FakeSandboxes()) as runtime:
        session = await runtime.open("s", config)
        assert (await session.run("and now?")).text == "after"
    assert "kept in mind" in model.seen[-1][0].text
    assert model.seen[-1][-1].text == "and now?"


@pytest.mark.parametrize(
    "summary",
    [
        "",
        "   ",
        {"calls": [{"name": "bash", "arguments": {}}]},
        {"error": {"kind": "provider_permanent"}},
        {"error": {"kind": "provider_rate_limited"}},
    ],
    ids=str,
)
async def test_a_summary_that_fails_changes_nothing(home: Any, shared: MemoryObjectStore, summary: Any) -> None:
    model = Watching(*LONG, "done")
    config = agent(model, [summary] * 9)
    async with AgentRuntime(Storage.over(shared), sandboxes=FakeSandboxes()) as runtime:
        session = await runtime.create_session(config, "s")
        told = [event.data async for event in session.stream("the task") if event.type == "notice"]
        assert (await session.status()).state == "Success"
    assert {data["kind"] for data in told} == {"compaction_failed"}
    assert len(told) <= 2, "it is not tried again with every step"
    assert len(model.seen[-1]) == 13


async def test_it_never_runs_between_a_question_and_its_answer(home: Any, shared: MemoryObjectStore) -> None:
    model = Watching(*LONG[:3], ASK, "done")
    summaries = Watching(*["s"] * 9)
    config = agent(model, [summaries.entry] * 9)
    async with AgentRuntime(Storage.over(shared), sandboxes=FakeSandboxes()) as runtime:
        session = await runtime.create_session(config, "s")
        waiting = await session.run("the task")
        assert waiting.status is RunStatus.suspended
        assert waiting.interrupt is not None
        before = len(summaries.seen)
        assert (await session.answer(waiting.interrupt.id, "yes")).text == "done"
        for seen in model.seen:
            strict_history(seen)
        assert len(summaries.seen) - before <= 1


async def test_a_cancelled_summary_leaves_the_run_cancelled(home: Any, shared: MemoryObjectStore) -> None:
    model = Watching(*LONG, "done")
    config = agent(model, [{"text": "late", "delay": 1000}] * 9)
    async with AgentRuntime(Storage.over(shared), sandboxes=FakeSandboxes()) as runtime:
        session = await runtime.create_session(config, "s")
        result = await session.run("the task", timeout=0.3)
        assert result.status is RunStatus.cancelled
        strict_history((await session.transcript()).messages)


def test_summaries_are_bounded() -> None:
    assert MAX_SUMMARY < 10_000
    long = as_text([Message.user("y" * 10_000)])
    assert len(long) < 2100
    assert "8000 characters" in long


def test_what_it_takes() -> None:
    with pytest.raises(ConfigError, match="no `cut` and `summarize`"):
        scripted("x", compactor="summary")
    for wrong in ({"max_tokens": 0}, {"keep": -1}, {"unknown": 1}):
        with pytest.raises(ValueError, match="SummaryCompactor"):
            SummaryCompactor(**wrong)
    assert calls(call("x"))


class CutsAnywhere:
    """A compactor of one's own: counts messages, asks no model, and knows nothing of pairs."""

    def __init__(self, at: int = 2, summary: str = "all that was") -> None:
        self.at, self.summary = at, summary

    def cut(self, messages: Sequence[Message]) -> int | None:
        return self.at if len(messages) > 3 else None

    async def summarize(
        self, messages: Sequence[Message], provider: LlmProvider, number: int, session_id: str, cancel: CancelToken
    ) -> tuple[str, Usage]:
        return self.summary, Usage(input_tokens=1)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 99])
async def test_a_compactor_of_ones_own_never_parts_a_pair(home: Any, shared: MemoryObjectStore, at: int) -> None:
    sent: list[ModelRequest] = []

    def seen(entry: Any) -> Any:
        def answer(request: ModelRequest) -> Any:
            sent.append(request)
            return entry

        return answer

    script = [seen(bash(f"{n}")) for n in range(4)]
    agent = scripted(*script, seen("done"), compactor=CutsAnywhere(at))
    async with over(shared) as runtime:
        session = await runtime.create_session(agent)
        assert (await session.run("go")).text == "done"
        for request in sent:
            strict_history(request.messages)
        assert any("all that was" in request.messages[0].text for request in sent) is (at > 0)


async def test_a_compactor_that_raises_or_says_nothing_changes_nothing(home: Any, shared: MemoryObjectStore) -> None:
    class Raises(CutsAnywhere):
        def cut(self, messages: Sequence[Message]) -> int | None:
            raise RuntimeError("broken")

    for number, compactor in enumerate([Raises(), CutsAnywhere(2, "  ")]):
        agent = scripted(*(bash(f"{n}") for n in range(4)), "done", compactor=compactor)
        async with over(shared) as runtime:
            session = await runtime.create_session(agent, f"s{number}")
            notices = {event.kind async for event in session.stream("go") if event.type == "notice"}
            assert notices == {"compaction_failed"}
            assert (await session.status()).state == "Success"
