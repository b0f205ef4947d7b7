"""The sandbox of a tree: outcomes by call key, operations that come late, sandboxes that die."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from scenes import bash, call, calls, default_registry, over, results, scripted

from greenroom import (
    AgentRuntime,
    ExecResult,
    RunFailed,
    RunStatus,
    SandboxDied,
    ToolContext,
)
from greenroom.runtime.calls import CallRef
from greenroom.runtime.journal import (
    NOT_RUN_SANDBOX_LOST,
    OUTCOME_UNKNOWN,
)
from greenroom.runtime.operations import Execute, ReadFile
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.runtime.tree_sandbox import SharedSandbox
from greenroom.testing import FakeSandbox, FakeSandboxes, Fault, FaultyStore


@pytest.mark.slow
async def test_a_sandbox_forgets_an_outcome_only_when_it_is_durable(home: Path) -> None:
    """bash ends, its outcome's save is slow, a read follows, the owner dies: the command must not run again."""
    store = FaultyStore(MemoryObjectStore())
    sandboxes = FakeSandboxes()
    read = asyncio.Event()
    async with over(store, sandboxes) as runtime:
        session = await runtime.create_session(
            scripted(bash("pay"), calls(call("read_file", path="f")), "ok", durability="effects")
        )
        store.faults.append(Fault("delay", "put_if_match", "/head", skip=2, times=10, seconds=0.3))
        run = asyncio.create_task(session.run("go"))
        while session.id not in sandboxes.opened or not sandboxes.opened[session.id].commands:
            await asyncio.sleep(0.001)
        shared = await runtime._trees.find(session.id)
        assert isinstance(shared, SharedSandbox)
        while not run.done() and not read.is_set():
            await asyncio.sleep(0.001)
            if any(key.endswith("/2/0") for key in shared._ledger.entries):
                read.set()
        assert read.is_set(), "the read runs while bash's outcome is still being saved"
        assert any(key.endswith("/1/0") for key in shared._ledger.entries)
        await run


def ref(key: str, digest: str = "d", epoch: int = 1) -> CallRef:
    return CallRef("s", epoch, key, digest)


async def test_an_operation_that_comes_after_its_end_is_refused() -> None:
    sandbox = FakeSandbox()
    shared = SharedSandbox(sandbox)
    await shared.end(ref("k"))
    for key in ("k", "k#1"):
        with pytest.raises(SandboxDied):
            await shared.perform(ref(key), Execute("late"))
    assert sandbox.commands == []


async def test_ending_a_call_ends_all_of_its_operations() -> None:
    async def hang(command: str) -> str:
        await asyncio.sleep(60)
        return ""

    sandbox = FakeSandbox(hang)
    shared = SharedSandbox(sandbox)
    first = asyncio.create_task(shared.perform(ref("k#3"), Execute("one")))
    while not sandbox.running:
        await asyncio.sleep(0)
    await shared.end(ref("k"))
    assert sandbox.running == []
    assert (await asyncio.gather(first, return_exceptions=True))[0] is not None


async def test_a_dead_sandbox_is_opened_anew_and_the_call_is_said_not_to_have_run(home: Path) -> None:
    sandboxes = FakeSandboxes()
    async with over(MemoryObjectStore(), sandboxes) as runtime:
        session = await runtime.create_session(scripted(bash("one"), "ok", bash("two"), "ok"))
        await session.run("go")
        first = sandboxes.opened[session.id]
        first.closed = True
        await session.run("go")
        assert sandboxes.opened[session.id] is not first
        assert sandboxes.opened[session.id].commands == ["two"]
        assert OUTCOME_UNKNOWN not in [block.text for block in results(await session.transcript())]
    assert "did not run" in NOT_RUN_SANDBOX_LOST


@pytest.mark.slow
async def test_more_trees_than_kept_sandboxes_lose_none_of_their_calls(home: Path) -> None:
    async def slow(command: str) -> str:
        await asyncio.sleep(0.005)
        return "x"

    async with over(MemoryObjectStore(), FakeSandboxes(slow)) as runtime:
        agent = scripted(bash("1"), bash("2"), bash("3"), "ok")
        found = [result async for result in runtime.map(agent, [str(n) for n in range(48)], concurrency=48)]
        for result in found:
            blocks = results(await runtime.handle(result.session_id).transcript())
            assert [json.loads(block.text)["output"] for block in blocks] == ["x"] * 3


