"""What a step of the machine does to a record, in memory: state, open batch and transcript move together.

`machine.step` decides where the state goes; here is everything else that follows from that. Nothing is saved, nothing
waits: loop.py and session.py say when.
"""

from __future__ import annotations

from greenroom.runtime import machine
from greenroom.runtime.journal import CUT_REPLY_NOTE, Outcome, close_cancelled, close_unrun, results_message
from greenroom.runtime.limits import Limits
from greenroom.runtime.machine import CancelSeen, Effect, Event, Resumed, UserSaid
from greenroom.runtime.messages import Message, TextBlock
from greenroom.runtime.record import Record
from greenroom.runtime.state import Fail, Interrupted, Reasoning, ToolExecuting, WaitingForUser
from greenroom.runtime.verbs import Plan


def advance(record: Record, event: Event, limits: Limits) -> tuple[Effect, ...]:
    """Moves the state, closes what the new state leaves open, and answers what is to be done next."""
    state, effects = machine.step(record.head.state, event, limits)
    batch = record.head.batch
    if batch is not None and not isinstance(state, ToolExecuting | WaitingForUser):
        if isinstance(state, Interrupted):
            batch = close_cancelled(batch)
        elif isinstance(state, Fail):
            batch = close_unrun(batch, state.failure.message)
        record.append(results_message(batch), batch=None)
        if record.head.notice:
            record.append(Message.user(record.head.notice), notice="")
    if isinstance(event, CancelSeen) and event.text:
        said = (TextBlock(text=event.text),)
        record.append(Message(role="assistant", content=said, stop="cancelled", stop_kind="other"))
    if isinstance(event, Resumed) and isinstance(state, Reasoning) and _ends_cut_short(record.messages):
        record.append(Message.user(CUT_REPLY_NOTE))
    record.update(state=state)
    return effects


def apply_plan(record: Record, plan: Plan, limits: Limits) -> tuple[Effect, ...]:
    """The plan's change: the answer into the journal, the message into the transcript, the state moved."""
    if plan.answer is not None or plan.approved:
        _consume(record, plan.answer)
    effects: tuple[Effect, ...] = ()
    for event in plan.events:
        effects = advance(record, event, limits)
        if isinstance(event, UserSaid) and plan.message is not None:
            record.append(plan.message)
            record.update(usage_before=record.head.state.agent.usage)
    return effects


def _consume(record: Record, answer: Outcome | None) -> None:
    """The open question has its answer, None: the call may run; that counts as a revision of its own."""
    state, batch = record.head.state, record.head.batch
    assert isinstance(state, WaitingForUser), "only a waiting session is answered"
    assert batch is not None, "a waiting session has an open batch"
    call = batch.call(state.interrupt_id)
    answered = call.but(verdict="allow", question=None) if answer is None else call.but(outcome=answer)
    record.update(batch=batch.put(answered), revision=record.head.revision + 1)


def _ends_cut_short(messages: list[Message]) -> bool:
    """Whether the last word is an assistant's that was cut off; one that its provider paused goes on as it is."""
    return bool(messages) and messages[-1].role == "assistant" and messages[-1].stop_kind != "pause"
