"""What must hold when a scenario has come to its end, however often its owner died on the way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from greenroom.runtime import journal
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.history import HistoryError, strict_history
from greenroom.runtime.messages import Message, ToolCallBlock, ToolResultBlock
from greenroom.runtime.results import SessionInfo
from greenroom.runtime.sessions import list_sessions, read_transcript
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.testing.crash_world import CrashWorld
from greenroom.runtime.testing.effects import effect_key
from greenroom.runtime.tools.registry import Tool
from greenroom.runtime.tools.schema import BadArguments, validate

DID_NOT_RUN = (
    journal.CANCELLED_BEFORE_START,
    journal.NOT_RUN_REPLY_CUT,
    journal.NOT_RUN_SANDBOX_LOST,
    journal.DENIED,
    journal.DENIED_BY_POLICY,
    "Not run:",
)
"""Beginnings of results that say: this call had no effect."""


RUNNING = '"status":"running"'


async def problems(world: CrashWorld, agent: AgentConfig) -> list[str]:
    """Everything that is wrong; empty when all promises were kept."""
    found = list(world.problems)
    storage = Storage.over(world.objects)
    pairs: list[tuple[ToolCallBlock, ToolResultBlock]] = []
    open_calls: list[ToolCallBlock] = []
    async for info in list_sessions(storage):
        found += _unfinished(info)
        messages = (await read_transcript(storage, info.session_id)).messages
        waiting = [call.id for call in messages[-1].tool_calls] if info.waiting_for and messages else []
        try:
            strict_history(messages, waiting)
        except HistoryError as error:
            found.append(f"the history of {info.session_id} is broken: {error}")
        pairs += _pairs(messages)
        open_calls += messages[-1].tool_calls if waiting else ()
    found += _effects(world, agent, pairs, open_calls)
    found += [f"{sandbox.running} still runs" for sandbox in world.sandboxes.open_ones if sandbox.running]
    return found


def _unfinished(info: SessionInfo) -> list[str]:
    if info.owner is not None:
        return [f"{info.session_id} is still owned by {info.owner}"]
    if info.state in ("Reasoning", "ToolExecuting"):
        return [f"{info.session_id} never came to a stop: it is {info.state}"]
    return []


def _pairs(messages: tuple[Message, ...]) -> Iterator[tuple[ToolCallBlock, ToolResultBlock]]:
    for message, following in pairwise(messages):
        results = [block for block in following.content if isinstance(block, ToolResultBlock)]
        yield from zip(message.tool_calls, results, strict=False)


def _effects(
    world: CrashWorld,
    agent: AgentConfig,
    pairs: list[tuple[ToolCallBlock, ToolResultBlock]],
    open_calls: list[ToolCallBlock],
) -> list[str]:
    """No effect twice; no result that is another call's or nobody's; no word that is not true."""
    found = []
    asked: Counter[str] = Counter()
    not_run: Counter[str] = Counter()
    tools = _tools(agent)
    for call in open_calls:
        asked[_key(call, tools)] += 1
    for call, result in pairs:
        key = _key(call, tools)
        asked[key] += 1
        text = result.text
        if text.startswith(DID_NOT_RUN):
            not_run[key] += 1
        elif key in world.effects.began and not (result.is_error or _gave(world, key, text)):
            found.append(f"{key} has a result that it never gave: {text[:100]!r}")
    for key, began in world.effects.began.items():
        if key not in asked:
            found.append(f"{key} ran, and no history knows of it")
            continue
        tool = tools.get(json.loads(key)[0])
        repeats = tool is not None and tool.spec.effect != "effectful"
        if not repeats and began > asked[key] - not_run[key]:
            said = f", {not_run[key]} of which were said not to have run" if not_run[key] else ""
            found.append(f"{key} began {began} times for {asked[key]} calls{said}")
    return found


def _gave(world: CrashWorld, key: str, text: str) -> bool:
    if RUNNING in text:  # a command that has gone to the background has given nothing yet
        return True
    return key in world.effects.asked or any(output in text for output in world.effects.outputs.get(key, ()))


def _key(call: ToolCallBlock, tools: dict[str, Tool]) -> str:
    """The call as its tool is given it, defaults filled in."""
    tool = tools.get(call.name)
    try:
        return effect_key(call.name, validate(tool.spec.arguments, call.arguments or {}) if tool else call.arguments)
    except BadArguments:
        return effect_key(call.name, call.arguments)


def _tools(agent: AgentConfig) -> dict[str, Tool]:
    """Every tool of the agent and of its sub-agents, by name."""
    found = {tool.spec.name: tool for tool in agent.registry}
    for name in agent.subagents:
        child = agent.child_agent(name)
        found |= {} if child is agent else _tools(child)
    return found
