"""Token budgets: what a tree may use together, who is refused, and what a ledger makes of what it is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import ValidationError
from scenes import call, calls, over, results, scripted

from greenroom import AgentConfig, AgentRuntime, CancelToken, Limits, Message, ModelRequest, RunStatus, SubAgent, Usage
from greenroom.runtime.budget import TokenLedger
from greenroom.runtime.messages import Delta, MessageDelta, TextBlock, ToolCallBlock
from greenroom.runtime.results import FailureKind
from greenroom.runtime.storage import MemoryObjectStore


class Spends:
    """A model whose every reply costs so many tokens, and calls a tool until it has replied often enough."""

    def __init__(self, cost: int, replies: int, tool: str = "look", **arguments: Any) -> None:
        self.cost, self.replies, self.tool, self.arguments = cost, replies, tool, arguments
        self.asked = 0

    async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
        self.asked += 1
        done = request.call_no + 1 >= self.replies
        called = ToolCallBlock(
            id="c", name=self.tool, arguments=self.arguments, raw_arguments=json.dumps(self.arguments)
        )
        content = (TextBlock(text="done"),) if done else (called,)
        usage = Usage(input_tokens=self.cost - 1, output_tokens=1)
        message = Message(
            role="assistant", content=content, stop="x", stop_kind="end" if done else "tool_calls", usage=usage
        )
        delta: Delta = MessageDelta(message=message)
        yield delta


def test_a_ledger_sums_what_a_tree_has_used() -> None:
    ledger = TokenLedger()
    assert ledger.left("r", 0, 100) is None, "it knows nothing of the tree"
    assert ledger.left("r", 0, 100, {"r": 0, "r~a": 30}) is True
    assert ledger.left("r~b", 0, 30) is False
    ledger.tell("r", 5)
    assert ledger.left("r~b", 4, 40) is True
    ledger.tell("r~b", 5)
    assert ledger.left("r~c", 0, 40) is False
    ledger.tell("unknown", 5)
    assert ledger.left("other", 0, 1, {}) is True, "trees have nothing to do with one another"


async def test_a_run_ends_exhausted_when_its_tree_has_used_up_its_tokens(runtime: AgentRuntime) -> None:
    model = Spends(40, 9)
    agent = AgentConfig(name="a", provider=model, limits=Limits(max_tokens_total=100, max_consecutive_fail=99))
    session = await runtime.create_session(agent)
    result = await session.run("go")
    assert result.status is RunStatus.exhausted
    assert result.failure is not None
    assert result.failure.kind is FailureKind.budget
    assert model.asked == 3
    assert result.usage.total == 120
    again = await session.run("go on")
    assert (again.status, model.asked) == (RunStatus.exhausted, 3)


@pytest.mark.parametrize("parallel", [False, True])
async def test_children_are_charged_to_the_root(runtime: AgentRuntime, parallel: bool) -> None:
    child = AgentConfig(name="child", provider=Spends(40, 1))
    spawns = calls(*(call("helper", task=f"{n}") for n in range(5)))
    agent = scripted(
        spawns, "ok", subagents={"helper": SubAgent(child, parallel=parallel)}, limits=Limits(max_tokens_total=100)
    )
    session = await runtime.create_session(agent)
    await session.run("go")
    used = sum(info.usage.total for info in (await session.tree()).sessions())
    assert 100 <= used <= (240 if parallel else 130), "beyond it only by the calls that ran"
    told = [json.loads(block.text) for block in results(await session.transcript())]
    if not parallel:
        assert [shown["status"] for shown in told] == ["completed"] * 3 + ["exhausted"] * 2
        assert "max_tokens_total" in told[-1]["detail"]


async def test_a_childs_own_budget_bounds_that_child(runtime: AgentRuntime) -> None:
    child = AgentConfig(
        name="child", provider=Spends(40, 9), limits=Limits(max_tokens_total=50, max_consecutive_fail=99)
    )
    session = await runtime.create_session(scripted(calls(call("helper", task="t")), "ok", subagents={"helper": child}))
    assert (await session.run("go")).status is RunStatus.completed
    (below,) = (await session.tree()).children
    assert below.info.usage.total == 80


async def test_a_new_process_goes_on_with_what_the_heads_say(shared: MemoryObjectStore) -> None:
    model = Spends(40, 2)
    agent = AgentConfig(name="a", provider=model, limits=Limits(max_tokens_total=100, max_consecutive_fail=99))
    async with over(shared) as first:
        session = await first.create_session(agent, "s")
        assert (await session.run("go")).status is RunStatus.completed
    async with over(shared) as second:
        model.replies = 99
        result = await (await second.open("s", agent)).run("more")
        assert result.status is RunStatus.exhausted
        assert model.asked == 3


def test_a_budget_is_a_number_of_tokens() -> None:
    for wrong in (0, -1):
        with pytest.raises(ValidationError):
            Limits(max_tokens_total=wrong)
