"""SessionDriver: the verbs of one session in one process. The embedded edition and the SessionActor both use it.

It reads the head, lets verbs.py judge, acquires the session by one compare-and-swap that carries the verb's own change,
and hands over to the loop. Runs of one session wait for one another here; between processes the store decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.emitter import Emitter
from greenroom.runtime.errors import (
    Conflict,
    Fenced,
    RunFailed,
    SandboxError,
    SessionBusy,
    SessionNotFound,
    UsageError,
)
from greenroom.runtime.events import EventBuffer
from greenroom.runtime.host import Host
from greenroom.runtime.ids import check_request_id
from greenroom.runtime.limits import Limits
from greenroom.runtime.loop import Loop, LoopPorts, park
from greenroom.runtime.machine import Effect, Stop
from greenroom.runtime.plans import apply_plan, sandbox_of
from greenroom.runtime.providers.optional import preflight
from greenroom.runtime.record import Record
from greenroom.runtime.results import Failure, FailureKind, RunResult, RunStatus
from greenroom.runtime.state import Interrupted, State, in_flight
from greenroom.runtime.storage.head import Claim, Head, Receipt
from greenroom.runtime.tools.toolbox import Toolbox
from greenroom.runtime.verbs import (
    Judgement,
    Plan,
    checked,
    claim_of,
    judge_answer,
    judge_resume,
    judge_run,
    judge_submit,
    may_park,
    receipt_for,
    replay,
)
from greenroom.runtime.view import result_of

RACE_ATTEMPTS = 20
"""Times a verb looks again after somebody else changed the head between its look and its write."""


@dataclass(slots=True)
class _Active:
    """The verb this process is driving; `result` once it is over and was not refused."""

    cancel: CancelToken
    over: asyncio.Event = field(default_factory=asyncio.Event)
    result: RunResult | None = None


class SessionDriver:
    """`agent`: used instead of the stored one from the next run on."""

    def __init__(self, session_id: str, host: Host, agent: AgentConfig | None = None) -> None:
        self.session_id = session_id
        self.agent = agent
        self.events = EventBuffer()
        self._host = host
        self._turn = asyncio.Lock()
        self._active: _Active | None = None
        self._tokens: set[CancelToken] = set()  # of the verb that runs and of those that wait for their turn
        self._parkings: set[asyncio.Task[RunResult | None]] = set()
        self._deleting = False

    @property
    def running(self) -> bool:
        return self._active is not None

    # -- verbs

    async def run(
        self,
        text: str | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        request_id: str | None = None,
    ) -> RunResult:
        """Appends `text` and runs to a stop; raises RunFailed for a failed run, SessionError for a refusal."""
        claim = self._claim(request_id, "run", text)
        result = await self._perform(lambda head: judge_run(head, text), claim, timeout=timeout, cancel=cancel)
        assert result is not None, "a run always has a result"
        return result

    async def submit(self, text: str, *, request_id: str | None = None) -> State:
        """Appends a message, or answers the one open follow-up question, and runs nothing."""
        claim = self._claim(request_id, "submit", text)
        if self._active is not None:
            raise SessionBusy(
                f"session {self.session_id!r} is running here",
                session_id=self.session_id,
                owner=self._host.owner,
                hint="Wait for the run; `run` queues behind it",
            )
        async with self._turn:
            for _ in range(RACE_ATTEMPTS):
                head, etag = await self._read()
                if receipt_for(head, claim) is not None:
                    return head.state  # this very request was taken before
                plan = judge_submit(head, text)
                record = await Record.load(self._host.storage, self._host.ids, head, etag)
                record.update(claim=claim)
                apply_plan(record, plan, Limits())
                record.update(receipts=await record.receipts_with(record.head.state))
                try:
                    await record.save()
                except (Conflict, Fenced):
                    continue
                return record.head.state
        raise self._kept_changing()

    async def resume(self, *, cancel: CancelToken | None = None, request_id: str | None = None) -> RunResult | None:
        """Goes on after an interruption or in place of a dead owner; None when nothing is in flight."""
        active = self._active
        if active is not None:
            await active.over.wait()
            return None if active.result is None else checked(active.result)
        return await self._perform(judge_resume, self._claim(request_id, "resume", None), cancel=cancel)

    async def answer(
        self, interrupt_id: str, response: Any, *, cancel: CancelToken | None = None, request_id: str | None = None
    ) -> RunResult:
        """Consumes the open question, durably, and runs on."""
        claim = self._claim(request_id, "answer", [interrupt_id, response])
        result = await self._perform(lambda head: judge_answer(head, interrupt_id, response), claim, cancel=cancel)
        assert result is not None, "an answered session runs"
        return result

    async def cancel(
        self, reason: str = "", timeout: float | None = 10.0, *, request_id: str | None = None
    ) -> RunResult | None:
        """Parks the run wherever it is, and everything below it; None when there is nothing to cancel.

        With a request_id, asking again after it was parked gives the parked result again. Raises SessionBusy when it
        has not parked after `timeout` seconds; the cancellation goes on.
        """
        active, asked = self._active, request_id is not None or bool(self._tokens)
        for token in list(self._tokens):
            token.cancel(reason)
        parking = asyncio.ensure_future(_result_of(active) if active is not None else self._park(reason, again=asked))
        self._parkings.add(parking)
        parking.add_done_callback(self._parkings.discard)
        done, _ = await asyncio.wait([parking], timeout=timeout)
        if done:
            return parking.result()
        raise SessionBusy(
            f"session {self.session_id!r} has not parked within {timeout:g} s",
            session_id=self.session_id,
            hint="The cancellation goes on; ask again",
        )

    async def delete(self) -> list[str]:
        """Deletes the session and everything below it, ending what runs; answers the ids. Repeatable."""
        self._deleting = True
        try:
            for token in list(self._tokens):
                token.cancel("deleted")
            async with self._turn:
                found = await self._host.storage.checkpoints.read(self.session_id)
                if found is not None:
                    self._check_host_fence(found[0])
                return await self._host.storage.delete_tree(self.session_id)
        finally:
            self._deleting = False

    async def recover(self, request_id: str, *, cancel: CancelToken | None = None) -> RunResult | None:
        """Goes on with a request whose owner died: its run, or its result; None when it had not been accepted."""
        head, _ = await self._read()
        receipt = next((kept for kept in head.receipts if kept.request_id == request_id), None)
        if receipt is not None:
            return await self._result_behind(receipt)
        if head.claim is None or head.claim.request_id != request_id:
            return None
        if head.owner is None:
            return checked(result_of(head))
        return await self._perform(judge_resume, head.claim, cancel=cancel, recovering=True)

    # -- how a verb is carried out

    async def _perform(
        self,
        judge: Callable[[Head], Judgement],
        claim: Claim,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        recovering: bool = False,
    ) -> RunResult | None:
        token = cancel.child() if cancel is not None else CancelToken(monotonic=self._host.clock.monotonic)
        self._tokens.add(token)
        try:
            return await self._perform_in_turn(judge, claim, token, timeout=timeout, recovering=recovering)
        finally:
            self._tokens.discard(token)

    async def _perform_in_turn(
        self,
        judge: Callable[[Head], Judgement],
        claim: Claim,
        token: CancelToken,
        *,
        timeout: float | None,
        recovering: bool,
    ) -> RunResult | None:
        async with self._turn:
            if self._host.lifetime.closed:
                raise UsageError("the runtime is closed", hint="Make a new one; the session lies in the store")
            if self._deleting:
                raise SessionNotFound(f"session {self.session_id!r} is being deleted", session_id=self.session_id)
            active = self._active = _Active(token)
            try:
                for _ in range(RACE_ATTEMPTS):
                    head, etag = await self._read()
                    replayed = None if recovering else await self._replayed(head, claim)
                    plan = judge(head) if replayed is None else replayed
                    if not isinstance(plan, Plan):
                        return plan
                    begun = await self._begin(plan, head, etag, claim)
                    if begun is not None:
                        record, agent, effects = begun
                        active.result = await self._drive(record, agent, effects, token, timeout, plan)
                        return checked(active.result)
                raise self._kept_changing()
            except RunFailed as failed:
                active.result = failed.result
                raise
            finally:
                self._active = None
                active.over.set()

    async def _begin(
        self, plan: Plan, head: Head, etag: str, claim: Claim
    ) -> tuple[Record, AgentConfig, tuple[Effect, ...]] | None:
        """Acquires the session and makes the plan's change durable; None when somebody else was faster."""
        host = self._host
        digest, agent = await self._agent_of(head)
        sandbox = sandbox_of(head, agent)
        if not (plan.take_over and head.cancel is not None):
            preflight(agent.llm)
            Toolbox(agent).preflight(sandbox.spec.kind if sandbox is not None else None)
        if plan.take_over:
            head, etag = await self._acquire()
            if not in_flight(head.state) and head.cancel is None:  # its owner came to a stop just before
                await self._release(head, etag)
                return None
        record = await Record.load(host.storage, host.ids, head, etag)
        if not plan.take_over:
            record.update(
                epoch=head.epoch + 1, epoch_write_no=head.write_no + 1, owner=host.owner, since=host.clock.time()
            )
        if plan.take_over and head.claim is not None and head.claim.given:
            claim = head.claim  # the run still answers the request that began it
        record.update(claim=claim, agent=digest, sandbox=sandbox, host_fence=host.host_fence)
        if head.cancel is not None:
            return record, agent, ()
        effects = apply_plan(record, plan, agent.limits)
        try:
            if not isinstance(effects[0], Stop):
                await record.save()
        except (Conflict, Fenced):
            return None
        return record, agent, effects

    async def _drive(
        self,
        record: Record,
        agent: AgentConfig,
        effects: tuple[Effect, ...],
        token: CancelToken,
        timeout: float | None,
        plan: Plan,
    ) -> RunResult:
        host = self._host
        emitter = Emitter(self.session_id, record.head.epoch, self.events, host.clock)
        children = host.children.children_of(record.head, agent)
        record.on_lost = lambda: token.cancel("the session cannot be saved any more")
        request = record.head.claim.request_id if record.head.claim is not None else None
        emitter.emit("run_started", revision=record.head.revision, request_id=request)
        if plan.take_over:
            emitter.emit("reset", durable_write_no=record.head.write_no)
        forget_alarm = self._set_alarm(token, timeout, agent.limits.max_seconds)
        try:
            if record.head.cancel is not None:  # its owner was cancelling it when it died
                await park(record, record.head.cancel.reason, host.sandboxes, children, host.clock)
            else:
                ports = LoopPorts(host.sandboxes, children, emitter, host.clock, host.ids, token)
                await Loop(record, agent, ports).run(effects)
            result = result_of(record.head)
        except Exception as error:  # a store or a sandbox that is lost; the session goes on from what is durable
            failed = _broken_off(record.head, error)
            emitter.emit("run_finished", result=failed.result)
            raise failed from error
        finally:
            forget_alarm()
            await record.settle()
        emitter.emit("run_finished", result=result)
        return result

    async def _replayed(self, head: Head, claim: Claim) -> RunResult | None:
        receipt = receipt_for(head, claim)
        return replay(head, claim) if receipt is None else await self._result_behind(receipt)

    async def _result_behind(self, receipt: Receipt) -> RunResult | None:
        body = await self._host.storage.get_blob(self.session_id, receipt.blob)
        return None if body is None else checked(RunResult.model_validate_json(body))

    async def _park(self, reason: str, *, again: bool = False) -> RunResult | None:
        host = self._host
        async with self._turn:
            for _ in range(RACE_ATTEMPTS):
                head, etag = await self._read()
                if not may_park(head):
                    return result_of(head) if again and isinstance(head.state, Interrupted) else None
                if head.owner is not None:
                    head, etag = await self._acquire()
                    if not in_flight(head.state) and head.cancel is None:
                        await self._release(head, etag)
                        continue
                record = await Record.load(host.storage, host.ids, head, etag)
                if head.owner is None:
                    record.update(epoch=head.epoch + 1, epoch_write_no=head.write_no + 1, owner=host.owner)
                try:
                    children = host.children.children_of(record.head, None)
                    await park(record, reason, host.sandboxes, children, host.clock)
                except (Conflict, Fenced):
                    continue
                return result_of(record.head)
        raise self._kept_changing()

    async def _release(self, head: Head, etag: str) -> None:
        record = Record(self._host.storage, self._host.ids, head, etag, ())
        record.update(owner=None)
        await record.save()

    async def _read(self) -> tuple[Head, str]:
        found = await self._host.storage.checkpoints.read(self.session_id)
        if found is None:
            raise SessionNotFound.of(self.session_id)
        head, etag = found
        self._check_host_fence(head)
        return await self._host.storage.gathered(head), etag

    def _check_host_fence(self, head: Head) -> None:
        if head.host_fence > self._host.host_fence:
            raise Fenced(
                f"session {self.session_id!r} was fenced by host fence {head.host_fence}, this runtime has "
                f"{self._host.host_fence}",
                hint="Another host has taken the session over; this one must let go of it",
            )

    async def _acquire(self) -> tuple[Head, str]:
        head, etag = await self._host.storage.checkpoints.acquire(self.session_id, self._host.owner)
        return await self._host.storage.gathered(head), etag

    async def _agent_of(self, head: Head) -> tuple[str, AgentConfig]:
        if self.agent is not None:
            return await self._host.shelf.put(self.agent), self.agent
        return head.agent, await self._host.shelf.get(head.agent)

    def _set_alarm(self, token: CancelToken, timeout: float | None, max_seconds: float | None) -> Callable[[], None]:
        """Cancels the run when its time is over; answers what takes that back."""
        limits = [seconds for seconds in (timeout, max_seconds) if seconds]
        if not limits:
            return lambda: None
        reason = f"time limit of {min(limits):g} s"
        return self._host.clock.call_later(min(limits), lambda: token.cancel(reason))

    def _claim(self, request_id: str | None, verb: str, content: Any) -> Claim:
        given = request_id is not None
        own = self._host.ids.new_id() if request_id is None else check_request_id(request_id)
        return claim_of(own, verb, content, given=given)

    def _kept_changing(self) -> SessionBusy:
        return SessionBusy(
            f"session {self.session_id!r} was changed by others {RACE_ATTEMPTS} times in a row",
            session_id=self.session_id,
            hint="Try again",
        )


async def _result_of(active: _Active) -> RunResult | None:
    await active.over.wait()
    return active.result


def _broken_off(head: Head, error: Exception) -> RunFailed:
    kind = FailureKind.sandbox_open if isinstance(error, SandboxError) else FailureKind.storage
    failure = Failure(kind=kind, message=f"{type(error).__name__}: {error}", retryable=False)
    agent = head.state.agent
    result = RunResult(
        session_id=head.session_id,
        status=RunStatus.failed,
        text=agent.final_text,
        usage=agent.usage - head.usage_before,
        steps=agent.run_step,
        revision=head.revision,
        failure=failure,
    )
    return RunFailed.of(result, failure, resumable=True)
