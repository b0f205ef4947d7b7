"""SessionDriver: the verbs of one session in one process. The embedded edition and the SessionActor both use it.

It reads the head, lets verbs.py judge, and has activation.py carry out what was judged. Verbs of one session wait for
one another here; between processes the store decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenroom.runtime.activation import Activation
from greenroom.runtime.batch import end_jobs
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import Conflict, Fenced, RunFailed, SessionBusy, SessionNotFound, UsageError
from greenroom.runtime.events import EventBuffer
from greenroom.runtime.host import Host
from greenroom.runtime.ids import check_request_id
from greenroom.runtime.limits import Limits
from greenroom.runtime.results import RunResult, RunStatus
from greenroom.runtime.state import Interrupted, State
from greenroom.runtime.storage.head import Claim, Head, Receipt
from greenroom.runtime.transitions import apply_plan
from greenroom.runtime.verbs import (
    Judgement,
    Plan,
    checked,
    claim_of,
    judge_answer,
    judge_release,
    judge_resume,
    judge_run,
    judge_submit,
    may_park,
    receipt_for,
    replay,
)
from greenroom.runtime.view import result_of

TERMINATED = "terminated"
"""The reason that terminated sessions are parked with."""

RACE_ATTEMPTS = 20
"""Times a verb looks again after somebody else changed the head between its look and its write."""


@dataclass(slots=True)
class _Active:
    """The verb this process is driving; `result` once it is over and was not refused.

    broken: whether its run was broken off by a store or a sandbox, and came to no stop.
    """

    over: asyncio.Event = field(default_factory=asyncio.Event)
    result: RunResult | None = None
    broken: bool = False


class SessionDriver:
    """`agent`: used instead of the stored one from the next run on."""

    def __init__(self, session_id: str, host: Host, agent: AgentConfig | None = None) -> None:
        self.session_id = session_id
        self.agent = agent
        self.events = EventBuffer()
        self._host = host
        self._activation = Activation(session_id, host, self.events)
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
            raise self._running_here("Wait for the run; `run` queues behind it")
        async with self._turn:
            for _ in range(RACE_ATTEMPTS):
                head, etag = await self._activation.read()
                if receipt_for(head, claim) is not None:
                    return head.state  # this very request was taken before
                plan = judge_submit(head, text)
                record = await self._activation.load(head, etag)
                record.update(claim=claim)
                apply_plan(record, plan, Limits())
                record.update(receipts=await record.receipts_with(record.head.state))
                try:
                    await record.save()
                except (Conflict, Fenced):
                    continue
                return record.head.state
        raise self._kept_changing()

    async def resume(
        self, *, timeout: float | None = None, cancel: CancelToken | None = None, request_id: str | None = None
    ) -> RunResult | None:
        """Goes on after an interruption or in place of a dead owner; None when nothing is in flight."""
        active = self._active
        if active is not None:
            await active.over.wait()
            return None if active.result is None else checked(active.result)
        claim = self._claim(request_id, "resume", None)
        return await self._perform(judge_resume, claim, timeout=timeout, cancel=cancel)

    async def answer(
        self, interrupt_id: str, response: Any, *, cancel: CancelToken | None = None, request_id: str | None = None
    ) -> RunResult:
        """Consumes the open question, durably, and runs on."""
        claim = self._claim(request_id, "answer", [interrupt_id, response])
        result = await self._perform(lambda head: judge_answer(head, interrupt_id, response), claim, cancel=cancel)
        assert result is not None, "an answered session runs"
        return result

    async def cancel(
        self,
        reason: str = "",
        timeout: float | None = 10.0,
        *,
        request_id: str | None = None,
        hard: bool = False,
        again: bool = False,
    ) -> RunResult | None:
        """Parks the run wherever it is, and everything below it; None when there is nothing to cancel.

        With a request_id, asking again gives the parked result again, also after the session has gone on. hard: tools
        get no time to clean up. again: it may have been asked before without an answer: what is parked by now is the
        answer. Raises SessionBusy when it has not parked after `timeout` seconds; the cancellation
        goes on.
        """
        answered = await self.answered_cancel(request_id) if request_id is not None else None
        if answered is not None:
            return answered
        active, asked = self._active, again or request_id is not None or bool(self._tokens)
        self.tell_cancelled(reason, hard=hard)
        parking = asyncio.ensure_future(self._parked(active, reason, again=asked))
        self._parkings.add(parking)
        parking.add_done_callback(self._parkings.discard)
        done, _ = await asyncio.wait([parking], timeout=timeout)
        if not done:
            raise SessionBusy(
                f"session {self.session_id!r} has not parked within {timeout:g} s",
                session_id=self.session_id,
                hint="The cancellation goes on; ask again",
            )
        result = parking.result()
        if hard:
            await self.end_jobs()
        if request_id is not None and result is not None:
            await self.keep_cancel(request_id, result)
        return result

    async def end_jobs(self) -> None:
        """Ends the background jobs of a session that nobody runs."""
        async with self._turn:
            for _ in range(RACE_ATTEMPTS):
                head, etag = await self._activation.read()
                if head.owner is not None or not head.jobs:
                    return
                await end_jobs(head, self._host.sandboxes, self._host.tasks)
                record = await self._activation.load(head, etag)
                record.update(jobs=())
                try:
                    await record.save()
                except (Conflict, Fenced):
                    continue
                return

    def tell_cancelled(self, reason: str, *, hard: bool = False) -> None:
        """Cancels the verb that runs and those that wait; returns at once."""
        for token in list(self._tokens):
            token.cancel(reason, hard=hard)

    async def release_claim(self, expected_epoch: int) -> None:
        """Lets go of what a dead owner was working on, so that `resume`, or the same request again, goes on.

        Does nothing when nobody owns the session; raises Conflict when its epoch is another, SessionBusy when it is
        being run here.
        """
        if self._active is not None:
            raise self._running_here("Its owner lives: cancel it, or wait")
        async with self._turn:
            head, etag = await self._activation.read()
            if judge_release(head, expected_epoch):
                await self._activation.release(head, etag)

    async def delete(self) -> list[str]:
        """Deletes the session and everything below it, ending what runs; answers the ids. Repeatable."""
        self._deleting = True
        try:
            self.tell_cancelled("deleted")
            async with self._turn:
                found = await self._host.storage.checkpoints.read(self.session_id)
                if found is not None:
                    self._activation.check_host_fence(found[0])
                gone = await self._host.storage.delete_tree(self.session_id)
                for sid in {self.session_id, *gone}:
                    await self._host.tasks.end_all_of(sid)
                return gone
        finally:
            self._deleting = False

    async def recover(self, request_id: str, *, cancel: CancelToken | None = None) -> RunResult | None:
        """Goes on with a request whose owner died: its run, or its result; None when it had not been accepted."""
        head, _ = await self._activation.read()
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
            async with self._turn:
                self._check_open()
                active = self._active = _Active()
                try:
                    result = await self._perform_now(judge, claim, token, timeout=timeout, recovering=recovering)
                    active.result = result
                except RunFailed as failed:
                    active.result = failed.result
                    active.broken = failed.resumable
                    raise
                finally:
                    self._active = None
                    active.over.set()
                return result
        finally:
            self._tokens.discard(token)

    async def _perform_now(
        self,
        judge: Callable[[Head], Judgement],
        claim: Claim,
        token: CancelToken,
        *,
        timeout: float | None,
        recovering: bool,
    ) -> RunResult | None:
        for _ in range(RACE_ATTEMPTS):
            head, etag = await self._activation.read()
            plan = None if recovering else await self._replayed(head, claim)
            if plan is None:
                plan = judge(head)
            if not isinstance(plan, Plan):
                return plan
            begun = await self._activation.begin(plan, head, etag, claim, self.agent)
            if begun is not None:
                return checked(await self._activation.drive(begun, token, timeout))
        raise self._kept_changing()

    def _check_open(self) -> None:
        if self._host.lifetime.closed:
            raise UsageError("the runtime is closed", hint="Make a new one; the session lies in the store")
        if self._deleting:
            raise SessionNotFound(f"session {self.session_id!r} is being deleted", session_id=self.session_id)

    async def _parked(self, active: _Active | None, reason: str, *, again: bool) -> RunResult | None:
        """The end of the verb that runs; what it left to others, waiting for an answer or broken off is parked too."""
        if active is None:
            return await self._park(reason, again=again)
        await active.over.wait()
        result = active.result
        if result is None or active.broken or result.status is RunStatus.suspended:
            return await self._park(reason, again=again)
        return result

    async def _park(self, reason: str, *, again: bool = False) -> RunResult | None:
        async with self._turn:
            for _ in range(RACE_ATTEMPTS):
                head, etag = await self._activation.read()
                if not may_park(head):
                    return result_of(head) if again and isinstance(head.state, Interrupted) else None
                parked = await self._activation.park(head, etag, reason)
                if parked is not None:
                    return parked
        raise self._kept_changing()

    # -- requests that come again

    def _claim(self, request_id: str | None, verb: str, content: Any) -> Claim:
        given = request_id is not None
        own = self._host.ids.new_id() if request_id is None else check_request_id(request_id)
        return claim_of(own, verb, content, given=given)

    async def _replayed(self, head: Head, claim: Claim) -> Judgement:
        """What the request's own past makes of it; None for a new one."""
        receipt = receipt_for(head, claim)
        return replay(head, claim) if receipt is None else await self._result_behind(receipt)

    async def answered_cancel(self, request_id: str) -> RunResult | None:
        """The result that this request to cancel was given before; None for a new one."""
        claim = self._claim(request_id, "cancel", None)
        head, _ = await self._activation.read()
        receipt = receipt_for(head, claim)
        return None if receipt is None else await self._result_behind(receipt)

    async def keep_cancel(self, request_id: str, result: RunResult) -> None:
        """Keeps a receipt for a request to cancel, which is no run of its own."""
        claim = self._claim(request_id, "cancel", None)
        async with self._turn:
            for _ in range(RACE_ATTEMPTS):
                head, etag = await self._activation.read()
                if head.owner is not None or receipt_for(head, claim) is not None:
                    return  # it has gone on already
                record = await self._activation.load(head, etag)
                record.update(receipts=await record.receipts_with(result, claim))
                try:
                    await record.save()
                except (Conflict, Fenced):
                    continue
                return

    async def _result_behind(self, receipt: Receipt) -> RunResult | None:
        body = await self._host.storage.get_blob(self.session_id, receipt.blob)
        return None if body is None else checked(RunResult.model_validate_json(body))

    def _running_here(self, hint: str) -> SessionBusy:
        return SessionBusy(
            f"session {self.session_id!r} is running here",
            session_id=self.session_id,
            owner=self._host.owner,
            hint=hint,
        )

    def _kept_changing(self) -> SessionBusy:
        return SessionBusy(
            f"session {self.session_id!r} was changed by others {RACE_ATTEMPTS} times in a row",
            session_id=self.session_id,
            hint="Try again",
        )