async def test_a_users_tool_that_uses_the_sandbox_is_ended_there_too(home: Path) -> None:
    async def hang(command: str) -> str:
        await asyncio.sleep(60)
        return ""

    registry = default_registry()

    async def deploy(ctx: ToolContext) -> str:
        assert ctx.sandbox is not None
        await ctx.sandbox.execute("first")
        return "never"

    registry.tool(deploy)
    sandboxes = FakeSandboxes(hang)
    async with over(MemoryObjectStore(), sandboxes) as runtime:
        session = await runtime.create_session(scripted(calls(call("deploy")), "ok", tools=registry))
        run = asyncio.create_task(session.run("go"))
        while session.id not in sandboxes.opened or not sandboxes.opened[session.id].running:
            await asyncio.sleep(0)
        await session.cancel("stop")
        assert (await run).status is RunStatus.cancelled
        assert sandboxes.opened[session.id].running == []


async def test_one_operation_of_a_tool_can_be_given_up_and_the_next_one_made() -> None:
    async def hang(command: str) -> str:
        if command == "slow":
            await asyncio.sleep(60)
        return command

    sandbox = FakeSandbox(hang)
    shared = SharedSandbox(sandbox)
    slow = asyncio.create_task(shared.perform(ref("k"), Execute("slow")))
    while not sandbox.running:
        await asyncio.sleep(0)
    await shared.end_operation(ref("k"))
    await asyncio.gather(slow, return_exceptions=True)
    assert sandbox.running == []
    with pytest.raises(SandboxDied):
        await shared.perform(ref("k"), Execute("slow"))
    assert isinstance(await shared.perform(ref("k#1"), Execute("next")), ExecResult)
    again = asyncio.create_task(shared.perform(ref("k#2"), Execute("slow")))
    while not sandbox.running:
        await asyncio.sleep(0)
    await shared.end_operation(ref("k#2"))
    await asyncio.gather(again, return_exceptions=True)
    assert sandbox.running == []


async def test_a_sandbox_that_cannot_be_asked_ends_the_run_and_can_be_resumed(home: Path) -> None:
    class Failing(FakeSandboxes):
        fail = True

        async def open(self, spec: Any, root: str, snapshot: Any = None) -> FakeSandbox:
            if self.fail:
                raise SandboxDied("the sandbox's process is gone")
            return await super().open(spec, root, snapshot)

    sandboxes = Failing()
    async with over(MemoryObjectStore(), sandboxes) as runtime:
        session = await runtime.create_session(scripted(bash("x"), "ok"))
        with pytest.raises(RunFailed) as failed:
            await session.run("go")
        assert failed.value.resumable
        sandboxes.fail = False
        result = await session.resume()
        assert result is not None
        assert result.status is RunStatus.completed


class Plain:
    """A backend with the five verbs and nothing else."""

    kind = "plain"
    guarantees: frozenset[str] = frozenset()
    alive = True

    async def execute(self, command: str, *, timeout: float | None = None, cwd: str | None = None) -> ExecResult:
        return ExecResult(status="exited", exit_code=0, output=f"{command} within {timeout:g} s")

    async def read_file(self, path: str) -> bytes:
        return b""

    async def write_file(self, path: str, data: bytes) -> None: ...

    async def list_dir(self, path: str) -> tuple[str, ...]:
        return ()

    async def close(self) -> None: ...


async def test_a_backend_without_processes_waits_for_every_command(home: Path) -> None:
    class Opens:
        async def open(self, spec: Any, root: str, snapshot: Any = None) -> Plain:
            return Plain()

    async with AgentRuntime("memory:", sandboxes=Opens()) as runtime:
        session = await runtime.create_session(scripted(bash("make"), "ok"))
        assert (await session.run("go")).background_tasks == ()
        (block,) = results(await session.transcript())
        assert "make within 120 s" in block.text


async def test_large_files_that_were_read_are_not_kept_until_they_are_recorded() -> None:
    sandbox = FakeSandbox()
    sandbox.files = {"small": b"s" * 1000, "large": b"l" * 1_000_000}
    shared = SharedSandbox(sandbox)
    for number in range(20):
        for name in ("small", "large"):
            assert await shared.perform(ref(f"{name}-{number}"), ReadFile(name)) == sandbox.files[name]
    held = await shared.fence("s", 1)
    assert held == {f"small-{number}" for number in range(20)}
    both = await asyncio.gather(*(shared.perform(ref("k"), ReadFile("large")) for _ in range(2)))
    assert both == [sandbox.files["large"]] * 2
    assert await shared.perform(ref("k"), ReadFile("large")) == sandbox.files["large"], "asked again, it is read again"
