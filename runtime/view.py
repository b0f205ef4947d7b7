"""What a head tells outsiders: the result of its last run, and the session's info. Pure."""

from __future__ import annotations

from greenroom.runtime.calls import Interrupt
from greenroom.runtime.machine import status_of
from greenroom.runtime.results import Failure, PendingCall, RunResult, RunStatus, SessionInfo
from greenroom.runtime.state import Fail, WaitingForUser
from greenroom.runtime.storage.head import Head


def open_interrupt(head: Head) -> Interrupt | None:
    """What the session waits for, with the waiting call's key as its id."""
    if not isinstance(head.state, WaitingForUser) or head.batch is None:
        return None
    question = head.batch.call(head.state.interrupt_id).question
    return None if question is None else question.but(id=head.state.interrupt_id)


def pending_calls(head: Head) -> tuple[PendingCall, ...]:
    """The calls of the open batch that have no outcome."""
    calls = head.batch.open_calls if head.batch is not None else ()
    return tuple(PendingCall(key=call.key, name=call.name, started=call.started is not None) for call in calls)


def result_of(head: Head) -> RunResult:
    """How the run that ended in this head went; raises IllegalTransition when none has."""
    failure = head.state.failure if isinstance(head.state, Fail) else None
    return _result(head, status_of(head.state), failure)


def broken_off_result(head: Head, failure: Failure) -> RunResult:
    """How far the run had come that this failure broke off: the head is at no stop."""
    return _result(head, RunStatus.failed, failure)


def _result(head: Head, status: RunStatus, failure: Failure | None) -> RunResult:
    agent = head.state.agent
    return RunResult(
        session_id=head.session_id,
        status=status,
        text=agent.final_text,
        usage=agent.usage - head.usage_before,
        steps=agent.run_step,
        revision=head.revision,
        interrupt=open_interrupt(head),
        failure=failure,
        background_tasks=head.jobs,
        pending_calls=pending_calls(head),
    )


def info_of(head: Head) -> SessionInfo:
    return SessionInfo(
        session_id=head.session_id,
        state=head.state.name,
        waiting_for=open_interrupt(head),
        since=head.since,
        revision=head.revision,
        epoch=head.epoch,
        owner=head.owner,
        parent=head.parent,
        children=head.children,
        usage=head.state.agent.usage,
        background_tasks=head.jobs,
    )
