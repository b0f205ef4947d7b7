"""Which verb is legal when, and what it does to the head: the table of api.md as pure functions of the head.

A judge answers a Plan (what is to be begun), a RunResult or None (nothing is to be done), or raises the refusal.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from greenroom.runtime.calls import Interrupt, ToolOutput, compact_json
from greenroom.runtime.errors import (
    ClaimHeld,
    ConfigError,
    Conflict,
    InterruptPending,
    RequestConflict,
    RunFailed,
    SessionBusy,
    UnknownInterrupt,
    UsageError,
)
from greenroom.runtime.journal import Outcome
from greenroom.runtime.machine import Answered, Event, Resumed, RunStarted, UserSaid
from greenroom.runtime.messages import Message, clean
from greenroom.runtime.policy import ruling_of
from greenroom.runtime.results import RunResult, RunStatus
from greenroom.runtime.state import Interrupted, Ready, WaitingForUser, in_flight
from greenroom.runtime.storage.head import Claim, Head, Receipt
from greenroom.runtime.view import open_interrupt, result_of

FOLLOWUP = "followup_question"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a verb begins: these events in turn, this message before the last of them.

    answer: the outcome of the waiting call; approved: that call may run; take_over: another owner has to be fenced off
    first.
    """

    events: tuple[Event, ...]
    message: Message | None = None
    answer: Outcome | None = None
    approved: bool = False
    take_over: bool = False


Judgement = Plan | RunResult | None


def judge_run(head: Head, text: str | None) -> Judgement:
    _refuse_other_owner(head)
    if isinstance(head.state, WaitingForUser):
        question = _only_followup(head)
        if text is None:
            raise _pending(head)
        return Plan((Answered(),), answer=_response_outcome(question, text))
    if in_flight(head.state):  # answered by submit, not driven yet
        if text is not None:
            raise UsageError(f"session {head.session_id!r} has an answer to run on", hint="Call run() without a text")
        return Plan((Resumed(),))
    if text is not None:
        return Plan((UserSaid(), RunStarted()), message=user_message(text))
    if not isinstance(head.state, Ready) or head.write_no == 0 or not has_messages(head):
        raise UsageError(f"session {head.session_id!r} has no message to run", hint="Give a text, or submit one first")
    return Plan((RunStarted(),))


def judge_submit(head: Head, text: str) -> Plan:
    _refuse_other_owner(head)
    if isinstance(head.state, WaitingForUser):
        return Plan((Answered(),), answer=_response_outcome(_only_followup(head), text))
    if in_flight(head.state):
        raise UsageError(f"session {head.session_id!r} has an answer to run on", hint="Call run() or resume() first")
    return Plan((UserSaid(),), message=user_message(text))


def judge_resume(head: Head) -> Judgement:
    if head.owner is not None:
        return Plan((Resumed(),), take_over=True)
    if isinstance(head.state, WaitingForUser):
        return result_of(head)
    return Plan((Resumed(),)) if isinstance(head.state, Interrupted) or in_flight(head.state) else None


def judge_answer(head: Head, interrupt_id: str, response: Any) -> Judgement:
    if head.owner is not None:
        raise ClaimHeld(
            f"session {head.session_id!r} is being run by {head.owner} since it got its answer",
            session_id=head.session_id,
            hint=f"Wait for that run; if its owner died: release_claim({head.epoch}), or `resume` the session",
        )
    question = open_interrupt(head)
    if question is None or question.id != interrupt_id:
        open_now = f"open is {question.id}" if question else "none is open"
        raise UnknownInterrupt(
            f"session {head.session_id!r} has no open question {interrupt_id!r}; {open_now}",
            session_id=head.session_id,
        )
    assert head.batch is not None, "a question is asked by a call of the open batch"
    if head.batch.call(interrupt_id).verdict == "ask":
        ruling = ruling_of(response)
        return Plan((Answered(),), answer=ruling.outcome, approved=ruling.outcome is None)
    return Plan((Answered(),), answer=_response_outcome(question, response))


