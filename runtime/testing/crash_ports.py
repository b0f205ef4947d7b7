"""The ports of the crash harness: what an owner reaches the world through, each step of it a gate of the world."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from greenroom.runtime.calls import CallRef, ExecResult, Interrupt, ModelRequest, SandboxSpec
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.config import AgentConfig, SubAgent
from greenroom.runtime.history import strict_history
from greenroom.runtime.local_trees import LocalTreeSandboxes
from greenroom.runtime.messages import Delta, MessageDelta
from greenroom.runtime.middleware import POINTS, has_hook, name_of
from greenroom.runtime.operations import Operation, OperationResult
from greenroom.runtime.ports import LlmProvider, ObjectStore
from greenroom.runtime.storage.snapshots import Saved
from greenroom.runtime.testing.clock import FakeClock
from greenroom.runtime.testing.effects import Effects
from greenroom.runtime.testing.sandbox import FakeSandbox, restored_files
from greenroom.runtime.tools.output import to_output
from greenroom.runtime.tools.registry import Tool
from greenroom.runtime.tree_sandbox import SharedSandbox

T = TypeVar("T")

EFFECT_SECONDS = 0.5
"""Seconds on the fake clock that a command or a tool takes, beyond its own: there is a middle to it."""


class World(Protocol):
    """What the ports need of the world: its gates, and what lies behind them."""

    objects: ObjectStore
    clock: FakeClock
    background: Callable[[str], bool]
    effects: Effects
    problems: list[str]

    @property
    def owner_is_dead(self) -> bool: ...

    async def gate(self, name: str) -> str | None: ...

    async def write(self, name: str, send: Callable[[], Awaitable[T]]) -> T: ...

    async def command(self, command: str) -> ExecResult: ...

    def outside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]: ...


class GatedStore:
    """The owner's way to the objects of the world."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def get(self, key: str) -> tuple[bytes, str] | None:
        await self._world.gate(f"before get {key}")
        found = await self._world.objects.get(key)
        await self._world.gate(f"after get {key}")
        return found

    async def put_if_absent(self, key: str, body: bytes) -> str:
        return await self._world.write(f"create {key}", lambda: self._world.objects.put_if_absent(key, body))

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        return await self._world.write(f"write {key}", lambda: self._world.objects.put_if_match(key, body, etag))

    async def delete(self, key: str) -> None:
        await self._world.write(f"delete {key}", lambda: self._world.objects.delete(key))

    async def delete_many(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        await self._world.write("delete many", lambda: self._world.objects.delete_many(wanted))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        await self._world.gate(f"before list {prefix}")
        async for key in self._world.objects.list(prefix):
            yield key

    async def probe(self) -> None:
        """Nothing goes wrong with it."""

    async def close(self) -> None:
        """The objects outlive every owner."""


class GatedProvider:
    """A model behind gates; every history it is sent must be one that the strictest provider takes."""

    def __init__(self, inner: LlmProvider, world: World) -> None:
        self._inner = inner
        self._world = world

    async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
        try:
            strict_history(request.messages)
        except ValueError as error:
            self._world.problems.append(f"a model was sent a history that a strict provider refuses: {error}")
        await self._world.gate(f"before model call {request.call_no} of {request.session_id}")
        async for delta in self._inner.stream(request, cancel):
            if isinstance(delta, MessageDelta):
                await self._world.gate(f"after model call {request.call_no} of {request.session_id}")
            yield delta


def gated_agent(agent: AgentConfig, world: World) -> AgentConfig:
    """The agent with its model, its hooks and the tools of its own process behind gates, down to its sub-agents."""
    children: dict[str, SubAgent] = {}
    for name in agent.subagents:
        child = agent.subagent(name)
        inner = child.agent if child.agent == "self" else gated_agent(child.agent, world)
        children[name] = dataclasses.replace(child, agent=inner)
    tools = [_gated_tool(tool, world) if tool.spec.runs_in == "process" else tool for tool in agent.registry]
    hooks = [_gated_middleware(part, world) for part in agent.middleware]
    model = GatedProvider(agent.llm, world)
    return dataclasses.replace(agent, provider=model, tools=tools, subagents=children, middleware=hooks)


def _gated_middleware(part: Any, world: World) -> Any:
    """A middleware with the same hooks, each between two gates."""

    def gated(point: str) -> Any:
        async def hook(_self: Any, *args: Any) -> Any:
            await world.gate(f"before the hook {point}")
            made = await getattr(part, point)(*args)
            await world.gate(f"after the hook {point}")
            return made

        return hook

    hooks = {point: gated(point) for point in POINTS if has_hook(part, point)}
    return type("GatedMiddleware", (), {"name": name_of(part), **hooks})()


def _gated_tool(tool: Tool, world: World) -> Tool:
    async def gated(*args: Any, **named: Any) -> Any:
        given = {name: value for name, value in named.items() if name != tool.context}
        arguments = given if tool.calling == "fields" else args[1]
        await world.gate(f"before the tool {tool.spec.name}")
        key = world.effects.begin(tool.spec.name, arguments)
        await world.gate(f"in the middle of the tool {tool.spec.name}")
        await world.clock.sleep(EFFECT_SECONDS)
        made = tool.function(*args, **named)
        if inspect.isawaitable(made):
            made = await made
        if isinstance(made, Interrupt):
            world.effects.asked.add(key)
        else:
            world.effects.end(key, to_output(made).text)
        await world.gate(f"after the tool {tool.spec.name}")
        return made

    return dataclasses.replace(tool, function=gated, builtin=None)


class Sandboxes:
    """Opens sandboxes whose files are the tree's folder: they outlive the sandbox, unless snapshots are to stand in."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._files: dict[str, dict[str, bytes]] = {}
        self.open_ones: list[FakeSandbox] = []

    async def open(self, spec: SandboxSpec, root: str, snapshot: Saved | None = None) -> FakeSandbox:
        sandbox = FakeSandbox(self._world.command, background=self._world.background)
        if spec.snapshots == "on":  # its machine is lost with it
            sandbox.files = {} if snapshot is None else await restored_files(snapshot)
        else:
            sandbox.files = self._files.setdefault(root, sandbox.files)
        self.open_ones.append(sandbox)
        return sandbox


class RemoteTrees:
    """TreeSandboxes in a process of their own: they outlive the owner."""

    def __init__(self, world: World, inner: LocalTreeSandboxes) -> None:
        self._world = world
        self._inner = inner

    async def get(self, root: str, spec: SandboxSpec) -> RemoteTree:
        return RemoteTree(self._world, await self._inner.get(root, spec))

    async def find(self, root: str) -> RemoteTree | None:
        found = await self._inner.find(root)
        return None if found is None else RemoteTree(self._world, found)

    async def close_one(self, root: str) -> None:
        await self._inner.close_one(root)

    async def close(self) -> None:
        """They go on."""


class RemoteTree:
    """A sandbox as its owner reaches it by messages, each of which it may not live to send or to hear answered."""

    def __init__(self, world: World, inner: SharedSandbox) -> None:
        self._world = world
        self._inner = inner
        self.incarnation = inner.incarnation
        self.guarantees = inner.guarantees
        self.saves = inner.saves
        self.restored = inner.restored

    async def covered(self, session_id: str) -> str | None:
        await self._world.gate(f"before asking what is saved of {session_id}")
        return await self._inner.covered(session_id)

    async def settle(self, session_id: str, through: int) -> None:
        await self._world.gate(f"before settling {session_id}")
        await self._inner.settle(session_id, through)
        await self._world.gate(f"after settling {session_id}")

    async def fence(self, session_id: str, epoch: int) -> frozenset[str]:
        await self._world.gate(f"before fencing {session_id} at {epoch}")
        held = await self._inner.fence(session_id, epoch)
        await self._world.gate(f"after fencing {session_id} at {epoch}")
        return held

    async def perform(self, ref: CallRef, operation: Operation) -> OperationResult:
        await self._world.gate(f"before asking for {ref.call_key}")
        work = self._world.outside(self._inner.perform(ref, operation))
        try:
            result = await asyncio.shield(work)
        except asyncio.CancelledError:
            if not self._world.owner_is_dead:
                await self._world.outside(self._inner.end_operation(ref))
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        await self._world.gate(f"after hearing of {ref.call_key}")
        return result

    async def end(self, ref: CallRef) -> None:
        await self._world.gate(f"before ending {ref.call_key}")
        await self._world.outside(self._inner.end(ref))
        await self._world.gate(f"after ending {ref.call_key}")

    async def end_jobs(self, session_id: str) -> None:
        await self._world.gate(f"before ending the jobs of {session_id}")
        await self._world.outside(self._inner.end_jobs(session_id))
