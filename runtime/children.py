"""Sub-agents: how a child's session is made, found again and driven. Shared by both editions.

A child's id follows from its call key, and its parent's head names it before it exists: a repeated spawn finds the
child that is there, whatever became of it meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import RunFailed, SessionExists, SessionNotFound
from greenroom.runtime.host import Host
from greenroom.runtime.ids import child_id
from greenroom.runtime.results import RunResult
from greenroom.runtime.session import SessionDriver
from greenroom.runtime.state import AgentState, Ready, in_flight
from greenroom.runtime.storage.head import Head
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.view import result_of

DriverOf = Callable[[str, AgentConfig | None], SessionDriver]


async def create_child(host: Host, parent: Head, call_key: str, agent: AgentConfig) -> str:
    """The id of the call's child, whose head is there when this returns."""
    sid = child_id(parent.root, call_key)
    head = Head(
        session_id=sid,
        root=parent.root,
        parent=parent.session_id,
        parent_call=call_key,
        depth=parent.depth + 1,
        user_id=parent.user_id,
        agent=await host.shelf.put(agent),
        since=host.clock.time(),
        write_id=host.ids.new_id(),
        sandbox=None if parent.sandbox is None else parent.sandbox.but(cwd=None),
        state=Ready(agent=AgentState(session_id=sid)),
        budget=parent.budget,
    )
    try:
        await host.storage.checkpoints.create(sid, head)
    except SessionExists:
        pass  # a repeated spawn: this is its child
    return sid


async def run_child(
    driver: SessionDriver,
    storage: Storage,
    task: str,
    *,
    cancel: CancelToken | None = None,
    timeout: float | None = None,
) -> RunResult:
    """Drives a child to its stop from wherever it is; a failed run is a result too. timeout: seconds, None for none."""
    found = await storage.checkpoints.read(driver.session_id)
    if found is None:
        raise SessionNotFound.of(driver.session_id)
    head = await storage.gathered(found[0])
    try:
        if isinstance(head.state, Ready) and head.state.agent.call_no == 0:
            return await driver.run(task, cancel=cancel, timeout=timeout)
        if head.owner is not None or in_flight(head.state):
            result = await driver.resume(cancel=cancel, timeout=timeout)
            if result is not None:
                return result
            head = await storage.gathered((await storage.checkpoints.read(driver.session_id) or found)[0])
        return result_of(head)
    except RunFailed as failed:
        return failed.result


def time_left(token: CancelToken | None) -> float | None:
    """Seconds that a child of this run may take, None for no bound."""
    remaining = None if token is None else token.remaining
    return None if remaining is None else max(remaining, 0.001)  # 0 would be no bound


class LocalChildren:
    """Children in their parent's own process, one task each.

    driver_of: the process's driver of a session; token: of the parent's run.
    """

    def __init__(
        self, parent: Head, agent: AgentConfig | None, host: Host, driver_of: DriverOf, token: CancelToken | None
    ) -> None:
        self._token = token
        self._parent = parent
        self._agent = agent
        self._host = host
        self._driver_of = driver_of
        self._runs: dict[str, asyncio.Task[RunResult]] = {}
        self._tokens: dict[str, CancelToken] = {}

    async def start(self, call_key: str, tool: str, task: str) -> str:
        assert self._agent is not None, "only an agent's own run starts its children"
        agent = self._agent.child_agent(tool)
        sid = await create_child(self._host, self._parent, call_key, agent)
        if sid not in self._runs:
            driver = self._driver_of(sid, agent)
            token = self._tokens[sid] = CancelToken()
            timeout = time_left(self._token)
            run = run_child(driver, self._host.storage, task, cancel=token, timeout=timeout)
            self._runs[sid] = asyncio.get_running_loop().create_task(run)
        return sid

    async def wait(self, child_id: str) -> RunResult:
        return await asyncio.shield(self._runs[child_id])

    def abandon(self) -> None:
        for run in self._runs.values():
            run.cancel()

    async def cancel(self, child_id: str, reason: str) -> None:
        if child_id in self._tokens:
            self._tokens[child_id].cancel(reason)  # also a run that has only just been asked for
        try:
            await self._driver_of(child_id, None).cancel(reason, None)
        except SessionNotFound:
            pass  # registered by its parent, but never made
        run = self._runs.get(child_id)
        if run is not None:
            await asyncio.wait([run])