def judge_release(head: Head, expected_epoch: int) -> bool:
    """Whether there is a claim to let go of; raises Conflict when the session has moved on since it was looked at."""
    if head.epoch != expected_epoch:
        raise Conflict(
            f"session {head.session_id!r} is at epoch {head.epoch}, not at {expected_epoch}",
            hint="Look at its status again: somebody has taken it over",
        )
    return head.owner is not None


def may_park(head: Head) -> bool:
    """Whether cancel has anything to do: a question that waits, a child that has not begun, an owner that runs it."""
    fresh_child = isinstance(head.state, Ready) and head.parent is not None and head.state.agent.call_no == 0
    return head.owner is not None or isinstance(head.state, WaitingForUser) or fresh_child or in_flight(head.state)


def claim_of(request_id: str, verb: str, content: Any, *, given: bool) -> Claim:
    digest = hashlib.sha256(compact_json([verb, content]).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return Claim(request_id=request_id, verb=verb, digest=digest, given=given)


def receipt_for(head: Head, claim: Claim) -> Receipt | None:
    """The receipt of a request that was answered before; raises RequestConflict when it had other content."""
    receipt = next((kept for kept in head.receipts if kept.request_id == claim.request_id), None)
    if receipt is not None and receipt.digest != claim.digest:
        raise _other_content(head, claim)
    return receipt


def replay(head: Head, claim: Claim) -> Judgement:
    """What is left to do of the request that this session took last: nothing but its result, or to go on with it.

    None for another request. Raises RequestConflict, ClaimHeld or RunFailed.
    """
    if head.claim is None or head.claim.request_id != claim.request_id:
        return None
    if head.claim.digest != claim.digest:
        raise _other_content(head, claim)
    if head.owner is not None:
        raise ClaimHeld(
            f"request {claim.request_id!r} is being worked on by {head.owner}",
            session_id=head.session_id,
            hint=f"If that process died: release_claim({head.epoch}), or `resume` the session",
        )
    return Plan((Resumed(),)) if in_flight(head.state) else checked(result_of(head))


def checked(result: RunResult) -> RunResult:
    """The result, or RunFailed for a failed one."""
    if result.status is RunStatus.failed and result.failure is not None:
        raise RunFailed.of(result, result.failure)
    return result


def _other_content(head: Head, claim: Claim) -> RequestConflict:
    return RequestConflict(
        f"request {claim.request_id!r} came before with other content",
        session_id=head.session_id,
        hint="Use a new request_id for a new request",
    )


def has_messages(head: Head) -> bool:
    return bool(head.index or head.segments or head.inline)


def user_message(text: str) -> Message:
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("the message is empty", hint="Say something")
    return Message.user(clean(text))


def _response_outcome(question: Interrupt, response: Any) -> Outcome:
    """A tool's question: the response is the call's result, the tool is not run again."""
    text = response if isinstance(response, str) else compact_json(response)
    return Outcome.of(ToolOutput.of_text(clean(text)))


def _refuse_other_owner(head: Head) -> None:
    if head.owner is not None:
        raise SessionBusy(
            f"session {head.session_id!r} is being run by {head.owner}",
            session_id=head.session_id,
            owner=head.owner,
            since=head.since,
            hint="Wait for it; if that process died, `resume` takes the session over",
        )


def _only_followup(head: Head) -> Interrupt:
    question = open_interrupt(head)
    if question is None or question.kind != FOLLOWUP:
        raise _pending(head)
    return question


def _pending(head: Head) -> InterruptPending:
    question = open_interrupt(head)
    kind, id = (question.kind, question.id) if question else ("unknown", "")
    return InterruptPending(
        f"session {head.session_id!r} waits for an answer ({kind})",
        session_id=head.session_id,
        interrupt_id=id,
        hint=f"Answer it: answer({id!r}, ...)",
    )
