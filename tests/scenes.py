"""What many tests begin with: scripted agents, and reading what a session holds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil

from greenroom import AgentConfig, AgentRuntime, Scripted, Storage, ToolRegistry, Transcript, register_default_tools
from greenroom.runtime.local_trees import LocalTreeSandboxes
from greenroom.runtime.messages import ToolResultBlock
from greenroom.runtime.ports import ObjectStore
from greenroom.testing import FakeSandboxes, strict_history

CASES = Path(__file__).parent / "cases"
WIRE = Path(__file__).parent / "wire"
SIZES = [1, 2, 3, 5, 7, 64, None]
"""Chunk sizes that every recorded body is decoded at; None: whole."""


async def chunks(body: bytes, size: int | None) -> AsyncIterator[bytes]:
    step = size or max(1, len(body))
    for start in range(0, len(body), step):
        yield body[start : start + step]


def default_registry(yield_after: float | None = None) -> ToolRegistry:
    """The default tools; commands are waited for unless told otherwise, so that no test depends on how fast it is."""
    registry = ToolRegistry()
    register_default_tools(registry, trust="host", yield_after=yield_after)
    return registry


def scripted(*script: Any, **fields: Any) -> AgentConfig:
    """An agent with this script; the default tools and a host sandbox unless told otherwise."""
    fields = {"name": "agent", "tools": default_registry(), "sandbox": "host", **fields}
    return AgentConfig(provider=Scripted(script), **fields)


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"name": tool, "arguments": arguments}


def calls(*made: dict[str, Any], **entry: Any) -> dict[str, Any]:
    """A script's entry: one batch of calls."""
    return {"calls": list(made), **entry}


def bash(command: str) -> dict[str, Any]:
    """A script's entry: one bash call."""
    return calls(call("bash", command=command))


ASK = calls(call("askFollowupQuestion", question="?"))
"""A script's entry: one question to the user."""


def results(transcript: Transcript) -> list[ToolResultBlock]:
    """Every tool result of a transcript, in order."""
    return [block for message in transcript.messages for block in message.content if isinstance(block, ToolResultBlock)]


def tools(*functions: Any, **options: Any) -> ToolRegistry:
    """A registry of these functions, each with these options."""
    registry = ToolRegistry()
    for function in functions:
        registry.tool(function, **options)
    return registry


def over(objects: ObjectStore, sandboxes: FakeSandboxes | None = None, **options: Any) -> AgentRuntime:
    """The embedded edition over an object store, with sandboxes in memory unless told otherwise."""
    return AgentRuntime(Storage.over(objects), sandboxes=sandboxes or FakeSandboxes(), **options)


def waits(started: asyncio.Event) -> Any:
    """A command that says when it has begun, and does not end."""

    async def hang(command: str) -> str:
        started.set()
        await asyncio.sleep(600)
        return ""

    return hang


async def hang(command: str) -> str:
    """A command that outlasts its owner."""
    await asyncio.sleep(60)
    return "the old owner's"


async def hanging_run(runtime: AgentRuntime, script: tuple[Any, ...], **fields: Any) -> tuple[str, asyncio.Task[Any]]:
    """A run that hangs in its first bash call, as its owner would if it had been stopped there."""
    session = await runtime.create_session(scripted(*script, **fields))
    run = asyncio.create_task(session.run("go"))
    trees = runtime._trees
    assert isinstance(trees, LocalTreeSandboxes)
    sandboxes = trees._factory
    assert isinstance(sandboxes, FakeSandboxes)
    while not (session.id in sandboxes.opened and sandboxes.opened[session.id].running):
        await asyncio.sleep(0)
    return session.id, run


async def cancelled_transcript(session: Any) -> list[str]:
    """The results of an interrupted session, whose history every provider takes."""
    transcript = await session.transcript()
    strict_history(transcript.messages)
    assert (await session.status()).state == "Interrupted"
    return [block.text for block in results(transcript)]


async def until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    """Waits for something outside; fails naming it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {what}"
        await asyncio.sleep(0.01)


def started_here(marker: str) -> list[int]:
    """As alive(), of this process's own: others on the machine may run the same."""
    mine = {process.pid for process in psutil.Process().children(recursive=True)}
    return [pid for pid in alive(marker) if pid in mine]


def alive(marker: str) -> list[int]:
    """Pids of this machine's processes whose command line holds the marker: one that nobody else has."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if marker.encode() in line and state != "Z":
                found.append(int(entry.name))
    return found


def greenroom(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a folder of its own, on a Ray of its own, without input."""
    return subprocess.run(
        [sys.executable, "-m", "greenroom", *arguments],
        cwd=folder,
        env={**os.environ, "RAY_ADDRESS": "local", **environment},
        capture_output=True,
        text=True,
        timeout=170,
        stdin=subprocess.DEVNULL,
        check=False,
    )
