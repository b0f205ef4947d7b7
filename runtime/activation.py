"""Activation: what makes this process the owner of a session, and takes it from there to a stop.

It acquires by one compare-and-swap that carries the verb's own change, hands over to the loop, and reports how the run
ended. Which verb is legal is not decided here (verbs.py), nor in what order verbs come (session.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from greenroom.runtime.batch import end_batch
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.emitter import Emitter
from greenroom.runtime.errors import Conflict, Fenced, RunFailed, SandboxError, SessionNotFound
from greenroom.runtime.events import EventBuffer
from greenroom.runtime.host import Host
from greenroom.runtime.limits import Limits
from greenroom.runtime.loop import Loop, save_stop
from greenroom.runtime.machine import CancelSeen, Effect, Stop
from greenroom.runtime.ports import Children
from greenroom.runtime.providers.optional import preflight
from greenroom.runtime.record import Record
from greenroom.runtime.results import Failure, FailureKind, RunResult
from greenroom.runtime.run_ports import RunPorts
from greenroom.runtime.state import in_flight
from greenroom.runtime.storage.head import Claim, Head, SandboxRef
from greenroom.runtime.toolbox import Toolbox
from greenroom.runtime.transitions import advance, apply_plan
from greenroom.runtime.verbs import Plan
from greenroom.runtime.view import broken_off_result, result_of
from greenroom.runtime.workspace import resolved_spec


@dataclass(frozen=True, slots=True)
class Begun:
    """A session that is ours: what it holds, which agent drives it, what is to be done first."""

    record: Record
    agent: AgentConfig
    effects: tuple[Effect, ...]
    taken_over: bool


class Activation:
    """One session as this process can come to own it; events of its runs go to `events`."""

    def __init__(self, session_id: str, host: Host, events: EventBuffer) -> None:
        self.session_id = session_id
        self._host = host
        self._events = events

    async def read(self) -> tuple[Head, str]:
        """The head, whole, and its etag; raises SessionNotFound, or Fenced by a higher host fence."""
        found = await self._host.storage.checkpoints.read(self.session_id)
        if found is None:
            raise SessionNotFound.of(self.session_id)
        head, etag = found
        self.check_host_fence(head)
        return await self._host.storage.gathered(head), etag

    def check_host_fence(self, head: Head) -> None:
        if head.host_fence > self._host.host_fence:
            raise Fenced(
                f"session {self.session_id!r} was fenced by host fence {head.host_fence}, this runtime has "
                f"{self._host.host_fence}",
                hint="Another host has taken the session over; this one must let go of it",
            )

    async def load(self, head: Head, etag: str) -> Record:
        """The session to be changed: whatever is saved of it carries this host's fence."""
        record = await Record.load(self._host.storage, self._host.ids, head, etag)
        record.update(host_fence=self._host.host_fence)
        return record

    async def begin(self, plan: Plan, head: Head, etag: str, claim: Claim, agent: AgentConfig | None) -> Begun | None:
        """Acquires the session and makes the plan's change durable; None when somebody else was faster.

        agent: used from now on instead of the stored one.
        """
        host = self._host
        digest = head.agent if agent is None else await host.shelf.put(agent)
        agent = await host.shelf.get(digest) if agent is None else agent
        host.parts.remember(agent)
        sandbox = _sandbox_of(head, agent)
        if not (plan.take_over and head.cancel is not None):
            preflight(agent.llm)
            Toolbox(agent).preflight(sandbox.spec.kind if sandbox is not None else None)
        if plan.take_over:
            taken = await self._take_over(head)
            if taken is None:
                return None
            head, etag = taken
            record = await self.load(head, etag)
            claim = _inherited(record, claim)
        else:
            record = await self.load(head, etag)
            record.own(host.owner, host.clock.time())
        budget = agent.limits.max_tokens_total if head.parent is None else head.budget
        record.update(claim=claim, agent=digest, sandbox=sandbox, budget=budget)
        if head.cancel is not None:
            return Begun(record, agent, (), plan.take_over)
        effects = apply_plan(record, plan, agent.limits)
        try:
            if not isinstance(effects[0], Stop):
                await record.save()
        except (Conflict, Fenced):
            return None
        return Begun(record, agent, effects, plan.take_over)

    async def drive(self, begun: Begun, token: CancelToken, timeout: float | None) -> RunResult:
        """To the stop; raises RunFailed(resumable) when a store or a sandbox is lost on the way."""
        host, record, agent = self._host, begun.record, begun.agent
        emitter = Emitter(self.session_id, record.head.epoch, self._events, host.clock)
        children = host.children.children_of(record.head, agent, token)
        record.on_lost = lambda: token.cancel("the session cannot be saved any more")
        request = record.head.claim.request_id if record.head.claim is not None else None
        emitter.emit("run_started", revision=record.head.revision, request_id=request)
        if begun.taken_over:
            emitter.emit("reset", durable_write_no=record.head.write_no)
        forget_alarm = self._set_alarm(token, timeout, agent.limits.max_seconds)
        try:
            if record.head.cancel is not None:  # its owner was cancelling it when it died
                await self._end(record, children, record.head.cancel.reason)
            else:
                ports = RunPorts(
                    host.sandboxes, children, emitter, host.clock, host.ids, host.tasks, host.budgets, token
                )
                await Loop(record, agent, ports).run(begun.effects)
            result = result_of(record.head)
        except Exception as error:  # a store or a sandbox that is lost; the session goes on from what is durable
            children.abandon()
            if isinstance(error, Fenced) or not host.tasks.outlive_runs:
                await host.tasks.end_all_of(self.session_id)
            failed = _broken_off(record.head, error)
            emitter.emit("run_finished", result=failed.result)
            emitter.close()
            raise failed from error
        finally:
            forget_alarm()
            await record.settle()
        emitter.emit("run_finished", result=result)
        emitter.close()
        return result

    async def park(self, head: Head, etag: str, reason: str) -> RunResult | None:
        """Ends what nobody drives any more, taking it from whoever owns it; None when somebody was faster."""
        host = self._host
        if head.owner is not None:
            taken = await self._take_over(head)
            if taken is None:
                return None
            head, etag = taken
        record = await self.load(head, etag)
        if head.owner is None:
            record.own(host.owner, host.clock.time())
        try:
            await self._end(record, host.children.children_of(record.head, None), reason)
        except (Conflict, Fenced):
            return None
        return result_of(record.head)

    async def _end(self, record: Record, children: Children, reason: str) -> None:
        """Ends what an owned run left: operations, children, open calls; then it is Interrupted, durably."""
        await record.mark_cancelled(reason, self._host.clock.time())
        await end_batch(record, self._host.sandboxes, children, reason)
        advance(record, CancelSeen(reason), Limits())
        await save_stop(record, self._host.clock)

    async def release(self, head: Head, etag: str) -> None:
        """Lets go of a session: nobody owns it, and whoever did is fenced off."""
        record = Record(self._host.storage, self._host.ids, head, etag, ())
        record.own(None, self._host.clock.time())
        record.update(host_fence=self._host.host_fence)
        await record.save()

    async def _take_over(self, seen: Head) -> tuple[Head, str] | None:
        """The session, fenced off from its owner; None when that one had come to a stop just before."""
        head, etag = await self._host.storage.checkpoints.acquire(self.session_id, self._host.owner)
        head = await self._host.storage.gathered(head)
        if not in_flight(head.state) and head.cancel is None:
            with contextlib.suppress(Conflict, Fenced):  # somebody else has it by now: it is looked at again
                await self.release(head, etag)
            return None
        return head, etag

    def _set_alarm(self, token: CancelToken, timeout: float | None, max_seconds: float | None) -> Callable[[], None]:
        """Cancels the run when its time is over; answers what takes that back."""
        limits = [seconds for seconds in (timeout, max_seconds) if seconds]
        if not limits:
            return lambda: None
        reason = f"time limit of {min(limits):g} s"
        token.bound(min(limits))
        return self._host.clock.call_later(min(limits), lambda: token.cancel(reason))


def _broken_off(head: Head, error: Exception) -> RunFailed:
    kind = FailureKind.sandbox_open if isinstance(error, SandboxError) else FailureKind.storage
    failure = Failure(kind=kind, message=f"{type(error).__name__}: {error}", retryable=False)
    return RunFailed.of(broken_off_result(head, failure), failure, resumable=True)


def _inherited(record: Record, claim: Claim) -> Claim:
    """What a run that was taken over answers: the request that began it, and this one with it."""
    first = record.head.claim
    if first is None or not first.given:
        return claim
    if claim.request_id != first.request_id:
        record.also_answers.append(claim)
    return first


def _sandbox_of(head: Head, agent: AgentConfig) -> SandboxRef | None:
    """The tree's sandbox; a root gets it from its agent the first time that agent has one."""
    if head.sandbox is None and head.parent is None and agent.sandbox_spec is not None:
        return SandboxRef(spec=resolved_spec(agent.sandbox_spec, head.root))
    return head.sandbox
